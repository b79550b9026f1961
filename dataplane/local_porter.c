// SPDX-License-Identifier: Apache-2.0
/*
 * Porters: threads that wait for peers.
 *
 * The reactor gives a job and goes on; the porter does it, writes the eventfd, and waits for the next one. What is read
 * from a peer's memory goes through a buffer of the porter's that stays in the cache, and from there to its destination
 * only while the reactor has not taken that back: a read that the peer keeps waiting cannot be called off, and so must
 * have nothing of the user's to write to.
 */
#include "dataplane/local_porter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/reason.h"
#include "base/text.h"
#include "base/thread.h"
#include "dataplane/pages.h"
#include "tensor/mapped_file.h"

/* Without a job for so long its thread ends. */
#define IDLE_NS TL_NS_PER_SEC
/* Of what is read at a time: what is written and what is read of it fit into the second cache together. */
#define BUFFER_BYTES (UINT64_C(128) << 10)

#ifndef OVERLAYFS_SUPER_MAGIC
#define OVERLAYFS_SUPER_MAGIC 0x794c7630
#endif
#ifndef FUSE_SUPER_MAGIC
#define FUSE_SUPER_MAGIC 0x65735546
#endif

struct local_porter {
    struct tl_list link; /* in ended.porters */
    uint64_t peer;
    int done_fd;
    enum local_job given; /* the reactor's: a job that it has not been told the end of */
    struct local_taking taking;
    struct local_reading reading;
    struct local_mapped dropping;
    struct local_remains remains; /* once it is ended */
    atomic_bool is_done;

    pthread_mutex_t mutex; /* of what follows, and of reading.destination */
    pthread_cond_t has_news;
    enum local_job job; /* NONE: waits for one */
    bool has_thread;
    bool is_ended;   /* it is the thread's alone */
    bool is_orphan;  /* ... and has none: with ended.mutex */
    uid_t uid;       /* once it is ended: whose process may make it wait */
    uint8_t *buffer; /* [BUFFER_BYTES] the thread's; NULL: nothing was read yet */
};

/* Those that were left alone and have not come back yet. */
static struct {
    pthread_mutex_t mutex;
    struct tl_list porters;
} ended = {.mutex = PTHREAD_MUTEX_INITIALIZER, .porters = {&ended.porters, &ended.porters}};

/* --------------------------------------------------------------------------------------------------------- ended -- */

static void add_to_ended(struct local_porter *porter)
{
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    tl_list_push_back(&ended.porters, &porter->link);
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
}

static void remove_from_ended(struct local_porter *porter)
{
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    tl_list_remove(&porter->link);
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
}

/* -------------------------------------------------------------------------------------------------------- taking -- */

static bool is_mount_of_root(int fd)
{
    struct statx file, root;
    return statx(fd, "", AT_EMPTY_PATH, STATX_MNT_ID, &file) == 0 && (file.stx_mask & STATX_MNT_ID) != 0 &&
           statx(AT_FDCWD, "/", 0, STATX_MNT_ID, &root) == 0 && (root.stx_mask & STATX_MNT_ID) != 0 &&
           file.stx_mnt_id == root.stx_mnt_id;
}

/* File systems that whoever likes may mount, and that answer when a process of his does: what lies there is not used by
 * threads that others need. An overlay may lie over one; the one that our own root lies in does not. Reserved huge
 * pages of another user are waited for as memory is. */
static bool may_wait(int fd, bool may_be_reserved)
{
    struct statfs system;
    if (fstatfs(fd, &system) != 0) return true;
    if (system.f_type == FUSE_SUPER_MAGIC) return true;
    if (system.f_type == HUGETLBFS_MAGIC) return !may_be_reserved;
    return system.f_type == OVERLAYFS_SUPER_MAGIC && !is_mount_of_root(fd);
}

/* Its path, if it has one here. */
static const char *describe(int fd, char *buffer, size_t capacity)
{
    char link[32];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, buffer, capacity - 1);
    if (len <= 0 || !tl_text_is_utf8(buffer, (size_t)len)) return "a file of the peer's";
    buffer[len] = '\0';
    return buffer;
}

