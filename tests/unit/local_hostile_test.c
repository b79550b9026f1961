// SPDX-License-Identifier: Apache-2.0
/*
 * Peers over the local transport that do what they like: scripts of random bytes, the same in each run, and a process
 * that scribbles over everything it shares with us while we work with it.
 */
#include "fakes/local_hostile.h"

#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "fakes/local_sides.h"

#define SCRIPTS 150
#define SCRIPT_BYTES 3000

static uint64_t seed;

static uint8_t next_byte(void)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint8_t)(seed >> 56);
}

START_TEST(random_scripts)
{
    static uint8_t script[SCRIPT_BYTES];
    unsigned broken = 0, lasted = 0;
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < SCRIPTS; i++) {
        seed = (uint64_t)_i * SCRIPTS + i;
        for (unsigned j = 0; j < SCRIPT_BYTES; j++)
            script[j] = next_byte();
        struct hostile_input input = {.data = script, .left_bytes = SCRIPT_BYTES};
        struct hostile hostile;
        hostile_open(&hostile);
        while (input.left_bytes > 0 && hostile.broken == 0)
            hostile_step(&hostile, &input);
        broken += hostile.broken;
        lasted += input.left_bytes < SCRIPT_BYTES - 100;
        hostile_close(&hostile);
    }
    ck_assert_uint_gt(broken, SCRIPTS / 2);
    ck_assert_uint_gt(lasted, SCRIPTS / 20); /* they are not all over at once */
    ck_assert_uint_eq(count_descriptors(), descriptors);
    ck_assert_uint_eq(count_mappings(), mappings);
}
END_TEST

/* Another process writes into the ring and the words without end, while this one polls and posts. */
START_TEST(a_process_that_scribbles)
{
    for (unsigned i = 0; i < 20; i++) {
        struct hostile hostile;
        hostile_open(&hostile);
        pid_t pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
            struct local_slot *slot;
            seed = i;
            for (;;) {
                for (unsigned j = 0; j < 8; j++) {
                    slot = local_ring_slot(&hostile.theirs, hostile.turn);
                    slot->kind = (uint16_t)(1 + next_byte() % 3);
                    slot->message_bytes = next_byte() * 5u;
                    slot->len_bytes = next_byte() * 16u;
                    slot->offset_bytes = next_byte() * 8u;
                    slot->source = (uintptr_t)hostile.source;
                    slot->exposure = slot->generation = 0;
                    atomic_store(&slot->turn, ++hostile.turn);
                    for (unsigned k = 0; k < 40; k++) { /* while it is looked at */
                        slot->message_bytes = next_byte() * 40u;
                        slot->len_bytes = next_byte() * 300u;
                        slot->offset_bytes = next_byte() * UINT64_C(0x100000001);
                    }
                }
                if (next_byte() % 64 == 0) atomic_fetch_add(&hostile.ring.head->consumed, 1);
            }
        }
        struct hostile_input input = {.left_bytes = 0};
        for (unsigned j = 0; j < 3000 && hostile.broken == 0; j++)
            hostile_step(&hostile, &input);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
        hostile_close(&hostile);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_hostile");
    TCase *tcase = tcase_create("local_hostile");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, random_scripts, 0, 3);
    tcase_add_test(tcase, a_process_that_scribbles);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}
