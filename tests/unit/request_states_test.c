// SPDX-License-Identifier: Apache-2.0
/*
 * The table of a request, over fakes of all that its actions call: every edge, and what an event does that the table
 * does not list.
 */
#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* The actions of the other files, which fakes below take the place of. */
#define request_leave_queue fake_leave_queue
#define request_queue_post fake_queue_post
#define request_start_revoke fake_start_revoke
#define request_finish fake_finish
#define request_copy_rest fake_copy_rest
#define request_drop_allocation fake_drop_allocation
#define request_release_memory fake_release_memory
#define request_place_and_prepare fake_place_and_prepare
#define request_queue_read fake_queue_read
#define request_release_source fake_release_source
#define request_tell_given_up fake_tell_given_up
#define request_return_source fake_return_source
#define request_wait_no_longer fake_wait_no_longer
#define conn_cancel_memory_wait fake_cancel_memory_wait
#define conn_watch fake_watch
#define conn_protocol_error fake_protocol_error
#define conn_arm fake_arm
#define tl_conn_close fake_conn_close
#define tl_memory_format_wait fake_format_wait
#define tl_reactor_defer fake_defer
#define tl_reactor_get_stats fake_get_stats

#include "dataplane/engine/request_states.c"
#include "fakes/run_suite.h"

static struct tl_engine engine;
static struct tl_conn conn;
static struct tl_fetch fetch;
static struct request request;
static struct request_placement placement;
static struct conn_memory_wait memory_wait;
static char trace[256]; /* the actions that were called, each followed by a blank */
static bool is_wait_on_its_way;
static uint64_t event_count; /* the reactor's */

static void note(const char *what)
{
    strcat(trace, what);
    strcat(trace, " ");
}

void fake_leave_queue(struct request *request_)
{
    (void)request_;
    note("leave_queue");
}

void fake_queue_post(struct request *request_)
{
    (void)request_;
    note("queue_post");
}

void fake_queue_read(struct request *request_)
{
    (void)request_;
    note("queue_read");
}

void fake_release_source(struct request *request_)
{
    ck_assert_int_eq(request_->state, REQUEST_RELEASING);
    note("release_source");
}

void fake_tell_given_up(struct request *request_)
{
    (void)request_;
    note("tell_given_up");
}

void fake_return_source(struct request *request_)
{
    (void)request_;
    note("return_source");
}

void fake_wait_no_longer(struct request *request_)
{
    (void)request_;
    note("wait_no_longer");
}

void fake_start_revoke(struct request *request_)
{
    (void)request_;
    note("start_revoke");
}

void fake_finish(struct request *request_)
{
    ck_assert_int_eq(request_->state, REQUEST_FINISHED);
    note("finish");
}

void fake_copy_rest(struct request *request_)
{
    ck_assert_int_eq(request_->state, REQUEST_COPYING);
    note("copy_rest");
}

void fake_drop_allocation(struct request *request_)
{
    if (request_->placement->landing.allocation != NULL) note("drop_allocation");
    request_->placement->landing.allocation = NULL;
}

void fake_release_memory(struct request *request_)
{
    (void)request_;
    note("release_memory");
}

void fake_place_and_prepare(struct request *request_, struct tl_memory_wait *wait)
{
    (void)request_;
    ck_assert_ptr_null(wait);
    note("place_and_prepare");
}

void fake_cancel_memory_wait(struct conn_memory_wait **wait)
{
    if (!is_wait_on_its_way) *wait = NULL;
    note("cancel_memory_wait");
}

void fake_watch(struct tl_conn *conn_)
{
    (void)conn_;
    note("watch");
}

void fake_protocol_error(struct tl_conn *conn_, const char *format, ...)
{
    (void)conn_;
    (void)format;
    note("protocol_error");
}

void fake_conn_close(struct tl_conn *conn_, const struct tl_error *reason)
{
    (void)conn_;
    (void)reason;
    note("close");
}

