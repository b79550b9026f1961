// SPDX-License-Identifier: Apache-2.0
/* The id of the host is what the kernel says, each time. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/host_id.h"
#include "fakes/run_suite.h"

START_TEST(same_as_the_kernel_says)
{
    uint8_t id[TL_HOST_ID_BYTES];
    struct tl_error error;
    char text[64], said[64], *place = text;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(fscanf(file, "%63s", said), 1);
    fclose(file);
    ck_assert_int_eq(tl_host_id_get(id, &error), TL_OK);
    for (unsigned i = 0; i < TL_HOST_ID_BYTES; i++)
        place += sprintf(place, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id[i]);
    ck_assert_str_eq(text, said);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("host_id");
    TCase *tcase = tcase_create("host_id");
    tcase_add_test(tcase, same_as_the_kernel_says);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
