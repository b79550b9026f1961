// SPDX-License-Identifier: Apache-2.0
/* What the writers of all formats share: targets, temporary names, destinations, commit, and what is left behind. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tensor/mapped_file.h"
#include "tests/fakes/fault_alloc.h"
#include "tests/fakes/temp_folder.h"

static int rename_error, renameat2_error;

static int fake_rename(const char *from, const char *to)
{
    errno = rename_error;
    return rename_error == 0 ? rename(from, to) : -1;
}

static int fake_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    errno = renameat2_error;
    return renameat2_error == 0 ? renameat2(from_fd, from, to_fd, to, flags) : -1;
}

static const char *swapped_link, *swapped_to; /* At the next readlink this link changes its target; NULL: none does. */

static ssize_t fake_readlink(const char *path, char *buffer, size_t len)
{
    if (swapped_link) {
        ck_assert_int_eq(unlink(swapped_link), 0);
        ck_assert_int_eq(symlink(swapped_to, swapped_link), 0);
        swapped_link = NULL;
    }
    return readlink(path, buffer, len);
}

#define readlink fake_readlink
#define rename fake_rename
#define renameat2 fake_renameat2
#include "fakes/run_suite.h"
#include "tensor/tensor_writer.c"

static struct tl_error error;
static struct tl_tensor_writer *writer;

static const struct tl_tensor_slot slots[] = {
    {.name = "a", .meta_data = {.dtype = TL_U8, .shape = {1, {4}}, .size_bytes = 4}},
    {.name = "b", .meta_data = {.dtype = TL_U8, .shape = {1, {2}}, .size_bytes = 2}},
};

static void teardown(void)
{
    tl_tensor_writer_destroy(writer);
    temp_folder_remove();
}

static unsigned asked_count, stop_at; /* How often the writer has asked, and when it is told to stop; 0: never. */

static bool is_stop_wanted(void *context)
{
    ck_assert_ptr_eq(context, &stop_at);
    return ++asked_count == stop_at;
}

/* Writes a file with both slots, or a folder with a file for each. */
static enum tl_status start(const char *path, bool is_folder)
{
    struct tl_output_file *file = NULL;
    struct tl_tensor_writer *started;
    const struct tl_writer_stop stop = {is_stop_wanted, &stop_at};
    enum tl_status status = tl_tensor_writer_start(path, 2, is_folder, &stop, &started, &error);
    if (status != TL_OK) return status;
    for (size_t i = 0; i < 2 && status == TL_OK; i++) {
        if (is_folder || i == 0)
            status = tl_tensor_writer_add_file(started, is_folder ? slots[i].name : NULL, 6, &file, &error);
        if (status == TL_OK)
            status = tl_tensor_writer_add_tensor(started, i, &slots[i], file, is_folder ? 0 : i * 4, &error);
    }
    if (status == TL_OK) status = tl_tensor_writer_give_back_space(started, &error);
    if (status != TL_OK) {
        tl_tensor_writer_destroy(started);
        return status;
    }
    writer = started;
    return TL_OK;
}

static void fill(size_t index, const char *text)
{
    struct tl_tensor *tensor = tl_tensor_writer_destination(writer, index);
    ck_assert(tl_tensor_is_writable(tensor));
    memcpy(tl_tensor_data(tensor), text, strlen(text));
    tl_tensor_put(tensor);
}

static void check_content(const char *path, const char *expected)
{
    char text[64] = "";
    int fd = open(path, O_RDONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(read(fd, text, sizeof(text)), (ssize_t)strlen(expected));
    ck_assert_str_eq(text, expected);
    close(fd);
}

static void destroy(void)
{
    tl_tensor_writer_destroy(writer);
    writer = NULL;
}

START_TEST(file)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    fill(0, "abcd");
    fill(1, "ef");
    ck_assert_int_ne(access(temp_path("out"), F_OK), 0);
    ck_assert_ptr_nonnull(strstr(tl_tensor_writer_temporary_path(writer), "/.out.tmp-"));
    ck_assert_int_eq(access(tl_tensor_writer_temporary_path(writer), F_OK), 0);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_ptr_null(tl_tensor_writer_temporary_path(writer));
    destroy();
    check_content(temp_path("out"), "abcdef");
    ck_assert_uint_eq(temp_entry_count(temp_folder), 1);
}
END_TEST

