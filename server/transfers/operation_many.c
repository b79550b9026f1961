// SPDX-License-Identifier: Apache-2.0
/*
 * The public functions that send and receive many tensors in one call. All items are checked and copied before anything
 * is asked or offered, so that a wrong one fails the call.
 */
#include <string.h>

#include "base/error.h"
#include "base/struct_version.h"
#include "server/transfers/operation_group.h"
#include "tensor/tensor.h"

/* The destination of an item is prefetched so many items before. */
#define PREFETCHED_AHEAD 8

/* Says which item it is about. */
static enum tl_status name_item(size_t place, enum tl_status status, struct tl_error *ret_error)
{
    if (ret_error != NULL) tl_error_prefix(ret_error, "item %zu: ", place);
    return status;
}

static const void *item_at(const void *items, size_t place, size_t item_bytes)
{
    return (const unsigned char *)items + place * item_bytes;
}

/* Copies the key of a member to *keys, which moves on. */
static const char *copy_key(char **keys, const char *key)
{
    size_t bytes = strlen(key) + 1;
    char *copy = memcpy(*keys, key, bytes);
    *keys += bytes;
    return copy;
}

/* --------------------------------------------------------------------------------------------------- receiving -- */

/* A call with many receives, as it is checked. */
struct receives {
    struct tl_peer *peer;
    const void *items;
    size_t count;
    struct tl_recv_many_options options;
};

/* *ret_item is the caller's item, or where its version has another size, a copy in the buffer. */
static enum tl_status read_recv_item(const struct receives *call, size_t place, struct tl_recv_item *buffer,
                                     const struct tl_recv_item **ret_item, struct tl_error *ret_error)
{
    size_t item_bytes = call->options.item_bytes;
    const void *item = item_at(call->items, place, item_bytes);
    *ret_item = item_bytes == sizeof(*buffer) ? item : buffer;
    if (item_bytes == sizeof(*buffer)) return TL_OK;
    return tl_struct_read_sized(buffer, sizeof(*buffer), TL_RECV_ITEM_FIRST_BYTES, item, item_bytes, "tl_recv_item",
                                ret_error);
}

static enum tl_status check_recv_options(const struct receives *call, struct tl_error *ret_error)
{
    const struct tl_recv_many_options *options = &call->options;
    enum tl_status status =
        tl_struct_check_item_bytes(options->item_bytes, TL_RECV_ITEM_FIRST_BYTES, "tl_recv_item", ret_error);
    if (status != TL_OK) return status;
    if (options->min_count > call->count)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "min_count is %zu, and there are %zu items",
                            options->min_count, call->count);
    if (options->group_timeout_ns < 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "group_timeout_ns is negative; 0 is no limit");
    if (options->rest != TL_REST_CANCEL && options->rest != TL_REST_LEAVE)
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "this version of the library knows no rest %d",
                            (int)options->rest);
    return TL_OK;
}

/* Checks the options and the keys. Returns in *ret_keys_bytes how long the keys are together. */
static enum tl_status check_receives(struct tl_worker *worker, tl_peer_id peer,
                                     const struct tl_recv_many_options *options, struct receives *call,
                                     size_t *ret_keys_bytes, struct tl_error *ret_error)
{
    struct tl_recv_item copy;
    const struct tl_recv_item *item;
    char buffer[TL_MAX_KEY_BYTES + 1];
    const char *name = NULL;
    call->peer = tl_peer_acquire(worker, peer);
    if (call->peer == NULL) return tl_error_set(ret_error, TL_NOT_FOUND, "no such peer to receive from");
    if (options == NULL) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "struct tl_recv_many_options is missing");
    enum tl_status status = tl_struct_read(&call->options, sizeof(call->options), TL_RECV_MANY_OPTIONS_FIRST_BYTES,
                                           options, "tl_recv_many_options", ret_error);
    if (status == TL_OK) status = check_recv_options(call, ret_error);
    for (size_t i = 0; status == TL_OK && i < call->count; i++) {
        status = read_recv_item(call, i, &copy, &item, ret_error);
        if (status == TL_OK) status = op_name(item->key, item->part, buffer, &name, ret_error);
        if (status == TL_OK && item->priority > TL_MAX_PRIORITY)
            status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the priority of %.64s is %u; it is 0 to %d",
                                  item->key, item->priority, TL_MAX_PRIORITY);
        if (status != TL_OK) return name_item(i, status, ret_error);
        *ret_keys_bytes += strlen(name) + 1;
    }
    return status;
}

/* Brings the destination of a later item into the processor's caches, if there is one. */
static void prefetch_destination(const struct receives *call, size_t place)
{
    if (place >= call->count) return;
    const struct tl_recv_item *item = item_at(call->items, place, call->options.item_bytes);
    if (item->destination != NULL) tl_tensor_prefetch(item->destination);
}

