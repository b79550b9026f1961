// SPDX-License-Identifier: Apache-2.0
/* Sides over the local provider: what they count, and how they are made and ended. */
#include "fakes/local_sides.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dataplane/pages.h"

struct side a, b;
static unsigned jobs_done;

static void on_done(struct tl_work *work, enum tl_status status)
{
    struct job *job = TL_CONTAINER_OF(work, struct job, work);
    job->done++;
    job->order = ++jobs_done;
    job->status = status;
}

struct job new_job(void)
{
    return (struct job){.work = {TL_WORK_MAGIC, on_done}};
}

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 0);
    side->messages++;
    side->last_len = len_bytes;
    memcpy(side->last, data, len_bytes);
    if (side->answers) side_message(side, side->last, len_bytes, NULL);
}

static void on_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 0);
    side->immediates++;
    side->last_immediate = immediate;
    side->last_immediate_len = len_bytes;
    if (side->watched != NULL) side->watched_value = *side->watched;
}

static void on_broken(void *owner, const struct tl_error *reason)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 0);
    side->broken++;
    side->reason = *reason;
}

static void on_drained(void *owner)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 1);
    ck_assert_uint_eq(side->drained, 0);
    side->drained++;
}

const struct tl_queue_pair_events side_events = {on_message, on_immediate, on_broken, on_drained};

void side_poll(struct side *side)
{
    if (side->provider != NULL) (void)side->provider->ops->poll(side->provider);
}

void side_open(struct side *side, const char *name, const struct tl_local_options *options)
{
    struct tl_error error = {0};
    *side = (struct side){.name = name};
    static const struct tl_local_options defaults;
    ck_assert_msg(tl_local_open(options != NULL ? options : &defaults, &side->provider, &error) == TL_OK, "%s",
                  error.message);
}

void side_create(struct side *side, uint32_t slots, uint32_t work)
{
    struct tl_error error = {0};
    const struct tl_queue_pair_options options = {.slot_count = slots, .work_count = work, .keys = TL_KEYS_REGION};
    *side = (struct side){.name = side->name, .provider = side->provider};
    ck_assert_msg(tl_queue_pair_create(side->provider, &options, &side_events, side, &side->pair, &error) == TL_OK,
                  "%s", error.message);
}

void side_introduce(const struct side *side, struct tl_introduction *ret_introduction)
{
    side->pair->ops->introduce(side->pair, ret_introduction);
}

void side_connect(struct side *side, const struct tl_introduction *peer)
{
    struct tl_error error = {0};
    ck_assert_msg(side->pair->ops->connect(side->pair, peer, &error) == TL_OK, "%s", error.message);
    side->is_connected = true;
}

void side_message(struct side *side, const void *data, uint32_t len_bytes, struct job *job)
{
    ck_assert_msg(side->pair->ops->room(side->pair) > 0, "%s: no room: %s", side->name, side->reason.message);
    side->pair->ops->message(side->pair, data, len_bytes, job != NULL ? &job->work : NULL);
    tl_queue_pair_ring(side->pair);
}

void side_write(struct side *side, const void *source, uint64_t len_bytes, const struct tl_exposure *exposure,
                uint64_t offset_bytes, bool has_immediate, uint32_t immediate, struct job *job)
{
    ck_assert_msg(side->pair->ops->room(side->pair) > 0, "%s: no room: %s", side->name, side->reason.message);
    side->pair->ops->write(side->pair, NULL, source, len_bytes, &exposure->descriptor, offset_bytes, has_immediate,
                           immediate, job != NULL ? &job->work : NULL);
    tl_queue_pair_ring(side->pair);
}

void side_expose(struct side *side, struct tl_region *region, void *address, uint64_t len_bytes,
                 struct tl_exposure *ret_exposure)
{
    struct tl_error error = {0};
    ck_assert_msg(tl_queue_pair_expose(side->pair, region, address, len_bytes, ret_exposure, &error) == TL_OK, "%s",
                  error.message);
}

