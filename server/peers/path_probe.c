// SPDX-License-Identifier: Apache-2.0
#include "server/peers/path_probe.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "server/peers/peer_internal.h"
#include "server/peers/session.h"

/* Requests are cancelled so long before the end: what waits here for memory or for a place then says so. */
#define CANCEL_NS TL_NS_PER_SEC
/* A probe that takes longer waits for something, and the next one begins. So 63 peers are begun in 6.3 s. */
#define YOUNG_NS (100 * TL_NS_PER_MS)
/* After a break. The data connection may hear of it later than its request. */
#define PAUSE_NS (50 * TL_NS_PER_MS)

struct path_probe {
    struct tl_path_round *round;
    struct tl_peer *peer;
    struct tl_peer_request request;
    enum tl_probe_size size;             /* what is asked for */
    struct tl_timer pause;               /* armed: it will ask again */
    struct tl_error latest_break;        /* why the connection broke under it; TL_OK: it did not */
    bool is_asking;                      /* the request waits, or is on its way: its end has not come */
    bool is_over;                        /* the reason is final */
    char reason[TL_ERROR_MESSAGE_BYTES]; /* "": nothing is wrong, or nothing is known */
};

struct tl_path_round {
    struct tl_worker *worker;
    struct tl_timer timer;
    int64_t deadline_ns;
    struct tl_timer pace;
    size_t first;        /* the probe that begins first */
    size_t begun_count;  /* probes that have begun, in their order */
    bool is_cancelled;   /* the requests have been cancelled, and the timer fires at the deadline */
    bool is_released;    /* it is freed when no request is left */
    size_t left_count;   /* probes that are not over, and one while they are begun */
    size_t asking_count; /* probes with is_asking */
    void (*over)(void *context);
    void *context;
    size_t count;
    struct path_probe probes[];
};

static void begin_next(struct tl_path_round *round);

static void round_disarm(struct tl_path_round *round)
{
    struct tl_timers *timers = tl_loop_timers(round->worker->loop);
    tl_timers_disarm(timers, &round->timer);
    tl_timers_disarm(timers, &round->pace);
}

/* The probe that begins after so many others. */
static struct path_probe *probe_at(struct tl_path_round *round, size_t place)
{
    return &round->probes[(round->first + place) % round->count];
}

static void maybe_free(struct tl_path_round *round)
{
    if (round->is_released && round->asking_count == 0) free(round);
}

static void one_less(struct tl_path_round *round)
{
    if (--round->left_count > 0) return;
    round_disarm(round);
    if (!round->is_released) round->over(round->context);
}

static void finish(struct path_probe *probe, const char *reason)
{
    probe->is_over = true;
    tl_timers_disarm(tl_loop_timers(probe->round->worker->loop), &probe->pause);
    snprintf(probe->reason, sizeof(probe->reason), "%s", reason);
    struct tl_path_round *round = probe->round;
    if (round->begun_count > 0 && probe == probe_at(round, round->begun_count - 1)) begin_next(round);
    one_less(round);
}

static void request_ended(struct path_probe *probe)
{
    tl_fetch_fini(&probe->request.fetch);
    probe->is_asking = false;
    probe->round->asking_count--;
}

/* ---------------------------------------------------------------------------------------------------- requests -- */

static enum tl_status place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    const struct path_probe *probe = TL_CONTAINER_OF(fetch, struct path_probe, request.fetch);
    const struct tl_allocator *allocator = fetch->allocator;
    static const struct tl_device host = {.kind = TL_DEVICE_HOST};
    if (meta_data->size_bytes != tl_probe_value_bytes(probe->size)) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s has another value for probes", probe->peer->name);
    }
    return allocator != NULL ? allocator->create(allocator->context, host, meta_data, ret_destination, ret_error)
                             : tl_tensor_create_for(meta_data, ret_destination, ret_error);
}

static void done(struct tl_fetch *fetch, const struct tl_error *result);

static const struct tl_request_ops request_ops = {.on_loop = {.place = place, .done = done},
                                                  .on_reactor = {.place = place, .done = tl_session_fetch_done}};

static void ask(struct path_probe *probe, enum tl_probe_size size)
{
    struct tl_worker *worker = probe->round->worker;
    struct tl_fetch *fetch = &probe->request.fetch;
    probe->size = size;
    probe->is_asking = true;
    probe->round->asking_count++;
    tl_peer_request_init(&probe->request, &request_ops);
    probe->request.is_probe = true;
    fetch->number = ++worker->operations.next_request;
    fetch->key = tl_probe_value_key(size);
    fetch->step = TL_PROBE_STEP;
    fetch->wants_checksum = true;
    tl_peer_fetch(probe->peer, &probe->request);
}

/* Ends a probe whose request is not on its way, with what the data connections to the peer say of themselves. */
static void judge(struct path_probe *probe)
{
    const char *failure = tl_data_connections_failure(&probe->peer->data);
    bool has_link = probe->peer->links.link != NULL;
    finish(probe, !has_link ? "" : failure[0] != '\0' ? failure : probe->latest_break.message);
}

static void begin_next(struct tl_path_round *round)
{
    struct path_probe *probe = NULL;
    while (probe == NULL && round->begun_count < round->count && !round->is_cancelled) {
        probe = probe_at(round, round->begun_count++);
        if (probe->is_over) probe = NULL;
    }
    if (probe == NULL) return;
    /* Without memory for the timer the next one begins when this one is over. */
    (void)!tl_timers_arm(tl_loop_timers(round->worker->loop), &round->pace, tl_clock_deadline_ns(YOUNG_NS));
    ask(probe, TL_PROBE_SMALL);
}