static enum tl_status init_receives(struct op_group *group, const struct receives *call, char *keys,
                                    struct tl_error *ret_error)
{
    struct tl_recv_item copy;
    const struct tl_recv_item *item;
    char buffer[TL_MAX_KEY_BYTES + 1];
    const char *name = NULL;
    for (size_t i = 0; i < call->count; i++) {
        enum tl_status status = read_recv_item(call, i, &copy, &item, ret_error);
        if (status == TL_OK) name = item->key;
        if (status == TL_OK && item->part != NULL) status = op_name(item->key, item->part, buffer, &name, ret_error);
        struct tl_op *op = op_group_add(group, i);
        prefetch_destination(call, i + PREFETCHED_AHEAD);
        if (status == TL_OK) {
            const struct tl_recv_options options = {.size_bytes = sizeof(options),
                                                    .destination = item->destination,
                                                    .wants_checksum = call->options.wants_checksum,
                                                    .may_map = call->options.may_map && item->destination == NULL,
                                                    .device = call->options.device,
                                                    .part = item->part};
            status = tl_op_receive_init(op, call->peer, copy_key(&keys, name), item->step, &options, ret_error);
        }
        if (status != TL_OK) {
            (void)name_item(i, status, ret_error);
            while (i-- > 0)
                tl_op_receive_fini(op_group_member(group, i));
            return status;
        }
        op->receive.request.fetch.priority = (uint8_t)item->priority;
        op->user_data = item->user_data;
        op_group_note_step(group, item->step);
    }
    return TL_OK;
}

static enum tl_status create_receives(struct tl_worker *worker, tl_peer_id peer, const struct tl_recv_item *items,
                                      size_t count, const struct tl_recv_many_options *options, int64_t timeout_ns,
                                      struct op_group **ret_group, struct tl_error *ret_error)
{
    struct receives call = {.items = items, .count = count};
    size_t keys_bytes = 0;
    enum tl_status status = check_receives(worker, peer, options, &call, &keys_bytes, ret_error);
    const struct op_group_options group_options = {.kind = TL_OP_RECV_MANY,
                                                   .timeout_ns = timeout_ns,
                                                   .over_ns = call.options.group_timeout_ns,
                                                   .min_count = call.options.min_count,
                                                   .rest = call.options.rest};
    char *keys;
    if (status == TL_OK)
        status = op_group_create(worker, count, keys_bytes, &group_options, ret_group, &keys, ret_error);
    if (status == TL_OK) {
        status = init_receives(*ret_group, &call, keys, ret_error);
        if (status != TL_OK) op_group_discard(*ret_group);
    }
    tl_peer_release(call.peer);
    return status;
}

enum tl_status tl_recv_many(struct tl_worker *worker, tl_peer_id peer, const struct tl_recv_item *items, size_t count,
                            const struct tl_recv_many_options *options, int64_t timeout_ns, struct tl_cq *cq,
                            void *user_data, tl_op_id *ret_group, struct tl_error *ret_error)
{
    struct op_group *group;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_receives(worker, peer, items, count, options, timeout_ns, &group, ret_error);
    if (status != TL_OK) return status;
    tl_op_id id = op_group_submit(group, cq, user_data);
    if (ret_group != NULL) *ret_group = id;
    return TL_OK;
}

/* Fills completions of operations that were not begun. */
static enum tl_status fail_all(struct tl_completion *completions, size_t count, enum tl_op_kind kind,
                               enum tl_status status, const struct tl_error *error)
{
    for (size_t i = 0; completions != NULL && i < count; i++) {
        completions[i] = (struct tl_completion){
            .size_bytes = sizeof(completions[i]), .kind = kind, .item = i, .path_reason = "", .status.code = status};
        if (error != NULL) completions[i].status = *error;
    }
    return status;
}

enum tl_status tl_recv_many_wait(struct tl_worker *worker, tl_peer_id peer, const struct tl_recv_item *items,
                                 size_t count, const struct tl_recv_many_options *options, int64_t timeout_ns,
                                 struct tl_completion *ret_completions, struct tl_error *ret_error)
{
    struct op_group *group;
    enum tl_status status;
    if (options != NULL && options->size_bytes >= TL_RECV_MANY_OPTIONS_FIRST_BYTES && options->rest == TL_REST_LEAVE) {
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                              "the rest cannot be left to go on when the call waits for it; use tl_recv_many");
    } else {
        status = create_receives(worker, peer, items, count, options, timeout_ns, &group, ret_error);
    }
    if (status != TL_OK) return fail_all(ret_completions, count, TL_OP_RECV, status, ret_error);
    return op_group_run(group, ret_completions, ret_error);
}

