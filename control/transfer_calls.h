// SPDX-License-Identifier: Apache-2.0
/* The two methods of tensorlane.v1.Transfer that carry tensors of clients without a link. Each is a tl_accept_fn whose
 * context is the control object. */
#ifndef CONTROL_TRANSFER_CALLS_H
#define CONTROL_TRANSFER_CALLS_H

#include "control/stream.h"

void tl_receive_call_accept(void *control, struct tl_stream *stream);
void tl_publish_call_accept(void *control, struct tl_stream *stream);

#endif
