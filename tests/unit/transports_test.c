// SPDX-License-Identifier: Apache-2.0
/* What holds for each entry of the list of transports. */
#include <check.h>
#include <string.h>

#include "config/settings_table.h"
#include "control/link.h"
#include "fakes/run_suite.h"
#include "server/transports/transports.h"

/* The program `tensorlane pull` passes on the settings in the group with the transport's name. */
START_TEST(a_name_fits_and_is_that_of_a_group_of_settings)
{
    size_t count = 0;
    const char *name = tl_transports_all[_i]->name;
    ck_assert_uint_lt(strlen(name), TL_CONNECTION_TRANSPORT_BYTES);
    for (size_t i = 0; i < tl_settings_count; i++)
        count += tl_settings_table[i].group != NULL && strcmp(tl_settings_table[i].group, name) == 0;
    ck_assert_msg(count > 0, "there is no setting %s.*", name);
}
END_TEST

START_TEST(one_transport_at_most_describes_a_card)
{
    size_t count = 0;
    for (size_t i = 0; i < TL_MAX_TRANSPORTS; i++)
        count += tl_transports_all[i]->describe_card != NULL;
    ck_assert_uint_le(count, 1);
}
END_TEST

START_TEST(a_transport_within_the_host_has_a_remedy)
{
    ck_assert((tl_transports_all[_i]->find_host != NULL) == (tl_transports_all[_i]->address_remedy != NULL));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transports");
    TCase *tcase = tcase_create("transports");
    tcase_add_loop_test(tcase, a_name_fits_and_is_that_of_a_group_of_settings, 0, TL_MAX_TRANSPORTS);
    tcase_add_test(tcase, one_transport_at_most_describes_a_card);
    tcase_add_loop_test(tcase, a_transport_within_the_host_has_a_remedy, 0, TL_MAX_TRANSPORTS);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
