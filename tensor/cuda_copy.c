// SPDX-License-Identifier: Apache-2.0
/*
 * The thread of a device that makes copies.
 *
 *     posted --taken--> waiting --fences reached--> running --event reached--> done
 *
 * A copy waits for its fences here and not in a stream, so that a kernel of the caller that takes long holds up nothing
 * but the copies behind it. A running copy lies in one of two streams, one for each direction, and an event is recorded
 * behind it. The thread polls events; between looks that find nothing it naps, for longer and longer. It uses no host
 * functions, because CUDA does not run them after an error.
 *
 * A copy that may run is never reported as over: when an event cannot be recorded or asked, the stream is waited for.
 */
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "tensor/cuda_internal.h"

#define MIN_NAP_NS (10 * 1000)
#define MAX_NAP_NS (500 * 1000)

static const struct tl_error success = {.code = TL_OK};

static void finish(struct tl_device_copy *copy, const struct tl_error *status)
{
    tl_device_fence_put(copy->finished);
    copy->finished = NULL;
    copy->done(copy, status);
}

/* Waits until the stream is empty, because it is unknown how far it is, and reports what went wrong. */
static void fail_running(struct tl_cuda_device *device, struct tl_device_copy *copy, void *stream, tl_cuda_error error)
{
    struct tl_error status;
    (void)device->cuda->cudaStreamSynchronize(stream);
    (void)tl_cuda_fail(device, error, &status, "a copy");
    finish(copy, &status);
}

/* ----------------------------------------------------------------------------------------------------- waiting -- */

/* Looks at the fences of a copy. Returns whether it need not wait any more: both are reached, or one has failed, of
 * whichever device, which *ret_failed then says. */
static bool has_waited(const struct tl_device_copy *copy, const struct tl_device_fence **ret_failed,
                       tl_cuda_error *ret_error)
{
    bool is_reached = true;
    for (unsigned i = 0; i < TL_ARRAY_COUNT(copy->after); i++) {
        const struct tl_device_fence *fence = copy->after[i];
        tl_cuda_error error = fence ? fence->device->cuda->cudaEventQuery(fence->event) : TL_CUDA_OK;
        if (error == TL_CUDA_NOT_READY) {
            is_reached = false;
        } else if (error != TL_CUDA_OK) {
            *ret_failed = fence;
            *ret_error = error;
            return true;
        }
    }
    return is_reached;
}

static unsigned stream_of(const struct tl_device_copy *copy)
{
    return copy->is_to_host ? 1 : 0;
}

/* Puts a copy into its stream. */
static void issue(struct tl_cuda_device *device, struct tl_device_copy *copy)
{
    const struct tl_cuda *cuda = device->cuda;
    unsigned number = stream_of(copy);
    void *stream = device->streams[number];
    struct tl_error status;
    tl_cuda_error error = tl_cuda_fence_take(device, &copy->finished);
    if (error != TL_CUDA_OK) {
        (void)tl_cuda_fail(device, error, &status, "a copy");
        finish(copy, &status);
        return;
    }
    /* The error can be one of something earlier, and the copy run all the same. */
    if (copy->from_device.kind == TL_DEVICE_HOST) {
        error = cuda->cudaMemcpyAsync(copy->to, copy->from, copy->len_bytes, TL_CUDA_COPY_DEFAULT, stream);
    } else { /* the only function that copies between devices what cudaMalloc has not allocated */
        error = cuda->cudaMemcpyPeerAsync(copy->to, copy->device.index, copy->from, copy->from_device.index,
                                          copy->len_bytes, stream);
    }
    if (error == TL_CUDA_OK) error = cuda->cudaEventRecord(copy->finished->event, stream);
    if (error == TL_CUDA_OK) {
        tl_list_push_back(&device->copies.running[number], &copy->link);
    } else {
        fail_running(device, copy, stream, error);
    }
}

/* Moves on the copies whose fences are reached. Returns whether there were any. */
static bool look_at_waiting(struct tl_cuda_device *device)
{
    bool did_work = false;
    TL_LIST_FOREACH_SAFE(&device->copies.waiting, link)
    {
        struct tl_device_copy *copy = TL_CONTAINER_OF(link, struct tl_device_copy, link);
        const struct tl_device_fence *failed;
        tl_cuda_error error = TL_CUDA_OK;
        if (!has_waited(copy, &failed, &error)) continue;
        did_work = true;
        tl_list_remove(&copy->link);
        if (error == TL_CUDA_OK && copy->len_bytes == 0) {
            finish(copy, &success);
            continue;
        }
        if (error == TL_CUDA_OK) {
            issue(device, copy);
            continue;
        }
        struct tl_error status;
        (void)tl_cuda_fail(failed->device, error, &status, "an event that a copy waited for");
        finish(copy, &status);
    }
    return did_work;
}

/* ----------------------------------------------------------------------------------------------------- running -- */

