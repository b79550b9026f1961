// SPDX-License-Identifier: Apache-2.0
/* The fake provider without faults: a reliable connection, and the checks of what its users must not do. */
#include <poll.h>
#include <signal.h>

#include "fakes/fake_sides.h"
#include "fakes/run_suite.h"

/* Steps are not manual: polls carry. */
static void setup(void)
{
    sides_open(NULL, NULL, &side_options);
}

static void setup_manual(void)
{
    sides_open(&(struct fake_fabric_options){.is_manual = true}, NULL, &side_options);
}

static void setup_regions(void)
{
    struct tl_queue_pair_options options = side_options;
    options.keys = TL_KEYS_REGION;
    sides_open(&(struct fake_fabric_options){.is_manual = true},
               &(struct fake_provider_options){.has_no_windows = true}, &options);
}

static void doorbell(struct side *side)
{
    tl_queue_pair_doorbell(side->pair);
}

/* Carries what the side has posted; no event is delivered yet. */
static void carry(struct side *side)
{
    doorbell(side);
    while (fake_fabric_step(fabric, side->pair)) {
    }
}

/* ---------------------------------------------------------------------------------------------------- carrying -- */

START_TEST(messages_in_order)
{
    send_text(a, "one", work(a, "x"));
    send_text(a, "two", NULL);
    send_text(a, "", work(a, "z"));
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "x+ z+");
    ck_assert_str_eq(b->trace, "m:one m:two m:");
    ck_assert_uint_eq(counters(a).messages, 3);
    ck_assert_uint_eq(counters(a).done, 3);
    ck_assert_uint_eq(counters(b).slots_taken, 3);
    ck_assert_uint_eq(counters(b).slots_out, 0);
}
END_TEST

START_TEST(nothing_leaves_before_it_is_rung)
{
    send_text(a, "one", work(a, "x"));
    doorbell(a);
    send_text(a, "two", work(a, "y"));
    settle();
    ck_assert_str_eq(a->trace, "x+");
    doorbell(a);
    settle();
    ck_assert_str_eq(b->trace, "m:one m:two");
    ck_assert_uint_eq(counters(a).rings, 2);
}
END_TEST

START_TEST(bytes_move_at_the_step)
{
    expose(b, 100, 20);
    carry(b);
    strcpy(a->memory, "before");
    write_bytes(a, b, 0, 7, 5, work(a, "w"));
    doorbell(a);
    ck_assert_uint_eq(side_poll(a), 0);
    ck_assert_int_eq(b->memory[105], 0);
    strcpy(a->memory, "now");
    ck_assert(fake_fabric_step(fabric, a->pair));
    ck_assert_str_eq(b->memory + 105, "now");
    ck_assert_str_eq(a->trace, "");
    ck_assert_uint_eq(side_poll(a), 1);
    ck_assert_str_eq(a->trace, "w+");
    ck_assert(!fake_fabric_step(fabric, a->pair));
    ck_assert_uint_eq(counters(a).write_bytes, 7);
    ck_assert_uint_eq(counters(b).slots_taken, 0);
}
END_TEST

START_TEST(an_immediate_comes_with_its_write)
{
    expose(b, 0, 16);
    carry(b);
    a->memory[200] = 'w';
    a->pair->ops->write(a->pair, a->region, a->memory + 200, 1, &b->exposure.descriptor, 3, true, 77, work(a, "w"));
    a->pair->ops->write(a->pair, NULL, NULL, 0, &b->exposure.descriptor, 0, true, 78, NULL);
    a->pair->ops->write(a->pair, NULL, NULL, 0, NULL, 0, true, 79, NULL);
    carry(a);
    ck_assert_uint_eq(counters(b).slots_out, 3);
    settle();
    ck_assert_str_eq(b->trace, "i:77/1 i:78/0 i:79/0");
    ck_assert_int_eq(b->memory[3], 'w');
    ck_assert_uint_eq(counters(a).immediates, 3);
    ck_assert_uint_eq(counters(b).slots_out, 0);
}
END_TEST

START_TEST(done_in_the_order_of_posting)
{
    expose(a, 0, 8);
    send_text(a, "m", work(a, "message"));
    a->pair->ops->write(a->pair, NULL, NULL, 0, NULL, 0, false, 0, work(a, "write"));
    a->pair->ops->revoke(a->pair, &a->exposure, work(a, "revoke"));
    send_text(a, "n", work(a, "last"));
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "message+ write+ revoke+ last+");
}
END_TEST

