// SPDX-License-Identifier: Apache-2.0
/* One setting of every kind: accepted values, and the messages for refused ones. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/setting_value.h"
#include "fakes/run_suite.h"

static const struct tl_choice choices[] = {
    {"lazy", 3, NULL}, {"eager", 5, NULL}, {"future", 7, "a crystal ball"}, {NULL, 0, NULL}};

#define AT(member) .path = "x", .name = "x", .offset = offsetof(struct tl_settings, member)
static const struct tl_setting word = {AT(connect), .kind = TL_SETTING_CHOICE, .choices = choices, .default_value = 5};
static const struct tl_setting flag = {AT(checksum), .kind = TL_SETTING_BOOL};
static const struct tl_setting address = {AT(listen), .kind = TL_SETTING_ADDRESS};
static const struct tl_setting files = {AT(publish), .kind = TL_SETTING_FILES};
static const struct tl_setting size = {AT(chunk_bytes), .kind = TL_SETTING_SIZE, .min = 1024, .max = 1 << 20,
                                       .default_value = 4096};
static const struct tl_setting count = {AT(connections), .kind = TL_SETTING_COUNT, .min = 1, .max = 100,
                                        .default_value = 16};
static const struct tl_setting duration = {AT(drain_timeout_ns), .kind = TL_SETTING_DURATION, .min = 1000000,
                                           .max = 3600000000000, .default_value = 2000000000};

static const struct tl_setting devices = {AT(verbs.devices), .kind = TL_SETTING_DEVICES};
static const struct tl_setting auto_count = {AT(verbs.port),   .kind = TL_SETTING_COUNT,        .min = 1, .max = 255,
                                             .has_auto = true, .default_value = TL_SETTING_AUTO};
static const struct tl_setting auto_size = {AT(verbs.piece_bytes), .kind = TL_SETTING_SIZE,
                                            .min = 4096,           .max = 1 << 20,
                                            .has_auto = true,      .default_value = TL_SETTING_AUTO};
static const struct tl_setting power = {AT(verbs.mtu_bytes), .kind = TL_SETTING_COUNT, .min = 256,
                                        .max = 4096,         .is_power_of_two = true,  .default_value = 1024};

static struct tl_json_doc doc;
static struct tl_arena *arena;
static struct tl_settings settings;
static struct tl_error error;

/* Reads {"x": TEXT}. */
static enum tl_status read_setting(const struct tl_setting *setting, const char *text, const char *folder)
{
    static char whole[1024];
    struct tl_json_value value;
    snprintf(whole, sizeof(whole), "{\"x\": %s}", text);
    memset(&settings, 0x5a, sizeof(settings));
    arena = tl_arena_create();
    ck_assert_int_eq(tl_json_doc_open(&doc, whole, strlen(whole), "f", &error), TL_OK);
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert(tl_json_first(&root, &value));
    return tl_setting_read(setting, &value, arena, folder, &settings, &error);
}

static void close_setting(void)
{
    tl_json_doc_close(&doc);
    tl_arena_destroy(arena);
}

/* Reads the text, writes the value, and compares the two. */
static void check_read(const struct tl_setting *setting, const char *text, const char *written)
{
    ck_assert_msg(read_setting(setting, text, NULL) == TL_OK, "%s: %s", text, error.message);
    ck_assert_str_eq(tl_setting_format(setting, &settings, arena), written);
    close_setting();
}

static void check_refused_as(const struct tl_setting *setting, const char *text, enum tl_status code,
                             const char *message)
{
    struct tl_settings untouched;
    memset(&untouched, 0x5a, sizeof(untouched));
    ck_assert_msg(read_setting(setting, text, NULL) == code, "%s is not refused as it should be", text);
    ck_assert_int_eq(error.code, code);
    ck_assert_msg(strncmp(error.message, "f:1:", 4) == 0, "%s", error.message);
    ck_assert_msg(strstr(error.message, message) != NULL, "%s: %s", text, error.message);
    ck_assert_mem_eq(&settings, &untouched, sizeof(settings));
    close_setting();
}

static void check_refused(const struct tl_setting *setting, const char *text, const char *message)
{
    check_refused_as(setting, text, TL_INVALID_ARGUMENT, message);
}