/* Takes over fd. */
static enum tl_status map_file(struct local_taking *taking, int fd)
{
    char path[512];
    const struct local_file_packet *packet = &taking->packet.file;
    const struct tl_file_stamp stamp = {.size_bytes = packet->size_bytes,
                                        .modified_seconds = packet->modified_seconds,
                                        .modified_ns = packet->modified_ns};
    if (stamp.size_bytes <= taking->files_bytes && !may_wait(fd, taking->may_be_reserved)) {
        return tl_mapped_file_adopt(fd, &stamp, describe(fd, path, sizeof(path)), &taking->file, &taking->error);
    }
    close(fd);
    if (stamp.size_bytes > taking->files_bytes) {
        return tl_error_set(&taking->error, TL_INVALID_ARGUMENT, "files of the peer's that take too many addresses");
    }
    return tl_error_set(&taking->error, TL_INVALID_ARGUMENT, "a file of the peer's for which we might have to wait");
}

static enum tl_status map_memory(struct local_taking *taking, int fd)
{
    const union local_packet *packet = &taking->packet;
    uint64_t len_bytes = packet->segment.len_bytes;
    enum tl_status status = TL_OK;
    if (packet->kind == LOCAL_PACKET_HELLO && !local_ring_is_count(packet->hello.slot_count)) {
        status = tl_error_set(&taking->error, TL_INVALID_ARGUMENT, "a ring of a size that cannot be");
    } else if (packet->kind == LOCAL_PACKET_HELLO) {
        len_bytes = local_ring_bytes(packet->hello.slot_count);
    } else if (len_bytes % TL_PAGE_BYTES != 0) {
        status = tl_error_set(&taking->error, TL_INVALID_ARGUMENT, "a segment that does not consist of pages");
    }
    if (status == TL_OK)
        status = local_memory_map(fd, len_bytes, taking->may_be_reserved, &taking->address, &taking->error);
    close(fd);
    return status;
}

static const char *try_reading(pid_t peer, const struct local_hello *hello)
{
    uint64_t value = 0;
    struct iovec to = {.iov_base = &value, .iov_len = sizeof(value)};
    struct iovec from = {.iov_base = (void *)(uintptr_t)hello->proof_address, .iov_len = sizeof(value)};
    ssize_t len_bytes = process_vm_readv(peer, &to, 1, &from, 1, 0);
    if (len_bytes == (ssize_t)sizeof(value) && value == hello->proof) return NULL;
    struct tl_error error;
    (void)tl_error_set(&error, TL_PERMISSION_DENIED,
                       "this process may not read the peer's memory: %s (process_vm_readv; see "
                       "/proc/sys/kernel/yama/ptrace_scope)",
                       len_bytes < 0 ? strerror(errno) : "other bytes were there");
    return tl_reason(error.message);
}

static void take_hello(struct local_taking *taking, int line, int ring)
{
    if (!local_is_line(line)) {
        (void)tl_error_set(&taking->error, TL_INVALID_ARGUMENT, "a line that is no socket of the right kind");
        close(ring);
    } else if (map_memory(taking, ring) == TL_OK) {
        taking->line = line;
        if (taking->peer > 0) taking->reading_refusal = try_reading(taking->peer, &taking->packet.hello);
        return;
    }
    close(line);
}

static void take(struct local_taking *taking)
{
    int fds[LOCAL_HELLO_DESCRIPTORS];
    local_file_free(&taking->replaced);
    taking->received = local_receive(taking->socket, &taking->packet, fds);
    if (taking->received == LOCAL_RECEIVED_PACKET && taking->packet.kind == LOCAL_PACKET_HELLO) {
        take_hello(taking, fds[0], fds[1]);
    } else if (taking->received == LOCAL_RECEIVED_PACKET && taking->packet.kind == LOCAL_PACKET_FILE) {
        (void)map_file(taking, fds[0]);
    } else if (taking->received == LOCAL_RECEIVED_PACKET && taking->packet.kind == LOCAL_PACKET_ATTACH) {
        (void)map_memory(taking, fds[0]);
    }
    if (taking->is_door) close(taking->socket);
    taking->is_door = false;
}

