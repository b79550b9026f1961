// SPDX-License-Identifier: Apache-2.0
/* The configuration of one `tensorlane serve`: the file, standard input or TF_CONFIG, with what the flags change. */
#ifndef SERVER_CLI_SERVE_CONFIG_H
#define SERVER_CLI_SERVE_CONFIG_H

#include <stdint.h>

#include <tensorlane/worker.h>

#include "config/config.h"
#include "server/cli/options.h"

struct tl_serve_flags {
    const char *config_path; /* NULL: TF_CONFIG */
    const char *job;         /* NULL: the task of TF_CONFIG */
    uint32_t task;           /* TL_TASK_NOT_GIVEN: the first one of the job */
    const char *listen;      /* NULL: as configured */
    struct tl_texts publish; /* files besides those of the configuration */
};

struct tl_serve_config {
    struct tl_config *config;          /* as it was written, for messages and settings */
    const struct tl_config_task *task; /* the task that this process is */
    char *json;                        /* what the worker is opened with; NULL: TF_CONFIG as it is */
};

/* Reads and checks the configuration, then writes what the flags say into the task's own entry: that is where a setting
 * has the last word. Errors: those of tl_config_read, tl_config_parse_tf and tl_task_config_find. TL_ALREADY_EXISTS:
 * two of the files hold a tensor of the same name. Those of tl_tensor_file_read for every file. Ownership:
 * tl_serve_config_fini, also after an error. */
enum tl_status tl_serve_config_read(const struct tl_serve_flags *flags, struct tl_serve_config *config,
                                    struct tl_error *ret_error) TL_MUST_USE;
void tl_serve_config_fini(struct tl_serve_config *config); /* a zeroed one is accepted */

#endif
