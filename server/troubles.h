// SPDX-License-Identifier: Apache-2.0
/*
 * What is wrong with this worker itself, as far as it knows: descriptors, registered memory, files that it has
 * published, paths that keep breaking, GPUs that its process has lost. Identify reports it.
 *
 * A thread looks at the files, the memory and the descriptors once a second, because a file system may keep it waiting;
 * what it finds of files is also logged, once for each. Paths, devices, and whether a descriptor can be had, are looked
 * at when Identify asks.
 */
#ifndef SERVER_TROUBLES_H
#define SERVER_TROUBLES_H

#include "control/client.h"
#include "tensor/mapped_file.h"

struct tl_worker;
struct tl_troubles;

/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_troubles_create(struct tl_worker *worker, struct tl_troubles **ret_troubles,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* Watches a published file, of which it takes a reference of its own, until nothing else has one. Before the start.
 * NULL troubles: the worker is a client, and nothing is watched. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_troubles_watch_file(struct tl_troubles *troubles, struct tl_mapped_file *file,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Starts the thread. Errors: TL_RESOURCE_EXHAUSTED: the system gives no thread. */
enum tl_status tl_troubles_start(struct tl_troubles *troubles, struct tl_error *ret_error) TL_MUST_USE;

/* Ends the thread. NULL is accepted. Blocks: while it looks at a file. */
void tl_troubles_destroy(struct tl_troubles *troubles);

/* Adds what is wrong now to the description. Thread: the loop's owner. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_troubles_describe(const struct tl_worker *worker, struct tl_description *description,
                                    struct tl_error *ret_error) TL_MUST_USE;

#endif
