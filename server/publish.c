// SPDX-License-Identifier: Apache-2.0
/*
 * Publications of this program. The loop's owner puts them into the table, so that of two publications under one key
 * the version that is checked is the one that is replaced.
 */
#include "base/error.h"
#include "base/struct_version.h"
#include "server/transfers/operation_internal.h"
#include "tensor/device.h"

/* No more tensors are published in one round of the loop. */
#define ROUND_ITEMS 512

/* Returns what the table shows: the tensor, or for one on a device an alias with the fence of its stream. */
static enum tl_status show(struct tl_tensor *tensor, struct tl_tensor **ret_shown, struct tl_error *ret_error)
{
    struct tl_device_fence *fence = NULL;
    enum tl_status status = tl_tensor_record_fence(tensor, &fence, ret_error);
    if (status != TL_OK) return status;
    if (!tl_tensor_is_on_device(tensor)) {
        *ret_shown = tl_tensor_get(tensor);
        return TL_OK;
    }
    status = tl_tensor_create_alias(tensor, NULL, NULL, ret_shown, ret_error);
    if (status == TL_OK) {
        tl_tensor_set_fence(*ret_shown, fence);
    } else {
        tl_device_fence_put(fence);
    }
    return status;
}

struct publish_command {
    struct tl_command command;
    const struct tl_send_item *items; /* [count] */
    size_t count;
    size_t done_count;
    enum tl_status status;
    struct tl_error *ret_error;
};

/* Subscriptions and receives of this worker copy what is published, which uses the quota. */
static void run_publish(struct tl_command *command)
{
    struct publish_command *publish = TL_CONTAINER_OF(command, struct publish_command, command);
    const struct tl_quota *quota = tl_loop_quota(command->worker->loop);
    while (publish->done_count < publish->count && publish->status == TL_OK) {
        command->is_unfinished = tl_quota_left(quota) == 0;
        if (command->is_unfinished) return;
        const struct tl_send_item *item = &publish->items[publish->done_count];
        publish->status = tl_rendezvous_publish(command->worker->table, item->key, item->step, item->tensor, NULL,
                                                publish->ret_error);
        if (publish->status == TL_OK) publish->done_count++;
    }
}

/* Publishes tensors as the table shows them. */
static enum tl_status publish_shown(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                                    size_t *ret_count, struct tl_error *ret_error)
{
    struct publish_command publish = {.items = items, .count = count, .ret_error = ret_error};
    tl_worker_run(worker, &publish.command, run_publish);
    *ret_count = publish.done_count;
    return publish.status;
}

enum tl_status tl_publish(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                          struct tl_error *ret_error)
{
    struct tl_send_item item = {.key = key, .step = step};
    size_t count;
    enum tl_status status = op_check_key(key, ret_error);
    if (status == TL_OK) status = show(tensor, &item.tensor, ret_error);
    if (status != TL_OK) return status;
    status = publish_shown(worker, &item, 1, &count, ret_error);
    tl_tensor_put(item.tensor);
    return status;
}

/* ------------------------------------------------------------------------------------------------ many at once -- */

static enum tl_status read_item(const struct tl_send_item *items, size_t place, size_t item_bytes,
                                struct tl_send_item *ret_item, struct tl_error *ret_error)
{
    const void *theirs = (const unsigned char *)items + place * item_bytes;
    enum tl_status status = tl_struct_read_sized(ret_item, sizeof(*ret_item), TL_SEND_ITEM_FIRST_BYTES, theirs,
                                                 item_bytes, "tl_send_item", ret_error);
    if (status == TL_OK) status = op_check_key(ret_item->key, ret_error);
    if (status == TL_OK && ret_item->tensor == NULL)
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "there is no tensor for %.64s", ret_item->key);
    return status;
}

static enum tl_status name_item(size_t place, enum tl_status status, struct tl_error *ret_error)
{
    if (status != TL_OK && ret_error != NULL) tl_error_prefix(ret_error, "item %zu: ", place);
    return status;
}

/* Publishes the items from first on, at most ROUND_ITEMS of them. */
static enum tl_status publish_some(struct tl_worker *worker, const struct tl_send_item *items, size_t first,
                                   size_t count, size_t item_bytes, size_t *ret_count, struct tl_error *ret_error)
{
    struct tl_send_item shown[ROUND_ITEMS];
    enum tl_status problem = TL_OK, status = TL_OK;
    struct tl_error error;
    size_t shown_count = 0;
    while (problem == TL_OK && shown_count < ROUND_ITEMS && first + shown_count < count) {
        struct tl_send_item *item = &shown[shown_count];
        problem = read_item(items, first + shown_count, item_bytes, item, &error);
        if (problem == TL_OK) problem = show(item->tensor, &item->tensor, &error);
        if (problem == TL_OK) shown_count++;
    }
    *ret_count = 0;
    if (shown_count > 0) status = publish_shown(worker, shown, shown_count, ret_count, ret_error);
    for (size_t i = 0; i < shown_count; i++)
        tl_tensor_put(shown[i].tensor);
    if (status == TL_OK && problem != TL_OK) status = tl_error_copy(ret_error, &error);
    return name_item(first + *ret_count, status, ret_error);
}

enum tl_status tl_publish_many(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                               size_t item_bytes, size_t *ret_count, struct tl_error *ret_error)
{
    enum tl_status status = tl_struct_check_item_bytes(item_bytes, TL_SEND_ITEM_FIRST_BYTES, "tl_send_item", ret_error);
    struct tl_send_item item;
    size_t done_count = 0, round_count;
    for (size_t i = 0; i < count && status == TL_OK; i++)
        status = name_item(i, read_item(items, i, item_bytes, &item, ret_error), ret_error);
    while (done_count < count && status == TL_OK) {
        status = publish_some(worker, items, done_count, count, item_bytes, &round_count, ret_error);
        done_count += round_count;
    }
    if (ret_count != NULL) *ret_count = done_count;
    return status;
}

/* ------------------------------------------------------------------------------------------------- withdrawing -- */

struct withdraw_command {
    struct tl_command command;
    const char *key;
    enum tl_status status;
    struct tl_error *ret_error;
};

static void run_withdraw(struct tl_command *command)
{
    struct withdraw_command *withdraw = TL_CONTAINER_OF(command, struct withdraw_command, command);
    withdraw->status = tl_rendezvous_withdraw(command->worker->table, withdraw->key, withdraw->ret_error);
}

enum tl_status tl_withdraw(struct tl_worker *worker, const char *key, struct tl_error *ret_error)
{
    enum tl_status status = op_check_key(key, ret_error);
    if (status != TL_OK) return status;
    struct withdraw_command withdraw = {.key = key, .ret_error = ret_error};
    tl_worker_run(worker, &withdraw.command, run_withdraw);
    return withdraw.status;
}
