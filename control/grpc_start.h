// SPDX-License-Identifier: Apache-2.0
/* Starting gRPC in this process, and what the core of gRPC 1.51 needs for that. */
#ifndef CONTROL_GRPC_START_H
#define CONTROL_GRPC_START_H

#include <tensorlane/status.h>

/* Initialises gRPC for the life of the process; does nothing when that was done. Any thread. Errors:
 * TL_RESOURCE_EXHAUSTED: the system does not give the threads that gRPC needs. */
enum tl_status tl_grpc_start(struct tl_error *ret_error) TL_MUST_USE;

#endif