START_TEST(space_until_done)
{
    ck_assert_uint_eq(a->pair->ops->space(a->pair), 8);
    expose(a, 0, 8);
    a->pair->ops->revoke(a->pair, &a->exposure, NULL);
    send_text(a, "m", NULL);
    ck_assert_uint_eq(a->pair->ops->space(a->pair), 5);
    carry(a);
    ck_assert_uint_eq(a->pair->ops->space(a->pair), 5);
    ck_assert_uint_eq(counters(a).operations_out, 3);
    side_poll(a);
    ck_assert_uint_eq(a->pair->ops->space(a->pair), 8);
    ck_assert_uint_eq(counters(a).operations_out, 0);
}
END_TEST

START_TEST(a_peer_that_has_not_connected_is_waited_for)
{
    side_open(&sides[2], "fake_c", NULL, &side_options);
    struct side other = {.memory = {0}};
    side_open(&other, "fake_d", NULL, &side_options);
    side_connect(&sides[2], &other);
    send_text(&sides[2], "early", NULL);
    doorbell(&sides[2]);
    settle();
    ck_assert_uint_eq(counters(&sides[2]).operations_out, 1);
    ck_assert(tl_provider_arm(sides[2].provider));
    side_connect(&other, &sides[2]);
    struct pollfd descriptor = {.fd = sides[2].provider->fd, .events = POLLIN};
    ck_assert_int_eq(poll(&descriptor, 1, 0), 1);
    tl_provider_disarm(sides[2].provider, true);
    settle();
    side_poll(&other);
    ck_assert_str_eq(other.trace, "m:early");
    disconnect(&other);
    while (side_poll(&other) > 0) {
    }
    other.pair->ops->destroy(other.pair);
    tl_region_destroy(other.region);
    other.provider->ops->close(other.provider);
}
END_TEST

static void answer(struct side *side)
{
    side->on_message = NULL;
    send_text(side, "answer", work(side, "a"));
    doorbell(side);
    disconnect(side);
    disconnect(side);
}

START_TEST(callbacks_may_post_and_disconnect)
{
    b->on_message = answer;
    b->is_destroyed_when_drained = true;
    send_text(a, "question", NULL);
    doorbell(a);
    settle();
    ck_assert_str_eq(b->trace, "m:question broken a- drained");
    ck_assert_str_eq(b->reason.message, "disconnected by the test");
    ck_assert_ptr_null(b->pair);
}
END_TEST

START_TEST(a_poll_handles_a_batch)
{
    for (unsigned i = 0; i < 4; i++) {
        send_text(a, "m", NULL);
        send_text(b, "m", NULL);
    }
    doorbell(a);
    doorbell(b);
    side_poll(b);
    side_poll(a);
    unsigned events = 0;
    for (unsigned count = 1; count > 0; events += count) {
        count = side_poll(a);
        ck_assert_uint_le(count, 2);
    }
    ck_assert_uint_gt(events, 2);
}
END_TEST

static void setup_batch(void)
{
    sides_open(&(struct fake_fabric_options){.poll_batch = 2}, NULL, &side_options);
}

/* ----------------------------------------------------------------------------------------------- slots, access -- */

START_TEST(a_message_waits_for_a_slot)
{
    for (unsigned i = 0; i < 5; i++)
        send_text(a, "m", NULL);
    doorbell(a);
    for (unsigned i = 0; i < 4 + 7; i++)
        ck_assert(fake_fabric_step(fabric, a->pair));
    ck_assert_uint_eq(counters(a).messages, 4);
    ck_assert_uint_eq(counters(a).rnr_tries, 7);
    side_poll(b); /* The slots come back. */
    settle();
    ck_assert_str_eq(b->trace, "m:m m:m m:m m:m m:m");
    ck_assert_str_eq(a->trace, "");
}
END_TEST

START_TEST(no_slot_for_long_breaks_both)
{
    for (unsigned i = 0; i < 4; i++)
        send_text(a, "m", NULL);
    a->pair->ops->write(a->pair, NULL, NULL, 0, NULL, 0, true, 1, work(a, "w"));
    carry(a);
    settle();
    ck_assert_str_eq(a->trace, "broken w- drained");
    ck_assert_str_eq(b->trace, "m:m m:m m:m m:m broken drained");
    ck_assert_ptr_nonnull(strstr(a->reason.message, "receiver not ready"));
    ck_assert_ptr_nonnull(strstr(b->reason.message, "no slot"));
    ck_assert_int_eq(a->reason.code, TL_UNAVAILABLE);
}
END_TEST

