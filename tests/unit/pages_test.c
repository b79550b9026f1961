// SPDX-License-Identifier: Apache-2.0
/* Pages: mapped, aligned for huge pages, on a chosen node or any, and more than there is. */
#include <check.h>
#include <string.h>

#include "base/check.h"
#include "dataplane/memory/pages.h"
#include "fakes/run_suite.h"

static struct tl_error error;

START_TEST(mapped)
{
    static const uint64_t lens[] = {TL_PAGE_BYTES, 3 * TL_PAGE_BYTES, UINT64_C(2) << 20,
                                    (UINT64_C(6) << 20) + TL_PAGE_BYTES};
    static const int nodes[] = {-1, 0, 63, 64, 1023, 1024, INT32_MAX};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lens); i++) {
        for (size_t j = 0; j < TL_ARRAY_COUNT(nodes); j++) {
            void *address = NULL;
            ck_assert_int_eq(tl_pages_map(lens[i], nodes[j], &address, &error), TL_OK);
            uint64_t alignment = lens[i] < UINT64_C(2) << 20 ? TL_PAGE_BYTES : UINT64_C(2) << 20;
            ck_assert_uint_eq((uintptr_t)address % alignment, 0);
            ck_assert_uint_eq(((unsigned char *)address)[lens[i] - 1], 0);
            memset(address, 1, lens[i]);
            tl_pages_unmap(address, lens[i]);
        }
    }
}
END_TEST

START_TEST(too_much)
{
    static const uint64_t lens[] = {UINT64_C(1) << 60, UINT64_MAX - UINT64_MAX % TL_PAGE_BYTES};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lens); i++) {
        void *address = NULL;
        ck_assert_int_eq(tl_pages_map(lens[i], -1, &address, &error), TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_nonnull(strstr(error.message, "cannot map"));
        ck_assert_ptr_null(address);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("pages");
    TCase *tcase = tcase_create("pages");
    tcase_add_test(tcase, mapped);
    tcase_add_test(tcase, too_much);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