START_TEST(folder)
{
    ck_assert_int_eq(start(temp_path("out//"), true), TL_OK);
    fill(0, "abcdef");
    fill(1, "gh");
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    destroy();
    check_content(temp_path("out/a"), "abcdef");
    ck_assert_uint_eq(temp_entry_count(temp_path("out")), 2);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 1);
}
END_TEST

START_TEST(nothing_is_left_without_commit)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    ck_assert_int_eq(start(temp_path("out"), true), TL_OK);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    tl_tensor_writer_destroy(NULL);
}
END_TEST

START_TEST(file_is_replaced)
{
    temp_write(temp_path("out"), "old", 3);
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    fill(0, "abcd");
    fill(1, "ef");
    check_content(temp_path("out"), "old");
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    check_content(temp_path("out"), "abcdef");
}
END_TEST

static void check_mode(const char *path, mode_t expected)
{
    struct stat info;
    ck_assert_int_eq(stat(path, &info), 0);
    ck_assert_msg((info.st_mode & 0777) == expected, "%s has mode %o", path, info.st_mode & 0777);
}

static const mode_t umasks[] = {0277, 0200, 0400, 0777, 0077};

/* Permissions bind no root, so that it is another user for the test. */
/* Root, which may do everything, becomes another user. Returns false where that user does not reach the folder, as in
 * a private TMPDIR. */
static bool begin_as_user(mode_t mask)
{
    if (geteuid() == 0) {
        ck_assert_int_eq(chown(temp_folder, 65534, 65534), 0);
        ck_assert_int_eq(seteuid(65534), 0);
        if (euidaccess(temp_folder, W_OK) != 0) {
            fprintf(stderr, "skipped: another user does not reach %s\n", temp_folder);
            ck_assert_int_eq(seteuid(0), 0);
            return false;
        }
    }
    umask(mask);
    return true;
}

static void commit_as_user(void)
{
    fill(0, "abcd");
    fill(1, "ef");
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    destroy();
    if (getuid() == 0) ck_assert_int_eq(seteuid(0), 0);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 1);
}

START_TEST(umask_forbids_the_user_its_file)
{
    if (!begin_as_user(umasks[_i])) return;
    ck_assert_msg(start(temp_path("out"), false) == TL_OK, "%s", error.message);
    commit_as_user();
    check_mode(temp_path("out"), 0666 & ~umasks[_i]);
}
END_TEST

START_TEST(umask_forbids_the_user_the_file_that_replaces_one)
{
    if (!begin_as_user(0077)) return;
    temp_write(temp_path("out"), "old", 3);
    umask(umasks[_i]);
    ck_assert_msg(start(temp_path("out"), false) == TL_OK, "%s", error.message);
    commit_as_user();
    check_mode(temp_path("out"), 0600);
    check_content(temp_path("out"), "abcdef");
}
END_TEST

START_TEST(umask_forbids_the_user_its_folders)
{
    static const char *const names[] = {"b", "x/y/a"}, *const folders[] = {"out", "out/x", "out/x/y"};
    struct tl_output_file *file;
    if (!begin_as_user(umasks[_i])) return;
    ck_assert_msg(tl_tensor_writer_start(temp_path("out"), 2, true, NULL, &writer, &error) == TL_OK, "%s",
                  error.message);
    for (size_t i = 0; i < 2; i++) {
        ck_assert_msg(tl_tensor_writer_add_file(writer, names[i], 6, &file, &error) == TL_OK, "%s", error.message);
        ck_assert_int_eq(tl_tensor_writer_add_tensor(writer, i, &slots[i], file, 0, &error), TL_OK);
    }
    ck_assert_int_eq(tl_tensor_writer_give_back_space(writer, &error), TL_OK);
    commit_as_user();
    for (size_t i = 0; i < 3; i++) {
        check_mode(temp_path(folders[i]), 0777 & ~umasks[_i]);
        ck_assert_int_eq(chmod(temp_path(folders[i]), 0700), 0);
    }
    check_mode(temp_path("out/b"), 0666 & ~umasks[_i]);
    check_mode(temp_path("out/x/y/a"), 0666 & ~umasks[_i]);
}
END_TEST

