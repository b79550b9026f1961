// SPDX-License-Identifier: Apache-2.0
/* The probes of a provider: which write or read they accept as working, and what they report of others. */
#include "dataplane/probe.h"

#include <check.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "fakes/fake_provider.h"
#include "fakes/run_suite.h"

#define PATIENCE_NS (60 * TL_NS_PER_SEC)
#define SHORT_NS (500 * TL_NS_PER_MS)

static struct fake_fabric *fabric;
static struct tl_provider *provider;
static struct tl_error error;

static void setup(void)
{
    error = (struct tl_error){.code = TL_OK};
    fabric = fake_fabric_create(NULL);
    provider = fake_provider_open(fabric, "card", NULL);
}

/* After every probe nothing of it is left. */
static void teardown(void)
{
    const char *why = NULL;
    ck_assert_msg(fake_fabric_is_clean(fabric, &why), "%s", why);
    provider->ops->close(provider);
    fake_fabric_destroy(fabric);
}

static void expect_failure(enum tl_keys keys, int64_t timeout_ns, enum tl_status status, const char *words)
{
    ck_assert_int_eq(tl_provider_probe(provider, keys, timeout_ns, &error), status);
    ck_assert_int_eq(error.code, status);
    ck_assert_msg(strstr(error.message, "a probe write failed: ") == error.message, "%s", error.message);
    ck_assert_msg(strstr(error.message, words) != NULL, "no '%s' in '%s'", words, error.message);
}

START_TEST(a_write_that_works)
{
    struct fake_counters counters;
    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(tl_provider_probe(provider, (enum tl_keys)_i, PATIENCE_NS, &error), TL_OK);
    fake_provider_get_counters(provider, &counters);
    ck_assert_uint_eq(counters.messages, 3);
    ck_assert_uint_eq(counters.immediates, 3);
    ck_assert_uint_gt(counters.write_bytes, 3 * 4096);
    ck_assert_uint_eq(counters.exposures, 3);
}
END_TEST

START_TEST(a_region_needs_no_windows)
{
    provider->limits.has_windows = false;
    expect_failure(TL_KEYS_WINDOW, PATIENCE_NS, TL_FAILED_PRECONDITION,
                   "no memory windows; set verbs.keys to \"region\"");
    ck_assert_int_eq(tl_provider_probe(provider, TL_KEYS_REGION, PATIENCE_NS, &error), TL_OK);
}
END_TEST

START_TEST(a_call_that_is_refused)
{
    static const struct {
        enum fake_fault fault;
        unsigned from;
        enum tl_status status;
    } calls[] = {
        {FAKE_REGION_FAILURE, 1, TL_RESOURCE_EXHAUSTED}, {FAKE_CREATE_FAILURE, 1, TL_RESOURCE_EXHAUSTED},
        {FAKE_CREATE_FAILURE, 2, TL_RESOURCE_EXHAUSTED}, {FAKE_CONNECT_FAILURE, 1, TL_UNAVAILABLE},
        {FAKE_CONNECT_FAILURE, 2, TL_UNAVAILABLE},       {FAKE_EXPOSE_FAILURE, 1, TL_RESOURCE_EXHAUSTED},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(calls); i++) {
        fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = calls[i].fault, .from = calls[i].from});
        expect_failure(TL_KEYS_WINDOW, PATIENCE_NS, calls[i].status, "");
        fake_fabric_clear_rules(fabric);
    }
    ck_assert_int_eq(tl_provider_probe(provider, TL_KEYS_WINDOW, PATIENCE_NS, &error), TL_OK);
}
END_TEST

START_TEST(what_breaks)
{
    static const enum fake_kind kinds[] = {FAKE_BIND, FAKE_MESSAGE, FAKE_WRITE};
    static const enum fake_fault faults[] = {FAKE_BREAK, FAKE_POST_FAILURE, FAKE_CQ_OVERRUN};
    for (size_t i = 0; i < TL_ARRAY_COUNT(kinds); i++) {
        for (size_t j = 0; j < TL_ARRAY_COUNT(faults); j++) {
            fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = faults[j], .kinds = kinds[i]});
            expect_failure(TL_KEYS_WINDOW, PATIENCE_NS, TL_UNAVAILABLE, "");
            fake_fabric_clear_rules(fabric);
        }
    }
    fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = FAKE_RNR, .kinds = FAKE_WRITE});
    expect_failure(TL_KEYS_WINDOW, PATIENCE_NS, TL_UNAVAILABLE, "receiver not ready");
    fake_fabric_clear_rules(fabric);
    fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = FAKE_DEVICE_GONE, .kinds = FAKE_WRITE});
    expect_failure(TL_KEYS_WINDOW, PATIENCE_NS, TL_UNAVAILABLE, "the device is gone");
}
END_TEST

