// SPDX-License-Identifier: Apache-2.0
/* Finds CUDA at run time. */
#ifndef TENSOR_CUDA_LOAD_H
#define TENSOR_CUDA_LOAD_H

#include <tensorlane/status.h>

#include "tensor/cuda_interface.h"

/* Loads libcudart, unless the process has one already, and finds all functions that we use. What is loaded stays.
 * Errors: TL_FAILED_PRECONDITION: there is no library, it is too old, there is no NVIDIA driver, or the driver is too
 * old for it; TL_NOT_FOUND: there is no device; TL_INTERNAL: CUDA does not start. The message names what is missing.
 * Thread: one of our own, because a failed call leaves an error at its thread. */
enum tl_status tl_cuda_load(struct tl_cuda *ret_cuda, struct tl_error *ret_error) TL_MUST_USE;

/* Finds the functions for the direct access of RDMA cards; those that this CUDA lacks are NULL. Thread: as above. */
void tl_cuda_load_direct(const struct tl_cuda *cuda, struct tl_cuda_direct *ret_direct);
/* The same for memory that other processes can map. */
void tl_cuda_load_sharing(const struct tl_cuda *cuda, struct tl_cuda_sharing *ret_sharing);

#endif
