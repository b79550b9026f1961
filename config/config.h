// SPDX-License-Identifier: Apache-2.0
/*
 * The cluster's configuration: one JSON file, or TF_CONFIG, becomes one plain struct.
 *
 * A setting is looked up in this order, later ones win: default, the environment (tl_config_apply_environment), top
 * level of the file, the job's entry under "jobs", the task's entry under "jobs"/JOB/"tasks". Everything is checked
 * when the file is read; an error names file, line, column, JSON path, what is wrong, and the nearest valid name where
 * a name is wrong. docs/config.md is the manual, config/schema.json the same for machines.
 */
#ifndef CONFIG_CONFIG_H
#define CONFIG_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "config/settings.h"

struct tl_config_task {
    const char *job;
    uint32_t index;
    const char *name;    /* "/job:ps/task:0" */
    const char *address; /* what peers dial: "host:port", "[v6]:port"; NULL: it cannot be dialled (an evaluator) */
    struct tl_settings settings;
};

/* A whole cluster. */
struct tl_config {
    const char *source;           /* file name or "TF_CONFIG", for messages */
    struct tl_config_task *tasks; /* [task_count], sorted by job name, then index */
    size_t task_count;
    const struct tl_config_task *self;  /* TF_CONFIG's own task; an evaluator need not be among tasks. NULL otherwise */
    struct tl_settings client_settings; /* for a process that is no task: those of the top level */
    struct tl_error client_error;       /* code TL_OK, or how these contradict each other, though no task's do */
    void *memory;                       /* private */
};

/* Reads a file ("-": standard input). Errors: TL_NOT_FOUND, TL_PERMISSION_DENIED: the file. TL_INVALID_ARGUMENT: its
 * contents, "FILE:LINE:COLUMN: PATH: what is wrong; remedy". TL_UNIMPLEMENTED: a protocol or another setting that
 * this version does not build, with the list of what it does. TL_RESOURCE_EXHAUSTED: no memory. Ownership: *ret_config
 * until tl_config_destroy. */
enum tl_status tl_config_read(const char *path, struct tl_config **ret_config, struct tl_error *ret_error) TL_MUST_USE;

/* The same from text; `source` stands for the file name in messages, `folder` (NULL: the current one) is where relative
 * paths start. */
enum tl_status tl_config_parse(const char *text, size_t len_bytes, const char *source, const char *folder,
                               struct tl_config **ret_config, struct tl_error *ret_error) TL_MUST_USE;

/* The same for a worker that belongs to no cluster: a file, or a text, that has settings only.
 * Errors: as above; TL_INVALID_ARGUMENT: there is "cluster" or "jobs". */
enum tl_status tl_config_read_settings(const char *path, struct tl_config **ret_config,
                                       struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_config_parse_settings(const char *text, size_t len_bytes, const char *source,
                                        struct tl_config **ret_config, struct tl_error *ret_error) TL_MUST_USE;

/* The environment variable TF_CONFIG; NULL when it is not set, or empty. */
const char *tl_config_tf_text(void);

/* From the text of TF_CONFIG, as TensorFlow reads it: unknown extra keys are ignored, "task" becomes self, an
 * "evaluator" need not be in the cluster. */
enum tl_status tl_config_parse_tf(const char *text, size_t len_bytes, struct tl_config **ret_config,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* TF_CONFIG text rewritten as our JSON, indented. Ownership: free(*ret_json). */
enum tl_status tl_config_tf_to_json(const char *text, size_t len_bytes, char **ret_json,
                                    struct tl_error *ret_error) TL_MUST_USE;

void tl_config_destroy(struct tl_config *config); /* NULL is accepted */

/* More errors than these are not collected. */
#define TL_CONFIG_MAX_ERRORS 100

struct tl_config_error {
    size_t offset; /* where in the text the place is that the message names, in bytes */
    struct tl_error error;
};

/* The errors of one configuration, in the order of the text. */
struct tl_config_errors {
    struct tl_config_error items[TL_CONFIG_MAX_ERRORS];
    size_t count;
    bool is_full; /* the configuration may have more errors than the array holds */
};

/* Reads a file as tl_config_read does, but reads on behind an error, so that all errors are found at once. What only
 * follows from another error is not reported. The error of a file that cannot be read, or whose text is not JSON, is in
 * *ret_error alone, and errors->count is 0; otherwise *ret_error is the first of *ret_errors. */
enum tl_status tl_config_read_all_errors(const char *path, struct tl_config **ret_config,
                                         struct tl_config_errors *ret_errors, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_config_parse_all_errors(const char *text, size_t len_bytes, const char *source, const char *folder,
                                          struct tl_config **ret_config, struct tl_config_errors *ret_errors,
                                          struct tl_error *ret_error) TL_MUST_USE;

/* The variables of a process. */
struct tl_config_environment {
    const char *const *variables;                     /* "NAME=VALUE", ended by NULL, as environ is */
    void (*warn)(void *context, const char *message); /* NULL: warnings are dropped */
    void *context;
};

/* Gives settings that the configuration leaves at their defaults the values of TensorFlow's variables RDMA_*, in both
 * the documented and the implemented spelling; docs/config.md has the table. An empty variable counts as none. Warns of
 * every RDMA_* that is none of them, with the nearest. Nothing has changed after an error.
 * Errors: TL_INVALID_ARGUMENT: a value out of range, or two spellings that contradict each other; the message names the
 * variable. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_config_apply_environment(struct tl_config *config, const struct tl_config_environment *environment,
                                           struct tl_error *ret_error) TL_MUST_USE;

/* The task with this job and index, or this name ("/job:ps/task:0" or "ps:0"). Errors: TL_NOT_FOUND: naming the
 * nearest. */
enum tl_status tl_config_find_task(const struct tl_config *config, const char *job, uint32_t index,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_config_find_name(const struct tl_config *config, const char *name,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error) TL_MUST_USE;

/* Splits "/job:ps/task:0" or "ps:0". False: it is neither. */
#define TL_CONFIG_JOB_BYTES 320
bool tl_config_split_name(const char *name, char ret_job[TL_CONFIG_JOB_BYTES], uint32_t *ret_index);

/* One effective value and where it came from, as `tensorlane config show` prints it. */
struct tl_config_value {
    const char *path;   /* "limits.chunk" */
    const char *value;  /* as JSON: "\"1MiB\"", "65536", "true", "[...]" */
    const char *origin; /* "default", "environment (RDMA_TIMEOUT)", or "FILE:LINE (jobs.ps.limits.chunk)" */
};

/* All values of a task of this configuration, or of its self, or (NULL) of a process that is no task, in the order of
 * struct tl_settings; returns how many there are and fills up to capacity. The strings live as long as the
 * configuration. */
size_t tl_config_values(const struct tl_config *config, const struct tl_config_task *task,
                        struct tl_config_value *ret_values, size_t capacity);

/* Splits "host:port" or "[v6]:port". host_capacity of 256 suffices for every valid one. Errors: TL_INVALID_ARGUMENT: no
 * host, no port, port not in 0..65535 (0 only for listening), a v6 address without brackets, host longer than 255. */
enum tl_status tl_address_split(const char *address, char *ret_host, size_t host_capacity, uint16_t *ret_port,
                                struct tl_error *ret_error) TL_MUST_USE;

#endif
