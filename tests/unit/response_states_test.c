// SPDX-License-Identifier: Apache-2.0
/*
 * The table of a response, over fakes of all that its actions call: every edge, and what an event does that the table
 * does not list.
 */
#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* The actions of the other files, which fakes below take the place of. */
#define response_prepare fake_prepare
#define response_queue_post fake_queue_post
#define response_close fake_close
#define response_locate fake_locate
#define response_release_source fake_release_source
#define response_start_return fake_start_return
#define tl_conn_close fake_conn_close
#define response_send_cancelled fake_send_cancelled
#define conn_cancel_memory_wait fake_cancel_memory_wait
#define conn_arm fake_arm
#define tl_memory_format_wait fake_format_wait
#define conn_protocol_error fake_protocol_error
#define tl_reactor_timers fake_timers
#define response_arm_lease fake_arm_lease
#define conn_post_when_slot fake_post_when_slot

#include "dataplane/engine/response_states.c"
#include "fakes/run_suite.h"

static struct tl_engine engine;
static struct tl_conn conn;
static struct response response;
static struct response_sending sending;
static struct tl_timers timers;
static struct tl_tensor *tensor;
static bool is_wait_on_its_way;
static char trace[256]; /* the actions that were called, each followed by a blank */

static void note(const char *what)
{
    strcat(trace, what);
    strcat(trace, " ");
}

void fake_prepare(struct response *response_)
{
    (void)response_;
    note("prepare");
}

void fake_locate(struct response *response_)
{
    (void)response_;
    note("locate");
}

void fake_release_source(struct response *response_)
{
    (void)response_;
    note("release_source");
}

void fake_arm_lease(struct response *response_)
{
    (void)response_;
    note("arm_lease");
}

void fake_post_when_slot(struct tl_conn *conn_, struct pending_post *pending)
{
    (void)conn_;
    (void)pending;
    note("post_when_slot");
}

void fake_start_return(struct response *response_)
{
    (void)response_;
    note("start_return");
}

void fake_conn_close(struct tl_conn *conn_, const struct tl_error *reason)
{
    (void)conn_;
    ck_assert_int_eq(reason->code, TL_UNAVAILABLE);
    note("conn_close");
}

void fake_queue_post(struct response *response_)
{
    (void)response_;
    note("queue_post");
}

void fake_close(struct response *response_, enum tl_serve_end end)
{
    (void)response_;
    note(end == TL_SERVE_RECEIVED ? "close_received" : end == TL_SERVE_CANCELLED ? "close_cancelled" : "close_broken");
}

void fake_send_cancelled(struct tl_conn *conn_, uint32_t handle_)
{
    (void)conn_;
    (void)handle_;
    note("send_cancelled");
}

void fake_cancel_memory_wait(struct conn_memory_wait **wait)
{
    if (!is_wait_on_its_way) *wait = NULL;
    note("cancel_memory_wait");
}

void fake_format_wait(struct tl_memory *memory, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)memory;
    tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "it waited for %u bytes", (unsigned)len_bytes);
}

void fake_arm(struct tl_conn *conn_, struct tl_timer *timer, int64_t after_ns)
{
    (void)conn_;
    ck_assert_ptr_eq(timer, &sending.park_timer);
    ck_assert_int_eq(after_ns, 1000);
    note("arm");
}

void fake_protocol_error(struct tl_conn *conn_, const char *format, ...)
{
    (void)conn_;
    (void)format;
    note("protocol_error");
}

struct tl_timers *fake_timers(struct tl_reactor *reactor)
{
    (void)reactor;
    return &timers;
}

static void begin_in(enum response_state state)
{
    const uint64_t size_bytes = 100;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, NULL), TL_OK);
    engine = (struct tl_engine){.options = {.parked_ns = 1000}};
    conn = (struct tl_conn){.engine = &engine};
    sending = (struct response_sending){.response = &response, .offer = {.tensor = tensor}};
    response = (struct response){.conn = &conn, .state = state, .sending = &sending, .serve = {.key = "key"}};
    tl_list_init(&sending.pending.place);
    tl_list_init(&conn.posts.window_queue);
    is_wait_on_its_way = false;
    trace[0] = '\0';
    tl_timers_init(&timers);
}

static void end(void)
{
    tl_tensor_put(sending.offer.tensor);
    tl_error_drop(sending.status);
    tl_timers_fini(&timers);
}

/* ------------------------------------------------------------------------------------------------------- edges -- */

