// SPDX-License-Identifier: Apache-2.0
/* A listing whose entries are taken in order: the heap. */
#include "control/listing.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control/client.h"
#include "fakes/run_suite.h"

static void add(struct tl_listing *listing, unsigned number)
{
    char key[16];
    snprintf(key, sizeof(key), "%06u", number);
    listing->items = realloc(listing->items, (listing->count + 1) * sizeof(*listing->items));
    ck_assert_ptr_nonnull(listing->items);
    listing->items[listing->count++] = (struct tl_listed){.key = strdup(key), .step = number};
    tl_listing_sift(listing);
}

static void check_order(size_t count)
{
    struct tl_listing listing = {.items = NULL};
    for (size_t i = 0; i < count; i++)
        add(&listing, (unsigned)random() % 1000);
    const struct tl_listed *former = NULL;
    for (size_t taken = 0; taken < count; taken++) {
        const char *next = listing.items[0].key;
        const struct tl_listed *item = tl_listing_take(&listing, count - taken);
        ck_assert_ptr_eq(item->key, next);
        ck_assert_uint_eq((uint64_t)atoi(item->key), item->step);
        if (former != NULL) ck_assert_int_le(strcmp(former->key, item->key), 0);
        former = item;
    }
    tl_listing_fini(&listing);
    ck_assert_uint_eq(listing.count, 0);
}

START_TEST(entries_are_taken_in_the_order_of_their_keys)
{
    srandom(3);
    for (size_t count = 0; count < 70; count++)
        check_order(count);
    check_order(5000);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("listing");
    TCase *tcase = tcase_create("listing");
    tcase_add_test(tcase, entries_are_taken_in_the_order_of_their_keys);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
