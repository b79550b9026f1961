// SPDX-License-Identifier: Apache-2.0
/* Whose settings the log of a program uses, and where its lines go. */
#include <check.h>
#include <grpc/support/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/tensorlane.h>

#include "base/log.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"

static struct tl_error error;

static struct tl_worker *open_worker(const char *log)
{
    char json[256];
    snprintf(json, sizeof(json),
             "{\"cluster\": {\"node\": [\"127.0.0.1:1\"]}, \"listen\": \"127.0.0.1:0\", \"protocol\": \"grpc\", "
             "\"log\": {%s}}",
             log);
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = json, .job = "node"};
    struct tl_worker *worker;
    ck_assert_msg(tl_worker_open(&options, &worker, &error) == TL_OK, "%s", error.message);
    return worker;
}

static void say_everything(void)
{
    TL_LOG_AT_ERROR("an error");
    TL_LOG_AT_WARN("a warning");
    TL_LOG_AT_INFO("an info");
    TL_LOG_AT_DEBUG("a debug");
}

START_TEST(a_worker_has_the_log_of_its_configuration)
{
    log_capture_begin();
    struct tl_worker *worker = open_worker("\"level\": \"error\"");
    say_everything();
    ck_assert_uint_eq(log_capture_count("level=error msg=\"an error\""), 1);
    ck_assert_uint_eq(log_capture_count("a warning"), 0);
    tl_worker_close(worker, 0);
    worker = open_worker("\"level\": \"debug\", \"format\": \"json\"");
    say_everything();
    ck_assert_uint_eq(log_capture_count("\"level\":\"debug\",\"msg\":\"a debug\"}"), 1);
    tl_worker_close(worker, 0);
}
END_TEST

START_TEST(a_plain_worker_says_once_that_it_authenticates_nobody)
{
    log_capture_begin();
    struct tl_worker *worker = open_worker("\"level\": \"info\"");
    tl_worker_close(worker, 0);
    ck_assert_uint_eq(log_capture_count("this worker authenticates nobody"), 1);
}
END_TEST

START_TEST(of_several_workers_the_last_one_decides)
{
    log_capture_begin();
    struct tl_worker *loud = open_worker("\"level\": \"debug\"");
    struct tl_worker *quiet = open_worker("\"level\": \"error\"");
    say_everything();
    ck_assert_uint_eq(log_capture_count("an error"), 1);
    ck_assert_uint_eq(log_capture_count("a warning"), 0);
    tl_worker_close(quiet, 0);
    say_everything();
    ck_assert_uint_eq(log_capture_count("an error"), 2);
    ck_assert_uint_eq(log_capture_count("a warning"), 0);
    tl_worker_close(loud, 0);
}
END_TEST

struct taken {
    unsigned counts[TL_LOG_DEBUG + 1];
    char last[4097];
};

static void take(enum tl_log_level level, const char *line, size_t len_bytes, void *context)
{
    struct taken *taken = context;
    ck_assert_uint_eq(strlen(line), len_bytes);
    ck_assert_ptr_null(strchr(line, '\n'));
    taken->counts[level]++;
    snprintf(taken->last, sizeof(taken->last), "%s", line);
}

START_TEST(a_program_takes_the_log_over)
{
    struct taken taken = {.counts = {0}};
    struct tl_log_options options = {.size_bytes = sizeof(options), .write = take, .context = &taken};
    log_capture_begin();
    ck_assert_int_eq(tl_log_set(&options, &error), TL_OK);
    /* What the call leaves open is as configured. */
    struct tl_worker *worker = open_worker("\"level\": \"info\", \"format\": \"json\"");
    memset(&taken, 0, sizeof(taken));
    say_everything();
    ck_assert_uint_eq(taken.counts[TL_LOG_ERROR], 1);
    ck_assert_uint_eq(taken.counts[TL_LOG_WARN], 1);
    ck_assert_uint_eq(taken.counts[TL_LOG_INFO], 1);
    ck_assert_uint_eq(taken.counts[TL_LOG_DEBUG], 0);
    ck_assert_ptr_nonnull(strstr(taken.last, "\"level\":\"info\",\"msg\":\"an info\"}"));
#ifdef TENSORLANE_GRPC_CURRENT
    grpc_absl_log(GPR_ERROR, "what gRPC says");
#else
    gpr_log(GPR_ERROR, "what gRPC says");
#endif
    ck_assert_uint_eq(taken.counts[TL_LOG_WARN], 2);
    ck_assert_ptr_nonnull(strstr(taken.last, "what gRPC says"));
    tl_worker_close(worker, 0);
    /* Configurations do not change what the program sets. */
    options.level = TL_LOG_ERROR;
    options.format = TL_LOG_KEY_VALUE;
    ck_assert_int_eq(tl_log_set(&options, &error), TL_OK);
    worker = open_worker("\"level\": \"debug\", \"format\": \"json\"");
    memset(&taken, 0, sizeof(taken));
    say_everything();
    ck_assert_uint_eq(taken.counts[TL_LOG_ERROR], 1);
    ck_assert_uint_eq(taken.counts[TL_LOG_WARN], 0);
    ck_assert_ptr_nonnull(strstr(taken.last, "level=error msg=\"an error\""));
    ck_assert_uint_eq(log_capture_count(""), 0);
    /* The program sets it back. */
    ck_assert_int_eq(tl_log_set(NULL, &error), TL_OK);
    say_everything();
    ck_assert_uint_eq(taken.counts[TL_LOG_ERROR], 1);
    ck_assert_uint_eq(log_capture_count("\"level\":\"debug\",\"msg\":\"a debug\"}"), 1);
    tl_worker_close(worker, 0);
}
END_TEST

START_TEST(what_cannot_be_set_changes_nothing)
{
    struct taken taken = {.counts = {0}};
    struct tl_log_options options = {.size_bytes = sizeof(options), .write = take, .context = &taken};
    ck_assert_int_eq(tl_log_set(&options, &error), TL_OK);
    options.level = (enum tl_log_level)5;
    ck_assert_int_eq(tl_log_set(&options, &error), TL_INVALID_ARGUMENT);
    options.level = TL_LOG_DEBUG;
    options.format = (enum tl_log_format)3;
    ck_assert_int_eq(tl_log_set(&options, &error), TL_INVALID_ARGUMENT);
    options.format = TL_LOG_JSON;
    options.size_bytes--;
    ck_assert_int_eq(tl_log_set(&options, &error), TL_INVALID_ARGUMENT);
    say_everything();
    ck_assert_uint_eq(taken.counts[TL_LOG_WARN], 1);
    ck_assert_uint_eq(taken.counts[TL_LOG_INFO], 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_log");
    TCase *cases = tcase_create("log");
    tcase_add_test(cases, a_worker_has_the_log_of_its_configuration);
    tcase_add_test(cases, a_plain_worker_says_once_that_it_authenticates_nobody);
    tcase_add_test(cases, of_several_workers_the_last_one_decides);
    tcase_add_test(cases, a_program_takes_the_log_over);
    tcase_add_test(cases, what_cannot_be_set_changes_nothing);
    suite_add_tcase(suite, cases);
    return run_suite(suite);
}
