// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/libcuda.h"

/* ----------------------------------------------------------------------------------------------------- results -- */

static bool has_failed;

static void print(const char *outcome, const char *name, const char *format, va_list arguments)
{
    printf("%-6s %s: ", outcome, name);
    vprintf(format, arguments);
    putchar('\n');
    fflush(stdout);
}

#define PRINT(outcome)                                                                                                 \
    va_list arguments;                                                                                                 \
    va_start(arguments, format);                                                                                       \
    print(outcome, name, format, arguments);                                                                           \
    va_end(arguments)

void check_ok(const char *name, const char *format, ...)
{
    PRINT("ok");
}

void check_fail(const char *name, const char *format, ...)
{
    has_failed = true;
    PRINT("FAIL");
}

void check_skip(const char *name, const char *format, ...)
{
    PRINT("skip");
}

void check_figure(const char *name, const char *format, ...)
{
    PRINT("figure");
}

void check_that(bool is_right, const char *name, const char *text)
{
    if (is_right) {
        check_ok(name, "%s", text);
    } else {
        check_fail(name, "not so: %s", text);
    }
}

int check_status(void)
{
    return has_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

void check_must(enum tl_status status, const struct tl_error *error, const char *what)
{
    if (status == TL_OK) return;
    check_fail(what, "%s: %s", tl_status_name(status), error->message);
    exit(EXIT_FAILURE);
}

int64_t check_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ----------------------------------------------------------------------------------------------------- tensors -- */

static struct tl_device device_of(int gpu)
{
    return gpu < 0 ? (struct tl_device){.kind = TL_DEVICE_HOST} : (struct tl_device){TL_DEVICE_CUDA, gpu};
}

struct tl_tensor *check_tensor(int gpu, uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    check_must(tl_tensor_create_on(device_of(gpu), TL_U8, 1, &size_bytes, &tensor, &error), &error,
               "tl_tensor_create_on");
    return tensor;
}

/* Words of the pattern, at least size_bytes; freed by the caller. */
static uint32_t *make_pattern(uint64_t size_bytes, uint32_t seed)
{
    uint64_t count = size_bytes / sizeof(uint32_t) + 1;
    uint32_t *words = malloc(count * sizeof(*words));
    if (!words) abort();
    for (uint64_t i = 0; i < count; i++)
        words[i] = gpu_word(seed, i);
    return words;
}

struct tl_tensor *check_filled(int gpu, uint64_t size_bytes, uint32_t seed)
{
    struct tl_tensor *tensor = check_tensor(gpu, size_bytes);
    uint32_t *words = make_pattern(size_bytes, seed);
    if (gpu < 0) {
        memcpy(tl_tensor_data(tensor), words, size_bytes);
    } else {
        gpu_use(gpu);
        gpu_to_device(tl_tensor_data(tensor), words, size_bytes);
    }
    free(words);
    return tensor;
}

bool check_is_filled(const struct tl_tensor *tensor, uint32_t seed)
{
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    struct tl_device device = tl_tensor_device(tensor);
    uint32_t *words = make_pattern(size_bytes, seed);
    const void *bytes = tl_tensor_data(tensor);
    void *copy = NULL;
    if (device.kind == TL_DEVICE_CUDA) {
        copy = calloc(1, size_bytes);
        if (!copy) abort();
        gpu_use(device.index);
        gpu_to_host(copy, bytes, size_bytes);
        bytes = copy;
    }
    bool is_filled = memcmp(bytes, words, size_bytes) == 0;
    free(copy);
    free(words);
    return is_filled;
}

struct tl_tensor *check_wrapped(int gpu, void *memory, uint64_t size_bytes, tl_stream stream)
{
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = &size_bytes,
                                        .device = device_of(gpu),
                                        .data = memory,
                                        .capacity_bytes = size_bytes,
                                        .stream = stream};
    struct tl_tensor *tensor;
    struct tl_error error;
    check_must(tl_tensor_wrap(&view, &tensor, &error), &error, "tl_tensor_wrap");
    return tensor;
}

const char *check_place(int gpu)
{
    static char texts[4][16];
    static unsigned next;
    if (gpu < 0) return "host";
    char *text = texts[next++ % 4];
    snprintf(text, sizeof(texts[0]), "gpu:%d", gpu);
    return text;
}

/* ----------------------------------------------------------------------------------------------------- workers -- */

static unsigned take_port(int *ret_socket)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);
    *ret_socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*ret_socket < 0 || bind(*ret_socket, (struct sockaddr *)&address, len) != 0 ||
        getsockname(*ret_socket, (struct sockaddr *)&address, &len) != 0) {
        check_fail("workers", "127.0.0.1 has no free port");
        exit(EXIT_FAILURE);
    }
    return ntohs(address.sin_port);
}

void check_write_json(char ret_json[CHECK_JSON_BYTES], const char *protocol, const char *more)
{
    int sockets[2];
    unsigned ports[2] = {take_port(&sockets[0]), take_port(&sockets[1])};
    close(sockets[0]);
    close(sockets[1]);
    snprintf(ret_json, CHECK_JSON_BYTES,
             "{\"cluster\": {\"node\": [\"127.0.0.1:%u\", \"127.0.0.1:%u\"]}, \"protocol\": \"%s\", "
             "\"log\": {\"level\": \"warn\"}%s%s}",
             ports[0], ports[1], protocol, more[0] != '\0' ? ", " : "", more);
}

struct tl_worker *check_open(const char *json, uint32_t task)
{
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .job = "node", .task = task};
    struct tl_worker *worker;
    struct tl_error error;
    check_must(tl_worker_open(&options, &worker, &error), &error, "tl_worker_open");
    return worker;
}

tl_peer_id check_peer(struct tl_worker *worker, unsigned task)
{
    char name[32];
    tl_peer_id peer;
    struct tl_error error;
    snprintf(name, sizeof(name), "/job:node/task:%u", task);
    check_must(tl_worker_find_peer(worker, name, &peer, &error), &error, "tl_worker_find_peer");
    return peer;
}