/* The owner may read and write, the user 1234 may read, through the mask; all others may nothing. */
START_TEST(acl_of_a_file_that_is_replaced)
{
    static const uint32_t acl[] = {
        2, /* the version; then tag and permissions in one word, and the id */
        0x00060001, UINT32_MAX, 0x00040002, 1234,       0x00000004,
        UINT32_MAX, 0x00040010, UINT32_MAX, 0x00000020, UINT32_MAX,
    };
    char found[sizeof(acl)];
    temp_write(temp_path("out"), "old", 3);
    if (setxattr(temp_path("out"), "system.posix_acl_access", acl, sizeof(acl), 0) != 0) {
        ck_assert_int_eq(errno, EOPNOTSUPP);
        printf("%s: the file system has no ACLs, so they are not tested\n", temp_folder);
        return;
    }
    ck_assert_int_eq(symlink("out", temp_path("link")), 0);
    ck_assert_int_eq(start(temp_path("link"), false), TL_OK);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_int_eq(getxattr(temp_path("out"), "system.posix_acl_access", found, sizeof(found)), sizeof(acl));
    ck_assert_mem_eq(found, acl, sizeof(acl));
}
END_TEST

START_TEST(link_to_nothing_is_replaced)
{
    ck_assert_int_eq(symlink("nowhere", temp_path("link")), 0);
    ck_assert_int_eq(start(temp_path("link"), false), TL_OK);
    fill(0, "abcd");
    fill(1, "ef");
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    check_content(temp_path("link"), "abcdef");
    ck_assert_uint_eq(temp_entry_count(temp_folder), 1);
}
END_TEST

/* The link leads from a file that the system has let us find to one that it may not let us reach through this link. */
START_TEST(link_is_changed_while_it_is_followed)
{
    static const char *const changed_to[] = {"other", "nowhere"};
    temp_write(temp_path("file"), "old", 3);
    temp_write(temp_path("other"), "other", 5);
    ck_assert_int_eq(symlink("file", temp_path("link")), 0);
    swapped_link = temp_path("link");
    swapped_to = changed_to[_i];
    ck_assert_int_eq(start(temp_path("link"), false), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, swapped_to));
    check_content(temp_path("file"), "old");
    check_content(temp_path("other"), "other");
    ck_assert_uint_eq(temp_entry_count(temp_folder), 3);
}
END_TEST

/* The limit on the length of names shows in the second of three folders; the first has been made. */
START_TEST(folders_of_a_file_that_cannot_be_created)
{
    char path[4096];
    struct tl_output_file *file;
    size_t len = (size_t)snprintf(path, sizeof(path), "%s", temp_folder);
    while (len < 4040)
        len += (size_t)snprintf(path + len, sizeof(path) - len, "/.");
    snprintf(path + len, sizeof(path) - len, "/o");
    ck_assert_int_eq(tl_tensor_writer_start(path, 1, true, NULL, &writer, &error), TL_OK);
    static const char name[] = "a/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb/c/d";
    ck_assert_int_eq(tl_tensor_writer_add_file(writer, name, 6, &file, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(temp_entry_count(tl_tensor_writer_temporary_path(writer)), 0);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}
END_TEST

START_TEST(targets_refused)
{
    static const char *const no_names[] = {"", "/", ".", "..", "x/", "x/.", "x/.."};
    for (size_t i = 0; i < TL_ARRAY_COUNT(no_names); i++)
        ck_assert_int_eq(start(no_names[i], false), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(start("/", true), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(start("", true), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(start(temp_folder, false), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(start("/dev/null", false), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(start(temp_folder, true), TL_ALREADY_EXISTS);
    temp_write(temp_path("f"), "", 0);
    ck_assert_int_eq(start(temp_path("f"), true), TL_ALREADY_EXISTS);
    ck_assert_int_eq(symlink("nowhere", temp_path("link")), 0);
    ck_assert_int_eq(start(temp_path("link"), true), TL_ALREADY_EXISTS);
    ck_assert_int_eq(start(temp_path("none/out"), false), TL_NOT_FOUND);
    ck_assert_int_eq(start(temp_path("none/out"), true), TL_NOT_FOUND);
    ck_assert_int_eq(start(temp_path("f/out"), false), TL_NOT_FOUND);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 2);
}
END_TEST

START_TEST(folder_is_missing)
{
    char expected[600];
    const char *path = temp_path("none/out"), *folder = temp_path("none");
    snprintf(expected, sizeof(expected), "cannot write %s: the folder %s does not exist; create it first", path,
             folder);
    ck_assert_int_eq(start(path, _i != 0), TL_NOT_FOUND);
    ck_assert_str_eq(error.message, expected);
}
END_TEST

START_TEST(relative_paths)
{
    ck_assert_int_eq(chdir(temp_folder), 0);
    ck_assert_int_eq(start("out", false), TL_OK);
    ck_assert_int_eq(strncmp(tl_tensor_writer_temporary_path(writer), "./.out.tmp-", 11), 0);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_int_eq(access("out", F_OK), 0);
}
END_TEST

START_TEST(longest_name)
{
    char name[256];
    memset(name, 'n', 255);
    name[255] = '\0';
    ck_assert_int_eq(start(temp_path(name), false), TL_OK);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_int_eq(access(temp_path(name), F_OK), 0);
}
END_TEST

START_TEST(held_destination_refuses_commit)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    struct tl_tensor *held = tl_tensor_writer_destination(writer, 1);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "'b'"));
    ck_assert_int_ne(access(temp_path("out"), F_OK), 0);
    tl_tensor_put(held);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
}
END_TEST

START_TEST(destination_outlives_the_writer)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    struct tl_tensor *held = tl_tensor_writer_destination(writer, 0);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    memcpy(tl_tensor_data(held), "late", 4);
    tl_tensor_put(held);
}
END_TEST

START_TEST(rename_fails)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    rename_error = EACCES;
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_PERMISSION_DENIED);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("out")));
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}
END_TEST

