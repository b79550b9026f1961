// SPDX-License-Identifier: Apache-2.0
/*
 * A card that fails in ways that soft-RoCE does not: the test exchanges the functions through which rdma-core reaches
 * it for functions that refuse or lie. In every case work is cancelled exactly once and the queue pair drains.
 */
#include "tests/rdma_vm/verbs_sides.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "dataplane/verbs/verbs_internal.h"
#include "fakes/run_suite.h"

static struct ibv_context_ops real;

/* The functions of a's device; `real` keeps the original ones. */
static struct ibv_context_ops *functions(void)
{
    struct ibv_context_ops *ops = &verbs_device_of(a.provider)->context->ops;
    real = *ops;
    return ops;
}

static void restore(void)
{
    verbs_device_of(a.provider)->context->ops = real;
}

/* TL_DEADLINE_EXCEEDED: the peer has not answered. */
static enum tl_status code_of(enum ibv_wc_status status)
{
    bool is_unanswered = status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_RESP_TIMEOUT_ERR;
    return is_unanswered ? TL_DEADLINE_EXCEEDED : TL_UNAVAILABLE;
}

static void expect_end_of(enum tl_status code, struct job *jobs, unsigned count, const char *part)
{
    PUMP_UNTIL(a.drained);
    ck_assert_msg(strstr(a.reason.message, part) != NULL, "no '%s' in '%s'", part, a.reason.message);
    ck_assert_int_eq(a.reason.code, code);
    ck_assert_uint_eq(a.broken, 1);
    for (unsigned i = 0; i < count; i++) {
        ck_assert_uint_eq(jobs[i].done, 1);
        ck_assert_int_eq(jobs[i].status, TL_CANCELLED);
        ck_assert_uint_eq(jobs[i].broken_before, 1);
    }
}

static void expect_end(struct job *jobs, unsigned count, const char *part)
{
    expect_end_of(TL_UNAVAILABLE, jobs, count, part);
}

/* ------------------------------------------------------------------------------------------------------- posts -- */

static unsigned accepted;

static int refuse_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **ret_refused)
{
    struct ibv_send_wr *last = request;
    for (unsigned i = 1; i < accepted; i++)
        last = last->next;
    *ret_refused = accepted > 0 ? last->next : request;
    if (accepted > 0) {
        struct ibv_send_wr *refused;
        last->next = NULL;
        ck_assert_int_eq(real.post_send(qp, request, &refused), 0);
        last->next = *ret_refused;
    }
    return ENOMEM;
}

START_TEST(requests_refused)
{
    enum { COUNT = 3 };
    struct job jobs[COUNT];
    accepted = (unsigned)_i;
    set_up(16, 16, TL_KEYS_WINDOW);
    functions()->post_send = refuse_send;
    for (unsigned i = 0; i < COUNT; i++) {
        jobs[i] = new_job_of(&a);
        a.pair->ops->message(a.pair, "x", 1, &jobs[i].work);
    }
    tl_queue_pair_doorbell(a.pair);
    ck_assert_uint_eq(jobs[0].done, 0);
    restore();
    expect_end(jobs, COUNT, "the card refuses a request: Cannot allocate memory");
    ck_assert_uint_le(b.messages, accepted);
    tear_down();
}
END_TEST

static int refuse_receive(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **ret_refused)
{
    (void)qp;
    *ret_refused = request;
    return ENOMEM;
}

START_TEST(slots_refused)
{
    set_up(16, 16, TL_KEYS_WINDOW);
    functions()->post_recv = refuse_receive;
    for (unsigned i = 0; i < 5; i++) /* Four may be idle. */
        send_text(&b, "x", NULL);
    PUMP_UNTIL(a.messages == 5);
    restore();
    expect_end(NULL, 0, "the card refuses receive buffers");
    tear_down();
}
END_TEST

START_TEST(slots_refused_while_connecting)
{
    struct tl_pair_address from_b;
    struct tl_error error = {0};
    open_both(TL_KEYS_WINDOW);
    side_create(&a, 16, 16, TL_KEYS_WINDOW);
    side_create(&b, 16, 16, TL_KEYS_WINDOW);
    b.pair->ops->get_address(b.pair, &from_b);
    functions()->post_recv = refuse_receive;
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &from_b, &error), TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "the card refuses receive buffers"));
    a.pair->ops->destroy(a.pair);
    b.pair->ops->destroy(b.pair);
    close_both();
}
END_TEST

static struct ibv_mw *refuse_window(struct ibv_pd *pd, enum ibv_mw_type type)
{
    (void)pd;
    (void)type;
    errno = ENOMEM;
    return NULL;
}

