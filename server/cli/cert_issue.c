// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane cert issue`: who the holders of certificates are, what their files are called, and which hosts they name.
 *
 * Happy path: each name becomes a URI of the authority's trust domain and the name of two files; a task of the
 * configuration brings its host along. All files are looked for before the first one is written.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/ip.h"
#include "config/address.h"
#include "config/config.h"
#include "security/certificate_name.h"
#include "security/issue.h"
#include "server/cli/cert.h"
#include "server/cli/interrupt.h"
#include "server/cli/output.h"

#define HOST_BYTES 256
#define TASK_HOSTS 4
/* The name of the certificate for tools, "client.pem". */
#define TOOLS "client"

/* One certificate to issue. */
struct item {
    char uri[TL_CERTIFICATE_NAME_BYTES];
    char file[TL_CERTIFICATE_NAME_BYTES];
    char name[TL_CERTIFICATE_NAME_BYTES]; /* as tensorlane takes it from the certificate */
    char hosts[TASK_HOSTS][HOST_BYTES];
    size_t host_count;
};

struct issuing {
    const struct tl_cert_flags *flags;
    struct tl_authority *authority;
    struct tl_config *config; /* NULL: there is none */
    struct item *items;
    size_t count;
};

/* ------------------------------------------------------------------------------------------------------- names -- */

/* Splits "/job:ps/task:0" or "ps:0". False: it is neither. */
static bool split_task(const char *text, char ret_job[TL_CERTIFICATE_NAME_BYTES], const char **ret_index)
{
    const char *separator = ":";
    if (strncmp(text, "/job:", strlen("/job:")) == 0) text += strlen("/job:"), separator = "/task:";
    const char *place = strstr(text, separator);
    if (!place || place == text || place - text >= TL_CERTIFICATE_NAME_BYTES) return false;
    snprintf(ret_job, TL_CERTIFICATE_NAME_BYTES, "%.*s", (int)(place - text), text);
    *ret_index = place + strlen(separator);
    return strspn(*ret_index, "0123456789") == strlen(*ret_index) && **ret_index != '\0';
}

/* Whether a file of this name could be that of a task, or of the authority. */
static bool is_taken(const char *file)
{
    struct tl_certificate_name name;
    const struct tl_certificate_entry entry = {.text = file, .len_bytes = strcspn(file, ".")};
    if (strcmp(file, "ca") == 0) return true;
    return tl_certificate_name_choose(&entry, 1, &name, NULL) == TL_OK && name.kind == TL_CERTIFICATE_MEMBER;
}

/* Makes the file's name of a client from its URI: what follows /client/, or the trust domain. */
static enum tl_status name_client_file(struct item *item, struct tl_error *ret_error)
{
    const char *path = strchr(item->uri + strlen("spiffe://"), '/') + 1;
    if (strncmp(path, "client/", strlen("client/")) == 0) path += strlen("client/");
    snprintf(item->file, sizeof(item->file), "%s", path);
    for (char *c = item->file; *c != '\0'; c++)
        if (*c == '/') *c = '-';
    if (!is_taken(item->file)) return TL_OK;
    return tl_error_set(
        ret_error, TL_INVALID_ARGUMENT,
        "the files of %s would be called as those of a task or of the authority, %s.pem; choose another "
        "name, and write a task as JOB:INDEX",
        item->name, item->file);
}

/* Fills an item from what the command line says. */
static enum tl_status name_item(const struct issuing *issuing, const char *text, struct item *item,
                                struct tl_error *ret_error)
{
    char job[TL_CERTIFICATE_NAME_BYTES];
    char uri[2 * TL_CERTIFICATE_NAME_BYTES];
    const char *domain = tl_authority_trust_domain(issuing->authority), *index;
    struct tl_certificate_name name;
    bool is_uri = strncmp(text, "spiffe://", strlen("spiffe://")) == 0;
    bool is_task = !is_uri && split_task(text, job, &index);
    if (!is_uri && !is_task && (strpbrk(text, ":/") || text[0] == '\0')) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "\"%s\" is no name; write a task as ps:0 or /job:ps/task:0, a client as ann or "
                            "spiffe://%s/client/ann",
                            text, domain);
    }
    int len = is_uri    ? snprintf(uri, sizeof(uri), "%s", text)
              : is_task ? snprintf(uri, sizeof(uri), "spiffe://%s/job/%s/task/%s", domain, job, index)
                        : snprintf(uri, sizeof(uri), "spiffe://%s/client/%s", domain, text);
    const struct tl_certificate_entry entry = {.is_uri = true, .text = uri, .len_bytes = (size_t)len};
    enum tl_status status = tl_certificate_name_choose(&entry, 1, &name, ret_error);
    if (status != TL_OK) return status;
    memcpy(item->uri, uri, (size_t)len + 1); /* It has at most 255 bytes, as its name was accepted. */
    snprintf(item->name, sizeof(item->name), "%s", name.text);
    if (name.kind == TL_CERTIFICATE_CLIENT) return name_client_file(item, ret_error);
    TL_CHECK(split_task(name.text, job, &index));
    snprintf(item->file, sizeof(item->file), "%.200s-%.10s", job, index);
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------- hosts -- */

static void add_host(struct item *item, const char *host)
{
    for (size_t i = 0; i < item->host_count; i++)
        if (strcmp(item->hosts[i], host) == 0) return;
    snprintf(item->hosts[item->host_count++], HOST_BYTES, "%s", host);
}

/* Names the host of a task, and for one that only this machine can reach all names that loopback has. */
static void add_task_hosts(struct item *item, const char *address)
{
    char host[HOST_BYTES];
    uint16_t port;
    if (!address || tl_address_split(address, host, sizeof(host), &port, NULL) != TL_OK) return;
    add_host(item, host);
    if (!tl_address_is_loopback(address)) return;
    add_host(item, "localhost");
    add_host(item, "127.0.0.1");
    add_host(item, "::1");
}

