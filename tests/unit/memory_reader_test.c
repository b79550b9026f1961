// SPDX-License-Identifier: Apache-2.0
/* Readers of memory: what is read arrives, also in pieces, and a destination that was taken back is not written. */
#include <check.h>
#include <dirent.h>
#include <inttypes.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/copy.h"
#include "dataplane/memory/memory_reader.h"
#include "fakes/run_suite.h"

#define LEN_BYTES ((UINT64_C(5) << 20) + 12345)
#define GUARD 0xa5

static int done_fd;
static struct tl_memory_reader *reader;
static uint8_t *source, *destination;
static struct tl_error error;

static void setup(void)
{
    done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    reader = tl_memory_reader_create(done_fd);
    source = malloc(LEN_BYTES);
    destination = malloc(LEN_BYTES);
    ck_assert(done_fd >= 0 && reader != NULL && source != NULL && destination != NULL);
    for (uint64_t i = 0; i < LEN_BYTES; i++)
        source[i] = (uint8_t)(i * 31 + i / 251);
    memset(destination, GUARD, LEN_BYTES);
}

static void teardown(void)
{
    tl_memory_reader_destroy(reader);
    tl_memory_reader_destroy(NULL);
    close(done_fd);
    free(source);
    free(destination);
}

static void start(const void *from, uint64_t len_bytes, bool is_buffered)
{
    const struct tl_memory_reading reading = {.process = getpid(),
                                              .source = (uintptr_t)from,
                                              .destination = destination,
                                              .len_bytes = len_bytes,
                                              .is_buffered = is_buffered};
    ck_assert_int_eq(tl_memory_reader_read(reader, &reading, &error), TL_OK);
    ck_assert(tl_memory_reader_is_busy(reader));
}

/* Waits until the thread has begun to write the destination, whose first byte was GUARD. ThreadSanitizer must not see
 * that the byte is read while it is written. */
__attribute__((no_sanitize("thread"))) static void await_first_byte(void)
{
    while (__atomic_load_n(&destination[0], __ATOMIC_RELAXED) == GUARD)
        sched_yield();
}

/* Returns the errno of the reading. */
static int await_end(void)
{
    struct pollfd done = {.fd = done_fd, .events = POLLIN};
    uint64_t count;
    int result = -1;
    while (!tl_memory_reader_is_done(reader, &result))
        ck_assert_int_eq(poll(&done, 1, -1), 1);
    while (read(done_fd, &count, sizeof(count)) < 0)
        ck_assert_int_eq(poll(&done, 1, -1), 1);
    ck_assert(!tl_memory_reader_is_busy(reader) && !tl_memory_reader_is_done(reader, &result));
    return result;
}

static unsigned count_threads(void)
{
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    ck_assert_ptr_nonnull(tasks);
    for (const struct dirent *task; (task = readdir(tasks)) != NULL;)
        count += task->d_name[0] != '.';
    closedir(tasks);
    return count;
}

START_TEST(read_whole)
{
    static const uint64_t lens[] = {1, 4096, LEN_BYTES - 1};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lens); i++) {
        memset(destination, GUARD, LEN_BYTES);
        start(source, lens[i], _i != 0);
        ck_assert_int_eq(await_end(), 0);
        ck_assert_int_eq(memcmp(destination, source, lens[i]), 0);
        ck_assert_uint_eq(destination[lens[i]], GUARD);
    }
}
END_TEST

START_TEST(read_to_memory_closely_behind)
{
    const uint8_t *from = source + (uintptr_t)(destination - 16 - source) % 4096;
    uint64_t len_bytes = LEN_BYTES - 4096;
    ck_assert(tl_copy_is_close((uintptr_t)destination, (uintptr_t)from));
    start(from, len_bytes, false);
    ck_assert_int_eq(await_end(), 0);
    ck_assert_int_eq(memcmp(destination, from, len_bytes), 0);
    ck_assert_uint_eq(destination[len_bytes], GUARD);
}
END_TEST

START_TEST(memory_that_is_not_there)
{
    void *gone = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert(gone != MAP_FAILED);
    start(gone, 4096, _i != 0);
    ck_assert_int_eq(await_end(), EFAULT);
    ck_assert_uint_eq(destination[0], GUARD);
    ck_assert_int_eq(munmap(gone, 4096), 0);
}
END_TEST

/* The reading ends early or is over already; in both cases the destination is not written any more. */
START_TEST(taken_back)
{
    for (unsigned i = 0; i < 50; i++) {
        start(source, LEN_BYTES, _i != 0);
        await_first_byte();
        if (i % 2 == 0) {
            tl_memory_reader_take_back(reader);
        } else {
            while (!tl_memory_reader_try_to_take_back(reader))
                continue;
        }
        memset(destination, GUARD, LEN_BYTES);
        int result = await_end();
        ck_assert(result == 0 || result == ECANCELED);
        for (uint64_t j = 0; j < LEN_BYTES; j += 512)
            if (destination[j] != GUARD) ck_abort_msg("byte %" PRIu64 " was written after it was taken back", j);
    }
    ck_assert(tl_memory_reader_try_to_take_back(reader));
}
END_TEST

/* A thread that has nothing to read for a while ends, and the next reading starts another one. */
START_TEST(read_after_the_thread_has_ended)
{
    unsigned with_thread = 0;
    for (unsigned i = 0; i < 2; i++) {
        memset(destination, GUARD, LEN_BYTES);
        start(source, LEN_BYTES, false);
        if (i == 0) with_thread = count_threads();
        ck_assert_uint_eq(count_threads(), with_thread);
        ck_assert_int_eq(await_end(), 0);
        ck_assert_int_eq(memcmp(destination, source, LEN_BYTES), 0);
        while (count_threads() == with_thread)
            ck_assert_int_eq(poll(NULL, 0, 10), 0);
    }
}
END_TEST

/* The thread frees a reader that is destroyed while it reads. */
START_TEST(destroyed_while_it_reads)
{
    for (unsigned i = 0; i < 50; i++) {
        struct tl_memory_reader *last = reader;
        destination[0] = GUARD;
        start(source, LEN_BYTES, _i != 0);
        await_first_byte();
        tl_memory_reader_take_back(last);
        tl_memory_reader_destroy(last);
        reader = tl_memory_reader_create(done_fd);
        ck_assert_ptr_nonnull(reader);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("memory_reader");
    TCase *tcase = tcase_create("memory_reader");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, read_whole, 0, 2);
    tcase_add_test(tcase, read_to_memory_closely_behind);
    tcase_add_loop_test(tcase, memory_that_is_not_there, 0, 2);
    tcase_add_loop_test(tcase, taken_back, 0, 2);
    tcase_add_test(tcase, read_after_the_thread_has_ended);
    tcase_add_loop_test(tcase, destroyed_while_it_reads, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
