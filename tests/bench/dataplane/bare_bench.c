// SPDX-License-Identifier: Apache-2.0
/*
 * What the machine can do without us: the measures that the local transport is compared with.
 *
 *   bare_bench memcpy BYTES COUNT        one thread copies between two buffers, whose pages are there
 *   bare_bench memfd BYTES COUNT         ... into shared memory that was just mapped, which has no pages yet
 *   bare_bench FOLDER BYTES COUNT        ... into a new file in the folder (a path with a slash)
 *   bare_bench eventfd COUNT             two processes wake each other in turn, each asleep in between
 *   bare_bench apart COUNT               ... each on a processor of its own
 *   bare_bench epoll COUNT               ... each asleep on an epoll descriptor, as one that waits for several things
 *
 * Prints one JSON object with the median, in microseconds, of a copy, or of there and back.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "processors.h"

#define WARM_UP_COUNT 3

static _Noreturn void die(const char *what)
{
    perror(what);
    exit(1);
}

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double left = *(const double *)a;
    double right = *(const double *)b;
    return left < right ? -1 : left > right;
}

static void report(double *times_us, size_t count)
{
    qsort(times_us, count, sizeof(*times_us), by_value);
    printf("{\"count\": %zu, \"p50_us\": %.3f}\n", count, times_us[count / 2]);
}

static void measure_memcpy(size_t size_bytes, double *times_us, size_t count)
{
    char *source = malloc(size_bytes);
    char *destination = malloc(size_bytes);
    if (source == NULL || destination == NULL) die("memory");
    memset(source, 0x5a, size_bytes);
    memset(destination, 0xa5, size_bytes);
    for (size_t i = 0; i < count + WARM_UP_COUNT; i++) {
        double begun_us = now_us();
        memcpy(destination, source, size_bytes);
        __asm__ volatile("" : : "r"(destination) : "memory"); /* the copy is not left out */
        if (i >= WARM_UP_COUNT) times_us[i - WARM_UP_COUNT] = now_us() - begun_us;
    }
    free(source);
    free(destination);
}

/* A new file in the folder, without a name. Not every file system can make one that never had a name. */
static int open_nameless(const char *folder)
{
    char path[4096];
    int fd = open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
    snprintf(path, sizeof(path), "%s/bare_bench.XXXXXX", folder);
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) unlink(path);
    return fd;
}

/* Has no pages yet. kind: as on the command line. */
static char *map_fresh(const char *kind, size_t size_bytes)
{
    int fd = -1;
    if (strcmp(kind, "memfd") == 0) fd = memfd_create("bare_bench", MFD_CLOEXEC);
    if (strchr(kind, '/') != NULL) fd = open_nameless(kind);
    if (fd < 0 || ftruncate(fd, (off_t)size_bytes) != 0) die(kind);
    char *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) die("mmap");
    (void)madvise(memory, size_bytes, MADV_HUGEPAGE);
    close(fd);
    return memory;
}

static void measure_fresh(const char *kind, size_t size_bytes, double *times_us, size_t count)
{
    char *source = malloc(size_bytes);
    if (source == NULL) die("memory");
    memset(source, 0x5a, size_bytes);
    for (size_t i = 0; i < count; i++) {
        char *destination = map_fresh(kind, size_bytes);
        double begun_us = now_us();
        memcpy(destination, source, size_bytes);
        __asm__ volatile("" : : "r"(destination) : "memory"); /* the copy is not left out */
        times_us[i] = now_us() - begun_us;
        munmap(destination, size_bytes);
    }
    free(source);
}

static void wake(int fd)
{
    const uint64_t one = 1;
    if (write(fd, &one, sizeof(one)) != (ssize_t)sizeof(one)) die("write");
}

/* Returns an epoll descriptor that reports each write to fd once. */
static int watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) die("epoll");
    return epoll;
}

/* Sleeps on the epoll descriptor, or on fd when that is negative. */
static void await(int fd, int epoll)
{
    uint64_t value;
    struct epoll_event event;
    if (epoll >= 0) {
        if (epoll_wait(epoll, &event, 1, -1) != 1) die("epoll_wait");
    } else if (read(fd, &value, sizeof(value)) != (ssize_t)sizeof(value)) {
        die("read");
    }
}

static void measure_eventfd(bool is_apart, bool has_epoll, double *times_us, size_t count)
{
    int there = eventfd(0, EFD_CLOEXEC);
    int back = eventfd(0, EFD_CLOEXEC);
    if (there < 0 || back < 0) die("eventfd");
    int epoll_there = has_epoll ? watch(there) : -1;
    int epoll_back = has_epoll ? watch(back) : -1;
    pid_t child = fork();
    if (child < 0) die("fork");
    if (is_apart) bench_stay_on_processor(child == 0);
    if (child == 0) {
        for (size_t i = 0; i < count + WARM_UP_COUNT; i++) {
            await(there, epoll_there);
            wake(back);
        }
        _exit(0);
    }
    for (size_t i = 0; i < count + WARM_UP_COUNT; i++) {
        double begun_us = now_us();
        wake(there);
        await(back, epoll_back);
        if (i >= WARM_UP_COUNT) times_us[i - WARM_UP_COUNT] = now_us() - begun_us;
    }
    (void)waitpid(child, NULL, 0);
}

int main(int argc, char **argv)
{
    size_t count = argc > 1 ? strtoul(argv[argc - 1], NULL, 10) : 0;
    double *times_us = count > 0 ? calloc(count, sizeof(*times_us)) : NULL;
    if (times_us != NULL && argc == 4 && strcmp(argv[1], "memcpy") == 0) {
        measure_memcpy(strtoul(argv[2], NULL, 10), times_us, count);
    } else if (times_us != NULL && argc == 4) {
        measure_fresh(argv[1], strtoul(argv[2], NULL, 10), times_us, count);
    } else if (times_us != NULL && argc == 3) {
        measure_eventfd(strcmp(argv[1], "apart") == 0, strcmp(argv[1], "epoll") == 0, times_us, count);
    } else {
        fprintf(stderr, "usage: bare_bench memcpy|memfd|FOLDER BYTES COUNT | eventfd|apart|epoll COUNT\n");
        return 2;
    }
    report(times_us, count);
    free(times_us);
    return 0;
}
