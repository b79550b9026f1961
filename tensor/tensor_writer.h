// SPDX-License-Identifier: Apache-2.0
/* What the writers of all formats share: the target, its temporary name, the files and the tensors that lie in them.
 * Between siblings of this folder. */
#ifndef TENSOR_TENSOR_WRITER_H
#define TENSOR_TENSOR_WRITER_H

#include <stdbool.h>

#include "tensor/output_file.h"
#include "tensor/tensor_file.h"

/* Starts a writer for up to count tensors: checks the target and chooses the temporary name beside it. With is_folder
 * the temporary folder is made. Errors: as tl_error_set_errno; TL_INVALID_ARGUMENT: path ends in no name, or something
 * other than a file is there. TL_FAILED_PRECONDITION: a symbolic link of path was changed at the same time.
 * TL_ALREADY_EXISTS: is_folder, and something is there. TL_NOT_FOUND: the folder of path is missing. stop (NULL: never)
 * is copied. */
enum tl_status tl_tensor_writer_start(const char *path, size_t count, bool is_folder, const struct tl_writer_stop *stop,
                                      struct tl_tensor_writer **ret_writer, struct tl_error *ret_error) TL_MUST_USE;

/* Creates a file of the writer: the temporary file itself (name NULL), or NAME in the temporary folder. The writer owns
 * *ret_file. Errors: as tl_output_file_create; the folders that were made for NAME alone are removed. TL_CANCELLED:
 * stop wants it. */
enum tl_status tl_tensor_writer_add_file(struct tl_tensor_writer *writer, const char *name, uint64_t len_bytes,
                                         struct tl_output_file **ret_file, struct tl_error *ret_error) TL_MUST_USE;

/* Gives back the space of all files, when all are added and nothing is written: all of them fit on the disk. Errors: as
 * tl_output_file_give_back_space. TL_CANCELLED: stop wants it. */
enum tl_status tl_tensor_writer_give_back_space(struct tl_tensor_writer *writer,
                                                struct tl_error *ret_error) TL_MUST_USE;

/* Creates the destination of one tensor, at offset_bytes of the file.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_tensor_writer_add_tensor(struct tl_tensor_writer *writer, size_t index,
                                           const struct tl_tensor_slot *slot, struct tl_output_file *file,
                                           uint64_t offset_bytes, struct tl_error *ret_error) TL_MUST_USE;

/* Checks what all formats demand of a slot: meta-data that can be, not dead, a name of 1 to 512 bytes of UTF-8.
 * Errors: TL_INVALID_ARGUMENT, naming the tensor. */
enum tl_status tl_tensor_slot_check(const struct tl_tensor_slot *slot, struct tl_error *ret_error) TL_MUST_USE;

#endif
