// SPDX-License-Identifier: Apache-2.0
/* `tensorlane config`: checks a configuration, shows what is effective for a task and where it was set, and makes one
 * of TF_CONFIG or of what a launcher says. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "config/address.h"
#include "config/config.h"
#include "server/cli/command.h"
#include "server/cli/config_from.h"
#include "server/cli/json_out.h"
#include "server/cli/local_host.h"
#include "server/cli/options.h"
#include "server/cli/output.h"
#include "server/cli/table.h"
#include "server/cli/task_config.h"
#include "server/transports/verbs_settings.h"

#define CONFIG_DESCRIPTION                                                                                             \
    "check     reads each FILE (- is standard input) and says what is wrong with it\n"                                 \
    "show      prints every setting of a task, and where its value comes from\n"                                       \
    "from-env  prints the environment variable TF_CONFIG as a configuration file\n"                                    \
    "from-slurm, from-kubernetes, from-hostfile\n"                                                                     \
    "          print a configuration file of the tasks of a running job"

struct show {
    struct tl_task_flags flags;
    bool is_json;
};

/* ------------------------------------------------------------------------------------------------------- check -- */

/* Whether a task requires RDMA, but has a protocol without it. */
static bool requires_rdma_in_vain(const struct tl_config *config)
{
    for (size_t i = 0; i < config->task_count; i++) {
        const struct tl_settings *settings = &config->tasks[i].settings;
        if (settings->rdma == TL_RDMA_REQUIRE && settings->protocol == TL_PROTOCOL_GRPC) return true;
    }
    return false;
}

/* Reports a file that a task cannot use. Returns whether that is an error. A worker may run as a user who may read more
 * than this one: what only this user may not read is a warning. */
static bool check_file(const struct tl_config *config, const struct tl_config_task *task, const char *what,
                       const char *path)
{
    if (!path || access(path, R_OK) == 0) return false;
    bool is_warning = errno == EACCES;
    tl_output_error("config", "%s%s: %s, which is to run on this machine, cannot %s %s%s: %s",
                    is_warning ? "warning: " : "", config->source, task->name, what, path,
                    is_warning ? " unless its user may read more than this one" : "", strerror(errno));
    return !is_warning;
}

/* Files that tasks of this machine publish, or prove their names with, and that are not there. Returns how many there
 * are. */
static size_t check_files_of_tasks(const struct tl_config *config)
{
    char host[256];
    uint16_t port;
    const char *reason;
    size_t count = 0;
    struct tl_local_hosts *hosts = tl_local_hosts_create();
    for (size_t i = 0; hosts && i < config->task_count; i++) {
        const struct tl_config_task *task = &config->tasks[i];
        const struct tl_security_settings *security = &task->settings.security;
        if (task->settings.publish_count == 0 && !security->ca) continue;
        if (tl_address_split(task->address, host, sizeof(host), &port, NULL) != TL_OK) continue;
        if (!tl_local_hosts_has(hosts, host, &reason)) continue;
        for (size_t j = 0; j < task->settings.publish_count; j++)
            count += check_file(config, task, "publish", task->settings.publish[j]);
        count += check_file(config, task, "read security.tls.ca", security->ca);
        count += check_file(config, task, "read security.tls.certificate", security->certificate);
        count += check_file(config, task, "read security.tls.key", security->key);
        count += check_file(config, task, "read security.tls.crl", security->crl);
    }
    tl_local_hosts_destroy(hosts);
    return count;
}

/* Warns of tasks of this machine whose partition key is beyond the table of the port that they would use. */
static void check_partition_keys(const struct tl_config *config)
{
    char host[256], own_host[TL_VERBS_HOST_BYTES];
    uint16_t port;
    const char *reason;
    struct tl_local_hosts *hosts = tl_local_hosts_create();
    for (size_t i = 0; hosts && i < config->task_count; i++) {
        const struct tl_config_task *task = &config->tasks[i];
        struct tl_verbs_options options;
        struct tl_verbs_candidate *candidates;
        size_t count;
        if (task->settings.verbs.pkey_index == 0 || tl_verbs_settings_refusal(&task->settings)) continue;
        if (tl_address_split(task->address, host, sizeof(host), &port, NULL) != TL_OK) continue;
        if (!tl_local_hosts_has(hosts, host, &reason)) continue;
        if (tl_verbs_settings_read(&task->settings, task->address, own_host, &options, NULL) != TL_OK) continue;
        if (tl_verbs_list(&options, &candidates, &count, NULL) != TL_OK) continue;
        if (count > 0 && strncmp(candidates[0].reason, TL_VERBS_NO_PKEY, strlen(TL_VERBS_NO_PKEY)) == 0)
            tl_output_error("config",
                            "warning: %s: %s, which is to run on this machine, cannot use %s port %" PRIu32 ": %s",
                            config->source, task->name, candidates[0].device, candidates[0].port, candidates[0].reason);
        free(candidates);
    }
    tl_local_hosts_destroy(hosts);
}

