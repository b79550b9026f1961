// SPDX-License-Identifier: Apache-2.0
/*
 * What the checks on a GPU share: results, bytes, workers.
 *
 * Each result is a line: "ok", "FAIL", "skip" or "figure", the name of the check, and what it saw. What a check needs
 * to go on at all ends the process when it fails.
 */
#ifndef TESTS_GPU_CHECK_H
#define TESTS_GPU_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/tensorlane.h>

#define CHECK_TIMEOUT_NS (INT64_C(120) * 1000000000)
#define CHECK_JSON_BYTES 512
#define MIB (UINT64_C(1) << 20)

void check_ok(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void check_fail(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void check_skip(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void check_figure(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints the result of a comparison; text says what is expected. */
void check_that(bool is_right, const char *name, const char *text);
/* Returns EXIT_FAILURE when a check has failed. */
int check_status(void);

/* Prints what failed and ends the process, unless status is TL_OK. */
void check_must(enum tl_status status, const struct tl_error *error, const char *what);

int64_t check_now_ns(void);

/* Creates a tensor of bytes: index -1 is the host. With a seed it is filled. */
struct tl_tensor *check_tensor(int gpu, uint64_t size_bytes);
struct tl_tensor *check_filled(int gpu, uint64_t size_bytes, uint32_t seed);
bool check_is_filled(const struct tl_tensor *tensor, uint32_t seed);
/* Wraps memory of the program, which must stay until the process ends. */
struct tl_tensor *check_wrapped(int gpu, void *memory, uint64_t size_bytes, tl_stream stream);
/* Names a place: "host" or "gpu:0"; one of a few static buffers. */
const char *check_place(int gpu);

/* Writes a configuration of two tasks of this host, at free ports; `more` has further members and may be "". */
void check_write_json(char ret_json[CHECK_JSON_BYTES], const char *protocol, const char *more);
struct tl_worker *check_open(const char *json, uint32_t task);
tl_peer_id check_peer(struct tl_worker *worker, unsigned task);

/* The checks; each returns its check_status. */
int check_worker(void);
int check_pair(void);
int check_owner(const char *json, const char *size);
int check_streams(void);
int check_figures(void);

/* A process that publishes; see check_owner. */
struct owner {
    int process;
    int input;
    int output;
};
void owner_start(struct owner *owner, const char *json, uint64_t size_bytes);
void owner_stop(struct owner *owner);

#endif
