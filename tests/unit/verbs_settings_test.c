// SPDX-License-Identifier: Apache-2.0
/* Settings as options of the verbs provider. */
#include "server/transports/local_settings.h"
#include "server/transports/verbs_settings.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/run_suite.h"

static struct tl_config *config;
static struct tl_verbs_options options;
static char host[TL_VERBS_HOST_BYTES];
static struct tl_error error;

static const struct tl_settings *parse(const char *text)
{
    enum tl_status status = tl_config_parse(text, strlen(text), "c.json", NULL, &config, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return &config->tasks[0].settings;
}

START_TEST(defaults_are_those_of_the_provider)
{
    struct tl_verbs_options defaults;
    tl_verbs_options_init(&defaults);
    const struct tl_settings *settings = parse("{\"cluster\": {\"ps\": [\"a:1\"]}}");
    ck_assert_int_eq(tl_verbs_settings_read(settings, NULL, host, &options, &error), TL_OK);
    defaults.pool_bytes = UINT64_C(64) << 20;
    ck_assert_mem_eq(&options, &defaults, sizeof(options));
    tl_config_destroy(config);
}
END_TEST

START_TEST(everything_is_handed_on)
{
    const struct tl_settings *settings =
        parse("{\"cluster\": {\"ps\": [\"a:1\"]}, \"verbs\": {\"devices\": \"x:2\", \"port\": 2, \"gid_index\": 0, "
              "\"mtu\": 512, \"service_level\": 3, \"traffic_class\": 104, \"timeout\": 10, \"retry_count\": 2, "
              "\"queue_depth\": 64, \"pkey_index\": 9, \"keys\": \"region\", \"piece\": \"8KiB\", \"pool\": "
              "\"8MiB\"}}");
    ck_assert_int_eq(tl_verbs_settings_read(settings, "10.1.2.3:4000", host, &options, &error), TL_OK);
    ck_assert_str_eq(options.devices, "x:2");
    ck_assert_int_eq(options.port, 2);
    ck_assert_int_eq(options.gid_index, 0);
    ck_assert_str_eq(options.address, "10.1.2.3");
    ck_assert_uint_eq(options.mtu_bytes, 512);
    ck_assert_int_eq(options.service_level, 3);
    ck_assert_int_eq(options.traffic_class, 104);
    ck_assert_int_eq(options.timeout, 10);
    ck_assert_int_eq(options.retry_count, 2);
    ck_assert_uint_eq(options.queue_depth, 64);
    ck_assert_int_eq(options.pkey_index, 9);
    ck_assert_int_eq(options.keys, TL_KEYS_REGION);
    ck_assert_uint_eq(options.max_write_bytes, 8192);
    ck_assert_uint_eq(options.pool_bytes, 8 << 20);
    ck_assert_int_eq(tl_verbs_options_check(&options, &error), TL_OK);
    tl_config_destroy(config);
}
END_TEST

START_TEST(every_setting_in_its_range_is_an_option)
{
    const struct tl_settings *settings =
        parse("{\"cluster\": {\"ps\": [\"a:1\"]}, \"verbs\": {\"port\": 255, \"gid_index\": 255, \"mtu\": 4096, "
              "\"service_level\": 7, \"traffic_class\": 255, \"timeout\": 31, \"retry_count\": 7, \"queue_depth\": "
              "65536, \"pkey_index\": 65535}}");
    ck_assert_int_eq(tl_verbs_settings_read(settings, "[fd00::1]:4000", host, &options, &error), TL_OK);
    ck_assert_str_eq(options.address, "fd00::1");
    ck_assert_msg(tl_verbs_options_check(&options, &error) == TL_OK, "%s", error.message);
    tl_config_destroy(config);
}
END_TEST

START_TEST(names_become_addresses)
{
    const struct tl_settings *settings = parse("{\"cluster\": {\"ps\": [\"a:1\"]}}");
    ck_assert_int_eq(tl_verbs_settings_read(settings, "localhost:1", host, &options, &error), TL_OK);
    ck_assert(strcmp(options.address, "127.0.0.1") == 0 || strcmp(options.address, "::1") == 0);
    ck_assert_int_eq(tl_verbs_options_check(&options, &error), TL_OK);
    ck_assert_int_eq(tl_verbs_settings_read(settings, "no-such-host.invalid:1", host, &options, &error),
                     TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "own name no-such-host.invalid cannot be resolved"));
    ck_assert_int_eq(tl_verbs_settings_read(settings, "no-port", host, &options, &error), TL_INVALID_ARGUMENT);
    tl_config_destroy(config);
}
END_TEST

START_TEST(some_settings_want_none)
{
    struct tl_settings settings = *parse("{\"cluster\": {\"ps\": [\"a:1\"]}}");
    ck_assert_ptr_null(tl_verbs_settings_refusal(&settings));
    settings.rdma = TL_RDMA_OFF;
    ck_assert_str_eq(tl_verbs_settings_refusal(&settings), "rdma is off");
    settings.protocol = TL_PROTOCOL_GRPC;
    ck_assert_str_eq(tl_verbs_settings_refusal(&settings), "the protocol is grpc");
    settings.protocol = TL_PROTOCOL_GRPC_GDR;
    ck_assert_str_eq(tl_verbs_settings_refusal(&settings), "rdma is off");
    settings.protocol = TL_PROTOCOL_GRPC_VERBS;
    settings.rdma = TL_RDMA_REQUIRE;
    ck_assert_ptr_null(tl_verbs_settings_refusal(&settings));
    settings.protocol = TL_PROTOCOL_GRPC_GDR;
    ck_assert_ptr_null(tl_verbs_settings_refusal(&settings));
    settings = (struct tl_settings){.security.encrypt = TL_ENCRYPT_REQUIRE};
    ck_assert_str_eq(tl_verbs_settings_refusal(&settings),
                     "security.encrypt is \"require\", and nothing encrypts what RDMA carries");
    ck_assert_ptr_null(tl_local_settings_refusal(&settings));
    tl_config_destroy(config);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_settings");
    TCase *tcase = tcase_create("verbs_settings");
    tcase_add_test(tcase, defaults_are_those_of_the_provider);
    tcase_add_test(tcase, everything_is_handed_on);
    tcase_add_test(tcase, every_setting_in_its_range_is_an_option);
    tcase_add_test(tcase, names_become_addresses);
    tcase_add_test(tcase, some_settings_want_none);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
