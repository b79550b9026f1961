// SPDX-License-Identifier: Apache-2.0
/* A server in a thread of its own, and the worker behind it. */
#include "fakes/fake_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"

static void note_begin(struct fake_worker *worker)
{
    pthread_mutex_lock(&worker->mutex);
}

static void note_end(struct fake_worker *worker)
{
    pthread_cond_broadcast(&worker->changed);
    pthread_mutex_unlock(&worker->mutex);
}

/* ------------------------------------------------------------------------------------------------------ source -- */

static void answer(struct fake_worker *worker, struct tl_serve *serve)
{
    for (size_t i = 0; i < worker->script.offer_count; i++) {
        const struct fake_offer *found = &worker->script.offers[i];
        if (strcmp(found->key, serve->key) != 0) continue;
        struct tl_error ok = {.code = TL_OK};
        struct tl_offer offer = found->offer;
        tl_tensor_get(offer.tensor);
        serve->ops->reply(serve, &ok, &offer);
        return;
    }
    if (strcmp(serve->key, "refused") == 0) {
        struct tl_error refusal;
        tl_error_set(&refusal, TL_ABORTED, "refused: step %llu was aborted", (unsigned long long)serve->step);
        serve->ops->reply(serve, &refusal, NULL);
        return;
    }
    worker->waiting = serve;
}

struct late_answer {
    struct tl_closure closure;
    struct fake_worker *worker;
    struct tl_serve *serve;
};

static void answer_late(struct tl_closure *closure)
{
    struct late_answer *late = TL_CONTAINER_OF(closure, struct late_answer, closure);
    answer(late->worker, late->serve);
    free(late);
}

static void on_request(void *context, struct tl_serve *serve)
{
    struct fake_worker *worker = context;
    note_begin(worker);
    if (worker->seen.requests < TL_ARRAY_COUNT(worker->seen.ids)) {
        worker->seen.ids[worker->seen.requests] = serve->id;
    }
    worker->seen.requests++;
    worker->seen.step = serve->step;
    worker->seen.is_client_known = strncmp(serve->peer->address, "ipv4:127.0.0.1:", 15) == 0 &&
                                   serve->peer->source == TL_IDENTITY_NONE && serve->peer->name[0] == '\0';
    note_end(worker);
    if (!worker->script.replies_later) {
        answer(worker, serve);
        return;
    }
    struct late_answer *late = calloc(1, sizeof(*late));
    TL_CHECK(late != NULL);
    late->closure.run = answer_late;
    late->worker = worker;
    late->serve = serve;
    tl_loop_post(worker->loop, &late->closure);
}

static void on_closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    struct fake_worker *worker = context;
    if (worker->waiting == serve) worker->waiting = NULL;
    note_begin(worker);
    worker->seen.ended[end]++;
    note_end(worker);
}

static void on_received(void *context, const struct tl_request_id *id)
{
    (void)context;
    (void)id;
}

/* ---------------------------------------------------------------------------------------------------- handlers -- */

static enum tl_status may(void *context, const struct tl_identity *caller, enum tl_action action,
                          struct tl_error *ret_error)
{
    struct fake_worker *worker = context;
    (void)caller;
    pthread_mutex_lock(&worker->mutex);
    worker->seen.asked[action]++;
    pthread_mutex_unlock(&worker->mutex);
    if ((worker->script.refused & 1U << action) == 0) return TL_OK;
    return tl_error_set(ret_error, TL_PERMISSION_DENIED, "nobody may %s", tl_action_names[action]);
}

static void on_link_up(void *context, struct tl_link *link)
{
    (void)context;
    (void)link;
}

static enum tl_status on_admit(void *context, const struct tl_identity *client, const struct tl_push *push,
                               void **ret_admission, struct tl_error *ret_error)
{
    struct fake_worker *worker = context;
    (void)client;
    if (worker->script.admit.code != TL_OK) return tl_error_copy(ret_error, &worker->script.admit);
    note_begin(worker);
    worker->seen.admitted++;
    snprintf(worker->seen.key, sizeof(worker->seen.key), "%s", push->key);
    note_end(worker);
    *ret_admission = worker;
    return TL_OK;
}