START_TEST(page_could_not_be_written)
{
    signal(SIGBUS, SIG_DFL);
    ck_assert_int_eq(start(temp_path("out"), true), TL_OK);
    ck_assert_int_eq(tl_tensor_writer_give_back_space(writer, &error), TL_OK);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(tl_tensor_writer_check(writer, &error), TL_OK);
    char lost[300];
    snprintf(lost, sizeof(lost), "%s/b", tl_tensor_writer_temporary_path(writer));
    ck_assert_int_eq(truncate(lost, 0), 0);
    fill(1, "x");
    ck_assert_int_eq(tl_tensor_writer_check(writer, &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, lost));
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_DATA_LOSS);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}
END_TEST

START_TEST(file_is_lost_before_commit)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    ck_assert_int_eq(unlink(tl_tensor_writer_temporary_path(writer)), 0);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_NOT_FOUND);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}
END_TEST

/* With and without a kernel that can rename without replacing. */
START_TEST(folder_has_appeared_meanwhile)
{
    renameat2_error = _i ? EINVAL : 0;
    ck_assert_int_eq(start(temp_path("out"), true), TL_OK);
    ck_assert_int_eq(mkdir(temp_path("out"), 0700), 0);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_ALREADY_EXISTS);
    destroy();
    ck_assert_uint_eq(temp_entry_count(temp_folder), 1);
    ck_assert_uint_eq(temp_entry_count(temp_path("out")), 0);
}
END_TEST

START_TEST(folder_without_the_flag)
{
    renameat2_error = ENOSYS;
    ck_assert_int_eq(start(temp_path("out"), true), TL_OK);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_uint_eq(temp_entry_count(temp_path("out")), 2);
}
END_TEST

START_TEST(commit_twice)
{
    ck_assert_int_eq(start(temp_path("out"), false), TL_OK);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    enum tl_status status = tl_tensor_writer_commit(writer, &error);
    ck_abort_msg("returned %d", (int)status);
}
END_TEST

START_TEST(slots_checked)
{
    char long_name[514];
    struct tl_tensor_slot slot = slots[0];
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_OK);
    slot.name = "";
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_INVALID_ARGUMENT);
    slot.name = "\xff";
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_INVALID_ARGUMENT);
    memset(long_name, 'x', 513);
    long_name[513] = '\0';
    slot.name = long_name;
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_INVALID_ARGUMENT);
    slot = (struct tl_tensor_slot){.name = "w", .meta_data.is_dead = true};
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "'w'"));
    slot = slots[0];
    slot.meta_data.size_bytes++;
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "'a'"));
    slot.meta_data.shape.dims[0] = UINT64_MAX;
    ck_assert_int_eq(tl_tensor_slot_check(&slot, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_slot_check(&slot, NULL), TL_INVALID_ARGUMENT);
}
END_TEST

