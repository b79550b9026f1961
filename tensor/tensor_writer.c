// SPDX-License-Identifier: Apache-2.0
/*
 * Writing tensor files: a temporary file or folder beside the target, tensors that lie in its mappings, and a rename.
 *
 * Happy path: start checks the target, follows symbolic links to a file and chooses the temporary name; the format adds
 * files and tensors; a transport writes into the tensors; commit syncs every file, renames, and syncs the folder.
 *
 * Failure modes: whatever fails before the rename leaves the target as it was, and destroy removes the temporary name.
 * The caller's stop is such a failure: it is asked between files, so that an interrupt does not wait for thousands.
 * A tensor that is still held keeps its mapping, not the name: a late write lands in a file without a name. If the
 * folder cannot be synced after the rename, the target is there and commit says that it may not outlast a crash. The
 * same holds when the permissions of folders cannot be set at the end.
 *
 * The umask may take the user's own permissions away. Folders have them until the target has its name.
 */
#include "tensor/tensor_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/random.h"
#include "tensor/file_reader.h"

struct destination {
    struct tl_tensor *tensor; /* NULL: not added yet */
    char *name;
};

struct tl_tensor_writer {
    char *target_path; /* without slashes at the end, links followed */
    char *folder_path; /* where the target is */
    char *temporary_path;
    bool is_folder;
    bool has_folder;    /* is_folder, and the temporary one exists */
    mode_t folder_mode; /* each folder has it at the end */
    bool is_committed;
    bool is_replacing;                /* a file that is there, */
    struct tl_replaced_file replaced; /* which was this */
    struct destination *destinations; /* [count] */
    size_t count;
    struct tl_output_file **files; /* [file_count], with space for count, at least 1 */
    size_t file_count;
    struct tl_writer_stop stop;
};

static enum tl_status check_stop(const struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    if (!writer->stop.is_wanted || !writer->stop.is_wanted(writer->stop.context)) return TL_OK;
    return tl_error_set(ret_error, TL_CANCELLED, "interrupted");
}

/* ---------------------------------------------------------------------------------------------------- starting -- */

/* What more links than this are is a ring, as for the kernel. */
#define MAX_LINKS 40

/* Puts the path that the target's symbolic links lead to in its place. readlink knows nothing of the links that the
 * system does not trust, for example those that another user made in /tmp. So the path must lead to the file that stat,
 * which does refuse such links, has found: otherwise a link was changed after that. */
static enum tl_status follow_links(struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    char target[PATH_MAX], *next;
    struct stat info;
    unsigned count;
    for (count = 0; count < MAX_LINKS; count++) {
        char *path = writer->target_path;
        ssize_t len = readlink(path, target, sizeof(target));
        if (len < 0 || (size_t)len == sizeof(target)) break;
        const char *slash = target[0] == '/' ? NULL : strrchr(path, '/');
        if (asprintf(&next, "%.*s%.*s", slash ? (int)(slash + 1 - path) : 0, path, (int)len, target) < 0)
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to write %s", path);
        free(path);
        writer->target_path = next;
    }
    bool is_same =
        count == 0 || (lstat(writer->target_path, &info) == 0 && info.st_dev == writer->replaced.info.st_dev &&
                       info.st_ino == writer->replaced.info.st_ino);
    if (is_same) return TL_OK;
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "cannot write %s: a symbolic link to it was changed at the same time; try again",
                        writer->target_path);
}

/* Finds out what the target is. A symbolic link that leads to no file is itself the target. */
static enum tl_status check_target(struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    const char *path = writer->target_path;
    if (writer->is_folder ? lstat(path, &writer->replaced.info) : stat(path, &writer->replaced.info)) {
        if (errno == ENOENT) return TL_OK;
        return tl_error_set_errno(ret_error, errno, "cannot write %s", path);
    }
    if (writer->is_folder)
        return tl_error_set(ret_error, TL_ALREADY_EXISTS, "%s exists; choose another name or remove it", path);
    if (!S_ISREG(writer->replaced.info.st_mode))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s exists and is not a regular file; choose another name",
                            path);
    writer->is_replacing = true;
    enum tl_status status = tl_replaced_file_read_acl(&writer->replaced, path, ret_error);
    if (status != TL_OK) return status;
    return follow_links(writer, ret_error);
}

/* The last part of a path; NULL when it cannot be the name of a file. */
static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    return *name == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ? NULL : name;
}

