// SPDX-License-Identifier: Apache-2.0
/*
 * Two or three workers with a queue pair each, for tests of the fake provider itself. The trace of a worker has its
 * events, one word for each:
 *
 * m:TEXT a message; i:NUMBER/LEN an immediate; NAME+ done with TL_OK; NAME- done with TL_CANCELLED; broken; drained.
 */
#ifndef TESTS_FAKES_FAKE_SIDES_H
#define TESTS_FAKES_FAKE_SIDES_H

#include <check.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "fakes/fake_provider.h"

enum { SIDE_BYTES = 256, SIDE_WORKS = 16 };

struct side {
    struct tl_provider *provider;
    struct tl_queue_pair *pair;
    struct tl_region *region; /* The memory of the side. */
    struct tl_exposure exposure;
    struct tl_error reason; /* The reason why it broke. */
    char memory[SIDE_BYTES];
    char trace[512];
    void (*on_message)(struct side *side);
    bool is_destroyed_when_drained;
};

struct side_work {
    struct tl_work work;
    struct side *side;
    const char *name;
};

static struct fake_fabric *fabric;
static struct side sides[3];
static struct side *const a = &sides[0];
static struct side *const b = &sides[1];
static struct side_work works[SIDE_WORKS];
static unsigned work_count;

__attribute__((format(printf, 2, 3))) static inline void side_note(struct side *side, const char *format, ...)
{
    size_t len = strlen(side->trace);
    va_list args;
    va_start(args, format);
    if (len > 0) side->trace[len++] = ' ';
    int added = vsnprintf(side->trace + len, sizeof(side->trace) - len, format, args);
    va_end(args);
    ck_assert(added >= 0 && len + (size_t)added < sizeof(side->trace));
}

static inline void side_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct side *side = owner;
    side_note(side, "m:%.*s", (int)len_bytes, (const char *)data);
    if (side->on_message != NULL) side->on_message(side);
}

static inline void side_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    side_note(owner, "i:%u/%llu", immediate, (unsigned long long)len_bytes);
}

static inline void side_broken(void *owner, const struct tl_error *reason)
{
    struct side *side = owner;
    side->reason = *reason;
    side_note(side, "broken");
}

static inline void side_drained(void *owner)
{
    struct side *side = owner;
    side_note(side, "drained");
    if (!side->is_destroyed_when_drained) return;
    side->pair->ops->destroy(side->pair);
    side->pair = NULL;
}

static const struct tl_queue_pair_events side_events = {
    .message = side_message, .immediate = side_immediate, .broken = side_broken, .drained = side_drained};

static const struct tl_queue_pair_options side_options = {.slot_count = 4, .work_count = 8, .keys = TL_KEYS_WINDOW};

static inline void side_done(struct tl_work *work, enum tl_status status)
{
    struct side_work *self = TL_CONTAINER_OF(work, struct side_work, work);
    ck_assert(status == TL_OK || status == TL_CANCELLED);
    side_note(self->side, "%s%c", self->name, status == TL_OK ? '+' : '-');
}

/* A work that writes its name into the trace of the side. */
static inline struct tl_work *work(struct side *side, const char *name)
{
    ck_assert_uint_lt(work_count, SIDE_WORKS);
    struct side_work *self = &works[work_count++];
    *self = (struct side_work){.work = {.magic = TL_WORK_MAGIC, .done = side_done}, .side = side, .name = name};
    return &self->work;
}

static inline void side_open(struct side *side, const char *name, const struct fake_provider_options *provider_options,
                             const struct tl_queue_pair_options *options)
{
    side->provider = fake_provider_open(fabric, name, provider_options);
    ck_assert_int_eq(tl_region_create(side->provider, side->memory, SIDE_BYTES, TL_REGION_WRITE, &side->region, NULL),
                     TL_OK);
    ck_assert_int_eq(tl_queue_pair_create(side->provider, options, &side_events, side, &side->pair, NULL), TL_OK);
}

static inline void side_connect(struct side *side, const struct side *peer)
{
    struct tl_pair_address pair_address;
    peer->pair->ops->get_address(peer->pair, &pair_address);
    ck_assert_int_eq(side->pair->ops->connect(side->pair, &pair_address, NULL), TL_OK);
}

/* Opens the fabric, and sides a and b, connected. */
static inline void sides_open(const struct fake_fabric_options *fabric_options,
                              const struct fake_provider_options *provider_options,
                              const struct tl_queue_pair_options *options)
{
    fabric = fake_fabric_create(fabric_options);
    side_open(a, "fake_a", provider_options, options);
    side_open(b, "fake_b", provider_options, options);
    side_connect(a, b);
    side_connect(b, a);
}

static inline unsigned side_poll(struct side *side)
{
    return side->provider->ops->poll(side->provider);
}

/* Runs everything that can happen. */
static inline void settle(void)
{
    bool did_move;
    do {
        did_move = fake_fabric_step_any(fabric);
        for (unsigned i = 0; i < TL_ARRAY_COUNT(sides); i++)
            if (sides[i].provider != NULL) did_move |= side_poll(&sides[i]) > 0;
    } while (did_move);
}

static inline void disconnect(struct side *side)
{
    struct tl_error reason = {.code = TL_ABORTED, .message = "disconnected by the test"};
    side->pair->ops->disconnect(side->pair, &reason);
}

static inline void expose(struct side *side, size_t from, size_t len_bytes)
{
    ck_assert_int_eq(
        tl_queue_pair_expose(side->pair, side->region, side->memory + from, len_bytes, &side->exposure, NULL), TL_OK);
}

static inline void send_text(struct side *side, const char *text, struct tl_work *done)
{
    side->pair->ops->message(side->pair, text, (uint32_t)strlen(text), done);
}

/* Writes from the side's own memory to what the peer exposes. */
static inline void write_bytes(struct side *side, const struct side *peer, size_t from, size_t len_bytes,
                               uint64_t offset, struct tl_work *done)
{
    side->pair->ops->write(side->pair, side->region, side->memory + from, len_bytes, &peer->exposure.descriptor, offset,
                           false, 0, done);
}

static inline struct fake_counters counters(struct side *side)
{
    struct fake_counters now;
    fake_provider_get_counters(side->provider, &now);
    return now;
}

/* Ends everything, and checks that nothing is left. */
static inline void sides_close(void)
{
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sides); i++)
        if (sides[i].pair != NULL) disconnect(&sides[i]);
    settle();
    const char *why = "";
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sides); i++) {
        if (sides[i].pair != NULL) sides[i].pair->ops->destroy(sides[i].pair);
        if (sides[i].provider != NULL) tl_region_destroy(sides[i].region);
    }
    ck_assert_msg(fake_fabric_is_clean(fabric, &why), "%s is left", why);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sides); i++)
        if (sides[i].provider != NULL) sides[i].provider->ops->close(sides[i].provider);
    fake_fabric_destroy(fabric);
}

#endif