struct edge {
    enum response_state state;
    enum response_event event;
    enum response_state next;
    const char *trace;
};

#define STOPPED "cancel_memory_wait close_cancelled send_cancelled "

static const struct edge edges[] = {
    {RESPONSE_WAITING, RESPONSE_EVENT_STATUS, RESPONSE_ENDING, "queue_post "},
    {RESPONSE_WAITING, RESPONSE_EVENT_EMPTY, RESPONSE_ENDING, "queue_post "},
    {RESPONSE_WAITING, RESPONSE_EVENT_FITS, RESPONSE_PREPARING, "prepare "},
    {RESPONSE_WAITING, RESPONSE_EVENT_DIFFERS, RESPONSE_PARKED, "queue_post arm "},
    {RESPONSE_WAITING, RESPONSE_EVENT_SHOWN, RESPONSE_LOCATING, "locate "},
    {RESPONSE_WAITING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_PARKED, RESPONSE_EVENT_RE_REQUEST, RESPONSE_PREPARING, "prepare "},
    {RESPONSE_PARKED, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_PARKED, RESPONSE_EVENT_LATE, RESPONSE_ENDING, "queue_post "},
    {RESPONSE_PREPARING, RESPONSE_EVENT_READY, RESPONSE_WRITING, "queue_post "},
    {RESPONSE_PREPARING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_WRITING, RESPONSE_EVENT_READY, RESPONSE_WRITING, "queue_post "},
    {RESPONSE_WRITING, RESPONSE_EVENT_FAILED, RESPONSE_ENDING, "queue_post "},
    {RESPONSE_WRITING, RESPONSE_EVENT_WORK_DONE, RESPONSE_WRITING, "queue_post "},
    {RESPONSE_WRITING, RESPONSE_EVENT_COPIED, RESPONSE_WRITING, "queue_post "},
    {RESPONSE_WRITING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_WRITING, RESPONSE_EVENT_LATE, RESPONSE_WRITING, ""},
    {RESPONSE_LOCATING, RESPONSE_EVENT_READY, RESPONSE_SHOWING, "queue_post "},
    {RESPONSE_LOCATING, RESPONSE_EVENT_DIFFERS, RESPONSE_PARKED, "release_source queue_post arm "},
    {RESPONSE_LOCATING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_SHOWING, RESPONSE_EVENT_READY, RESPONSE_SHOWING, "queue_post "},
    {RESPONSE_SHOWING, RESPONSE_EVENT_DIFFERS, RESPONSE_PARKED, "release_source queue_post arm "},
    {RESPONSE_SHOWING, RESPONSE_EVENT_FAILED, RESPONSE_ENDING, "queue_post "},
    {RESPONSE_SHOWING, RESPONSE_EVENT_RELEASE, RESPONSE_RETURNING, "start_return "},
    {RESPONSE_SHOWING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_SHOWING, RESPONSE_EVENT_LATE, RESPONSE_SHOWING, "conn_close "},
    {RESPONSE_SHOWING, RESPONSE_EVENT_RETURN, RESPONSE_HIDING, "start_return "},
    {RESPONSE_HIDING, RESPONSE_EVENT_WORK_DONE, RESPONSE_PARKED, "release_source arm "},
    {RESPONSE_HIDING, RESPONSE_EVENT_DIFFERS, RESPONSE_PARKED, "release_source arm "},
    {RESPONSE_HIDING, RESPONSE_EVENT_READY, RESPONSE_PREPARING, "release_source prepare "},
    {RESPONSE_HIDING, RESPONSE_EVENT_RE_REQUEST, RESPONSE_HIDING, ""},
    {RESPONSE_HIDING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, STOPPED},
    {RESPONSE_RETURNING, RESPONSE_EVENT_WORK_DONE, RESPONSE_RETURNING, "close_received "},
    {RESPONSE_ENDING, RESPONSE_EVENT_WORK_DONE, RESPONSE_ENDING, ""},
    {RESPONSE_ENDING, RESPONSE_EVENT_COPIED, RESPONSE_ENDING, ""},
    {RESPONSE_ENDING, RESPONSE_EVENT_CANCEL, RESPONSE_ENDING, ""},
    {RESPONSE_STOPPING, RESPONSE_EVENT_RE_REQUEST, RESPONSE_STOPPING, ""},
    {RESPONSE_STOPPING, RESPONSE_EVENT_COPIED, RESPONSE_STOPPING, ""},
    {RESPONSE_STOPPING, RESPONSE_EVENT_READY, RESPONSE_STOPPING, "close_cancelled send_cancelled "},
    {RESPONSE_STOPPING, RESPONSE_EVENT_FAILED, RESPONSE_STOPPING, "close_cancelled send_cancelled "},
    {RESPONSE_STOPPING, RESPONSE_EVENT_WORK_DONE, RESPONSE_STOPPING, "close_cancelled send_cancelled "},
    {RESPONSE_STOPPING, RESPONSE_EVENT_CANCEL, RESPONSE_STOPPING, ""},
};