/* Checks the target, follows links to a file, splits it into folder and name and composes the temporary name. */
static enum tl_status choose_names(struct tl_tensor_writer *writer, const char *path, struct tl_error *ret_error)
{
    size_t len = strlen(path);
    while (writer->is_folder && len > 1 && path[len - 1] == '/')
        len--;
    writer->target_path = strndup(path, len);
    if (!writer->target_path) goto no_memory;
    if (name_of(writer->target_path)) {
        enum tl_status status = check_target(writer, ret_error);
        if (status != TL_OK) return status;
    }
    const char *name = name_of(writer->target_path);
    if (!name)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "'%s' does not end in the name of a %s to write", path,
                            writer->is_folder ? "folder" : "file");
    char *slash = strrchr(writer->target_path, '/');
    if (!slash) {
        writer->folder_path = strdup(".");
    } else {
        writer->folder_path =
            strndup(writer->target_path, slash == writer->target_path ? 1 : slash - writer->target_path);
    }
    if (!writer->folder_path) goto no_memory;
    /* The name is cut so that a name of any valid length has a temporary one. */
    if (asprintf(&writer->temporary_path, "%s/.%.200s.tmp-%016" PRIx64, writer->folder_path, name, tl_random_u64()) <
        0) {
        writer->temporary_path = NULL;
        goto no_memory;
    }
    return TL_OK;

no_memory:
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to write %s", path);
}

/* Without the check the error would name the temporary file. */
static enum tl_status check_folder(const struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    struct stat info;
    if (stat(writer->folder_path, &info) == 0 || errno != ENOENT) return TL_OK;
    return tl_error_set(ret_error, TL_NOT_FOUND, "cannot write %s: the folder %s does not exist; create it first",
                        writer->target_path, writer->folder_path);
}

/* Makes a folder in which this user may do everything, whatever the umask is. Returns false with an errno, or true with
 * the mode that the umask leaves. */
static bool make_folder(const char *path, mode_t *ret_mode)
{
    struct stat info;
    if (mkdir(path, 0777) != 0) return false;
    bool is_open = stat(path, &info) == 0;
    *ret_mode = is_open ? info.st_mode & 07777 : 0;
    if (is_open && (*ret_mode & S_IRWXU) != S_IRWXU) is_open = chmod(path, *ret_mode | S_IRWXU) == 0;
    if (is_open) return true;
    int error_number = errno;
    rmdir(path);
    errno = error_number;
    return false;
}

enum tl_status tl_tensor_writer_start(const char *path, size_t count, bool is_folder, const struct tl_writer_stop *stop,
                                      struct tl_tensor_writer **ret_writer, struct tl_error *ret_error)
{
    enum tl_status status;
    struct tl_tensor_writer *writer = calloc(1, sizeof(*writer));
    if (writer) {
        writer->is_folder = is_folder;
        if (stop) writer->stop = *stop;
        writer->destinations = calloc(count + 1, sizeof(writer->destinations[0]));
        writer->files = calloc(count + 1, sizeof(writer->files[0]));
    }
    if (!writer || !writer->destinations || !writer->files) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to write %s", path);
        goto fail;
    }
    writer->count = count;
    status = choose_names(writer, path, ret_error);
    if (status == TL_OK) status = check_folder(writer, ret_error);
    if (status != TL_OK) goto fail;
    if (is_folder) {
        if (!make_folder(writer->temporary_path, &writer->folder_mode)) {
            status = tl_error_set_errno(ret_error, errno, "cannot create the folder %s", writer->temporary_path);
            goto fail;
        }
        writer->has_folder = true;
    }
    *ret_writer = writer;
    return TL_OK;

fail:
    tl_tensor_writer_destroy(writer);
    return status;
}