/* A forbidden write breaks both sides, and changes nothing. */
static void refused(uint64_t offset, size_t len_bytes)
{
    memset(a->memory, 'X', SIDE_BYTES);
    write_bytes(a, b, 0, len_bytes, offset, work(a, "w"));
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "broken w- drained");
    ck_assert_str_eq(b->trace, "broken drained");
    ck_assert_ptr_nonnull(strstr(a->reason.message, "remote access error"));
    for (unsigned i = 0; i < SIDE_BYTES; i++)
        ck_assert_int_eq(b->memory[i], 0);
    size_t last = fake_fabric_write_count(fabric) - 1;
    ck_assert(!fake_fabric_write_at(fabric, last).has_landed);
}

START_TEST(writes_beyond_the_end)
{
    expose(b, 100, 20);
    carry(b);
    refused(1, 20);
}
END_TEST

START_TEST(writes_before_the_beginning)
{
    expose(b, 100, 20);
    carry(b);
    refused(UINT64_MAX, 2);
}
END_TEST

START_TEST(writes_after_revocation)
{
    expose(b, 100, 20);
    b->pair->ops->revoke(b->pair, &b->exposure, NULL);
    carry(b);
    refused(0, 1);
}
END_TEST

START_TEST(writes_before_it_is_bound)
{
    expose(b, 100, 20);
    refused(0, 1);
}
END_TEST

START_TEST(writes_to_no_descriptor)
{
    b->exposure.descriptor = (struct tl_descriptor){.len_bytes = 7};
    refused(0, 1);
    ck_assert_ptr_null(fake_fabric_write_at(fabric, 0).destination);
}
END_TEST

/* A window is for one peer: another peer that uses its descriptor breaks its own queue pair only. */
START_TEST(foreign_writes)
{
    struct tl_queue_pair *of_b = NULL;
    side_open(&sides[2], "fake_c", NULL, &side_options);
    ck_assert_int_eq(tl_queue_pair_create(b->provider, &side_options, &side_events, &sides[2], &of_b, NULL), TL_OK);
    struct tl_pair_address pair_address;
    of_b->ops->get_address(of_b, &pair_address);
    ck_assert_int_eq(sides[2].pair->ops->connect(sides[2].pair, &pair_address, NULL), TL_OK);
    sides[2].pair->ops->get_address(sides[2].pair, &pair_address);
    ck_assert_int_eq(of_b->ops->connect(of_b, &pair_address, NULL), TL_OK);
    ck_assert_ptr_eq(fake_provider_pair(b->provider, 1), of_b);
    ck_assert_ptr_null(fake_provider_pair(b->provider, 2));
    expose(b, 0, 16);
    carry(b);
    sides[2].memory[0] = 'X';
    write_bytes(&sides[2], b, 0, 1, 0, NULL);
    doorbell(&sides[2]);
    settle();
    ck_assert_str_eq(sides[2].trace, "broken broken drained drained");
    ck_assert_int_eq(b->memory[0], 0);
    a->memory[0] = 'Y';
    write_bytes(a, b, 0, 1, 0, work(a, "w"));
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "w+");
    ck_assert_int_eq(b->memory[0], 'Y');
    of_b->ops->destroy(of_b);
}
END_TEST

START_TEST(regions_are_wider_than_exposures)
{
    expose(b, 100, 20);
    carry(b);
    ck_assert_uint_eq(counters(b).operations_out, 0); /* There is nothing to bind. */
    a->memory[0] = 'X';
    write_bytes(a, b, 0, 1, 20, NULL);
    doorbell(a);
    settle();
    ck_assert_int_eq(b->memory[120], 'X');
    b->pair->ops->revoke(b->pair, &b->exposure, NULL);
    ck_assert_uint_eq(counters(b).exposures_out, 0);
    write_bytes(a, b, 0, 1, 21, work(a, "late")); /* The revocation does not prevent this write. */
    write_bytes(a, b, 0, 1, SIDE_BYTES - 100, work(a, "out"));
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "late+ broken out- drained");
    ck_assert_int_eq(b->memory[121], 'X');
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- the end -- */

