// SPDX-License-Identifier: Apache-2.0
/* The cases that every provider must pass. */
#include "fakes/provider_cases.h"

#include <string.h>

#define SLOTS 32

static const struct provider_kind *kind;

static void set_up(uint32_t slots, uint32_t work)
{
    kind->set_up(slots, work, kind->has_windows ? TL_KEYS_WINDOW : TL_KEYS_REGION);
}

START_TEST(messages_arrive)
{
    const uint32_t sizes[] = {0, 1, 48, 49, 64, 256, 257, TL_SLOT_BYTES};
    uint8_t data[TL_SLOT_BYTES];
    set_up(16, 16);
    fill_bytes(data, sizeof(data), 3);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        struct job job = new_job();
        side_message(&a, data, sizes[i], &job);
        ck_assert_uint_eq(job.done, 0); /* True only within poll. */
        PUMP_UNTIL(b.messages == i + 1 && job.done == 1);
        ck_assert_int_eq(job.status, TL_OK);
        ck_assert_uint_eq(b.last_len, sizes[i]);
        ck_assert_int_eq(memcmp(b.last, data, sizes[i]), 0);
    }
    kind->tear_down();
}
END_TEST

/* Where the provider has a place for messages, they are composed there, a short one behind a long one as well. */
START_TEST(messages_composed_in_place)
{
    uint8_t data[TL_SLOT_BYTES];
    unsigned in_place = 0;
    set_up(16, 16);
    fill_bytes(data, sizeof(data), 3);
    for (unsigned i = 0; i < 100; i++) {
        uint32_t len_bytes = i % 2 == 0 ? TL_SLOT_BYTES : i;
        uint8_t *place = tl_queue_pair_message_place(a.pair);
        data[0] = (uint8_t)i;
        if (place != NULL) memcpy(place, data, len_bytes);
        in_place += place != NULL;
        side_message(&a, place != NULL ? place : data, len_bytes, NULL);
        PUMP_UNTIL(b.messages == i + 1);
        ck_assert_uint_eq(b.last_len, len_bytes);
        ck_assert_int_eq(memcmp(b.last, data, len_bytes), 0);
    }
    ck_assert_int_eq(in_place > 0, a.pair->ops->message_place != NULL);
    kind->tear_down();
}
END_TEST

START_TEST(answers_from_callbacks)
{
    set_up(8, 8);
    b.answers = true;
    for (unsigned i = 1; i <= 500; i++) {
        side_message(&a, "ping", 4, NULL);
        PUMP_UNTIL(a.messages == i && a.pair->ops->space(a.pair) > 0);
    }
    ck_assert_uint_eq(b.messages, 500);
    kind->tear_down();
}
END_TEST

static bool may_post(unsigned posted)
{
    return a.pair->ops->space(a.pair) > 0 && (kind->has_queue || posted - b.messages < SLOTS);
}

/* There are far more posts than slots, several to a doorbell; they are done in the order of posting. */
START_TEST(many_posts)
{
    enum { COUNT = 5000 };
    static struct job jobs[COUNT];
    unsigned posted = 0;
    set_up(SLOTS, 21);
    for (unsigned i = 0; i < COUNT; i++)
        jobs[i] = new_job();
    while (posted < COUNT) {
        for (; posted < COUNT && may_post(posted); posted++)
            a.pair->ops->message(a.pair, &posted, sizeof(posted), &jobs[posted].work);
        tl_queue_pair_doorbell(a.pair);
        PUMP_UNTIL(may_post(posted));
    }
    PUMP_UNTIL(b.messages == COUNT && jobs[COUNT - 1].done == 1);
    ck_assert_mem_eq(b.last, &(unsigned){COUNT - 1}, sizeof(unsigned));
    bool is_right = true;
    for (unsigned i = 0; i < COUNT; i++)
        is_right &= jobs[i].done == 1 && jobs[i].order == i + 1 && jobs[i].status == TL_OK;
    ck_assert(is_right);
    kind->tear_down();
}
END_TEST

static void write_from(const struct provider_memory *memory, uint64_t from, uint64_t len_bytes,
                       const struct tl_exposure *exposure, uint64_t to, bool tells, struct job *job)
{
    a.pair->ops->write(a.pair, memory->source_region, memory->source + from, len_bytes, &exposure->descriptor, to,
                       tells, 0xcafe0001, &job->work);
}

static void check_written(const struct provider_memory *memory, uint64_t at, uint64_t from, uint64_t len_bytes)
{
    ck_assert_int_eq(memcmp(memory->target + at, memory->source + from, len_bytes), 0);
}

static void revoke(struct tl_exposure *exposure, bool has_window)
{
    struct job revoked = new_job();
    b.pair->ops->revoke(b.pair, exposure, has_window ? &revoked.work : NULL);
    tl_queue_pair_doorbell(b.pair);
    PUMP_UNTIL(!has_window || revoked.done == 1);
    ck_assert_int_eq(revoked.status, TL_OK);
}

/* The write goes through a region, and through a window where there are any. */
START_TEST(writes)
{
    struct provider_memory memory;
    struct tl_exposure exposure = {0};
    struct job silent = new_job(), telling = new_job(), empty = new_job();
    kind->set_up(16, 16, _i == 1 ? TL_KEYS_WINDOW : TL_KEYS_REGION);
    kind->make_memory(MIB, &memory);
    side_expose(&b, memory.target_region, memory.target + 4096, 65536, &exposure);
    side_message(&b, "exposed", 7, NULL); /* The window is bound once what was posted after it has arrived. */
    PUMP_UNTIL(a.messages == 1);
    write_from(&memory, 100, 1000, &exposure, 0, false, &silent);
    write_from(&memory, 2000, 64536, &exposure, 1000, true, &telling);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(b.immediates == 1 && telling.done == 1);
    ck_assert_uint_eq(silent.order, 1);
    ck_assert_uint_eq(b.last_immediate, 0xcafe0001);
    ck_assert_uint_eq(b.last_immediate_len, 64536);
    check_written(&memory, 4096, 100, 1000);
    check_written(&memory, 5096, 2000, 64536);
    ck_assert_uint_eq(memory.target[4095], 0);
    ck_assert_uint_eq(memory.target[4096 + 65536], 0);
    a.pair->ops->write(a.pair, NULL, NULL, 0, &(struct tl_descriptor){0}, 0, true, 7, &empty.work);
    tl_queue_pair_doorbell(a.pair);
    PUMP_UNTIL(b.immediates == 2 && empty.done == 1);
    ck_assert_uint_eq(b.last_immediate_len, 0);
    revoke(&exposure, _i == 1);
    kind->tear_down();
}
END_TEST

void provider_cases_add(TCase *tcase, const struct provider_kind *of_program)
{
    kind = of_program;
    tcase_add_test(tcase, messages_arrive);
    tcase_add_test(tcase, messages_composed_in_place);
    tcase_add_test(tcase, answers_from_callbacks);
    tcase_add_test(tcase, many_posts);
    tcase_add_loop_test(tcase, writes, 0, kind->has_windows ? 2 : 1);
}
