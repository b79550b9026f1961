// SPDX-License-Identifier: Apache-2.0
/*
 * Hostile peers of the local provider: scripts of random bytes, the same in each run, and a process that overwrites all
 * memory that it shares with us while we use it.
 */
#include "fakes/local_hostile.h"

#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "fakes/forker.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"

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
        lasted += input.left_bytes < SCRIPT_BYTES - 80;
        hostile_close(&hostile);
    }
    ck_assert_uint_gt(broken, SCRIPTS / 2);
    ck_assert_uint_gt(lasted, SCRIPTS / 20); /* not every script ends its connection at once */
    PUMP_UNTIL(count_descriptors() == descriptors);
    ck_assert_uint_eq(count_mappings(), mappings);
}
END_TEST

/* Opens a, and b with the provider that the hostile peer is connected to as well. */
static struct tl_region *open_bystanders(struct tl_provider *provider, struct tl_exposure *ret_exposure)
{
    struct tl_pair_address from_a, from_b;
    a = (struct side){.name = "a"};
    b = (struct side){.name = "b", .provider = provider};
    side_open(&a, "a", NULL);
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_create(&b, 16, 16, TL_KEYS_REGION);
    side_get_address(&a, &from_a);
    side_get_address(&b, &from_b);
    side_connect(&a, &from_b);
    side_connect(&b, &from_a);
    struct tl_region *region = side_map(&b, 4096);
    side_expose(&b, region, region->address, 4096, ret_exposure);
    return region;
}

/* Checks that a write from a to b arrives. */
static void use_bystanders(const struct tl_region *region, const struct tl_exposure *exposure, unsigned number)
{
    unsigned value = number * 2654435761u, arrived;
    side_write(&a, &value, sizeof(value), exposure, 0, true, number, NULL);
    PUMP_UNTIL(b.immediates == number + 1);
    memcpy(&arrived, region->address, sizeof(arrived));
    ck_assert_uint_eq(arrived, value);
    ck_assert_uint_eq(a.broken + b.broken, 0);
}

/* What the scribbling process gets, together with the victim's ring. */
struct scribbling {
    uint64_t seed;
    uint64_t source; /* address of the memory that its slots ask to read */
    uint32_t sequence;
};

static pid_t scribbler;
static int scribbler_fd;

static void take_ring(int fd_, void *words, size_t len_bytes, struct local_ring *ret_ring)
{
    int memory;
    TL_CHECK(forker_take(fd_, words, len_bytes, &memory) == len_bytes);
    void *address = mmap(NULL, local_ring_bytes(LOCAL_MIN_RING_SLOTS), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    TL_CHECK(address != MAP_FAILED);
    local_ring_place(ret_ring, address, LOCAL_MIN_RING_SLOTS);
}

static int child_that_scribbles(int fd_)
{
    struct scribbling scribbling;
    struct local_ring own, theirs;
    char word = 0;
    take_ring(fd_, &word, 1, &own);
    TL_CHECK(forker_pass(fd_, &word, 1, -1));
    take_ring(fd_, &scribbling, sizeof(scribbling), &theirs);
    seed = scribbling.seed;
    uint32_t sequence = scribbling.sequence;
    while (true) {
        for (unsigned j = 0; j < 8; j++) {
            struct local_slot *slot = local_ring_slot(&theirs, sequence);
            slot->kind = (uint16_t)(1 + next_byte() % 3);
            slot->message_bytes = next_byte() * 5u;
            slot->len_bytes = next_byte() * 16u;
            slot->offset_bytes = next_byte() * 8u;
            slot->source = scribbling.source;
            slot->exposure = slot->generation = 0;
            atomic_store(&slot->sequence, ++sequence);
            for (unsigned k = 0; k < 40; k++) { /* the fields change while the victim reads them */
                slot->message_bytes = next_byte() * 40u;
                slot->len_bytes = next_byte() * 300u;
                slot->offset_bytes = next_byte() * UINT64_C(0x100000001);
            }
        }
        if (next_byte() % 64 == 0) atomic_fetch_add(&own.head->consumed, 1);
    }
    return 0;
}

static void show_scribbler(int ring_fd)
{
    char word = 0;
    int none;
    scribbler = forker_start(child_that_scribbles, &scribbler_fd);
    TL_CHECK(forker_pass(scribbler_fd, &word, 1, ring_fd) && forker_take(scribbler_fd, &word, 1, &none) == 1);
}

/* Another process writes into the ring and its head without end, while this process polls, posts, and serves another
 * peer. */
START_TEST(a_process_that_scribbles)
{
    forker_open();
    for (unsigned i = 0; i < 20; i++) {
        struct hostile hostile;
        struct tl_exposure exposure;
        hostile_open_shown(&hostile, show_scribbler);
        struct tl_region *region = open_bystanders(hostile.provider, &exposure);
        const struct scribbling scribbling = {
            .seed = i, .source = (uintptr_t)hostile.source, .sequence = hostile.sequence};
        ck_assert(forker_pass(scribbler_fd, &scribbling, sizeof(scribbling), hostile.theirs_fd));
        struct hostile_input input = {.left_bytes = 0};
        for (unsigned j = 0; j < 3000; j++) {
            if (hostile.broken == 0) hostile_step(&hostile, &input);
            if (j % 16 == 0) use_bystanders(region, &exposure, j / 16);
        }
        ck_assert_int_eq(kill(scribbler, SIGKILL), 0);
        (void)forker_wait(scribbler);
        close(scribbler_fd);
        side_end(&a);
        side_end(&b);
        region_drop(region);
        side_close(&a);
        hostile_close(&hostile);
    }
    forker_close();
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
    return run_suite(suite);
}
