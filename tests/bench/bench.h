// SPDX-License-Identifier: Apache-2.0
/* What the two halves of tl_bench share: sizes, names of tensors, contents, and dying with a message. */
#ifndef TESTS_BENCH_BENCH_H
#define TESTS_BENCH_BENCH_H

#include <stdint.h>

#include <tensorlane/tensorlane.h>

#define BENCH_SMALL_BYTES UINT64_C(4096)
#define BENCH_MAX_BYTES (UINT64_C(64) << 20)
/* Small tensors that are asked for at once; they are published as small/0, small/1 and so on. */
#define BENCH_OUTSTANDING_COUNT 1000

/* Tensors of these sizes are published as tensor/BYTES and offered as one-shot/SERIES/BYTES, step after step. */
static const uint64_t bench_sizes[] = {8, BENCH_SMALL_BYTES, UINT64_C(64) << 10, UINT64_C(1) << 20, BENCH_MAX_BYTES};
/* Each client consumes the steps of a series of its own. */
static const char *const bench_series[] = {"thread", "caller"};

#define BENCH_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Ends the process with a line on stderr. */
void bench_die(const char *what, const char *reason) __attribute__((noreturn));

/* Dies unless status is TL_OK. */
void bench_check(enum tl_status status, const char *what, const struct tl_error *error);

/* Creates a TL_U8 tensor of one dimension and fills it with the contents that every benchmark expects. */
struct tl_tensor *bench_create_tensor(uint64_t size_bytes);

/* Dies when the tensor does not have the contents of bench_create_tensor. */
void bench_check_contents(const struct tl_tensor *tensor);

/* Members of a configuration, with a comma before them, that turn TLS on when TENSORLANE_BENCH_TLS names a folder with
 * the files of `tensorlane cert`; "" otherwise. Ownership: static. */
const char *bench_security(void);

/* Both return the exit code. */
int bench_serve(const char *protocol, const char *host);
int bench_pull(const char *port, enum tl_progress progress, const char *protocol, const char *names_path);

#endif