void fake_arm(struct tl_conn *conn_, struct tl_timer *timer, int64_t after_ns)
{
    (void)conn_;
    ck_assert_ptr_eq(timer, &request.limit->timer);
    ck_assert_int_eq(after_ns, engine.options.peer_timeout_ns);
    note("arm");
}

void fake_defer(struct tl_reactor *reactor, struct tl_closure *closure)
{
    (void)reactor;
    ck_assert_ptr_eq(closure, &request.limit->look_closure);
    note("look");
}

void fake_get_stats(const struct tl_reactor *reactor, struct tl_reactor_stats *ret_stats)
{
    (void)reactor;
    *ret_stats = (struct tl_reactor_stats){.events = event_count};
}

void fake_format_wait(struct tl_memory *memory, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)memory;
    (void)len_bytes;
    tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "it waited for the pool");
}

static void begin_in(enum request_state state)
{
    engine = (struct tl_engine){.options = {.peer_timeout_ns = 2000, .cancel_ns = 1000}};
    conn = (struct tl_conn){.engine = &engine};
    fetch = (struct tl_fetch){.key = "key"};
    memory_wait = (struct conn_memory_wait){.conn = &conn};
    placement = (struct request_placement){.request = &request};
    request = (struct request){.conn = &conn, .fetch = &fetch, .placement = &placement, .state = state};
    tl_list_init(&request.pending.place);
    tl_list_init(&placement.lap_link);
    trace[0] = '\0';
    is_wait_on_its_way = false;
}

static void end(void)
{
    tl_error_drop(request.result);
    free(request.limit);
}

static void expect_status(enum tl_status code)
{
    ck_assert_int_eq(request.result != NULL ? request.result->code : TL_OK, code);
}

/* ------------------------------------------------------------------------------------------------------- edges -- */

struct edge {
    enum request_state state;
    enum request_event event;
    enum request_state next;
    const char *trace;
};