START_TEST(words)
{
    check_read(&word, "\"lazy\"", "\"lazy\"");
    check_read(&word, "\"eager\"", "\"eager\"");
    check_refused(&word, "3", "f:1:7: x: must be a string, not a number");
    check_refused(&word, "\"eagre\"", "\"eagre\" is no value of x; did you mean \"eager\"?");
    check_refused(&word, "\"\"", "\"\" is no value of x; use one of \"lazy\", \"eager\"");
    check_refused(&word, "\"Lazy\"", "did you mean \"lazy\"?");
    check_refused_as(&word, "\"future\"", TL_UNIMPLEMENTED,
                     "x: \"future\" needs a crystal ball, which this version does not have; use one of \"lazy\", "
                     "\"eager\"");
    ck_assert_str_eq(tl_choice_name(choices, 5), "eager");
    ck_assert_str_eq(tl_choice_name(choices, 6), "");
}
END_TEST

START_TEST(flags)
{
    check_read(&flag, "true", "true");
    check_read(&flag, "false", "false");
    check_refused(&flag, "\"true\"", "x: must be true or false, not a string");
    check_refused(&flag, "1", "x: must be true or false, not a number");
    check_refused(&flag, "null", "x: must be true or false, not null");
}
END_TEST

START_TEST(addresses)
{
    check_read(&address, "\"0.0.0.0:4000\"", "\"0.0.0.0:4000\"");
    check_read(&address, "\"[::]:0\"", "\"[::]:0\"");
    check_refused(&address, "4000", "x: must be an address such as \"0.0.0.0:4000\", not a number");
    check_refused(&address, "\":4000\"", "x: address \":4000\" has no host");
    check_refused(&address, "null", "must be an address");
}
END_TEST

START_TEST(files_start_in_the_folder)
{
    ck_assert_int_eq(read_setting(&files, "[\"a.npy\", \"/b/c\", \"d/e\"]", "/data"), TL_OK);
    ck_assert_uint_eq(settings.publish_count, 3);
    ck_assert_str_eq(settings.publish[0], "/data/a.npy");
    ck_assert_str_eq(settings.publish[1], "/b/c");
    ck_assert_str_eq(settings.publish[2], "/data/d/e");
    ck_assert_str_eq(tl_setting_format(&files, &settings, arena), "[\"/data/a.npy\", \"/b/c\", \"/data/d/e\"]");
    close_setting();
    ck_assert_int_eq(read_setting(&files, "[\"a.npy\"]", "/"), TL_OK);
    ck_assert_str_eq(settings.publish[0], "/a.npy");
    close_setting();
    ck_assert_int_eq(read_setting(&files, "[\"a.npy\"]", ""), TL_OK);
    ck_assert_str_eq(settings.publish[0], "a.npy");
    close_setting();
    ck_assert_int_eq(read_setting(&files, "[\"a.npy\"]", "/caf\xe9"), TL_OK);
    ck_assert_str_eq(settings.publish[0], "/caf\xe9/a.npy");
    ck_assert_str_eq(tl_setting_format(&files, &settings, arena), "[\"(not UTF-8)\"]");
    close_setting();
    check_read(&files, "[]", "[]");
}
END_TEST

START_TEST(files_that_are_none_are_refused)
{
    check_refused(&files, "\"a.npy\"", "f:1:7: x: must be a list of files, not a string");
    check_refused(&files, "[\"a\", 5]", "f:1:13: x[1]: must be a file such as \"model.safetensors\", not a number");
    check_refused(&files, "[\"\"]", "f:1:8: x[0]: an empty file name");
    check_refused(&files, "[\"a\", \"b\", \"a\"]", "f:1:18: x[2]: \"a\" is published twice; keep one");
}
END_TEST

START_TEST(files_are_bounded)
{
    char *text = malloc(TL_MAX_PUBLISHED_FILES * 16 + 64);
    for (size_t number = TL_MAX_PUBLISHED_FILES; number <= TL_MAX_PUBLISHED_FILES + 1; number++) {
        struct tl_json_value value;
        strcpy(text, "{\"x\": [");
        char *end = text + strlen(text);
        for (size_t i = 0; i < number; i++) {
            end += sprintf(end, "%s\"f%zu\"", i > 0 ? "," : "", i);
        }
        strcpy(end, "]}");
        arena = tl_arena_create();
        ck_assert_int_eq(tl_json_doc_open(&doc, text, strlen(text), "f", &error), TL_OK);
        struct tl_json_value root = tl_json_root(&doc);
        ck_assert(tl_json_first(&root, &value));
        enum tl_status status = tl_setting_read(&files, &value, arena, NULL, &settings, &error);
        ck_assert_int_eq(status, number == TL_MAX_PUBLISHED_FILES ? TL_OK : TL_INVALID_ARGUMENT);
        close_setting();
    }
    ck_assert_ptr_nonnull(strstr(error.message, "x: 1025 files are too many; a task may publish 1024"));
    free(text);
}
END_TEST

