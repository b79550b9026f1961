// SPDX-License-Identifier: Apache-2.0
/*
 * The configuration of a worker that is started from the command line.
 *
 * The text is read once, because it may come from a pipe, and parsed as it is, so that every complaint names its own
 * line and column. Only then flags are written into a copy. Files that are published are opened before the worker
 * listens, so that a client that can connect finds all of them.
 */
#include "server/cli/serve_config.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "server/cli/json_out.h"
#include "server/cli/task_config.h"
#include "server/cli/tensor_set.h"

#define MAX_CONFIG_BYTES (UINT64_C(64) << 20)

/* Reads all of a descriptor, NUL-terminated. */
static enum tl_status read_all(int fd, const char *name, char **ret_text, size_t *ret_len, struct tl_error *ret_error)
{
    size_t len = 0, capacity = 0;
    char *text = NULL;
    for (;;) {
        if (len + 1 >= capacity) {
            capacity = capacity ? 2 * capacity : 65536;
            char *larger = capacity <= MAX_CONFIG_BYTES ? realloc(text, capacity) : NULL;
            if (!larger) {
                free(text);
                return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: longer than memory or 64 MiB allow", name);
            }
            text = larger;
        }
        ssize_t count = read(fd, text + len, capacity - len - 1);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) {
            int error_number = errno;
            free(text);
            return tl_error_set_errno(ret_error, error_number, "cannot read %s", name);
        }
        if (count == 0) break;
        len += (size_t)count;
    }
    text[len] = '\0';
    *ret_text = text;
    *ret_len = len;
    return TL_OK;
}

static enum tl_status read_stdin(struct tl_serve_config *config, char **ret_text, size_t *ret_len,
                                 struct tl_error *ret_error)
{
    enum tl_status status = read_all(STDIN_FILENO, "standard input", ret_text, ret_len, ret_error);
    if (status != TL_OK) return status;
    return tl_config_parse(*ret_text, *ret_len, "standard input", NULL, &config->config, ret_error);
}

static enum tl_status read_file(const char *path, struct tl_serve_config *config, char **ret_text, size_t *ret_len,
                                struct tl_error *ret_error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "%s: cannot open the configuration", path);
    enum tl_status status = read_all(fd, path, ret_text, ret_len, ret_error);
    close(fd);
    if (status != TL_OK) return status;
    char *copy = strdup(path); /* dirname changes it */
    if (!copy) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for its folder", path);
    const char *folder = strchr(path, '/') ? dirname(copy) : NULL;
    status = tl_config_parse(*ret_text, *ret_len, path, folder, &config->config, ret_error);
    free(copy);
    return status;
}

static enum tl_status read_environment(struct tl_serve_config *config, char **ret_text, size_t *ret_len,
                                       struct tl_error *ret_error)
{
    const char *text = tl_config_tf_text();
    if (!text)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "no configuration: give --config FILE or set the environment variable TF_CONFIG");
    enum tl_status status = tl_config_parse_tf(text, strlen(text), &config->config, ret_error);
    if (status == TL_OK) status = tl_config_tf_to_json(text, strlen(text), ret_text, ret_error);
    if (status == TL_OK) *ret_len = strlen(*ret_text);
    return status;
}

/* The worker gets its paths in a JSON text, which has to be UTF-8. path NULL: there is none. */
static enum tl_status check_path(const char *path, struct tl_error *ret_error)
{
    if (!path || tl_text_is_utf8(path, strlen(path))) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the path %s is not UTF-8; rename it", path);
}

static enum tl_status check_paths(const struct tl_serve_flags *flags, const struct tl_settings *settings,
                                  struct tl_error *ret_error)
{
    const struct tl_security_settings *security = &settings->security;
    const char *const others[] = {settings->local.socket_folder, security->ca, security->certificate, security->key,
                                  security->crl};
    enum tl_status status = TL_OK;
    for (size_t i = 0; status == TL_OK && i < settings->publish_count; i++)
        status = check_path(settings->publish[i], ret_error);
    for (size_t i = 0; status == TL_OK && i < flags->publish.count; i++)
        status = check_path(flags->publish.items[i], ret_error);
    for (size_t i = 0; status == TL_OK && i < TL_ARRAY_COUNT(others); i++)
        status = check_path(others[i], ret_error);
    return status;
}

