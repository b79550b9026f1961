// SPDX-License-Identifier: Apache-2.0
/*
 * The memory of a connection: where destinations lie, blocks of the pool that bytes are copied through, and what the
 * registration thread does for the connection: it registers memory, and makes a pool larger that is full.
 *
 * Everything that the registration thread does comes back as one closure to the reactor, and is counted in
 * ending.held_count until then; the connection does not end before. A wait for memory can be left.
 */
#include <stdlib.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/conn_internal.h"

/* Time enough for the pool to grow where it may. */
#define GROW_NS TL_NS_PER_SEC

int64_t conn_grow_ns(const struct tl_conn *conn)
{
    int64_t most_ns = conn->engine->options.parked_ns / 4;
    return most_ns < GROW_NS ? most_ns : GROW_NS;
}

bool conn_is_small(const struct tl_conn *conn, const struct tl_tensor *tensor)
{
    void *data;
    uint64_t len_bytes = tl_tensor_size_bytes(tensor);
    if (conn->engine->provider->limits.needs_regions) tl_tensor_allocation(tensor, &data, &len_bytes);
    return len_bytes < conn->engine->options.register_bytes;
}

/* ------------------------------------------------------------------------------------------------------ blocks -- */

static struct tl_meta_data bytes_of(uint64_t len_bytes)
{
    return (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {len_bytes}}, .size_bytes = len_bytes};
}

static void pin_block(struct tl_memory *memory, struct tl_tensor *block, struct tl_pin *ret_pin)
{
    bool is_pinned = tl_memory_pin(memory, block, TL_REGION_WRITE, ret_pin);
    TL_CHECK(is_pinned);
}

enum tl_status conn_block_create(struct tl_memory *memory, struct conn_memory_wait *memory_wait, uint64_t len_bytes,
                                 struct tl_tensor **ret_block, struct tl_pin *ret_pin, struct tl_error *ret_error)
{
    const struct tl_meta_data bytes = bytes_of(len_bytes);
    enum tl_status status = tl_memory_tensor_take(
        memory, &bytes, memory_wait != NULL ? &memory_wait->memory_wait : NULL, ret_block, ret_error);
    if (status == TL_OK) pin_block(memory, *ret_block, ret_pin);
    return status;
}

enum tl_status conn_block_create_early(struct tl_memory *memory, uint64_t len_bytes, struct tl_tensor **ret_block,
                                       struct tl_pin *ret_pin, struct tl_error *ret_error)
{
    const struct tl_meta_data bytes = bytes_of(len_bytes);
    enum tl_status status = tl_memory_tensor_take_early(memory, &bytes, ret_block, ret_error);
    if (status == TL_OK) pin_block(memory, *ret_block, ret_pin);
    return status;
}

bool conn_block_create_spare(const struct tl_conn *conn, struct tl_memory *memory, uint64_t len_bytes,
                             struct tl_tensor **ret_block, struct tl_pin *ret_pin)
{
    struct tl_error error;
    struct tl_memory_stats stats;
    tl_memory_get_stats(memory, &stats);
    const struct tl_memory_options *limits = &conn->engine->options.peer_memory;
    uint64_t most_bytes = tl_max_u64(limits->pool_bytes, stats.pool_bytes / 2);
    most_bytes = tl_min_u64(most_bytes, limits->max_pool_bytes / 2);
    if (stats.pool_used_bytes + len_bytes > most_bytes) return false;
    return conn_block_create(memory, NULL, len_bytes, ret_block, ret_pin, &error) == TL_OK;
}

void conn_block_destroy(struct tl_memory *memory, struct tl_tensor **block, struct tl_pin *pin)
{
    if (*block == NULL) return;
    tl_memory_unpin(memory, pin);
    tl_tensor_put(*block);
    *block = NULL;
}

/* ----------------------------------------------------------------------------------------- registration thread -- */

void conn_post_to_reactor(void *reactor, struct tl_closure *closure)
{
    tl_reactor_post(reactor, closure);
}

