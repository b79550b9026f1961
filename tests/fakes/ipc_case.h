// SPDX-License-Identifier: Apache-2.0
/* The beginning of the programs that test values from device to device (gpu-ipc): a pair of engines over local
 * providers in this process, and how far a fetch has come. */
#ifndef FAKES_IPC_CASE_H
#define FAKES_IPC_CASE_H

#include <check.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "dataplane/engine/request_internal.h"
#include "dataplane/local/local_internal.h"
#include "fakes/device_case.h"
#include "fakes/engine_case.h"

/* The library allocates tensors of the first size in memory that other processes can map, and tensors of the second
 * size in memory that they cannot. */
#define LARGE_BYTES (UINT64_C(2) << 20)
#define SMALL_BYTES 1000
/* How long the sides are driven at most for what must come. */
#define MOST_NS (60 * TL_NS_PER_SEC)

static inline struct tl_provider *open_local(const char *name)
{
    struct tl_provider *provider;
    (void)name;
    TL_CHECK(tl_local_open(&(struct tl_local_options){0}, &provider, NULL) == TL_OK);
    return provider;
}

static inline bool is_at_work(const struct tl_provider *provider)
{
    TL_LIST_FOREACH(&local_provider_of(provider)->pairs, link)
    {
        if (local_pair_is_reading(TL_CONTAINER_OF(link, struct local_pair, link))) return true;
    }
    return false;
}

static inline void setup_ipc(void)
{
    setup_cuda();
    engine_pair_defaults(&options);
    options.engine.inline_bytes = TL_INLINE_BYTES; /* nothing comes inline from or to a device */
    options.open_provider = open_local;
    options.is_at_work = is_at_work;
    options.engine.keys = TL_KEYS_REGION;
    options.engine.peer_timeout_ns = options.engine.cancel_ns = 20 * TL_NS_PER_SEC;
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
    ck_assert_int_eq(tl_device_open(gpu1, NULL), TL_OK);
}

static inline void teardown_ipc(void)
{
    engine_pair_close(&pair);
    teardown_cuda();
}

static inline struct fake_cuda_counts counts(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts;
}

static inline struct tl_tensor *value_on(struct tl_device device, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = bytes_on(device, size_bytes);
    fill(tensor, seed);
    return tensor;
}

/* engine_pair_run would go on for as long as something waits for a device. */
static inline void run_rounds(void)
{
    for (unsigned i = 0; i < 20; i++) {
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
    }
}

/* Drives the sides until the condition is true; fails the test when it does not become true. */
#define RUN_UNTIL(condition)                                                                                           \
    do {                                                                                                               \
        int64_t until_ns_ = tl_clock_deadline_ns(MOST_NS);                                                             \
        while (!(condition)) {                                                                                         \
            ck_assert_msg(tl_clock_now_ns() < until_ns_, "never became true: %s", #condition);                         \
            run_rounds();                                                                                              \
            usleep(100);                                                                                               \
        }                                                                                                              \
    } while (0)

static inline void start(struct tl_device device, uint64_t step)
{
    ask.device = device;
    engine_ask_start(asker, &ask, "key", step);
}

static inline void run_until_done(void)
{
    RUN_UNTIL(ask.done_count > 0);
    ck_assert_uint_eq(ask.done_count, 1);
}

static inline enum request_state state_of(void)
{
    const struct request *request = ask.fetch.transport_state;
    return request != NULL ? request->state : REQUEST_NEVER;
}

static inline void run_until_state(enum request_state state)
{
    RUN_UNTIL(state_of() == state);
}

static inline void run_for_a_while(void)
{
    for (unsigned i = 0; i < 30; i++) {
        run_rounds();
        usleep(1000);
    }
}

static inline void expect(unsigned seed, enum tl_path path)
{
    run_until_done();
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_msg(ask.fetch.path == path, "%s: %s", tl_path_name(ask.fetch.path), ask.fetch.path_reason);
    ck_assert(is_filled(ask.fetch.destination, seed));
}

static inline void expect_reason(const char *part)
{
    ck_assert_msg(strstr(ask.fetch.path_reason, part) != NULL, "%s", ask.fetch.path_reason);
}

/* Starts a fetch whose copy does not end before the legacy stream is held no longer. */
static inline void start_held(unsigned seed)
{
    open_pair();
    struct tl_tensor *destination = bytes_on(gpu0, LARGE_BYTES);
    engine_side_send(owner, "key", 1, value_on(gpu0, LARGE_BYTES, seed));
    ask.destination = destination;
    cuda->hold(NULL, true);
    start(gpu0, 1);
    run_until_state(REQUEST_READING);
}

#endif
