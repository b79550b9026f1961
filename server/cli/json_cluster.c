// SPDX-License-Identifier: Apache-2.0
/*
 * The text of a configuration whose cluster comes from a launcher, and whose settings from a file.
 *
 * Relative paths in the settings start in the folder of their file, and those of the configuration in the folder where
 * that is written to: so they are made absolute.
 */
#include <errno.h>
#include <jansson.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "server/cli/config_from.h"

/* Settings whose value is a path; "publish" is a list of paths. */
static const char *const path_settings[] = {"socket_folder", "ca", "certificate", "key", "crl"};

/* Returns the path, joined with the folder where it is relative; "" stays so. NULL: no memory. */
static json_t *absolute(const char *folder, json_t *path)
{
    const char *text = json_string_value(path);
    if (!text || text[0] == '/' || text[0] == '\0') return json_incref(path);
    return json_sprintf("%s/%s", folder, text);
}

static bool is_path_setting(const char *key)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(path_settings); i++)
        if (strcmp(path_settings[i], key) == 0) return true;
    return false;
}

/* Makes the paths in an object of settings absolute. Objects lie at most as deep as jansson reads them. */
static bool resolve(json_t *object, const char *folder)
{
    const char *key;
    json_t *value, *entry;
    void *next;
    size_t i;
    bool is_done = true;
    json_object_foreach_safe(object, next, key, value)
    {
        if (json_is_object(value)) {
            is_done = resolve(value, folder) && is_done;
        } else if (is_path_setting(key)) {
            is_done = json_object_set_new(object, key, absolute(folder, value)) == 0 && is_done;
        } else if (strcmp(key, "publish") == 0) {
            json_array_foreach(value, i, entry)
            {
                is_done = json_array_set_new(value, i, absolute(folder, entry)) == 0 && is_done;
            }
        }
    }
    return is_done;
}

/* The absolute path of a folder, whether it exists or not. Ownership: free. NULL: errno says why. */
static char *absolute_folder(const char *path)
{
    char *here, *whole;
    if (path[0] == '/') return strdup(path);
    if (!(here = getcwd(NULL, 0))) return NULL;
    int length = asprintf(&whole, "%s/%s", here, path);
    free(here);
    return length < 0 ? NULL : whole;
}

static enum tl_status no_memory(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the configuration");
}

/* Reads the settings; an empty object where there are none. */
static enum tl_status read_settings(const char *path, json_t **ret_root, struct tl_error *ret_error)
{
    json_error_t error;
    if (!path) {
        *ret_root = json_object();
        return *ret_root ? TL_OK : no_memory(ret_error);
    }
    FILE *file = fopen(path, "re");
    if (!file) return tl_error_set_errno(ret_error, errno, "--settings %s", path);
    json_t *root = json_loadf(file, JSON_REJECT_DUPLICATES, &error);
    fclose(file);
    if (!json_is_object(root)) {
        json_decref(root);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "--settings %s: %s", path,
                            root ? "not a JSON object" : error.text);
    }
    char *copy = strdup(path); /* dirname changes it */
    char *folder = copy ? absolute_folder(dirname(copy)) : NULL;
    bool is_done = folder && resolve(root, folder);
    free(copy);
    free(folder);
    if (!is_done) {
        json_decref(root);
        return no_memory(ret_error);
    }
    *ret_root = root;
    return TL_OK;
}

/* Adds the certificates of a folder, as `tensorlane cert issue` names them; a list of revoked ones where there is one.
 */
static enum tl_status put_tls(json_t *root, const char *path, struct tl_error *ret_error)
{
    char *folder = absolute_folder(path);
    if (!folder) return tl_error_set_errno(ret_error, errno, "--tls %s", path);
    json_t *security = json_object_get(root, "security");
    if (!json_is_object(security)) {
        security = json_object();
        json_object_set_new(root, "security", security);
    }
    json_t *crl = json_sprintf("%s/ca.crl", folder);
    json_t *tls = json_pack("{s:o, s:o, s:o}", "ca", json_sprintf("%s/ca.pem", folder), "certificate",
                            json_sprintf("%s/{name}.pem", folder), "key", json_sprintf("%s/{name}.key", folder));
    free(folder);
    if (crl && access(json_string_value(crl), F_OK) == 0) json_object_set(tls, "crl", crl);
    json_decref(crl);
    return json_object_set_new(security, "tls", tls) == 0 ? TL_OK : no_memory(ret_error);
}

static json_t *address_of(const struct tl_launch_task *task, uint32_t port)
{
    bool is_v6 = strchr(task->host->name, ':') != NULL;
    return json_sprintf("%s%s%s:%u", is_v6 ? "[" : "", task->host->name, is_v6 ? "]" : "", port);
}

static enum tl_status put_cluster(json_t *root, uint32_t first_port, const struct tl_from_cluster *cluster,
                                  struct tl_error *ret_error)
{
    json_t *jobs = json_object();
    const struct tl_launch_task *task = cluster->tasks;
    if (json_object_set_new(root, "cluster", jobs) != 0) return no_memory(ret_error);
    for (size_t i = 0; i < cluster->job_count; i++) {
        json_t *job = json_array();
        if (json_object_set_new(jobs, cluster->jobs[i].name, job) != 0) return no_memory(ret_error);
        for (uint32_t j = 0; j < cluster->jobs[i].count; j++, task++) {
            uint32_t port = first_port + task->place;
            if (port > UINT16_MAX)
                return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                    "%s has more than %u tasks, which is too many from port %u on; --port is lower",
                                    task->host->name, task->place, first_port);
            if (json_array_append_new(job, address_of(task, port)) != 0) return no_memory(ret_error);
        }
    }
    return TL_OK;
}

static char *write_text(const json_t *root)
{
    size_t length = json_dumpb(root, NULL, 0, JSON_INDENT(2));
    char *text = length > 0 ? malloc(length + 1) : NULL;
    if (!text) return NULL;
    text[json_dumpb(root, text, length, JSON_INDENT(2))] = '\0';
    return text;
}

enum tl_status tl_json_cluster_write(const struct tl_config_from_flags *flags, const struct tl_from_cluster *cluster,
                                     char **ret_text, struct tl_error *ret_error)
{
    json_t *root = NULL;
    char *text = NULL;
    enum tl_status status = read_settings(flags->settings, &root, ret_error);
    if (status == TL_OK) status = put_cluster(root, flags->port, cluster, ret_error);
    if (status == TL_OK && flags->tls) status = put_tls(root, flags->tls, ret_error);
    if (status == TL_OK && cluster->listen && !json_object_get(root, "listen") &&
        json_object_set_new(root, "listen", json_string(cluster->listen)) != 0)
        status = no_memory(ret_error);
    if (status == TL_OK && !(text = write_text(root))) status = no_memory(ret_error);
    json_decref(root);
    if (status == TL_OK) *ret_text = text;
    return status;
}