static bool has_host(const struct tl_config_task *task, const char *host)
{
    char own[256];
    uint16_t port;
    return task->address && tl_address_split(task->address, own, sizeof(own), &port, NULL) == TL_OK &&
           strcmp(own, host) == 0;
}

/* Where a task listens. False: it has no address. */
static bool find_listen(const struct tl_config_task *task, char *ret_host, size_t size_bytes, uint16_t *ret_port)
{
    const char *address = task->settings.listen ? task->settings.listen : task->address;
    return address && tl_address_split(address, ret_host, size_bytes, ret_port, NULL) == TL_OK && *ret_port != 0;
}

static bool is_any_address(const char *host)
{
    return strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0;
}

/* Warns of tasks of one host that would listen at the same place. Containers of one host may do so, each in a network
 * namespace of its own. */
static void check_listen(const struct tl_config *config)
{
    char host[256], listen[256], other_listen[256];
    uint16_t port, listen_port, other_port;
    for (size_t i = 1; i < config->task_count; i++) {
        const struct tl_config_task *task = &config->tasks[i];
        if (!find_listen(task, listen, sizeof(listen), &listen_port) || !task->address ||
            tl_address_split(task->address, host, sizeof(host), &port, NULL) != TL_OK)
            continue;
        for (size_t j = 0; j < i; j++) {
            const struct tl_config_task *other = &config->tasks[j];
            if (!has_host(other, host) || !find_listen(other, other_listen, sizeof(other_listen), &other_port) ||
                other_port != listen_port)
                continue;
            if (strcmp(other_listen, listen) != 0 && !is_any_address(listen) && !is_any_address(other_listen)) continue;
            tl_output_error("config",
                            "warning: %s: %s and %s are on one host and both listen on port %" PRIu16 "; unless each "
                            "has a network namespace of its own, set \"listen\" for each, or leave it out",
                            config->source, other->name, task->name, listen_port);
            break;
        }
    }
}

/* Reads a configuration and prints all its errors. Returns the configuration, which the caller destroys, or NULL. */
static struct tl_config *read_and_report(const char *path)
{
    struct tl_config *config = NULL;
    struct tl_error error;
    struct tl_config_errors *errors = calloc(1, sizeof(*errors));
    if (!errors) {
        tl_output_error("config", "no memory for the errors of %s", path);
        return NULL;
    }
    enum tl_status status = tl_config_read_all_errors(path, &config, errors, &error);
    if (status != TL_OK && errors->count == 0) tl_output_error("config", "%s", error.message);
    for (size_t i = 0; i < errors->count; i++)
        tl_output_error("config", "%s", errors->items[i].error.message);
    if (errors->is_full) tl_output_error("config", "%s: more errors than these %zu", path, errors->count);
    free(errors);
    return config;
}

static int check_files(const struct tl_options *options, int count, char **paths)
{
    int code = TL_EXIT_OK;
    if (count == 0) return tl_options_refuse(options, "which file?");
    for (int i = 0; i < count; i++) {
        struct tl_config *config = read_and_report(paths[i]);
        if (!config) {
            code = TL_EXIT_FAILED;
            continue;
        }
        check_listen(config);
        check_partition_keys(config);
        if (check_files_of_tasks(config) > 0) {
            code = TL_EXIT_FAILED;
            tl_config_destroy(config);
            continue;
        }
        tl_output_put_escaped(stdout, strcmp(paths[i], "-") == 0 ? "standard input" : paths[i]);
        printf(": ok (%zu task%s)%s\n", config->task_count, config->task_count == 1 ? "" : "s",
               requires_rdma_in_vain(config) ? "; rdma is \"require\", which has no effect with protocol \"grpc\""
                                             : "");
        tl_config_destroy(config);
    }
    return tl_output_finish("config", code);
}