static const struct edge edges[] = {
    {REQUEST_PREPARING, REQUEST_EVENT_READY, REQUEST_QUEUED, "queue_post "},
    {REQUEST_PREPARING, REQUEST_EVENT_FAILED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_PREPARING, REQUEST_EVENT_ABANDONED_ASKED, REQUEST_CANCELLING, "leave_queue queue_post arm "},
    {REQUEST_PREPARING, REQUEST_EVENT_ABANDONED_UNASKED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_PREPARING, REQUEST_EVENT_CANCEL, REQUEST_PREPARING, "cancel_memory_wait "},
    {REQUEST_PREPARING, REQUEST_EVENT_STATUS, REQUEST_PREPARING, "cancel_memory_wait "},
    {REQUEST_PREPARING, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_QUEUED, REQUEST_EVENT_SENT, REQUEST_ASKED, "watch "},
    {REQUEST_QUEUED, REQUEST_EVENT_READ, REQUEST_READING, ""},
    {REQUEST_QUEUED, REQUEST_EVENT_FAILED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_QUEUED, REQUEST_EVENT_ABANDONED_ASKED, REQUEST_CANCELLING, "leave_queue queue_post arm "},
    {REQUEST_QUEUED, REQUEST_EVENT_ABANDONED_UNASKED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_QUEUED, REQUEST_EVENT_CANCEL, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_QUEUED, REQUEST_EVENT_STATUS, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_QUEUED, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_ASKED, REQUEST_EVENT_META_DATA, REQUEST_RENEWING, "start_revoke "},
    {REQUEST_ASKED, REQUEST_EVENT_SOURCE, REQUEST_PREPARING, "place_and_prepare "},
    {REQUEST_ASKED, REQUEST_EVENT_COMPLETE, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_ASKED, REQUEST_EVENT_STATUS, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_ASKED, REQUEST_EVENT_CANCEL, REQUEST_CANCELLING, "leave_queue queue_post arm "},
    {REQUEST_ASKED, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_RENEWING, REQUEST_EVENT_CANCEL, REQUEST_CANCELLING, "leave_queue queue_post arm "},
    {REQUEST_RENEWING, REQUEST_EVENT_STATUS, REQUEST_REVOKING, ""},
    {REQUEST_RENEWING, REQUEST_EVENT_REVOKED, REQUEST_PREPARING, "release_memory place_and_prepare "},
    {REQUEST_RENEWING, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_READING, REQUEST_EVENT_COMPLETE, REQUEST_RELEASING, "release_source "},
    {REQUEST_READING, REQUEST_EVENT_CANCEL, REQUEST_CANCELLING, "leave_queue queue_post arm "},
    {REQUEST_READING, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_RELEASING, REQUEST_EVENT_RELEASED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_RELEASING, REQUEST_EVENT_CANCEL, REQUEST_RELEASING, ""},
    {REQUEST_RELEASING, REQUEST_EVENT_LATE, REQUEST_RELEASING, ""}, /* the release is posted */
    {REQUEST_RELEASING, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_CANCELLING, REQUEST_EVENT_STOPPED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_CANCELLING, REQUEST_EVENT_META_DATA, REQUEST_CANCELLING, ""},
    {REQUEST_CANCELLING, REQUEST_EVENT_COMPLETE, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_CANCELLING, REQUEST_EVENT_STATUS, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_CANCELLING, REQUEST_EVENT_CANCEL, REQUEST_CANCELLING, ""},
    {REQUEST_CANCELLING, REQUEST_EVENT_CANCELLED, REQUEST_REVOKING, "start_revoke "},
    {REQUEST_CANCELLING, REQUEST_EVENT_LATE, REQUEST_CANCELLING, "look "},
    {REQUEST_PREPARING, REQUEST_EVENT_LATE, REQUEST_PREPARING, "wait_no_longer "},
    {REQUEST_CANCELLING, REQUEST_EVENT_REVOKED, REQUEST_CANCELLING, ""},
    {REQUEST_CANCELLING, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_REVOKING, REQUEST_EVENT_CANCEL, REQUEST_REVOKING, ""},
    {REQUEST_REVOKING, REQUEST_EVENT_CANCELLED, REQUEST_REVOKING, ""},
    {REQUEST_REVOKING, REQUEST_EVENT_REVOKED, REQUEST_COPYING, "copy_rest "},
    {REQUEST_REVOKING, REQUEST_EVENT_BROKEN, REQUEST_COPYING, "copy_rest "},
    {REQUEST_COPYING, REQUEST_EVENT_COPIED, REQUEST_FINISHED, "finish "},
    {REQUEST_COPYING, REQUEST_EVENT_CANCEL, REQUEST_COPYING, ""},
    {REQUEST_COPYING, REQUEST_EVENT_CANCELLED, REQUEST_COPYING, ""},
};

static const struct edge *find_edge(enum request_state state, enum request_event event)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(edges); i++)
        if (edges[i].state == state && edges[i].event == event) return &edges[i];
    return NULL;
}

START_TEST(each_edge)
{
    const struct edge *edge = &edges[_i];
    begin_in(edge->state);
    if (edge->event == REQUEST_EVENT_LATE) request.limit = calloc(1, sizeof(*request.limit));
    request_handle(&request, edge->event);
    ck_assert_int_eq(request.state, edge->next);
    ck_assert_str_eq(trace, edge->trace);
    end();
}
END_TEST

/* The time to answer a cancel is up: what has come is taken first, as long as something comes (_i 0), until as many
 * slots were taken as there are (1), and not for ever (2). */