static void pace_over(struct tl_timer *timer)
{
    begin_next(TL_CONTAINER_OF(timer, struct tl_path_round, pace));
}

static void pause_over(struct tl_timer *timer)
{
    struct path_probe *probe = TL_CONTAINER_OF(timer, struct path_probe, pause);
    ask(probe, probe->size);
}

static void arrived(struct path_probe *probe)
{
    if (probe->size + 1 < TL_PROBE_SIZES && !probe->round->is_cancelled) {
        ask(probe, probe->size + 1);
    } else {
        finish(probe, "");
    }
}

static void broke(struct path_probe *probe, const struct tl_error *result)
{
    struct tl_timers *timers = tl_loop_timers(probe->round->worker->loop);
    probe->latest_break = *result;
    bool goes_on =
        !probe->round->is_cancelled && tl_timers_arm(timers, &probe->pause, tl_clock_deadline_ns(PAUSE_NS)) == TL_OK;
    if (!goes_on) judge(probe);
}

static void done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct path_probe *probe = TL_CONTAINER_OF(fetch, struct path_probe, request.fetch);
    bool was_refused = probe->request.carrier == TL_CARRIER_REFUSAL;
    bool has_broken = result->code == TL_UNAVAILABLE && !fetch->is_final && !fetch->is_rerouted;
    tl_peer_fetch_done(&probe->request);
    request_ended(probe);
    if (probe->is_over) {
        maybe_free(probe->round);
    } else if (result->code == TL_OK) {
        arrived(probe);
    } else if (was_refused) {
        judge(probe);
    } else if (has_broken) {
        broke(probe, result);
    } else {
        /* Where a request waits for memory or for a place, or the peer shuts down, nothing is known of the path. */
        finish(probe, result->code == TL_DATA_LOSS ? result->message : "");
    }
}

/* --------------------------------------------------------------------------------------------------------- end -- */

/* Cancels the request. Returns whether its end has come with that. */
static bool cancel(struct path_probe *probe)
{
    if (!probe->is_asking || !tl_peer_cancel(&probe->request)) return false;
    request_ended(probe);
    return true;
}

static void cancel_all(struct tl_path_round *round)
{
    round->is_cancelled = true;
    for (size_t i = 0; i < round->count; i++) {
        struct path_probe *probe = &round->probes[i];
        if (probe->is_over) continue;
        if (!probe->is_asking || cancel(probe)) judge(probe);
    }
}

/* The path is up for the card, and the peer does not even answer that the request is cancelled. */
static void explain_unanswered(struct path_probe *probe)
{
    char text[TL_ERROR_MESSAGE_BYTES];
    snprintf(text, sizeof(text),
             "%s does not answer a request for %u bytes over %s in time, while the link over TCP works; its process is "
             "overloaded, or packets are lost: look at its log, and at the counters of the ports between the two",
             probe->peer->name, (unsigned)tl_probe_value_bytes(probe->size), tl_peer_transport(probe->peer));
    finish(probe, text);
}

static void timer_fired(struct tl_timer *timer)
{
    struct tl_path_round *round = TL_CONTAINER_OF(timer, struct tl_path_round, timer);
    bool is_first = !round->is_cancelled;
    round->left_count++; /* the end of the last probe may free the round */
    if (is_first) cancel_all(round);
    bool goes_on = is_first && round->left_count > 1 &&
                   tl_timers_arm(tl_loop_timers(round->worker->loop), timer, round->deadline_ns) == TL_OK;
    for (size_t i = 0; !goes_on && i < round->count; i++) {
        if (!round->probes[i].is_over) explain_unanswered(&round->probes[i]);
    }
    one_less(round);
}

/* -------------------------------------------------------------------------------------------------------- life -- */

static bool has_transport(const struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->data_plane.transport_count; i++)
        if (worker->data_plane.transports[i].transport != NULL) return true;
    return false;
}

struct tl_path_round *tl_path_round_start(struct tl_worker *worker, const struct tl_probe_results *results,
                                          size_t first, int64_t deadline_ns, void (*over)(void *context), void *context)
{
    /* A worker with gRPC alone wants no link for probes. */
    size_t count = has_transport(worker) ? results->count : 0;
    struct tl_path_round *round = calloc(1, sizeof(*round) + count * sizeof(round->probes[0]));
    if (round == NULL) return NULL;
    round->worker = worker;
    round->timer.fire = timer_fired;
    round->pace.fire = pace_over;
    round->first = first;
    round->deadline_ns = deadline_ns;
    round->over = over;
    round->context = context;
    round->count = count;
    round->left_count = count + 1;
    if (tl_timers_arm(tl_loop_timers(worker->loop), &round->timer, deadline_ns - CANCEL_NS) != TL_OK) {
        free(round);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        round->probes[i].round = round;
        round->probes[i].pause.fire = pause_over;
        round->probes[i].peer = tl_peer_by_name(worker, results->items[i].name);
    }
    begin_next(round);
    one_less(round);
    return round;
}

const char *tl_path_round_reason(const struct tl_path_round *round, size_t index)
{
    return index < round->count ? round->probes[index].reason : "";
}

void tl_path_round_give_up(struct tl_path_round *round, size_t index)
{
    if (index >= round->count || round->probes[index].is_over) return;
    (void)cancel(&round->probes[index]);
    finish(&round->probes[index], "");
}

void tl_path_round_release(struct tl_path_round *round)
{
    if (round == NULL) return;
    round_disarm(round);
    for (size_t i = 0; i < round->count; i++) {
        struct path_probe *probe = &round->probes[i];
        probe->is_over = true;
        tl_timers_disarm(tl_loop_timers(round->worker->loop), &probe->pause);
        (void)cancel(probe);
    }
    round->is_released = true;
    maybe_free(round);
}