START_TEST(sizes)
{
    check_read(&size, "4096", "\"4KiB\"");
    check_read(&size, "4096.0", "\"4KiB\"");
    check_read(&size, "\"512KiB\"", "\"512KiB\"");
    check_read(&size, "\"0.5 mib\"", "\"512KiB\"");
    check_read(&size, "\"64KB\"", "\"64KB\"");
    check_read(&size, "\"1500\"", "\"1500B\"");
    check_read(&size, "1024", "\"1KiB\"");
    check_read(&size, "1048576", "\"1MiB\"");
    check_refused(&size, "1023", "x: 1023B is out of range; it may be 1KiB to 1MiB");
    check_refused(&size, "1048577", "x: 1048577B is out of range; it may be 1KiB to 1MiB");
    check_refused(&size, "\"2MiB\"", "x: 2MiB is out of range");
    check_refused(&size, "-4096", "x: -4096 is negative; write a number of bytes, or a size such as \"512MiB\"");
    check_refused(&size, "4096.5", "x: 4096.5 is no whole number");
    check_refused(&size, "-1e30", "is no whole number");
    check_refused(&size, "1e30", "is no whole number");
    check_refused(&size, "\"-4KiB\"", "x: \"-4KiB\" is no size; write one such as \"512MiB\"");
    check_refused(&size, "\"4K\"", "is no size");
    check_refused(&size, "\"\"", "is no size");
    check_refused(&size, "\"99999999999999TiB\"", "is no size");
    check_refused(&size, "[4096]", "x: must be a size such as \"512MiB\", or a number of bytes, not a list");
}
END_TEST

START_TEST(counts)
{
    check_read(&count, "1", "1");
    check_read(&count, "100", "100");
    check_read(&count, "1e2", "100");
    check_refused(&count, "0", "x: 0 is out of range; it may be 1 to 100");
    check_refused(&count, "101", "x: 101 is out of range; it may be 1 to 100");
    check_refused(&count, "-1", "x: -1 is negative; write a whole number such as 1024");
    check_refused(&count, "1.5", "x: 1.5 is no whole number of 0 or more");
    check_refused(&count, "\"16\"", "x: must be a whole number such as 16, not a string");
}
END_TEST

START_TEST(numbers_that_follow_from_the_machine)
{
    check_read(&auto_count, "\"auto\"", "\"auto\"");
    check_read(&auto_count, "1", "1");
    check_read(&auto_size, "\"auto\"", "\"auto\"");
    check_read(&auto_size, "\"4KiB\"", "\"4KiB\"");
    ck_assert_int_eq(read_setting(&auto_count, "\"auto\"", NULL), TL_OK);
    ck_assert_uint_eq(settings.verbs.port, TL_SETTING_AUTO);
    close_setting();
    check_refused(&auto_count, "\"any\"", "x: must be a whole number such as 1, or \"auto\", not a string");
    check_refused(&auto_count, "0", "x: 0 is out of range; it may be 1 to 255");
    check_refused(&auto_count, "9223372036854775807", "is out of range");
    check_refused(&auto_size, "\"Auto\"", "x: \"Auto\" is no size");
    check_refused(&count, "\"auto\"", "x: must be a whole number such as 16, not a string");
}
END_TEST

START_TEST(powers_of_two)
{
    check_read(&power, "256", "256");
    check_read(&power, "4096", "4096");
    check_refused(&power, "1000", "x: 1000 is not 256, 512, 1024, 2048 or 4096");
    check_refused(&power, "128", "x: 128 is not 256, 512, 1024, 2048 or 4096");
    check_refused(&power, "8192", "x: 8192 is not 256, 512, 1024, 2048 or 4096");
}
END_TEST

START_TEST(lists_of_devices)
{
    check_read(&devices, "\"\"", "\"\"");
    check_read(&devices, "\"mlx5_0:1,^mlx5_1\"", "\"mlx5_0:1,^mlx5_1\"");
    check_refused(&devices, "\"mlx5_0, mlx5_1\"", "x: \" mlx5_1\" does not name a device; entries are like");
    check_refused(&devices, "[\"mlx5_0\"]", "x: must be a text such as \"mlx5_0:1,^mlx5_1\", not a list");
    check_refused(&devices, "\"a:0\"", "x: \"a:0\": a port is a number of 1 to 255");
    ck_assert_int_eq(read_setting(&devices, "\"\"", NULL), TL_OK);
    ck_assert_ptr_null(settings.verbs.devices);
    close_setting();
}
END_TEST

