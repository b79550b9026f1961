// SPDX-License-Identifier: Apache-2.0
/* A configuration from a file, a pipe, standard input; files that cannot be read. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/config.h"
#include "fakes/run_suite.h"

#define TEXT "{\"cluster\": {\"w\": [\"h:1\"]}, \"publish\": [\"m.npy\"]}"

static char folder[] = "/tmp/config_file_test.XXXXXX";
static char file[64];
static struct tl_config *config;
static struct tl_error error;

static void write_file(const char *text, size_t len_bytes)
{
    FILE *stream = fopen(file, "w");
    ck_assert_ptr_nonnull(stream);
    ck_assert_uint_eq(fwrite(text, 1, len_bytes, stream), len_bytes);
    ck_assert_int_eq(fclose(stream), 0);
}

static void setup(void)
{
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(file, sizeof(file), "%s/c.json", folder);
}

static void teardown(void)
{
    unlink(file);
    rmdir(folder);
}

START_TEST(relative_files_start_at_the_folder_of_the_file)
{
    char expected[80];
    write_file(TEXT, strlen(TEXT));
    ck_assert_int_eq(tl_config_read(file, &config, &error), TL_OK);
    snprintf(expected, sizeof(expected), "%s/m.npy", folder);
    ck_assert_str_eq(config->tasks[0].settings.publish[0], expected);
    ck_assert_str_eq(config->source, file);
    tl_config_destroy(config);

    ck_assert_int_eq(chdir(folder), 0);
    ck_assert_int_eq(tl_config_read("c.json", &config, &error), TL_OK);
    ck_assert_str_eq(config->tasks[0].settings.publish[0], "m.npy");
    tl_config_destroy(config);
    ck_assert_int_eq(chdir("/"), 0);
}
END_TEST

START_TEST(errors_name_the_file)
{
    char expected[200];
    write_file("{\n\"cluster\": 5}", 15);
    ck_assert_int_eq(tl_config_read(file, &config, &error), TL_INVALID_ARGUMENT);
    snprintf(expected, sizeof(expected), "%s:2:12: cluster: must be an object of jobs, not a number", file);
    ck_assert_str_eq(error.message, expected);
    write_file("", 0);
    ck_assert_int_eq(tl_config_read(file, &config, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, ":1:1: top level: not JSON: "));
}
END_TEST

START_TEST(a_missing_file_is_not_found)
{
    char expected[200];
    ck_assert_int_eq(tl_config_read(file, &config, &error), TL_NOT_FOUND);
    snprintf(expected, sizeof(expected), "%s: cannot open the configuration: No such file or directory", file);
    ck_assert_str_eq(error.message, expected);
    ck_assert_int_eq(error.code, TL_NOT_FOUND);
    ck_assert_int_eq(tl_config_read("", &config, NULL), TL_NOT_FOUND);
}
END_TEST

START_TEST(a_file_that_may_not_be_read_is_denied)
{
    write_file(TEXT, strlen(TEXT));
    ck_assert_int_eq(chmod(file, 0), 0);
    ck_assert_int_eq(chmod(folder, 0755), 0);
    /* root may read everything. */
    if (geteuid() == 0) ck_assert_int_eq(seteuid(65534), 0);
    enum tl_status status = tl_config_read(file, &config, &error);
    if (getuid() == 0) ck_assert_int_eq(seteuid(0), 0);
    ck_assert_int_eq(status, TL_PERMISSION_DENIED);
    ck_assert_ptr_nonnull(strstr(error.message, "c.json: cannot open the configuration: Permission denied"));
}
END_TEST

START_TEST(a_folder_is_refused)
{
    ck_assert_int_eq(tl_config_read(folder, &config, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "cannot read the configuration: Is a directory"));
}
END_TEST

START_TEST(a_file_without_end_is_refused)
{
    ck_assert_int_eq(tl_config_read("/dev/zero", &config, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "/dev/zero:1:1: top level: larger than 16 MiB; a cluster's configuration is never "
                                    "that large");
}
END_TEST

START_TEST(a_pipe_can_be_read)
{
    int ends[2];
    char path[64];
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(write(ends[1], TEXT, strlen(TEXT)), strlen(TEXT));
    close(ends[1]);
    snprintf(path, sizeof(path), "/dev/fd/%d", ends[0]);
    ck_assert_int_eq(tl_config_read(path, &config, &error), TL_OK);
    ck_assert_uint_eq(config->task_count, 1);
    tl_config_destroy(config);
    close(ends[0]);
}
END_TEST

START_TEST(standard_input_is_called_stdin)
{
    write_file(TEXT, strlen(TEXT));
    ck_assert_ptr_nonnull(freopen(file, "r", stdin));
    ck_assert_int_eq(tl_config_read("-", &config, &error), TL_OK);
    ck_assert_str_eq(config->source, "stdin");
    ck_assert_str_eq(config->tasks[0].settings.publish[0], "m.npy");
    tl_config_destroy(config);
    /* The stream stays open, and is now at its end. */
    ck_assert_int_eq(tl_config_read("-", &config, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "stdin:1:1: "));
}
END_TEST

START_TEST(a_large_file_is_read_whole)
{
    size_t len_bytes = 5 << 20;
    char *text = malloc(len_bytes);
    memset(text, ' ', len_bytes);
    memcpy(text, TEXT, strlen(TEXT) - 1);
    text[len_bytes - 1] = '}';
    write_file(text, len_bytes);
    ck_assert_int_eq(tl_config_read(file, &config, &error), TL_OK);
    tl_config_destroy(config);
    free(text);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("config_file");
    TCase *tcase = tcase_create("config_file");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, relative_files_start_at_the_folder_of_the_file);
    tcase_add_test(tcase, errors_name_the_file);
    tcase_add_test(tcase, a_missing_file_is_not_found);
    tcase_add_test(tcase, a_file_that_may_not_be_read_is_denied);
    tcase_add_test(tcase, a_folder_is_refused);
    tcase_add_test(tcase, a_file_without_end_is_refused);
    tcase_add_test(tcase, a_pipe_can_be_read);
    tcase_add_test(tcase, standard_input_is_called_stdin);
    tcase_add_test(tcase, a_large_file_is_read_whole);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