START_TEST(windows_refused)
{
    struct tl_exposure exposures[100] = {{0}};
    struct tl_error error = {0};
    struct tl_queue_pair_options options = {.slot_count = 16, .work_count = 128, .keys = TL_KEYS_WINDOW};
    struct tl_queue_pair *pair;
    unsigned count = 0;
    set_up(16, 128, TL_KEYS_WINDOW);
    make_memory(MIB);
    functions()->alloc_mw = refuse_window;
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, &error),
                     TL_RESOURCE_EXHAUSTED);
    restore();
    verbs_device_of(b.provider)->context->ops.alloc_mw = refuse_window;
    while (tl_queue_pair_expose(b.pair, target_region, target, 64, &exposures[count], &error) == TL_OK)
        count++;
    ck_assert_uint_gt(count, 0);
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(exposures[count].region);
    ck_assert_uint_eq(verbs_pair_of(b.pair)->ring.tail - verbs_pair_of(b.pair)->ring.retired, count);
    tear_down();
}
END_TEST

/* ------------------------------------------------------------------------------------------------- completions -- */

static enum ibv_wc_status forged_status;
static int64_t forged_index; /* -1 leaves it as it is. */
static unsigned forged_skip; /* The number of good completions before it. */

/* Turns the completion of one of a's requests into another one. */
static int forge(struct ibv_cq *cq, int capacity, struct ibv_wc *ret_completions)
{
    int count = real.poll_cq(cq, capacity, ret_completions);
    for (int i = 0; i < count; i++) {
        struct verbs_id id = verbs_id_unpack(ret_completions[i].wr_id);
        if (id.kind != VERBS_SEND || ret_completions[i].status != IBV_WC_SUCCESS) continue;
        if (forged_skip > 0) {
            forged_skip--;
            continue;
        }
        ret_completions[i].status = forged_status;
        ret_completions[i].vendor_err = 0x42;
        if (forged_index >= 0) id.index = (uint32_t)forged_index;
        ret_completions[i].wr_id = verbs_id_pack(id);
    }
    return count;
}

static const struct {
    enum ibv_wc_status status;
    const char *part;
} statuses[] = {
    {IBV_WC_LOC_LEN_ERR, "longer than its slot"},
    {IBV_WC_LOC_QP_OP_ERR, "could not carry out a request of ours"},
    {IBV_WC_LOC_EEC_OP_ERR, "a request failed (local EE context operation error"},
    {IBV_WC_LOC_PROT_ERR, "not registered"},
    {IBV_WC_WR_FLUSH_ERR, "is in the error state"},
    {IBV_WC_MW_BIND_ERR, "could not be bound"},
    {IBV_WC_BAD_RESP_ERR, "what it was not asked"},
    {IBV_WC_LOC_ACCESS_ERR, "wrote where it may not"},
    {IBV_WC_REM_INV_REQ_ERR, "does not fit the slot"},
    {IBV_WC_REM_ACCESS_ERR, "revoked, or never given"},
    {IBV_WC_REM_OP_ERR, "peer's card could not carry out"},
    {IBV_WC_RETRY_EXC_ERR, "does not answer"},
    {IBV_WC_RNR_RETRY_EXC_ERR, "no slot posted"},
    {IBV_WC_REM_ABORT_ERR, "has aborted"},
    {IBV_WC_FATAL_ERR, "the card has failed"},
    {IBV_WC_RESP_TIMEOUT_ERR, "in time"},
    {IBV_WC_GENERAL_ERR, "a request failed"},
    {(enum ibv_wc_status)200, "a request failed"},
};

START_TEST(every_status_breaks_with_words)
{
    struct job jobs[3];
    forged_status = statuses[_i].status;
    forged_index = -1;
    forged_skip = 1;
    set_up(16, 16, TL_KEYS_WINDOW);
    functions()->poll_cq = forge;
    for (unsigned i = 0; i < TL_ARRAY_COUNT(jobs); i++) {
        jobs[i] = new_job_of(&a);
        send_text(&a, "x", &jobs[i]);
    }
    /* The first request has succeeded. */
    expect_end_of(code_of(statuses[_i].status), jobs + 1, 2, statuses[_i].part);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "vendor 0x42"));
    ck_assert_int_eq(jobs[0].status, TL_OK);
    ck_assert_uint_eq(jobs[0].broken_before, 0);
    ck_assert_uint_eq(jobs[2].order, 3);
    restore();
    tear_down();
}
END_TEST

