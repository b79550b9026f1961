// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider as a whole: opening it, polling it, sleeping.
 *
 * A poll takes what peers have posted, executes what was posted here, and reports what is done. Now and then, and
 * after each sleep, it looks at the sockets, where something comes rarely: a HELLO, descriptors, the end of a peer.
 *
 * Before the provider sleeps, it sets a bit in each ring and looks once more at what peers have posted. A peer that
 * posts later sees the bit and writes to an eventfd that the epoll descriptor watches.
 */
#include "dataplane/local/local.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/memory/pages.h"
#include "dataplane/memory/segment.h"

/* How often the sockets are looked at while the reactor does not sleep; and how many polls go without a look at the
 * clock. */
#define LOOK_NS (TL_NS_PER_MS / 5)
#define POLLS_PER_CLOCK 64
/* A read that takes longer is assumed to wait for its memory, and the reactor sleeps. */
#define LONGEST_READ_NS (TL_NS_PER_SEC / 5)
/* Each pair has five descriptors: two control sockets, two eventfds, and the process. */
#define MAX_QUEUE_PAIRS 4096
#define OTHER_NUMBER UINT64_MAX
#define GONE_NUMBER UINT64_MAX
#define DONE_NUMBER (UINT64_MAX - 1)
#define TIMER_NUMBER (UINT64_MAX - 3)

/* ----------------------------------------------------------------------------------------------------- sockets -- */