/* -------------------------------------------------------------------------------------------------------- show -- */

static bool print_values_json(const struct tl_config_task *task, const struct tl_config_value *values, size_t count)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "name", task->name);
    tl_json_out_put_text(root, "address", task->address ? task->address : "");
    struct tl_json_out *settings = tl_json_out_put_object(root, "settings");
    for (size_t i = 0; i < count; i++) {
        struct tl_json_out *setting = tl_json_out_put_object(settings, values[i].path);
        tl_json_out_put_json(setting, "value", values[i].value);
        tl_json_out_put_text(setting, "origin", values[i].origin);
    }
    return tl_json_out_print(root, false);
}

static bool print_values_table(const struct tl_config_task *task, const struct tl_config_value *values, size_t count)
{
    static const struct tl_column columns[] = {
        {.title = "SETTING"}, {.title = "VALUE", .wraps = true}, {.title = "FROM", .wraps = true}};
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < count; i++) {
        tl_table_add(table, "%s", values[i].path);
        tl_table_add(table, "%s", values[i].value);
        tl_table_add(table, "%s", values[i].origin);
    }
    tl_output_put_escaped(stdout, task->name);
    if (task->address) {
        printf(" at ");
        tl_output_put_escaped(stdout, task->address);
    }
    putchar('\n');
    bool is_printed = tl_table_print(table, stdout);
    tl_table_destroy(table);
    return is_printed;
}

static bool print_values(const struct show *show, const struct tl_config *config, const struct tl_config_task *task)
{
    size_t count = tl_config_values(config, task, NULL, 0);
    struct tl_config_value *values = calloc(count + 1, sizeof(*values));
    if (!values) return false;
    tl_config_values(config, task, values, count);
    bool is_printed = show->is_json ? print_values_json(task, values, count) : print_values_table(task, values, count);
    free(values);
    return is_printed;
}

static int show_task(const struct show *show, const struct tl_options *options)
{
    struct tl_config *config = NULL;
    const struct tl_config_task *task = NULL;
    struct tl_error error;
    int code = TL_EXIT_OK;
    if (!show->flags.config_path && !tl_config_tf_text())
        return tl_options_refuse(options, "which configuration? --config FILE");
    if (tl_task_config_read(&show->flags, "config", &config, &task, &error) != TL_OK) {
        tl_output_error("config", "%s", error.message);
        code = TL_EXIT_FAILED;
    } else if (!print_values(show, config, task)) {
        tl_output_error("config", "no memory for the output");
        code = TL_EXIT_FAILED;
    }
    tl_config_destroy(config);
    return tl_output_finish("config", code);
}

/* ---------------------------------------------------------------------------------------------------- from-env -- */

static int print_from_env(void)
{
    const char *text = tl_config_tf_text();
    char *json = NULL;
    struct tl_error error;
    if (!text) {
        tl_output_error("config", "the environment has no TF_CONFIG");
        return TL_EXIT_FAILED;
    }
    if (tl_config_tf_to_json(text, strlen(text), &json, &error) != TL_OK) {
        tl_output_error("config", "%s", error.message);
        return TL_EXIT_FAILED;
    }
    size_t len = strlen(json);
    fwrite(json, 1, len, stdout);
    if (len == 0 || json[len - 1] != '\n') putchar('\n');
    free(json);
    return tl_output_finish("config", TL_EXIT_OK);
}

/* ---------------------------------------------------------------------------------------------------- dispatch -- */

#define CONFIG_USAGE                                                                                                   \
    "check FILE...\n"                                                                                                  \
    "show --config FILE --job JOB --task N [--json]\n"                                                                 \
    "from-env\n"                                                                                                       \
    "from-slurm [--tasks JOB[=N]]... [--per-host N]\n"                                                                 \
    "from-kubernetes --tasks JOB=N... [--service NAME | --hosts PATTERN]\n"                                            \
    "from-hostfile FILE [--tasks JOB[=N]]... [--per-host N]"

static const char *const actions[] = {"check", "show", "from-env", "from-slurm", "from-kubernetes", "from-hostfile"};

static int refuse_action(const struct tl_options *options, const char *action)
{
    const char *nearest = tl_text_nearest(action, actions, TL_ARRAY_COUNT(actions));
    if (nearest) return tl_options_refuse(options, "%s: no such action; did you mean %s?", action, nearest);
    return tl_options_refuse(options,
                             "%s: no such action; there are check, show, from-env, from-slurm, from-kubernetes and "
                             "from-hostfile",
                             action);
}