/* Reports the copies of a stream that are over. Returns whether there were any. */
static bool look_at_running(struct tl_cuda_device *device, unsigned number)
{
    struct tl_list *running = &device->copies.running[number];
    bool did_work = false;
    while (!tl_list_is_empty(running)) {
        struct tl_device_copy *copy = TL_CONTAINER_OF(running->next, struct tl_device_copy, link);
        tl_cuda_error error = device->cuda->cudaEventQuery(copy->finished->event);
        if (error == TL_CUDA_NOT_READY) break;
        did_work = true;
        tl_list_remove(&copy->link);
        if (error == TL_CUDA_OK) {
            finish(copy, &success);
        } else {
            fail_running(device, copy, device->streams[number], error);
        }
    }
    return did_work;
}

static bool has_copies(const struct tl_cuda_copies *copies)
{
    if (!tl_list_is_empty(&copies->waiting)) return true;
    for (unsigned i = 0; i < TL_CUDA_STREAMS; i++)
        if (!tl_list_is_empty(&copies->running[i])) return true;
    return false;
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

/* Takes what was posted; without copies it waits for some, else for at most nap_ns. */
static void take_posted(struct tl_cuda_copies *copies, int64_t nap_ns)
{
    TL_CHECK(pthread_mutex_lock(&copies->mutex) == 0);
    while (tl_list_is_empty(&copies->posted) && !has_copies(copies))
        pthread_cond_wait(&copies->wake, &copies->mutex);
    if (tl_list_is_empty(&copies->posted) && nap_ns > 0) {
        int64_t until_ns = tl_clock_deadline_ns(nap_ns);
        struct timespec until = {.tv_sec = until_ns / TL_NS_PER_SEC, .tv_nsec = until_ns % TL_NS_PER_SEC};
        (void)pthread_cond_timedwait(&copies->wake, &copies->mutex, &until);
    }
    tl_list_splice_back(&copies->waiting, &copies->posted);
    TL_CHECK(pthread_mutex_unlock(&copies->mutex) == 0);
}

/* Makes the device current, which is tried until it works. */
static tl_cuda_error get_ready(struct tl_cuda_device *device)
{
    if (device->copies.is_ready) return TL_CUDA_OK;
    tl_cuda_error error = tl_cuda_adopt_thread(device);
    device->copies.is_ready = error == TL_CUDA_OK;
    return error;
}

static void fail_waiting(struct tl_cuda_device *device, tl_cuda_error error)
{
    struct tl_error status;
    struct tl_list *link;
    (void)tl_cuda_fail(device, error, &status, "making the device current");
    while ((link = tl_list_pop_front(&device->copies.waiting)) != NULL)
        finish(TL_CONTAINER_OF(link, struct tl_device_copy, link), &status);
}

static void *run(void *argument)
{
    struct tl_cuda_device *device = argument;
    int64_t nap_ns = 0;
    for (;;) {
        take_posted(&device->copies, nap_ns);
        tl_cuda_error error = get_ready(device);
        if (error != TL_CUDA_OK) {
            fail_waiting(device, error);
            continue;
        }
        bool did_work = look_at_waiting(device);
        for (unsigned i = 0; i < TL_CUDA_STREAMS; i++)
            did_work |= look_at_running(device, i);
        nap_ns = did_work || nap_ns == 0 ? MIN_NAP_NS : 2 * nap_ns;
        if (nap_ns > MAX_NAP_NS) nap_ns = MAX_NAP_NS;
    }
    return NULL;
}

void tl_cuda_copies_init(struct tl_cuda_copies *copies)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    TL_CHECK(pthread_mutex_init(&copies->mutex, NULL) == 0);
    TL_CHECK(pthread_cond_init(&copies->wake, &attributes) == 0);
    pthread_condattr_destroy(&attributes);
    tl_list_init(&copies->posted);
    tl_list_init(&copies->waiting);
    for (unsigned i = 0; i < TL_CUDA_STREAMS; i++)
        tl_list_init(&copies->running[i]);
}

enum tl_status tl_cuda_copies_start(struct tl_cuda_device *device, struct tl_error *ret_error)
{
    struct tl_cuda_copies *copies = &device->copies;
    pthread_t thread;
    if (copies->is_started) return TL_OK;
    enum tl_status status = tl_thread_start(copies->name, run, device, &thread, ret_error);
    copies->is_started = status == TL_OK;
    return status;
}

void tl_device_copy_start(struct tl_device_copy *copy)
{
    struct tl_cuda_copies *copies = &tl_cuda_device_of(copy->device)->copies;
    tl_list_init(&copy->link);
    copy->finished = NULL;
    TL_CHECK(pthread_mutex_lock(&copies->mutex) == 0);
    tl_list_push_back(&copies->posted, &copy->link);
    pthread_cond_signal(&copies->wake);
    TL_CHECK(pthread_mutex_unlock(&copies->mutex) == 0);
}
