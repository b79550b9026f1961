// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors within one worker, and between two processes of this host: from the host and each GPU, to the host and each
 * GPU. What is asserted are the bytes; the path that they took and why is printed.
 */
#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/check.h"
#include "tests/gpu/libcuda.h"

#define MAX_GPUS 2
#define HOST (-1)

extern char **environ;

static const uint64_t sizes[] = {1, 4095, 65536, 2 * MIB + 1, 16 * MIB + 3};
#define SIZE_COUNT (sizeof(sizes) / sizeof(sizes[0]))

static int gpus(void)
{
    return gpu_count() < MAX_GPUS ? gpu_count() : MAX_GPUS;
}

static uint32_t seed_of(int gpu, uint64_t size_bytes)
{
    return (uint32_t)(gpu + 2) * 1000003 + (uint32_t)size_bytes;
}

static void key_of(char ret_key[64], int gpu, uint64_t size_bytes)
{
    snprintf(ret_key, 64, "%s/%llu", check_place(gpu), (unsigned long long)size_bytes);
}

/* --------------------------------------------------------------------------------------------------- in a worker -- */

static void copy(struct tl_tensor *to, struct tl_tensor *from)
{
    struct tl_error error;
    check_must(tl_tensor_copy(to, from, &error), &error, "tl_tensor_copy");
}

/* To a GPU, to another tensor there or on the next GPU, and back. */
static bool comes_back(int gpu, uint64_t size_bytes)
{
    int next = (gpu + 1) % gpus();
    struct tl_tensor *from = check_filled(HOST, size_bytes, 7), *there = check_tensor(gpu, size_bytes);
    struct tl_tensor *other = check_tensor(next, size_bytes), *back = check_tensor(HOST, size_bytes);
    copy(there, from);
    copy(other, there);
    copy(back, other);
    bool is_right = check_is_filled(there, 7) && check_is_filled(other, 7) && check_is_filled(back, 7);
    tl_tensor_put(from);
    tl_tensor_put(there);
    tl_tensor_put(other);
    tl_tensor_put(back);
    return is_right;
}

static bool is_received(struct tl_worker *worker, int from, int to, uint64_t size_bytes)
{
    struct tl_completion completion;
    struct tl_error error;
    struct tl_recv_options options = {.size_bytes = sizeof(options)};
    struct tl_tensor *value = check_filled(from, size_bytes, seed_of(from, size_bytes));
    if (to != HOST) options.device = (struct tl_device){TL_DEVICE_CUDA, to};
    check_must(tl_publish(worker, "own", 0, value, &error), &error, "tl_publish");
    check_must(tl_recv_wait(worker, check_peer(worker, 0), "own", 0, &options, CHECK_TIMEOUT_NS, &completion, &error),
               &error, "tl_recv_wait");
    bool is_right = check_is_filled(completion.tensor, seed_of(from, size_bytes));
    tl_tensor_put(completion.tensor);
    tl_tensor_put(value);
    return is_right;
}

static void check_own(struct tl_worker *worker, int from, int to)
{
    char name[64];
    bool is_right = true;
    snprintf(name, sizeof(name), "worker %s -> %s", check_place(from), check_place(to));
    for (size_t i = 0; i < SIZE_COUNT; i++)
        is_right = is_received(worker, from, to, sizes[i]) && is_right;
    check_that(is_right, name, "all bytes of a worker's own tensors, up to 16 MiB + 3");
}

int check_worker(void)
{
    char json[CHECK_JSON_BYTES], name[64];
    for (int gpu = 0; gpu < gpus(); gpu++) {
        bool is_right = true;
        snprintf(name, sizeof(name), "tl_tensor_copy %s", check_place(gpu));
        for (size_t i = 0; i < SIZE_COUNT; i++)
            is_right = comes_back(gpu, sizes[i]) && is_right;
        check_that(is_right, name, "host, device, device and back, up to 16 MiB + 3");
    }
    check_write_json(json, "grpc", "");
    struct tl_worker *worker = check_open(json, 0);
    for (int from = HOST; from < gpus(); from++)
        for (int to = HOST; to < gpus(); to++)
            if (from != HOST || to != HOST) check_own(worker, from, to);
    tl_worker_close(worker, TL_TIMEOUT_DEFAULT);
    return check_status();
}

/* --------------------------------------------------------------------------------------------- between processes -- */

static void publish(struct tl_worker *worker, int gpu, uint64_t size_bytes)
{
    char key[64];
    struct tl_error error;
    struct tl_tensor *tensor = check_filled(gpu, size_bytes, seed_of(gpu, size_bytes));
    key_of(key, gpu, size_bytes);
    check_must(tl_publish(worker, key, 0, tensor, &error), &error, "tl_publish");
    tl_tensor_put(tensor);
}

/* The other process: publishes tensors of all sizes on the host and each GPU, or one of this size on the first GPU,
 * says so and waits for the end of its input. */
