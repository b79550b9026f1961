// SPDX-License-Identifier: Apache-2.0
/*
 * The handles of a connection's requests. The table begins small and grows, since a handle is all that a request holds
 * while it waits for its value. Indexes are used again in the order in which they became free: so the uses of an index,
 * which its generation tells apart, lie as far apart as they can.
 *
 * Failure modes: without memory for a larger table a request gets no handle.
 */
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "dataplane/engine/conn_internal.h"

#define FIRST_HANDLES 64

bool conn_has_handle(const struct tl_conn *conn)
{
    return conn->requests.open_count < conn->requests.capacity;
}

static void append_free(struct conn_requests *requests, uint32_t index)
{
    if (requests->open_count == requests->handle_count) {
        requests->first_free = index;
    } else {
        requests->handles[requests->last_free].next = index;
    }
    requests->last_free = index;
}

/* Makes the table larger, which has no free index. */
static bool grow(struct conn_requests *requests)
{
    uint32_t old = requests->handle_count;
    uint32_t count = (uint32_t)tl_min_u64(old == 0 ? FIRST_HANDLES : 2 * (uint64_t)old, requests->capacity);
    struct conn_handle *handles = realloc(requests->handles, count * sizeof(*handles));
    if (handles == NULL) return false;
    memset(handles + old, 0, (count - old) * sizeof(*handles));
    requests->handles = handles;
    for (uint32_t index = old; index < count; index++) {
        append_free(requests, index);
        requests->handle_count = index + 1;
    }
    return true;
}

bool conn_take_handle(struct tl_conn *conn, struct request *request, uint32_t *ret_handle)
{
    struct conn_requests *requests = &conn->requests;
    if (requests->open_count == requests->handle_count && !grow(requests)) return false;
    uint32_t index = requests->first_free;
    struct conn_handle *handle = &requests->handles[index];
    requests->first_free = handle->next;
    requests->open_count++;
    handle->request = request;
    *ret_handle = tl_handle(index, handle->generation);
    return true;
}

void conn_give_handle(struct tl_conn *conn, uint32_t handle)
{
    struct conn_requests *requests = &conn->requests;
    uint32_t index = tl_handle_index(handle);
    requests->handles[index].request = NULL;
    requests->handles[index].generation++;
    append_free(requests, index);
    requests->open_count--;
}

struct request *conn_find_request(const struct tl_conn *conn, uint32_t handle)
{
    uint32_t index = tl_handle_index(handle);
    if (index >= conn->requests.handle_count) return NULL;
    const struct conn_handle *place = &conn->requests.handles[index];
    return tl_handle(index, place->generation) == handle ? place->request : NULL;
}
