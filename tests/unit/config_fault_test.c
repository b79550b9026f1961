// SPDX-License-Identifier: Apache-2.0
/* Memory runs out at every allocation, one after the other: the error says so, and nothing is leaked. */
#include <check.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "fakes/run_suite.h"

static size_t allowed;
static size_t live;
static size_t total;

static void *counting_malloc(size_t size_bytes)
{
    if (allowed == 0) return NULL;
    allowed--;
    total++;
    live++;
    return malloc(size_bytes);
}

static void counting_free(void *memory)
{
    if (memory) live--;
    free(memory);
}

typedef enum tl_status (*parse_fn)(const char *text, struct tl_config **ret_config, struct tl_error *ret_error);

static enum tl_status parse_ours(const char *text, struct tl_config **ret_config, struct tl_error *ret_error)
{
    return tl_config_parse(text, strlen(text), "c.json", "/data", ret_config, ret_error);
}

static enum tl_status parse_tf(const char *text, struct tl_config **ret_config, struct tl_error *ret_error)
{
    return tl_config_parse_tf(text, strlen(text), ret_config, ret_error);
}

static enum tl_status parse_with_environment(const char *text, struct tl_config **ret_config,
                                             struct tl_error *ret_error)
{
    static const char *const variables[] = {"RDMA_DEVICE=a", "RDMA_SL=1", NULL};
    const struct tl_config_environment environment = {.variables = variables};
    struct tl_config *config = NULL;
    enum tl_status status = parse_ours(text, &config, ret_error);
    if (status == TL_OK) status = tl_config_apply_environment(config, &environment, ret_error);
    if (status == TL_OK) *ret_config = config;
    if (status != TL_OK) tl_config_destroy(config);
    return status;
}

/* Parses with ever more allocations until the expected code comes; before that the error must be lack of memory. */
static void walk(parse_fn parse, const char *text, enum tl_status expected)
{
    json_set_alloc_funcs(counting_malloc, counting_free);
    size_t failed_count = 0;
    for (size_t count = 0;; count++) {
        struct tl_config *config = NULL;
        struct tl_error error = {0};
        allowed = count;
        enum tl_status status = parse(text, &config, &error);
        bool is_starved = allowed == 0;
        tl_config_destroy(config);
        ck_assert_uint_eq(live, 0);
        ck_assert_int_eq(config != NULL, status == TL_OK);
        ck_assert_int_eq(error.code, status);
        if (!is_starved) {
            ck_assert_int_eq(status, expected);
            break;
        }
        /* The last allocation of all may be the last one that was allowed. */
        if (status == expected) continue;
        ck_assert_msg(status == TL_RESOURCE_EXHAUSTED, "%zu allocations: %s", count, error.message);
        ck_assert_ptr_nonnull(strstr(error.message, ": no memory for the configuration"));
        failed_count++;
    }
    ck_assert_uint_gt(failed_count, 5);
}

#define OURS                                                                                                           \
    "{\"$schema\": \"s\", \"cluster\": {\"ps\": [\"a:1\", \"b:1\"], \"w\\u006frker\": {\"4\": \"[::1]:2\"}},"          \
    "\"limits\": {\"chunk\": \"2MiB\", \"waiting\": 10}, \"listen\": \"0.0.0.0:1\", \"timeouts\": {\"drain\": "        \
    "\"1s\"},"                                                                                                         \
    "\"jobs\": {\"ps\": {\"publish\": [\"x\", \"/y\"], \"tasks\": {\"1\": {\"log\": {\"level\": \"warn\"}}}}},"        \
    "\"security\": {\"tls\": {\"ca\": \"c\", \"certificate\": \"{name}.pem\", \"key\": \"{name}{name}\"},"             \
    "\"allow\": [{\"who\": [\"job:ps\", \"task:ps:1\", \"a.b.\"], \"what\": [\"read\"]}]}"

START_TEST(ours)
{
    walk(parse_ours, OURS "}", TL_OK);
}
END_TEST

START_TEST(ours_with_an_environment)
{
    walk(parse_with_environment, OURS "}", TL_OK);
}
END_TEST

START_TEST(ours_that_is_refused)
{
    walk(parse_ours, OURS ", \"unknown\": 1}", TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(tensorflows)
{
    walk(parse_tf,
         "{\"cluster\": {\"ps\": [\"a:1\"], \"worker\": [\"b:1\", \"b:2\"]}, \"task\": {\"type\": \"evaluator\", "
         "\"index\": \"0\"}, \"rpc_layer\": \"grpc\"}",
         TL_OK);
    walk(parse_tf, "{\"cluster\": {\"ps\": [\"a:1\"]}, \"task\": {\"type\": \"ps\"}}", TL_OK);
}
END_TEST

START_TEST(rewriting)
{
    static const char text[] = "{\"cluster\": {\"ps\": [\"a:1\"], \"worker\": {\"3\": \"b:1\"}}}";
    json_set_alloc_funcs(counting_malloc, counting_free);
    for (size_t count = 0;; count++) {
        char *json = NULL;
        struct tl_error error = {0};
        allowed = count;
        enum tl_status status = tl_config_tf_to_json(text, strlen(text), &json, &error);
        bool is_starved = allowed == 0;
        ck_assert_uint_eq(live, 0);
        ck_assert_int_eq(json != NULL, status == TL_OK);
        free(json);
        if (!is_starved) {
            ck_assert_int_eq(status, TL_OK);
            break;
        }
        if (status != TL_OK) ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
    }
    ck_assert_uint_gt(total, 100);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("config_fault");
    TCase *tcase = tcase_create("config_fault");
    tcase_add_test(tcase, ours);
    tcase_add_test(tcase, ours_with_an_environment);
    tcase_add_test(tcase, ours_that_is_refused);
    tcase_add_test(tcase, tensorflows);
    tcase_add_test(tcase, rewriting);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
