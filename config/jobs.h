// SPDX-License-Identifier: Apache-2.0
/* The "jobs" object: settings of one job, and of one task. */
#ifndef CONFIG_JOBS_H
#define CONFIG_JOBS_H

#include <stddef.h>

#include <tensorlane/status.h>

#include "config/arena.h"
#include "config/config.h"
#include "config/json_doc.h"
#include "config/settings_layer.h"

/* Replaces, in layers [count], those of the tasks that {"ps": {SETTINGS, "tasks": {"0": {SETTINGS}}}} says something
 * about. On entry all are `top`. When the document collects errors, a job or task that is missing from `tasks` because
 * its entry in `cluster` is wrong is not reported again; its settings are checked on top of `top`.
 * Errors: TL_INVALID_ARGUMENT: a job or task that is not in the cluster, a wrong setting. TL_UNIMPLEMENTED: this
 * version lacks it. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_jobs_read(const struct tl_json_value *jobs, const struct tl_json_value *cluster,
                            struct tl_config_task *tasks, size_t count, const char *folder, struct tl_arena *arena,
                            const struct tl_settings_layer *top, const struct tl_settings_layer **layers,
                            struct tl_error *ret_error) TL_MUST_USE;

#endif
