// SPDX-License-Identifier: Apache-2.0
/*
 * Helper threads: threads that wait for peers.
 *
 * The reactor gives a job and goes on; the helper thread does it, writes the eventfd, and waits for the next one. What
 * is read from a peer's memory goes through a buffer of the helper thread's that stays in the cache, and from there to
 * its destination only while the reactor has not taken that back: a read that the peer keeps waiting cannot be called
 * off, and so must have nothing of the user's to write to.
 */
#include "dataplane/local/local_helper.h"

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
#include "dataplane/memory/pages.h"
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

struct local_helper {
    struct tl_list link; /* in ended.helper threads */
    uint64_t peer;
    int done_fd;
    enum local_job given; /* the reactor's: a job that it has not been told the end of */
    struct local_taking taking;
    struct local_reading reading;
    struct local_mapped dropping;
    struct local_leftovers leftovers; /* once it is ended */
    atomic_bool is_done;

    pthread_mutex_t mutex; /* of what follows, and of reading.destination */
    pthread_cond_t has_work;
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
    struct tl_list helpers;
} ended = {.mutex = PTHREAD_MUTEX_INITIALIZER, .helpers = {&ended.helpers, &ended.helpers}};

/* ------------------------------------------------------------------------------------------------------- ended -- */

static void add_to_ended(struct local_helper *helper)
{
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    tl_list_push_back(&ended.helpers, &helper->link);
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
}

static void remove_from_ended(struct local_helper *helper)
{
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    tl_list_remove(&helper->link);
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
}

/* ------------------------------------------------------------------------------------------------------ taking -- */

static bool is_mount_of_root(int fd)
{
    struct statx file, root;
    return statx(fd, "", AT_EMPTY_PATH, STATX_MNT_ID, &file) == 0 && (file.stx_mask & STATX_MNT_ID) != 0 &&
           statx(AT_FDCWD, "/", 0, STATX_MNT_ID, &root) == 0 && (root.stx_mask & STATX_MNT_ID) != 0 &&
           file.stx_mnt_id == root.stx_mnt_id;
}

/* File systems that whoever likes may mount, and that answer when a process of his does: what lies there is not used by
 * threads that others need. An overlay may lie over one; the one that our own root lies in does not. */
