// SPDX-License-Identifier: Apache-2.0
/*
 * Connections that come and go: two engines on real verbs, in one thread, connect and end a thousand times. The number
 * of objects that the kernel holds for the devices, and of file descriptors of this process, stays the same; so does
 * the number of memory windows, which the test counts on their way to the card.
 */
#include "tests/rdma_vm/verbs_sides.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/engine/engine.h"
#include "dataplane/verbs/verbs_internal.h"
#include "fakes/descriptors.h"
#include "fakes/run_suite.h"
#include "tests/fakes/made_memory.h"

#define TEXT_BYTES 512

struct end {
    struct tl_memory *memory;
    struct tl_reactor *reactor;
    struct tl_engine *engine;
    struct tl_conn *conn;
    unsigned up, closed;
    struct tl_error reason;
};

static struct end ends[2]; /* the first one is the opener */

static void on_up(struct tl_conn *conn)
{
    ((struct end *)tl_conn_owner(conn))->up++;
}

static void on_closed(struct tl_conn *conn, const struct tl_error *reason)
{
    struct end *end = tl_conn_owner(conn);
    end->closed++;
    end->reason = *reason;
}

static const struct tl_conn_events conn_events = {.up = on_up, .closed = on_closed};
static const struct tl_source_ops no_source;

#define RUN_UNTIL(condition)                                                                                           \
    do {                                                                                                               \
        int64_t end_ns_ = tl_clock_now_ns() + PATIENCE_NS;                                                             \
        while (!(condition)) {                                                                                         \
            for (unsigned i_ = 0; i_ < 2; i_++)                                                                        \
                tl_reactor_run_once(ends[i_].reactor, 0);                                                              \
            ck_assert_msg(tl_clock_now_ns() < end_ns_, "never: %s (%s, %s)", #condition, ends[0].reason.message,       \
                          ends[1].reason.message);                                                                     \
        }                                                                                                              \
    } while (0)

static void open_end(struct end *end, struct tl_provider *provider, enum tl_keys keys)
{
    const struct tl_memory_options memory = {.pool_bytes = 65536, .max_pool_bytes = MIB};
    const struct tl_engine_options options = {.keys = keys,
                                              .slot_count = 16,
                                              .work_count = 16,
                                              .request_count = 16,
                                              .key_count = 16,
                                              .peer_memory = memory,
                                              .peer_timeout_ns = PATIENCE_NS,
                                              .connect_ns = PATIENCE_NS,
                                              .cancel_ns = PATIENCE_NS,
                                              .parked_ns = PATIENCE_NS};
    *end = (struct end){.memory = NULL};
    ck_assert_int_eq(tl_memory_create(provider, &memory, &end->memory, NULL), TL_OK);
    ck_assert_int_eq(tl_reactor_create(provider, &(struct tl_reactor_options){0}, &end->reactor, NULL), TL_OK);
    ck_assert_int_eq(tl_engine_create(end->reactor, end->memory, &options, &no_source, NULL, &end->engine, NULL),
                     TL_OK);
}

static void close_end(struct end *end)
{
    tl_engine_destroy(end->engine);
    tl_memory_destroy(end->memory);
    tl_reactor_destroy(end->reactor);
}

/* Both ends are up. */
static void connect_ends(void)
{
    uint8_t addresses[2][TL_CONN_ADDRESS_BYTES];
    uint32_t lengths[2];
    struct tl_error error;
    for (unsigned i = 0; i < 2; i++) {
        struct tl_identity peer = {.source = TL_IDENTITY_CLAIMED, .name = "the other", .incarnation = 1 - i + 1};
        ends[i].up = ends[i].closed = 0;
        struct tl_memory *memory;
        ck_assert_msg(made_memory(ends[i].engine, &memory, &error) == TL_OK, "%s", error.message);
        ck_assert_msg(tl_conn_create(ends[i].engine, memory, &peer, i + 1, i == 0, &conn_events, &ends[i],
                                     &ends[i].conn, &error) == TL_OK,
                      "%s", error.message);
        lengths[i] = tl_conn_get_address(ends[i].conn, addresses[i]);
    }
    for (unsigned i = 2; i-- > 0;)
        ck_assert_msg(tl_conn_connect(ends[i].conn, addresses[1 - i], lengths[1 - i], &error) == TL_OK, "%s",
                      error.message);
    RUN_UNTIL(ends[0].up == 1 && ends[1].up == 1);
}

/* Ends the connection in good order, or at once. */
static void disconnect_ends(bool is_drained)
{
    if (is_drained) {
        tl_conn_drain(ends[0].conn);
    } else {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE, "the test is over");
        tl_conn_close(ends[0].conn, &reason);
        tl_conn_close(ends[1].conn, &reason);
    }
    RUN_UNTIL(ends[0].closed == 1 && ends[1].closed == 1);
}

/* Returns the number of queue pairs, completion queues, regions and protection domains of all devices, as rdma shows
 * them. */
static void read_resources(char *ret_text)
{
    FILE *shown = popen("rdma res show", "re");
    ck_assert_ptr_nonnull(shown);
    size_t len = fread(ret_text, 1, TEXT_BYTES - 1, shown);
    ret_text[len] = '\0';
    ck_assert_int_eq(pclose(shown), 0);
    ck_assert_ptr_nonnull(strstr(ret_text, "qp"));
}

/* Counts memory windows; the two devices have the same functions. */
static struct ibv_context_ops real;
static long windows, most_windows;

static struct ibv_mw *count_window(struct ibv_pd *pd, enum ibv_mw_type type)
{
    struct ibv_mw *window = real.alloc_mw(pd, type);
    if (window != NULL && ++windows > most_windows) most_windows = windows;
    return window;
}

static int count_window_off(struct ibv_mw *window)
{
    int error = real.dealloc_mw(window);
    if (error == 0) windows--;
    return error;
}

static void count_windows(struct tl_provider *provider)
{
    struct ibv_context_ops *ops = &verbs_device_of(provider)->context->ops;
    if (real.alloc_mw == NULL) real = *ops;
    ops->alloc_mw = count_window;
    ops->dealloc_mw = count_window_off;
}

static const struct {
    enum tl_keys keys;
    unsigned count;
} cycles[] = {{TL_KEYS_WINDOW, 700}, {TL_KEYS_REGION, 300}};

START_TEST(paths_leave_nothing_behind)
{
    enum tl_keys keys = cycles[_i].keys;
    char before[TEXT_BYTES], after[TEXT_BYTES];
    unsigned descriptors = 0;
    open_both(keys);
    count_windows(a.provider);
    count_windows(b.provider);
    open_end(&ends[0], a.provider, keys);
    open_end(&ends[1], b.provider, keys);
    for (unsigned i = 0; i <= cycles[_i].count; i++) {
        connect_ends();
        disconnect_ends(i % 2 == 0);
        if (i > 0) continue;
        read_resources(before);
        descriptors = count_descriptors();
    }
    read_resources(after);
    ck_assert_str_eq(before, after);
    ck_assert_uint_eq(descriptors, count_descriptors());
    ck_assert_int_eq(windows, 0);
    ck_assert(keys == TL_KEYS_REGION || most_windows > 0);
    for (unsigned i = 0; i < 2; i++)
        close_end(&ends[i]);
    close_both();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_cycles");
    TCase *tests = tcase_create("tests");
    tcase_set_timeout(tests, 150);
    tcase_add_loop_test(tests, paths_leave_nothing_behind, 0, TL_ARRAY_COUNT(cycles));
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