/* Makes the folders between the temporary one and the file. */
static enum tl_status make_folders(const struct tl_tensor_writer *writer, char *path, struct tl_error *ret_error)
{
    char *slash = path + strlen(writer->temporary_path);
    while ((slash = strchr(slash + 1, '/')) != NULL) {
        *slash = '\0';
        enum tl_status status = TL_OK;
        mode_t mode;
        if (!make_folder(path, &mode) && errno != EEXIST)
            status = tl_error_set_errno(ret_error, errno, "cannot create the folder %s", path);
        *slash = '/';
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

/* Does something with each folder between the temporary one and the file, the innermost first. */
static enum tl_status each_folder(const struct tl_tensor_writer *writer, const char *file_path,
                                  enum tl_status (*visit)(const char *path, struct tl_error *ret_error),
                                  struct tl_error *ret_error)
{
    char path[PATH_MAX + 1]; /* a folder that could be made and a slash always fit */
    enum tl_status status = TL_OK;
    size_t outer_len = strlen(writer->temporary_path);
    if (!writer->is_folder) return TL_OK;
    snprintf(path, sizeof(path), "%s", file_path);
    for (char *slash = strrchr(path, '/'); status == TL_OK && slash > path + outer_len; slash = strrchr(path, '/')) {
        *slash = '\0';
        status = visit(path, ret_error);
    }
    return status;
}

/* One that is not empty stays: another file is in it, which will be removed later. */
static enum tl_status remove_folder(const char *path, struct tl_error *ret_error)
{
    (void)ret_error;
    (void)rmdir(path);
    return TL_OK;
}

enum tl_status tl_tensor_writer_add_file(struct tl_tensor_writer *writer, const char *name, uint64_t len_bytes,
                                         struct tl_output_file **ret_file, struct tl_error *ret_error)
{
    char *path = NULL;
    TL_CHECK(writer->is_folder == (name != NULL));
    TL_CHECK(writer->file_count < writer->count + 1);
    enum tl_status status = check_stop(writer, ret_error);
    if (status != TL_OK) return status;
    if (name && asprintf(&path, "%s/%s", writer->temporary_path, name) < 0)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to write %s", writer->target_path);
    struct tl_output_file *file;
    status = path ? make_folders(writer, path, ret_error) : TL_OK;
    if (status == TL_OK)
        status = tl_output_file_create(path ? path : writer->temporary_path, len_bytes,
                                       writer->is_replacing ? &writer->replaced : NULL, &file, ret_error);
    if (status != TL_OK && path) (void)each_folder(writer, path, remove_folder, NULL);
    free(path);
    if (status != TL_OK) return status;
    writer->files[writer->file_count++] = file;
    *ret_file = file;
    return TL_OK;
}

enum tl_status tl_tensor_writer_give_back_space(struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < writer->file_count && status == TL_OK; i++) {
        status = check_stop(writer, ret_error);
        if (status == TL_OK) status = tl_output_file_give_back_space(writer->files[i], ret_error);
    }
    return status;
}

static void release_mapping(void *data, void *context)
{
    (void)data;
    tl_output_file_put(context);
}

enum tl_status tl_tensor_writer_add_tensor(struct tl_tensor_writer *writer, size_t index,
                                           const struct tl_tensor_slot *slot, struct tl_output_file *file,
                                           uint64_t offset_bytes, struct tl_error *ret_error)
{
    TL_CHECK(index < writer->count && !writer->destinations[index].tensor);
    struct destination *destination = &writer->destinations[index];
    const struct tl_tensor_view view = {
        .size_bytes = sizeof(view),
        .dtype = slot->meta_data.dtype,
        .rank = slot->meta_data.shape.rank,
        .dims = slot->meta_data.shape.dims,
        .data = tl_output_file_data(file),
        .offset_bytes = offset_bytes,
        .capacity_bytes = tl_output_file_len_bytes(file),
        .release = release_mapping,
        .release_context = file,
    };
    destination->name = strdup(slot->name);
    if (!destination->name)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to write %s", writer->target_path);
    enum tl_status status = tl_tensor_wrap(&view, &destination->tensor, ret_error);
    /* From here on the release callback owes the file this reference. */
    if (status == TL_OK) tl_output_file_get(file);
    return status;
}

enum tl_status tl_tensor_slot_check(const struct tl_tensor_slot *slot, struct tl_error *ret_error)
{
    size_t name_len = strlen(slot->name);
    if (!tl_tensor_name_is_valid(slot->name, name_len))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a tensor name of %zu bytes is not 1 to 512 bytes of UTF-8",
                            name_len);
    if (slot->meta_data.is_dead)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "tensor '%s' is dead, which no file can hold", slot->name);
    if (tl_meta_data_validate(&slot->meta_data, ret_error) != TL_OK) {
        tl_error_prefix(ret_error, "tensor '%s': ", slot->name);
        if (ret_error) ret_error->code = TL_INVALID_ARGUMENT;
        return TL_INVALID_ARGUMENT;
    }
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------- using, ending -- */