struct tl_region *side_map(struct side *side, uint64_t len_bytes)
{
    struct tl_region *region;
    struct tl_error error = {0};
    ck_assert_msg(tl_region_map(side->provider, len_bytes, &region, &error) == TL_OK, "%s", error.message);
    return region;
}

void region_drop(struct tl_region *region)
{
    void *address = region->address;
    uint64_t len_bytes = region->len_bytes;
    tl_region_destroy(region);
    tl_pages_unmap(address, len_bytes);
}

void side_sever(struct side *side)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    side->pair->ops->sever(side->pair, &reason);
}

void side_end(struct side *side)
{
    if (side->pair == NULL) return;
    side_sever(side);
    int64_t end_ns = tl_clock_now_ns() + PATIENCE_NS;
    while (side->is_connected && !side->drained) {
        side_poll(side);
        ck_assert_msg(tl_clock_now_ns() < end_ns, "%s is never drained", side->name);
    }
    side->pair->ops->destroy(side->pair);
    side->pair = NULL;
}

void side_close(struct side *side)
{
    side_end(side);
    if (side->provider != NULL) side->provider->ops->close(side->provider);
    side->provider = NULL;
}

void sides_set_up(const struct tl_local_options *options)
{
    struct tl_introduction from_a, from_b;
    side_open(&a, "a", options);
    side_open(&b, "b", options);
    side_create(&a, 16, 16);
    side_create(&b, 16, 16);
    side_introduce(&a, &from_a);
    side_introduce(&b, &from_b);
    side_connect(&a, &from_b);
    side_connect(&b, &from_a);
    side_message(&a, "", 0, NULL);
    side_message(&b, "", 0, NULL);
    PUMP_UNTIL(a.messages == 1 && b.messages == 1);
    a.messages = b.messages = 0;
    /* All that connecting brings has been read. */
    for (unsigned i = 0; i < 4; i++) {
        tl_provider_disarm(a.provider);
        tl_provider_disarm(b.provider);
        side_poll(&a);
        side_poll(&b);
    }
}

void sides_tear_down(void)
{
    side_close(&a);
    side_close(&b);
}

void fill_bytes(uint8_t *bytes, uint64_t len_bytes, unsigned seed)
{
    for (uint64_t i = 0; i < len_bytes; i++)
        bytes[i] = (uint8_t)(i * 31 + (i >> 12) + seed);
}

unsigned count_descriptors(void)
{
    DIR *listing = opendir("/proc/self/fd");
    ck_assert_ptr_nonnull(listing);
    unsigned count = 0;
    while (readdir(listing) != NULL)
        count++;
    closedir(listing);
    return count;
}

unsigned count_mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "re");
    ck_assert_ptr_nonnull(file);
    char line[512];
    unsigned count = 0;
    while (fgets(line, sizeof(line), file) != NULL)
        count += strstr(line, "memfd:tensorlane") != NULL;
    ck_assert_int_eq(fclose(file), 0);
    return count;
}

pid_t fork_side(int (*child)(int fd), int *ret_fd)
{
    int fds[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        close(fds[0]);
        _exit(child(fds[1]));
    }
    close(fds[1]);
    *ret_fd = fds[0];
    return pid;
}

void send_introduction(int fd, const struct side *side)
{
    struct tl_introduction introduction;
    side_introduce(side, &introduction);
    ck_assert_int_eq(send(fd, introduction.bytes, introduction.len_bytes, MSG_NOSIGNAL), introduction.len_bytes);
}

bool receive_introduction(int fd, struct tl_introduction *ret_introduction)
{
    ssize_t len_bytes = recv(fd, ret_introduction->bytes, sizeof(ret_introduction->bytes), 0);
    if (len_bytes <= 0) return false;
    ret_introduction->len_bytes = (uint32_t)len_bytes;
    return true;
}
