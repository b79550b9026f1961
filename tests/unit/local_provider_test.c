// SPDX-License-Identifier: Apache-2.0
/* Writes, exposures, sleeping and the end of connections of the local provider, with both sides in one process, and the
 * tests that every provider has to pass. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dataplane/local/local_internal.h"
#include "dataplane/probe.h"
#include "fakes/local_sides.h"
#include "fakes/provider_cases.h"
#include "fakes/run_suite.h"

static void setup(void)
{
    sides_set_up(NULL);
}

static void set_up_unread(void)
{
    sides_set_up(&(struct tl_local_options){.is_reading_forbidden = true});
}

/* ---------------------------------------------------------------------------------------------------- messages -- */

START_TEST(a_probe)
{
    struct tl_error error = {0};
    ck_assert_msg(tl_provider_probe(a.provider, TL_KEYS_REGION, PATIENCE_NS, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(tl_provider_probe(a.provider, TL_KEYS_WINDOW, PATIENCE_NS, &error), TL_FAILED_PRECONDITION);
}
END_TEST

/* Messages that are posted while the peer reads nothing wait at the sender, and arrive in order. */
START_TEST(a_reader_that_pauses)
{
    unsigned count = 0;
    for (; a.pair->ops->space(a.pair) > 0; count++)
        side_message(&a, &count, sizeof(count), NULL);
    ck_assert_uint_ge(count, 16 + 12);
    PUMP_UNTIL(b.messages == count);
    ck_assert_mem_eq(b.last, &(unsigned){count - 1}, sizeof(unsigned));
    PUMP_UNTIL(a.pair->ops->space(a.pair) == 16);
}
END_TEST

/* What came with a few messages is answered before more are taken. */
START_TEST(a_poll_takes_a_few_messages)
{
    enum { MANY = 12, MOST = 4 };
    for (unsigned i = 0; i < MANY; i++)
        side_message(&a, &i, sizeof(i), NULL);
    side_poll(&a);
    for (unsigned i = 1; i <= MANY / MOST; i++) {
        side_poll(&b);
        ck_assert_uint_eq(b.messages, i * MOST);
    }
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ writes -- */

/* The write is larger than what one poll copies, and goes to a segment whose pages are checked before it. A message in
 * the other direction arrives meanwhile; a message that was posted after the write arrives after it. */
START_TEST(large_writes)
{
    const uint64_t len_bytes = 16 * MIB;
    struct tl_exposure exposure = {0};
    struct job large = new_job(), after = new_job();
    struct tl_region *region = side_map(&b, len_bytes + 4096);
    uint8_t *target = region->address, *source = malloc(len_bytes);
    fill_bytes(source, len_bytes, 2);
    side_expose(&b, region, target + 100, len_bytes, &exposure);
    b.watched = target + 100 + len_bytes - 1;
    side_write(&a, source, len_bytes, &exposure, 0, true, 1, &large);
    side_message(&a, "after", 5, &after);
    side_message(&b, "meanwhile", 9, NULL);
    PUMP_UNTIL(a.messages == 1);
    ck_assert_uint_eq(large.done, 0);
    ck_assert_uint_eq(b.messages, 0);
    PUMP_UNTIL(after.done == 1 && b.messages == 1);
    ck_assert_uint_eq(b.immediates, 1);
    ck_assert_uint_lt(large.order, after.order);
    ck_assert_uint_eq(b.watched_value, source[len_bytes - 1]);
    ck_assert_int_eq(memcmp(target + 100, source, len_bytes), 0);
    struct tl_local_stats stats;
    tl_local_get_stats(a.provider, &stats);
    ck_assert_uint_eq(stats.bytes_written, len_bytes);
    region_drop(region);
    free(source);
}
END_TEST

/* Posted writes cannot be cancelled, so that no more can be posted while many bytes wait. */
START_TEST(much_that_waits_leaves_no_space)
{
    static uint8_t source[12 * MIB];
    struct tl_exposure exposure = {0};
    struct tl_region *region = side_map(&b, sizeof(source));
    side_expose(&b, region, region->address, sizeof(source), &exposure);
    struct job first = new_job(), second = new_job();
    uint32_t space = a.pair->ops->space(a.pair);
    side_write(&a, source, sizeof(source), &exposure, 0, true, 1, &first);
    ck_assert_uint_eq(a.pair->ops->space(a.pair), space - 1);
    side_write(&a, source, sizeof(source), &exposure, 0, true, 2, &second);
    ck_assert_uint_eq(a.pair->ops->space(a.pair), 0);
    PUMP_UNTIL(first.done == 1);
    ck_assert_uint_gt(a.pair->ops->space(a.pair), 0);
    PUMP_UNTIL(second.done == 1);
    ck_assert_uint_eq(a.pair->ops->space(a.pair), space);
    region_drop(region);
}
END_TEST

/* There is no place while the ring of the peer is full, or while something waits to be carried out before. */
START_TEST(no_place_for_a_message)
{
    unsigned posted = 0;
    while (tl_queue_pair_message_place(a.pair) != NULL) {
        a.pair->ops->message(a.pair, &posted, sizeof(posted), NULL);
        posted++;
    }
    ck_assert_uint_gt(posted, 0);
    a.pair->ops->message(a.pair, &posted, sizeof(posted), NULL);
    posted++;
    ck_assert_ptr_null(tl_queue_pair_message_place(a.pair));
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(b.messages == posted);
    ck_assert_mem_eq(b.last, &(unsigned){posted - 1}, sizeof(unsigned));
    ck_assert_ptr_nonnull(tl_queue_pair_message_place(a.pair));
}
END_TEST

/* A poll takes no more of one pair than half of the quota, and others have their turn before the rest. */
START_TEST(a_flood_of_messages)
{
    enum { FLOOD = 24, MEMBERS = 64, MOST = TL_QUOTA / 2 / MEMBERS };
    b.members_of_message = MEMBERS;
    for (unsigned i = 0; i < FLOOD; i++)
        side_message(&a, "flood", 5, NULL);
    for (unsigned taken = 0; taken < FLOOD;) {
        (void)a.provider->ops->poll(a.provider); /* it has more than the ring holds */
        (void)b.provider->ops->poll(b.provider);
        ck_assert_uint_le(b.messages - taken, MOST);
        taken = b.messages;
    }
    ck_assert_uint_eq(tl_quota_most(&b.provider->quota), TL_QUOTA / 2);
}
END_TEST

/* So much is completed in one poll that was posted to one pair. */
START_TEST(a_flood_of_works)
{
    enum { FLOOD = 12, CHAIN = 64 };
    static struct job jobs[FLOOD][CHAIN];
    for (unsigned i = 0; i < FLOOD; i++) {
        for (unsigned j = 0; j < CHAIN; j++) {
            jobs[i][j] = new_job();
            if (j > 0) jobs[i][j - 1].work.next = &jobs[i][j].work;
        }
        side_message(&a, "flood", 5, &jobs[i][0]);
    }
    PUMP_UNTIL(jobs[FLOOD - 1][CHAIN - 1].done == 1);
    ck_assert_uint_le(tl_quota_most(&a.provider->quota), TL_QUOTA);
    ck_assert_uint_ge(tl_quota_most(&a.provider->quota), CHAIN);
}
END_TEST

/* So is the end of a pair: one side takes what the other has posted, which that one cancels. */
START_TEST(a_flood_at_the_end)
{
    enum { IN_THE_RING = 16, FLOOD = 14, CHAIN = 64 };
    static struct job jobs[FLOOD][CHAIN];
    b.members_of_message = CHAIN;
    for (unsigned i = 0; i < IN_THE_RING; i++)
        side_message(&a, "first", 5, NULL);
    for (unsigned i = 0; i < FLOOD; i++) {
        for (unsigned j = 0; j < CHAIN; j++) {
            jobs[i][j] = new_job();
            if (j > 0) jobs[i][j - 1].work.next = &jobs[i][j].work;
        }
        side_message(&a, "flood", 5, &jobs[i][0]);
    }
    side_disconnect(_i == 0 ? &a : &b);
    PUMP_UNTIL(a.drained && b.drained);
    ck_assert_uint_gt(b.messages * CHAIN, TL_QUOTA);
    for (unsigned i = 0; i < FLOOD; i++)
        for (unsigned j = 0; j < CHAIN; j++)
            ck_assert_uint_eq(jobs[i][j].done, 1);
    ck_assert_uint_le(tl_quota_most(&a.provider->quota), TL_QUOTA);
    ck_assert_uint_le(tl_quota_most(&b.provider->quota), TL_QUOTA);
}
END_TEST

/* The owner of the segments maps no memory of the writer. The writer unmaps each segment that was given up, and maps
 * the next one. */
START_TEST(segments_come_and_go)
{
    side_message(&a, "", 0, NULL);
    PUMP_UNTIL(b.messages == 1);
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < 40; i++) {
        struct tl_exposure exposure = {0};
        struct tl_region *region = side_map(&b, 8192);
        side_expose(&b, region, region->address, 8192, &exposure);
        side_write(&a, &i, sizeof(i), &exposure, 16, true, i, NULL);
        PUMP_UNTIL(b.immediates == i + 1);
        ck_assert_mem_eq((uint8_t *)region->address + 16, &i, sizeof(i));
        region_drop(region);
    }
    PUMP_UNTIL(count_mappings() == mappings && count_descriptors() == descriptors);
}
END_TEST

/* The peer unmaps a segment while it is asked to read memory; a thread does each of the two. */
START_TEST(reads_behind_segments_that_go)
{
    static uint8_t users[2 * MIB], source[2 * MIB];
    struct tl_exposure outside = {0};
    side_message(&a, "", 0, NULL);
    side_message(&b, "", 0, NULL);
    PUMP_UNTIL(a.messages == 1 && b.messages == 1);
    if (b.pair->outside_refusal != NULL) return;
    side_expose(&b, NULL, users, sizeof(users), &outside);
    for (unsigned i = 0; i < 10; i++) {
        struct tl_exposure exposure = {0};
        struct tl_region *region = side_map(&a, 32 * MIB);
        side_expose(&a, region, region->address, region->len_bytes, &exposure);
        side_write(&b, &i, sizeof(i), &exposure, 0, true, i, NULL);
        PUMP_UNTIL(a.immediates == i + 1);
        region_drop(region);
        side_poll(&a); /* sends the packet that the segment is gone */
        memset(source, (int)i + 1, sizeof(source));
        side_write(&a, source, sizeof(source), &outside, 0, true, i, NULL);
        PUMP_UNTIL(b.immediates == i + 1);
        ck_assert_mem_eq(users, source, sizeof(users));
    }
    b.pair->ops->revoke(b.pair, &outside, NULL);
}
END_TEST

/* The owner of a segment cannot punch holes into it once the peer has mapped it: the peer could get a signal. */
START_TEST(pages_stay)
{
    const uint64_t len_bytes = 8 * MIB;
    struct tl_exposure exposure = {0};
    struct tl_region *region = side_map(&b, len_bytes);
    side_expose(&b, region, region->address, len_bytes, &exposure);
    side_write(&a, "x", 1, &exposure, 5 * MIB, true, 1, NULL);
    PUMP_UNTIL(b.immediates == 1);
    ck_assert_int_eq(madvise(region->address, len_bytes, MADV_REMOVE), -1);
    ck_assert_int_eq(errno, EPERM);
    region_drop(region);
}
END_TEST

static unsigned count_pages(const struct tl_region *region)
{
    static unsigned char are_there[2 * TL_LOCAL_LAZY_BYTES / 4096];
    unsigned count = 0;
    ck_assert_uint_le(region->len_bytes, 2 * TL_LOCAL_LAZY_BYTES);
    ck_assert_int_eq(mincore(region->address, region->len_bytes, are_there), 0);
    for (uint64_t i = 0; i < region->len_bytes / 4096; i++)
        count += are_there[i] & 1;
    return count;
}

/* Small segments take memory only when they are used. The pages of large ones are got before they are used. */
START_TEST(pages_come_when_they_are_needed)
{
    /* The small segment is a page smaller than the limit, so that it does not consist of reserved huge pages, which are
     * taken at once. */
    struct tl_region *small = side_map(&a, TL_LOCAL_LAZY_BYTES - 4096), *large = side_map(&a, 2 * TL_LOCAL_LAZY_BYTES);
    while (count_pages(large) < large->len_bytes / 4096)
        usleep(1000);
    ck_assert_uint_eq(count_pages(small), 0);
    region_drop(small);
    region_drop(large);
}
END_TEST

/* A segment that is given up while its pages are being got goes away at once. */
START_TEST(a_segment_is_given_up_before_its_pages_are_there)
{
    for (int i = 0; i < 20; i++)
        region_drop(side_map(&a, 64 * MIB));
}
END_TEST

/* This must also hold where huge pages are reserved that this process may map but not touch. */
START_TEST(all_of_a_segment_can_be_written)
{
    struct tl_exposure exposure = {0};
    struct job job = new_job();
    uint8_t *source = malloc(TL_LOCAL_LAZY_BYTES);
    struct tl_region *region = side_map(&b, TL_LOCAL_LAZY_BYTES);
    fill_bytes(source, TL_LOCAL_LAZY_BYTES, 7);
    memset(region->address, 1, TL_LOCAL_LAZY_BYTES / 2);
    side_expose(&b, region, region->address, TL_LOCAL_LAZY_BYTES, &exposure);
    side_write(&a, source, TL_LOCAL_LAZY_BYTES, &exposure, 0, true, 7, &job);
    PUMP_UNTIL(b.immediates == 1);
    ck_assert_int_eq(memcmp(region->address, source, TL_LOCAL_LAZY_BYTES), 0);
    free(source);
    region_drop(region);
}
END_TEST

static void write_outside(uint64_t len_bytes)
{
    struct tl_exposure exposure = {0};
    struct job first = new_job(), second = new_job(), after = new_job();
    uint8_t *target = calloc(1, len_bytes + 1), *source = malloc(len_bytes);
    fill_bytes(source, len_bytes, 5);
    ck_assert_ptr_null(b.pair->outside_refusal);
    side_expose(&b, NULL, target, len_bytes, &exposure);
    side_write(&a, source, len_bytes / 2, &exposure, 0, false, 0, &first);
    side_write(&a, source + len_bytes / 2, len_bytes - len_bytes / 2, &exposure, len_bytes / 2, true, 77, &second);
    side_message(&a, "after", 5, &after);
    PUMP_UNTIL(after.done == 1 && b.messages == 1);
    ck_assert_uint_eq(b.immediates, 1);
    ck_assert_uint_eq(b.last_immediate_len, len_bytes - len_bytes / 2);
    ck_assert(first.order < second.order && second.order < after.order);
    ck_assert_int_eq(memcmp(target, source, len_bytes), 0);
    ck_assert_uint_eq(target[len_bytes], 0);
    struct tl_local_stats stats;
    tl_local_get_stats(b.provider, &stats);
    ck_assert_uint_eq(stats.bytes_read, len_bytes);
    b.pair->ops->revoke(b.pair, &exposure, NULL);
    free(target);
    free(source);
}

START_TEST(memory_of_users)
{
    write_outside(_i == 0 ? 100 : 9 * MIB + 5);
}
END_TEST

/* A write to an exposure that was revoked ends the connection and writes nothing. */
START_TEST(memory_that_is_not_exposed_any_more)
{
    struct tl_exposure exposure = {0};
    struct job job = new_job();
    uint8_t target[64] = {0}, source[64] = {1};
    side_expose(&b, NULL, target, sizeof(target), &exposure);
    struct tl_exposure revoked = exposure;
    b.pair->ops->revoke(b.pair, &exposure, NULL);
    side_expose(&b, NULL, target, sizeof(target), &exposure); /* this exposure uses the same entry */
    side_write(&a, source, sizeof(source), &revoked, 0, true, 1, &job);
    PUMP_UNTIL(b.drained && a.drained);
    ck_assert_uint_eq(job.status, TL_CANCELLED);
    ck_assert_uint_eq(b.immediates, 0);
    ck_assert_uint_eq(target[0], 0);
    ck_assert_ptr_nonnull(strstr(b.reason.message, "not exposed"));
}
END_TEST

START_TEST(reading_is_forbidden)
{
    struct tl_exposure exposure = {0};
    struct tl_error error = {0};
    uint8_t target[64];
    ck_assert_ptr_nonnull(strstr(b.pair->outside_refusal, "local.process_vm"));
    ck_assert_int_eq(tl_queue_pair_expose(b.pair, NULL, target, sizeof(target), &exposure, &error),
                     TL_FAILED_PRECONDITION);
}
END_TEST

/* A descriptor that no correct peer makes ends the connection and does no other harm. */
START_TEST(places_that_cannot_be)
{
    struct tl_exposure exposure = {0};
    struct job job = new_job();
    struct tl_region *region = side_map(&b, 8192);
    uint8_t source[16] = {0};
    side_expose(&b, region, region->address, 8192, &exposure);
    switch (_i) {
    case 0: /* the write passes the end of the exposed memory */
        side_write(&a, source, sizeof(source), &exposure, 8192 - 15, true, 1, &job);
        break;
    case 1:
        side_write(&a, source, sizeof(source), &exposure, UINT64_MAX - 7, true, 1, &job);
        break;
    case 2: /* the descriptor exposes more than the segment has */
        exposure.descriptor.bytes[24] = 1;
        exposure.descriptor.bytes[27] = 1;
        side_write(&a, source, sizeof(source), &exposure, 8192, true, 1, &job);
        break;
    case 3:
        exposure.descriptor.len_bytes--;
        side_write(&a, source, sizeof(source), &exposure, 0, true, 1, &job);
        break;
    default: /* the descriptor names a segment that was never passed */
        exposure.descriptor.bytes[7] = 0x7f;
        side_write(&a, source, sizeof(source), &exposure, 0, true, 1, &job);
        break;
    }
    PUMP_UNTIL(a.drained && b.drained);
    ck_assert_int_eq(job.status, TL_CANCELLED);
    ck_assert_uint_eq(b.immediates, 0);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "broken the protocol"));
    region_drop(region);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- sleeping -- */

static uint64_t wakes(const struct side *side)
{
    struct tl_local_stats stats;
    tl_local_get_stats(side->provider, &stats);
    return stats.wakes_sent;
}

/* Polls until there is nothing more to read. */
static void settle(struct side *side)
{
    do {
        side_poll(side);
        tl_provider_disarm(side->provider, true);
        side_poll(side);
    } while (side_is_readable(side, 0));
}

START_TEST(no_system_call_between_two_that_are_awake)
{
    b.answers = true;
    uint64_t before = wakes(&a) + wakes(&b);
    for (unsigned i = 1; i <= 200; i++) {
        side_message(&a, "ping", 4, NULL);
        PUMP_UNTIL(a.messages == i);
    }
    ck_assert_uint_eq(wakes(&a) + wakes(&b), before);
}
END_TEST

START_TEST(a_sleeper_is_woken_once)
{
    for (unsigned i = 1; i <= 100; i++) {
        settle(&b);
        ck_assert(tl_provider_arm(b.provider));
        ck_assert_uint_eq(b.provider->ops->poll(b.provider), 0);
        ck_assert(!side_is_readable(&b, 0));
        uint64_t before = wakes(&a);
        side_message(&a, "one", 3, NULL);
        side_message(&a, "two", 3, NULL);
        ck_assert_uint_eq(wakes(&a), before + 1);
        ck_assert(side_is_readable(&b, 1000));
        tl_provider_disarm(b.provider, true);
        PUMP_UNTIL(b.messages == 2 * i);
    }
}
END_TEST

/* A reader that has taken everything before it went to sleep knows it: the writer, which looks after the fact, does not
 * wake it. */
START_TEST(a_sleeper_that_knows_is_left_alone)
{
    for (unsigned i = 1; i <= 100; i++) {
        side_message(&a, "one", 3, NULL);
        PUMP_UNTIL(b.messages == i);
        settle(&b);
        ck_assert(tl_provider_arm(b.provider));
        ck_assert_uint_eq(b.provider->ops->poll(b.provider), 0);
        uint64_t before = wakes(&a);
        local_wake_peer(local_pair_of(a.pair), LOCAL_WAKE_SLOTS);
        ck_assert_uint_eq(wakes(&a), before);
        local_wake_peer(local_pair_of(a.pair), LOCAL_WAKE_ANSWER);
        ck_assert_uint_eq(wakes(&a), before + 1);
        tl_provider_disarm(b.provider, true);
    }
}
END_TEST

static bool shares_processor(const struct side *side)
{
    return side->provider->ops->shares_processor(side->provider);
}

/* Each side knows it of the other one once that has said so, and not of a peer that says nothing. */
START_TEST(peers_on_one_processor)
{
    cpu_set_t before, one;
    ck_assert_int_eq(sched_getaffinity(0, sizeof(before), &before), 0);
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    ck_assert_int_eq(sched_setaffinity(0, sizeof(one), &one), 0);
    ck_assert(!shares_processor(&a));
    ck_assert(shares_processor(&b));
    ck_assert(shares_processor(&a));
    _Atomic uint32_t *word = &local_pair_of(b.pair)->rings.out.head->processor;
    atomic_store(word, atomic_load(word) + 1);
    ck_assert(!shares_processor(&b));
    ck_assert_int_eq(sched_setaffinity(0, sizeof(before), &before), 0);
    side_end(&a);
    ck_assert(!shares_processor(&a));
}
END_TEST

static void fall_asleep(const struct side *side)
{
    ck_assert(tl_provider_arm(side->provider));
    ck_assert_uint_eq(side->provider->ops->poll(side->provider), 0);
    ck_assert(!side_is_readable(side, 0));
}

/* A wake is one write to the sleeper's eventfd, and no packet. */
START_TEST(a_wake_comes_through_the_eventfd)
{
    const struct local_sockets *sockets = &local_pair_of(b.pair)->sockets;
    uint64_t count;
    uint8_t byte;
    (void)!read(sockets->wake_in, &count, sizeof(count));
    settle(&b);
    fall_asleep(&b);
    side_message(&a, "wake", 4, NULL);
    ck_assert(side_is_readable(&b, 1000));
    ck_assert_int_eq(recv(sockets->in, &byte, 1, MSG_PEEK | MSG_DONTWAIT), -1);
    ck_assert_int_eq(read(sockets->wake_in, &count, sizeof(count)), sizeof(count));
    ck_assert_uint_eq(count, 1);
}
END_TEST

/* A peer that raises the count of its own eventfd to the maximum is not woken any more. Its eventfd makes the other
 * side neither wait nor fail, and other connections are not affected, because each has an eventfd of its own. */
START_TEST(an_eventfd_at_its_maximum)
{
    const uint64_t most = UINT64_MAX - 1;
    uint64_t count;
    int wake = local_pair_of(b.pair)->sockets.wake_in;
    (void)!read(wake, &count, sizeof(count));
    ck_assert_int_eq(write(wake, &most, sizeof(most)), sizeof(most));
    settle(&b);
    fall_asleep(&b);
    side_message(&a, "lost", 4, NULL);
    ck_assert(!side_is_readable(&b, 0));
    tl_provider_disarm(b.provider, true);
    PUMP_UNTIL(b.messages == 1);
    ck_assert_uint_eq(a.broken + b.broken, 0);
}
END_TEST

/* A packet ends the sleep as well. */
START_TEST(a_packet_wakes)
{
    struct tl_exposure exposure = {0};
    struct tl_region *region = side_map(&a, 4096);
    settle(&b);
    fall_asleep(&b);
    side_expose(&a, region, region->address, 4096, &exposure);
    tl_provider_disarm(a.provider, true);
    side_poll(&a);
    ck_assert(side_is_readable(&b, 1000));
    ck_assert_uint_eq(wakes(&a), 0);
    tl_provider_disarm(b.provider, true);
    PUMP_UNTIL(local_pair_of(b.pair)->mappings.count == 1);
    region_drop(region);
}
END_TEST

/* The provider itself sleeps on its own descriptor and on another one. */
START_TEST(sleeping_on_two_descriptors)
{
    int other = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    uint64_t one = 1;
    settle(&b);
    for (unsigned i = 1; i <= 100; i++) {
        ck_assert(tl_provider_arm(b.provider));
        if (b.provider->ops->poll(b.provider) > 0) continue; /* events that the last message has caused */
        ck_assert(!b.provider->ops->sleep(b.provider, other, tl_clock_deadline_ns(1000)));
        side_message(&a, "wake", 4, NULL);
        ck_assert(!b.provider->ops->sleep(b.provider, other, TL_TIME_NEVER));
        tl_provider_disarm(b.provider, true);
        ck_assert_uint_gt(b.provider->ops->poll(b.provider), 0);
        settle(&b);
    }
    ck_assert_uint_gt(b.messages, 50);
    ck_assert_int_eq(write(other, &one, sizeof(one)), sizeof(one));
    ck_assert(b.provider->ops->sleep(b.provider, other, TL_TIME_NEVER));
    tl_provider_disarm(b.provider, true);
    side_poll(&b);
    ck_assert(!b.provider->ops->sleep(b.provider, -1, 0));
    close(other);
}
END_TEST

/* Sleeps until this time, with as many calls as that takes. */
static void sleep_for(struct side *side, int other, int64_t time_ns)
{
    int64_t until_ns = tl_clock_now_ns() + time_ns;
    while (tl_clock_now_ns() < until_ns) {
        fall_asleep(side);
        ck_assert(!side->provider->ops->sleep(side->provider, other, until_ns));
        tl_provider_disarm(side->provider, true);
        settle(side);
    }
}

/* Each sleep ends: one that is longer than the one before, one that is shorter, and one after a sleep that something
 * else has ended, which leaves its timer set. */
START_TEST(sleeping_until_a_time)
{
    int other = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const uint64_t one = 1;
    uint64_t count;
    settle(&b);
    sleep_for(&b, other, TL_NS_PER_MS);
    sleep_for(&b, other, 3 * TL_NS_PER_MS);
    ck_assert_int_eq(write(other, &one, sizeof(one)), sizeof(one));
    ck_assert(b.provider->ops->sleep(b.provider, other, tl_clock_deadline_ns(PATIENCE_NS)));
    ck_assert_int_eq(read(other, &count, sizeof(count)), sizeof(count));
    sleep_for(&b, other, TL_NS_PER_MS);
    ck_assert_int_eq(write(other, &one, sizeof(one)), sizeof(one));
    ck_assert(b.provider->ops->sleep(b.provider, other, tl_clock_deadline_ns(TL_NS_PER_MS)));
    ck_assert_int_eq(read(other, &count, sizeof(count)), sizeof(count));
    sleep_for(&b, other, 5 * TL_NS_PER_MS);
    sleep_for(&b, other, 1);
    sleep_for(&b, other, -1);
    close(other);
}
END_TEST

/* A message that is posted between arm and the following poll is found by that poll. */
START_TEST(nothing_is_slept_over)
{
    ck_assert(tl_provider_arm(b.provider));
    side_message(&a, "now", 3, NULL);
    PUMP_UNTIL(b.messages == 1);
    uint64_t before = wakes(&a);
    side_message(&a, "awake", 5, NULL); /* the message that was found has ended the sleep */
    ck_assert_uint_eq(wakes(&a), before);
}
END_TEST

/* The ring is full while its writer sleeps: only free slots wake the writer. */
START_TEST(space_wakes_who_waits_for_it)
{
    for (unsigned i = 0; i < 20; i++)
        a.pair->ops->message(a.pair, "x", 1, NULL);
    tl_queue_pair_doorbell(a.pair);
    settle(&a);
    ck_assert(tl_provider_arm(a.provider));
    ck_assert_uint_eq(a.provider->ops->poll(a.provider), 0);
    ck_assert(!side_is_readable(&a, 0));
    for (unsigned i = 0; i < 100; i++)
        side_poll(&b);
    ck_assert_uint_ge(b.messages, 12);
    ck_assert_uint_lt(b.messages, 20);
    ck_assert(side_is_readable(&a, 1000));
    tl_provider_disarm(a.provider, true);
    PUMP_UNTIL(b.messages == 20);
    settle(&a);
    ck_assert(tl_provider_arm(a.provider));
    ck_assert_uint_eq(a.provider->ops->poll(a.provider), 0);
    for (unsigned i = 0; i < 12; i++)
        b.pair->ops->message(b.pair, "x", 1, NULL);
    tl_queue_pair_doorbell(b.pair);
    tl_provider_disarm(a.provider, true);
    PUMP_UNTIL(a.messages == 12);
}
END_TEST

START_TEST(the_end_wakes)
{
    settle(&b);
    ck_assert(tl_provider_arm(b.provider));
    ck_assert_uint_eq(b.provider->ops->poll(b.provider), 0);
    side_message(&a, "last", 4, NULL);
    side_end(&a);
    ck_assert(side_is_readable(&b, 1000));
    tl_provider_disarm(b.provider, true);
    PUMP_UNTIL(b.drained);
    ck_assert_uint_eq(b.messages, 1); /* the message that was posted before has arrived */
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- the end -- */

START_TEST(disconnect_cancels_what_is_open)
{
    struct job jobs[5];
    static uint8_t source[4 * MIB];
    struct tl_exposure exposure = {0};
    struct tl_region *region = side_map(&b, sizeof(source));
    side_expose(&b, region, region->address, sizeof(source), &exposure);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(jobs); i++) {
        jobs[i] = new_job();
        side_write(&a, source, sizeof(source), &exposure, 0, true, i, &jobs[i]);
    }
    side_disconnect(&a);
    side_disconnect(&a); /* a second call does nothing */
    PUMP_UNTIL(a.drained && b.drained);
    unsigned done = 0;
    for (unsigned i = 0; i < TL_ARRAY_COUNT(jobs); i++) {
        ck_assert_uint_eq(jobs[i].done, 1);
        if (jobs[i].status == TL_OK) done++;
        ck_assert(i == 0 || jobs[i].order > jobs[i - 1].order);
    }
    ck_assert_uint_lt(done, TL_ARRAY_COUNT(jobs));
    ck_assert_uint_le(done, b.immediates); /* each write that was reported as done has arrived */
    ck_assert_uint_eq(a.pair->ops->space(a.pair), 0);
    ck_assert_str_eq(a.reason.message, "the test is over");
    region_drop(region);
}
END_TEST

/* What is written before the end arrives, but for what releases memory: the peer counts that as not sent, and so must
 * the owner of the memory, or the value in it would be nowhere. */
START_TEST(no_release_arrives_at_the_end)
{
    struct tl_exposure exposure = {0};
    struct tl_region *region = side_map(&b, 4096);
    side_expose(&b, region, region->address, 4096, &exposure);
    side_write(&a, "x", 0, &exposure, 0, true, 0, NULL);
    PUMP_UNTIL(b.immediates == 1);
    side_write(&a, "x", 1, &exposure, 0, true, 1, NULL);
    side_write(&a, "x", 0, &exposure, 0, true, 2, NULL);
    side_disconnect(&b);
    PUMP_UNTIL(a.drained && b.drained);
    ck_assert_uint_eq(b.immediates, 2);
    region_drop(region);
}
END_TEST

/* The peer has closed the connection, which is not noticed yet: what is posted now must not be reported as done. */
START_TEST(nothing_is_done_after_the_end)
{
    struct tl_exposure exposure = {0};
    struct job before = new_job(), write = new_job(), message = new_job();
    struct tl_region *region = side_map(&b, 4096);
    side_expose(&b, region, region->address, 4096, &exposure);
    side_write(&a, "x", 1, &exposure, 0, true, 0, NULL);
    PUMP_UNTIL(b.immediates == 1);
    side_write(&a, "x", 1, &exposure, 0, true, 1, &before);
    side_disconnect(&b);
    while (!b.drained)
        side_poll(&b);
    ck_assert_uint_eq(b.immediates, 2); /* the write had been posted before the end */
    side_write(&a, "x", 1, &exposure, 0, true, 2, &write);
    side_message(&a, "x", 1, &message);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(before.status, TL_OK);
    ck_assert_int_eq(write.status, TL_CANCELLED);
    ck_assert_int_eq(message.status, TL_CANCELLED);
    region_drop(region);
}
END_TEST

START_TEST(a_thousand_connections)
{
    struct tl_pair_address from_a, from_b;
    side_end(&a);
    side_end(&b);
    PUMP_UNTIL(count_mappings() == 0);
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < 1000; i++) {
        struct tl_exposure exposure = {0};
        struct tl_region *region = side_map(&b, 4096);
        side_create(&a, 16, 16, TL_KEYS_REGION);
        side_create(&b, 16, 16, TL_KEYS_REGION);
        side_get_address(&a, &from_a);
        side_get_address(&b, &from_b);
        side_connect(i % 2 == 0 ? &a : &b, i % 2 == 0 ? &from_b : &from_a);
        if (i % 3 == 0) side_poll(&a), side_poll(&b); /* the HELLO comes before the other side connects */
        side_connect(i % 2 == 0 ? &b : &a, i % 2 == 0 ? &from_a : &from_b);
        side_expose(&b, region, region->address, 4096, &exposure);
        side_write(&a, &i, sizeof(i), &exposure, 0, true, i, NULL);
        if (i % 5 != 0) PUMP_UNTIL(b.immediates == 1);
        side_end(i % 4 < 2 ? &a : &b);
        side_end(i % 4 < 2 ? &b : &a);
        region_drop(region);
    }
    side_poll(&a);
    side_poll(&b);
    PUMP_UNTIL(count_mappings() == mappings);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

START_TEST(connections_that_are_never_made)
{
    struct tl_pair_address from_b;
    side_end(&a);
    side_end(&b);
    PUMP_UNTIL(count_mappings() == 0);
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < 50; i++) {
        side_create(&a, 16, 16, TL_KEYS_REGION);
        side_create(&b, 16, 16, TL_KEYS_REGION);
        side_get_address(&b, &from_b);
        if (i % 2 == 0) { /* b never gets the address of a, and does not answer */
            side_connect(&a, &from_b);
            side_message(&a, "lost", 4, NULL);
            side_poll(&a);
            side_end(&a);
        } else {
            a.pair->ops->destroy(a.pair);
            a.pair = NULL;
        }
        for (unsigned j = 0; j < 20; j++)
            side_poll(&b);
        ck_assert_uint_eq(b.broken, 0);
        b.pair->ops->destroy(b.pair);
        b.pair = NULL;
    }
    PUMP_UNTIL(count_mappings() == mappings);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

/* ------------------------------------------------------------------------------------ what every provider does -- */

static struct provider_memory common;

static void set_up_common(uint32_t slots, uint32_t work, enum tl_keys keys)
{
    (void)keys;
    sides_set_up_with(slots, work, NULL);
}

static void make_common(uint64_t len_bytes, struct provider_memory *ret_memory)
{
    common.source = malloc(len_bytes);
    fill_bytes(common.source, len_bytes, 1);
    common.target_region = side_map(&b, len_bytes);
    common.target = common.target_region->address;
    *ret_memory = common;
}

static void tear_down_common(void)
{
    if (common.target_region != NULL) region_drop(common.target_region);
    free(common.source);
    sides_tear_down();
}

static const struct provider_kind kind = {
    .has_queue = true, .set_up = set_up_common, .make_memory = make_common, .tear_down = tear_down_common};

int main(void)
{
    Suite *suite = suite_create("local_provider");
    TCase *tcase = tcase_create("local_provider");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, sides_tear_down);
    tcase_add_test(tcase, a_probe);
    tcase_add_test(tcase, a_reader_that_pauses);
    tcase_add_test(tcase, no_place_for_a_message);
    tcase_add_test(tcase, large_writes);
    tcase_add_test(tcase, much_that_waits_leaves_no_space);
    tcase_add_test(tcase, segments_come_and_go);
    tcase_add_test(tcase, reads_behind_segments_that_go);
    tcase_add_test(tcase, pages_stay);
    tcase_add_loop_test(tcase, memory_of_users, 0, 2);
    tcase_add_test(tcase, memory_that_is_not_exposed_any_more);
    tcase_add_loop_test(tcase, places_that_cannot_be, 0, 5);
    tcase_add_test(tcase, no_system_call_between_two_that_are_awake);
    tcase_add_test(tcase, a_sleeper_is_woken_once);
    tcase_add_test(tcase, a_sleeper_that_knows_is_left_alone);
    tcase_add_test(tcase, a_wake_comes_through_the_eventfd);
    tcase_add_test(tcase, peers_on_one_processor);
    tcase_add_test(tcase, an_eventfd_at_its_maximum);
    tcase_add_test(tcase, a_packet_wakes);
    tcase_add_test(tcase, sleeping_on_two_descriptors);
    tcase_add_test(tcase, sleeping_until_a_time);
    tcase_add_test(tcase, nothing_is_slept_over);
    tcase_add_test(tcase, space_wakes_who_waits_for_it);
    tcase_add_test(tcase, the_end_wakes);
    tcase_add_test(tcase, disconnect_cancels_what_is_open);
    tcase_add_test(tcase, nothing_is_done_after_the_end);
    tcase_add_test(tcase, no_release_arrives_at_the_end);
    tcase_add_test(tcase, a_thousand_connections);
    tcase_add_test(tcase, connections_that_are_never_made);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("a_poll_takes_a_few_messages");
    tcase_add_checked_fixture(tcase, setup, sides_tear_down);
    tcase_add_test(tcase, a_poll_takes_a_few_messages);
    suite_add_tcase(suite, tcase);
    /* The script rdma_vm/verbs_test.py runs these alone in its virtual machine, where huge pages are reserved. */
    tcase = tcase_create("floods"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, sides_tear_down);
    tcase_add_test(tcase, a_flood_of_messages);
    tcase_add_test(tcase, a_flood_of_works);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("a_flood_at_the_end"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, sides_tear_down);
    tcase_add_loop_test(tcase, a_flood_at_the_end, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("pages");
    tcase_add_checked_fixture(tcase, setup, sides_tear_down);
    tcase_add_test(tcase, pages_come_when_they_are_needed);
    tcase_add_test(tcase, a_segment_is_given_up_before_its_pages_are_there);
    tcase_add_test(tcase, all_of_a_segment_can_be_written);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("every provider");
    provider_cases_add(tcase, &kind);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("unread");
    tcase_add_checked_fixture(tcase, set_up_unread, sides_tear_down);
    tcase_add_test(tcase, reading_is_forbidden);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
