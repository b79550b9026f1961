// SPDX-License-Identifier: Apache-2.0
/*
 * Deliveries.
 *
 *   FENCED --reached--> ALLOCATING --allocated--> COPYING --over--> (done)
 *      \  \---------the tensor is there-------------^              ^
 *       \-----------the value lies where it is wanted--------------/
 */
#include "tensor/delivery.h"

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/allocation.h"
#include "tensor/piece.h"
#include "tensor/tensor.h"
#include "tensor/tensor_copy.h"

struct tl_delivery {
    struct tl_delivery_options options;
    struct tl_piece *fence;           /* FENCED: waits for it; NULL: not in this state */
    struct tl_allocation *allocation; /* ALLOCATING; else NULL */
    struct tl_tensor *target;         /* what is copied to, or the value itself; NULL: not known yet */
};

static void destroy(struct tl_delivery *delivery)
{
    tl_tensor_put(delivery->target);
    tl_tensor_put(delivery->options.value);
    tl_tensor_put(delivery->options.destination);
    free(delivery);
}

static void end(struct tl_delivery *delivery, const struct tl_error *status)
{
    struct tl_tensor *tensor = status->code == TL_OK ? tl_tensor_get(delivery->target) : NULL;
    delivery->options.done(delivery->options.context, tensor, status);
    destroy(delivery);
}

static void copied(void *context, const struct tl_error *status)
{
    end(context, status);
}

static void start_copy(struct tl_delivery *delivery)
{
    const struct tl_copying_options options = {.to = delivery->target,
                                               .from = delivery->options.value,
                                               .post = delivery->options.post,
                                               .loop = delivery->options.loop,
                                               .done = copied,
                                               .context = delivery};
    struct tl_error error;
    if (tl_copying_start(&options, &error) != TL_OK) end(delivery, &error);
}

static void allocated(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    struct tl_delivery *delivery = context;
    delivery->allocation = NULL;
    delivery->target = tensor;
    if (status->code == TL_OK) {
        start_copy(delivery);
    } else {
        end(delivery, status);
    }
}

static void allocate(struct tl_delivery *delivery)
{
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(delivery->options.value);
    const struct tl_allocation_options options = {.device = delivery->options.device,
                                                  .meta_data = meta_data,
                                                  .post = delivery->options.post,
                                                  .loop = delivery->options.loop,
                                                  .done = allocated,
                                                  .context = delivery};
    struct tl_error error = {.code = TL_OK};
    if (delivery->options.device.kind == TL_DEVICE_HOST) {
        struct tl_tensor *tensor = NULL;
        enum tl_status status = tl_tensor_create_for(meta_data, &tensor, &error);
        TL_CHECK(status == error.code);
        allocated(delivery, tensor, &error);
        return;
    }
    delivery->allocation = tl_allocation_start(&options);
    if (delivery->allocation) return;
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory to deliver a tensor");
    end(delivery, &error);
}

static bool is_where_wanted(const struct tl_delivery *delivery)
{
    struct tl_device device = tl_tensor_device(delivery->options.value), wanted = delivery->options.device;
    return device.kind == wanted.kind && device.index == wanted.index;
}

static void go_on(struct tl_delivery *delivery)
{
    static const struct tl_error success = {.code = TL_OK};
    if (delivery->options.destination) {
        delivery->target = tl_tensor_get(delivery->options.destination);
        start_copy(delivery);
    } else if (is_where_wanted(delivery)) {
        delivery->target = tl_tensor_get(delivery->options.value);
        end(delivery, &success);
    } else {
        allocate(delivery);
    }
}

/* The stream of the value has come far enough, or never will. */
static void reached(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct tl_delivery *delivery = context;
    delivery->fence = NULL;
    if (status->code == TL_OK) {
        go_on(delivery);
    } else {
        end(delivery, status);
    }
    tl_piece_put(piece);
}

static bool wait_for_fence(struct tl_delivery *delivery)
{
    const struct tl_piece_options options = {.tensor = delivery->options.value,
                                             .after = tl_tensor_fence(delivery->options.value),
                                             .post = delivery->options.post,
                                             .loop = delivery->options.loop,
                                             .notify = reached,
                                             .context = delivery};
    delivery->fence = tl_piece_read(&options);
    return delivery->fence != NULL;
}

bool tl_delivery_start(const struct tl_delivery_options *options, struct tl_delivery **ret_delivery)
{
    struct tl_delivery *delivery = tl_alloc_zeroed(sizeof(*delivery));
    if (!delivery) return false;
    delivery->options = *options;
    tl_tensor_get(options->value);
    if (options->destination) tl_tensor_get(options->destination);
    bool is_fenced = tl_tensor_fence(options->value) != NULL;
    if (is_fenced && !wait_for_fence(delivery)) {
        destroy(delivery);
        return false;
    }
    *ret_delivery = delivery;
    if (!is_fenced) go_on(delivery);
    return true;
}

bool tl_delivery_stop(struct tl_delivery *delivery)
{
    if (!delivery->fence && !delivery->allocation) return false;
    tl_piece_put(delivery->fence);
    tl_allocation_put(delivery->allocation);
    destroy(delivery);
    return true;
}

bool tl_delivery_is_fenced(const struct tl_delivery *delivery)
{
    return delivery->fence != NULL;
}