START_TEST(looks_for_an_answer)
{
    begin_in(REQUEST_CANCELLING);
    engine.options.slot_count = _i == 1 ? 2 : UINT32_MAX;
    request_limit(&request, 2000);
    request_handle(&request, REQUEST_EVENT_LATE);
    ck_assert_str_eq(trace, "arm look ");
    unsigned looks = 0;
    for (; strstr(trace, "close") == NULL; looks++) {
        trace[0] = '\0';
        request.limit->look_closure.run(&request.limit->look_closure);
        if (_i > 0 || looks < 4) event_count++;
        conn.credits.own_slots_returned += _i < 2;
    }
    ck_assert_uint_eq(looks, _i == 0 ? 6 : _i == 1 ? 3 : 1 + MOST_LOOKS);
    ck_assert_str_eq(trace, "close ");
    end();
}
END_TEST

START_TEST(peer_that_says_what_cannot_be_is_at_fault)
{
    for (unsigned state = REQUEST_PREPARING; state < REQUEST_FINISHED; state++) {
        for (unsigned event = REQUEST_OWN_EVENTS; event < REQUEST_EVENTS; event++) {
            if (find_edge((enum request_state)state, (enum request_event)event) != NULL) continue;
            begin_in((enum request_state)state);
            request_handle(&request, (enum request_event)event);
            ck_assert_str_eq(trace, "protocol_error ");
            ck_assert_uint_eq(request.state, state);
            end();
        }
    }
}
END_TEST

static const struct {
    enum request_state state;
    enum request_event event;
} forbidden[] = {
    {REQUEST_ASKED, REQUEST_EVENT_READY},      {REQUEST_PREPARING, REQUEST_EVENT_SENT},
    {REQUEST_REVOKING, REQUEST_EVENT_FAILED},  {REQUEST_ASKED, REQUEST_EVENT_ABANDONED_ASKED},
    {REQUEST_RENEWING, REQUEST_EVENT_SENT},    {REQUEST_REVOKING, REQUEST_EVENT_ABANDONED_UNASKED},
    {REQUEST_CANCELLING, REQUEST_EVENT_READY}, {REQUEST_ASKED, REQUEST_EVENT_READ},
    {REQUEST_READING, REQUEST_EVENT_SENT},     {REQUEST_READING, REQUEST_EVENT_STOPPED},
    {REQUEST_COPYING, REQUEST_EVENT_BROKEN},   {REQUEST_REVOKING, REQUEST_EVENT_COPIED},
};

START_TEST(event_of_our_own_that_cannot_be_ends_the_process)
{
    begin_in(forbidden[_i].state);
    request_handle(&request, forbidden[_i].event);
}
END_TEST

START_TEST(finished_request_notes_a_cancel_only)
{
    begin_in(REQUEST_FINISHED);
    request_handle(&request, REQUEST_EVENT_REVOKED);
    ck_assert(!request.is_cancelled);
    request_handle(&request, REQUEST_EVENT_CANCEL);
    ck_assert(request.is_cancelled);
    ck_assert_int_eq(request.state, REQUEST_FINISHED);
    ck_assert_str_eq(trace, "");
    end();
}
END_TEST

/* ------------------------------------------------------------------------------------------------- abandonment -- */

/* A peer that was asked and has not answered may still write: CANCEL is sent, and its answer awaited. */
START_TEST(asked_again_and_abandoned)
{
    static const enum request_event events[] = {REQUEST_EVENT_FAILED, REQUEST_EVENT_CANCEL};
    for (size_t i = 0; i < TL_ARRAY_COUNT(events); i++) {
        begin_in(REQUEST_QUEUED);
        request.is_asked = true;
        request_handle(&request, events[i]);
        ck_assert_int_eq(request.state, REQUEST_CANCELLING);
        ck_assert_str_eq(trace, "leave_queue queue_post arm ");
        expect_status(TL_OK);
        request_handle(&request, REQUEST_EVENT_CANCELLED);
        ck_assert_int_eq(request.state, REQUEST_REVOKING);
        expect_status(TL_CANCELLED);
        end();
    }
}
END_TEST

