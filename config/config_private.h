// SPDX-License-Identifier: Apache-2.0
/* What config->memory points to, and how the two sources of a configuration build one. */
#ifndef CONFIG_CONFIG_PRIVATE_H
#define CONFIG_CONFIG_PRIVATE_H

#include <stddef.h>

#include <tensorlane/status.h>

#include "config/arena.h"
#include "config/config.h"
#include "config/json_doc.h"
#include "config/security.h"
#include "config/settings_layer.h"

struct tl_config_private {
    struct tl_arena *arena;                  /* holds everything, this too */
    const struct tl_settings_layer **layers; /* [task_count]: where the settings of each task come from */
    const char **addresses;                  /* [task_count]: the addresses as JSON */
    struct tl_security_files *files;         /* [task_count + 1]: those of each task, and of a process that is none */
    const struct tl_settings_layer *top; /* for processes that are no tasks: a client peer, and an evaluator as self */
    bool is_alone;                       /* there is neither "cluster" nor "jobs" */
};

/* Where a configuration is read from. */
struct tl_config_source {
    const char *name;   /* for messages */
    const char *folder; /* where relative paths start; NULL: the current one */
    const char *text;
    size_t len_bytes;
    bool is_alone; /* as in tl_config_private */
};

/* Errors: as tl_config_parse. ret_errors NULL: only the first one is wanted. */
enum tl_status tl_config_parse_source(const struct tl_config_source *source, struct tl_config **ret_config,
                                      struct tl_config_errors *ret_errors, struct tl_error *ret_error) TL_MUST_USE;

/* A configuration without tasks. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_config_create(const char *source, struct tl_config **ret_config,
                                struct tl_error *ret_error) TL_MUST_USE;

static inline struct tl_config_private *tl_config_private(const struct tl_config *config)
{
    return config->memory;
}

/* Reads the tasks from a "cluster" object; all of them get the layer `top`. Errors: as tl_cluster_read. */
enum tl_status tl_config_read_cluster(struct tl_config *config, const struct tl_json_value *cluster,
                                      bool allows_empty_jobs, const struct tl_settings_layer *top,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Checks the layers and fills the settings of all tasks, and of client peers, from them. Errors: as tl_settings_check.
 */
enum tl_status tl_config_apply_layers(struct tl_config *config, struct tl_json_doc *doc,
                                      struct tl_error *ret_error) TL_MUST_USE;

#endif
