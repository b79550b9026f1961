// SPDX-License-Identifier: Apache-2.0
/*
 * Two queue pairs, a and b, of two opened devices in one process, for the tests of the verbs provider. They run inside
 * the guest, with rxe0 alone (packets go through the loop of rdma_rxe) or with rxe0 and rxe1 at both ends of a veth
 * pair.
 *
 * Everything here fails the running test when it does not work.
 */
#ifndef TESTS_RDMA_VM_VERBS_SIDES_H
#define TESTS_RDMA_VM_VERBS_SIDES_H

#include <check.h>

#include "base/clock.h"
#include "dataplane/verbs.h"

#define PATIENCE_NS (30 * TL_NS_PER_SEC)
#define MIB (UINT64_C(1) << 20)

struct side {
    struct tl_provider *provider;
    struct tl_queue_pair *pair;
    struct side *peer;
    bool answers; /* every message with the same */
    unsigned messages, immediates, broken, drained;
    uint8_t last[TL_SLOT_BYTES];
    uint32_t last_len, last_immediate;
    uint64_t last_immediate_len;
    struct tl_error reason;
};

struct job {
    struct tl_work work;
    unsigned done;
    unsigned order; /* among all that are done, from 1 */
    enum tl_status status;
    const struct side *side;
    unsigned broken_before; /* how often the side had been told when this was done */
};

extern struct side a, b;
extern const struct tl_queue_pair_events pair_events; /* the owner is a struct side */
/* Of make_memory: a's to be written from, b's to be written to. */
extern uint8_t *source, *target;
extern struct tl_region *source_region, *target_region;

#define PUMP_UNTIL(condition)                                                                                          \
    do {                                                                                                               \
        int64_t end_ns_ = tl_clock_now_ns() + PATIENCE_NS;                                                             \
        while (!(condition)) {                                                                                         \
            a.provider->ops->poll(a.provider);                                                                         \
            b.provider->ops->poll(b.provider);                                                                         \
            ck_assert_msg(tl_clock_now_ns() < end_ns_, "never: %s (a: %s, b: %s)", #condition, a.reason.message,       \
                          b.reason.message);                                                                           \
        }                                                                                                              \
    } while (0)

struct job new_job(const struct side *side);
bool has_veth(void);
const char *address_a(void);
const char *address_b(void);
struct tl_verbs_options options_for(const char *address);
struct tl_provider *open_at(const char *address, enum tl_keys keys);
void open_both(enum tl_keys keys);
void create_pair(struct side *side, uint32_t slots, uint32_t work, enum tl_keys keys);
void connect_both(void);
void set_up(uint32_t slots, uint32_t work, enum tl_keys keys);
void sever_pair(struct side *side);
void destroy_both(void);
void close_both(void);
void tear_down(void);
uint8_t *map_memory(uint64_t len_bytes);
struct tl_region *make_region(struct side *side, void *memory, uint64_t len_bytes, enum tl_region_access access);
void fill_memory(uint8_t *memory, uint64_t len_bytes, unsigned seed);
void expose_memory(struct side *side, struct tl_region *region, void *address, uint64_t len_bytes,
                   struct tl_exposure *ret_exposure);
void send_text(struct side *side, const char *text, struct job *job);
/* An exposure is there once a message posted after it has arrived. */
void let_expose_happen(struct side *side);
void make_memory(uint64_t len_bytes);
void drop_memory(void); /* so does close_both */
/* From a's source into what b has exposed; not rung. */
void write_to(const struct tl_exposure *exposure, uint64_t from, uint64_t len_bytes, uint64_t to, bool tells,
              struct job *job);
bool is_readable(const struct side *side, int timeout_ms);

#endif