/* One that reads waits for its posted reads, and for no answer. */
START_TEST(one_that_reads_is_cancelled)
{
    for (unsigned read_count = 0; read_count < 2; read_count++) {
        begin_in(REQUEST_READING);
        request.is_asked = request.is_reading = request.has_source = true;
        placement.read_count = read_count;
        request_handle(&request, REQUEST_EVENT_CANCEL);
        ck_assert_int_eq(request.state, read_count == 0 ? REQUEST_REVOKING : REQUEST_CANCELLING);
        ck_assert_str_eq(trace, read_count == 0 ? "leave_queue tell_given_up start_revoke " : "leave_queue ");
        if (read_count > 0) request_handle(&request, REQUEST_EVENT_STOPPED);
        ck_assert_int_eq(request.state, REQUEST_REVOKING);
        ck_assert_str_eq(trace, "leave_queue tell_given_up start_revoke ");
        expect_status(TL_CANCELLED);
        end();
    }
}
END_TEST

/* A destination for which there is no memory ends it, and the owner is told. */
START_TEST(one_that_reads_fails_after_its_source)
{
    static const struct tl_error error = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};
    begin_in(REQUEST_PREPARING);
    request.is_asked = request.is_reading = request.has_source = true;
    request_fail(&request, &error);
    ck_assert_int_eq(request.state, REQUEST_REVOKING);
    ck_assert_str_eq(trace, "tell_given_up start_revoke ");
    expect_status(TL_RESOURCE_EXHAUSTED);
    end();
}
END_TEST

START_TEST(source_that_can_be_read_is_read)
{
    begin_in(REQUEST_PREPARING);
    request.is_asked = request.is_reading = request.has_source = true;
    request_handle(&request, REQUEST_EVENT_READY);
    ck_assert_int_eq(request.state, REQUEST_QUEUED);
    ck_assert_str_eq(trace, "queue_read ");
    end();
}
END_TEST

START_TEST(answered_and_abandoned)
{
    static const struct tl_error status = {.code = TL_ABORTED, .message = "aborted"};
    begin_in(REQUEST_QUEUED);
    request.is_asked = true;
    request.is_answered = true;
    request_set_result(&request, &status);
    request_handle(&request, REQUEST_EVENT_STATUS);
    ck_assert_int_eq(request.state, REQUEST_REVOKING);
    ck_assert_str_eq(trace, "start_revoke ");
    expect_status(TL_ABORTED);
    end();
}
END_TEST

START_TEST(failed_before_it_has_asked)
{
    static const struct tl_error error = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};
    begin_in(REQUEST_PREPARING);
    request_fail(&request, &error);
    ck_assert_int_eq(request.state, REQUEST_REVOKING);
    ck_assert_str_eq(trace, "start_revoke ");
    expect_status(TL_RESOURCE_EXHAUSTED);
    end();
}
END_TEST

/* A cancelled request that registers is abandoned when the registration has come. */
START_TEST(cancelled_while_it_registers)
{
    begin_in(REQUEST_PREPARING);
    request_handle(&request, REQUEST_EVENT_CANCEL);
    ck_assert_int_eq(request.state, REQUEST_PREPARING);
    ck_assert(request.is_cancelled);
    request_handle(&request, REQUEST_EVENT_READY);
    ck_assert_int_eq(request.state, REQUEST_REVOKING);
    ck_assert_str_eq(trace, "cancel_memory_wait start_revoke ");
    expect_status(TL_CANCELLED);
    end();
}
END_TEST

START_TEST(cancelled_while_it_waits_for_memory)
{
    for (unsigned is_asked = 0; is_asked < 2; is_asked++) {
        begin_in(REQUEST_PREPARING);
        placement.memory_wait = &memory_wait;
        request.is_asked = is_asked;
        request_handle(&request, REQUEST_EVENT_CANCEL);
        ck_assert_int_eq(request.state, is_asked ? REQUEST_CANCELLING : REQUEST_REVOKING);
        expect_status(TL_RESOURCE_EXHAUSTED);
        end();
    }
}
END_TEST