START_TEST(disconnect_cancels_what_is_posted)
{
    send_text(a, "one", work(a, "x"));
    carry(a);
    expose(a, 0, 8);
    send_text(a, "two", work(a, "y"));
    a->pair->ops->revoke(a->pair, &a->exposure, work(a, "z"));
    disconnect(a);
    send_text(a, "three", work(a, "posted meanwhile"));
    ck_assert(fake_fabric_step(fabric, a->pair)); /* The bind. */
    ck_assert(fake_fabric_step(fabric, a->pair));
    side_poll(a);
    ck_assert_str_eq(a->trace, "x+ broken y-");
    ck_assert_uint_eq(a->pair->ops->space(a->pair), 0);
    ck_assert_uint_eq(counters(a).exposures_out, 1);
    settle();
    ck_assert_str_eq(a->trace, "x+ broken y- z- posted meanwhile- drained");
    ck_assert_uint_eq(counters(a).exposures_out, 0);
    ck_assert_uint_eq(counters(a).cancelled, 4);
    ck_assert_str_eq(b->trace, "m:one");
    ck_assert_int_eq(a->reason.code, TL_ABORTED);
}
END_TEST

START_TEST(a_broken_peer_is_noticed_at_the_next_use)
{
    send_text(a, "one", work(a, "x"));
    doorbell(a);
    disconnect(b);
    ck_assert(fake_fabric_step(fabric, a->pair));
    settle();
    ck_assert_str_eq(a->trace, "broken x- drained");
    ck_assert_str_eq(b->trace, "broken drained");
    ck_assert_ptr_nonnull(strstr(a->reason.message, "retry counter exceeded"));
}
END_TEST

START_TEST(a_destroyed_peer_is_noticed_at_the_next_use)
{
    b->is_destroyed_when_drained = true;
    disconnect(b);
    settle();
    expose(a, 0, 8); /* This needs no peer. */
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "");
    send_text(a, "one", work(a, "x"));
    doorbell(a);
    settle();
    ck_assert_str_eq(a->trace, "broken x- drained");
}
END_TEST

START_TEST(disconnected_before_it_connects)
{
    side_open(&sides[2], "fake_c", NULL, &side_options);
    disconnect(&sides[2]);
    struct tl_pair_address pair_address;
    struct tl_error error;
    a->pair->ops->get_address(a->pair, &pair_address);
    ck_assert_int_eq(sides[2].pair->ops->connect(sides[2].pair, &pair_address, &error), TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "disconnected by the test"));
    settle();
    ck_assert_str_eq(sides[2].trace, "broken drained");
    sides[2].pair->ops->destroy(sides[2].pair);
    sides[2].pair = NULL;
    ck_assert_int_eq(
        tl_queue_pair_create(sides[2].provider, &side_options, &side_events, &sides[2], &sides[2].pair, NULL), TL_OK);
    disconnect(&sides[2]); /* It is destroyed before the event. */
    sides[2].pair->ops->destroy(sides[2].pair);
    sides[2].pair = NULL;
    settle();
    ck_assert_str_eq(sides[2].trace, "broken drained");
}
END_TEST

/* ----------------------------------------------------------------------------------------------- refused calls -- */