/* The completions name a record outside of the ring, and one that was not posted. */
START_TEST(completions_of_nothing)
{
    const int64_t indexes[] = {16, 0x7fffff, 7};
    struct job job = new_job_of(&a);
    forged_status = IBV_WC_SUCCESS;
    forged_index = indexes[_i];
    forged_skip = 0;
    set_up(16, 16, TL_KEYS_WINDOW);
    functions()->poll_cq = forge;
    send_text(&a, "x", &job);
    expect_end(&job, 1, "completed a request that it does not have");
    restore();
    tear_down();
}
END_TEST

/* -------------------------------------------------------------------------------------------------- the device -- */

/* The flushed requests never come back. */
static int lose(struct ibv_cq *cq, int capacity, struct ibv_wc *ret_completions)
{
    int count = real.poll_cq(cq, capacity, ret_completions), kept = 0;
    for (int i = 0; i < count; i++) {
        if (ret_completions[i].status == IBV_WC_SUCCESS) ret_completions[kept++] = ret_completions[i];
    }
    return kept;
}

START_TEST(completions_are_lost)
{
    struct tl_exposure exposure = {0};
    struct job job = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    make_memory(8 * MIB);
    side_expose(&b, target_region, target, 8 * MIB, &exposure);
    let_expose_happen(&b);
    functions()->poll_cq = lose;
    write_to(&exposure, 0, 8 * MIB, 0, false, &job);
    tl_queue_pair_doorbell(a.pair);
    side_disconnect(&a);
    PUMP_UNTIL(a.drained);
    ck_assert_uint_eq(job.done, 1);
    ck_assert_int_eq(job.status, TL_CANCELLED);
    restore();
    tear_down();
}
END_TEST

/* Nothing more can be made, and everything that existed has ended. */
static void expect_dead(struct job *job, const char *part)
{
    struct tl_queue_pair_options options = {.slot_count = 4, .work_count = 4, .keys = TL_KEYS_WINDOW};
    struct tl_queue_pair *pair;
    struct tl_error error = {0};
    expect_end(job, 1, part);
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, &error), TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, part));
    ck_assert(tl_provider_arm(a.provider));
    restore();
    tear_down();
}

static int fail_poll(struct ibv_cq *cq, int capacity, struct ibv_wc *ret_completions)
{
    (void)cq;
    (void)capacity;
    (void)ret_completions;
    return -1;
}

START_TEST(completions_cannot_be_read)
{
    struct job job = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    functions()->poll_cq = fail_poll;
    send_text(&a, "x", &job);
    expect_dead(&job, "the completion queue cannot be read");
}
END_TEST

static int fail_notify(struct ibv_cq *cq, int solicited_only)
{
    (void)cq;
    (void)solicited_only;
    return EIO;
}

START_TEST(no_notice)
{
    struct job job = new_job_of(&a);
    set_up(16, 16, TL_KEYS_WINDOW);
    functions()->req_notify_cq = fail_notify;
    send_text(&a, "x", &job);
    ck_assert(!tl_provider_arm(a.provider));
    expect_dead(&job, "gives no notice");
}
END_TEST

/* The kernel writes it in this form: the element, and the number of the event. */
struct kernel_event {
    uint64_t element;
    uint32_t event_type;
    uint32_t reserved;
};

START_TEST(device_is_removed)
{
    int ends[2];
    struct job job = new_job_of(&a);
    struct kernel_event event = {.event_type = IBV_EVENT_DEVICE_FATAL};
    set_up(16, 16, TL_KEYS_WINDOW);
    functions();
    ck_assert_int_eq(pipe2(ends, O_NONBLOCK | O_CLOEXEC), 0);
    ck_assert_int_ge(dup2(ends[0], verbs_device_of(a.provider)->context->async_fd), 0);
    ck_assert_int_eq(write(ends[1], &event, sizeof(event)), sizeof(event));
    a.pair->ops->message(a.pair, "x", 1, &job.work);
    expect_dead(&job, "the device has failed or was removed");
    close(ends[0]);
    close(ends[1]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_card");
    TCase *tests = tcase_create("tests");
    tcase_set_timeout(tests, 90);
    tcase_add_loop_test(tests, requests_refused, 0, 3);
    tcase_add_test(tests, slots_refused);
    tcase_add_test(tests, slots_refused_while_connecting);
    tcase_add_test(tests, windows_refused);
    tcase_add_loop_test(tests, every_status_breaks_with_words, 0, TL_ARRAY_COUNT(statuses));
    tcase_add_loop_test(tests, completions_of_nothing, 0, 3);
    tcase_add_test(tests, completions_are_lost);
    tcase_add_test(tests, completions_cannot_be_read);
    tcase_add_test(tests, no_notice);
    tcase_add_test(tests, device_is_removed);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
