// SPDX-License-Identifier: Apache-2.0
/*
 * Which caller may do what: the rules of "security.allow".
 *
 * Happy path: a service asks before it does anything; a rule allows the caller the action. Who has the certificate of
 * the worker itself may do everything. Failure modes: what no rule
 * allows is refused, counted, and logged at most once a minute for each caller.
 *
 * Thread: any.
 */
#ifndef SERVER_PEERS_PERMISSIONS_H
#define SERVER_PEERS_PERMISSIONS_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "config/config.h"
#include "tensor/transfer.h"

struct tl_permissions;

/* Ownership: config must outlive it; its tasks are the members. `self` is the worker's name, for messages.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_permissions_create(const struct tl_config *config, const struct tl_security_settings *settings,
                                     const char *self, struct tl_permissions **ret_permissions,
                                     struct tl_error *ret_error) TL_MUST_USE;
void tl_permissions_destroy(struct tl_permissions *permissions); /* NULL is accepted */

/* Whether the caller may do this. NULL: there are no certificates, and everybody may do everything. Errors:
 * TL_PERMISSION_DENIED: no; the message has the caller, the action, and those who may. */
enum tl_status tl_permissions_check(struct tl_permissions *permissions, const struct tl_identity *caller,
                                    enum tl_action action, struct tl_error *ret_error) TL_MUST_USE;

/* Whether a rule allows it, for a decision that is taken later: neither counted nor logged. NULL: everybody may. */
bool tl_permissions_allow(const struct tl_permissions *permissions, const struct tl_identity *caller,
                          enum tl_action action);

/* Number of refusals since create; 0 for NULL. */
uint64_t tl_permissions_refused(const struct tl_permissions *permissions);

#endif