START_TEST(addresses_that_are_none)
{
    struct tl_error error;
    struct tl_pair_address pair_address;
    side_open(&sides[2], "fake_c", &(struct fake_provider_options){.network = 1}, &side_options);
    struct tl_queue_pair *pair = sides[2].pair;
    a->pair->ops->get_address(a->pair, &pair_address);
    ck_assert_uint_le(pair_address.len_bytes, TL_PAIR_ADDRESS_MAX_BYTES);
    ck_assert_int_eq(pair->ops->connect(pair, &pair_address, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "network"));
    pair->ops->get_address(pair, &pair_address);
    ck_assert_int_eq(pair->ops->connect(pair, &pair_address, NULL),
                     TL_FAILED_PRECONDITION); /* A queue pair cannot connect to itself. */
    pair_address.bytes[0] ^= 1;
    ck_assert_int_eq(pair->ops->connect(pair, &pair_address, &error), TL_INVALID_ARGUMENT);
    pair_address.len_bytes = 3;
    ck_assert_int_eq(pair->ops->connect(pair, &pair_address, NULL), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(limits_of_a_provider)
{
    struct fake_provider_options options = {.has_no_windows = true, .max_queue_pairs = 1, .max_write_bytes = 64};
    struct tl_queue_pair_options pair_options = {.slot_count = 1, .work_count = 1, .keys = TL_KEYS_REGION};
    side_open(&sides[2], "fake_c", &options, &pair_options);
    struct tl_provider *provider = sides[2].provider;
    struct tl_queue_pair *pair = (void *)&options;
    ck_assert_int_eq(tl_queue_pair_create(provider, &side_options, &side_events, a, &pair, NULL), TL_UNIMPLEMENTED);
    ck_assert_int_eq(provider->ops->create(provider, &side_options, &side_events, a, &pair, NULL), TL_UNIMPLEMENTED);
    ck_assert_int_eq(tl_queue_pair_create(provider, &pair_options, &side_events, a, &pair, NULL),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_eq(pair, &options);
    ck_assert_uint_eq(provider->limits.max_write_bytes, 64);
    ck_assert(!provider->limits.has_windows);
    struct tl_region *region = (void *)&options;
    ck_assert_int_eq(tl_region_create(provider, NULL, 1, TL_REGION_READ, &region, NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_region_create(provider, a->memory, 0, TL_REGION_READ, &region, NULL), TL_INVALID_ARGUMENT);
    ck_assert_ptr_eq(region, &options);
}
END_TEST

START_TEST(sources_need_no_region_if_so_opened)
{
    static const char text[] = "from anywhere";
    struct side *c = &sides[2];
    side_open(c, "fake_c", &(struct fake_provider_options){.needs_no_regions = true}, &side_options);
    struct side d = {.memory = {0}};
    side_open(&d, "fake_d", NULL, &side_options);
    side_connect(c, &d);
    side_connect(&d, c);
    expose(&d, 0, sizeof(text));
    doorbell(&d);
    side_poll(&d);
    c->pair->ops->write(c->pair, NULL, text, sizeof(text), &d.exposure.descriptor, 0, false, 0, work(c, "w"));
    doorbell(c);
    settle();
    ck_assert_str_eq(c->trace, "w+");
    ck_assert_str_eq(d.memory, text);
    disconnect(&d);
    while (side_poll(&d) > 0) {
    }
    d.pair->ops->destroy(d.pair);
    tl_region_destroy(d.region);
    d.provider->ops->close(d.provider);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ checks -- */

START_TEST(posting_without_space)
{
    for (unsigned i = 0; i < 9; i++)
        send_text(a, "m", NULL);
}
END_TEST

START_TEST(posting_to_what_is_broken)
{
    disconnect(a);
    settle();
    send_text(a, "m", NULL);
}
END_TEST

START_TEST(posting_a_work_twice)
{
    struct tl_work *twice = work(a, "x");
    send_text(a, "m", twice);
    send_text(a, "m", twice);
}
END_TEST

START_TEST(a_message_that_is_too_long)
{
    static const char bytes[TL_SLOT_BYTES + 1];
    a->pair->ops->message(a->pair, bytes, sizeof(bytes), NULL);
}
END_TEST

START_TEST(a_source_outside_of_its_region)
{
    write_bytes(a, b, SIDE_BYTES - 3, 4, 0, NULL);
}
END_TEST

START_TEST(a_source_without_region)
{
    a->pair->ops->write(a->pair, NULL, a->memory, 1, &b->exposure.descriptor, 0, false, 0, NULL);
}
END_TEST

START_TEST(a_foreign_region)
{
    a->pair->ops->write(a->pair, b->region, b->memory, 1, &b->exposure.descriptor, 0, false, 0, NULL);
}
END_TEST

START_TEST(a_region_that_is_in_use)
{
    expose(a, 0, 8);
    tl_region_destroy(a->region);
}
END_TEST

START_TEST(an_exposure_outside_of_its_region)
{
    expose(a, 1, SIDE_BYTES);
}
END_TEST

START_TEST(revoking_twice)
{
    expose(a, 0, 8);
    a->pair->ops->revoke(a->pair, &a->exposure, NULL);
    a->pair->ops->revoke(a->pair, &a->exposure, NULL);
}
END_TEST

START_TEST(destroying_before_it_is_drained)
{
    disconnect(a);
    a->pair->ops->destroy(a->pair);
}
END_TEST

START_TEST(closing_with_a_region)
{
    a->provider->ops->close(a->provider);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- sleeping -- */

static bool is_readable(const struct side *side)
{
    struct pollfd descriptor = {.fd = side->provider->fd, .events = POLLIN};
    return poll(&descriptor, 1, 0) == 1;
}

START_TEST(armed_until_something_comes)
{
    ck_assert(tl_provider_arm(b->provider));
    ck_assert(!is_readable(b));
    send_text(a, "one", NULL);
    send_text(a, "two", NULL);
    carry(a);
    ck_assert(is_readable(b));
    tl_provider_disarm(b->provider, true);
    ck_assert(!is_readable(b));
    ck_assert(!tl_provider_arm(b->provider)); /* It has not been polled. */
    ck_assert_uint_eq(side_poll(b), 2);
    ck_assert(tl_provider_arm(b->provider));
    tl_provider_disarm(b->provider, true);
}
END_TEST

START_TEST(unarmed_it_stays_silent)
{
    send_text(a, "one", NULL);
    carry(a);
    ck_assert(!is_readable(b));
}
END_TEST

/* A side that has posted must not sleep before its posts have left. */
START_TEST(arming_carries)
{
    send_text(a, "one", work(a, "x"));
    doorbell(a);
    ck_assert(!tl_provider_arm(a->provider));
    side_poll(a);
    ck_assert_str_eq(a->trace, "x+");
    ck_assert(tl_provider_arm(a->provider));
    ck_assert(!tl_provider_arm(b->provider));
}
END_TEST

START_TEST(without_descriptor)
{
    side_open(&sides[2], "fake_c", &(struct fake_provider_options){.has_no_fd = true}, &side_options);
    ck_assert_int_eq(sides[2].provider->fd, -1);
    ck_assert(tl_provider_arm(sides[2].provider));
    disconnect(&sides[2]);
    tl_provider_disarm(sides[2].provider, true);
    settle();
    ck_assert_str_eq(sides[2].trace, "broken drained");
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- accounts -- */

START_TEST(writes_are_recorded)
{
    expose(b, 100, 20);
    carry(b);
    write_bytes(a, b, 8, 3, 2, NULL);
    a->pair->ops->write(a->pair, a->region, a->memory, 4, &b->exposure.descriptor, 9, true, 5, NULL);
    doorbell(a);
    ck_assert(fake_fabric_step(fabric, a->pair));
    ck_assert_uint_eq(fake_fabric_write_count(fabric), 2);
    struct fake_write first = fake_fabric_write_at(fabric, 0);
    struct fake_write second = fake_fabric_write_at(fabric, 1);
    ck_assert_ptr_eq(first.provider, a->provider);
    ck_assert_ptr_eq(first.source, a->memory + 8);
    ck_assert_ptr_eq(first.destination, b->memory + 102);
    ck_assert_uint_eq(first.len_bytes, 3);
    ck_assert(!first.has_immediate && first.has_landed);
    ck_assert_ptr_eq(second.destination, b->memory + 109);
    ck_assert(second.has_immediate && !second.has_landed);
    ck_assert_uint_eq(second.immediate, 5);
}
END_TEST

START_TEST(what_is_out)
{
    const char *why = "";
    ck_assert(fake_fabric_is_quiet(fabric, NULL));
    ck_assert(!fake_fabric_is_clean(fabric, &why));
    ck_assert_str_eq(why, "a queue pair");
    expose(a, 0, 8);
    carry(a);
    ck_assert(!fake_fabric_is_quiet(fabric, &why));
    ck_assert_str_eq(why, "an operation");
    side_poll(a);
    ck_assert(!fake_fabric_is_quiet(fabric, &why));
    ck_assert_str_eq(why, "an exposure");
    a->pair->ops->revoke(a->pair, &a->exposure, NULL);
    carry(a);
    side_poll(a);
    ck_assert(fake_fabric_is_quiet(fabric, &why));
    send_text(a, "m", NULL);
    carry(a);
    side_poll(a);
    ck_assert(!fake_fabric_is_quiet(fabric, &why));
    ck_assert_str_eq(why, "a slot");
    side_poll(b);
    disconnect(a);
    ck_assert(!fake_fabric_is_quiet(fabric, &why));
    ck_assert_str_eq(why, "an event");
    ck_assert_uint_eq(counters(a).exposures, 1);
    ck_assert_uint_eq(counters(a).revokes, 1);
    ck_assert_uint_eq(counters(a).regions_out, 1);
    ck_assert_uint_eq(counters(a).queue_pairs, 1);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- suite -- */

static void add_carrying(Suite *suite)
{
    TCase *tcase = tcase_create("carried by polls");
    tcase_add_checked_fixture(tcase, setup, sides_close);
    tcase_add_test(tcase, messages_in_order);
    tcase_add_test(tcase, nothing_leaves_before_it_is_rung);
    tcase_add_test(tcase, done_in_the_order_of_posting);
    tcase_add_test(tcase, a_peer_that_has_not_connected_is_waited_for);
    tcase_add_test(tcase, callbacks_may_post_and_disconnect);
    tcase_add_test(tcase, addresses_that_are_none);
    tcase_add_test(tcase, limits_of_a_provider);
    tcase_add_test(tcase, sources_need_no_region_if_so_opened);
    tcase_add_test(tcase, disconnected_before_it_connects);
    tcase_add_test(tcase, a_destroyed_peer_is_noticed_at_the_next_use);
    tcase_add_test(tcase, arming_carries);
    tcase_add_test(tcase, without_descriptor);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("batches");
    tcase_add_checked_fixture(tcase, setup_batch, sides_close);
    tcase_add_test(tcase, a_poll_handles_a_batch);
    suite_add_tcase(suite, tcase);
}

static void add_manual(Suite *suite)
{
    TCase *tcase = tcase_create("carried by steps");
    tcase_add_checked_fixture(tcase, setup_manual, sides_close);
    tcase_add_test(tcase, bytes_move_at_the_step);
    tcase_add_test(tcase, an_immediate_comes_with_its_write);
    tcase_add_test(tcase, space_until_done);
    tcase_add_test(tcase, a_message_waits_for_a_slot);
    tcase_add_test(tcase, no_slot_for_long_breaks_both);
    tcase_add_test(tcase, writes_beyond_the_end);
    tcase_add_test(tcase, writes_before_the_beginning);
    tcase_add_test(tcase, writes_after_revocation);
    tcase_add_test(tcase, writes_before_it_is_bound);
    tcase_add_test(tcase, writes_to_no_descriptor);
    tcase_add_test(tcase, foreign_writes);
    tcase_add_test(tcase, disconnect_cancels_what_is_posted);
    tcase_add_test(tcase, a_broken_peer_is_noticed_at_the_next_use);
    tcase_add_test(tcase, armed_until_something_comes);
    tcase_add_test(tcase, unarmed_it_stays_silent);
    tcase_add_test(tcase, writes_are_recorded);
    tcase_add_test(tcase, what_is_out);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("regions");
    tcase_add_checked_fixture(tcase, setup_regions, sides_close);
    tcase_add_test(tcase, regions_are_wider_than_exposures);
    suite_add_tcase(suite, tcase);
}

static void add_checks(Suite *suite)
{
    TCase *tcase = tcase_create("checks");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test_raise_signal(tcase, posting_without_space, SIGABRT);
    tcase_add_test_raise_signal(tcase, posting_to_what_is_broken, SIGABRT);
    tcase_add_test_raise_signal(tcase, posting_a_work_twice, SIGABRT);
    tcase_add_test_raise_signal(tcase, a_message_that_is_too_long, SIGABRT);
    tcase_add_test_raise_signal(tcase, a_source_outside_of_its_region, SIGABRT);
    tcase_add_test_raise_signal(tcase, a_source_without_region, SIGABRT);
    tcase_add_test_raise_signal(tcase, a_foreign_region, SIGABRT);
    tcase_add_test_raise_signal(tcase, a_region_that_is_in_use, SIGABRT);
    tcase_add_test_raise_signal(tcase, an_exposure_outside_of_its_region, SIGABRT);
    tcase_add_test_raise_signal(tcase, revoking_twice, SIGABRT);
    tcase_add_test_raise_signal(tcase, destroying_before_it_is_drained, SIGABRT);
    tcase_add_test_raise_signal(tcase, closing_with_a_region, SIGABRT);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("fake_provider");
    add_carrying(suite);
    add_manual(suite);
    add_checks(suite);
    return run_suite(suite);
}
