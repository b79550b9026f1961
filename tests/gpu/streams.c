// SPDX-License-Identifier: Apache-2.0
/*
 * The order of streams, while kernels of other streams run: what a stream holds at the time of a call comes before the
 * bytes of a tensor are read or written, and what is launched after a completion sees its bytes.
 *
 * A kernel that runs for a tenth of a second is launched, and the call follows at once. The check says something
 * only if the kernel still runs when the call returns; otherwise it is made again with a kernel that runs longer.
 */
#include <stdio.h>
#include <stdlib.h>

#include "tests/gpu/check.h"
#include "tests/gpu/libcuda.h"

#define WORDS (MIB / sizeof(uint32_t))
#define SIZE_BYTES MIB
#define OLD 11u
#define NEW 22u
#define LOADS 2

/* 0.1 s, 1 s, 10 s */
static const uint64_t delays_ns[] = {100000000, 1000000000, 10000000000};
#define DELAY_COUNT (sizeof(delays_ns) / sizeof(delays_ns[0]))

struct scene {
    struct tl_worker *workers[2];
    struct tl_cq *cq;
    void *stream; /* as libcuda and DLPack number it */
    void *other;  /* another stream */
    void *memory; /* the tensor's, on gpu:0 */
    void *seen;   /* what kernels have seen there */
    uint64_t step;
    uint64_t delay_ns;
    bool was_running; /* the kernel, when the call returned */
};

/* One call after a kernel. Returns whether all bytes are right. */
typedef bool (*attempt_fn)(struct scene *scene);

static bool holds(const void *memory, uint32_t seed)
{
    struct tl_tensor *tensor = check_wrapped(0, (void *)memory, SIZE_BYTES, TL_STREAM_NONE);
    bool is_right = check_is_filled(tensor, seed);
    tl_tensor_put(tensor);
    return is_right;
}

static struct tl_tensor *tensor_of(struct scene *scene)
{
    return check_wrapped(0, scene->memory, SIZE_BYTES, (tl_stream)scene->stream);
}

static void fill_now(struct scene *scene, uint32_t seed)
{
    gpu_launch_fill(scene->stream, scene->memory, WORDS, seed, 0);
    gpu_wait(scene->stream);
}

static void fill_late(struct scene *scene)
{
    fill_now(scene, OLD);
    gpu_launch_fill(scene->stream, scene->memory, WORDS, NEW, scene->delay_ns);
}

static struct tl_completion next(struct scene *scene)
{
    struct tl_completion completion;
    if (tl_cq_wait(scene->cq, &completion, 1, CHECK_TIMEOUT_NS) != 1) {
        check_fail("streams", "no operation completes");
        exit(EXIT_FAILURE);
    }
    check_must(completion.status.code, &completion.status, "completion");
    return completion;
}

static bool is_received(struct scene *scene, const char *key, uint32_t seed)
{
    struct tl_completion completion;
    struct tl_error error;
    struct tl_worker *worker = scene->workers[1];
    check_must(
        tl_recv_wait(worker, check_peer(worker, 0), key, scene->step, NULL, CHECK_TIMEOUT_NS, &completion, &error),
        &error, "tl_recv_wait");
    bool is_right = check_is_filled(completion.tensor, seed);
    tl_tensor_put(completion.tensor);
    return is_right;
}

/* ---------------------------------------------------------------------------------------------------- attempts -- */

static bool try_send(struct scene *scene)
{
    struct tl_error error;
    struct tl_tensor *tensor = tensor_of(scene);
    fill_late(scene);
    check_must(tl_send(scene->workers[0], "sent", scene->step, tensor, CHECK_TIMEOUT_NS, scene->cq, NULL, NULL, &error),
               &error, "tl_send");
    scene->was_running = gpu_is_busy(scene->stream);
    bool is_right = is_received(scene, "sent", NEW);
    next(scene);
    tl_tensor_put(tensor);
    return is_right;
}

static bool try_publish(struct scene *scene)
{
    struct tl_error error;
    struct tl_tensor *tensor = tensor_of(scene);
    fill_late(scene);
    check_must(tl_publish(scene->workers[0], "published", scene->step, tensor, &error), &error, "tl_publish");
    scene->was_running = gpu_is_busy(scene->stream);
    tl_tensor_put(tensor);
    bool is_right = is_received(scene, "published", NEW);
    check_must(tl_withdraw(scene->workers[0], "published", &error), &error, "tl_withdraw");
    return is_right;
}

