// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of devices that the peer has shown and that is mapped here, one import for each allocation and each device
 * that reads it. An import stays for later values in the same memory, until the peer gives the memory back or forgets
 * it; then it goes with the last request that uses it.
 *
 * Failure modes: memory that cannot be imported is reported to each request that waits for it, and is tried again for
 * the next value.
 */
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/engine/conn_internal.h"

/* ------------------------------------------------------------------------------------------------------- calls -- */

static void deliver(struct tl_closure *closure)
{
    struct conn_device_call *call = TL_CONTAINER_OF(closure, struct conn_device_call, closure);
    /* The device's thread has left tl_reactor_post, so that the reactor may end now. */
    TL_CHECK(pthread_mutex_lock(&call->mutex) == 0);
    TL_CHECK(pthread_mutex_unlock(&call->mutex) == 0);
    TL_CHECK(pthread_mutex_destroy(&call->mutex) == 0);
    call->run(call);
}

void conn_device_call_init(struct conn_device_call *call, struct tl_conn *conn,
                           void (*run)(struct conn_device_call *call))
{
    call->reactor = conn->engine->reactor;
    call->run = run;
    call->closure.run = deliver;
    tl_list_init(&call->closure.link);
    TL_CHECK(pthread_mutex_init(&call->mutex, NULL) == 0);
}

void conn_device_call_post(struct conn_device_call *call)
{
    TL_CHECK(pthread_mutex_lock(&call->mutex) == 0);
    tl_reactor_post(call->reactor, &call->closure);
    TL_CHECK(pthread_mutex_unlock(&call->mutex) == 0);
}

/* ----------------------------------------------------------------------------------------------------- imports -- */

static void destroy(struct conn_import *import)
{
    tl_list_remove(&import->link);
    tl_device_memory_destroy(import->memory);
    tl_error_drop(import->failure);
    free(import);
}

static void destroy_unless_used(struct conn_import *import)
{
    bool is_kept = !import->is_gone && import->failure == NULL;
    if (import->user_count == 0 && !import->is_running && !is_kept) destroy(import);
}

static void imported_here(struct conn_device_call *call)
{
    struct conn_import *import = TL_CONTAINER_OF(call, struct conn_import, call);
    struct tl_conn *conn = import->conn;
    struct tl_list *place;
    conn->ending.held_count--;
    import->is_running = false;
    import->user_count++; /* it stays until all have heard of it */
    while ((place = tl_list_pop_front(&import->waiting)) != NULL) {
        struct conn_import_wait *wait = TL_CONTAINER_OF(place, struct conn_import_wait, link);
        wait->over(wait);
    }
    import->user_count--;
    destroy_unless_used(import);
    conn_pump_later(conn);
}

/* Thread: the device's. */
static void imported(struct tl_device_import *importing, struct tl_device_memory *memory, const struct tl_error *status)
{
    struct conn_import *import = TL_CONTAINER_OF(importing, struct conn_import, importing);
    import->memory = memory;
    if (memory == NULL) import->failure = tl_error_keep(status);
    conn_device_call_post(&import->call);
}

static struct conn_import *start(struct tl_conn *conn, uint64_t number, uint64_t len_bytes, struct tl_device device,
                                 int file)
{
    struct conn_import *import = calloc(1, sizeof(*import));
    if (import == NULL) return NULL;
    import->conn = conn;
    import->number = number;
    import->is_running = true;
    tl_list_init(&import->link);
    tl_list_init(&import->waiting);
    import->importing =
        (struct tl_device_import){.device = device, .file = file, .len_bytes = len_bytes, .done = imported};
    conn_device_call_init(&import->call, conn, imported_here);
    tl_list_push_back(&conn->requests.placing.imports, &import->link);
    conn->ending.held_count++;
    conn->engine->stats.memory_imported++;
    tl_device_import_start(&import->importing);
    return import;
}

static struct conn_import *find(struct tl_conn *conn, uint64_t number, struct tl_device device)
{
    TL_LIST_FOREACH(&conn->requests.placing.imports, link)
    {
        struct conn_import *import = TL_CONTAINER_OF(link, struct conn_import, link);
        bool is_same = import->number == number && import->importing.device.index == device.index;
        if (is_same && import->failure == NULL && !import->is_gone) return import;
    }
    return NULL;
}

struct conn_import *conn_import_get(struct tl_conn *conn, const struct tl_descriptor *descriptor, uint64_t len_bytes,
                                    struct tl_device device, uint64_t *ret_offset_bytes, struct tl_error *ret_error)
{
    struct tl_peer_memory memory;
    int file;
    const struct tl_provider_ops *ops = conn->pair->ops;
    if (ops->find_memory(conn->pair, descriptor, len_bytes, &memory, NULL, ret_error) != TL_OK) return NULL;
    struct conn_import *import = find(conn, memory.number, device);
    if (import == NULL) {
        if (ops->find_memory(conn->pair, descriptor, len_bytes, &memory, &file, ret_error) != TL_OK) return NULL;
        import = start(conn, memory.number, memory.len_bytes, device, file);
        if (import == NULL) {
            close(file);
            tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for an import");
            return NULL;
        }
    }
    import->user_count++;
    *ret_offset_bytes = memory.offset_bytes;
    return import;
}

void conn_import_put(struct conn_import *import)
{
    import->user_count--;
    destroy_unless_used(import);
}

void conn_imports_gone(struct tl_conn *conn, uint64_t number)
{
    TL_LIST_FOREACH_SAFE(&conn->requests.placing.imports, link)
    {
        struct conn_import *import = TL_CONTAINER_OF(link, struct conn_import, link);
        if (import->number != number) continue;
        import->is_gone = true;
        destroy_unless_used(import);
    }
}

void conn_imports_fini(struct tl_conn *conn)
{
    TL_LIST_FOREACH_SAFE(&conn->requests.placing.imports, link)
    {
        destroy(TL_CONTAINER_OF(link, struct conn_import, link));
    }
}