/* Looks into every file that is going to be published. */
static enum tl_status check_files(const struct tl_serve_flags *flags, const struct tl_settings *settings,
                                  struct tl_error *ret_error)
{
    struct tl_tensor_set set = {0};
    size_t count = 0;
    const char **paths = calloc(settings->publish_count + flags->publish.count + 1, sizeof(*paths));
    if (!paths) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a list of files");
    for (size_t i = 0; i < settings->publish_count; i++)
        paths[count++] = settings->publish[i];
    for (size_t i = 0; i < flags->publish.count; i++)
        paths[count++] = flags->publish.items[i];
    enum tl_status status = tl_tensor_set_read(&set, paths, count, "", ret_error);
    tl_tensor_set_fini(&set);
    free(paths);
    return status;
}

static void put_security_files(struct tl_json_out *task, const struct tl_security_settings *security)
{
    if (!security->ca) return;
    struct tl_json_out *tls = tl_json_out_put_object(tl_json_out_put_object(task, "security"), "tls");
    tl_json_out_put_text(tls, "ca", security->ca);
    tl_json_out_put_text(tls, "certificate", security->certificate);
    tl_json_out_put_text(tls, "key", security->key);
    if (security->crl) tl_json_out_put_text(tls, "crl", security->crl);
}

/* Writes the flags into the task's own entry, and the paths that start in the folder of the file, which the text alone
 * does not contain. */
static enum tl_status apply_flags(const struct tl_serve_flags *flags, struct tl_serve_config *config, const char *text,
                                  size_t len, struct tl_error *ret_error)
{
    const struct tl_settings *settings = &config->task->settings;
    char index[16];
    snprintf(index, sizeof(index), "%" PRIu32, config->task->index);
    struct tl_json_out *root = tl_json_out_parse(text, len);
    struct tl_json_out *job = tl_json_out_put_object(tl_json_out_put_object(root, "jobs"), config->task->job);
    struct tl_json_out *task = tl_json_out_put_object(tl_json_out_put_object(job, "tasks"), index);
    if (flags->listen) tl_json_out_put_text(task, "listen", flags->listen);
    if (settings->publish_count + flags->publish.count > 0) {
        struct tl_json_out *publish = tl_json_out_put_new_array(task, "publish");
        for (size_t i = 0; i < settings->publish_count; i++)
            tl_json_out_append_text(publish, settings->publish[i]);
        for (size_t i = 0; i < flags->publish.count; i++)
            tl_json_out_append_text(publish, flags->publish.items[i]);
    }
    if (settings->local.socket_folder)
        tl_json_out_put_text(tl_json_out_put_object(task, "local"), "socket_folder", settings->local.socket_folder);
    put_security_files(task, &settings->security);
    config->json = tl_json_out_text(root, false);
    if (!config->json)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for a copy of it", config->config->source);
    return TL_OK;
}

enum tl_status tl_serve_config_read(const struct tl_serve_flags *flags, struct tl_serve_config *config,
                                    struct tl_error *ret_error)
{
    char *text = NULL;
    size_t len = 0;
    enum tl_status status;
    if (!flags->config_path) {
        status = read_environment(config, &text, &len, ret_error);
    } else if (strcmp(flags->config_path, "-") == 0) {
        status = read_stdin(config, &text, &len, ret_error);
    } else {
        status = read_file(flags->config_path, config, &text, &len, ret_error);
    }
    if (status == TL_OK)
        status = tl_task_config_find(config->config, flags->job, flags->task, &config->task, ret_error);
    if (status == TL_OK) status = check_paths(flags, &config->task->settings, ret_error);
    if (status == TL_OK) status = check_files(flags, &config->task->settings, ret_error);
    bool is_unchanged = !flags->config_path && !flags->listen && flags->publish.count == 0;
    if (status == TL_OK && !is_unchanged) status = apply_flags(flags, config, text, len, ret_error);
    free(text);
    return status;
}

void tl_serve_config_fini(struct tl_serve_config *config)
{
    tl_config_destroy(config->config);
    free(config->json);
    *config = (struct tl_serve_config){0};
}