static const struct edge *find_edge(enum response_state state, enum response_event event)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(edges); i++)
        if (edges[i].state == state && edges[i].event == event) return &edges[i];
    return NULL;
}

START_TEST(each_edge)
{
    const struct edge *edge = &edges[_i];
    begin_in(edge->state);
    response_handle(&response, edge->event);
    ck_assert_int_eq(response.state, edge->next);
    ck_assert_str_eq(trace, edge->trace);
    end();
}
END_TEST

START_TEST(peer_that_says_what_cannot_be_is_at_fault)
{
    for (unsigned state = RESPONSE_WAITING; state < RESPONSE_STATES; state++) {
        for (unsigned event = RESPONSE_OWN_EVENTS; event < RESPONSE_EVENTS; event++) {
            if (find_edge((enum response_state)state, (enum response_event)event) != NULL) continue;
            begin_in((enum response_state)state);
            response_handle(&response, (enum response_event)event);
            ck_assert_str_eq(trace, "protocol_error ");
            ck_assert_uint_eq(response.state, state);
            end();
        }
    }
}
END_TEST

static const struct {
    enum response_state state;
    enum response_event event;
} forbidden[] = {
    {RESPONSE_PARKED, RESPONSE_EVENT_STATUS},    {RESPONSE_WRITING, RESPONSE_EVENT_EMPTY},
    {RESPONSE_ENDING, RESPONSE_EVENT_FITS},      {RESPONSE_PARKED, RESPONSE_EVENT_READY},
    {RESPONSE_STOPPING, RESPONSE_EVENT_DIFFERS}, {RESPONSE_ENDING, RESPONSE_EVENT_FAILED},
};