struct tl_tensor *tl_tensor_writer_destination(struct tl_tensor_writer *writer, size_t index)
{
    TL_CHECK(index < writer->count);
    return tl_tensor_get(writer->destinations[index].tensor);
}

const char *tl_tensor_writer_temporary_path(const struct tl_tensor_writer *writer)
{
    return writer->is_committed ? NULL : writer->temporary_path;
}

enum tl_status tl_tensor_writer_check(const struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < writer->file_count && status == TL_OK; i++)
        status = tl_output_file_check(writer->files[i], ret_error);
    return status;
}

static int rename_temporary(const struct tl_tensor_writer *writer)
{
    const char *from = writer->temporary_path, *to = writer->target_path;
    if (!writer->is_folder) return rename(from, to);
    /* Without the flag a folder that was made meanwhile would be replaced when it is empty. */
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return -1;
    struct stat info;
    if (lstat(to, &info) == 0) {
        errno = EEXIST;
        return -1;
    }
    return rename(from, to);
}

/* Sets the mode of each folder of the tree, the innermost first. Returns 0, or an errno. */
static int set_modes(FTS *tree, mode_t mode)
{
    for (;;) {
        errno = 0; /* which tells the end from an error */
        const FTSENT *entry = fts_read(tree);
        if (!entry) return errno;
        if (entry->fts_info == FTS_DNR || entry->fts_info == FTS_ERR) return entry->fts_errno;
        if (entry->fts_info == FTS_DP && chmod(entry->fts_path, mode) != 0) return errno;
    }
}

/* Takes away from each folder of the target what the umask forbids its user. */
static enum tl_status restrict_folders(const struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    char *const paths[] = {writer->target_path, NULL};
    if (!writer->is_folder || (writer->folder_mode & S_IRWXU) == S_IRWXU) return TL_OK;
    FTS *tree = fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    int error_number = tree ? set_modes(tree, writer->folder_mode) : errno;
    if (tree) fts_close(tree);
    if (error_number == 0) return TL_OK;
    return tl_error_set_errno(ret_error, error_number,
                              "%s is complete, but the permissions of its folders cannot be set", writer->target_path);
}

enum tl_status tl_tensor_writer_commit(struct tl_tensor_writer *writer, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    TL_CHECK(!writer->is_committed);
    for (size_t i = 0; i < writer->count; i++)
        if (tl_tensor_is_shared(writer->destinations[i].tensor))
            return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                                "cannot finish %s: tensor '%s' is still in use; put every reference first",
                                writer->target_path, writer->destinations[i].name);
    for (size_t i = 0; i < writer->file_count && status == TL_OK; i++) {
        status = check_stop(writer, ret_error);
        if (status == TL_OK) status = tl_output_file_sync(writer->files[i], ret_error);
        if (status == TL_OK)
            status = each_folder(writer, tl_output_file_path(writer->files[i]), tl_folder_sync, ret_error);
    }
    if (status == TL_OK && writer->is_folder) status = tl_folder_sync(writer->temporary_path, ret_error);
    if (status == TL_OK) status = check_stop(writer, ret_error);
    if (status != TL_OK) return status;
    if (rename_temporary(writer) != 0)
        return tl_error_set_errno(ret_error, errno, "cannot rename %s to %s", writer->temporary_path,
                                  writer->target_path);
    writer->is_committed = true;
    status = tl_folder_sync(writer->folder_path, ret_error);
    if (status == TL_OK) return restrict_folders(writer, ret_error);
    tl_error_prefix(ret_error, "%s is complete but may not outlast a crash: ", writer->target_path);
    return status;
}

void tl_tensor_writer_destroy(struct tl_tensor_writer *writer)
{
    if (!writer) return;
    for (size_t i = 0; i < writer->count; i++) {
        tl_tensor_put(writer->destinations[i].tensor);
        free(writer->destinations[i].name);
    }
    for (size_t i = 0; i < writer->file_count; i++) {
        if (!writer->is_committed) {
            unlink(tl_output_file_path(writer->files[i]));
            (void)each_folder(writer, tl_output_file_path(writer->files[i]), remove_folder, NULL);
        }
        tl_output_file_put(writer->files[i]);
    }
    if (writer->has_folder && !writer->is_committed) rmdir(writer->temporary_path);
    tl_replaced_file_fini(&writer->replaced);
    free(writer->destinations);
    free(writer->files);
    free(writer->target_path);
    free(writer->folder_path);
    free(writer->temporary_path);
    free(writer);
}
