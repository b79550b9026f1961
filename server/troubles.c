// SPDX-License-Identifier: Apache-2.0
/*
 * Happy path: files are added while they are published; the thread looks at all of them and at the memory of the
 * transports, and keeps a summary of each kind of trouble under a mutex; describe copies the summaries and adds what it
 * sees itself.
 *
 * Failure modes: what cannot be looked at is taken for sound. A file that hangs with its file system holds up this
 * thread alone, and the end of the worker.
 */
#include "server/troubles.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "server/peers/data_connection.h"
#include "server/worker_internal.h"
#include "tensor/device.h"

#define LOOK_PAUSE_NS TL_NS_PER_SEC
/* Requests that wait for registered memory are in trouble after this time. */
#define LONG_WAIT_NS (2 * TL_NS_PER_SEC)
/* A lack of descriptors is remembered this long while most of them are in use. */
#define SHORTAGE_KEPT_NS (10 * TL_NS_PER_SEC)
/* With so few left, or with less than a tenth, they are about to run out. */
#define FEW_DESCRIPTORS 8

enum file_trouble { FILE_SOUND, FILE_CHANGED, FILE_REPLACED, FILE_REMOVED, FILE_TROUBLES };

/* Descriptors, files, the memory of each transport, paths, and devices. */
enum { MAX_TROUBLES = 1 + (FILE_TROUBLES - 1) + TL_MAX_TRANSPORTS + 1 + 1 };

struct watched_file {
    struct tl_mapped_file *file;
    enum file_trouble trouble;
};

/* The files that have one kind of trouble. */
struct file_summary {
    size_t count;
    char reason[TL_ERROR_MESSAGE_BYTES]; /* what is wrong with the first */
};

struct tl_troubles {
    const struct tl_worker *worker;
    struct watched_file *files; /* [file_count]; the thread's once it runs */
    size_t file_count;
    bool has_thread;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t ending;
    bool is_ending;
    uint64_t descriptors; /* that were open at the last look */
    struct file_summary summaries[FILE_TROUBLES];
    int64_t
        waiting_since_ns[TL_MAX_TRANSPORTS]; /* requests have waited for memory at each look since; 0: they do not */
};

/* ------------------------------------------------------------------------------------------------------- files -- */

static const char *const file_remedies[FILE_TROUBLES] = {
    [FILE_SOUND] = "",
    [FILE_CHANGED] = "publish it again, and replace files by rename",
    [FILE_REPLACED] = "start the worker anew to serve the new one",
    [FILE_REMOVED] = "put it back; without it the worker does not start again",
};

/* Clients learn the names of files, and not the folders. */
static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Writes what a message says about the file, without the folder in its path and without the remedy at its end. */
static void tell_change(const char *message, const char *path, char *ret_reason, size_t capacity)
{
    const char *place = strstr(message, path), *name = name_of(path);
    if (place == NULL) { /* a long message is cut */
        snprintf(ret_reason, capacity, "%s was changed, or could not be read", name);
        return;
    }
    const char *rest = place + (name - path), *remedy = strstr(rest + strlen(name), "; publish");
    int rest_bytes = remedy != NULL ? (int)(remedy - rest) : (int)strlen(rest);
    snprintf(ret_reason, capacity, "%.*s%.*s", (int)(place - message), message, rest_bytes, rest);
}

static enum file_trouble look_at_file(const struct tl_mapped_file *file, char *ret_reason, size_t capacity)
{
    struct tl_error error;
    const char *path = tl_mapped_file_path(file), *name = name_of(path);
    if (tl_mapped_file_check((void *)file, NULL, 0, &error) != TL_OK) {
        tell_change(error.message, path, ret_reason, capacity);
        return FILE_CHANGED;
    }
    switch (tl_mapped_file_look_up(file)) {
    case TL_FILE_AT_PATH_OTHER:
        snprintf(ret_reason, capacity, "%s was replaced by another file; the old content is served", name);
        return FILE_REPLACED;
    case TL_FILE_AT_PATH_NONE:
        snprintf(ret_reason, capacity, "%s was removed; its content is still served", name);
        return FILE_REMOVED;
    case TL_FILE_AT_PATH_SAME:
        break;
    }
    return FILE_SOUND;
}