/* ----------------------------------------------------------------------------------------------------- issuing -- */

static enum tl_status read_config(const char *path, struct tl_config **ret_config, struct tl_error *ret_error)
{
    if (path) return tl_config_read(path, ret_config, ret_error);
    const char *text = tl_config_tf_text();
    return tl_config_parse_tf(text, strlen(text), ret_config, ret_error);
}

/* Takes the names of the command line. A task of the configuration brings its host. */
static enum tl_status take_names(struct issuing *issuing, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    const struct tl_texts *names = &issuing->flags->names;
    for (size_t i = 0; i < names->count && status == TL_OK; i++) {
        const struct tl_config_task *task;
        struct item *item = &issuing->items[issuing->count++];
        status = name_item(issuing, names->items[i], item, ret_error);
        if (status != TL_OK || !issuing->config || strncmp(item->name, "/job:", strlen("/job:")) != 0) continue;
        status = tl_config_find_name(issuing->config, item->name, &task, ret_error);
        if (status == TL_OK) add_task_hosts(item, task->address);
    }
    return status;
}

/* Takes all tasks, and a client for tools. */
static enum tl_status take_tasks(struct issuing *issuing, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < issuing->config->task_count && status == TL_OK; i++) {
        struct item *item = &issuing->items[issuing->count++];
        status = name_item(issuing, issuing->config->tasks[i].name, item, ret_error);
        add_task_hosts(item, issuing->config->tasks[i].address);
    }
    if (status != TL_OK) return status;
    return name_item(issuing, TOOLS, &issuing->items[issuing->count++], ret_error);
}

static enum tl_status take_items(struct issuing *issuing, struct tl_error *ret_error)
{
    const struct tl_cert_flags *flags = issuing->flags;
    enum tl_status status = TL_OK;
    if (flags->config_path || flags->names.count == 0)
        status = read_config(flags->config_path, &issuing->config, ret_error);
    if (status != TL_OK) return status;
    size_t capacity = flags->names.count > 0 ? flags->names.count : issuing->config->task_count + 1;
    issuing->items = calloc(capacity, sizeof(*issuing->items));
    if (!issuing->items) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu names", capacity);
    return flags->names.count > 0 ? take_names(issuing, ret_error) : take_tasks(issuing, ret_error);
}

static int compare_files(const void *a, const void *b)
{
    const struct item *const *first = a, *const *second = b;
    return strcmp((*first)->file, (*second)->file);
}

/* Two names may have the same file: those that differ in a slash only, and those that are given twice. */
static enum tl_status check_distinct(const struct issuing *issuing, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    const struct item **sorted = calloc(issuing->count + 1, sizeof(*sorted));
    if (!sorted) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu names", issuing->count);
    for (size_t i = 0; i < issuing->count; i++)
        sorted[i] = &issuing->items[i];
    qsort(sorted, issuing->count, sizeof(*sorted), compare_files);
    for (size_t i = 1; i < issuing->count && status == TL_OK; i++)
        if (compare_files(&sorted[i - 1], &sorted[i]) == 0)
            status = tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                  "%s and %s would both be %s.pem; issue one of them, or into another folder (-o)",
                                  sorted[i - 1]->name, sorted[i]->name, sorted[i]->file);
    free(sorted);
    return status;
}

static enum tl_status check_absent(const struct issuing *issuing, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < issuing->count && status == TL_OK && !issuing->flags->replaces; i++)
        status = tl_authority_check_absent(issuing->authority, issuing->items[i].file, ret_error);
    return status;
}

static enum tl_status issue_item(const struct issuing *issuing, const struct item *item, struct tl_error *ret_error)
{
    const struct tl_cert_flags *flags = issuing->flags;
    size_t count = 0;
    const char **hosts = calloc(item->host_count + flags->hosts.count + 1, sizeof(*hosts));
    if (!hosts) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the names of hosts");
    for (size_t i = 0; i < item->host_count; i++)
        hosts[count++] = item->hosts[i];
    for (size_t i = 0; i < flags->hosts.count; i++)
        hosts[count++] = flags->hosts.items[i];
    const struct tl_issue_request request = {
        .uri = item->uri, .hosts = hosts, .host_count = count, .days = flags->days};
    enum tl_status status = tl_authority_issue(issuing->authority, item->file, &request, flags->replaces, ret_error);
    free(hosts);
    if (status != TL_OK) return status;
    tl_output_put_escaped(stdout, flags->folder);
    printf("/%s.pem: %s\n", item->file, item->name);
    fflush(stdout); /* what has been said stays when the command is interrupted */
    return TL_OK;
}

enum tl_status tl_cert_issue(const struct tl_cert_flags *flags, struct tl_error *ret_error)
{
    struct issuing issuing = {.flags = flags};
    enum tl_status status = tl_authority_open(flags->folder, &issuing.authority, ret_error);
    if (status == TL_OK) status = take_items(&issuing, ret_error);
    if (status == TL_OK) status = check_distinct(&issuing, ret_error);
    if (status == TL_OK) status = check_absent(&issuing, ret_error);
    tl_interrupt_catch();
    for (size_t i = 0; i < issuing.count && status == TL_OK; i++) {
        if (tl_interrupt_is_set())
            status = tl_error_set(ret_error, TL_CANCELLED, "interrupted; %zu of %zu were issued", i, issuing.count);
        else
            status = issue_item(&issuing, &issuing.items[i], ret_error);
    }
    free(issuing.items);
    tl_config_destroy(issuing.config);
    tl_authority_destroy(issuing.authority);
    return status;
}
