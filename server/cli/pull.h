// SPDX-License-Identifier: Apache-2.0
/* The parts of `tensorlane pull`: what is received, how, and the report about it. */
#ifndef SERVER_CLI_PULL_H
#define SERVER_CLI_PULL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/cli/options.h"
#include "server/cli/progress.h"
#include "server/cli/target.h"
#include "tensor/device.h"
#include "tensor/tensor_file.h"

/* One tensor that is pulled. */
struct tl_pull_item {
    const struct tl_listed *listed;
    struct tl_tensor *destination; /* lies in the file; NULL until reserved and after it has been put */
    bool is_received;
    bool is_verified; /* its checksum fits */
    enum tl_path path;
    char transport[16];      /* the one that carried it, of those that have more than one path; "" otherwise */
    const char *path_reason; /* why not a faster one; lives for ever */
    uint64_t step;           /* version that was received; may be newer than the one that was listed */
    int64_t duration_ns;
};

struct tl_pull {
    /* The flags. */
    struct tl_target target;
    const char *output;
    const char *format;
    const char *compare_path; /* file whose tensors must equal the received ones; NULL: none */
    struct tl_device device;  /* tensors are received into its memory and copied from there into the output */
    struct tl_texts excluded;
    const char *const *patterns;
    size_t pattern_count;
    bool is_npy;
    bool is_npy_file; /* one tensor, not a folder */
    bool is_unchecked;
    bool has_table;
    bool is_json;
    bool is_quiet;

    struct tl_listing listing;          /* what is wanted */
    struct tl_pull_item *items;         /* [listing.count] */
    struct tl_annotations *annotations; /* for the output file; one reference; NULL: none */
    uint64_t total_bytes;
    struct tl_tensor_writer *writer;

    size_t received_count;
    uint64_t received_bytes;
    size_t unmatched_count;  /* patterns that match nothing */
    size_t mismatched_count; /* differ from those of compare_path */
    size_t compared_count;
    int64_t receive_ns; /* from the first request to the last completion */
    int64_t compare_ns;
    int64_t prepare_ns; /* for the pages of the output */
    int64_t commit_ns;  /* the same, and until the file is durable */
    struct tl_progress_bar bar;
    bool is_misfit; /* a tensor's shape is no longer the listed one: list again */
};

/* Receives every item into its destination, all verified unless is_unchecked. Progress goes to stderr. Errors: the
 * error of the first tensor that failed, naming it; the others are given up. TL_DEADLINE_EXCEEDED: nothing has moved
 * for the target's time-out, naming the state of the worker. TL_CANCELLED: a signal came. With a device, which is open,
 * also those of tl_tensor_copy. */
enum tl_status tl_pull_receive(struct tl_pull *pull, struct tl_error *ret_error) TL_MUST_USE;

/* Compares what was received with the tensors of compare_path, byte by byte.
 * Errors: of tl_tensor_file_read. TL_DATA_LOSS: naming the first tensor that differs or that the file lacks.
 * TL_CANCELLED: a signal came. */
enum tl_status tl_pull_compare(struct tl_pull *pull, struct tl_error *ret_error) TL_MUST_USE;

/* Prints what was done to standard output, as JSON, as a table or as a line. False: no memory. */
bool tl_pull_report(const struct tl_pull *pull, const struct tl_error *error);

/* Merges the annotations of what is listed into those of the output, and warns of those that contradict each other.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_pull_merge_annotations(struct tl_pull *pull, struct tl_error *ret_error) TL_MUST_USE;

#endif
