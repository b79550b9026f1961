// SPDX-License-Identifier: Apache-2.0
/* How long a worker pauses between attempts that fail (tl_back_off_ns in base/back_off.h). */
#ifndef SERVER_BACK_OFF_H
#define SERVER_BACK_OFF_H

#include "base/back_off.h"
#include "base/clock.h"

/* A link or a data connection that ends before it is this old counts as one that failed: to set it up again and again
 * costs both sides more than it carries. */
#define TL_SETTLED_NS (5 * TL_NS_PER_SEC)

/* Opening a link to a peer. */
#define TL_LINK_FIRST_BACK_OFF_NS (20 * TL_NS_PER_MS)
#define TL_LINK_MAX_BACK_OFF_NS (1 * TL_NS_PER_SEC)

/* Setting up a data connection to a peer, which is the path of its tensors. */
#define TL_DATA_CONNECTION_FIRST_BACK_OFF_NS (100 * TL_NS_PER_MS)
#define TL_DATA_CONNECTION_MAX_BACK_OFF_NS (5 * TL_NS_PER_SEC)

/* Asking for a tensor again after the connection broke. */
#define TL_RECEIVE_FIRST_BACK_OFF_NS (10 * TL_NS_PER_MS)
#define TL_RECEIVE_MAX_BACK_OFF_NS (1 * TL_NS_PER_SEC)

#endif