bool conn_register(struct tl_conn *conn, struct tl_memory *memory, void *owner, struct tl_tensor *tensor,
                   enum tl_region_access access, void (*run)(struct tl_closure *closure))
{
    struct registering *registering = malloc(sizeof(*registering));
    if (registering == NULL) return false;
    registering->owner = owner;
    registering->registration = (struct tl_registration){.tensor = tensor,
                                                         .access = access,
                                                         .closure = {.run = run},
                                                         .post = conn_post_to_reactor,
                                                         .context = conn->engine->reactor};
    tl_list_init(&registering->registration.closure.link);
    conn->ending.held_count++;
    tl_memory_register(memory, &registering->registration);
    return true;
}

struct conn_memory_wait *conn_await_memory(struct tl_conn *conn, struct tl_memory *memory, uint64_t len_bytes,
                                           void *owner, void (*run)(struct tl_closure *closure),
                                           struct tl_error *ret_error)
{
    struct conn_memory_wait *wait = malloc(sizeof(*wait));
    if (wait == NULL) {
        (void)tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to wait for memory of the pool");
        return NULL;
    }
    wait->conn = conn;
    wait->memory = memory;
    wait->owner = owner;
    wait->memory_wait.closure.run = run;
    wait->memory_wait.post = conn_post_to_reactor;
    wait->memory_wait.context = conn->engine->reactor;
    tl_list_init(&wait->memory_wait.closure.link);
    if (tl_memory_await(memory, &wait->memory_wait, len_bytes, ret_error) != TL_OK) {
        free(wait);
        return NULL;
    }
    conn->ending.held_count++;
    return wait;
}

struct conn_memory_wait *conn_memory_came(struct tl_closure *closure)
{
    struct conn_memory_wait *wait = TL_CONTAINER_OF(closure, struct conn_memory_wait, memory_wait.closure);
    wait->conn->ending.held_count--;
    return wait;
}

void conn_cancel_memory_wait(struct conn_memory_wait **wait)
{
    if (*wait == NULL || !tl_memory_withdraw((*wait)->memory, &(*wait)->memory_wait)) return;
    (*wait)->conn->ending.held_count--;
    free(*wait);
    *wait = NULL;
}

void conn_free_memory_wait(struct conn_memory_wait **wait)
{
    if (*wait == NULL) return;
    tl_memory_wait_drop(&(*wait)->memory_wait);
    free(*wait);
    *wait = NULL;
}

/* ------------------------------------------------------------------------------------------------ destinations -- */

/* A request never waits for the pool while it holds a block of it. So under is_bounce_forced, where each request has a
 * bounce buffer in the pool, destinations lie elsewhere. */
static enum tl_status create_destination(void *context, struct tl_device device, const struct tl_meta_data *meta_data,
                                         struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_conn *conn = context;
    if (device.kind != TL_DEVICE_HOST)
        return request_create_on_device(conn->requests.placing.request, device, meta_data, ret_tensor, ret_error);
    if (conn->engine->options.is_bounce_forced) return tl_tensor_create_for(meta_data, ret_tensor, ret_error);
    bool is_early = conn->requests.placing.is_early && meta_data->size_bytes > 0;
    enum tl_status status =
        is_early ? tl_memory_tensor_take_early(conn->memory, meta_data, ret_tensor, ret_error)
                 : tl_memory_tensor_take(conn->memory, meta_data, conn->requests.placing.wait, ret_tensor, ret_error);
    if (status == TL_UNAVAILABLE) conn->requests.placing.missing_bytes = meta_data->size_bytes;
    return status;
}

void conn_memory_init(struct tl_conn *conn, struct tl_memory *memory)
{
    TL_CHECK((memory != NULL) == (conn->engine->peer_memories != NULL));
    conn->memory = memory != NULL ? memory : conn->engine->memory;
    conn->requests.placing.allocator = (struct tl_allocator){.create = create_destination, .context = conn};
}

void conn_memory_fini(struct tl_conn *conn)
{
    struct tl_engine *engine = conn->engine;
    if (conn->memory != engine->memory) tl_peer_memories_give(engine->peer_memories, conn->memory);
}