/* Whenever it is interrupted before the rename, nothing is left; after the rename it asks no more. */
START_TEST(interrupted)
{
    const bool is_folder = _i != 0;
    unsigned while_started = 0, while_committed = 0;
    for (stop_at = 1;; stop_at++) {
        asked_count = 0;
        writer = NULL;
        enum tl_status status = start(temp_path("out"), is_folder);
        if (status != TL_OK) while_started++;
        if (status == TL_OK) {
            status = tl_tensor_writer_commit(writer, &error);
            if (status == TL_OK) break;
            while_committed++;
            ck_assert_ptr_nonnull(tl_tensor_writer_temporary_path(writer));
            tl_tensor_writer_destroy(writer);
        }
        ck_assert_int_eq(status, TL_CANCELLED);
        ck_assert_str_eq(error.message, "interrupted");
        ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    }
    /* It asks for each file that it creates, empties and syncs, and before the rename. */
    ck_assert_uint_eq(while_started, is_folder ? 4 : 2);
    ck_assert_uint_eq(while_committed, is_folder ? 3 : 2);
    ck_assert_uint_eq(asked_count, while_started + while_committed);
    ck_assert_int_eq(access(temp_path("out"), F_OK), 0);
}
END_TEST

START_TEST(out_of_memory)
{
    for (unsigned n = 1;; n++) {
        fault_arm(n);
        enum tl_status status = start(temp_path("out"), _i != 0);
        if (!fault_was_hit()) {
            ck_assert_uint_gt(n, 7);
            ck_assert_int_eq(status, TL_OK);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("tensor_writer");
    TCase *tcase = tcase_create("tensor_writer");
    tcase_add_checked_fixture(tcase, temp_folder_make, teardown);
    tcase_add_test(tcase, file);
    tcase_add_test(tcase, folder);
    tcase_add_test(tcase, nothing_is_left_without_commit);
    tcase_add_test(tcase, file_is_replaced);
    tcase_add_loop_test(tcase, umask_forbids_the_user_its_file, 0, 5);
    tcase_add_loop_test(tcase, umask_forbids_the_user_the_file_that_replaces_one, 0, 5);
    tcase_add_loop_test(tcase, umask_forbids_the_user_its_folders, 0, 5);
    tcase_add_test(tcase, acl_of_a_file_that_is_replaced);
    tcase_add_test(tcase, link_to_nothing_is_replaced);
    tcase_add_loop_test(tcase, link_is_changed_while_it_is_followed, 0, 2);
    tcase_add_test(tcase, folders_of_a_file_that_cannot_be_created);
    tcase_add_test(tcase, targets_refused);
    tcase_add_loop_test(tcase, folder_is_missing, 0, 2);
    tcase_add_test(tcase, relative_paths);
    tcase_add_test(tcase, longest_name);
    tcase_add_test(tcase, held_destination_refuses_commit);
    tcase_add_test(tcase, destination_outlives_the_writer);
    tcase_add_test(tcase, rename_fails);
    tcase_add_test(tcase, page_could_not_be_written);
    tcase_add_test(tcase, file_is_lost_before_commit);
    tcase_add_loop_test(tcase, folder_has_appeared_meanwhile, 0, 2);
    tcase_add_test(tcase, folder_without_the_flag);
    tcase_add_test(tcase, slots_checked);
    tcase_add_loop_test(tcase, interrupted, 0, 2);
    tcase_add_loop_test(tcase, out_of_memory, 0, 2);
    suite_add_tcase(suite, tcase);
    TCase *fatal = tcase_create("fatal");
    tcase_add_unchecked_fixture(fatal, temp_folder_make, temp_folder_remove);
    tcase_add_test_raise_signal(fatal, commit_twice, SIGABRT);
    suite_add_tcase(suite, fatal);
    return run_suite(suite);
}