START_TEST(what_does_not_come)
{
    static const struct {
        enum fake_fault fault;
        enum fake_kind kind;
        const char *words;
    } operations[] = {
        {FAKE_DROP, FAKE_MESSAGE, "no message has arrived within 500 ms"},
        {FAKE_DROP, FAKE_WRITE, "it has not arrived within 500 ms"},
        {FAKE_LOSE_ACK, FAKE_WRITE, "the card has not confirmed it within 500 ms"},
        /* The write lands after it was given up, but not in memory that others use by then. */
        {FAKE_LATE, FAKE_WRITE, "it has not arrived within 500 ms"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(operations); i++) {
        fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = operations[i].fault, .kinds = operations[i].kind});
        expect_failure(TL_KEYS_WINDOW, SHORT_NS, TL_DEADLINE_EXCEEDED, operations[i].words);
        fake_fabric_clear_rules(fabric);
    }
}
END_TEST

/* The settings may allow no more in one write. */
START_TEST(a_short_write)
{
    struct fake_counters counters;
    provider->limits.max_write_bytes = 4096;
    ck_assert_int_eq(tl_provider_probe(provider, TL_KEYS_WINDOW, PATIENCE_NS, &error), TL_OK);
    fake_provider_get_counters(provider, &counters);
    ck_assert_uint_eq(counters.write_bytes, 4096);
}
END_TEST

START_TEST(the_wrong_bytes)
{
    fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = FAKE_CORRUPT, .kinds = FAKE_WRITE});
    expect_failure(TL_KEYS_WINDOW, PATIENCE_NS, TL_DATA_LOSS, "wrong bytes");
}
END_TEST

static void expect_no_read(enum tl_status status, const char *words)
{
    ck_assert_int_eq(tl_provider_probe_reads(provider, SHORT_NS, &error), status);
    ck_assert_msg(strstr(error.message, "a probe read failed: ") == error.message, "%s", error.message);
    ck_assert_msg(strstr(error.message, words) != NULL, "no '%s' in '%s'", words, error.message);
}

START_TEST(a_read)
{
    static const struct {
        struct fake_rule rule;
        enum tl_status status;
        const char *words;
    } ways[] = {
        {{.fault = FAKE_BREAK, .kinds = FAKE_READ}, TL_UNAVAILABLE, ""},
        {{.fault = FAKE_POST_FAILURE, .kinds = FAKE_READ}, TL_UNAVAILABLE, ""},
        {{.fault = FAKE_DROP, .kinds = FAKE_READ}, TL_DEADLINE_EXCEEDED, "its bytes have not come within 500 ms"},
        {{.fault = FAKE_DROP, .kinds = FAKE_MESSAGE}, TL_DEADLINE_EXCEEDED, "no message has arrived"},
        {{.fault = FAKE_CORRUPT, .kinds = FAKE_READ}, TL_DATA_LOSS, "wrong bytes"},
        {{.fault = FAKE_EXPOSE_FAILURE}, TL_RESOURCE_EXHAUSTED, "no window"},
    };
    struct fake_counters counters;
    for (size_t i = 0; i < TL_ARRAY_COUNT(ways); i++) {
        fake_fabric_add_rule(fabric, &ways[i].rule);
        expect_no_read(ways[i].status, ways[i].words);
        fake_fabric_clear_rules(fabric);
    }
    fake_provider_get_counters(provider, &counters);
    uint64_t before = counters.reads;
    ck_assert_int_eq(tl_provider_probe_reads(provider, PATIENCE_NS, &error), TL_OK);
    fake_provider_get_counters(provider, &counters);
    ck_assert_uint_eq(counters.reads, before + 1);
    ck_assert_uint_eq(counters.writes, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("probe");
    TCase *tcase = tcase_create("probe");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, a_write_that_works, TL_KEYS_WINDOW, TL_KEYS_REGION + 1);
    tcase_add_test(tcase, a_region_needs_no_windows);
    tcase_add_test(tcase, a_call_that_is_refused);
    tcase_add_test(tcase, what_breaks);
    tcase_add_test(tcase, what_does_not_come);
    tcase_add_test(tcase, a_short_write);
    tcase_add_test(tcase, the_wrong_bytes);
    tcase_add_test(tcase, a_read);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
