// SPDX-License-Identifier: Apache-2.0
/* Hosts in the order of a launcher, and the order of their tasks. */
#include "config/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "config/quote.h"

void tl_launch_fini(struct tl_launch *launch)
{
    struct tl_launch_host *host = launch->hosts;
    if (host) HASH_CLEAR(hh, launch->hosts);
    while (host) {
        struct tl_launch_host *next = host->hh.next;
        free(host);
        host = next;
    }
    *launch = (struct tl_launch){0};
}

/* Whether the bytes may be in the name of a host. */
static bool is_name(const char *name, size_t name_bytes)
{
    for (size_t i = 0; i < name_bytes; i++)
        if ((unsigned char)name[i] <= ' ' || (unsigned char)name[i] > '~' || strchr("\"\\,[]{}()", name[i]))
            return false;
    return name_bytes > 0;
}

static enum tl_status fail_name(const char *name, size_t name_bytes, struct tl_error *ret_error)
{
    char copy[TL_LAUNCH_HOST_BYTES], quoted[TL_QUOTE_BYTES];
    if (name_bytes >= sizeof(copy)) name_bytes = sizeof(copy) - 1;
    *(char *)mempcpy(copy, name, name_bytes) = '\0';
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is no name of a host", tl_quote(copy, quoted));
}

static struct tl_launch_host *add_host(struct tl_launch *launch, const char *name, const char *key)
{
    struct tl_launch_host *host = calloc(1, sizeof(*host));
    if (!host) return NULL;
    strcpy(host->name, name);
    strcpy(host->key, key);
    host->group = launch->group;
    host->is_known = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) host->is_known = false
    HASH_ADD_STR(launch->hosts, key, host);
    if (!host->is_known) {
        free(host);
        return NULL;
    }
    launch->host_count++;
    return host;
}

enum tl_status tl_launch_add(struct tl_launch *launch, const char *name, size_t name_bytes, uint32_t task_count,
                             struct tl_error *ret_error)
{
    struct tl_launch_host *host;
    char copy[TL_LAUNCH_HOST_BYTES], key[TL_ADDRESS_BYTES], quoted[TL_QUOTE_BYTES];
    if (name_bytes >= sizeof(copy) || !is_name(name, name_bytes)) return fail_name(name, name_bytes, ret_error);
    *(char *)mempcpy(copy, name, name_bytes) = '\0';
    enum tl_status status = tl_address_check_host(copy, key, ret_error);
    if (status != TL_OK) return status;
    if (task_count > TL_LAUNCH_MAX_TASKS - launch->task_count)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "there are more than %u tasks", TL_LAUNCH_MAX_TASKS);
    HASH_FIND_STR(launch->hosts, key, host);
    if (host && strcmp(host->name, copy) != 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is the host %s in another spelling; write it in one",
                            tl_quote(copy, quoted), host->name);
    if (host && host->group != launch->group)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is in two components of the job", host->name);
    if (!host) host = add_host(launch, copy, key);
    if (!host) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the hosts");
    host->task_count += task_count;
    launch->task_count += task_count;
    return TL_OK;
}

const struct tl_launch_host *tl_launch_find(const struct tl_launch *launch, const char *name)
{
    struct tl_launch_host *host = NULL;
    char key[TL_ADDRESS_BYTES];
    if (tl_address_check_host(name, key, NULL) == TL_OK) HASH_FIND_STR(launch->hosts, key, host);
    return host;
}

/* Writes the tasks of the hosts from first to the last of its group. Returns the first host behind them. */
static const struct tl_launch_host *place_group(const struct tl_launch_host *first, uint32_t run,
                                                struct tl_launch_task **tasks)
{
    const struct tl_launch_host *host = NULL;
    bool is_done = false;
    for (uint64_t begin = 0; !is_done; begin += run) {
        is_done = true;
        for (host = first; host && host->group == first->group; host = host->hh.next) {
            uint64_t end = begin + run;
            for (uint64_t i = begin; i < end && i < host->task_count; i++)
                *(*tasks)++ = (struct tl_launch_task){host, (uint32_t)i};
            if (end < host->task_count) is_done = false;
        }
    }
    return host;
}

void tl_launch_place(const struct tl_launch *launch, uint32_t run, struct tl_launch_task *ret_tasks)
{
    for (const struct tl_launch_host *host = launch->hosts; host;)
        host = place_group(host, run, &ret_tasks);
}

enum tl_status tl_launch_expand(const char *pattern, const char *job, uint32_t task, uint32_t group_size,
                                char ret_host[TL_LAUNCH_HOST_BYTES], struct tl_error *ret_error)
{
    char index[16], group[16], quoted[TL_QUOTE_BYTES];
    const char *const words[][2] = {{"{job}", job}, {"{index}", index}, {"{group}", group}};
    size_t length = 0;
    snprintf(index, sizeof(index), "%u", group_size ? task % group_size : task);
    snprintf(group, sizeof(group), "%u", group_size ? task / group_size : 0);
    for (const char *at = pattern; *at;) {
        char one[2] = {*at, '\0'};
        const char *text = one;
        size_t skipped = 1;
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            if (strncmp(at, words[i][0], strlen(words[i][0])) != 0) continue;
            text = words[i][1];
            skipped = strlen(words[i][0]);
        }
        if (length + strlen(text) >= TL_LAUNCH_HOST_BYTES)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s makes names of hosts that are too long",
                                tl_quote(pattern, quoted));
        memcpy(ret_host + length, text, strlen(text));
        length += strlen(text);
        at += skipped;
    }
    ret_host[length] = '\0';
    if (strpbrk(ret_host, "{}"))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: there are {job}, {index} and {group} in braces",
                            tl_quote(pattern, quoted));
    return TL_OK;
}
