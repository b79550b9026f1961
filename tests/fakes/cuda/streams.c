// SPDX-License-Identifier: Apache-2.0
/* Streams, and the thread that runs what is in them. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fakes/cuda/state.h"

#define MAX_DELAY_US 150

struct stream *state_streams;

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t last_number;
static uint64_t random_state = 1;
static bool is_all_held;
static bool is_running; /* a kernel, without the mutex */
static bool is_started;

static uint64_t draw(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void streams_set_seed(uint64_t seed)
{
    random_state = seed * 2 + 1;
}

/* ------------------------------------------------------------------------------------------------------ engine -- */

/* Whether the legacy stream and the blocking ones let the first op of a stream run. */
static bool is_in_order(const struct stream *stream)
{
    if (!stream->is_blocking) return true;
    for (const struct stream *other = state_streams; other; other = other->next) {
        if (other == stream || other->device != stream->device || !other->is_blocking || !other->first) continue;
        if ((stream->is_legacy || other->is_legacy) && other->first->number < stream->first->number) return false;
    }
    return true;
}

static bool is_runnable(const struct stream *stream)
{
    return stream->first && !stream->is_held && !is_all_held && is_in_order(stream);
}

/* Draws one of the streams that can go on; NULL: there is none. */
static struct stream *choose(void)
{
    struct stream *chosen = NULL;
    uint64_t seen = 0;
    for (struct stream *stream = state_streams; stream; stream = stream->next)
        if (is_runnable(stream) && draw() % ++seen == 0) chosen = stream;
    return chosen;
}

static void run_copy(const struct op *op, int device)
{
    memory_check_locked(op->to, op->len_bytes);
    memory_check_locked(op->from, op->len_bytes);
    if (!op->is_between_devices) {
        memory_check_access_locked(op->to, device, TL_CUDA_ACCESS_READ_WRITE);
        memory_check_access_locked(op->from, device, TL_CUDA_ACCESS_READ);
    }
    memmove(memory_view_locked(op->to), memory_view_locked(op->from), op->len_bytes);
    state_counts.copies++;
    state_counts.copied_bytes += op->len_bytes;
}

static void run_first(struct stream *stream)
{
    struct op *op = stream->first;
    if (op->len_bytes > 0) run_copy(op, stream->device);
    if (op->event && op->event->reached < op->number) op->event->reached = op->number;
    if (op->run) {
        is_running = true;
        pthread_mutex_unlock(&state_mutex);
        op->run(op->context);
        pthread_mutex_lock(&state_mutex);
        is_running = false;
    }
    if (stream->first != op) return; /* the device broke, and took it away */
    stream->first = op->next;
    if (!stream->first) stream->end = &stream->first;
    free(op);
}

static void *run_engine(void *unused)
{
    pthread_mutex_lock(&state_mutex);
    for (;;) {
        if (!choose()) {
            pthread_cond_wait(&changed, &state_mutex);
            continue;
        }
        useconds_t delay_us = (useconds_t)(draw() % MAX_DELAY_US);
        pthread_mutex_unlock(&state_mutex);
        usleep(delay_us);
        pthread_mutex_lock(&state_mutex);
        struct stream *stream = choose();
        if (stream) run_first(stream);
        pthread_cond_broadcast(&changed);
    }
    return unused;
}

/* ----------------------------------------------------------------------------------------------------- streams -- */

struct stream *stream_create_locked(int device, bool is_blocking, bool is_foreign)
{
    struct stream *stream = calloc(1, sizeof(*stream));
    *stream =
        (struct stream){.next = state_streams, .device = device, .is_blocking = is_blocking, .is_foreign = is_foreign};
    stream->end = &stream->first;
    state_streams = stream;
    if (!is_foreign) state_counts.streams++;
    return stream;
}

struct stream *stream_find_locked(void *handle, int device)
{
    struct stream **own = (uintptr_t)handle == 1 ? &state_devices[device].legacy : &this_thread.own[device];
    if ((uintptr_t)handle == 1 || (uintptr_t)handle == 2) {
        if (!*own) *own = stream_create_locked(device, true, true);
        (*own)->is_legacy = (uintptr_t)handle == 1;
        return *own;
    }
    for (struct stream *stream = state_streams; stream; stream = stream->next)
        if (stream == handle) return stream;
    return NULL;
}

void stream_push_locked(struct stream *stream, struct op op)
{
    struct op *added = malloc(sizeof(*added));
    op.number = ++last_number;
    op.next = NULL;
    *added = op;
    if (op.event) op.event->recorded = op.number;
    *stream->end = added;
    stream->end = &added->next;
    if (!is_started) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_engine, NULL) != 0) misuse("the double has no thread");
        pthread_detach(thread);
        is_started = true;
    }
    pthread_cond_broadcast(&changed);
}

static bool has_before(int device, uint64_t number)
{
    for (const struct stream *stream = state_streams; stream; stream = stream->next)
        if (stream->device == device && stream->first && stream->first->number <= number) return true;
    return false;
}

void streams_wait_locked(int device)
{
    uint64_t number = last_number;
    while (has_before(device, number))
        pthread_cond_wait(&changed, &state_mutex);
}

void streams_drop_locked(int device)
{
    for (struct stream *stream = state_streams; stream; stream = stream->next) {
        if (stream->device != device) continue;
        while (stream->first) {
            struct op *op = stream->first;
            stream->first = op->next;
            if (!is_running) free(op); /* one that runs is still looked at */
        }
        stream->end = &stream->first;
    }
    pthread_cond_broadcast(&changed);
}

void stream_hold_locked(struct stream *stream, bool is_held)
{
    stream->is_held = is_held;
    pthread_cond_broadcast(&changed);
}

void streams_hold(void *handle, bool is_held)
{
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = handle ? stream_find_locked(handle, fake_cuda_device_here()) : NULL;
    *(stream ? &stream->is_held : &is_all_held) = is_held;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&state_mutex);
}

struct stream *streams_captured_locked(int device)
{
    for (struct stream *stream = state_streams; stream; stream = stream->next)
        if (stream->is_capturing && stream->is_blocking && stream->device == device) return stream;
    return NULL;
}
