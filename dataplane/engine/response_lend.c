// SPDX-License-Identifier: Apache-2.0
/*
 * A value on a device whose memory the peer imports (docs/gpu.md).
 *
 * Happy path: memory that the library has allocated so that other processes can map it is shown as it is; the bytes of
 * other memory are copied into such memory first, on the device, when the fence of the value is reached. The
 * descriptor of the memory is exported and shown to the peer, unless the peer has it. SOURCE then says where the value
 * lies, and everything else is as with a source that a card reads.
 *
 * Copies are used again for later values of the connection, so that the peer need not import each of them. When they
 * take as much memory as they may, values wait.
 *
 * Failure modes: where there is no such memory, or its descriptor cannot be passed now, the value is written.
 */
#include <stdlib.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "dataplane/engine/response_internal.h"

/* What the copies of a connection may take: all of them, and those that are not used. A larger one may be made when no
 * other is used. */
#define MOST_COPIED_BYTES (UINT64_C(256) << 20)
#define MOST_IDLE_BYTES (UINT64_C(64) << 20)
/* Devices allocate whole pages of so many bytes, or more. */
#define PAGE_BYTES (UINT64_C(2) << 20)

/* Memory for copies. */
struct conn_lent_copy {
    struct tl_list link; /* in conn->responses.idle_copies */
    struct tl_device device;
    struct tl_device_memory *memory;
    uint64_t len_bytes;
};

/* What a response waits for, on threads of the device. */
struct lending {
    struct response *response;
    struct conn_device_call call;
    struct tl_device_request request;
    struct tl_device_copy copy;
    struct tl_device_export exporting;
    struct tl_list awaiting_link;    /* in conn->responses.awaiting_copies: until others give back what they use */
    uint64_t requested_bytes;        /* counted in copied_bytes until they are allocated */
    struct tl_device_memory *memory; /* what was allocated */
    int file;                        /* what was exported; -1: nothing */
    const struct tl_error *failure;  /* kept; NULL: none */
};

bool response_may_lend(const struct response *response)
{
    const struct tl_engine_options *options = &response->conn->engine->options;
    return response->is_reading && response->conn->pair->ops->show_memory != NULL && response_is_on_device(response) &&
           !response->wants_checksum && !options->is_bounce_forced && !options->is_gpu_proxy_forced;
}

/* ------------------------------------------------------------------------------------------------------ copies -- */

static void destroy_copy(struct tl_conn *conn, struct conn_lent_copy *copy)
{
    conn->responses.copied_bytes -= copy->len_bytes;
    tl_list_remove(&copy->link);
    tl_device_memory_destroy(copy->memory);
    free(copy);
}

/* Takes idle memory for a copy of this size; NULL: there is none. */
static struct conn_lent_copy *take_copy(struct tl_conn *conn, struct tl_device device, uint64_t size_bytes)
{
    TL_LIST_FOREACH(&conn->responses.idle_copies, link)
    {
        struct conn_lent_copy *copy = TL_CONTAINER_OF(link, struct conn_lent_copy, link);
        if (copy->device.index != device.index || copy->len_bytes < size_bytes) continue;
        tl_list_remove(link);
        conn->responses.idle_copy_bytes -= copy->len_bytes;
        return copy;
    }
    return NULL;
}

static void destroy_oldest_idle(struct tl_conn *conn)
{
    struct conn_lent_copy *oldest = TL_CONTAINER_OF(conn->responses.idle_copies.prev, struct conn_lent_copy, link);
    conn->responses.idle_copy_bytes -= oldest->len_bytes;
    destroy_copy(conn, oldest);
}

/* Makes space for a copy of this size as far as idle ones take it. Returns whether there is space. */
static bool make_space(struct tl_conn *conn, uint64_t size_bytes)
{
    const struct conn_responses *responses = &conn->responses;
    while (responses->copied_bytes + size_bytes > MOST_COPIED_BYTES && !tl_list_is_empty(&responses->idle_copies))
        destroy_oldest_idle(conn);
    return responses->copied_bytes == 0 || responses->copied_bytes + size_bytes <= MOST_COPIED_BYTES;
}

void conn_lent_copies_fini(struct tl_conn *conn)
{
    TL_LIST_FOREACH_SAFE(&conn->responses.idle_copies, link)
    {
        destroy_copy(conn, TL_CONTAINER_OF(link, struct conn_lent_copy, link));
    }
}

