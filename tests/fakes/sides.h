// SPDX-License-Identifier: Apache-2.0
/*
 * Two queue pairs of any provider, a and b, as the tests of providers see them: what has arrived, what was done and in
 * which order. The header of a provider's sides says how they are opened. Everything here fails the running test when
 * it does not work.
 */
#ifndef FAKES_SIDES_H
#define FAKES_SIDES_H

#include <check.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/provider.h"

#define PATIENCE_NS (100 * TL_NS_PER_SEC)
#define MIB (UINT64_C(1) << 20)

struct side {
    const char *name;
    struct tl_provider *provider;
    struct tl_queue_pair *pair;
    struct side *peer;
    bool is_connected;
    bool answers; /* Answers every message with the same message. */
    unsigned messages, immediates, broken, drained;
    unsigned members_of_message; /* how many of the provider's quota each message uses */
    uint8_t last[TL_SLOT_BYTES];
    uint32_t last_len, last_immediate;
    uint64_t last_immediate_len;
    uint8_t *watched; /* The byte that each immediate records. */
    unsigned watched_value;
    struct tl_error reason;
};

struct job {
    struct tl_work work;
    unsigned done;
    unsigned order; /* The order among all works of the process that are done, from 1. */
    enum tl_status status;
    const struct side *side;
    unsigned broken_before; /* How many breaks the side had seen when this was done. */
};

extern struct side a, b;
extern const struct tl_queue_pair_events side_events; /* The owner is a struct side. */

#define PUMP_UNTIL(condition)                                                                                          \
    do {                                                                                                               \
        int64_t end_ns_ = tl_clock_now_ns() + PATIENCE_NS;                                                             \
        while (!(condition)) {                                                                                         \
            side_poll(&a);                                                                                             \
            side_poll(&b);                                                                                             \
            ck_assert_msg(tl_clock_now_ns() < end_ns_, "never: %s (a: %s, b: %s)", #condition, a.reason.message,       \
                          b.reason.message);                                                                           \
        }                                                                                                              \
    } while (0)

struct job new_job(void);
/* The events of a side that also notes broken_before. */
struct job new_job_of(const struct side *side);

/* Harmless when the side is not open. */
void side_poll(struct side *side);
/* Keeps nothing of the side except name, provider and peer. */
void side_create(struct side *side, uint32_t slots, uint32_t work, enum tl_keys keys);
void side_get_address(const struct side *side, struct tl_pair_address *ret_pair_address);
void side_connect(struct side *side, const struct tl_pair_address *peer);
void sides_connect(void);
void side_message(struct side *side, const void *data, uint32_t len_bytes, struct job *job);
void side_expose(struct side *side, struct tl_region *region, void *address, uint64_t len_bytes,
                 struct tl_exposure *ret_exposure);
void side_disconnect(struct side *side);
bool side_is_readable(const struct side *side, int timeout_ms);

void fill_bytes(uint8_t *bytes, uint64_t len_bytes, unsigned seed);

#endif