START_TEST(event_of_our_own_that_cannot_be_ends_the_process)
{
    begin_in(forbidden[_i].state);
    response_handle(&response, forbidden[_i].event);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- the ends -- */

START_TEST(failure_in_the_middle_is_sent)
{
    static const struct tl_error error = {.code = TL_DATA_LOSS, .message = "the file has changed"};
    begin_in(RESPONSE_WRITING);
    sending.posted_bytes = 50;
    response_fail(&response, &error);
    ck_assert_int_eq(response.state, RESPONSE_ENDING);
    ck_assert_int_eq(sending.status->code, TL_DATA_LOSS);
    ck_assert_str_eq(trace, "queue_post ");
    end();
}
END_TEST

/* A value that has waited for the pool in vain may travel over the link, unless its memory has just come. */
START_TEST(pool_that_stays_full)
{
    static struct conn_memory_wait wait = {.memory_wait.wait.len_bytes = 70};
    begin_in(RESPONSE_WRITING);
    is_wait_on_its_way = _i == 1;
    response.serve.is_final = true;
    sending.memory_wait = &wait;
    response_handle(&response, RESPONSE_EVENT_LATE);
    ck_assert_str_eq(trace, _i == 1 ? "cancel_memory_wait " : "cancel_memory_wait queue_post ");
    ck_assert_int_eq(response.state, _i == 1 ? RESPONSE_WRITING : RESPONSE_ENDING);
    ck_assert(response.serve.is_final == (_i == 1));
    if (_i == 0) {
        ck_assert_int_eq(sending.status->code, TL_UNIMPLEMENTED);
        ck_assert_str_eq(sending.status->message, "its owner must copy it: it waited for 70 bytes");
        sending.is_outcome_posted = true;
        response_handle(&response, RESPONSE_EVENT_WORK_DONE);
        ck_assert_str_eq(trace, "cancel_memory_wait queue_post close_broken ");
    }
    end();
}
END_TEST

/* Memory that was waited for and cannot come ends a cancelled response as well as memory that comes. */
START_TEST(failure_while_it_stops)
{
    static const struct tl_error error = {.code = TL_RESOURCE_EXHAUSTED, .message = "the pool is too small"};
    begin_in(RESPONSE_STOPPING);
    response_fail(&response, &error);
    ck_assert_str_eq(trace, "close_cancelled send_cancelled ");
    end();
}
END_TEST

START_TEST(all_written_before_it_stops)
{
    begin_in(RESPONSE_STOPPING);
    sending.posted_bytes = 100;
    response_handle(&response, RESPONSE_EVENT_WORK_DONE);
    ck_assert_str_eq(trace, "close_received send_cancelled ");
    end();
}
END_TEST

/* One that waits for its value has nothing that must be given back. */
START_TEST(waiting_is_cancelled)
{
    begin_in(RESPONSE_WAITING);
    response.sending = NULL;
    response_handle(&response, RESPONSE_EVENT_CANCEL);
    ck_assert_str_eq(trace, "close_cancelled send_cancelled ");
    end();
}
END_TEST

/* What the peer may read is not given back before it cannot. */
START_TEST(shown_source_is_cancelled)
{
    begin_in(RESPONSE_SHOWING);
    sending.source.is_exposed = true;
    response_handle(&response, RESPONSE_EVENT_CANCEL);
    ck_assert_str_eq(trace, "start_return cancel_memory_wait ");
    sending.source.is_exposed = false;
    response_handle(&response, RESPONSE_EVENT_WORK_DONE);
    ck_assert_str_eq(trace, "start_return cancel_memory_wait close_cancelled send_cancelled ");
    end();
}
END_TEST

/* A window that it was woken for goes to the next one that waits. */
START_TEST(cancel_passes_a_window_on)
{
    static struct pending_post next;
    begin_in(RESPONSE_SHOWING);
    tl_list_init(&next.place);
    tl_list_push_back(&conn.posts.window_queue, &next.place);
    response_handle(&response, RESPONSE_EVENT_CANCEL);
    ck_assert_str_eq(trace, "post_when_slot " STOPPED);
    end();
}
END_TEST

/* A peer that reads other sources is not given up, unless it goes on like that without end. */
START_TEST(lease_of_a_peer_that_reads_others)
{
    begin_in(RESPONSE_SHOWING);
    for (unsigned i = 0; i <= MAX_RENEWALS; i++) {
        conn.responses.released_count++;
        trace[0] = '\0';
        response_handle(&response, RESPONSE_EVENT_LATE);
        ck_assert_str_eq(trace, i < MAX_RENEWALS ? "arm_lease " : "conn_close ");
    }
    end();
}
END_TEST

/* RE_REQUEST may pass the end of the exposure. */
START_TEST(returned_source_is_written)
{
    begin_in(RESPONSE_HIDING);
    sending.source.is_exposed = sending.source.is_place_known = true;
    response_handle(&response, RESPONSE_EVENT_WORK_DONE);
    ck_assert_str_eq(trace, "");
    sending.source.is_exposed = false;
    response_handle(&response, RESPONSE_EVENT_WORK_DONE);
    ck_assert_int_eq(response.state, RESPONSE_PREPARING);
    ck_assert_str_eq(trace, "release_source prepare ");
    end();
}
END_TEST

START_TEST(outcome_is_posted)
{
    begin_in(RESPONSE_ENDING);
    sending.is_outcome_posted = true;
    response_handle(&response, RESPONSE_EVENT_WORK_DONE);
    ck_assert_str_eq(trace, "close_received ");
    end();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("response_states");
    TCase *tcase = tcase_create("edges");
    tcase_add_loop_test(tcase, each_edge, 0, TL_ARRAY_COUNT(edges));
    tcase_add_test(tcase, peer_that_says_what_cannot_be_is_at_fault);
    tcase_add_loop_test_raise_signal(tcase, event_of_our_own_that_cannot_be_ends_the_process, SIGABRT, 0,
                                     TL_ARRAY_COUNT(forbidden));
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("ends");
    tcase_add_test(tcase, failure_in_the_middle_is_sent);
    tcase_add_loop_test(tcase, pool_that_stays_full, 0, 2);
    tcase_add_test(tcase, failure_while_it_stops);
    tcase_add_test(tcase, all_written_before_it_stops);
    tcase_add_test(tcase, waiting_is_cancelled);
    tcase_add_test(tcase, shown_source_is_cancelled);
    tcase_add_test(tcase, cancel_passes_a_window_on);
    tcase_add_test(tcase, returned_source_is_written);
    tcase_add_test(tcase, outcome_is_posted);
    suite_add_tcase(suite, tcase);
    add_own_case(suite, "lease_of_a_peer_that_reads_others", NULL, NULL, lease_of_a_peer_that_reads_others);
    return run_suite(suite);
}