/* ----------------------------------------------------------------------------------------------------- sending -- */

static enum tl_status read_send_item(const void *items, size_t place, size_t item_bytes, struct tl_send_item *ret_item,
                                     struct tl_error *ret_error)
{
    return tl_struct_read_sized(ret_item, sizeof(*ret_item), TL_SEND_ITEM_FIRST_BYTES,
                                item_at(items, place, item_bytes), item_bytes, "tl_send_item", ret_error);
}

static enum tl_status check_send_item(const void *items, size_t place, size_t item_bytes, size_t *ret_keys_bytes,
                                      struct tl_error *ret_error)
{
    struct tl_send_item item;
    enum tl_status status = read_send_item(items, place, item_bytes, &item, ret_error);
    if (status == TL_OK) status = op_check_key(item.key, ret_error);
    if (status == TL_OK && item.tensor == NULL)
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "there is no tensor for %.64s", item.key);
    if (status != TL_OK) return name_item(place, status, ret_error);
    *ret_keys_bytes += strlen(item.key) + 1;
    return TL_OK;
}

/* The memory begins with the places of all members' aliases. The keys come behind them. */
static enum tl_status init_sends(struct op_group *group, const void *items, size_t count, size_t item_bytes,
                                 char *memory, struct tl_error *ret_error)
{
    struct tl_send_item item = {.key = NULL};
    char *keys = memory + count * tl_tensor_place_bytes;
    for (size_t i = 0; i < count; i++) {
        struct tl_op *op = op_group_add(group, i);
        enum tl_status status = read_send_item(items, i, item_bytes, &item, ret_error);
        if (status == TL_OK)
            status = tl_op_send_init(op, memory + i * tl_tensor_place_bytes, copy_key(&keys, item.key), item.step,
                                     item.tensor, ret_error);
        if (status != TL_OK) {
            (void)name_item(i, status, ret_error);
            while (i-- > 0)
                tl_op_send_discard(op_group_member(group, i));
            return status;
        }
        op->user_data = item.user_data;
        op_group_note_step(group, item.step);
    }
    return TL_OK;
}

static enum tl_status create_sends(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                                   const struct tl_send_many_options *caller_options, int64_t timeout_ns,
                                   struct op_group **ret_group, struct tl_error *ret_error)
{
    struct tl_send_many_options options;
    size_t keys_bytes = 0;
    if (caller_options == NULL)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "struct tl_send_many_options is missing");
    enum tl_status status = tl_struct_read(&options, sizeof(options), TL_SEND_MANY_OPTIONS_FIRST_BYTES, caller_options,
                                           "tl_send_many_options", ret_error);
    if (status == TL_OK)
        status = tl_struct_check_item_bytes(options.item_bytes, TL_SEND_ITEM_FIRST_BYTES, "tl_send_item", ret_error);
    for (size_t i = 0; status == TL_OK && i < count; i++)
        status = check_send_item(items, i, options.item_bytes, &keys_bytes, ret_error);
    if (status != TL_OK) return status;
    const struct op_group_options group_options = {
        .kind = TL_OP_SEND_MANY, .timeout_ns = timeout_ns, .is_quiet = options.is_quiet};
    size_t memory_bytes = count * tl_tensor_place_bytes + keys_bytes; /* no overflow: all items are in memory */
    char *memory;
    status = op_group_create(worker, count, memory_bytes, &group_options, ret_group, &memory, ret_error);
    if (status == TL_OK) {
        status = init_sends(*ret_group, items, count, options.item_bytes, memory, ret_error);
        if (status != TL_OK) op_group_discard(*ret_group);
    }
    return status;
}

enum tl_status tl_send_many(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                            const struct tl_send_many_options *options, int64_t timeout_ns, struct tl_cq *cq,
                            void *user_data, tl_op_id *ret_group, struct tl_error *ret_error)
{
    struct op_group *group;
    enum tl_status status = tl_cq_attach(cq, &worker->progress, ret_error);
    if (status == TL_OK) status = create_sends(worker, items, count, options, timeout_ns, &group, ret_error);
    if (status != TL_OK) return status;
    tl_op_id id = op_group_submit(group, cq, user_data);
    if (ret_group != NULL) *ret_group = id;
    return TL_OK;
}

enum tl_status tl_send_many_wait(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                                 const struct tl_send_many_options *options, int64_t timeout_ns,
                                 struct tl_completion *ret_completions, struct tl_error *ret_error)
{
    struct op_group *group;
    enum tl_status status = create_sends(worker, items, count, options, timeout_ns, &group, ret_error);
    if (status != TL_OK) return fail_all(ret_completions, count, TL_OP_SEND, status, ret_error);
    return op_group_run(group, ret_completions, ret_error);
}
