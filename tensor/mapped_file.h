// SPDX-License-Identifier: Apache-2.0
/*
 * A file mapped read-only and shared by the tensors that lie in it.
 *
 * The file may shrink or lose its disk while it is served. tl_mapped_file_check asks before each read; what slips
 * between the check and the read raises SIGBUS, which a program that serves files turns into zeros and a failed check
 * with tl_mapped_file_guard_process.
 */
#ifndef TENSOR_MAPPED_FILE_H
#define TENSOR_MAPPED_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

struct tl_mapped_file;

/* Maps a regular file read-only. Starts with one reference.
 * Errors: as tl_error_set_errno for open and mmap, naming the path; TL_INVALID_ARGUMENT: not a regular file. */
enum tl_status tl_mapped_file_open(const char *path, struct tl_mapped_file **ret_file,
                                   struct tl_error *ret_error) TL_MUST_USE;
struct tl_mapped_file *tl_mapped_file_get(struct tl_mapped_file *file);
void tl_mapped_file_put(struct tl_mapped_file *file); /* NULL is accepted */

const void *tl_mapped_file_data(const struct tl_mapped_file *file);
uint64_t tl_mapped_file_size_bytes(const struct tl_mapped_file *file);
const char *tl_mapped_file_path(const struct tl_mapped_file *file);

/* A tl_tensor_guard_fn whose context is the file.
 * Errors: TL_DATA_LOSS: the file is shorter than when it was mapped or was changed in place (size or modification
 * time), or a read of it has failed; the message names the path. */
enum tl_status tl_mapped_file_check(void *file, const void *data, uint64_t len_bytes, struct tl_error *ret_error);

/* Installs a SIGBUS handler for the process that maps zeros where a mapped file has none left and makes later checks
 * of that file fail; any other SIGBUS is passed on to the handler that was there. For programs, not for libraries.
 * Errors: TL_INTERNAL: sigaction failed. */
enum tl_status tl_mapped_file_guard_process(struct tl_error *ret_error) TL_MUST_USE;

#endif
