// SPDX-License-Identifier: Apache-2.0
/* RDMA cards as the devices that a transport can open. */
#ifndef SERVER_TRANSPORTS_TRANSPORT_VERBS_H
#define SERVER_TRANSPORTS_TRANSPORT_VERBS_H

#include "dataplane/verbs/verbs.h"
#include "server/transports/transport_choice.h"

/* Returns how many of these candidates can be used: they come first. */
size_t tl_transport_count_usable(const struct tl_verbs_candidate *candidates, size_t count);

/* Chooses among the devices that tl_verbs_list has given, as a worker does (tl_transport_choose), and closes the one
 * that works. *ret_order: which one it is. Errors: those of tl_transport_choose. Blocks: as tl_transport_choose
 * does. */
enum tl_status tl_transport_choose_verbs(const struct tl_verbs_options *options,
                                         const struct tl_verbs_candidate *candidates, size_t count,
                                         tl_transport_failed_fn *failed, void *context, unsigned *ret_order,
                                         struct tl_error *ret_error) TL_MUST_USE;

#endif