/* Memory of a device is given up at once. */
START_TEST(cancelled_while_a_device_allocates)
{
    static int stands_for_an_allocation;
    for (unsigned is_asked = 0; is_asked < 2; is_asked++) {
        begin_in(REQUEST_PREPARING);
        placement.landing.allocation = (struct tl_allocation *)&stands_for_an_allocation;
        request.is_asked = is_asked;
        request_handle(&request, REQUEST_EVENT_CANCEL);
        ck_assert_int_eq(request.state, is_asked ? REQUEST_CANCELLING : REQUEST_REVOKING);
        ck_assert_ptr_nonnull(strstr(trace, "drop_allocation "));
        expect_status(TL_CANCELLED);
        end();
    }
}
END_TEST

/* A large value waits until others have been copied on. */
START_TEST(cancelled_while_it_waits_for_others)
{
    struct tl_list awaiting_laps;
    begin_in(REQUEST_PREPARING);
    tl_list_init(&awaiting_laps);
    tl_list_push_back(&awaiting_laps, &placement.lap_link);
    request.is_asked = true;
    request_handle(&request, REQUEST_EVENT_CANCEL);
    ck_assert_int_eq(request.state, REQUEST_CANCELLING);
    ck_assert(tl_list_is_empty(&awaiting_laps));
    expect_status(TL_CANCELLED);
    end();
}
END_TEST

/* A source that could not be read in time goes back. */
START_TEST(late_with_a_source)
{
    begin_in(REQUEST_PREPARING);
    request.has_source = true;
    request_handle(&request, REQUEST_EVENT_LATE);
    ck_assert_int_eq(request.state, REQUEST_PREPARING);
    ck_assert_str_eq(trace, "return_source ");
    end();
}
END_TEST

START_TEST(cancelled_when_memory_is_on_its_way)
{
    begin_in(REQUEST_PREPARING);
    placement.memory_wait = &memory_wait;
    is_wait_on_its_way = true;
    request_handle(&request, REQUEST_EVENT_CANCEL);
    ck_assert_int_eq(request.state, REQUEST_PREPARING);
    placement.memory_wait = NULL;
    request_handle(&request, REQUEST_EVENT_READY);
    ck_assert_int_eq(request.state, REQUEST_REVOKING);
    end();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("request_states");
    TCase *tcase = tcase_create("edges");
    tcase_add_loop_test(tcase, each_edge, 0, TL_ARRAY_COUNT(edges));
    tcase_add_loop_test(tcase, looks_for_an_answer, 0, 3);
    tcase_add_test(tcase, peer_that_says_what_cannot_be_is_at_fault);
    tcase_add_loop_test_raise_signal(tcase, event_of_our_own_that_cannot_be_ends_the_process, SIGABRT, 0,
                                     TL_ARRAY_COUNT(forbidden));
    tcase_add_test(tcase, finished_request_notes_a_cancel_only);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("abandonment");
    tcase_add_test(tcase, asked_again_and_abandoned);
    tcase_add_test(tcase, one_that_reads_is_cancelled);
    tcase_add_test(tcase, one_that_reads_fails_after_its_source);
    tcase_add_test(tcase, source_that_can_be_read_is_read);
    tcase_add_test(tcase, answered_and_abandoned);
    tcase_add_test(tcase, failed_before_it_has_asked);
    tcase_add_test(tcase, cancelled_while_it_registers);
    tcase_add_test(tcase, cancelled_while_it_waits_for_memory);
    tcase_add_test(tcase, cancelled_while_a_device_allocates);
    tcase_add_test(tcase, cancelled_while_it_waits_for_others);
    tcase_add_test(tcase, late_with_a_source);
    tcase_add_test(tcase, cancelled_when_memory_is_on_its_way);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