/* What nobody wants any more. */
static void drop_taken(struct local_taking *taking)
{
    uint64_t len_bytes = taking->packet.kind == LOCAL_PACKET_HELLO ? local_ring_bytes(taking->packet.hello.slot_count)
                                                                   : taking->packet.segment.len_bytes;
    local_file_free(&taking->replaced);
    if (taking->is_door) close(taking->socket);
    if (taking->address != NULL && taking->packet.kind == LOCAL_PACKET_HELLO) close(taking->line);
    if (taking->address != NULL) tl_pages_unmap(taking->address, len_bytes);
    tl_mapped_file_put(taking->file);
}

/* ------------------------------------------------------------------------------------------------------ dropping -- */

static void drop_remains(const struct local_remains *remains)
{
    struct local_ring ring = remains->ring;
    for (unsigned i = 0; i < remains->socket_count; i++)
        close(remains->sockets[i]);
    local_ring_unmap(&ring);
    for (size_t i = 0; i < remains->mapped_count; i++)
        local_unmap(&remains->mapped[i]);
    for (size_t i = 0; i < remains->file_count; i++)
        local_file_free(&remains->files[i]);
    for (size_t i = 0; i < remains->segment_count; i++)
        close(remains->segments[i]);
    free(remains->segments);
    free(remains->mapped);
    free(remains->files);
}

/* ------------------------------------------------------------------------------------------------------- reading -- */

/* False: there is nowhere to put them any more. */
static bool hand_over(struct local_porter *porter, uint64_t done_bytes, size_t len_bytes)
{
    TL_CHECK(pthread_mutex_lock(&porter->mutex) == 0);
    bool is_wanted = !porter->is_ended && porter->reading.destination != NULL;
    /* Only large tensors are read. */
    if (is_wanted) tl_copy_uncached(porter->reading.destination + done_bytes, porter->buffer, len_bytes);
    TL_CHECK(pthread_mutex_unlock(&porter->mutex) == 0);
    return is_wanted;
}

static int read_memory(struct local_porter *porter)
{
    const struct local_reading *reading = &porter->reading;
    if (porter->buffer == NULL) porter->buffer = aligned_alloc(TL_PAGE_BYTES, BUFFER_BYTES);
    if (porter->buffer == NULL) return ENOMEM;
    for (uint64_t done_bytes = 0; done_bytes < reading->len_bytes;) {
        size_t len_bytes = (size_t)tl_min_u64(reading->len_bytes - done_bytes, BUFFER_BYTES);
        struct iovec to = {.iov_base = porter->buffer, .iov_len = len_bytes};
        struct iovec from = {.iov_base = (void *)(uintptr_t)(reading->source + done_bytes), .iov_len = len_bytes};
        ssize_t read_bytes = process_vm_readv(reading->peer, &to, 1, &from, 1, 0);
        if (read_bytes <= 0) return read_bytes < 0 ? errno : EFAULT;
        if (!hand_over(porter, done_bytes, (size_t)read_bytes)) return ECANCELED;
        done_bytes += (uint64_t)read_bytes;
    }
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- thread -- */

/* Of one that has ended: what it has still, and the porter itself. */
static void finish(struct local_porter *porter)
{
    if (porter->job == LOCAL_JOB_DROP) local_unmap(&porter->dropping); /* that it has not begun with */
    if (porter->given == LOCAL_JOB_TAKE) drop_taken(&porter->taking);  /* nobody was told of it */
    drop_remains(&porter->remains);
    remove_from_ended(porter);
    pthread_cond_destroy(&porter->has_news);
    pthread_mutex_destroy(&porter->mutex);
    free(porter->buffer);
    free(porter);
}

/* With the mutex. Waits for a job, or the end; false: neither has come for a while. */
static bool wait_for_job(struct local_porter *porter)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += IDLE_NS / TL_NS_PER_SEC;
    while (porter->job == LOCAL_JOB_NONE && !porter->is_ended) {
        int error = pthread_cond_timedwait(&porter->has_news, &porter->mutex, &until);
        if (error == ETIMEDOUT) return porter->job != LOCAL_JOB_NONE || porter->is_ended;
        TL_CHECK(error == 0);
    }
    return true;
}

