// SPDX-License-Identifier: Apache-2.0
/*
 * Queue pairs of local providers, for the tests of these: two in this process, or one here and one in a process that
 * was forked. Everything here fails the running test when it does not work.
 */
#ifndef TESTS_FAKES_LOCAL_SIDES_H
#define TESTS_FAKES_LOCAL_SIDES_H

#include <check.h>
#include <sys/types.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/local.h"

#define PATIENCE_NS (15 * TL_NS_PER_SEC)
#define MIB (UINT64_C(1) << 20)

struct side {
    const char *name;
    struct tl_provider *provider;
    struct tl_queue_pair *pair;
    bool is_connected;
    bool answers; /* every message with the same */
    unsigned messages, immediates, broken, drained;
    uint8_t last[TL_SLOT_BYTES];
    uint32_t last_len, last_immediate;
    uint64_t last_immediate_len;
    uint8_t *watched; /* the byte there is looked at with each immediate */
    unsigned watched_value;
    struct tl_error reason;
};

struct job {
    struct tl_work work;
    unsigned done;
    unsigned order; /* among all that are done, from 1 */
    enum tl_status status;
};

extern struct side a, b;
extern const struct tl_queue_pair_events side_events; /* the owner is a struct side */

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
/* Harmless when it is not open. */
void side_poll(struct side *side);
void side_open(struct side *side, const char *name, const struct tl_local_options *options);
void side_create(struct side *side, uint32_t slots, uint32_t work);
void side_introduce(const struct side *side, struct tl_introduction *ret_introduction);
void side_connect(struct side *side, const struct tl_introduction *peer);
void side_message(struct side *side, const void *data, uint32_t len_bytes, struct job *job);
void side_write(struct side *side, const void *source, uint64_t len_bytes, const struct tl_exposure *exposure,
                uint64_t offset_bytes, bool has_immediate, uint32_t immediate, struct job *job);
void side_expose(struct side *side, struct tl_region *region, void *address, uint64_t len_bytes,
                 struct tl_exposure *ret_exposure);
struct tl_region *side_map(struct side *side, uint64_t len_bytes);
/* And its memory. */
void region_drop(struct tl_region *region);
void side_sever(struct side *side);
/* Severs if need be, drains, destroys the pair. */
void side_end(struct side *side);
void side_close(struct side *side);

/* a and b in this process, connected; options of both, NULL: none. */
void sides_set_up(const struct tl_local_options *options);
void sides_tear_down(void);

void fill_bytes(uint8_t *bytes, uint64_t len_bytes, unsigned seed);

/* Of this process, but not those of coverage and the like: what grows where something leaks. */
unsigned count_descriptors(void);
unsigned count_mappings(void); /* of shared memory */

/* Forks; the child runs `child` with its end of a socket that passes introductions, and exits with what that returns.
 */
pid_t fork_side(int (*child)(int fd), int *ret_fd);
void send_introduction(int fd, const struct side *side);
/* False: the other end has gone. */
bool receive_introduction(int fd, struct tl_introduction *ret_introduction);

#endif
