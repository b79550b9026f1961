// SPDX-License-Identifier: Apache-2.0
/*
 * The data plane's life. Closing: the reactor refuses requests that wait; sessions drain, and are closed at the
 * deadline; when the last one is gone nothing of the plane moves any more, and the rest is taken apart in the reverse
 * order of building.
 */
#include "server/plane.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "server/plane_choice.h"
#include "server/session.h"
#include "server/worker_internal.h"

/* ------------------------------------------------------------------------------------------------------ reactor -- */

static void post(const struct tl_home *home, struct tl_letter *letter)
{
    const struct tl_plane *plane = TL_CONTAINER_OF(home, struct tl_plane, home);
    tl_reactor_post(plane->reactor, letter);
}

static void *run(void *context)
{
    struct tl_plane *plane = context;
    const struct tl_home *former = tl_home_enter(&plane->home);
    while (!__atomic_load_n(&plane->is_stopping, __ATOMIC_ACQUIRE))
        (void)tl_reactor_run_once(plane->reactor, TL_TIME_NEVER);
    tl_home_leave(former);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ opening -- */

struct opening {
    struct tl_plane *plane;
    const struct tl_plane_source *source;
    const char *address;
    size_t count;
};

static enum tl_status open_candidate(void *context, unsigned order, struct tl_provider **ret_provider,
                                     struct tl_error *ret_error)
{
    const struct opening *opening = context;
    const struct tl_plane_source *source = opening->source;
    return source->open(source->context, &opening->plane->worker->settings, opening->address, order, ret_provider,
                        ret_error);
}

static void candidate_failed(void *context, unsigned order, const char *name, const char *why)
{
    const struct opening *opening = context;
    (void)order;
    /* What the only one lacks is what the plane lacks, which is told by whoever wants it. */
    if (opening->count > 1) {
        TL_LOG_AT_WARN("a card is passed over", TL_STR("device", name), TL_STR("reason", why));
    }
}

/* Finds the card. */
static enum tl_status choose(struct tl_plane *plane, const struct tl_plane_source *source, struct tl_error *ret_error)
{
    const struct tl_worker *worker = plane->worker;
    const char *address = worker->task != NULL ? worker->task->address : NULL;
    struct opening opening = {.plane = plane, .source = source, .address = address};
    struct tl_verbs_candidate *items;
    struct tl_plane_candidates candidates = {
        .keys = plane->options.engine.keys, .open = open_candidate, .failed = candidate_failed, .context = &opening};
    struct tl_plane_choice choice;
    enum tl_status status =
        source->list(source->context, &worker->settings, address, &items, &candidates.count, ret_error);
    if (status != TL_OK) return status;
    candidates.items = items;
    opening.count = candidates.count;
    status = tl_plane_choose(&candidates, &choice, ret_error);
    if (status == TL_OK) {
        plane->provider = choice.provider;
        plane->card = items[choice.order];
        plane->passed_over = strdup(choice.passed_over);
        plane->not_tried = strdup(choice.not_tried);
        bool has_reason = plane->provider->reason[0] != '\0';
        if (asprintf(&plane->describes_device, "%s%s%s%s%s", plane->provider->name, has_reason ? ": " : "",
                     plane->provider->reason, choice.order > 0 ? "; passed over: " : "", choice.passed_over) < 0) {
            plane->describes_device = NULL;
        }
        if (plane->passed_over == NULL || plane->not_tried == NULL || plane->describes_device == NULL) {
            status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane");
        }
    }
    free(items);
    return status;
}

static enum tl_status build(struct tl_plane *plane, const struct tl_plane_source *source, bool has_thread,
                            struct tl_error *ret_error)
{
    source->read(&plane->worker->settings, &plane->options);
    if (source->adjust != NULL) source->adjust(source->context, &plane->options);
    enum tl_status status = choose(plane, source, ret_error);
    if (status != TL_OK) return status;
    plane->serving.wants_copies = plane->provider->limits.needs_regions;
    status = tl_memory_create(plane->provider, &plane->options.memory, &plane->memory, ret_error);
    if (status == TL_OK) {
        status = tl_reactor_create(plane->provider, &plane->options.reactor, &plane->reactor, ret_error);
    }
    if (status == TL_OK) {
        status = tl_engine_create(plane->reactor, plane->memory, &plane->options.engine, &tl_serving_ops,
                                  &plane->serving, &plane->engine, ret_error);
    }
    if (status == TL_OK && has_thread) {
        status = tl_thread_start("tl-reactor", run, plane, &plane->thread, ret_error);
        plane->has_thread = status == TL_OK;
    }
    return status;
}

static void drain_over(struct tl_timer *timer);
static void refuse_waiting(struct tl_letter *letter);

enum tl_status tl_plane_create(struct tl_worker *worker, const struct tl_plane_source *source, bool has_thread,
                               struct tl_plane **ret_plane, struct tl_error *ret_error)
{
    struct tl_plane *plane = calloc(1, sizeof(*plane));
    if (plane == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane");
    plane->worker = worker;
    plane->source = source;
    plane->home.post = post;
    plane->drain_timer.fire = drain_over;
    plane->refuse_letter.deliver = refuse_waiting;
    tl_list_init(&plane->sessions);
    tl_serving_init(&plane->serving, worker, &plane->home);
    enum tl_status status = build(plane, source, has_thread, ret_error);
    if (status != TL_OK) {
        tl_plane_destroy(plane);
        return status;
    }
    /* That of the host is everywhere. */
    TL_LOG(source->find_host == NULL ? TL_LOG_INFO : TL_LOG_DEBUG, "data plane ready",
           TL_STR("transport", source->name), TL_STR("device", plane->provider->name),
           TL_STR("reason", plane->provider->reason));
    *ret_plane = plane;
    return TL_OK;
}

void tl_plane_destroy(struct tl_plane *plane)
{
    if (plane == NULL) return;
    TL_CHECK(tl_list_is_empty(&plane->sessions));
    if (plane->has_thread) {
        __atomic_store_n(&plane->is_stopping, true, __ATOMIC_RELEASE);
        tl_reactor_wake(plane->reactor);
        pthread_join(plane->thread, NULL);
    }
    const struct tl_home *former = tl_home_enter(&plane->home);
    tl_engine_destroy(plane->engine);
    /* Its slow worker may still be in the call that has brought the last letter to the reactor. */
    tl_memory_destroy(plane->memory);
    tl_reactor_destroy(plane->reactor);
    tl_home_leave(former);
    if (plane->provider != NULL) plane->provider->ops->close(plane->provider);
    free(plane->describes_device);
    free(plane->passed_over);
    free(plane->not_tried);
    free(plane);
}

/* ---------------------------------------------------------------------------------------------------- asking it -- */

struct query {
    struct tl_letter letter;
    const struct tl_plane *plane;
    struct tl_engine_stats *stats;
    struct tl_error *failure;
    pthread_mutex_t mutex;
    pthread_cond_t answered;
    bool is_answered;
};

static void answer(const struct query *query)
{
    if (query->stats != NULL) tl_engine_get_stats(query->plane->engine, query->stats);
    if (query->failure != NULL) *query->failure = query->plane->provider->failure;
}

/* The reactor's. */
static void query_came(struct tl_letter *letter)
{
    struct query *query = TL_CONTAINER_OF(letter, struct query, letter);
    answer(query);
    pthread_mutex_lock(&query->mutex);
    query->is_answered = true;
    pthread_cond_signal(&query->answered);
    pthread_mutex_unlock(&query->mutex);
}

static void ask(struct tl_plane *plane, struct query *query)
{
    query->plane = plane;
    if (!plane->has_thread) {
        answer(query);
        return;
    }
    query->letter.deliver = query_came;
    pthread_mutex_init(&query->mutex, NULL);
    pthread_cond_init(&query->answered, NULL);
    tl_plane_post(plane, &query->letter);
    pthread_mutex_lock(&query->mutex);
    while (!query->is_answered)
        pthread_cond_wait(&query->answered, &query->mutex);
    pthread_mutex_unlock(&query->mutex);
    pthread_cond_destroy(&query->answered);
    pthread_mutex_destroy(&query->mutex);
}

void tl_plane_get_stats(struct tl_plane *plane, struct tl_engine_stats *ret_engine, struct tl_memory_stats *ret_memory)
{
    struct query query = {.stats = ret_engine};
    tl_engine_get_memory_stats(plane->engine, ret_memory);
    ask(plane, &query);
}

bool tl_plane_has_failed(struct tl_plane *plane, struct tl_error *ret_why)
{
    struct query query = {.failure = ret_why};
    ask(plane, &query);
    return ret_why->code != TL_OK;
}

/* Kept with the tensor. */
struct kept_copy {
    struct tl_tensor_attachment attachment;
    struct tl_tensor *copy;
};

/* Owner of all such attachments. */
static const char copies;

static void drop_copy(struct tl_tensor_attachment *attachment)
{
    struct kept_copy *kept = TL_CONTAINER_OF(attachment, struct kept_copy, attachment);
    tl_tensor_put(kept->copy);
    free(kept);
}

static enum tl_status make_copy(struct tl_plane *plane, struct tl_tensor *tensor, struct tl_tensor **ret_copy,
                                struct tl_error *ret_error)
{
    size_t size_bytes = (size_t)tl_tensor_size_bytes(tensor);
    struct tl_tensor *copy;
    enum tl_status status = tl_memory_tensor_create(plane->memory, tl_tensor_meta_data(tensor), &copy, ret_error);
    if (status != TL_OK) return status;
    /* Asked before and after: a file that shrinks meanwhile is read as zeros. */
    status = tl_tensor_check_readable(tensor, 0, size_bytes, ret_error);
    if (status == TL_OK && size_bytes > 0) memcpy(tl_tensor_data(copy), tl_tensor_data(tensor), size_bytes);
    if (status == TL_OK) status = tl_tensor_check_readable(tensor, 0, size_bytes, ret_error);
    if (status != TL_OK) {
        tl_tensor_put(copy);
        return status;
    }
    *ret_copy = copy;
    return TL_OK;
}

enum tl_status tl_plane_copy(struct tl_plane *plane, struct tl_tensor *tensor, struct tl_error *ret_error)
{
    struct kept_copy *kept = calloc(1, sizeof(*kept));
    if (kept == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to copy a tensor");
    enum tl_status status = make_copy(plane, tensor, &kept->copy, ret_error);
    if (status != TL_OK) {
        free(kept);
        return status;
    }
    kept->attachment = (struct tl_tensor_attachment){.owner = &copies, .detach = drop_copy};
    tl_tensor_attach(tensor, &kept->attachment);
    return TL_OK;
}

struct tl_tensor *tl_plane_copy_of(const struct tl_tensor *tensor)
{
    struct tl_tensor_attachment *attachment = tl_tensor_find_attachment(tensor, &copies);
    return attachment != NULL ? TL_CONTAINER_OF(attachment, struct kept_copy, attachment)->copy : NULL;
}

/* ------------------------------------------------------------------------------------------------------ closing -- */

static void maybe_drained(struct tl_plane *plane)
{
    if (!plane->is_refused || !tl_list_is_empty(&plane->sessions) || plane->drained == NULL) return;
    tl_timers_disarm(tl_loop_timers(plane->worker->loop), &plane->drain_timer);
    void (*drained)(void *context) = plane->drained;
    plane->drained = NULL;
    drained(plane->drained_context);
}

void tl_plane_session_gone(struct tl_plane *plane)
{
    maybe_drained(plane);
}

static void refused(struct tl_letter *letter)
{
    struct tl_plane *plane = TL_CONTAINER_OF(letter, struct tl_plane, refuse_letter);
    plane->is_refused = true;
    maybe_drained(plane);
}

/* On the reactor's thread; the letter goes back. */
static void refuse_waiting(struct tl_letter *letter)
{
    struct tl_plane *plane = TL_CONTAINER_OF(letter, struct tl_plane, refuse_letter);
    tl_serving_close(&plane->serving);
    letter->deliver = refused;
    plane->worker->home.post(&plane->worker->home, letter);
}

static void drain_over(struct tl_timer *timer)
{
    struct tl_plane *plane = TL_CONTAINER_OF(timer, struct tl_plane, drain_timer);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s has shut down", plane->worker->self.name);
    tl_sessions_close(plane, &reason);
}

void tl_plane_drain(struct tl_plane *plane, int64_t deadline_ns, void (*drained)(void *context), void *context)
{
    TL_CHECK(!plane->is_draining);
    plane->is_draining = true;
    plane->drained = drained;
    plane->drained_context = context;
    tl_plane_post(plane, &plane->refuse_letter);
    tl_sessions_drain(plane);
    if (tl_timers_arm(tl_loop_timers(plane->worker->loop), &plane->drain_timer, deadline_ns) != TL_OK) {
        drain_over(&plane->drain_timer);
    }
}
