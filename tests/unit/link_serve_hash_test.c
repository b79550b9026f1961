// SPDX-License-Identifier: Apache-2.0
/* The numbers of requests, which a peer chooses: no choice puts many of them into one chain. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "control/link_serves.h"
#include "fakes/run_suite.h"

#define CHAINS 32768

/* As many numbers as chains, 2^shift apart: chance alone would put some eight into the longest chain. */
START_TEST(chains_are_short)
{
    static const uint64_t factors[] = {UINT64_C(0x9e3779b97f4a7c15), UINT64_C(0xd6e8feb86659fd93)};
    static unsigned lengths[CHAINS];
    struct tl_link link = {.answers.factor = factors[_i / 49]};
    unsigned shift = (unsigned)_i % 49, longest = 0;
    memset(lengths, 0, sizeof(lengths));
    for (uint64_t i = 0; i < CHAINS; i++) {
        unsigned *length = &lengths[link_serve_hash(&link, i << shift) & (CHAINS - 1)];
        if (++*length > longest) longest = *length;
    }
    ck_assert_msg(longest <= 64, "2^%u: %u numbers in one chain", shift, longest);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("link_serve_hash");
    TCase *tcase = tcase_create("link_serve_hash");
    tcase_add_loop_test(tcase, chains_are_short, 0, 2 * 49);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