static enum tl_status on_publish(void *context, void *admission, const struct tl_push *push, struct tl_tensor *tensor,
                                 uint64_t *ret_publication, struct tl_error *ret_error)
{
    struct fake_worker *worker = context;
    TL_CHECK(admission == worker);
    note_begin(worker);
    if (tensor == NULL) {
        worker->seen.broken_off++;
        note_end(worker);
        return TL_OK;
    }
    worker->seen.published++;
    snprintf(worker->seen.key, sizeof(worker->seen.key), "%s", push->key);
    worker->seen.published_step = push->step;
    tl_tensor_put(worker->seen.tensor);
    worker->seen.tensor = tl_tensor_get(tensor);
    note_end(worker);
    if (worker->script.publish.code != TL_OK) return tl_error_copy(ret_error, &worker->script.publish);
    *ret_publication = 77;
    return TL_OK;
}

static void note_pattern(struct fake_worker *worker, const char *pattern)
{
    note_begin(worker);
    snprintf(worker->seen.pattern, sizeof(worker->seen.pattern), "%s", pattern);
    note_end(worker);
}

static void make_listing(struct fake_worker *worker, struct tl_listing *ret_listing)
{
    size_t count = worker->script.list_count;
    struct tl_listing listing = {.items = calloc(count > 0 ? count : 1, sizeof(*listing.items)), .count = count};
    TL_CHECK(listing.items != NULL);
    for (size_t i = 0; i < count; i++) {
        struct tl_listed *item = &listing.items[i];
        item->key = malloc(worker->script.list_key_bytes + 1);
        TL_CHECK(item->key != NULL);
        memset(item->key, 'k', worker->script.list_key_bytes + 1);
        snprintf(item->key, worker->script.list_key_bytes + 1, "%06zu", i);
        if (worker->script.list_key_bytes > 6) item->key[6] = 'k';
        item->key[worker->script.list_key_bytes] = '\0';
        item->step = i;
        item->publication = i + 1;
        item->meta_data = (struct tl_meta_data){.dtype = TL_F32, .size_bytes = 24};
        item->meta_data.shape = (struct tl_shape){.rank = 2, .dims = {2, 3}};
    }
    *ret_listing = listing;
}

static enum tl_status on_walk_begin(void *context, const struct tl_identity *client, const char *pattern,
                                    bool withdraws, struct tl_walk **ret_walk, struct tl_error *ret_error)
{
    struct fake_worker *worker = context;
    (void)client;
    note_pattern(worker, pattern);
    if (!withdraws && worker->script.list.code != TL_OK) return tl_error_copy(ret_error, &worker->script.list);
    struct tl_walk *walk = calloc(1, sizeof(*walk));
    TL_CHECK(walk != NULL);
    if (!withdraws) make_listing(worker, &walk->listing);
    walk->withdrawn_count = worker->script.withdraw_count;
    *ret_walk = walk;
    return TL_OK;
}

static enum tl_status on_walk_step(void *context, struct tl_walk *walk, struct tl_error *ret_error)
{
    (void)context;
    (void)ret_error;
    walk->is_complete = true;
    return TL_OK;
}

static void on_walk_end(void *context, struct tl_walk *walk)
{
    (void)context;
    tl_listing_fini(&walk->listing);
    free(walk);
}

static char *copy(const char *text)
{
    char *result = strdup(text);
    TL_CHECK(result != NULL);
    return result;
}

static void describe_peers(const struct fake_script *script, struct tl_description *description)
{
    if (script->peer_count == 0) return;
    description->peers = calloc(script->peer_count, sizeof(*description->peers));
    TL_CHECK(description->peers != NULL);
    description->peer_count = script->peer_count;
    for (size_t i = 0; i < script->peer_count; i++) {
        struct tl_peer_description *peer = &description->peers[i];
        char name[64];
        snprintf(name, sizeof(name), "/job:worker/task:%zu", i);
        peer->name = copy(name);
        peer->state = copy("up");
        peer->transport = copy("grpc");
        peer->incarnation = i + 1;
        peer->latency_ns = 1500;
        peer->bytes_per_second = 7;
        peer->mtu_bytes = 1024;
        if (script->peer_reason != NULL) {
            peer->reason = copy(script->peer_reason);
        } else {
            peer->reason = calloc(1, script->peer_reason_bytes + 1);
            TL_CHECK(peer->reason != NULL);
            memset(peer->reason, 'r', script->peer_reason_bytes);
        }
    }
}

