// SPDX-License-Identifier: Apache-2.0
#include "server/transfers/put_fetch.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "server/peers/data_connections.h"
#include "server/peers/session.h"
#include "server/worker_internal.h"

struct tl_put_fetch {
    struct tl_worker *worker;
    struct tl_list waiting; /* in worker->sources.put_fetches, until it has been asked */
    struct tl_identity client;
    uint64_t incarnation; /* names the process that has the tensor */
    struct tl_peer_request request;
    struct tl_meta_data meta_data; /* the only one that is taken */
    tl_put_fetched fetched;
    void *context;
};

static enum tl_status place(struct tl_fetch *request, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    const struct tl_put_fetch *fetch = TL_CONTAINER_OF(request, struct tl_put_fetch, request.fetch);
    static const struct tl_device host = {.kind = TL_DEVICE_HOST};
    const struct tl_allocator *allocator = request->allocator;
    if (!tl_meta_data_is_equal(meta_data, &fetch->meta_data))
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "the tensor is not the one that was announced");
    return allocator != NULL ? allocator->create(allocator->context, host, meta_data, ret_destination, ret_error)
                             : tl_tensor_create_for(meta_data, ret_destination, ret_error);
}

static const struct tl_meta_data *wanted(const struct tl_fetch *request)
{
    return &TL_CONTAINER_OF(request, const struct tl_put_fetch, request.fetch)->meta_data;
}

static void finish(struct tl_put_fetch *fetch, struct tl_tensor *tensor, const struct tl_error *result)
{
    enum tl_path path = fetch->request.fetch.path;
    tl_put_fetched fetched = fetch->fetched;
    void *context = fetch->context;
    tl_list_remove(&fetch->waiting);
    tl_fetch_fini(&fetch->request.fetch);
    free(fetch);
    fetched(context, tensor, path, result);
}

static void done(struct tl_fetch *request, const struct tl_error *result)
{
    struct tl_put_fetch *fetch = TL_CONTAINER_OF(request, struct tl_put_fetch, request.fetch);
    finish(fetch, result->code == TL_OK ? tl_fetch_pass_destination(request) : NULL, result);
}

static const struct tl_request_ops request_ops = {
    .on_loop = {.place = place, .wanted = wanted, .makes_memory = true, .done = done},
    .on_reactor = {.place = place, .wanted = wanted, .makes_memory = true, .done = tl_session_fetch_done}};

/* Asks for the tensor, or lets the fetch wait. Errors: TL_UNAVAILABLE. */
static enum tl_status ask(struct tl_put_fetch *fetch, struct tl_error *ret_error)
{
    const struct tl_data_connections *data = tl_peers_find_data(fetch->worker, &fetch->client, fetch->incarnation);
    const struct tl_data_connection *best = data != NULL ? tl_data_connections_best(data) : NULL;
    if (best != NULL) {
        tl_list_remove(&fetch->waiting);
        tl_session_fetch(best->session, &fetch->request);
        return TL_OK;
    }
    if (data != NULL && tl_data_connections_are_coming_up(data)) return TL_OK;
    return tl_error_set(ret_error, TL_UNAVAILABLE, "there is no data connection to the client");
}

void tl_put_fetches_go_on(struct tl_worker *worker)
{
    struct tl_error error;
    TL_LIST_FOREACH_SAFE(&worker->sources.put_fetches, place)
    {
        struct tl_put_fetch *fetch = TL_CONTAINER_OF(place, struct tl_put_fetch, waiting);
        if (ask(fetch, &error) != TL_OK) finish(fetch, NULL, &error);
    }
}

enum tl_status tl_put_fetch_start(void *context, const struct tl_identity *client, const struct tl_push *push,
                                  tl_put_fetched fetched, void *fetched_context, struct tl_put_fetch **ret_fetch,
                                  struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    struct tl_put_fetch *fetch = calloc(1, sizeof(*fetch));
    if (fetch == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to fetch %s", push->key);
    tl_peer_request_init(&fetch->request, &request_ops);
    fetch->worker = worker;
    fetch->client = *client;
    fetch->incarnation = push->source.incarnation;
    fetch->meta_data = push->meta_data;
    fetch->fetched = fetched;
    fetch->context = fetched_context;
    fetch->request.fetch.number = ++worker->operations.next_request;
    fetch->request.fetch.key = TL_PUT_KEY;
    fetch->request.fetch.step = push->source.number;
    fetch->request.fetch.wants_checksum = worker->settings.checksum;
    tl_list_push_back(&worker->sources.put_fetches, &fetch->waiting);
    enum tl_status status = ask(fetch, ret_error);
    if (status != TL_OK) {
        tl_list_remove(&fetch->waiting);
        free(fetch);
        return status;
    }
    *ret_fetch = fetch;
    return TL_OK;
}

void tl_put_fetch_stop(void *worker, struct tl_put_fetch *fetch)
{
    (void)worker;
    struct tl_error error;
    if (!tl_list_is_linked(&fetch->waiting)) {
        tl_session_cancel(&fetch->request);
        return;
    }
    tl_error_set(&error, TL_CANCELLED, "the client has given up");
    finish(fetch, NULL, &error);
}
