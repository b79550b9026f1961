// SPDX-License-Identifier: Apache-2.0
/*
 * What many small tensors cost, one by one and in groups: a user of the public interface like any other.
 *
 *     tl_groups serve CONFIG single|many SET                             the owner; prints "ready PID"
 *     tl_groups pull CONFIG single|many SET thread|caller OWNER_PID      receives as its standard input says
 *     tl_groups sizes WORKLOAD                                           prints the bytes of each tensor, one per line
 *
 * CONFIG has the addresses of ps:0, the owner, and of five tasks of the job worker, which only the set "wide-deep" has.
 * SET: "fetch", "keys-2000", "keys-100000", "subscription" or "wide-deep". Compiled for a library without tl_recv_many
 * or tl_subscribe, and so without TL_HAS_GROUPS or TL_HAS_SUBSCRIPTIONS, it lacks "many" there. Both end when their
 * standard input does.
 *
 * pull prints "ready tensorlane VERSION". Then every line of input is a command,
 *
 *     WORKLOAD published|sent library|views COUNT
 *
 * that is answered with one line of numbers: the seconds that it took, the tensors that came, the messages between the
 * workers in both directions (with the immediates of values that were written, not for "wide-deep"), the processor time
 * of both processes, and how many tensors came over gRPC. WORKLOAD is received COUNT times, all of its tensors at once,
 * into memory of the library or into views of one buffer of the program's. "absent" is 4096 with a last key that does
 * not exist: the time ends when all others are there. For "wide-deep" COUNT is the steps of each worker, and the words
 * between mean nothing. For "subscription" WORKLOAD is the bytes of a value, and many means a subscription; its time is
 * the sum of those of all values (subscription.c).
 *
 * What was received last is compared with what was sent, outside of the time. Anything that fails ends the process with
 * a line on stderr and exit code 1: a benchmark that went wrong has no number.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/groups/groups.h"

void groups_die(const char *what, const char *reason)
{
    fprintf(stderr, "tl_groups: %s: %s\n", what, reason);
    exit(EXIT_FAILURE);
}

void groups_check(enum tl_status status, const char *what, const struct tl_error *error)
{
    if (status != TL_OK) groups_die(what, error->message);
}

void *groups_allocate(size_t count, size_t size_bytes)
{
    void *memory = calloc(count, size_bytes);
    if (!memory) groups_die("setup", "no memory");
    return memory;
}

/* Neither two tensors nor two pages of one are alike, so that bytes in the wrong place are found. */
static unsigned char content_at(uint64_t seed, uint64_t offset)
{
    return (unsigned char)(seed * 7 + seed / 256 + offset * 31 + offset / 4096);
}

struct tl_tensor *groups_create_tensor(enum tl_dtype dtype, unsigned rank, const uint64_t *dims, uint64_t seed)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    groups_check(tl_tensor_create(dtype, rank, dims, &tensor, &error), "create a tensor", &error);
    unsigned char *data = tl_tensor_data(tensor);
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    for (uint64_t i = 0; i < size_bytes; i++)
        data[i] = content_at(seed, i);
    return tensor;
}

void groups_check_contents(const struct tl_tensor *tensor, uint64_t seed, const char *key)
{
    const unsigned char *data = tl_tensor_data(tensor);
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    for (uint64_t i = 0; i < size_bytes; i++)
        if (data[i] != content_at(seed, i)) groups_die(key, "the bytes that were received are not those of the sender");
}

static double seconds_of(clockid_t clock)
{
    struct timespec time;
    if (clock_gettime(clock, &time) != 0) groups_die("clock", "the processor time of a process cannot be read");
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

double groups_now(void)
{
    return seconds_of(CLOCK_MONOTONIC);
}

double groups_cpu_seconds(int owner_pid)
{
    clockid_t clock;
    if (clock_getcpuclockid(owner_pid, &clock) != 0) groups_die("owner", "no process has its id");
    return seconds_of(CLOCK_PROCESS_CPUTIME_ID) + seconds_of(clock);
}

uint64_t groups_message_count(struct tl_worker *worker)
{
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    struct tl_error error;
    groups_check(tl_worker_stats(worker, &stats, &error), "counters", &error);
    return stats.frames_sent + stats.frames_received;
}

void groups_print(const struct groups_taken *taken)
{
    printf("%.9f %" PRIu64 " %" PRIu64 " %.9f %" PRIu64 "\n", taken->seconds, taken->tensor_count, taken->message_count,
           taken->cpu_seconds, taken->grpc_count);
    fflush(stdout);
}

/* -------------------------------------------------------------------------------------------------- command line -- */

static bool read_how(const char *word, enum groups_how *ret_how)
{
    if (strcmp(word, "single") != 0 && strcmp(word, "many") != 0) return false;
    *ret_how = word[0] == 'm' ? GROUPS_MANY : GROUPS_SINGLE;
    return true;
}

static int print_sizes(const char *name)
{
    for (size_t i = 0; i < groups_workload_count; i++) {
        const struct groups_workload *workload = &groups_workloads[i];
        if (strcmp(workload->name, name) != 0) continue;
        uint64_t *sizes = groups_sizes(workload);
        for (size_t place = 0; place < workload->count; place++)
            printf("%" PRIu64 "\n", sizes[place]);
        free(sizes);
        return EXIT_SUCCESS;
    }
    groups_die(name, "is no workload");
}

int main(int argc, char **argv)
{
    enum groups_how how;
    if (argc == 3 && strcmp(argv[1], "sizes") == 0) return print_sizes(argv[2]);
    if (argc == 5 && strcmp(argv[1], "serve") == 0 && read_how(argv[3], &how)) {
        if (strcmp(argv[4], WIDE_DEEP) == 0) return wide_deep_serve(argv[2], how);
        if (strcmp(argv[4], GROUPS_SUBSCRIPTION) == 0) return subscription_serve(argv[2]);
        return groups_serve(argv[2], how, argv[4]);
    }
    if (argc == 7 && strcmp(argv[1], "pull") == 0 && read_how(argv[3], &how)) {
        enum tl_progress progress = strcmp(argv[5], "caller") == 0 ? TL_PROGRESS_CALLER : TL_PROGRESS_THREAD;
        int owner_pid = atoi(argv[6]);
        if (strcmp(argv[4], WIDE_DEEP) == 0) return wide_deep_work(argv[2], how, progress, owner_pid);
        if (strcmp(argv[4], GROUPS_SUBSCRIPTION) == 0) return subscription_pull(argv[2], how, progress, owner_pid);
        return groups_pull(argv[2], how, progress, argv[4], owner_pid);
    }
    fprintf(stderr, "usage: tl_groups serve CONFIG single|many SET\n"
                    "       tl_groups pull CONFIG single|many SET thread|caller OWNER_PID\n"
                    "       tl_groups sizes WORKLOAD\n");
    return EXIT_FAILURE;
}