static void describe_data_plane(struct tl_description *description)
{
    struct tl_data_plane_description *transport = calloc(1, sizeof(*transport));
    TL_CHECK(transport != NULL);
    transport->memlock = copy("too little");
    transport->device = copy("mlx5_0");
    transport->port = 2;
    transport->gid_index = 3;
    transport->gid = copy("10.0.0.1");
    transport->gid_type = copy("RoCE v2");
    transport->interface = copy("bad \xff name");
    transport->port_state = copy("active");
    transport->link_layer = copy("Ethernet");
    transport->mtu_bytes = 4096;
    transport->reason = copy("its GID fits");
    transport->passed_over = copy("mlx5_1:1: broken");
    transport->not_tried = copy("mlx5_0:2 GID 4 10.0.0.1");
    description->data_plane = transport;
}

static void describe_own_state(struct tl_description *description)
{
    description->cluster_digest = 7;
    description->host_name = copy("gpu-0");
    description->process_id = 4711;
    description->unix_ns = -1;
    description->setting_count = 1;
    description->settings = calloc(1, sizeof(*description->settings));
    TL_CHECK(description->settings != NULL);
    description->settings[0] = (struct tl_setting_text){.path = copy("connect"), .value = copy("lazy")};
    description->listen_count = 1;
    description->listens = calloc(1, sizeof(*description->listens));
    TL_CHECK(description->listens != NULL);
    description->listens[0] = copy("127.0.0.1:4000");
    description->trouble_count = 1;
    description->troubles = calloc(1, sizeof(*description->troubles));
    TL_CHECK(description->troubles != NULL);
    description->troubles[0] = (struct tl_trouble){.what = copy("pool"), .breaks_transfers = true};
}

static enum tl_status on_describe(void *context, struct tl_description *ret_description, struct tl_error *ret_error)
{
    const struct fake_worker *worker = context;
    if (worker->script.describe.code != TL_OK) return tl_error_copy(ret_error, &worker->script.describe);
    struct tl_description description = {.job = copy("ps"),
                                         .task = 3,
                                         .incarnation = 42,
                                         .software_version = copy("1.2.3"),
                                         .is_serving = true,
                                         .uptime_ns = 5};
    description.transports = calloc(1, sizeof(*description.transports));
    description.counters = calloc(1, sizeof(*description.counters));
    TL_CHECK(description.transports != NULL && description.counters != NULL);
    description.transport_count = 1;
    description.transports[0] = (struct tl_transport_state){copy("grpc"), true, copy("always there")};
    description.counter_count = 1;
    description.counters[0] = (struct tl_counter){copy("bytes_sent"), UINT64_MAX};
    describe_peers(&worker->script, &description);
    describe_own_state(&description);
    if (worker->script.has_data_plane) describe_data_plane(&description);
    *ret_description = description;
    return TL_OK;
}

static const struct tl_control_handlers handlers = {
    .source = {.request = on_request, .closed = on_closed, .received = on_received, .given_up = on_received},
    .link_up = on_link_up,
    .may = may,
    .admit = on_admit,
    .publish = on_publish,
    .walk_begin = on_walk_begin,
    .walk_step = on_walk_step,
    .walk_end = on_walk_end,
    .describe = on_describe,
};

/* -------------------------------------------------------------------------------------------------------- life -- */

void fake_worker_init(struct fake_worker *worker)
{
    memset(worker, 0, sizeof(*worker));
    worker->script.chunk_bytes = 1024;
    worker->script.inflight_bytes = 64 << 20;
    worker->script.list_key_bytes = 14;
    worker->script.request_timeout_ns = 60 * TL_NS_PER_SEC;
    worker->script.max_calls = 2000;
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->changed, NULL);
}

void fake_worker_offer(struct fake_worker *worker, const char *key, struct tl_tensor *tensor)
{
    TL_CHECK(worker->script.offer_count < FAKE_MAX_OFFERS);
    struct fake_offer *offer = &worker->script.offers[worker->script.offer_count++];
    offer->key = key;
    offer->offer = (struct tl_offer){.tensor = tensor, .step = 9, .publication = 5};
}

static void *serve(void *context)
{
    struct fake_worker *worker = context;
    while (!worker->is_stopped)
        (void)tl_loop_run_once(worker->loop, TL_TIME_NEVER);
    return NULL;
}