/* Without the mutex. */
static void do_job(struct local_porter *porter, enum local_job job)
{
    if (job == LOCAL_JOB_TAKE) {
        take(&porter->taking);
    } else if (job == LOCAL_JOB_READ) {
        porter->reading.error = read_memory(porter);
    } else {
        local_unmap(&porter->dropping);
    }
}

/* With the mutex. */
static void tell(struct local_porter *porter)
{
    const uint64_t one = 1;
    atomic_store_explicit(&porter->is_done, true, memory_order_release);
    (void)!write(porter->done_fd, &one, sizeof(one));
}

/* One that has ended and could not be given a thread; NULL: none. */
static struct local_porter *take_orphan(void)
{
    struct local_porter *orphan = NULL;
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.porters, link)
    {
        struct local_porter *porter = TL_CONTAINER_OF(link, struct local_porter, link);
        if (porter->is_orphan) orphan = porter;
    }
    if (orphan != NULL) orphan->is_orphan = false;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return orphan;
}

static void *finish_orphans(void *argument)
{
    struct local_porter *orphan;
    (void)argument;
    while ((orphan = take_orphan()) != NULL)
        finish(orphan);
    return NULL;
}

static void *run(void *argument)
{
    struct local_porter *porter = argument;
    pthread_setname_np(pthread_self(), "tl-porter");
    TL_CHECK(pthread_mutex_lock(&porter->mutex) == 0);
    while (wait_for_job(porter) && !porter->is_ended) {
        enum local_job job = porter->job;
        TL_CHECK(pthread_mutex_unlock(&porter->mutex) == 0);
        do_job(porter, job);
        TL_CHECK(pthread_mutex_lock(&porter->mutex) == 0);
        porter->job = LOCAL_JOB_NONE;
        if (!porter->is_ended) tell(porter);
    }
    bool is_ended = porter->is_ended;
    porter->has_thread = false;
    TL_CHECK(pthread_mutex_unlock(&porter->mutex) == 0);
    if (!is_ended) return NULL; /* another thread is started when there is a job */
    finish(porter);
    return finish_orphans(NULL);
}

/* ------------------------------------------------------------------------------------------------ of the reactor -- */

static bool has_orphan(void)
{
    bool is_one = false;
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.porters, link)
    is_one |= TL_CONTAINER_OF(link, struct local_porter, link)->is_orphan;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return is_one;
}

static enum tl_status check_left(unsigned left, unsigned most, const char *whom, struct tl_error *ret_error)
{
    if (left < most) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "local: %u threads still wait for memory or files of %s; when it ends, or answers, they come "
                        "back",
                        left, whom);
}

enum tl_status local_porter_may_serve(uint64_t peer, struct tl_error *ret_error)
{
    unsigned left = 0;
    struct tl_error error;
    if (has_orphan() && tl_thread_start("tl-porter", finish_orphans, NULL, NULL, &error) != TL_OK)
        return tl_error_copy(ret_error, &error); /* a queue pair needs threads, too */
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.porters, link)
    left += peer != 0 && TL_CONTAINER_OF(link, struct local_porter, link)->peer == peer;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return check_left(left, LOCAL_MAX_LEFT_OF_PEER, "this peer", ret_error);
}

enum tl_status local_porter_may_serve_user(uid_t uid, struct tl_error *ret_error)
{
    unsigned left = 0;
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.porters, link)
    left += TL_CONTAINER_OF(link, struct local_porter, link)->uid == uid;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return check_left(left, LOCAL_MAX_LEFT_OF_USER, "processes of the peer's user", ret_error);
}

struct local_porter *local_porter_make(uint64_t peer, int done_fd)
{
    pthread_condattr_t attributes;
    struct local_porter *porter = calloc(1, sizeof(*porter));
    if (porter == NULL) return NULL;
    tl_list_init(&porter->link);
    porter->peer = peer;
    porter->done_fd = done_fd;
    pthread_mutex_init(&porter->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&porter->has_news, &attributes);
    pthread_condattr_destroy(&attributes);
    return porter;
}