static bool may_wait(int fd)
{
    struct statfs system;
    if (fstatfs(fd, &system) != 0) return true;
    if (system.f_type == FUSE_SUPER_MAGIC) return true;
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
    if (stamp.size_bytes <= taking->files_bytes && !may_wait(fd)) {
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
    if (status == TL_OK) status = local_memory_map(fd, len_bytes, &taking->address, &taking->error);
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

static void post_hello(struct local_taking *taking, int control_socket, int ring)
{
    if (!local_is_control_socket(control_socket)) {
        (void)tl_error_set(&taking->error, TL_INVALID_ARGUMENT, "a line that is no socket of the right kind");
        close(ring);
    } else if (map_memory(taking, ring) == TL_OK) {
        taking->control_socket = control_socket;
        if (taking->peer > 0) taking->reading_refusal = try_reading(taking->peer, &taking->packet.hello);
        return;
    }
    close(control_socket);
}

static void take(struct local_taking *taking)
{
    int fds[LOCAL_HELLO_DESCRIPTORS];
    local_file_free(&taking->replaced);
    taking->received = local_receive(taking->socket, &taking->packet, fds);
    if (taking->received == LOCAL_RECEIVED_PACKET && taking->packet.kind == LOCAL_PACKET_HELLO) {
        post_hello(taking, fds[0], fds[1]);
    } else if (taking->received == LOCAL_RECEIVED_PACKET && taking->packet.kind == LOCAL_PACKET_FILE) {
        (void)map_file(taking, fds[0]);
    } else if (taking->received == LOCAL_RECEIVED_PACKET && taking->packet.kind == LOCAL_PACKET_ATTACH) {
        (void)map_memory(taking, fds[0]);
    }
    if (taking->is_accept_socket) close(taking->socket);
    taking->is_accept_socket = false;
}

/* What nobody wants any more. */
static void drop_taken(struct local_taking *taking)
{
    uint64_t len_bytes = taking->packet.kind == LOCAL_PACKET_HELLO ? local_ring_bytes(taking->packet.hello.slot_count)
                                                                   : taking->packet.segment.len_bytes;
    local_file_free(&taking->replaced);
    if (taking->is_accept_socket) close(taking->socket);
    if (taking->address != NULL && taking->packet.kind == LOCAL_PACKET_HELLO) close(taking->control_socket);
    if (taking->address != NULL) tl_pages_unmap(taking->address, len_bytes);
    tl_mapped_file_put(taking->file);
}

/* ---------------------------------------------------------------------------------------------------- dropping -- */

static void drop_leftovers(const struct local_leftovers *leftovers)
{
    struct local_ring ring = leftovers->ring;
    for (unsigned i = 0; i < leftovers->socket_count; i++)
        close(leftovers->sockets[i]);
    local_ring_unmap(&ring);
    for (size_t i = 0; i < leftovers->mapped_count; i++)
        local_unmap(&leftovers->mapped[i]);
    for (size_t i = 0; i < leftovers->file_count; i++)
        local_file_free(&leftovers->files[i]);
    for (size_t i = 0; i < leftovers->segment_count; i++)
        close(leftovers->segments[i]);
    free(leftovers->segments);
    free(leftovers->mapped);
    free(leftovers->files);
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

/* False: there is nowhere to put them any more. */
static bool hand_over(struct local_helper *helper, uint64_t done_bytes, size_t len_bytes)
{
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    bool is_wanted = !helper->is_ended && helper->reading.destination != NULL;
    /* Only large tensors are read. */
    if (is_wanted) tl_copy_uncached(helper->reading.destination + done_bytes, helper->buffer, len_bytes);
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    return is_wanted;
}

static int read_memory(struct local_helper *helper)
{
    const struct local_reading *reading = &helper->reading;
    if (helper->buffer == NULL) helper->buffer = aligned_alloc(TL_PAGE_BYTES, BUFFER_BYTES);
    if (helper->buffer == NULL) return ENOMEM;
    for (uint64_t done_bytes = 0; done_bytes < reading->len_bytes;) {
        size_t len_bytes = (size_t)tl_min_u64(reading->len_bytes - done_bytes, BUFFER_BYTES);
        struct iovec to = {.iov_base = helper->buffer, .iov_len = len_bytes};
        struct iovec from = {.iov_base = (void *)(uintptr_t)(reading->source + done_bytes), .iov_len = len_bytes};
        ssize_t read_bytes = process_vm_readv(reading->peer, &to, 1, &from, 1, 0);
        if (read_bytes <= 0) return read_bytes < 0 ? errno : EFAULT;
        if (!hand_over(helper, done_bytes, (size_t)read_bytes)) return ECANCELED;
        done_bytes += (uint64_t)read_bytes;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

/* Of one that has ended: what it has still, and the helper thread itself. */
static void finish(struct local_helper *helper)
{
    if (helper->job == LOCAL_JOB_DROP) local_unmap(&helper->dropping); /* that it has not begun with */
    if (helper->given == LOCAL_JOB_TAKE) drop_taken(&helper->taking);  /* nobody was told of it */
    drop_leftovers(&helper->leftovers);
    remove_from_ended(helper);
    pthread_cond_destroy(&helper->has_work);
    pthread_mutex_destroy(&helper->mutex);
    free(helper->buffer);
    free(helper);
}

/* With the mutex. Waits for a job, or the end; false: neither has come for a while. */
static bool wait_for_job(struct local_helper *helper)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += IDLE_NS / TL_NS_PER_SEC;
    while (helper->job == LOCAL_JOB_NONE && !helper->is_ended) {
        int error = pthread_cond_timedwait(&helper->has_work, &helper->mutex, &until);
        if (error == ETIMEDOUT) return helper->job != LOCAL_JOB_NONE || helper->is_ended;
        TL_CHECK(error == 0);
    }
    return true;
}

/* Without the mutex. */
static void do_job(struct local_helper *helper, enum local_job job)
{
    if (job == LOCAL_JOB_TAKE) {
        take(&helper->taking);
    } else if (job == LOCAL_JOB_READ) {
        helper->reading.error = read_memory(helper);
    } else {
        local_unmap(&helper->dropping);
    }
}

/* With the mutex. */
static void tell(struct local_helper *helper)
{
    const uint64_t one = 1;
    atomic_store_explicit(&helper->is_done, true, memory_order_release);
    (void)!write(helper->done_fd, &one, sizeof(one));
}

/* One that has ended and could not be given a thread; NULL: none. */
static struct local_helper *take_orphan(void)
{
    struct local_helper *orphan = NULL;
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.helpers, link)
    {
        struct local_helper *helper = TL_CONTAINER_OF(link, struct local_helper, link);
        if (helper->is_orphan) orphan = helper;
    }
    if (orphan != NULL) orphan->is_orphan = false;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return orphan;
}

static void *finish_orphans(void *argument)
{
    struct local_helper *orphan;
    (void)argument;
    while ((orphan = take_orphan()) != NULL)
        finish(orphan);
    return NULL;
}

static void *run(void *argument)
{
    struct local_helper *helper = argument;
    pthread_setname_np(pthread_self(), "tl-helper");
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    while (wait_for_job(helper) && !helper->is_ended) {
        enum local_job job = helper->job;
        TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
        do_job(helper, job);
        TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
        helper->job = LOCAL_JOB_NONE;
        if (!helper->is_ended) tell(helper);
    }
    bool is_ended = helper->is_ended;
    helper->has_thread = false;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    if (!is_ended) return NULL; /* another thread is started when there is a job */
    finish(helper);
    return finish_orphans(NULL);
}

/* ---------------------------------------------------------------------------------------------- of the reactor -- */

static bool has_orphan(void)
{
    bool is_one = false;
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.helpers, link)
    is_one |= TL_CONTAINER_OF(link, struct local_helper, link)->is_orphan;
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

enum tl_status local_helper_may_serve(uint64_t peer, struct tl_error *ret_error)
{
    unsigned left = 0;
    struct tl_error error;
    if (has_orphan() && tl_thread_start("tl-helper", finish_orphans, NULL, NULL, &error) != TL_OK)
        return tl_error_copy(ret_error, &error); /* a queue pair needs threads, too */
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.helpers, link)
    left += peer != 0 && TL_CONTAINER_OF(link, struct local_helper, link)->peer == peer;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return check_left(left, LOCAL_MAX_LEFT_OF_PEER, "this peer", ret_error);
}

enum tl_status local_helper_may_serve_user(uid_t uid, struct tl_error *ret_error)
{
    unsigned left = 0;
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    TL_LIST_FOREACH(&ended.helpers, link)
    left += TL_CONTAINER_OF(link, struct local_helper, link)->uid == uid;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
    return check_left(left, LOCAL_MAX_LEFT_OF_USER, "processes of the peer's user", ret_error);
}

struct local_helper *local_helper_make(uint64_t peer, int done_fd)
{
    pthread_condattr_t attributes;
    struct local_helper *helper = calloc(1, sizeof(*helper));
    if (helper == NULL) return NULL;
    tl_list_init(&helper->link);
    helper->peer = peer;
    helper->done_fd = done_fd;
    pthread_mutex_init(&helper->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&helper->has_work, &attributes);
    pthread_condattr_destroy(&attributes);
    return helper;
}

static enum tl_status give(struct local_helper *helper, enum local_job job, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    atomic_store_explicit(&helper->is_done, false, memory_order_relaxed);
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->job = job;
    if (helper->has_thread) {
        pthread_cond_signal(&helper->has_work);
    } else {
        status = tl_thread_start("tl-helper", run, helper, NULL, ret_error);
        helper->has_thread = status == TL_OK;
        if (status != TL_OK) helper->job = LOCAL_JOB_NONE;
    }
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    if (status == TL_OK) helper->given = job;
    return status;
}

enum tl_status local_helper_take(struct local_helper *helper, const struct local_taking *taking,
                                 struct tl_error *ret_error)
{
    TL_CHECK(helper->given == LOCAL_JOB_NONE);
    helper->taking = *taking;
    helper->taking.error.code = TL_OK;
    return give(helper, LOCAL_JOB_TAKE, ret_error);
}

enum tl_status local_helper_read(struct local_helper *helper, const struct local_reading *reading,
                                 struct tl_error *ret_error)
{
    TL_CHECK(helper->given == LOCAL_JOB_NONE);
    helper->reading = *reading;
    return give(helper, LOCAL_JOB_READ, ret_error);
}

enum tl_status local_helper_drop(struct local_helper *helper, const struct local_mapped *mapped,
                                 struct tl_error *ret_error)
{
    TL_CHECK(helper->given == LOCAL_JOB_NONE);
    helper->dropping = *mapped;
    return give(helper, LOCAL_JOB_DROP, ret_error);
}

bool local_helper_is_busy(const struct local_helper *helper)
{
    return helper->given != LOCAL_JOB_NONE;
}

enum local_job local_helper_done(struct local_helper *helper)
{
    enum local_job job = helper->given;
    if (job == LOCAL_JOB_NONE || !atomic_load_explicit(&helper->is_done, memory_order_acquire)) return LOCAL_JOB_NONE;
    helper->given = LOCAL_JOB_NONE;
    return job;
}

struct local_taking *local_helper_taken(struct local_helper *helper)
{
    return &helper->taking;
}

const struct local_reading *local_helper_has_read(const struct local_helper *helper)
{
    return &helper->reading;
}

void local_helper_forget(struct local_helper *helper)
{
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
}

static bool has_something(const struct local_helper *helper)
{
    const struct local_leftovers *leftovers = &helper->leftovers;
    return helper->given == LOCAL_JOB_TAKE || leftovers->socket_count > 0 || leftovers->ring.head != NULL ||
           leftovers->mapped_count > 0 || leftovers->files != NULL || leftovers->segment_count > 0;
}

/* What it has is not touched here: the next helper thread that comes back sees to it, or a thread that is started
 * later. */
static void leave_orphan(struct local_helper *helper)
{
    TL_CHECK(pthread_mutex_lock(&ended.mutex) == 0);
    helper->is_orphan = true;
    TL_CHECK(pthread_mutex_unlock(&ended.mutex) == 0);
}

void local_helper_end(struct local_helper *helper, uid_t uid, const struct local_leftovers *leftovers)
{
    struct tl_error error;
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->is_ended = true;
    helper->uid = uid;
    helper->leftovers = *leftovers;
    add_to_ended(helper);
    if (helper->has_thread) {
        pthread_cond_signal(&helper->has_work);
    } else if (has_something(helper)) {
        helper->has_thread = tl_thread_start("tl-helper", run, helper, NULL, &error) == TL_OK;
    }
    bool is_over = !helper->has_thread && !has_something(helper), is_orphan = !helper->has_thread && !is_over;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    if (is_over) finish(helper);
    if (is_orphan) leave_orphan(helper);
}

void local_helper_drop_all(const struct local_leftovers *leftovers)
{
    struct local_helper *helper = local_helper_make(0, -1);
    if (helper != NULL)
        local_helper_end(helper, (uid_t)-1, leftovers);
    else
        drop_leftovers(leftovers);
}
