// SPDX-License-Identifier: Apache-2.0
/*
 * What the control transport asks of this worker: the tensors of the table for peers (server/transfers/serving.h) and
 * for clients, and what clients push.
 *
 * Failure modes: a push that does not fit the limit of held bytes is refused before it takes memory; one whose client
 * breaks off gives its part of the account back.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/peers/permissions.h"
#include "server/peers/prober.h"
#include "server/peers/admission.h"
#include "server/transfers/put_fetch.h"
#include "server/transfers/walk.h"
#include "server/worker_internal.h"
#include "tensor/part.h"

static void expire_now(struct tl_worker *worker)
{
    int64_t next_ns = tl_rendezvous_expire(worker->table, tl_clock_now_ns(), tl_loop_quota(worker->loop));
    tl_timers_arm_reserved(tl_loop_timers(worker->loop), &worker->sources.expire_timer, next_ns);
}

static void expire_timer_fired(struct tl_timer *timer)
{
    expire_now(TL_CONTAINER_OF(timer, struct tl_worker, sources.expire_timer));
}

static void expire_asked(struct tl_closure *closure)
{
    struct tl_worker *worker = TL_CONTAINER_OF(closure, struct tl_worker, sources.expire_closure);
    __atomic_store_n(&worker->sources.is_expire_asked, false, __ATOMIC_RELEASE);
    expire_now(worker);
}

void tl_source_expire_reservations(struct tl_worker *worker)
{
    if (tl_executor_is_here(&worker->executor)) {
        expire_now(worker);
    } else if (!__atomic_exchange_n(&worker->sources.is_expire_asked, true, __ATOMIC_ACQ_REL)) {
        worker->executor.post(&worker->executor, &worker->sources.expire_closure);
    }
}

static void request(void *context, struct tl_serve *serve)
{
    struct tl_worker *worker = context;
    tl_serving_ops.request(&worker->serving, serve);
}

static void closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    struct tl_worker *worker = context;
    tl_serving_ops.closed(&worker->serving, serve, end);
}

static void received(void *context, const struct tl_request_id *id)
{
    struct tl_worker *worker = context;
    tl_serving_ops.received(&worker->serving, id);
}

static void prefetch(void *context, const struct tl_key_text *keys, size_t count)
{
    struct tl_worker *worker = context;
    tl_serving_ops.prefetch(&worker->serving, keys, count);
}

static void given_up(void *context, const struct tl_request_id *id)
{
    struct tl_worker *worker = context;
    tl_serving_ops.given_up(&worker->serving, id);
}

/* ----------------------------------------------------------------------------------------------------- pushing -- */

/* What the worker keeps for a pushed tensor besides its bytes and its key: objects of the tensor, its memory and the
 * table, with what the allocator adds; some 850 bytes were measured. Without it, empty tensors would not count. */
#define PUSHED_OVERHEAD_BYTES 1024

/* A tensor that a client pushes or has pushed, charged to the client until the last reference is put. A receiver that
 * was given it by reference, and gRPC, may keep it longer than the worker lives. */
struct pushed {
    struct tl_share *share;
    uint64_t charged_bytes;
    bool may_replace; /* the client may replace what the worker itself has published */
};

static void pushed_released(void *data, void *context)
{
    (void)data;
    struct pushed *pushed = context;
    tl_shares_give(pushed->share, pushed->charged_bytes);
    free(pushed);
}

/* Whether the key is published, and not by a client. */
static bool is_own(struct tl_worker *worker, const char *key)
{
    struct tl_tensor *tensor = tl_rendezvous_published(worker->table, key);
    bool is_own = tensor != NULL && !tl_tensor_is_released_by(tensor, pushed_released);
    tl_tensor_put(tensor);
    return is_own;
}