/* A kernel still reads the destination when the receive begins; another one, in another stream, reads it afterwards. */
static bool try_recv(struct scene *scene)
{
    struct tl_error error;
    struct tl_tensor *value = check_filled(-1, SIZE_BYTES, NEW), *destination = tensor_of(scene);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    struct tl_worker *worker = scene->workers[1];
    fill_now(scene, OLD);
    check_must(tl_publish(scene->workers[0], "wanted", scene->step, value, &error), &error, "tl_publish");
    gpu_launch_copy(scene->stream, scene->seen, scene->memory, WORDS, scene->delay_ns);
    check_must(tl_recv(worker, check_peer(worker, 0), "wanted", scene->step, &options, CHECK_TIMEOUT_NS, scene->cq,
                       NULL, NULL, &error),
               &error, "tl_recv");
    scene->was_running = gpu_is_busy(scene->stream);
    struct tl_completion completion = next(scene);
    gpu_wait(scene->stream);
    bool is_right = holds(scene->seen, OLD);
    gpu_launch_copy(scene->other, scene->seen, scene->memory, WORDS, 0);
    gpu_wait(scene->other);
    is_right = holds(scene->seen, NEW) && is_right;
    tl_tensor_put(completion.tensor);
    tl_tensor_put(destination);
    tl_tensor_put(value);
    return is_right;
}

static bool try_copy(struct scene *scene)
{
    struct tl_error error;
    struct tl_tensor *tensor = tensor_of(scene), *to = check_tensor(-1, SIZE_BYTES);
    fill_late(scene);
    scene->was_running = gpu_is_busy(scene->stream);
    check_must(tl_tensor_copy(to, tensor, &error), &error, "tl_tensor_copy");
    bool is_right = check_is_filled(to, NEW);
    tl_tensor_put(tensor);
    tl_tensor_put(to);
    return is_right;
}

/* ------------------------------------------------------------------------------------------------------- scenes -- */

/* Keeps the GPU busy in streams of its own. */
static void put_load(void)
{
    static void *streams[LOADS], *memory[LOADS];
    for (unsigned i = 0; i < LOADS; i++) {
        if (!streams[i]) {
            streams[i] = gpu_stream();
            memory[i] = gpu_allocate(SIZE_BYTES);
        }
        if (gpu_is_busy(streams[i])) continue;
        gpu_launch_fill(streams[i], memory[i], WORDS, i, delays_ns[0]);
        for (unsigned j = 0; j < 10; j++)
            gpu_launch_fill(streams[i], memory[i], WORDS, j, 0);
    }
}

static void check_order(struct scene *scene, const char *name, attempt_fn attempt)
{
    bool is_right = true;
    for (size_t i = 0; i < DELAY_COUNT; i++) {
        scene->delay_ns = delays_ns[i];
        scene->step++;
        put_load();
        is_right = attempt(scene);
        if (!is_right || scene->was_running) break;
    }
    if (is_right && !scene->was_running) {
        check_fail(name, "shows nothing: the kernel was over before the call returned");
    } else {
        check_that(is_right, name, "what a kernel still did came first");
    }
}

static void check_stream(struct scene *scene, const char *protocol, const char *stream)
{
    static const struct {
        const char *what;
        attempt_fn attempt;
    } cases[] = {{"send", try_send}, {"publish", try_publish}, {"recv", try_recv}};
    char name[96];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(name, sizeof(name), "streams %s %s, %s stream", protocol, cases[i].what, stream);
        check_order(scene, name, cases[i].attempt);
    }
}

static void check_protocol(struct scene *scene, const char *protocol, void *own)
{
    char json[CHECK_JSON_BYTES];
    struct tl_error error;
    check_write_json(json, protocol, "");
    for (uint32_t task = 0; task < 2; task++)
        scene->workers[task] = check_open(json, task);
    check_must(tl_cq_create(&scene->cq, &error), &error, "tl_cq_create");
    scene->stream = own;
    check_stream(scene, protocol, "own");
    scene->stream = (void *)TL_STREAM_LEGACY;
    check_stream(scene, protocol, "legacy");
    scene->stream = (void *)TL_STREAM_PER_THREAD;
    check_stream(scene, protocol, "per-thread");
    for (uint32_t task = 0; task < 2; task++)
        tl_worker_close(scene->workers[task], TL_TIMEOUT_DEFAULT);
    tl_cq_destroy(scene->cq);
}

int check_streams(void)
{
    struct scene scene = {.step = 0};
    gpu_use(0);
    scene.other = gpu_stream();
    scene.memory = gpu_allocate(SIZE_BYTES);
    scene.seen = gpu_allocate(SIZE_BYTES);
    void *own = gpu_stream();
    scene.stream = own;
    check_order(&scene, "streams tl_tensor_copy, own stream", try_copy);
    check_protocol(&scene, "grpc", own);
    check_protocol(&scene, "auto", own);
    return check_status();
}