START_TEST(durations)
{
    check_read(&duration, "\"250ms\"", "\"250ms\"");
    check_read(&duration, "\"1m30s\"", "\"90s\"");
    check_read(&duration, "\"1.5s\"", "\"1500ms\"");
    check_read(&duration, "\"1h\"", "\"1h\"");
    check_read(&duration, "\"1000001ns\"", "\"1000001ns\"");
    check_read(&duration, "\"1001us\"", "\"1001us\"");
    check_refused(&duration, "10", "x: a number has no unit; write a duration such as \"250ms\" or \"10s\"");
    check_refused(&duration, "1.5", "x: a number has no unit");
    check_refused(&duration, "\"10\"", "x: \"10\" is no duration; write one such as \"250ms\" or \"1m30s\"");
    check_refused(&duration, "\"-1s\"", "is no duration");
    check_refused(&duration, "\"999999999h\"", "is no duration");
    check_refused(&duration, "\"0\"", "x: 0s is out of range; it may be 1ms to 1h");
    check_refused(&duration, "\"999999ns\"", "x: 999999ns is out of range");
    check_refused(&duration, "\"3601s\"", "x: 3601s is out of range; it may be 1ms to 1h");
    check_refused(&duration, "true", "x: must be a duration such as \"250ms\" or \"10s\", not true");
}
END_TEST

START_TEST(defaults)
{
    static const struct {
        const struct tl_setting *setting;
        const char *written;
    } cases[] = {
        {&word, "\"eager\""},      {&flag, "false"},         {&address, "null"},    {&files, "[]"},
        {&size, "\"4KiB\""},       {&count, "16"},           {&duration, "\"2s\""}, {&devices, "\"\""},
        {&auto_count, "\"auto\""}, {&auto_size, "\"auto\""}, {&power, "1024"},
    };
    arena = tl_arena_create();
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        memset(&settings, 0x5a, sizeof(settings));
        tl_setting_set_default(cases[i].setting, &settings);
        ck_assert_str_eq(tl_setting_format(cases[i].setting, &settings, arena), cases[i].written);
    }
    tl_arena_destroy(arena);
}
END_TEST

START_TEST(numbers_are_written_exactly)
{
    static const struct {
        enum tl_setting_kind kind;
        uint64_t number;
        const char *text;
    } cases[] = {
        {TL_SETTING_SIZE, 0, "0B"},
        {TL_SETTING_SIZE, 1, "1B"},
        {TL_SETTING_SIZE, 1000, "1KB"},
        {TL_SETTING_SIZE, 1024000, "1000KiB"},
        {TL_SETTING_SIZE, UINT64_C(3) << 40, "3TiB"},
        {TL_SETTING_SIZE, UINT64_C(2000000000000), "2TB"},
        {TL_SETTING_SIZE, UINT64_MAX, "18446744073709551615B"},
        {TL_SETTING_DURATION, 0, "0s"},
        {TL_SETTING_DURATION, 60000000000, "60s"},
        {TL_SETTING_DURATION, 604800000000000, "168h"},
        {TL_SETTING_COUNT, 1000, "1000"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char text[TL_SETTING_NUMBER_BYTES];
        ck_assert_str_eq(tl_setting_format_number(cases[i].kind, cases[i].number, text), cases[i].text);
    }
}
END_TEST

START_TEST(text_becomes_json)
{
    arena = tl_arena_create();
    ck_assert_str_eq(tl_json_text("a \"b\"\n", arena), "\"a \\\"b\\\"\\n\"");
    ck_assert_ptr_null(tl_json_text("\xff", arena));
    tl_arena_destroy(arena);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("setting");
    TCase *tcase = tcase_create("setting");
    tcase_add_test(tcase, words);
    tcase_add_test(tcase, flags);
    tcase_add_test(tcase, addresses);
    tcase_add_test(tcase, files_start_in_the_folder);
    tcase_add_test(tcase, files_that_are_none_are_refused);
    tcase_add_test(tcase, files_are_bounded);
    tcase_add_test(tcase, sizes);
    tcase_add_test(tcase, counts);
    tcase_add_test(tcase, numbers_that_follow_from_the_machine);
    tcase_add_test(tcase, powers_of_two);
    tcase_add_test(tcase, lists_of_devices);
    tcase_add_test(tcase, durations);
    tcase_add_test(tcase, defaults);
    tcase_add_test(tcase, numbers_are_written_exactly);
    tcase_add_test(tcase, text_becomes_json);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