enum tl_status tl_source_init(struct tl_worker *worker, struct tl_error *ret_error)
{
    tl_serving_init(&worker->serving, worker, &worker->executor);
    tl_put_sources_init(&worker->sources.puts);
    tl_list_init(&worker->sources.put_fetches);
    worker->sources.expire_timer.fire = expire_timer_fired;
    worker->sources.expire_closure.run = expire_asked;
    tl_gone_processes_init(&worker->sources.gone);
    worker->sources.pushed = tl_shares_create("limits.held", worker->settings.held_bytes);
    worker->sources.listings = tl_shares_create("listings", TL_LISTINGS_BYTES);
    if (worker->sources.pushed == NULL || worker->sources.listings == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    return tl_probe_values_init(&worker->sources.probe_values, ret_error);
}

void tl_source_fini(struct tl_worker *worker)
{
    tl_walks_fini(worker);
    tl_serving_fini(&worker->serving);
    tl_shares_destroy(worker->sources.pushed);
    tl_shares_destroy(worker->sources.listings);
    tl_probe_values_fini(&worker->sources.probe_values);
    tl_put_sources_fini(&worker->sources.puts);
}

/* Local publishers may publish an older step on purpose. A client may not: it may be the later one of two. */
static enum tl_status check_version(struct tl_worker *worker, const struct tl_push *push, struct tl_error *ret_error)
{
    return push->may_go_back ? TL_OK : tl_rendezvous_check_version(worker->table, push->key, push->step, ret_error);
}

static enum tl_status admit(void *context, const struct tl_identity *client, const struct tl_push *push,
                            void **ret_admission, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    if (worker->closing.is_closing)
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s is shutting down", worker->self.name);
    if (tl_part_is_name(push->key))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%.64s is no key: " TL_PART_PREFIX " names parts of tensors", push->key);
    if (strcmp(push->key, TL_PUT_KEY) == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, TL_PUT_KEY " is no key: it names what is put at a peer");
    enum tl_status status = check_version(worker, push, ret_error);
    if (status == TL_OK && is_own(worker, push->key))
        status = tl_permissions_check(worker->members.permissions, client, TL_ACTION_PUBLISH, ret_error);
    if (status != TL_OK) return status;
    uint64_t charged_bytes;
    uint64_t extra_bytes = strlen(push->key) + tl_annotations_bytes(push->annotations) + PUSHED_OVERHEAD_BYTES;
    if (!tl_add_u64(push->meta_data.size_bytes, extra_bytes, &charged_bytes)) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s has %" PRIu64 " bytes, which is too much", push->key,
                            push->meta_data.size_bytes);
    }
    struct pushed *pushed = malloc(sizeof(*pushed));
    if (pushed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to publish %s", push->key);
    pushed->charged_bytes = charged_bytes;
    pushed->may_replace = tl_permissions_allow(worker->members.permissions, client, TL_ACTION_PUBLISH);
    status = tl_shares_take(worker->sources.pushed, &client->client, charged_bytes, &pushed->share, ret_error);
    if (status != TL_OK) {
        free(pushed);
        tl_error_prefix(ret_error, "%s cannot take %s: ", worker->self.name, push->key);
        return status;
    }
    *ret_admission = pushed;
    return TL_OK;
}

static enum tl_status publish(void *context, void *admission, const struct tl_push *push, struct tl_tensor *tensor,
                              uint64_t *ret_publication, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    struct tl_tensor *alias;
    enum tl_status status = TL_OK;
    const struct pushed *pushed = admission;
    /* Checked again, because another client, or the worker itself, may have been faster. */
    if (tensor != NULL) status = check_version(worker, push, ret_error);
    if (tensor != NULL && status == TL_OK && !pushed->may_replace && is_own(worker, push->key)) {
        status = tl_error_set(ret_error, TL_PERMISSION_DENIED,
                              "%s has published %s itself in the meantime, which this client may not replace",
                              worker->self.name, push->key);
    }
    if (tensor != NULL && status == TL_OK)
        status = tl_tensor_create_alias(tensor, pushed_released, admission, &alias, ret_error);
    if (tensor == NULL || status != TL_OK) {
        pushed_released(NULL, admission);
        return status;
    }
    status = tl_rendezvous_publish(worker->table, push->key, push->step, alias, ret_publication, ret_error);
    tl_tensor_put(alias);
    return status;
}

static void link_up(void *context, struct tl_link *link)
{
    tl_peers_link_up(context, link);
}

static enum tl_status may(void *context, const struct tl_identity *caller, enum tl_action action,
                          struct tl_error *ret_error)
{
    const struct tl_worker *worker = context;
    return tl_permissions_check(worker->members.permissions, caller, action, ret_error);
}

static enum tl_link_admission admit_link(void *context, const struct tl_identity *peer, struct tl_error *ret_error)
{
    return tl_peers_admit(context, peer, ret_error);
}

const struct tl_control_handlers tl_worker_handlers = {
    .source = {.request = request, .prefetch = prefetch, .closed = closed, .received = received, .given_up = given_up},
    .may = may,
    .admit_link = admit_link,
    .link_up = link_up,
    .admit = admit,
    .publish = publish,
    .fetch_put = tl_put_fetch_start,
    .stop_fetch = tl_put_fetch_stop,
    .walk_begin = tl_walk_begin,
    .walk_step = tl_walk_step,
    .walk_end = tl_walk_end,
    .describe = tl_worker_describe,
    .probe = tl_prober_ask,
};
