// SPDX-License-Identifier: Apache-2.0
/*
 * The benchmarks' own program, a user of the public API like any other.
 *
 *     tl_bench serve PROTOCOL                             publishes and offers tensors; prints "ready PORT"
 *     tl_bench pull PORT thread|caller PROTOCOL [NAMES]   receives them as its standard input says; see bench_pull.c
 *
 * Both end when their standard input does. Anything that fails ends the process with a line on stderr and exit code 1:
 * a benchmark that went wrong has no number.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/bench.h"

void bench_die(const char *what, const char *reason)
{
    fprintf(stderr, "tl_bench: %s: %s\n", what, reason);
    exit(EXIT_FAILURE);
}

void bench_check(enum tl_status status, const char *what, const struct tl_error *error)
{
    if (status != TL_OK) bench_die(what, error->message);
}

/* No two pages are alike, so that a chunk in the wrong place is found. */
static unsigned char content_at(uint64_t offset)
{
    return (unsigned char)(offset * 31 + offset / 4096);
}

struct tl_tensor *bench_create_tensor(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    bench_check(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, &error), "create a tensor", &error);
    unsigned char *data = tl_tensor_data(tensor);
    for (uint64_t i = 0; i < size_bytes; i++)
        data[i] = content_at(i);
    return tensor;
}

void bench_check_contents(const struct tl_tensor *tensor)
{
    const unsigned char *data = tl_tensor_data(tensor);
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    for (uint64_t i = 0; i < size_bytes; i++)
        if (data[i] != content_at(i)) bench_die("contents", "the bytes that were received are not those of the sender");
}

const char *bench_security(void)
{
    static char members[1024];
    const char *folder = getenv("TENSORLANE_BENCH_TLS");
    if (!folder) return "";
    snprintf(members, sizeof(members),
             ", \"security\": {\"tls\": {\"ca\": \"%s/ca.pem\", \"certificate\": \"%s/{name}.pem\","
             " \"key\": \"%s/{name}.key\"}, \"allow\": [{\"who\": [\"any\"], \"what\": [\"read\"]}]}",
             folder, folder, folder);
    return members;
}

int main(int argc, char **argv)
{
    if ((argc == 3 || argc == 4) && strcmp(argv[1], "serve") == 0)
        return bench_serve(argv[2], argc == 4 ? argv[3] : "127.0.0.1");
    if ((argc == 5 || argc == 6) && strcmp(argv[1], "pull") == 0) {
        if (strcmp(argv[3], "thread") == 0) return bench_pull(argv[2], TL_PROGRESS_THREAD, argv[4], argv[5]);
        if (strcmp(argv[3], "caller") == 0) return bench_pull(argv[2], TL_PROGRESS_CALLER, argv[4], argv[5]);
    }
    fprintf(stderr, "usage: tl_bench serve PROTOCOL [HOST]\n"
                    "       tl_bench pull [HOST:]PORT thread|caller PROTOCOL [NAMES]\n");
    return EXIT_FAILURE;
}
