// SPDX-License-Identifier: Apache-2.0
/* Server reflection: one question, one answer. */
#ifndef CONTROL_REFLECTION_H
#define CONTROL_REFLECTION_H

#include "control/requests.h"

/* Answers one request of ServerReflectionInfo, of either version. What is asked for and does not exist is part of the
 * answer. Ownership: *ret_answer is the caller's.
 * Errors: as tl_reflection_request_read; TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_reflection_answer(grpc_byte_buffer *question, struct tl_wire_arena *arena,
                                    grpc_byte_buffer **ret_answer, struct tl_error *ret_error) TL_MUST_USE;

#endif
