// SPDX-License-Identifier: Apache-2.0
/* The life of a transport. Closing: the reactor refuses requests that wait; sessions drain, and are closed at the
 * deadline; when the last one is gone nothing of the transport moves any more, and the parts are destroyed in the
 * reverse order of their creation. */
#include "server/transports/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "server/peers/session.h"
#include "server/worker_internal.h"

/* ----------------------------------------------------------------------------------------------------- reactor -- */

static void post(const struct tl_executor *executor, struct tl_closure *closure)
{
    const struct tl_transport *transport = TL_CONTAINER_OF(executor, struct tl_transport, executor);
    tl_reactor_post(transport->reactor, closure);
}

/* ----------------------------------------------------------------------------------------------------- opening -- */

#define DEFAULT_MEMORY_BYTES (UINT64_C(1) << 30)
/* How many requests of one peer may be open beyond those that wait for their values. */
#define SERVED_REQUESTS 4096

uint64_t tl_transport_half_of_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page_bytes <= 0) return DEFAULT_MEMORY_BYTES;
    return (uint64_t)pages / 2 * (uint64_t)page_bytes;
}

uint32_t tl_transport_request_count(const struct tl_settings *settings)
{
    return (uint32_t)tl_min_u64(settings->waiting_receivers + SERVED_REQUESTS, UINT32_MAX);
}

struct opening {
    struct tl_transport *transport;
    const struct tl_transport_source *source;
    const char *address;
    size_t count;
};

static enum tl_status open_candidate(void *context, unsigned order, struct tl_provider **ret_provider,
                                     struct tl_error *ret_error)
{
    const struct opening *opening = context;
    const struct tl_transport_source *source = opening->source;
    return source->open(source->context, &opening->transport->worker->settings, opening->address, order, ret_provider,
                        ret_error);
}

static void candidate_failed(void *context, unsigned order, const char *name, const char *why)
{
    const struct opening *opening = context;
    (void)order;
    /* When there is only one candidate, its error is the reason why the transport is missing, which is logged
     * elsewhere. */
    if (opening->count > 1) {
        TL_LOG_AT_WARN("a card is passed over", TL_STR("device", name), TL_STR("reason", why));
    }
}

/* Chooses the device to open, which for cards is the card and its port. */
static enum tl_status choose(struct tl_transport *transport, const struct tl_transport_source *source,
                             struct tl_error *ret_error)
{
    const struct tl_worker *worker = transport->worker;
    const char *address = worker->setup.task != NULL ? worker->setup.task->address : NULL;
    struct opening opening = {.transport = transport, .source = source, .address = address};
    struct tl_transport_candidates candidates = {.keys = transport->options.engine.keys,
                                                 .is_reading = transport->options.engine.is_reading,
                                                 .open = open_candidate,
                                                 .failed = candidate_failed,
                                                 .context = &opening};
    struct tl_transport_choice choice;
    enum tl_status status =
        source->list(source->context, &worker->settings, address, &transport->candidates, &candidates.count, ret_error);
    if (status != TL_OK) return status;
    candidates.items = transport->candidates;
    opening.count = candidates.count;
    status = tl_transport_choose(&candidates, &choice, ret_error);
    if (status == TL_OK) {
        transport->provider = choice.provider;
        transport->order = choice.order;
        transport->passed_over = strdup(choice.passed_over);
        transport->not_tried = strdup(choice.not_tried);
        bool has_reason = transport->provider->reason[0] != '\0';
        if (asprintf(&transport->describes_device, "%s%s%s%s%s", transport->provider->name, has_reason ? ": " : "",
                     transport->provider->reason, choice.order > 0 ? "; passed over: " : "", choice.passed_over) < 0) {
            transport->describes_device = NULL;
        }
        if (transport->passed_over == NULL || transport->not_tried == NULL || transport->describes_device == NULL) {
            status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane");
        }
    }
    return status;
}

static enum tl_status build(struct tl_transport *transport, const struct tl_transport_source *source, bool has_thread,
                            struct tl_error *ret_error)
{
    source->read(&transport->worker->settings, &transport->options);
    if (source->adjust != NULL) source->adjust(source->context, &transport->options);
    enum tl_status status = choose(transport, source, ret_error);
    if (status != TL_OK) return status;
    transport->serving.wants_copies = transport->provider->limits.needs_regions;
    status = tl_memory_create(transport->provider, &transport->options.memory, &transport->memory, ret_error);
    if (status == TL_OK) {
        status = tl_reactor_create(transport->provider, &transport->options.reactor, &transport->reactor, ret_error);
    }
    if (status == TL_OK) {
        status = tl_engine_create(transport->reactor, transport->memory, &transport->options.engine, &tl_serving_ops,
                                  &transport->serving, &transport->engine, ret_error);
    }
    if (status == TL_OK && has_thread) {
        status = tl_reactor_thread_start(&transport->thread, transport->reactor, &transport->executor,
                                         transport->worker->loop, ret_error);
        transport->has_thread = status == TL_OK;
    }
    return status;
}

