// SPDX-License-Identifier: Apache-2.0
/*
 * A file mapped read-only and shared by the tensors that lie in it. Its descriptor can be handed to another process,
 * which maps the same file (tl_mapped_file_adopt) and so reads the tensors without a copy.
 *
 * The file may shrink or lose its disk while it is served. tl_mapped_file_check asks before each read; what slips
 * between the check and the read raises SIGBUS, which a program that serves files turns into zeros and a failed check
 * with tl_guard_mapped_files.
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

/* A file without a name, in memory, of len_bytes > 0 zeros, which this process may write through its mapping, and which
 * cannot be written through another one or in any other way; it cannot become shorter. Errors: TL_UNIMPLEMENTED: the
 * kernel has no such thing. TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_mapped_file_make(uint64_t len_bytes, struct tl_mapped_file **ret_file,
                                   struct tl_error *ret_error) TL_MUST_USE;
/* Set by the maker of the file: it is memory, which stays as long as a process has it mapped or open, and is never
 * damaged. */
bool tl_mapped_file_is_memory(const struct tl_mapped_file *file);

/* What shows whether a file is still what it was. */
struct tl_file_stamp {
    uint64_t size_bytes;
    int64_t modified_seconds; /* since 1970 */
    uint32_t modified_ns;     /* nanoseconds of that second */
};

/* The same with the descriptor of a file that another process has opened, and with the stamp that this process gives;
 * name stands for its path in messages. The descriptor is taken over, also on error. Only what the kernel says of the
 * file is believed. Errors: as tl_mapped_file_open. TL_DATA_LOSS: it is not as the stamp says. */
enum tl_status tl_mapped_file_adopt(int fd, const struct tl_file_stamp *stamp, const char *name,
                                    struct tl_mapped_file **ret_file, struct tl_error *ret_error) TL_MUST_USE;
struct tl_mapped_file *tl_mapped_file_get(struct tl_mapped_file *file);
void tl_mapped_file_put(struct tl_mapped_file *file); /* NULL is accepted */

const void *tl_mapped_file_data(const struct tl_mapped_file *file);
uint64_t tl_mapped_file_size_bytes(const struct tl_mapped_file *file);
const char *tl_mapped_file_path(const struct tl_mapped_file *file);
/* Open for reading; the file's. */
int tl_mapped_file_fd(const struct tl_mapped_file *file);
/* A number that no other mapped file of this process has, or ever had; not 0. */
uint64_t tl_mapped_file_id(const struct tl_mapped_file *file);
/* Whether a read of the bytes may have to wait for a file system: they lie in a file that this process has mapped
 * through this module, and not all of their pages are in memory; or the file belongs to another user, and the kernel
 * tells only that user which pages are. Thread: any. */
bool tl_mapped_file_may_wait(const void *data, uint64_t len_bytes);
/* As it was when it was mapped. */
void tl_mapped_file_get_stamp(const struct tl_mapped_file *file, struct tl_file_stamp *ret_stamp);

/* What the path of a file stands for. */
enum tl_file_at_path {
    TL_FILE_AT_PATH_SAME,  /* the file that is mapped, or it cannot be found out */
    TL_FILE_AT_PATH_OTHER, /* another file, which has replaced it */
    TL_FILE_AT_PATH_NONE,  /* no file */
};

/* Looks what the path stands for now. Blocks: for the file system. Thread: any. */
enum tl_file_at_path tl_mapped_file_look_up(const struct tl_mapped_file *file);
/* Whether there is more than one reference. Thread: any. */
bool tl_mapped_file_is_shared(const struct tl_mapped_file *file);

/* A tl_tensor_guard_fn whose context is the file.
 * Errors: TL_DATA_LOSS: the file is shorter than when it was mapped or was changed in place (size or modification
 * time), or a read of it has failed; the message names the path. */
enum tl_status tl_mapped_file_check(void *file, const void *data, uint64_t len_bytes, struct tl_error *ret_error);
/* Called when the contents of the file were refused with status and *ret_error. If the file has changed since it was
 * opened, or could not be read, that is the reason: then returns the error of tl_mapped_file_check instead, else
 * status. */
enum tl_status tl_mapped_file_blame(struct tl_mapped_file *file, enum tl_status status, struct tl_error *ret_error);

#endif