static void look_at_files(struct tl_troubles *troubles)
{
    struct file_summary summaries[FILE_TROUBLES] = {0};
    size_t kept = 0;
    for (size_t i = 0; i < troubles->file_count; i++) {
        struct watched_file *watched = &troubles->files[i];
        char reason[TL_ERROR_MESSAGE_BYTES];
        /* Its tensors were withdrawn or replaced. */
        if (!tl_mapped_file_is_shared(watched->file)) {
            tl_mapped_file_put(watched->file);
            continue;
        }
        enum file_trouble trouble = look_at_file(watched->file, reason, sizeof(reason));
        if (trouble != FILE_SOUND && trouble != watched->trouble)
            TL_LOG_AT_WARN("a published file is not what it was", TL_STR("file", tl_mapped_file_path(watched->file)),
                           TL_STR("reason", reason), TL_STR("remedy", file_remedies[trouble]));
        watched->trouble = trouble;
        if (trouble != FILE_SOUND && summaries[trouble].count++ == 0)
            memcpy(summaries[trouble].reason, reason, sizeof(reason));
        troubles->files[kept++] = *watched;
    }
    troubles->file_count = kept;
    pthread_mutex_lock(&troubles->mutex);
    memcpy(troubles->summaries, summaries, sizeof(summaries));
    pthread_mutex_unlock(&troubles->mutex);
}

/* ------------------------------------------------------------------------------------------------------ memory -- */

static void look_at_memory(struct tl_troubles *troubles)
{
    int64_t now_ns = tl_clock_now_ns();
    for (size_t i = 0; i < troubles->worker->data_plane.transport_count; i++) {
        struct tl_transport *transport = troubles->worker->data_plane.transports[i].transport;
        struct tl_memory_stats stats = {0};
        if (transport != NULL) tl_engine_get_memory_stats(transport->engine, &stats);
        pthread_mutex_lock(&troubles->mutex);
        if (stats.pool_waiting == 0) {
            troubles->waiting_since_ns[i] = 0;
        } else if (troubles->waiting_since_ns[i] == 0) {
            troubles->waiting_since_ns[i] = now_ns;
        }
        pthread_mutex_unlock(&troubles->mutex);
    }
}

/* -------------------------------------------------------------------------------------------------- descriptors -- */

static void look_at_descriptors(struct tl_troubles *troubles)
{
    uint64_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL) return; /* describe notices when there is no descriptor for it */
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(folder);
    pthread_mutex_lock(&troubles->mutex);
    troubles->descriptors = count > 0 ? count - 1 : 0; /* without that of the folder */
    pthread_mutex_unlock(&troubles->mutex);
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

/* False: the thread shall end. */
static bool pause_thread(struct tl_troubles *troubles)
{
    int64_t until_ns = tl_clock_deadline_ns(LOOK_PAUSE_NS);
    const struct timespec until = {.tv_sec = until_ns / TL_NS_PER_SEC, .tv_nsec = until_ns % TL_NS_PER_SEC};
    int failure = 0;
    pthread_mutex_lock(&troubles->mutex);
    while (!troubles->is_ending && failure == 0)
        failure = pthread_cond_timedwait(&troubles->ending, &troubles->mutex, &until);
    bool is_ending = troubles->is_ending;
    pthread_mutex_unlock(&troubles->mutex);
    return !is_ending;
}

static void *run(void *context)
{
    struct tl_troubles *troubles = context;
    do {
        look_at_files(troubles);
        look_at_memory(troubles);
        look_at_descriptors(troubles);
    } while (pause_thread(troubles));
    return NULL;
}