static void drain_timed_out(struct tl_timer *timer);
static void refuse_waiting(struct tl_closure *closure);

enum tl_status tl_transport_create(struct tl_worker *worker, const struct tl_transport_source *source, bool has_thread,
                                   struct tl_transport **ret_transport, struct tl_error *ret_error)
{
    struct tl_transport *transport = calloc(1, sizeof(*transport));
    if (transport == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane");
    transport->worker = worker;
    transport->source = source;
    transport->executor.post = post;
    transport->executor.send = tl_transport_executor_send;
    transport->executor.defer = tl_transport_executor_defer;
    transport->drain_deadline_timer.fire = drain_timed_out;
    transport->refuse_closure.run = refuse_waiting;
    tl_list_init(&transport->sessions);
    tl_transport_init_posts(transport);
    tl_serving_init(&transport->serving, worker, &transport->executor);
    enum tl_status status = build(transport, source, has_thread, ret_error);
    if (status != TL_OK) {
        tl_transport_destroy(transport);
        return status;
    }
    /* A transport within the host exists on almost every machine, so that it is logged at a lower level. */
    TL_LOG(source->find_host == NULL ? TL_LOG_INFO : TL_LOG_DEBUG, "data plane ready",
           TL_STR("transport", source->name), TL_STR("device", transport->provider->name),
           TL_STR("reason", transport->provider->reason));
    if (transport->provider->read_failure != NULL) {
        TL_LOG_AT_WARN("a card does not read; owners write what this worker receives",
                       TL_STR("device", transport->provider->name),
                       TL_STR("reason", transport->provider->read_failure));
    }
    *ret_transport = transport;
    return TL_OK;
}

void tl_transport_destroy(struct tl_transport *transport)
{
    if (transport == NULL) return;
    TL_CHECK(tl_list_is_empty(&transport->sessions));
    if (transport->has_thread) tl_reactor_thread_stop(&transport->thread);
    const struct tl_executor *former = tl_executor_enter(&transport->executor);
    tl_engine_destroy(transport->engine);
    /* The registration thread may still be in the call that has posted the last closure to the reactor. */
    tl_memory_destroy(transport->memory);
    tl_reactor_destroy(transport->reactor);
    tl_serving_fini(&transport->serving);
    tl_executor_leave(former);
    if (transport->provider != NULL) transport->provider->ops->close(transport->provider);
    free(transport->candidates);
    free(transport->describes_device);
    free(transport->passed_over);
    free(transport->not_tried);
    free(transport);
}

/* --------------------------------------------------------------------------------------------------- asking it -- */

struct query {
    struct tl_closure closure;
    const struct tl_transport *transport;
    struct tl_engine_stats *stats;
    struct tl_error *failure;
    pthread_mutex_t mutex;
    pthread_cond_t answered;
    bool is_answered;
};

static void answer(const struct query *query)
{
    if (query->stats != NULL) tl_engine_get_stats(query->transport->engine, query->stats);
    if (query->failure != NULL) *query->failure = query->transport->provider->failure;
}

/* Called on the reactor's thread. */
static void query_came(struct tl_closure *closure)
{
    struct query *query = TL_CONTAINER_OF(closure, struct query, closure);
    answer(query);
    pthread_mutex_lock(&query->mutex);
    query->is_answered = true;
    pthread_cond_signal(&query->answered);
    pthread_mutex_unlock(&query->mutex);
}

static void ask(struct tl_transport *transport, struct query *query)
{
    query->transport = transport;
    if (!transport->has_thread || tl_reactor_thread_has_lent(&transport->thread)) {
        answer(query); /* the reactor is this thread's */
        return;
    }
    query->closure.run = query_came;
    pthread_mutex_init(&query->mutex, NULL);
    pthread_cond_init(&query->answered, NULL);
    tl_transport_post(transport, &query->closure);
    pthread_mutex_lock(&query->mutex);
    while (!query->is_answered)
        pthread_cond_wait(&query->answered, &query->mutex);
    pthread_mutex_unlock(&query->mutex);
    pthread_cond_destroy(&query->answered);
    pthread_mutex_destroy(&query->mutex);
}

void tl_transport_get_stats(struct tl_transport *transport, struct tl_engine_stats *ret_engine,
                            struct tl_memory_stats *ret_memory)
{
    struct query query = {.stats = ret_engine};
    tl_engine_get_memory_stats(transport->engine, ret_memory);
    ask(transport, &query);
}

bool tl_transport_has_failed(struct tl_transport *transport, struct tl_error *ret_why)
{
    struct query query = {.failure = ret_why};
    ask(transport, &query);
    return ret_why->code != TL_OK;
}

/* The attachment of a tensor that keeps its copy in registered memory. */
struct kept_copy {
    struct tl_tensor_attachment attachment;
    struct tl_tensor *copy;
};

/* The address of this variable identifies all such attachments. */
static const char copies;

static void drop_copy(struct tl_tensor_attachment *attachment)
{
    struct kept_copy *kept = TL_CONTAINER_OF(attachment, struct kept_copy, attachment);
    tl_tensor_put(kept->copy);
    free(kept);
}

static enum tl_status make_copy(struct tl_transport *transport, struct tl_tensor *tensor, struct tl_tensor **ret_copy,
                                struct tl_error *ret_error)
{
    size_t size_bytes = (size_t)tl_tensor_size_bytes(tensor);
    struct tl_tensor *copy;
    enum tl_status status = tl_memory_tensor_create(transport->memory, tl_tensor_meta_data(tensor), &copy, ret_error);
    if (status != TL_OK) return status;
    /* A file that shrinks meanwhile is read as zeros; the checks before and after the copy notice that. */
    status = tl_tensor_check_readable(tensor, 0, size_bytes, ret_error);
    if (status == TL_OK && size_bytes > 0) tl_copy(tl_tensor_data(copy), tl_tensor_data(tensor), size_bytes);
    if (status == TL_OK) status = tl_tensor_check_readable(tensor, 0, size_bytes, ret_error);
    if (status != TL_OK) {
        tl_tensor_put(copy);
        return status;
    }
    *ret_copy = copy;
    return TL_OK;
}

enum tl_status tl_transport_copy(struct tl_transport *transport, struct tl_tensor *tensor, struct tl_error *ret_error)
{
    struct kept_copy *kept = calloc(1, sizeof(*kept));
    if (kept == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to copy a tensor");
    enum tl_status status = make_copy(transport, tensor, &kept->copy, ret_error);
    if (status != TL_OK) {
        free(kept);
        return status;
    }
    kept->attachment = (struct tl_tensor_attachment){.owner = &copies, .detach = drop_copy};
    tl_tensor_attach(tensor, &kept->attachment);
    return TL_OK;
}

struct tl_tensor *tl_transport_copy_of(const struct tl_tensor *tensor)
{
    struct tl_tensor_attachment *attachment = tl_tensor_find_attachment(tensor, &copies);
    if (attachment == NULL) return NULL;
    struct tl_tensor *copy = TL_CONTAINER_OF(attachment, struct kept_copy, attachment)->copy;
    /* A part of the tensor has the attachments of the whole. */
    return tl_meta_data_is_equal(tl_tensor_meta_data(copy), tl_tensor_meta_data(tensor)) ? copy : NULL;
}

/* ----------------------------------------------------------------------------------------------------- closing -- */

static void maybe_drained(struct tl_transport *transport)
{
    if (!transport->is_refused || !tl_list_is_empty(&transport->sessions) || transport->drained == NULL) return;
    tl_timers_disarm(tl_loop_timers(transport->worker->loop), &transport->drain_deadline_timer);
    void (*drained)(void *context) = transport->drained;
    transport->drained = NULL;
    drained(transport->drained_context);
}

void tl_transport_session_gone(struct tl_transport *transport)
{
    maybe_drained(transport);
}

static void refused(struct tl_closure *closure)
{
    struct tl_transport *transport = TL_CONTAINER_OF(closure, struct tl_transport, refuse_closure);
    transport->is_refused = true;
    maybe_drained(transport);
}

/* Refuses requests on the reactor's thread, and then posts the closure back to the loop. */
static void refuse_waiting(struct tl_closure *closure)
{
    struct tl_transport *transport = TL_CONTAINER_OF(closure, struct tl_transport, refuse_closure);
    tl_serving_close(&transport->serving);
    closure->run = refused;
    transport->worker->executor.post(&transport->worker->executor, closure);
}

static void drain_timed_out(struct tl_timer *timer)
{
    struct tl_transport *transport = TL_CONTAINER_OF(timer, struct tl_transport, drain_deadline_timer);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s has shut down", transport->worker->self.name);
    tl_sessions_close(transport, &reason);
}

void tl_transport_drain(struct tl_transport *transport, int64_t deadline_ns, void (*drained)(void *context),
                        void *context)
{
    TL_CHECK(!transport->is_draining);
    transport->is_draining = true;
    transport->drained = drained;
    transport->drained_context = context;
    tl_transport_post(transport, &transport->refuse_closure);
    tl_sessions_drain(transport);
    if (tl_timers_arm(tl_loop_timers(transport->worker->loop), &transport->drain_deadline_timer, deadline_ns) !=
        TL_OK) {
        drain_timed_out(&transport->drain_deadline_timer);
    }
}
