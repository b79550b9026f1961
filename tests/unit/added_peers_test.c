// SPDX-License-Identifier: Apache-2.0
/* The table of peers that were added: ids, names, and slots that are used again. */
#include <check.h>
#include <stdio.h>

#include "fakes/run_suite.h"
#include "server/peers/added_peers.h"

#define FIRST_INDEX 3

static struct tl_added_peers table;
static char names[64][32];
static struct tl_added peers[64];

static struct tl_added *insert(unsigned number, const char *name)
{
    snprintf(names[number], sizeof(names[number]), "%s", name);
    peers[number] = (struct tl_added){.name = names[number]};
    ck_assert(tl_added_peers_insert(&table, &peers[number]));
    return &peers[number];
}

static void setup(void)
{
    tl_added_peers_init(&table, FIRST_INDEX);
}

static void teardown(void)
{
    struct tl_added *peer;
    size_t place = 0;
    while ((peer = tl_added_peers_next(&table, &place)) != NULL)
        tl_added_peers_remove(&table, peer);
    tl_added_peers_fini(&table);
}

START_TEST(an_id_names_one_peer_for_ever)
{
    const struct tl_added *first = insert(0, "a");
    uint64_t id = first->id;
    ck_assert_uint_gt((uint32_t)id, FIRST_INDEX);
    ck_assert_ptr_eq(tl_added_peers_by_id(&table, id), first);
    tl_added_peers_remove(&table, &peers[0]);
    ck_assert_ptr_null(tl_added_peers_by_id(&table, id));
    const struct tl_added *second = insert(1, "b");
    ck_assert_uint_eq((uint32_t)second->id, (uint32_t)id);
    ck_assert_uint_ne(second->id, id);
    ck_assert_ptr_null(tl_added_peers_by_id(&table, id));
    ck_assert_ptr_eq(tl_added_peers_by_id(&table, second->id), second);
    for (uint64_t wrong = 0; wrong <= FIRST_INDEX; wrong++)
        ck_assert_ptr_null(tl_added_peers_by_id(&table, wrong));
    ck_assert_ptr_null(tl_added_peers_by_id(&table, UINT64_MAX));
}
END_TEST

START_TEST(a_name_is_that_of_the_first_who_has_it)
{
    struct tl_added *first = insert(0, "a"), *second = insert(1, "a");
    ck_assert_ptr_eq(tl_added_peers_by_name(&table, "a"), first);
    tl_added_peers_rename(&table, first, "b", names[0], sizeof(names[0]));
    ck_assert_ptr_eq(tl_added_peers_by_name(&table, "a"), second);
    ck_assert_ptr_eq(tl_added_peers_by_name(&table, "b"), first);
    tl_added_peers_remove(&table, second);
    ck_assert_ptr_null(tl_added_peers_by_name(&table, "a"));
    /* The name of one that goes, or is called otherwise, passes to another one that has it. */
    struct tl_added *third = insert(2, "b");
    struct tl_added *fourth = insert(3, "b");
    tl_added_peers_remove(&table, first);
    ck_assert_ptr_eq(tl_added_peers_by_name(&table, "b"), third);
    tl_added_peers_rename(&table, third, "c", names[2], sizeof(names[2]));
    ck_assert_ptr_eq(tl_added_peers_by_name(&table, "b"), fourth);
    ck_assert_uint_eq(table.hidden_count, 0);
}
END_TEST

START_TEST(all_are_found_one_after_the_other)
{
    char name[16];
    for (unsigned i = 0; i < 64; i++) {
        snprintf(name, sizeof(name), "peer %u", i);
        insert(i, name);
    }
    for (unsigned i = 0; i < 64; i += 2)
        tl_added_peers_remove(&table, &peers[i]);
    ck_assert_uint_eq(table.count, 32);
    size_t place = 0, found = 0;
    struct tl_added *peer;
    for (; (peer = tl_added_peers_next(&table, &place)) != NULL; found++)
        ck_assert_ptr_eq(tl_added_peers_by_name(&table, peer->name), peer);
    ck_assert_uint_eq(found, 32);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("added_peers");
    TCase *tcase = tcase_create("ids");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, an_id_names_one_peer_for_ever);
    tcase_add_test(tcase, all_are_found_one_after_the_other);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("names");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, a_name_is_that_of_the_first_who_has_it);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
