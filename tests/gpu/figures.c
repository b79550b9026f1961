// SPDX-License-Identifier: Apache-2.0
/*
 * How fast copies are beside what the machine can do. Nothing is asserted: the figures are for readers, and say little
 * on a machine that is busy otherwise. Each is the median of some rounds.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/check.h"
#include "tests/gpu/libcuda.h"

#define COPY_BYTES (64 * MIB)
#define PROCESS_BYTES (1024 * MIB)
#define SPARE_BYTES (128 * MIB)
#define ROUNDS 7

static struct {
    void *pinned;
    void *pageable;
    struct tl_tensor *host;
    struct tl_tensor *device;
    void *memory[2]; /* two pieces of memory on the device, for copies within it */
    size_t len_bytes;
} scene;

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Nanoseconds of a round, the median; the first one is not counted. */
static double measure(void (*run)(void))
{
    int64_t times[ROUNDS];
    run();
    for (unsigned i = 0; i < ROUNDS; i++) {
        int64_t begin = check_now_ns();
        run();
        times[i] = check_now_ns() - begin;
    }
    qsort(times, ROUNDS, sizeof(times[0]), compare);
    return times[ROUNDS / 2] > 0 ? (double)times[ROUNDS / 2] : 1;
}

static double gigabytes(uint64_t len_bytes, double time_ns)
{
    return (double)len_bytes / time_ns;
}

/* --------------------------------------------------------------------------------------------- host and device -- */

static void pinned_to_host(void)
{
    gpu_to_host(scene.pinned, tl_tensor_data(scene.device), COPY_BYTES);
}

static void pinned_from_host(void)
{
    gpu_to_device(tl_tensor_data(scene.device), scene.pinned, COPY_BYTES);
}

static void copy_on_host(void)
{
    memcpy(scene.pinned, scene.pageable, COPY_BYTES);
}

static void copy(struct tl_tensor *to, struct tl_tensor *from)
{
    struct tl_error error;
    check_must(tl_tensor_copy(to, from, &error), &error, "tl_tensor_copy");
}

static void ours_to_host(void)
{
    copy(scene.host, scene.device);
}

static void ours_from_host(void)
{
    copy(scene.device, scene.host);
}

static void check_copies(void)
{
    scene.pinned = gpu_pinned(COPY_BYTES);
    scene.host = check_filled(-1, COPY_BYTES, 1);
    scene.device = check_filled(0, COPY_BYTES, 1);
    scene.pageable = tl_tensor_data(scene.host);
    double to_host = measure(pinned_to_host), from_host = measure(pinned_from_host), on_host = measure(copy_on_host);
    double ours_to = measure(ours_to_host), ours_from = measure(ours_from_host);
    double slower = from_host > on_host ? from_host : on_host;
    check_figure("to host, 64 MiB", "%.2f of a pinned cudaMemcpy: %.2f beside %.2f GB/s (wanted: 0.85)",
                 to_host / ours_to, gigabytes(COPY_BYTES, ours_to), gigabytes(COPY_BYTES, to_host));
    check_figure("from host, 64 MiB",
                 "%.2f of the slower of a pinned cudaMemcpy and a memcpy: %.2f beside %.2f and %.2f GB/s "
                 "(wanted: 0.80)",
                 slower / ours_from, gigabytes(COPY_BYTES, ours_from), gigabytes(COPY_BYTES, from_host),
                 gigabytes(COPY_BYTES, on_host));
    tl_tensor_put(scene.host);
    tl_tensor_put(scene.device);
}

/* -------------------------------------------------------------------------------------------- between processes -- */

static void copy_on_device(void)
{
    GPU_CALL(cuMemcpyDtoD_v2, (uintptr_t)scene.memory[0], (uintptr_t)scene.memory[1], scene.len_bytes);
    gpu_wait((void *)TL_STREAM_LEGACY); /* such a copy may be under way when its call returns */
}

/* Receives the tensor of the other process; returns the time. */
static double receive(struct tl_worker *worker, struct tl_tensor *destination, struct tl_completion *ret_completion)
{
    char key[64];
    struct tl_error error;
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    snprintf(key, sizeof(key), "gpu:0/%llu", (unsigned long long)scene.len_bytes);
    int64_t begin = check_now_ns();
    check_must(tl_recv_wait(worker, check_peer(worker, 0), key, 0, &options, CHECK_TIMEOUT_NS, ret_completion, &error),
               &error, "tl_recv_wait");
    int64_t time_ns = check_now_ns() - begin;
    tl_tensor_put(ret_completion->tensor);
    return (double)time_ns;
}

/* The other process and this one have the tensor and its destination, and this one copies once within the device. */
static uint64_t choose_size(void)
{
    uint64_t size_bytes = PROCESS_BYTES;
    while (size_bytes > MIB && gpu_free_bytes() < 3 * size_bytes + SPARE_BYTES)
        size_bytes /= 2;
    return size_bytes;
}

static void check_processes(void)
{
    char json[CHECK_JSON_BYTES], name[64];
    struct owner owner;
    struct tl_completion completion;
    scene.len_bytes = choose_size();
    for (unsigned i = 0; i < 2; i++)
        scene.memory[i] = gpu_allocate(scene.len_bytes);
    double on_device = measure(copy_on_device), best = 0;
    gpu_free(scene.memory[0]);
    gpu_free(scene.memory[1]);
    check_write_json(json, "auto", "");
    owner_start(&owner, json, scene.len_bytes);
    struct tl_worker *worker = check_open(json, 1);
    struct tl_tensor *destination = check_tensor(0, scene.len_bytes);
    for (unsigned i = 0; i < 4; i++) {
        double time_ns = receive(worker, destination, &completion);
        if (best == 0 || time_ns < best) best = time_ns;
    }
    snprintf(name, sizeof(name), "between processes, %llu MiB", (unsigned long long)(scene.len_bytes / MIB));
    check_figure(name,
                 "%.2f of a cudaMemcpy within the device: %.2f beside %.2f GB/s, path %s%s%s (wanted: 0.90 over "
                 "gpu-ipc at 1024 MiB)",
                 on_device / best, gigabytes(scene.len_bytes, best), gigabytes(scene.len_bytes, on_device),
                 tl_path_name(completion.path), completion.path_reason[0] != '\0' ? " because " : "",
                 completion.path_reason);
    tl_tensor_put(destination);
    tl_worker_close(worker, TL_TIMEOUT_DEFAULT);
    owner_stop(&owner);
}

int check_figures(void)
{
    gpu_use(0);
    check_copies();
    check_processes();
    return check_status();
}
