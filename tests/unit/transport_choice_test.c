// SPDX-License-Identifier: Apache-2.0
/* The choice among candidates: order, reasons, time. */
#include "server/transports/transport_choice.h"

#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "fakes/fake_clock.h"
#include "fakes/fake_provider.h"
#include "fakes/run_suite.h"

#define COUNT 20

static struct fake_fabric *fabric;
static struct tl_transport_candidate items[COUNT];
static struct tl_transport_candidates candidates;
static struct tl_transport_choice choice;
static struct tl_error error;
static const char *open_error; /* Why candidates before good_order cannot be opened. */
static unsigned good_order;
static int64_t open_ns; /* How long it takes to open one. */
static unsigned opened_count;
static char failures[4096];

static enum tl_status open_candidate(void *context, unsigned order, struct tl_provider **ret_provider,
                                     struct tl_error *ret_error)
{
    (void)context;
    ck_assert_uint_eq(order, opened_count++);
    fake_clock_advance(open_ns);
    if (order < good_order && open_error != NULL) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s", open_error);
    *ret_provider = fake_provider_open(fabric, "card", NULL);
    const struct fake_rule fault = {
        .fault = FAKE_BREAK, .kinds = FAKE_WRITE, .provider = *ret_provider, .times = FAKE_ALWAYS};
    if (order < good_order) fake_fabric_add_rule(fabric, &fault);
    return TL_OK;
}

static void failed(void *context, unsigned order, const char *name, const char *why)
{
    size_t used = strlen(failures);
    ck_assert_ptr_eq(context, failures);
    snprintf(failures + used, sizeof(failures) - used, "%u %s: %s\n", order, name, why);
}

static void setup(void)
{
    fabric = fake_fabric_create(NULL);
    for (unsigned i = 0; i < COUNT; i++) {
        items[i] = (struct tl_transport_candidate){.device = "mlx5_0:1"};
        snprintf(items[i].name, sizeof(items[i].name), "mlx5_0:1 GID %u 10.0.0.1", i);
    }
    candidates = (struct tl_transport_candidates){
        .items = items, .count = 3, .open = open_candidate, .failed = failed, .context = failures};
}

static void teardown(void)
{
    if (choice.provider != NULL) choice.provider->ops->close(choice.provider);
    fake_fabric_destroy(fabric);
}

START_TEST(the_first_that_works)
{
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_OK);
    ck_assert_uint_eq(choice.order, 0);
    ck_assert_str_eq(choice.passed_over, "");
    ck_assert_str_eq(choice.not_tried, "mlx5_0:1 GID 1 10.0.0.1; mlx5_0:1 GID 2 10.0.0.1");
    ck_assert_str_eq(failures, "");
}
END_TEST

/* One whose reads fail is used, and says so; only a worker that reads tries that. */
START_TEST(one_that_does_not_read)
{
    fake_fabric_add_rule(fabric, &(struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_READ, .times = FAKE_ALWAYS});
    candidates.is_reading = _i == 1;
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_OK);
    ck_assert_uint_eq(choice.order, 0);
    const char *why = choice.provider->read_failure;
    ck_assert(_i == 1 ? why != NULL && strstr(why, "a probe read failed: ") == why : why == NULL);
    ck_assert_str_eq(failures, "");
}
END_TEST

START_TEST(the_last_that_is_left)
{
    good_order = 2;
    open_error = "mlx5_0:1: no";
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_OK);
    ck_assert_uint_eq(choice.order, 2);
    ck_assert_str_eq(choice.passed_over, "mlx5_0:1 GID 0 10.0.0.1: no; mlx5_0:1 GID 1 10.0.0.1: no");
    ck_assert_str_eq(choice.not_tried, "");
    ck_assert_str_eq(failures, "0 mlx5_0:1 GID 0 10.0.0.1: no\n1 mlx5_0:1 GID 1 10.0.0.1: no\n");
}
END_TEST

START_TEST(none_is_left)
{
    good_order = COUNT;
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_UNAVAILABLE);
    ck_assert_uint_eq(opened_count, 3);
    ck_assert_ptr_eq(strstr(error.message, TL_NO_PORT "; mlx5_0:1 GID 0 10.0.0.1: a probe write failed: "),
                     error.message);
    ck_assert_ptr_nonnull(strstr(error.message, "; mlx5_0:1 GID 2 10.0.0.1: a probe write failed: "));
    ck_assert_ptr_null(choice.provider);
}
END_TEST

START_TEST(the_only_one_has_its_own_reason)
{
    good_order = COUNT;
    candidates.count = 1;
    open_error = "it is dark; make light";
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_UNAVAILABLE);
    ck_assert_str_eq(error.message, "mlx5_0:1 GID 0 10.0.0.1: it is dark; make light");
}
END_TEST

/* For shared memory there is nothing to tell apart. */
START_TEST(one_without_a_name)
{
    good_order = COUNT;
    items[0].name[0] = items[1].name[0] = '\0';
    open_error = "it is dark; make light";
    candidates.count = 1;
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_UNAVAILABLE);
    ck_assert_str_eq(error.message, "it is dark; make light");
    candidates.count = 2;
    opened_count = 0;
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_UNAVAILABLE);
    ck_assert_str_eq(error.message,
                     TL_NO_PORT "; candidate 1: it is dark; make light; candidate 2: it is dark; make light");
}
END_TEST

START_TEST(not_for_ever)
{
    good_order = COUNT;
    candidates.count = COUNT;
    open_error = "no";
    open_ns = 2 * TL_NS_PER_SEC;
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_UNAVAILABLE);
    ck_assert_uint_eq(opened_count, 2);
    ck_assert_str_eq(error.message, TL_NO_PORT "; mlx5_0:1 GID 0 10.0.0.1: no; mlx5_0:1 GID 1 10.0.0.1: no; 18 more "
                                               "were not tried in time");
}
END_TEST

START_TEST(what_all_lack_ends_it)
{
    good_order = COUNT;
    open_error = "card:1 needs 2 MiB of locked memory; ulimit -l unlimited";
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_UNAVAILABLE);
    ck_assert_uint_eq(opened_count, 1);
    ck_assert_str_eq(error.message, open_error);
    ck_assert_str_eq(failures, "");
}
END_TEST

START_TEST(reasons_that_are_longer_than_a_message)
{
    char reason[700];
    memset(reason, 'x', sizeof(reason) - 1);
    reason[sizeof(reason) - 1] = '\0';
    open_error = reason;
    good_order = COUNT - 1;
    candidates.count = COUNT;
    ck_assert_int_eq(tl_transport_choose(&candidates, &choice, &error), TL_OK);
    ck_assert_uint_eq(choice.order, COUNT - 1);
    ck_assert_uint_eq(strlen(choice.passed_over), sizeof(choice.passed_over) - 1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("plane_choice");
    TCase *tcase = tcase_create("plane_choice");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, the_first_that_works);
    tcase_add_loop_test(tcase, one_that_does_not_read, 0, 2);
    tcase_add_test(tcase, the_last_that_is_left);
    tcase_add_test(tcase, none_is_left);
    tcase_add_test(tcase, the_only_one_has_its_own_reason);
    tcase_add_test(tcase, one_without_a_name);
    tcase_add_test(tcase, not_for_ever);
    tcase_add_test(tcase, what_all_lack_ends_it);
    tcase_add_test(tcase, reasons_that_are_longer_than_a_message);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