static enum tl_status give(struct local_porter *porter, enum local_job job, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    atomic_store_explicit(&porter->is_done, false, memory_order_relaxed);
    TL_CHECK(pthread_mutex_lock(&porter->mutex) == 0);
    porter->job = job;
    if (porter->has_thread) {
        pthread_cond_signal(&porter->has_news);
    } else {
        status = tl_thread_start("tl-porter", run, porter, NULL, ret_error);
        porter->has_thread = status == TL_OK;
        if (status != TL_OK) porter->job = LOCAL_JOB_NONE;
    }
    TL_CHECK(pthread_mutex_unlock(&porter->mutex) == 0);
    if (status == TL_OK) porter->given = job;
    return status;
}

enum tl_status local_porter_take(struct local_porter *porter, const struct local_taking *taking,
                                 struct tl_error *ret_error)
{
    TL_CHECK(porter->given == LOCAL_JOB_NONE);
    porter->taking = *taking;
    porter->taking.error.code = TL_OK;
    return give(porter, LOCAL_JOB_TAKE, ret_error);
}

enum tl_status local_porter_read(struct local_porter *porter, const struct local_reading *reading,
                                 struct tl_error *ret_error)
{
    TL_CHECK(porter->given == LOCAL_JOB_NONE);
    porter->reading = *reading;
    return give(porter, LOCAL_JOB_READ, ret_error);
}

enum tl_status local_porter_drop(struct local_porter *porter, const struct local_mapped *mapped,
                                 struct tl_error *ret_error)
{
    TL_CHECK(porter->given == LOCAL_JOB_NONE);
    porter->dropping = *mapped;
    return give(porter, LOCAL_JOB_DROP, ret_error);
}

bool local_porter_is_busy(const struct local_porter *porter)
{
    return porter->given != LOCAL_JOB_NONE;
}

enum local_job local_porter_done(struct local_porter *porter)
{
    enum local_job job = porter->given;
    if (job == LOCAL_JOB_NONE || !atomic_load_explicit(&porter->is_done, memory_order_acquire)) return LOCAL_JOB_NONE;
    porter->given = LOCAL_JOB_NONE;
    return job;
}

struct local_taking *local_porter_taken(struct local_porter *porter)
{
    return &porter->taking;
}

const struct local_reading *local_porter_has_read(const struct local_porter *porter)
{
    return &porter->reading;
}

void local_porter_forget(struct local_porter *porter)
{
    TL_CHECK(pthread_mutex_lock(&porter->mutex) == 0);
    porter->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&porter->mutex) == 0);
}

static bool has_something(const struct local_porter *porter)
{
    const struct local_remains *remains = &porter->remains;
    return porter->given == LOCAL_JOB_TAKE || remains->socket_count > 0 || remains->ring.head != NULL ||
           remains->mapped_count > 0 || remains->files != NULL || remains->segment_count > 0;
}

/* What it has is not touched here: the next porter that comes back sees to it, or a thread that is started later. */
static void leave_orphan(struct local_porter *porter)
{
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    porter->is_orphan = true;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
}

void local_porter_end(struct local_porter *porter, uid_t uid, const struct local_remains *remains)
{
    struct tl_error error;
    TL_CHECK(pthread_mutex_lock(&porter->mutex) == 0);
    porter->is_ended = true;
    porter->uid = uid;
    porter->remains = *remains;
    add_to_ended(porter);
    if (porter->has_thread) {
        pthread_cond_signal(&porter->has_news);
    } else if (has_something(porter)) {
        porter->has_thread = tl_thread_start("tl-porter", run, porter, NULL, &error) == TL_OK;
    }
    bool is_over = !porter->has_thread && !has_something(porter), is_orphan = !porter->has_thread && !is_over;
    TL_CHECK(pthread_mutex_unlock(&porter->mutex) == 0);
    if (is_over) finish(porter);
    if (is_orphan) leave_orphan(porter);
}

void local_porter_drop_all(const struct local_remains *remains)
{
    struct local_porter *porter = local_porter_make(0, -1);
    if (porter != NULL)
        local_porter_end(porter, (uid_t)-1, remains);
    else
        drop_remains(remains);
}
