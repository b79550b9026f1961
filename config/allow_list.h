// SPDX-License-Identifier: Apache-2.0
/* "security.allow": rules that say which roles may do what. */
#ifndef CONFIG_ALLOW_LIST_H
#define CONFIG_ALLOW_LIST_H

#include <tensorlane/status.h>

#include "config/arena.h"
#include "config/config.h"
#include "config/json_doc.h"
#include "config/settings.h"

/* Reads the list into `allow` and `allow_count`. Errors: TL_INVALID_ARGUMENT: not such a list; the message names the
 * nearest word. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_allow_list_read(const struct tl_json_value *value, struct tl_arena *arena,
                                  struct tl_security_settings *settings, struct tl_error *ret_error) TL_MUST_USE;

/* The rules where the configuration has none: members read, list, push and see peers. */
void tl_allow_list_set_default(struct tl_security_settings *settings);

/* The rules as JSON. NULL: no memory. */
const char *tl_allow_list_format(const struct tl_security_settings *settings, struct tl_arena *arena);

/* Checks that the jobs and tasks that rules name are in the cluster. `doc` is what the rules were read from.
 * Errors: TL_INVALID_ARGUMENT: one is not; the message names the nearest. */
enum tl_status tl_allow_list_check_tasks(const struct tl_security_settings *settings, struct tl_json_doc *doc,
                                         struct tl_config_task *tasks, size_t task_count,
                                         struct tl_error *ret_error) TL_MUST_USE;

#endif