enum tl_status tl_troubles_create(struct tl_worker *worker, struct tl_troubles **ret_troubles,
                                  struct tl_error *ret_error)
{
    pthread_condattr_t attributes;
    struct tl_troubles *troubles = calloc(1, sizeof(*troubles));
    if (troubles == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    troubles->worker = worker;
    pthread_mutex_init(&troubles->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&troubles->ending, &attributes);
    pthread_condattr_destroy(&attributes);
    *ret_troubles = troubles;
    return TL_OK;
}

enum tl_status tl_troubles_watch_file(struct tl_troubles *troubles, struct tl_mapped_file *file,
                                      struct tl_error *ret_error)
{
    if (troubles == NULL) return TL_OK;
    TL_CHECK(!troubles->has_thread);
    struct watched_file *files = realloc(troubles->files, (troubles->file_count + 1) * sizeof(*files));
    if (files == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to watch a published file");
    troubles->files = files;
    files[troubles->file_count++] = (struct watched_file){.file = tl_mapped_file_get(file)};
    return TL_OK;
}

enum tl_status tl_troubles_start(struct tl_troubles *troubles, struct tl_error *ret_error)
{
    enum tl_status status = tl_thread_start("tl-troubles", run, troubles, &troubles->thread, ret_error);
    troubles->has_thread = status == TL_OK;
    return status;
}

void tl_troubles_destroy(struct tl_troubles *troubles)
{
    if (troubles == NULL) return;
    if (troubles->has_thread) {
        pthread_mutex_lock(&troubles->mutex);
        troubles->is_ending = true;
        pthread_cond_signal(&troubles->ending);
        pthread_mutex_unlock(&troubles->mutex);
        pthread_join(troubles->thread, NULL);
    }
    for (size_t i = 0; i < troubles->file_count; i++)
        tl_mapped_file_put(troubles->files[i].file);
    free(troubles->files);
    pthread_cond_destroy(&troubles->ending);
    pthread_mutex_destroy(&troubles->mutex);
    free(troubles);
}

/* --------------------------------------------------------------------------------------------------- describing -- */

struct trouble_text {
    const char *what;
    char reason[TL_ERROR_MESSAGE_BYTES];
    char remedy[TL_ERROR_MESSAGE_BYTES];
    bool breaks_transfers;
};

struct trouble_texts {
    struct trouble_text items[MAX_TROUBLES];
    size_t count;
};

static struct trouble_text *add(struct trouble_texts *texts, const char *what, bool breaks_transfers)
{
    TL_CHECK(texts->count < MAX_TROUBLES);
    struct trouble_text *text = &texts->items[texts->count++];
    *text = (struct trouble_text){.what = what, .breaks_transfers = breaks_transfers};
    return text;
}

static void add_machine_descriptors(struct trouble_texts *texts)
{
    struct trouble_text *text = add(texts, "descriptors", true);
    snprintf(text->reason, sizeof(text->reason),
             "the machine has no descriptors left, so that connections and files cannot be opened");
    snprintf(text->remedy, sizeof(text->remedy),
             "stop what has opened so many (lsof), or raise the limit of the machine: \"sysctl fs.file-max=NUMBER\" as "
             "root");
}

static void add_descriptors(const struct tl_worker *worker, struct trouble_texts *texts)
{
    struct rlimit limit;
    int fd = eventfd(0, EFD_CLOEXEC);
    bool is_out = fd < 0 && errno == EMFILE, is_machine_out = fd < 0 && errno == ENFILE;
    if (fd >= 0) close(fd);
    if (is_machine_out) {
        add_machine_descriptors(texts);
        return;
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    pthread_mutex_lock(&worker->troubles->mutex);
    uint64_t used = is_out ? limit.rlim_cur : worker->troubles->descriptors;
    pthread_mutex_unlock(&worker->troubles->mutex);
    if (used + tl_max_u64(limit.rlim_cur / 10, FEW_DESCRIPTORS) < limit.rlim_cur) return;
    int64_t short_ns = tl_control_short_ns(worker->control);
    is_out = is_out || (short_ns != 0 && tl_clock_now_ns() - short_ns < SHORTAGE_KEPT_NS);
    struct trouble_text *text = add(texts, "descriptors", is_out);
    snprintf(text->reason, sizeof(text->reason), "%" PRIu64 " of %" PRIu64 " descriptors are open%s", used,
             (uint64_t)limit.rlim_cur, is_out ? ", so that connections and files cannot be opened" : "");
    snprintf(text->remedy, sizeof(text->remedy),
             "give it more: \"prlimit --pid %d --nofile=NUMBER\" as root for now, ulimit -Hn or LimitNOFILE= for its "
             "next start",
             (int)getpid());
}

static void add_files(struct tl_troubles *troubles, struct trouble_texts *texts)
{
    pthread_mutex_lock(&troubles->mutex);
    for (unsigned i = FILE_CHANGED; i < FILE_TROUBLES; i++) {
        const struct file_summary *summary = &troubles->summaries[i];
        char more[64] = "";
        if (summary->count == 0) continue;
        if (summary->count > 1) snprintf(more, sizeof(more), " (and %zu more files)", summary->count - 1);
        struct trouble_text *text = add(texts, "file", i == FILE_CHANGED);
        snprintf(text->reason, sizeof(text->reason), "%.900s%s", summary->reason, more);
        snprintf(text->remedy, sizeof(text->remedy), "%s", file_remedies[i]);
    }
    pthread_mutex_unlock(&troubles->mutex);
}

static void add_memory(const struct tl_worker *worker, struct trouble_texts *texts)
{
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        const struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        struct tl_memory_stats stats;
        char used[32], size[32];
        pthread_mutex_lock(&worker->troubles->mutex);
        int64_t since_ns = worker->troubles->waiting_since_ns[i];
        pthread_mutex_unlock(&worker->troubles->mutex);
        if (slot->transport == NULL || since_ns == 0 || tl_clock_now_ns() - since_ns < LONG_WAIT_NS) continue;
        tl_engine_get_memory_stats(slot->transport->engine, &stats);
        struct trouble_text *text = add(texts, "pool", false);
        snprintf(text->reason, sizeof(text->reason),
                 "%" PRIu64 " requests over %s wait for registered memory, %s of %s are in use", stats.pool_waiting,
                 slot->source->name, tl_text_format_size(stats.pool_used_bytes, used, sizeof(used)),
                 tl_text_format_size(stats.pool_bytes, size, sizeof(size)));
        snprintf(text->remedy, sizeof(text->remedy), "release received tensors sooner, or raise %s.max_pool",
                 slot->source->name);
    }
}

static void add_paths(const struct tl_worker *worker, struct trouble_texts *texts)
{
    const struct tl_peer *peer;
    const struct tl_data_connection *connection;
    char more[64] = "";
    size_t count = tl_peers_find_breaking(worker, &peer, &connection);
    if (count == 0) return;
    if (count > 1) snprintf(more, sizeof(more), " (and %zu more paths)", count - 1);
    struct trouble_text *text = add(texts, "path", worker->data_plane.is_transport_required);
    snprintf(text->reason, sizeof(text->reason), "the path to %s over %s breaks again and again: %.600s%s",
             tl_peer_name(peer), connection->slot->source->name, connection->break_reason, more);
    snprintf(text->remedy, sizeof(text->remedy), "see the logs of both, and health --pairs");
}

static void add_devices(struct trouble_texts *texts)
{
    char reason[TL_DEVICE_LOST_BYTES], more[64] = "";
    unsigned count = tl_device_count_lost(reason);
    if (count == 0) return;
    if (count > 1) snprintf(more, sizeof(more), " (and %u more devices)", count - 1);
    struct trouble_text *text = add(texts, "device", true);
    snprintf(text->reason, sizeof(text->reason), "%s%s", reason, more);
    snprintf(
        text->remedy, sizeof(text->remedy),
        "start the worker's process anew; the kernel's log there (dmesg, \"NVRM: Xid\") tells whether the GPU or a "
        "kernel of the program was at fault");
}

enum tl_status tl_troubles_describe(const struct tl_worker *worker, struct tl_description *description,
                                    struct tl_error *ret_error)
{
    struct trouble_texts texts = {.count = 0};
    if (worker->troubles == NULL) return TL_OK;
    add_descriptors(worker, &texts);
    add_files(worker->troubles, &texts);
    add_memory(worker, &texts);
    add_paths(worker, &texts);
    add_devices(&texts);
    if (texts.count == 0) return TL_OK;
    description->troubles = calloc(texts.count, sizeof(*description->troubles));
    if (description->troubles == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for troubles");
    for (size_t i = 0; i < texts.count; i++) {
        struct tl_trouble *to = &description->troubles[description->trouble_count++];
        to->what = strdup(texts.items[i].what);
        to->reason = strdup(texts.items[i].reason);
        to->remedy = strdup(texts.items[i].remedy);
        to->breaks_transfers = texts.items[i].breaks_transfers;
        if (to->what == NULL || to->reason == NULL || to->remedy == NULL)
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for troubles");
    }
    return TL_OK;
}
