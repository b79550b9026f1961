// SPDX-License-Identifier: Apache-2.0
/* Which users' workers may exchange tensors within a host: "same", "any", or a list of names and numbers. */
#ifndef CONFIG_USER_LIST_H
#define CONFIG_USER_LIST_H

#include "config/arena.h"
#include "config/json_doc.h"

/* Reads the value of "users". *ret_users as in struct tl_local_settings. Errors: TL_INVALID_ARGUMENT: none of these, an
 * entry that no user can have, more than TL_LOCAL_MAX_USERS. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_user_list_read(const struct tl_json_value *value, struct tl_arena *arena, const char **ret_users,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* The same as JSON. NULL: no memory. */
const char *tl_user_list_format(const char *users, struct tl_arena *arena);

#endif
