// SPDX-License-Identifier: Apache-2.0
/*
 * One file that is written in place through a mapping, after a check that all of it fits on the disk. Between siblings
 * of this folder.
 */
#ifndef TENSOR_OUTPUT_FILE_H
#define TENSOR_OUTPUT_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include <tensorlane/status.h>

struct tl_output_file;

/* A file that another one is going to replace. */
struct tl_replaced_file {
    struct stat info;
    void *acl; /* [acl_bytes], its POSIX ACL as the kernel gives it; NULL: none */
    size_t acl_bytes;
};

/* Reads the ACL of the file at path, following links, into a replaced file without one. Files and file systems without
 * ACLs are no error. Errors: as tl_error_set_errno, naming the path. */
enum tl_status tl_replaced_file_read_acl(struct tl_replaced_file *replaced, const char *path,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* Frees the ACL. A zeroed one is accepted. */
void tl_replaced_file_fini(struct tl_replaced_file *replaced);

/* Creates a new file at path of len_bytes > 0, all zeros, and maps it. With replaced (NULL: no file) only this user may
 * open it until it is synced; then it gets the permissions of that file, its ACL included, and its owner and group if
 * the process may set them. Permissions that the umask takes away from this user are taken away when it is synced. Its
 * disk space is allocated and stays so until
 * tl_output_file_give_back_space: other files find only what is left. Starts with one reference.
 * Errors: as tl_error_set_errno; TL_ALREADY_EXISTS: path exists. TL_RESOURCE_EXHAUSTED: the disk is full or a limit is
 * too low, with the bytes that were needed. Nothing is left behind. */
enum tl_status tl_output_file_create(const char *path, uint64_t len_bytes, const struct tl_replaced_file *replaced,
                                     struct tl_output_file **ret_file, struct tl_error *ret_error) TL_MUST_USE;

/* Gives the space back, to be allocated anew by writing. What has been written is lost: called before anything is.
 * Errors: as tl_error_set_errno, naming the path. */
enum tl_status tl_output_file_give_back_space(struct tl_output_file *file, struct tl_error *ret_error) TL_MUST_USE;

/* The last reference unmaps the file, which stays on disk. Thread: any. */
struct tl_output_file *tl_output_file_get(struct tl_output_file *file);
void tl_output_file_put(struct tl_output_file *file); /* NULL is accepted */

void *tl_output_file_data(const struct tl_output_file *file);
uint64_t tl_output_file_len_bytes(const struct tl_output_file *file);
const char *tl_output_file_path(const struct tl_output_file *file);

/* Whether everything that was written so far fits on the disk. Thread: any. Errors: TL_DATA_LOSS: a page could not be
 * written through the mapping. */
enum tl_status tl_output_file_check(const struct tl_output_file *file, struct tl_error *ret_error) TL_MUST_USE;

/* Makes the contents durable, and sets the permissions that the file has at the end, where the file system can.
 * Errors: as tl_error_set_errno; of tl_output_file_check. Blocks: yes. */
enum tl_status tl_output_file_sync(const struct tl_output_file *file, struct tl_error *ret_error) TL_MUST_USE;

/* Makes the names in a folder durable, where the file system can do that. Errors: as tl_error_set_errno. */
enum tl_status tl_folder_sync(const char *path, struct tl_error *ret_error) TL_MUST_USE;

#endif