static struct conn_lent_copy *add_copy(struct tl_conn *conn, struct tl_device device, struct tl_device_memory *memory)
{
    struct conn_lent_copy *copy = calloc(1, sizeof(*copy));
    if (copy == NULL) {
        tl_device_memory_destroy(memory);
        return NULL;
    }
    tl_list_init(&copy->link);
    copy->device = device;
    copy->memory = memory;
    (void)tl_device_memory_number(memory, &copy->len_bytes);
    conn->responses.copied_bytes += copy->len_bytes;
    return copy;
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

static void show(struct lending *lending);
static void begin_waiting(struct tl_conn *conn);

/* Ends the wait: the memory is shown, or the value must be written, for the reason in failure. */
static void finish(struct lending *lending, const struct tl_error *failure)
{
    struct response *response = lending->response;
    struct tl_conn *conn = response->conn;
    bool is_stopping = response->state == RESPONSE_STOPPING;
    if (failure != NULL && !is_stopping)
        TL_LOG_AT_DEBUG("memory of a device is not shown", TL_STR("peer", conn->peer.name),
                        TL_STR("key", response->serve.key), TL_STR("reason", failure->message));
    conn->ending.held_count--;
    response->sending->is_registering = false;
    response->sending->lend.is_lent = failure == NULL;
    bool is_drained = conn->ending.is_pair_drained;
    enum response_event event = failure == NULL || is_stopping ? RESPONSE_EVENT_READY : RESPONSE_EVENT_DIFFERS;
    if (lending->file >= 0) close(lending->file);
    tl_error_drop(lending->failure);
    free(lending);
    if (is_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else {
        response_handle(response, event);
    }
    conn_pump_later(conn);
}

/* Begins a step on a thread of the device, after which `run` is called on the reactor. */
static void begin_step(struct lending *lending, void (*run)(struct conn_device_call *call))
{
    conn_device_call_init(&lending->call, lending->response->conn, run);
}

/* A step is over. Returns whether the next one follows. */
static bool may_go_on(struct lending *lending)
{
    const struct response *response = lending->response;
    static const struct tl_error given_up = {.code = TL_CANCELLED, .message = "it was given up"};
    bool is_wanted = response->state == RESPONSE_LOCATING && !response->conn->ending.is_pair_drained;
    if (is_wanted && lending->failure == NULL) return true;
    finish(lending, lending->failure != NULL ? lending->failure : &given_up);
    return false;
}

static void exported_here(struct conn_device_call *call)
{
    struct lending *lending = TL_CONTAINER_OF(call, struct lending, call);
    if (may_go_on(lending)) show(lending);
}

static void exported(struct tl_device_export *exporting, int file, const struct tl_error *status)
{
    struct lending *lending = TL_CONTAINER_OF(exporting, struct lending, exporting);
    lending->file = file;
    if (file < 0) lending->failure = tl_error_keep(status);
    conn_device_call_post(&lending->call);
}

static void show(struct lending *lending)
{
    struct response *response = lending->response;
    struct response_lend *lend = &response->sending->lend;
    struct tl_queue_pair *pair = response->conn->pair;
    struct tl_error error;
    struct tl_device_memory *memory =
        lend->copy != NULL ? lend->copy->memory : tl_tensor_device_memory(response->sending->offer.tensor);
    enum tl_status status =
        pair->ops->show_memory(pair, memory, lending->file, lend->offset_bytes, &lend->descriptor, &error);
    if (status == TL_NOT_FOUND && lending->file < 0) {
        lending->exporting = (struct tl_device_export){.memory = memory, .done = exported};
        begin_step(lending, exported_here);
        tl_device_export_start(&lending->exporting);
    } else {
        finish(lending, status == TL_OK ? NULL : &error);
    }
}

static void copied_here(struct conn_device_call *call)
{
    struct lending *lending = TL_CONTAINER_OF(call, struct lending, call);
    if (!may_go_on(lending)) return;
    lending->response->sending->pieces.is_fence_reached = true;
    lending->response->sending->is_sender_copying = true;
    show(lending);
}

static void copied(struct tl_device_copy *copy, const struct tl_error *status)
{
    struct lending *lending = TL_CONTAINER_OF(copy, struct lending, copy);
    if (status->code != TL_OK) lending->failure = tl_error_keep(status);
    conn_device_call_post(&lending->call);
}

static void copy(struct lending *lending)
{
    const struct response *response = lending->response;
    const struct tl_tensor *tensor = response->sending->offer.tensor;
    lending->copy = (struct tl_device_copy){.device = tl_tensor_device(tensor),
                                            .to = tl_device_memory_data(response->sending->lend.copy->memory),
                                            .from = tl_tensor_data(tensor),
                                            .len_bytes = tl_tensor_size_bytes(tensor),
                                            .after = {tl_tensor_fence(tensor)},
                                            .done = copied};
    begin_step(lending, copied_here);
    tl_device_copy_start(&lending->copy);
}

static void allocated_here(struct conn_device_call *call)
{
    struct lending *lending = TL_CONTAINER_OF(call, struct lending, call);
    struct response *response = lending->response;
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    struct tl_device_memory *memory = lending->memory;
    conn->responses.copied_bytes -= lending->requested_bytes;
    if (memory != NULL) {
        sending->lend.copy = add_copy(conn, tl_tensor_device(sending->offer.tensor), memory);
        if (sending->lend.copy == NULL) lending->failure = tl_error_keep(&response_out_of_memory);
    }
    bool has_copy = sending->lend.copy != NULL;
    if (may_go_on(lending)) copy(lending);
    if (!has_copy) begin_waiting(conn);
}

static void allocated(struct tl_device_request *request, struct tl_device_memory *memory, const struct tl_error *status)
{
    struct lending *lending = TL_CONTAINER_OF(request, struct lending, request);
    lending->memory = memory;
    if (memory == NULL) lending->failure = tl_error_keep(status);
    conn_device_call_post(&lending->call);
}

/* How much memory of its device a copy of the tensor takes. */
static uint64_t whole_pages(const struct tl_tensor *tensor)
{
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    return size_bytes + -size_bytes % PAGE_BYTES;
}

static void request_memory(struct lending *lending)
{
    const struct response *response = lending->response;
    const struct tl_tensor *tensor = response->sending->offer.tensor;
    lending->requested_bytes = whole_pages(tensor);
    response->conn->responses.copied_bytes += lending->requested_bytes;
    lending->request = (struct tl_device_request){.device = tl_tensor_device(tensor),
                                                  .size_bytes = tl_tensor_size_bytes(tensor),
                                                  .is_shared = true,
                                                  .done = allocated};
    begin_step(lending, allocated_here);
    tl_device_memory_request(&lending->request);
}

/* Begins to copy the value, in memory that is idle or that there is space for. Returns false when there is neither. */
static bool begin_copy(struct lending *lending)
{
    struct response_sending *sending = lending->response->sending;
    struct tl_conn *conn = lending->response->conn;
    const struct tl_tensor *tensor = sending->offer.tensor;
    sending->lend.copy = take_copy(conn, tl_tensor_device(tensor), tl_tensor_size_bytes(tensor));
    if (sending->lend.copy != NULL) {
        copy(lending);
    } else if (make_space(conn, whole_pages(tensor))) {
        request_memory(lending);
    } else {
        return false;
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------- waiting -- */

/* Begins those that have waited, in their order, as far as there is memory. Those of a connection that is drained end
 * without it. */
static void begin_waiting(struct tl_conn *conn)
{
    struct tl_list *awaiting = &conn->responses.awaiting_copies;
    while (!tl_list_is_empty(awaiting) && !conn->ending.is_pair_drained) {
        struct lending *lending = TL_CONTAINER_OF(awaiting->next, struct lending, awaiting_link);
        if (!begin_copy(lending)) return;
        lending->response->sending->lend.awaiting = NULL;
        tl_list_remove(&lending->awaiting_link);
    }
}

static void await_copy(struct lending *lending)
{
    lending->response->sending->lend.awaiting = lending;
    tl_list_push_back(&lending->response->conn->responses.awaiting_copies, &lending->awaiting_link);
    begin_waiting(lending->response->conn);
}

static void fence_reached_here(struct conn_device_call *call)
{
    struct lending *lending = TL_CONTAINER_OF(call, struct lending, call);
    if (may_go_on(lending)) await_copy(lending);
}

/* Memory is taken only when the fence of the value is reached: others that are ready do not wait for its stream. */
static void await_fence(struct lending *lending)
{
    const struct tl_tensor *tensor = lending->response->sending->offer.tensor;
    lending->copy =
        (struct tl_device_copy){.device = tl_tensor_device(tensor), .after = {tl_tensor_fence(tensor)}, .done = copied};
    begin_step(lending, fence_reached_here);
    tl_device_copy_start(&lending->copy);
}

void response_stop_awaiting_copy(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct lending *lending = sending->lend.awaiting;
    if (lending == NULL) return;
    tl_list_remove(&lending->awaiting_link);
    free(lending);
    sending->lend.awaiting = NULL;
    sending->is_registering = false;
    response->conn->ending.held_count--;
    begin_waiting(response->conn); /* those behind it may need less */
}

static void give_copy(struct tl_conn *conn, struct conn_lent_copy *copy)
{
    struct tl_list *idle = &conn->responses.idle_copies;
    conn->responses.idle_copy_bytes += copy->len_bytes;
    if (copy->len_bytes > MOST_IDLE_BYTES) {
        tl_list_push_back(idle, &copy->link); /* the first that is destroyed */
    } else {
        tl_list_push_front(idle, &copy->link);
    }
    begin_waiting(conn);
    while (conn->responses.idle_copy_bytes > MOST_IDLE_BYTES)
        destroy_oldest_idle(conn);
}

void response_end_lending(struct response *response)
{
    struct conn_lent_copy *copy = response->sending->lend.copy;
    response->sending->lend = (struct response_lend){.is_lent = false};
    if (copy != NULL) give_copy(response->conn, copy);
}

void response_lend(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    const struct tl_tensor *tensor = sending->offer.tensor;
    const struct tl_device_memory *memory = tl_tensor_device_memory(tensor);
    uint64_t len_bytes;
    struct lending *lending = calloc(1, sizeof(*lending));
    if (lending == NULL) {
        response_handle(response, RESPONSE_EVENT_DIFFERS);
        return;
    }
    lending->response = response;
    lending->file = -1;
    tl_list_init(&lending->awaiting_link);
    conn->ending.held_count++;
    sending->is_registering = true;
    if (tl_device_memory_number(memory, &len_bytes) != 0) {
        sending->lend.offset_bytes = (uintptr_t)tl_tensor_data(tensor) - (uintptr_t)tl_device_memory_data(memory);
        show(lending);
        return;
    }
    if (tl_tensor_fence(tensor) != NULL) {
        await_fence(lending);
    } else {
        await_copy(lending);
    }
}