bool local_watch(struct local_provider *provider, int fd, uint64_t number, uint32_t flags)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | flags, .data.u64 = number};
    return epoll_ctl(provider->base.fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static struct local_pair *find_pair(const struct local_provider *provider, uint64_t number)
{
    TL_LIST_FOREACH(&provider->pairs, link)
    {
        struct local_pair *pair = TL_CONTAINER_OF(link, struct local_pair, link);
        if (pair->number == number) return pair;
    }
    return NULL;
}

void local_forget_descriptor(struct local_provider *provider, int fd)
{
    (void)shutdown(fd, SHUT_RDWR);
    (void)epoll_ctl(provider->base.fd, EPOLL_CTL_DEL, fd, NULL);
}

static void handle(struct local_provider *provider, uint64_t number)
{
    if (number == DONE_NUMBER) { /* poll asks the helper threads */
        uint64_t count;
        (void)!read(provider->done_fd, &count, sizeof(count));
        return;
    }
    struct local_pair *pair = find_pair(provider, number & ~LOCAL_PROCESS_NUMBER);
    if (pair != NULL) (void)local_pair_read_packets(pair);
}

static void report_gone(struct local_provider *provider)
{
    struct tl_list gone, freed, *link;
    uint64_t number;
    tl_list_init(&gone);
    tl_list_init(&freed);
    TL_CHECK(pthread_mutex_lock(&provider->mutex) == 0);
    /* This is read under the mutex: the thread that has set has_gone may not have written yet, and a count that stays
     * unread would end every sleep. */
    (void)!read(provider->gone_fd, &number, sizeof(number));
    tl_list_splice_back(&gone, &provider->gone);
    tl_list_splice_back(&freed, &provider->freed);
    atomic_store_explicit(&provider->has_gone, false, memory_order_relaxed);
    TL_CHECK(pthread_mutex_unlock(&provider->mutex) == 0);
    while ((link = tl_list_pop_front(&gone)) != NULL)
        local_forget_region(TL_CONTAINER_OF(link, struct local_region, link));
    local_memories_freed(&freed);
}

/* Takes the events that there are, or waits for the first one. Returns whether the other descriptor is readable. */
static bool take_wakeups(struct local_provider *provider, bool may_wait)
{
    struct epoll_event events[LOCAL_MAX_WAKEUPS];
    bool is_other = false;
    int count = epoll_wait(provider->base.fd, events, LOCAL_MAX_WAKEUPS, may_wait ? -1 : 0);
    provider->wakeup_count = 0;
    for (int i = 0; i < count; i++) {
        is_other |= events[i].data.u64 == OTHER_NUMBER;
        if (events[i].data.u64 == TIMER_NUMBER) provider->timer_due_ns = TL_TIME_NEVER;
        provider->wakeups[provider->wakeup_count++] = events[i].data.u64;
    }
    return is_other;
}

/* Looks at the sockets that have something to read. Returns how many events there were. */
static unsigned look(struct local_provider *provider)
{
    provider->must_look = false;
    provider->next_look_ns = tl_clock_now_ns() + LOOK_NS;
    if (provider->wakeup_count == 0) take_wakeups(provider, false);
    unsigned happened = 0;
    for (unsigned i = 0; i < provider->wakeup_count; i++) {
        uint64_t number = provider->wakeups[i];
        if (number == OTHER_NUMBER || number == TIMER_NUMBER || number == LOCAL_WAKE_NUMBER) continue;
        handle(provider, number);
        happened++;
    }
    provider->must_look |= provider->wakeup_count == LOCAL_MAX_WAKEUPS;
    provider->wakeup_count = 0;
    TL_LIST_FOREACH(&provider->pairs, link)
    {
        struct local_pair *pair = TL_CONTAINER_OF(link, struct local_pair, link);
        if (pair->state == LOCAL_CONNECTED) local_attach_segments(pair);
        if (pair->state == LOCAL_CONNECTED) local_memories_tell(pair);
        if (pair->packets.must_read) happened += local_pair_read_packets(pair);
    }
    return happened;
}

static bool is_time_to_look(struct local_provider *provider)
{
    if (provider->must_look) return true;
    if (--provider->polls_to_look > 0) return false;
    provider->polls_to_look = POLLS_PER_CLOCK;
    return tl_clock_now_ns() >= provider->next_look_ns;
}

/* -------------------------------------------------------------------------------------------------------- poll -- */

/* Polls one pair, which may be destroyed when this returns. */
static unsigned poll_pair(struct local_pair *pair)
{
    unsigned events = 0;
    if (pair->state < LOCAL_ENDING && local_pair_is_reading(pair)) events += local_pair_ask_helpers(pair);
    if (pair->state == LOCAL_CONNECTED) {
        tl_quota_renew(&pair->provider->base.quota);
        events += local_take_slots(pair, LOCAL_SLOTS_PER_POLL, LOCAL_MESSAGES_PER_POLL);
        if (pair->queue.executed != pair->queue.posted || pair->rings.has_posted) events += local_execute_posts(pair);
        if (pair->queue.completed != pair->queue.posted) events += local_complete(pair);
    }
    if (pair->state == LOCAL_ENDING) {
        local_pair_end(pair);
        events++; /* it may go on in the next poll */
    } else if (pair->state == LOCAL_DRAINING) {
        events += local_pair_drain(pair);
    }
    return events;
}

static void set_states(struct local_provider *provider, bool is_asleep)
{
    TL_LIST_FOREACH(&provider->pairs, link)
    {
        struct local_pair *pair = TL_CONTAINER_OF(link, struct local_pair, link);
        if (pair->state != LOCAL_CONNECTED) continue;
        uint32_t state = provider->sleeps * LOCAL_STATE_SLEEPS;
        if (is_asleep) {
            state |= LOCAL_STATE_SLEEPING | (pair->rings.is_stalled ? LOCAL_STATE_STALLED : 0);
            atomic_store_explicit(&pair->rings.in.head->consumed, pair->rings.in.next, memory_order_release);
        }
        atomic_store_explicit(&pair->rings.in.head->state, state, memory_order_relaxed);
    }
}

/* Returns whether a helper thread, ours or the peer's, is reading memory and is expected to end soon. */
static bool is_reading(const struct local_pair *pair)
{
    bool is_under_way = pair->reading.is_under_way || pair->queue.reads_posted != pair->queue.reads_answered;
    return is_under_way && pair->state == LOCAL_CONNECTED &&
           pair->provider->next_look_ns - pair->queue.read_began_ns < LONGEST_READ_NS;
}

static unsigned provider_poll(struct tl_provider *base)
{
    struct local_provider *provider = local_provider_of(base);
    unsigned events = 0;
    base->helper_until_ns = 0;
    if (is_time_to_look(provider)) events += look(provider);
    if (atomic_load_explicit(&provider->has_gone, memory_order_acquire)) report_gone(provider);
    struct tl_list *link = provider->pairs.next;
    while (link != &provider->pairs) {
        struct local_pair *pair = TL_CONTAINER_OF(link, struct local_pair, link);
        provider->cursor = link->next;
        if (is_reading(pair) && pair->queue.read_until_ns > base->helper_until_ns)
            base->helper_until_ns = pair->queue.read_until_ns;
        events += poll_pair(pair);
        link = provider->cursor;
    }
    provider->cursor = NULL;
    /* When there were events the reactor does not sleep. */
    if (events > 0 && provider->is_armed) {
        set_states(provider, false);
        provider->is_armed = false;
    }
    return events;
}

/* Tells peers which processor this thread runs on, too. */
static bool provider_shares_processor(struct tl_provider *base)
{
    uint32_t processor = (uint32_t)sched_getcpu() + 1, peer_count = 0;
    bool is_elsewhere = processor == 0;
    TL_LIST_FOREACH(&local_provider_of(base)->pairs, link)
    {
        struct local_rings *rings = &TL_CONTAINER_OF(link, struct local_pair, link)->rings;
        if (TL_CONTAINER_OF(link, struct local_pair, link)->state != LOCAL_CONNECTED) continue;
        if (rings->processor != processor)
            atomic_store_explicit(&rings->in.head->processor, processor, memory_order_relaxed);
        rings->processor = processor;
        is_elsewhere |= atomic_load_explicit(&rings->out.head->processor, memory_order_relaxed) != processor;
        peer_count++;
    }
    return peer_count > 0 && !is_elsewhere;
}

static bool provider_arm(struct tl_provider *base)
{
    struct local_provider *provider = local_provider_of(base);
    provider->sleeps++;
    provider->is_armed = true;
    set_states(provider, true);
    /* This fence ensures that either a peer sees that we sleep, or the next poll sees what the peer has posted. */
    atomic_thread_fence(memory_order_seq_cst);
    return true;
}

static void provider_disarm(struct tl_provider *base, bool is_woken)
{
    struct local_provider *provider = local_provider_of(base);
    if (provider->is_armed) set_states(provider, false);
    provider->is_armed = false;
    provider->must_look |= is_woken;
}

/* Makes a sleep end at due_ns. To set a timer takes a system call, and a time-out of epoll_wait even longer: so a timer
 * that is due earlier stays as it is, and ends a later sleep early. */
static void set_timer(struct local_provider *provider, int64_t due_ns)
{
    if (due_ns >= provider->timer_due_ns) return;
    const struct itimerspec setting = {
        .it_value = {.tv_sec = due_ns / TL_NS_PER_SEC, .tv_nsec = due_ns % TL_NS_PER_SEC}};
    TL_CHECK(timerfd_settime(provider->timer_fd, TFD_TIMER_ABSTIME, &setting, NULL) == 0);
    provider->timer_due_ns = due_ns;
}

static bool provider_sleep(struct tl_provider *base, int other, int64_t until_ns)
{
    struct local_provider *provider = local_provider_of(base);
    if (other != provider->other_fd && provider->other_fd >= 0) {
        (void)epoll_ctl(base->fd, EPOLL_CTL_DEL, provider->other_fd, NULL);
        provider->other_fd = -1;
    }
    if (other < 0) return false;
    if (other != provider->other_fd) {
        if (!local_watch(provider, other, OTHER_NUMBER, 0)) return true; /* without memory there is no sleep */
        provider->other_fd = other;
    }
    set_timer(provider, until_ns);
    return provider->wakeup_count == 0 && take_wakeups(provider, true);
}

/* -------------------------------------------------------------------------------------------- opening, closing -- */

static void provider_close(struct tl_provider *base)
{
    struct local_provider *provider = local_provider_of(base);
    TL_CHECK(tl_list_is_empty(&provider->pairs));
    report_gone(provider);
    if (provider->timer_fd >= 0) close(provider->timer_fd);
    if (provider->done_fd >= 0) close(provider->done_fd);
    if (provider->gone_fd >= 0) close(provider->gone_fd);
    if (base->fd >= 0) close(base->fd);
    pthread_mutex_destroy(&provider->mutex);
    free(provider->socket_folder);
    free(provider);
}

static const struct tl_provider_ops local_ops = {
    .name = "local",
    .settings = "local",
    .close = provider_close,
    .poll = provider_poll,
    .arm = provider_arm,
    .disarm = provider_disarm,
    .sleep = provider_sleep,
    .region_create = local_region_create,
    .region_map = local_region_map,
    .region_destroy = local_region_destroy,
    .create = local_pair_create,
    .get_address = local_pair_get_address,
    .check = local_address_check,
    .connect = local_pair_connect,
    .disconnect = local_pair_disconnect,
    .destroy = local_pair_destroy,
    .space = local_space,
    .message_place = local_message_place,
    .message = local_message,
    .write = local_write,
    .expose = local_expose,
    .revoke = local_revoke,
    .doorbell = local_ring_doorbell,
    .share = local_share,
    .map = local_map,
    .show_memory = local_show_memory,
    .find_memory = local_find_memory,
    .shares_processor = provider_shares_processor,
};

static enum tl_status take_options(struct local_provider *provider, const struct tl_local_options *options,
                                   struct tl_error *ret_error)
{
    provider->is_reading_forbidden = options->is_reading_forbidden;
    if (options->socket_folder == NULL) return TL_OK;
    provider->socket_folder = strdup(options->socket_folder);
    if (provider->socket_folder != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the local transport");
}

static enum tl_status open_descriptors(struct local_provider *provider, struct tl_error *ret_error)
{
    provider->base.fd = epoll_create1(EPOLL_CLOEXEC);
    if (provider->base.fd >= 0) provider->gone_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (provider->gone_fd >= 0) provider->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (provider->done_fd >= 0) provider->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (provider->timer_fd < 0) return tl_error_set_errno(ret_error, errno, "no descriptor for the local transport");
    if (local_watch(provider, provider->gone_fd, GONE_NUMBER, 0) &&
        local_watch(provider, provider->done_fd, DONE_NUMBER, 0) &&
        local_watch(provider, provider->timer_fd, TIMER_NUMBER, EPOLLET))
        return TL_OK;
    return tl_error_set_errno(ret_error, errno, "cannot watch the descriptors of the local transport");
}

/* Makes an accept socket and closes it again: what a sandbox or the folder forbids should be known before the first
 * peer. */
static enum tl_status try_accept_socket(const struct local_provider *provider, struct tl_error *ret_error)
{
    struct local_address unused = {.name_bytes = 0};
    int accept_socket;
    local_choose_token(unused.token); /* as long as the socket exists, other processes could send to it */
    enum tl_status status = local_accept_socket_open(provider, &unused, &accept_socket, ret_error);
    if (status != TL_OK) return status;
    close(accept_socket);
    local_accept_socket_remove_name(&unused);
    if (provider->socket_folder != NULL) local_clean_folder(provider->socket_folder);
    return TL_OK;
}

/* Makes shared memory and unmaps it again, because a sandbox may forbid it. */
static enum tl_status try_memory(struct tl_error *ret_error)
{
    int fd;
    void *address;
    struct tl_error error;
    if (tl_segment_make("tensorlane-segment", TL_PAGE_BYTES, TL_SEGMENT_SMALL_PAGES, &fd, &address, &error) != TL_OK) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s (memfd_create)", error.message);
    }
    tl_pages_unmap(address, TL_PAGE_BYTES);
    close(fd);
    return TL_OK;
}

enum tl_status tl_local_open(const struct tl_local_options *options, struct tl_provider **ret_provider,
                             struct tl_error *ret_error)
{
    struct local_provider *provider = calloc(1, sizeof(*provider));
    if (provider == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the local transport");
    provider->base.ops = &local_ops;
    provider->base.limits = (struct tl_provider_limits){.is_processor_writing = true,
                                                        .max_write_bytes = UINT64_C(1) << 40,
                                                        .max_queue_pairs = MAX_QUEUE_PAIRS,
                                                        .max_pool_regions = LOCAL_MAX_POOL_REGIONS,
                                                        .numa_node = -1};
    provider->base.fd = -1;
    provider->gone_fd = provider->done_fd = provider->timer_fd = -1;
    provider->timer_due_ns = TL_TIME_NEVER;
    provider->own_uid = geteuid();
    provider->unknown_uid = tl_unix_unknown_uid();
    provider->polls_to_look = 1;
    provider->must_look = true;
    tl_list_init(&provider->pairs);
    tl_list_init(&provider->gone);
    tl_list_init(&provider->freed);
    pthread_mutex_init(&provider->mutex, NULL);
    snprintf(provider->base.name, sizeof(provider->base.name), "local");
    snprintf(provider->base.reason, sizeof(provider->base.reason), "shared memory with workers of this host");
    enum tl_status status = take_options(provider, options, ret_error);
    if (status == TL_OK) status = tl_host_id_get(provider->host_id, ret_error);
    if (status == TL_OK) status = try_memory(ret_error);
    if (status == TL_OK) status = open_descriptors(provider, ret_error);
    if (status == TL_OK) status = try_accept_socket(provider, ret_error);
    if (status != TL_OK) {
        provider_close(&provider->base);
        return status;
    }
    *ret_provider = &provider->base;
    return TL_OK;
}

void tl_local_get_stats(const struct tl_provider *provider, struct tl_local_stats *ret_stats)
{
    *ret_stats = local_provider_of(provider)->stats;
}