void fake_worker_start(struct fake_worker *worker)
{
    const struct tl_control_options options = {
        .self = {.source = TL_IDENTITY_CLAIMED, .name = "/job:ps/task:3", .incarnation = 42},
        .chunk_bytes = worker->script.chunk_bytes,
        .inflight_bytes = worker->script.inflight_bytes,
        .max_calls = worker->script.max_calls,
        .connect_timeout_ns = 10 * TL_NS_PER_SEC,
        .max_link_age_ns = TL_TIME_NEVER,
        .request_timeout_ns = worker->script.request_timeout_ns,
        .max_unsent = 65536,
        .stalled_timeout_ns = TL_TIME_NEVER,
        .keepalive_ns = 10 * TL_NS_PER_SEC,
        .keepalive_timeout_ns = 10 * TL_NS_PER_SEC,
        .handlers = &handlers,
        .worker = worker,
    };
    struct tl_error error;
    uint16_t port = 0;
    TL_CHECK(tl_loop_create(&worker->loop, &error) == TL_OK);
    TL_CHECK(tl_control_create(worker->loop, &options, &worker->control, &error) == TL_OK);
    TL_CHECK(tl_control_start(worker->control, "127.0.0.1:0", &port, &error) == TL_OK);
    snprintf(worker->address, sizeof(worker->address), "127.0.0.1:%u", (unsigned)port);
    TL_CHECK(pthread_create(&worker->thread, NULL, serve, worker) == 0);
}

static void stopped(void *context)
{
    ((struct fake_worker *)context)->is_stopped = true;
}

static void stop(struct fake_worker *worker, void *context)
{
    tl_control_stop(worker->control, *(int64_t *)context, stopped, worker);
}

void fake_worker_stop(struct fake_worker *worker, int64_t deadline_ns)
{
    fake_worker_run(worker, stop, &deadline_ns);
    pthread_join(worker->thread, NULL);
    tl_control_destroy(worker->control);
    tl_loop_destroy(worker->loop);
    tl_tensor_put(worker->seen.tensor);
    for (size_t i = 0; i < worker->script.offer_count; i++)
        tl_tensor_put(worker->script.offers[i].offer.tensor);
    pthread_cond_destroy(&worker->changed);
    pthread_mutex_destroy(&worker->mutex);
}

struct call {
    struct tl_closure closure;
    struct fake_worker *worker;
    void (*function)(struct fake_worker *worker, void *context);
    void *context;
    bool is_done; /* The mutex is held. */
};

static void run_call(struct tl_closure *closure)
{
    struct call *call = TL_CONTAINER_OF(closure, struct call, closure);
    struct fake_worker *worker = call->worker;
    call->function(worker, call->context);
    note_begin(worker);
    call->is_done = true;
    note_end(worker);
}

void fake_worker_run(struct fake_worker *worker, void (*function)(struct fake_worker *worker, void *context),
                     void *context)
{
    struct call call = {.closure.run = run_call, .worker = worker, .function = function, .context = context};
    tl_list_init(&call.closure.link);
    tl_loop_post(worker->loop, &call.closure);
    pthread_mutex_lock(&worker->mutex);
    while (!call.is_done)
        pthread_cond_wait(&worker->changed, &worker->mutex);
    pthread_mutex_unlock(&worker->mutex);
}

struct fake_seen fake_worker_seen(struct fake_worker *worker)
{
    pthread_mutex_lock(&worker->mutex);
    struct fake_seen seen = worker->seen;
    pthread_mutex_unlock(&worker->mutex);
    return seen;
}

void fake_worker_wait(struct fake_worker *worker, bool (*condition)(const struct fake_seen *seen))
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 30;
    pthread_mutex_lock(&worker->mutex);
    int failure = 0;
    while (!condition(&worker->seen) && failure == 0) {
        failure = pthread_cond_timedwait(&worker->changed, &worker->mutex, &deadline);
    }
    const struct fake_seen *seen = &worker->seen;
    if (!condition(seen)) {
        fprintf(stderr, "for 30 s: %u requests for '%s', ended %u %u %u; %u admitted, %u published, %u broken off\n",
                seen->requests, seen->key, seen->ended[0], seen->ended[1], seen->ended[2], seen->admitted,
                seen->published, seen->broken_off);
        abort();
    }
    pthread_mutex_unlock(&worker->mutex);
}
