// SPDX-License-Identifier: Apache-2.0
/*
 * Files of tensors: safetensors (many named tensors) and npy (one).
 *
 * Reading maps the file and gives tensors that lie in the mapping: nothing is copied, every offset is checked before
 * use. Writing goes to a temporary file beside the target, in place, so that a transport can receive straight into it;
 * the target appears, by rename, only when tl_tensor_writer_commit succeeds. A writer that is destroyed without commit
 * leaves nothing.
 */
#ifndef TENSOR_TENSOR_FILE_H
#define TENSOR_TENSOR_FILE_H

#include <stddef.h>

#include "tensor/tensor.h"

struct tl_named_tensor {
    char *name; /* UTF-8, NUL-terminated */
    struct tl_tensor *tensor;
};

struct tl_tensor_list {
    struct tl_named_tensor *items; /* [count], in file order */
    size_t count;
};

/* Frees the names, puts the tensors, zeroes the list. A zeroed list is accepted. */
void tl_tensor_list_fini(struct tl_tensor_list *list);

/* Reads a safetensors file. Every tensor keeps the mapping alive, is guarded by tl_mapped_file_check and has the file's
 * `__metadata__` as its annotations; those beyond the limits of annotations are left out, and a warning is logged.
 * Errors: as tl_mapped_file_open; TL_INVALID_ARGUMENT naming path, tensor and what is wrong: truncated, header longer
 * than 100 MB or than the file or of more than 4,194,304 values, not a JSON object, duplicate name, unknown dtype, rank
 * above 16, offsets beyond the data or not in order, overlapping or leaving a hole, shape and bytes that disagree, name
 * empty or not UTF-8. */
enum tl_status tl_safetensors_read(const char *path, struct tl_tensor_list *ret_list,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* The same for bytes in memory, for tests and fuzzers: tensors are not created, only checked. `where` names the source
 * in messages. */
enum tl_status tl_safetensors_check(const void *data, uint64_t len_bytes, const char *where,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Reads a .npy file (versions 1 to 3, little-endian or single-byte dtypes, C order); the name is the file's without
 * folder and ".npy".
 * Errors: as tl_mapped_file_open; TL_INVALID_ARGUMENT naming path and what is wrong: bad magic or version, header
 * longer than the file, not the three keys, unsupported dtype (object, structured, big-endian, strings), Fortran order
 * with rank above 1, data shorter or longer than the shape says. */
enum tl_status tl_npy_read(const char *path, struct tl_tensor_list *ret_list, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_npy_check(const void *data, uint64_t len_bytes, const char *where,
                            struct tl_error *ret_error) TL_MUST_USE;

/* Reads by what the file is: ".npy" is npy, anything else safetensors. */
enum tl_status tl_tensor_file_read(const char *path, struct tl_tensor_list *ret_list,
                                   struct tl_error *ret_error) TL_MUST_USE;

struct tl_tensor_writer;

/* One tensor that is going to be written. A writer uses slots only while it is created. */
struct tl_tensor_slot {
    const char *name;
    struct tl_meta_data meta_data;
};

/* How a caller can stop a writer that is being created or committed. It is asked before work on each file and before
 * the rename; when it answers true, the call fails with TL_CANCELLED, "interrupted". The context stays the caller's. */
struct tl_writer_stop {
    bool (*is_wanted)(void *context); /* NULL: never */
    void *context;
};

/* Starts a safetensors file at path: writes the header, allocates all disk space and maps the data. A file that is
 * there is replaced by the rename of commit; the new one has its permissions, and its owner and group where the process
 * may set them. A symbolic link to a file is followed: that file is replaced. The data are in an order that aligns
 * every element; the data of the file start at a multiple of 64 bytes. Errors: TL_INVALID_ARGUMENT: path is there and
 * no regular file, a name twice, empty, longer than 512 bytes, not UTF-8 or "__metadata__", a dtype safetensors cannot
 * hold (STRING, C128, I4, U4), a shape whose product overflows from left to right before a 0, a dead tensor, or a
 * packed tensor whose bits do not fill its bytes, naming the tensor; a header of more than 100 MB or, about, 4,194,304
 * values. TL_FAILED_PRECONDITION: a symbolic link of path was changed at the same time. TL_OUT_OF_RANGE: more than
 * 2^63-1 bytes. As tl_error_set_errno for the file: a full disk is TL_RESOURCE_EXHAUSTED and says how many bytes were
 * needed. TL_CANCELLED: stop (NULL: never) wants it. Nothing is left behind. annotations become the file's
 * `__metadata__`; NULL: none. */
enum tl_status tl_safetensors_writer_create(const char *path, const struct tl_tensor_slot *slots, size_t count,
                                            const struct tl_annotations *annotations, const struct tl_writer_stop *stop,
                                            struct tl_tensor_writer **ret_writer,
                                            struct tl_error *ret_error) TL_MUST_USE;

/* Starts a folder of .npy files: NAME.npy each. The folder is made beside path and renamed; an existing path is
 * refused with TL_ALREADY_EXISTS.
 * Errors: TL_INVALID_ARGUMENT: more than 16000 tensors, a name that is no file name ('/', a leading '.', longer than
 * 251 bytes), twice, a dtype npy cannot hold (all that NumPy itself does not have), or a shape whose dimensions other
 * than 0 have a product that is too large, naming the tensor. The rest as above. */
enum tl_status tl_npy_writer_create(const char *path, const struct tl_tensor_slot *slots, size_t count,
                                    const struct tl_writer_stop *stop, struct tl_tensor_writer **ret_writer,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Starts one .npy file with one tensor, whose name is not in it. A file that is there is replaced, as above.
 * Errors: TL_INVALID_ARGUMENT: path is there and no regular file, or a dtype or shape that npy cannot hold. The rest as
 * above. */
enum tl_status tl_npy_file_writer_create(const char *path, const struct tl_tensor_slot *slot,
                                         const struct tl_writer_stop *stop, struct tl_tensor_writer **ret_writer,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* The writable tensor of slot i, lying in the file; one reference for the caller, which must be put before commit. It
 * may be kept longer than the writer: the memory stays valid. */
struct tl_tensor *tl_tensor_writer_destination(struct tl_tensor_writer *writer, size_t index);

/* Whether everything that was written into the destinations so far fits on the disk; for a transport that would rather
 * stop than go on for nothing. Thread: any. Errors: TL_DATA_LOSS: naming the file that could not be written. */
enum tl_status tl_tensor_writer_check(const struct tl_tensor_writer *writer, struct tl_error *ret_error) TL_MUST_USE;

/* Makes the file durable and visible: sync, then rename. Blocks: until the disk has it. Errors: TL_FAILED_PRECONDITION:
 * a destination is still held, naming it; commit may be called again. As tl_error_set_errno, naming the path.
 * TL_ALREADY_EXISTS: the folder's target has appeared meanwhile. TL_DATA_LOSS: the disk could not be written.
 * TL_CANCELLED: stop wanted it before the rename. Nothing is left behind after tl_tensor_writer_destroy, except that
 * the target stays when only the last sync of its folder failed, or the permissions of its folders could not be set,
 * which the message says. */
enum tl_status tl_tensor_writer_commit(struct tl_tensor_writer *writer, struct tl_error *ret_error) TL_MUST_USE;

/* Ends the writer, removing what was not committed. NULL is accepted. */
void tl_tensor_writer_destroy(struct tl_tensor_writer *writer);

/* Path of the temporary file or folder, for a signal handler that must remove it; NULL after commit. */
const char *tl_tensor_writer_temporary_path(const struct tl_tensor_writer *writer);

#endif