static int run_from(const struct tl_config_from_flags *flags, const struct tl_options *options, const char *action,
                    int count, char **arguments)
{
    bool is_hostfile = strcmp(action, "from-hostfile") == 0;
    if (is_hostfile && count == 0) return tl_options_refuse(options, "which file? from-hostfile FILE");
    if (count > is_hostfile) return tl_options_refuse(options, "unexpected argument %s", arguments[is_hostfile]);
    if (flags->port == 0 || flags->port > UINT16_MAX) return tl_options_refuse(options, "--port: must be 1 to 65535");
    bool is_kubernetes = strcmp(action, "from-kubernetes") == 0;
    if (!is_kubernetes && (flags->service || flags->hosts))
        return tl_options_refuse(options, "%s is for from-kubernetes alone", flags->service ? "--service" : "--hosts");
    if (is_kubernetes && flags->per_host > 0)
        return tl_options_refuse(options, "--per-host is not for from-kubernetes: --tasks says how many there are");
    if (flags->service && flags->hosts) return tl_options_refuse(options, "--service or --hosts, not both");
    if (is_hostfile) return tl_config_from_hostfile(flags, arguments[0]);
    return is_kubernetes ? tl_config_from_kubernetes(flags) : tl_config_from_slurm(flags);
}

static int run(const struct show *show, const struct tl_config_from_flags *from, const struct tl_options *options,
               int count, char **arguments)
{
    if (count == 0)
        return tl_options_refuse(options, "check, show, from-env, from-slurm, from-kubernetes or from-hostfile?");
    const char *action = arguments[0];
    bool is_known = false;
    for (size_t i = 0; i < TL_ARRAY_COUNT(actions); i++)
        is_known = is_known || strcmp(action, actions[i]) == 0;
    if (!is_known) return refuse_action(options, action);
    if (strcmp(action, "check") == 0) return check_files(options, count - 1, arguments + 1);
    bool is_show = strcmp(action, "show") == 0;
    if (!is_show && strcmp(action, "from-env") != 0) return run_from(from, options, action, count - 1, arguments + 1);
    if (count > 1) return tl_options_refuse(options, "unexpected argument %s", arguments[1]);
    return is_show ? show_task(show, options) : print_from_env();
}

int tl_command_config(int argc, char **argv)
{
    struct show show = {.flags = TL_TASK_FLAGS_INIT};
    struct tl_config_from_flags from = {.port = 4000};
    int first;
    const struct tl_option items[] = {
        {"config", 'c', TL_OPTION_TEXT, &show.flags.config_path, "FILE", "show: the file; without it TF_CONFIG"},
        {"job", 'j', TL_OPTION_TEXT, &show.flags.job, "JOB", "show: of which job"},
        {"task", 't', TL_OPTION_U32, &show.flags.task, "N", "show: which task of it (0)"},
        {"json", 0, TL_OPTION_FLAG, &show.is_json, NULL, "show: print one JSON object"},
        {"tasks", 0, TL_OPTION_TEXTS, &from.tasks, "JOB[=N]",
         "from: a job and how many tasks it has (worker); may be repeated"},
        {"per-host", 0, TL_OPTION_U32, &from.per_host, "N", "from: tasks of each host, whatever the launcher says"},
        {"port", 0, TL_OPTION_U32, &from.port, "PORT",
         "from: of the first task of a host, the next has the next (4000)"},
        {"service", 0, TL_OPTION_TEXT, &from.service, "NAME", "from-kubernetes: the headless Service of the pods"},
        {"hosts", 0, TL_OPTION_TEXT, &from.hosts, "PATTERN",
         "from-kubernetes: their names, with {job}, {index}, {group}"},
        {"settings", 0, TL_OPTION_TEXT, &from.settings, "FILE", "from: settings to keep; its cluster is replaced"},
        {"tls", 0, TL_OPTION_TEXT, &from.tls, "FOLDER", "from: has ca.pem, and NAME.pem and NAME.key of each task"},
    };
    const struct tl_options options = {
        .command = "config",
        .usage = CONFIG_USAGE,
        .description = CONFIG_DESCRIPTION,
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code < 0) code = run(&show, &from, &options, argc - first, argv + first);
    tl_texts_fini(&from.tasks);
    return code;
}