int check_owner(const char *json, const char *size)
{
    char byte;
    uint64_t size_bytes = strtoull(size, NULL, 10);
    struct tl_worker *worker = check_open(json, 0);
    if (size_bytes > 0) {
        publish(worker, 0, size_bytes);
    } else {
        for (int gpu = HOST; gpu < gpus(); gpu++)
            for (size_t i = 0; i < SIZE_COUNT; i++)
                publish(worker, gpu, sizes[i]);
    }
    if (write(STDOUT_FILENO, "r", 1) != 1) return EXIT_FAILURE;
    if (read(STDIN_FILENO, &byte, 1) != 0) return EXIT_FAILURE;
    tl_worker_close(worker, TL_TIMEOUT_DEFAULT);
    return check_status();
}

void owner_start(struct owner *owner, const char *json, uint64_t size_bytes)
{
    char size[32], said = '\0';
    int to[2], from[2];
    posix_spawn_file_actions_t actions;
    snprintf(size, sizeof(size), "%llu", (unsigned long long)size_bytes);
    char *arguments[] = {"gpu_check", "owner", (char *)json, size, NULL};
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) abort();
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    int error = posix_spawn(&owner->process, "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    *owner = (struct owner){.process = owner->process, .input = to[1], .output = from[0]};
    if (error == 0 && read(owner->output, &said, 1) == 1 && said == 'r') return;
    /* What else it says is the line of a check that has failed. */
    char rest[1024];
    ssize_t len = read(owner->output, rest, sizeof(rest) - 1);
    check_fail("owner", "the other process does not start: %c%.*s", said ? said : '-', len > 0 ? (int)len : 0, rest);
    exit(EXIT_FAILURE);
}

void owner_stop(struct owner *owner)
{
    int result;
    close(owner->input);
    if (waitpid(owner->process, &result, 0) != owner->process || result != 0)
        check_fail("owner", "the other process ends with %d", result);
    close(owner->output);
}

struct route {
    struct tl_worker *worker;
    int from;
    int to;
    bool is_right;
    unsigned paths[16]; /* how many tensors took each path */
    char reason[256];   /* why the last one took its path */
};

static void receive(struct route *route, uint64_t size_bytes, bool has_destination, bool wants_checksum)
{
    char key[64];
    struct tl_completion completion;
    struct tl_error error;
    struct tl_recv_options options = {.size_bytes = sizeof(options), .wants_checksum = wants_checksum};
    if (has_destination) options.destination = check_tensor(route->to, size_bytes);
    if (route->to != HOST) options.device = (struct tl_device){TL_DEVICE_CUDA, route->to};
    key_of(key, route->from, size_bytes);
    check_must(tl_recv_wait(route->worker, check_peer(route->worker, 0), key, 0, &options, CHECK_TIMEOUT_NS,
                            &completion, &error),
               &error, key);
    bool is_right = check_is_filled(completion.tensor, seed_of(route->from, size_bytes));
    route->is_right = route->is_right && is_right && completion.is_verified == wants_checksum;
    route->paths[completion.path % 16]++;
    snprintf(route->reason, sizeof(route->reason), "%s", completion.path_reason);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(options.destination);
}

static void check_route(struct tl_worker *worker, const char *how, int from, int to)
{
    char name[96], paths[256] = "";
    size_t len = 0;
    struct route route = {.worker = worker, .from = from, .to = to, .is_right = true};
    for (size_t i = 0; i < SIZE_COUNT; i++) {
        receive(&route, sizes[i], false, i == 1);
        receive(&route, sizes[i], true, i == 3);
    }
    for (unsigned i = 0; i < 16; i++)
        if (route.paths[i] > 0 && len < sizeof(paths))
            len += (size_t)snprintf(paths + len, sizeof(paths) - len, "%s %u, ", tl_path_name((enum tl_path)i),
                                    route.paths[i]);
    snprintf(name, sizeof(name), "%s %s -> %s", how, check_place(from), check_place(to));
    (route.is_right ? check_ok : check_fail)(name, "all bytes, up to 16 MiB + 3; paths: %sthe largest because: %s",
                                             paths, route.reason[0] != '\0' ? route.reason : "-");
}

static void check_processes(const char *protocol, const char *more)
{
    char json[CHECK_JSON_BYTES], how[64];
    struct owner owner;
    snprintf(how, sizeof(how), "pair %s%s", protocol, more[0] != '\0' ? " gpu.proxy" : "");
    check_write_json(json, protocol, more);
    owner_start(&owner, json, 0);
    struct tl_worker *worker = check_open(json, 1);
    for (int from = HOST; from < gpus(); from++)
        for (int to = HOST; to < gpus(); to++)
            if (from != HOST || to != HOST) check_route(worker, how, from, to);
    tl_worker_close(worker, TL_TIMEOUT_DEFAULT);
    owner_stop(&owner);
}

static bool has_card(void)
{
    DIR *folder = opendir("/sys/class/infiniband");
    bool is_found = false;
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        is_found = is_found || entry->d_name[0] != '.';
    if (folder) closedir(folder);
    return is_found;
}

int check_pair(void)
{
    check_processes("grpc", "");
    check_processes("auto", "");
    check_processes("auto", "\"gpu\": {\"proxy\": true}");
    if (has_card()) {
        check_processes("grpc+verbs", "");
        check_processes("grpc+gdr", "");
    } else {
        check_skip("pair grpc+verbs, grpc+gdr", "this machine has no RDMA device (/sys/class/infiniband)");
    }
    return check_status();
}
