// SPDX-License-Identifier: Apache-2.0
/*
 * What the control plane asks of this worker: the tensors of the table for peers (server/serving.h) and for clients,
 * and what clients push.
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
#include "base/log.h"
#include "server/worker_internal.h"

static void expire_now(struct tl_worker *worker)
{
    int64_t next_ns = tl_rendezvous_expire(worker->table, tl_clock_now_ns());
    if (tl_timers_arm(tl_loop_timers(worker->loop), &worker->expire_timer, next_ns) != TL_OK) {
        TL_LOG_AT_ERROR("no memory to free reservations in time");
    }
}

static void expire_timer_fired(struct tl_timer *timer)
{
    expire_now(TL_CONTAINER_OF(timer, struct tl_worker, expire_timer));
}

static void expire_asked(struct tl_letter *letter)
{
    struct tl_worker *worker = TL_CONTAINER_OF(letter, struct tl_worker, expire_letter);
    __atomic_store_n(&worker->is_expire_asked, false, __ATOMIC_RELEASE);
    expire_now(worker);
}

void tl_source_expire(struct tl_worker *worker)
{
    if (tl_home_is_here(&worker->home)) {
        expire_now(worker);
    } else if (!__atomic_exchange_n(&worker->is_expire_asked, true, __ATOMIC_ACQ_REL)) {
        worker->home.post(&worker->home, &worker->expire_letter);
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

static void given_up(void *context, const struct tl_request_id *id)
{
    struct tl_worker *worker = context;
    tl_serving_ops.given_up(&worker->serving, id);
}

/* ------------------------------------------------------------------------------------------------------ pushing -- */

/* Bytes admitted or published by clients and not released. Whoever received such a tensor by reference, and gRPC, may
 * keep it longer than the worker lives; so the account lives as long as the last of them. */
struct pushed_account {
    uint64_t bytes;       /* any thread, atomic */
    uint64_t owner_count; /* the worker and the tensors; any thread, atomic */
};

static void account_put(struct pushed_account *account)
{
    if (__atomic_sub_fetch(&account->owner_count, 1, __ATOMIC_ACQ_REL) == 0) free(account);
}

enum tl_status tl_source_init(struct tl_worker *worker, struct tl_error *ret_error)
{
    tl_serving_init(&worker->serving, worker, &worker->home);
    worker->expire_timer.fire = expire_timer_fired;
    worker->expire_letter.deliver = expire_asked;
    worker->pushed = calloc(1, sizeof(*worker->pushed));
    if (worker->pushed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    worker->pushed->owner_count = 1;
    return TL_OK;
}

void tl_source_fini(struct tl_worker *worker)
{
    if (worker->pushed != NULL) account_put(worker->pushed);
}

/* Local publishers may go back, since they know why; a client may be the one of two that comes too late. */
static enum tl_status check_version(struct tl_worker *worker, const struct tl_push *push, struct tl_error *ret_error)
{
    return push->may_go_back ? TL_OK : tl_rendezvous_check_version(worker->table, push->key, push->step, ret_error);
}

static enum tl_status admit(void *context, const struct tl_identity *client, const struct tl_push *push,
                            struct tl_error *ret_error)
{
    const struct tl_meta_data *meta_data = &push->meta_data;
    struct tl_worker *worker = context;
    (void)client;
    if (worker->is_closing) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s is shutting down", worker->self.name);
    enum tl_status status = check_version(worker, push, ret_error);
    if (status != TL_OK) return status;
    uint64_t pushed_bytes = __atomic_load_n(&worker->pushed->bytes, __ATOMIC_RELAXED);
    struct tl_rendezvous_stats stats;
    tl_rendezvous_get_stats(worker->table, &stats);
    uint64_t total;
    bool fits = tl_add_u64(pushed_bytes, stats.held_bytes, &total) &&
                tl_add_u64(total, meta_data->size_bytes, &total) && total <= worker->settings.held_bytes;
    if (!fits) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s holds %" PRIu64 " bytes and cannot take the %" PRIu64
                            " of %s; withdraw something or raise limits.held (%" PRIu64 ")",
                            worker->self.name, pushed_bytes + stats.held_bytes, meta_data->size_bytes, push->key,
                            worker->settings.held_bytes);
    }
    __atomic_fetch_add(&worker->pushed->bytes, meta_data->size_bytes, __ATOMIC_RELAXED);
    return TL_OK;
}

/* A pushed tensor's part of the account, given back with its last reference. */
struct pushed {
    struct pushed_account *account;
    uint64_t size_bytes;
};

static void pushed_released(void *data, void *context)
{
    (void)data;
    struct pushed *pushed = context;
    __atomic_fetch_sub(&pushed->account->bytes, pushed->size_bytes, __ATOMIC_RELAXED);
    account_put(pushed->account);
    free(pushed);
}

static enum tl_status publish_pushed(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                     uint64_t *ret_publication, struct tl_error *ret_error)
{
    struct pushed *pushed = malloc(sizeof(*pushed));
    if (pushed == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to publish %s", key);
    *pushed = (struct pushed){.account = worker->pushed, .size_bytes = tl_tensor_size_bytes(tensor)};
    struct tl_tensor *alias;
    enum tl_status status = tl_tensor_create_alias(tensor, pushed_released, pushed, &alias, ret_error);
    if (status != TL_OK) {
        free(pushed);
        return status;
    }
    /* From here on the alias gives the account back, also when publishing fails. */
    __atomic_fetch_add(&worker->pushed->owner_count, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&worker->pushed->bytes, pushed->size_bytes, __ATOMIC_RELAXED);
    status = tl_rendezvous_publish(worker->table, key, step, alias, ret_publication, ret_error);
    tl_tensor_put(alias);
    return status;
}

static enum tl_status publish(void *context, const struct tl_identity *client, const struct tl_push *push,
                              struct tl_tensor *tensor, uint64_t *ret_publication, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    (void)client;
    enum tl_status status = TL_OK;
    /* Again: another client may have been faster. */
    if (tensor != NULL) status = check_version(worker, push, ret_error);
    if (tensor != NULL && status == TL_OK)
        status = publish_pushed(worker, push->key, push->step, tensor, ret_publication, ret_error);
    __atomic_fetch_sub(&worker->pushed->bytes, push->meta_data.size_bytes, __ATOMIC_RELAXED);
    return status;
}

static uint64_t withdraw(void *context, const struct tl_identity *client, const char *pattern)
{
    struct tl_worker *worker = context;
    (void)client;
    return tl_rendezvous_withdraw_matching(worker->table, pattern);
}

static enum tl_status list(void *context, const char *pattern, struct tl_listing *ret_listing,
                           struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    return tl_rendezvous_list(worker->table, pattern, ret_listing, ret_error);
}

static void link_up(void *context, struct tl_link *link)
{
    tl_peers_link_up(context, link);
}

const struct tl_control_handlers tl_worker_handlers = {
    .source = {.request = request, .closed = closed, .received = received, .given_up = given_up},
    .link_up = link_up,
    .admit = admit,
    .publish = publish,
    .withdraw = withdraw,
    .list = list,
    .describe = tl_worker_describe,
};
