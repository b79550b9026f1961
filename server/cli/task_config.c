// SPDX-License-Identifier: Apache-2.0
/* Reads the configuration of one task for commands that look at it without starting a worker. */
#include "server/cli/task_config.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "server/cli/output.h"

static void warn(void *context, const char *message)
{
    tl_output_error(context, "warning: %s", message);
}

enum tl_status tl_task_config_apply_environment(struct tl_config *config, const char *command,
                                                struct tl_error *ret_error)
{
    const struct tl_config_environment environment = {
        .variables = (const char *const *)environ,
        .warn = warn,
        .context = (void *)(uintptr_t)command,
    };
    return tl_config_apply_environment(config, &environment, ret_error);
}

static enum tl_status read_config(const struct tl_task_flags *flags, struct tl_config **ret_config,
                                  struct tl_error *ret_error)
{
    const char *text = tl_config_tf_text();
    if (flags->config_path) return tl_config_read(flags->config_path, ret_config, ret_error);
    if (text) return tl_config_parse_tf(text, strlen(text), ret_config, ret_error);
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "no configuration: give --config FILE or set the environment variable TF_CONFIG");
}

enum tl_status tl_task_config_find(const struct tl_config *config, const char *job, uint32_t task,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error)
{
    bool is_given = task != TL_TASK_NOT_GIVEN;
    if (job) return tl_config_find_task(config, job, is_given ? task : 0, ret_task, ret_error);
    if (!config->self)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "which task? --job and --task; %s has %zu task%s, such as %s", config->source,
                            config->task_count, config->task_count == 1 ? "" : "s", config->tasks[0].name);
    if (is_given)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "--task %" PRIu32 " of which job? --job; without both, %s",
                            task, config->self->name);
    *ret_task = config->self;
    return TL_OK;
}

enum tl_status tl_task_config_read(const struct tl_task_flags *flags, const char *command,
                                   struct tl_config **ret_config, const struct tl_config_task **ret_task,
                                   struct tl_error *ret_error)
{
    struct tl_config *config = NULL;
    enum tl_status status = read_config(flags, &config, ret_error);
    if (status == TL_OK) status = tl_task_config_apply_environment(config, command, ret_error);
    if (status == TL_OK) status = tl_task_config_find(config, flags->job, flags->task, ret_task, ret_error);
    if (status != TL_OK) {
        tl_config_destroy(config);
        return status;
    }
    *ret_config = config;
    return TL_OK;
}
