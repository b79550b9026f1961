// SPDX-License-Identifier: Apache-2.0
/*
 * Where a receive puts its value: into the caller's destination, into memory that the transport chooses, or into new
 * memory of a device, whose allocation is waited for.
 */
#include "base/error.h"
#include "server/transfers/operation_internal.h"

enum tl_status op_place_in_box(struct tl_op *op, struct tl_tensor *destination, const struct tl_part *part,
                               struct tl_error *ret_error)
{
    struct tl_box box = {.rank = part->rank};
    uint64_t unused;
    if (destination == NULL || part->size == NULL || part->rank > TL_MAX_RANK)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "destination_start needs a destination, and a box in at most %u dimensions", TL_MAX_RANK);
    for (unsigned i = 0; i < part->rank; i++) {
        box.start[i] = part->destination_start[i];
        box.size[i] = part->size[i];
    }
    const struct tl_meta_data *whole = tl_tensor_meta_data(destination);
    enum tl_status status = tl_box_check(&box, whole, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "the destination: ");
        return status;
    }
    if (tl_tensor_is_on_device(destination) && !tl_box_is_dense(&box, whole, &unused))
        return tl_error_set(ret_error, TL_UNIMPLEMENTED,
                            "the box of the destination is not in one piece, and lies on a device");
    status = tl_tensor_create_box(destination, &box, false, &op->tensor, ret_error);
    if (status == TL_OK) op->receive.rare->whole = tl_tensor_get(destination);
    return status;
}

struct tl_tensor *op_settle_in_box(struct tl_op *op, struct tl_tensor *value)
{
    struct op_receive_rare *rare = op->receive.rare;
    if (rare == NULL || rare->whole == NULL) return value;
    struct tl_tensor *whole = rare->whole;
    rare->whole = NULL;
    tl_tensor_put(value);
    return whole;
}

enum tl_status op_check_destination(const struct tl_op *op, const struct tl_meta_data *meta_data,
                                    struct tl_error *ret_error)
{
    const struct tl_meta_data *wanted = tl_tensor_meta_data(op->tensor);
    if (!meta_data->is_dead && meta_data->dtype != TL_STRING && tl_meta_data_is_equal(wanted, meta_data)) return TL_OK;
    char wanted_shape[TL_SHAPE_TEXT_BYTES];
    char shape[TL_SHAPE_TEXT_BYTES];
    char name[TL_MAX_NAME_BYTES];
    tl_shape_format(&wanted->shape, wanted_shape, sizeof(wanted_shape));
    tl_shape_format(&meta_data->shape, shape, sizeof(shape));
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "%s of %s is %s%s %s and does not fit the destination, which is %s %s", op_key(op),
                        tl_peer_copy_name(op->receive.request.peer, name), meta_data->is_dead ? "dead, " : "",
                        tl_dtype_name(meta_data->dtype), shape, tl_dtype_name(wanted->dtype), wanted_shape);
}

void op_post_to_progress(void *loop, struct tl_closure *closure)
{
    tl_progress_post(loop, closure);
}

/* An allocation has ended. The fetch may have ended before it, to be started again. */
static void allocation_ended(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    struct tl_op *op = context;
    struct op_receive_rare *rare = op->receive.rare;
    struct tl_fetch *fetch = &op->receive.request.fetch;
    struct tl_error error = *status;
    if (error.code != TL_OK) tl_error_prefix(&error, "tensor '%s': ", op_key(op));
    rare->allocation = NULL;
    rare->allocated = tensor;
    if (!rare->is_place_awaited) return;
    rare->is_place_awaited = false;
    fetch->placed(fetch, &error);
}

static enum tl_status start_allocation(struct tl_op *op, const struct tl_meta_data *meta_data,
                                       struct tl_error *ret_error)
{
    const struct tl_allocation_options options = {.device = op->receive.rare->device,
                                                  .meta_data = meta_data,
                                                  .post = op_post_to_progress,
                                                  .loop = &op_worker(op)->progress,
                                                  .done = allocation_ended,
                                                  .context = op};
    op->receive.rare->allocation = tl_allocation_start(&options);
    if (op->receive.rare->allocation != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "tensor '%s': no memory for its allocation", op_key(op));
}

void op_drop_allocation(struct op_receive_rare *rare)
{
    tl_allocation_put(rare->allocation);
    rare->allocation = NULL;
    tl_tensor_put(rare->allocated);
    rare->allocated = NULL;
}

/* Finds the new tensor on a device, or leaves it for later. One that was allocated for a connection that broke is used
 * if it fits. */
static enum tl_status place_on_device(struct tl_op *op, const struct tl_meta_data *meta_data,
                                      struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct op_receive_rare *rare = op->receive.rare;
    const struct tl_meta_data *former = rare->allocated != NULL    ? tl_tensor_meta_data(rare->allocated)
                                        : rare->allocation != NULL ? tl_allocation_meta_data(rare->allocation)
                                                                   : NULL;
    if (former != NULL && !tl_meta_data_is_equal(former, meta_data)) op_drop_allocation(rare);
    *ret_destination = rare->allocated;
    rare->allocated = NULL;
    if (*ret_destination != NULL) return TL_OK;
    enum tl_status status = rare->allocation != NULL ? TL_OK : start_allocation(op, meta_data, ret_error);
    rare->is_place_awaited = status == TL_OK;
    return status;
}

struct tl_device op_device_for(const struct tl_op *op, const struct tl_meta_data *meta_data)
{
    const struct op_receive_rare *rare = op->receive.rare;
    if (op->tensor != NULL) return tl_tensor_device(op->tensor);
    if (rare == NULL || meta_data->is_dead || meta_data->dtype == TL_STRING)
        return (struct tl_device){.kind = TL_DEVICE_HOST};
    return rare->device;
}

enum tl_status op_fetch_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                              struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct tl_op *op = TL_CONTAINER_OF(fetch, struct tl_op, receive.request.fetch);
    struct tl_device device = op_device_for(op, meta_data);
    const struct tl_allocator *allocator = fetch->allocator;
    enum tl_status status;
    if (op->tensor == NULL && device.kind != TL_DEVICE_HOST && allocator == NULL)
        return place_on_device(op, meta_data, ret_destination, ret_error);
    if (op->tensor == NULL) {
        status = allocator != NULL
                     ? allocator->create(allocator->context, device, meta_data, ret_destination, ret_error)
                     : tl_tensor_create_for(meta_data, ret_destination, ret_error);
        if (status != TL_OK) tl_error_prefix(ret_error, "tensor '%s': ", op_key(op));
        return status;
    }
    status = op_check_destination(op, meta_data, ret_error);
    if (status == TL_OK) *ret_destination = tl_tensor_get(op->tensor);
    return status;
}
