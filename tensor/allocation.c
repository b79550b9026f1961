// SPDX-License-Identifier: Apache-2.0
/*
 * Allocations. The thread of the device posts the closure, which calls `done`, under the mutex, and giving up takes the
 * same mutex. So either the closure was posted before, and frees the allocation when it runs, or nothing will be posted
 * any more, and the thread of the device frees it.
 */
#include "tensor/allocation.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/tensor.h"

struct tl_allocation {
    struct tl_allocation_options options;
    struct tl_meta_data meta_data;
    struct tl_device_request request;
    struct tl_closure closure;
    struct tl_tensor *tensor;       /* what was allocated; NULL: nothing yet */
    const struct tl_error *failure; /* kept; NULL: none */
    pthread_mutex_t mutex;
    bool is_given_up; /* under the mutex */
};

static void destroy(struct tl_allocation *allocation)
{
    tl_tensor_put(allocation->tensor);
    tl_error_drop(allocation->failure);
    TL_CHECK(pthread_mutex_destroy(&allocation->mutex) == 0);
    free(allocation);
}

static void deliver(struct tl_closure *closure)
{
    static const struct tl_error success = {.code = TL_OK};
    struct tl_allocation *allocation = TL_CONTAINER_OF(closure, struct tl_allocation, closure);
    TL_CHECK(pthread_mutex_lock(&allocation->mutex) == 0);
    bool is_given_up = allocation->is_given_up;
    TL_CHECK(pthread_mutex_unlock(&allocation->mutex) == 0);
    if (!is_given_up) {
        struct tl_tensor *tensor = allocation->tensor;
        allocation->tensor = NULL;
        allocation->options.done(allocation->options.context, tensor,
                                 allocation->failure ? allocation->failure : &success);
    }
    destroy(allocation);
}

/* Thread: the device's. */
static void allocated(struct tl_device_request *request, struct tl_device_memory *memory, const struct tl_error *status)
{
    struct tl_allocation *allocation = TL_CONTAINER_OF(request, struct tl_allocation, request);
    struct tl_error error;
    enum tl_status code = memory ? tl_tensor_create_in(allocation->options.device, &allocation->meta_data, memory,
                                                       &allocation->tensor, &error)
                                 : tl_error_copy(&error, status);
    if (code != TL_OK) allocation->failure = tl_error_keep(&error);
    TL_CHECK(pthread_mutex_lock(&allocation->mutex) == 0);
    bool is_given_up = allocation->is_given_up;
    if (!is_given_up) allocation->options.post(allocation->options.loop, &allocation->closure);
    TL_CHECK(pthread_mutex_unlock(&allocation->mutex) == 0);
    if (is_given_up) destroy(allocation);
}

struct tl_allocation *tl_allocation_start(const struct tl_allocation_options *options)
{
    struct tl_allocation *allocation = tl_alloc_zeroed(sizeof(*allocation));
    if (!allocation) return NULL;
    TL_CHECK(pthread_mutex_init(&allocation->mutex, NULL) == 0);
    allocation->options = *options;
    allocation->closure.run = deliver;
    tl_list_init(&allocation->closure.link);
    tl_meta_data_copy(&allocation->meta_data, options->meta_data);
    allocation->request = (struct tl_device_request){
        .device = options->device, .size_bytes = options->meta_data->size_bytes, .done = allocated};
    tl_device_memory_request(&allocation->request);
    return allocation;
}

const struct tl_meta_data *tl_allocation_meta_data(const struct tl_allocation *allocation)
{
    return &allocation->meta_data;
}

void tl_allocation_put(struct tl_allocation *allocation)
{
    if (!allocation) return;
    TL_CHECK(pthread_mutex_lock(&allocation->mutex) == 0);
    allocation->is_given_up = true;
    TL_CHECK(pthread_mutex_unlock(&allocation->mutex) == 0);
}
