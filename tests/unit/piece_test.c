// SPDX-License-Identifier: Apache-2.0
/* Pieces of tensors on devices: they wait for a fence, a block and a copy, can be given up at any point, and leave
 * nothing behind. */
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/mailbox.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/piece.h"

#define PATIENCE_NS (20 * TL_NS_PER_SEC)
#define BYTES ((uint64_t)100 * 1000)

/* The loop on which the pieces notify; the thread of the test drives it. */
static struct tl_mailbox mailbox;

struct seen {
    unsigned count;
    enum tl_status status;
    char message[TL_ERROR_MESSAGE_BYTES];
};

static void post(void *loop, struct tl_closure *closure)
{
    ck_assert(!tl_mailbox_post(loop, closure)); /* no thread sleeps on it */
}

static void notify(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct seen *seen = context;
    ck_assert_ptr_nonnull(piece);
    seen->count++;
    seen->status = status->code;
    snprintf(seen->message, sizeof(seen->message), "%s", status->message);
}

static void run_loop(void)
{
    const struct timespec nap = {.tv_nsec = 100 * 1000};
    tl_loop_core_enter();
    (void)tl_mailbox_run(&mailbox, &(struct tl_quota){0});
    tl_loop_core_leave();
    nanosleep(&nap, NULL);
}

static void await(const struct seen *seen, unsigned count)
{
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    while (seen->count < count && tl_clock_now_ns() < until_ns)
        run_loop();
    ck_assert_uint_eq(seen->count, count);
}

static void run_for_a_while(void)
{
    for (unsigned i = 0; i < 100; i++)
        run_loop();
}

static void setup(void)
{
    setup_cuda();
    tl_mailbox_init(&mailbox);
}

static struct tl_piece_options options_of(struct tl_tensor *tensor, uint64_t offset, uint64_t len, struct seen *seen)
{
    *seen = (struct seen){.count = 0};
    return (struct tl_piece_options){.tensor = tensor,
                                     .offset_bytes = offset,
                                     .len_bytes = len,
                                     .post = post,
                                     .loop = &mailbox,
                                     .notify = notify,
                                     .context = seen};
}

static struct tl_piece *read_piece(struct tl_tensor *tensor, uint64_t offset, uint64_t len, struct seen *seen)
{
    struct tl_piece_options options = options_of(tensor, offset, len, seen);
    tl_loop_core_enter();
    struct tl_piece *piece = tl_piece_read(&options);
    tl_loop_core_leave();
    ck_assert_ptr_nonnull(piece);
    return piece;
}

static struct tl_piece *write_piece(struct tl_tensor *tensor, uint64_t offset, uint64_t len, struct seen *seen)
{
    struct tl_piece_options options = options_of(tensor, offset, len, seen);
    tl_loop_core_enter();
    struct tl_piece *piece = tl_piece_write(&options);
    tl_loop_core_leave();
    ck_assert_ptr_nonnull(piece);
    return piece;
}

/* Takes `count` blocks, which must become free. */
static void take_blocks(void **ret_blocks, unsigned count)
{
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    for (unsigned i = 0; i < count; i++)
        while ((ret_blocks[i] = tl_device_staging_try(gpu0)) == NULL && tl_clock_now_ns() < until_ns)
            run_loop();
    for (unsigned i = 0; i < count; i++)
        ck_assert_ptr_nonnull(ret_blocks[i]);
}

static void give_blocks(void *const *blocks, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        tl_device_staging_put(gpu0, blocks[i], false);
}

/* Pins the blocks, if that was not done, on the thread of the program. */
static void copy_a_byte(void)
{
    struct tl_tensor *from = bytes_on(gpu0, 1), *to = bytes_on(host, 1);
    copy(to, from);
    tl_tensor_put(from);
    tl_tensor_put(to);
}

/* Every block can be taken: none was kept. */
static void check_all_blocks_are_free(void)
{
    void *blocks[TL_STAGING_BLOCKS];
    copy_a_byte();
    take_blocks(blocks, TL_STAGING_BLOCKS);
    give_blocks(blocks, TL_STAGING_BLOCKS);
}

/* What the pieces hold is freed on other threads, a moment later. */
static void await_sole_owner(struct tl_tensor *tensor)
{
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    while (tl_tensor_is_shared(tensor) && tl_clock_now_ns() < until_ns)
        run_loop();
    ck_assert(!tl_tensor_is_shared(tensor));
}

/* ------------------------------------------------------------------------------------------------------- bytes -- */

START_TEST(reads)
{
    struct seen seen;
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    fill(tensor, 3);
    struct tl_piece *piece = read_piece(tensor, 5000, 777, &seen);
    await(&seen, 1);
    ck_assert_int_eq(seen.status, TL_OK);
    ck_assert_uint_eq(tl_piece_len_bytes(piece), 777);
    ck_assert_mem_eq(tl_piece_data(piece), look(tensor) + 5000, 777);
    tl_piece_put(piece);
    check_all_blocks_are_free();
    await_sole_owner(tensor);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(writes)
{
    struct seen seen;
    struct tl_tensor *tensor = bytes_on(gpu1, BYTES);
    fill(tensor, 3);
    for (unsigned round = 0; round < 2; round++) {
        struct tl_piece *piece = write_piece(tensor, 64, 300, &seen);
        unsigned begun = tl_piece_data(piece) == NULL;
        if (round == 1) ck_assert_msg(!begun, "a block that is free is given at once");
        await(&seen, begun); /* the first time the blocks must be pinned */
        memset(tl_piece_data(piece), (int)(0x40 + round), 300);
        tl_loop_core_enter();
        tl_piece_copy(piece);
        tl_loop_core_leave();
        await(&seen, begun + 1);
        ck_assert_int_eq(seen.status, TL_OK);
        for (unsigned i = 0; i < 300; i++)
            ck_assert_uint_eq(look(tensor)[64 + i], 0x40 + round);
        ck_assert_uint_ne(look(tensor)[63], 0x40 + round);
        tl_piece_put(piece);
    }
    await_sole_owner(tensor);
    tl_tensor_put(tensor);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- waiting -- */

/* A stream that is held, and a fence in it. */
static struct tl_device_fence *fence_of(void **ret_stream)
{
    struct tl_error error;
    struct tl_device_fence *fence = NULL;
    *ret_stream = cuda->create_stream(0, false);
    cuda->hold(*ret_stream, true);
    ck_assert_int_eq(tl_device_fence_record(gpu0, (tl_stream)*ret_stream, &fence, &error), TL_OK);
    return fence;
}

/* Many pieces that wait for a fence hold no block, so that others are copied meanwhile. */
START_TEST(fences_come_before_blocks)
{
    void *stream;
    struct seen seen[2 * TL_STAGING_BLOCKS], other;
    struct tl_piece *pieces[2 * TL_STAGING_BLOCKS];
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    struct tl_device_fence *fence = fence_of(&stream);
    for (unsigned i = 0; i < 2 * TL_STAGING_BLOCKS; i++) {
        struct tl_piece_options options = options_of(tensor, i, i % 3 == 0 ? 0 : 10, &seen[i]);
        options.after = fence;
        pieces[i] = i % 2 == 0 ? tl_piece_read(&options) : tl_piece_write(&options);
    }
    tl_device_fence_put(fence); /* the pieces have references of their own */
    struct tl_piece *piece = read_piece(tensor, 0, 10, &other);
    await(&other, 1);
    tl_piece_put(piece);
    for (unsigned i = 0; i < 2 * TL_STAGING_BLOCKS; i++)
        ck_assert_uint_eq(seen[i].count, 0);
    cuda->hold(stream, false);
    for (unsigned i = 0; i < 2 * TL_STAGING_BLOCKS; i++) {
        await(&seen[i], 1);
        tl_piece_put(pieces[i]);
    }
    check_all_blocks_are_free();
    await_sole_owner(tensor);
    tl_tensor_put(tensor);
}
END_TEST

/* Those that wait for a block get one in the order in which they asked. */
START_TEST(blocks_are_waited_for)
{
    enum { WAITING = 5 };
    struct seen seen[WAITING];
    struct tl_piece *pieces[WAITING];
    void *blocks[TL_STAGING_BLOCKS];
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    copy_a_byte();
    take_blocks(blocks, TL_STAGING_BLOCKS);
    for (unsigned i = 0; i < WAITING; i++)
        pieces[i] = read_piece(tensor, 0, 10, &seen[i]);
    run_for_a_while();
    cuda->hold(NULL, true); /* a block that was given stays in use */
    for (unsigned i = 0; i < WAITING; i++) {
        ck_assert_uint_eq(seen[i].count, 0);
        give_blocks(&blocks[i], 1);
    }
    run_for_a_while();
    cuda->hold(NULL, false);
    for (unsigned i = 0; i < WAITING; i++) {
        await(&seen[i], 1);
        tl_piece_put(pieces[i]);
    }
    give_blocks(blocks + WAITING, TL_STAGING_BLOCKS - WAITING);
    check_all_blocks_are_free();
    tl_tensor_put(tensor);
}
END_TEST

/* Bytes that were read, and blocks that wait to be filled, keep half of the blocks at most, though the loop does not
 * run: others are copied meanwhile, also by the thread of the program. */
START_TEST(a_loop_that_rests_keeps_few_blocks)
{
    enum { MANY = 2 * TL_STAGING_BLOCKS };
    struct seen seen[MANY];
    struct tl_piece *pieces[MANY];
    void *blocks[TL_STAGING_BLOCKS];
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    bool is_reading = _i == 0;
    fill(tensor, 6);
    copy_a_byte();
    take_blocks(blocks, TL_STAGING_BLOCKS);
    for (unsigned i = 0; i < MANY; i++)
        pieces[i] = is_reading ? read_piece(tensor, 0, BYTES, &seen[i]) : write_piece(tensor, 0, BYTES, &seen[i]);
    give_blocks(blocks, TL_STAGING_BLOCKS);
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    unsigned free_count = 0;
    while (free_count < TL_STAGING_BLOCKS - TL_STAGING_KEPT_BLOCKS && tl_clock_now_ns() < until_ns) {
        copy_a_byte();
        for (free_count = 0; (blocks[free_count] = tl_device_staging_try(gpu0)) != NULL;)
            free_count++;
        give_blocks(blocks, free_count);
    }
    ck_assert_uint_eq(free_count, TL_STAGING_BLOCKS - TL_STAGING_KEPT_BLOCKS);
    unsigned copied_count = 0;
    for (unsigned i = 0; i < MANY; i++) {
        await(&seen[i], 1);
        ck_assert_int_eq(seen[i].status, TL_OK);
        copied_count += tl_piece_is_copied(pieces[i]);
        if (is_reading) ck_assert_mem_eq(tl_piece_data(pieces[i]), look(tensor), BYTES);
        if (!is_reading) {
            memset(tl_piece_data(pieces[i]), 1, BYTES);
            tl_piece_copy(pieces[i]);
            await(&seen[i], 2);
            tl_piece_put(pieces[i]);
        }
    }
    if (is_reading) ck_assert_uint_eq(copied_count, MANY - TL_STAGING_KEPT_BLOCKS);
    for (unsigned i = 0; i < MANY && is_reading; i++)
        tl_piece_put(pieces[i]);
    check_all_blocks_are_free();
    await_sole_owner(tensor);
    tl_tensor_put(tensor);
}
END_TEST

/* ----------------------------------------------------------------------------------------- memory of the caller -- */

#define LARGE (2 * TL_STAGING_BLOCK_BYTES)

static void unpinned(struct tl_device_unpin *unpin, const struct tl_error *status)
{
    ck_assert_msg(status->code == TL_OK, "%s", status->message);
    __atomic_store_n(&unpin->address, NULL, __ATOMIC_SEQ_CST); /* the test waits for it */
}

/* A tensor of the host that is pinned. */
static struct tl_tensor *pinned_tensor(uint64_t size_bytes)
{
    struct tl_error error;
    struct tl_tensor *tensor = bytes_on(host, size_bytes);
    enum tl_status status = tl_device_pin(gpu0, tl_tensor_data(tensor), size_bytes, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return tensor;
}

static void unpin(struct tl_tensor *tensor)
{
    static struct tl_device_unpin unpin;
    unpin = (struct tl_device_unpin){.device = gpu0, .address = tl_tensor_data(tensor), .done = unpinned};
    await_sole_owner(tensor); /* no copy uses it any more */
    tl_device_unpin(&unpin);
    while (__atomic_load_n(&unpin.address, __ATOMIC_SEQ_CST) != NULL)
        run_loop();
    tl_tensor_put(tensor);
}

/* Between a device and pinned memory there is one copy, no block, and no limit of a block. */
START_TEST(straight_from_and_to_pinned_memory)
{
    struct fake_cuda_counts before, after;
    struct seen seen;
    void *stream, *blocks[TL_STAGING_BLOCKS];
    struct tl_tensor *tensor = bytes_on(gpu1, LARGE + 100), *pinned = pinned_tensor(LARGE + 200);
    bool is_reading = _i == 0;
    fill(tensor, 3);
    fill(pinned, 4);
    copy_a_byte();
    take_blocks(blocks, TL_STAGING_BLOCKS);
    cuda->get_counts(&before);
    for (unsigned is_fenced = 0; is_fenced < 2; is_fenced++) {
        struct tl_piece_options options = options_of(tensor, 64, LARGE, &seen);
        options.host = pinned;
        options.host_offset_bytes = 128;
        options.after = is_fenced ? fence_of(&stream) : NULL;
        tl_loop_core_enter();
        struct tl_piece *piece = is_reading ? tl_piece_read(&options) : tl_piece_write(&options);
        tl_loop_core_leave();
        if (is_fenced) run_for_a_while();
        if (is_fenced) ck_assert_uint_eq(seen.count, 0);
        tl_device_fence_put(options.after);
        if (is_fenced) cuda->hold(stream, false);
        await(&seen, 1);
        ck_assert_int_eq(seen.status, TL_OK);
        ck_assert_ptr_null(tl_piece_data(piece));
        ck_assert(!tl_piece_is_copied(piece));
        ck_assert(!tl_tensor_is_shared(pinned)); /* the piece has let go of it */
        tl_piece_put(piece);
        ck_assert_mem_eq((char *)tl_tensor_data(pinned) + 128, look(tensor) + 64, LARGE);
        fill(is_reading ? tensor : pinned, 5);
    }
    cuda->get_counts(&after);
    ck_assert_uint_eq(after.copied_bytes - before.copied_bytes, 2 * LARGE);
    give_blocks(blocks, TL_STAGING_BLOCKS);
    unpin(pinned);
    tl_tensor_put(tensor);
}
END_TEST

/* A copy that is left alone keeps the memory of both sides until it is over; a fence keeps neither. */
START_TEST(given_up_with_pinned_memory)
{
    struct seen seen;
    void *stream;
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES), *pinned = pinned_tensor(BYTES);
    for (unsigned round = 0; round < 4; round++) {
        bool is_fenced = round % 2 == 1;
        struct tl_piece_options options = options_of(tensor, 0, BYTES, &seen);
        options.host = pinned;
        options.after = is_fenced ? fence_of(&stream) : NULL;
        cuda->hold(NULL, true);
        struct tl_piece *piece = round < 2 ? tl_piece_read(&options) : tl_piece_write(&options);
        tl_device_fence_put(options.after);
        if (!is_fenced) ck_assert(!tl_piece_stop(piece));
        tl_piece_put(piece);
        run_for_a_while();
        ck_assert_int_eq(tl_tensor_is_shared(pinned), !is_fenced);
        ck_assert_int_eq(tl_tensor_is_shared(tensor), !is_fenced);
        if (is_fenced) cuda->hold(stream, false);
        cuda->hold(NULL, false);
        await_sole_owner(pinned);
        await_sole_owner(tensor);
        ck_assert_uint_eq(seen.count, 0);
    }
    unpin(pinned);
    tl_tensor_put(tensor);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- giving up -- */

/* A piece that waits for a fence lets go of the tensor at once, although the fence is never reached. */
START_TEST(given_up_at_a_fence)
{
    void *stream;
    struct seen seen;
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    struct tl_device_fence *fence = fence_of(&stream);
    struct tl_piece_options options = options_of(tensor, 0, 10, &seen);
    options.after = fence;
    struct tl_piece *piece = tl_piece_read(&options);
    ck_assert(tl_tensor_is_shared(tensor));
    ck_assert(tl_piece_stop(piece));
    ck_assert(!tl_tensor_is_shared(tensor));
    tl_device_fence_put(fence);
    cuda->hold(stream, false);
    run_for_a_while();
    ck_assert_uint_eq(seen.count, 0);
    check_all_blocks_are_free();
    tl_tensor_put(tensor);
}
END_TEST

/* While the device copies, a piece cannot be stopped; when it is put, the tensor stays until the copy is over. */
START_TEST(given_up_in_a_copy)
{
    struct seen seen;
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    check_all_blocks_are_free(); /* they are pinned from here on */
    for (unsigned is_read = 0; is_read < 2; is_read++) {
        cuda->hold(NULL, true);
        struct tl_piece *piece = is_read ? read_piece(tensor, 0, 10, &seen) : write_piece(tensor, 0, 10, &seen);
        if (!is_read) tl_piece_copy(piece);
        ck_assert(!tl_piece_stop(piece));
        tl_piece_put(piece);
        run_for_a_while();
        ck_assert(tl_tensor_is_shared(tensor));
        cuda->hold(NULL, false);
        await_sole_owner(tensor);
        ck_assert_uint_eq(seen.count, 0);
    }
    check_all_blocks_are_free();
    tl_tensor_put(tensor);
}
END_TEST

/* Given up after the closure was posted, before it ran; and while it waits for a block. */
START_TEST(given_up_on_the_way)
{
    const struct timespec moment = {.tv_nsec = 20 * 1000 * 1000};
    struct seen seen[TL_STAGING_BLOCKS + 1];
    struct tl_piece *pieces[TL_STAGING_BLOCKS + 1];
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    for (unsigned i = 0; i < TL_STAGING_BLOCKS + 1; i++)
        pieces[i] = i % 2 == 0 ? read_piece(tensor, 0, 10, &seen[i]) : write_piece(tensor, 0, 10, &seen[i]);
    nanosleep(&moment, NULL); /* the loop is not driven */
    for (unsigned i = TL_STAGING_BLOCKS + 1; i-- > 0;)
        tl_piece_put(pieces[i]);
    run_for_a_while();
    for (unsigned i = 0; i < TL_STAGING_BLOCKS + 1; i++)
        ck_assert_uint_eq(seen[i].count, 0);
    check_all_blocks_are_free();
    await_sole_owner(tensor);
    tl_tensor_put(tensor);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- failures -- */

/* Every call of CUDA fails once: the piece says so, and the next one works. */
START_TEST(calls_that_fail)
{
    struct seen seen;
    unsigned number = 0;
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    do {
        number++;
        struct tl_piece_options options = options_of(tensor, 0, 10, &seen);
        cuda->fail_call(number, 2, false); /* no memory */
        struct tl_piece *piece = tl_piece_read(&options);
        await(&seen, 1);
        tl_piece_put(piece);
    } while (seen.status != TL_OK && number < 20);
    ck_assert_int_eq(seen.status, TL_OK);
    ck_assert_uint_gt(number, 2);
    cuda->fail_call(0, 0, false);
    check_all_blocks_are_free();
    tl_tensor_put(tensor);
}
END_TEST

/* A request for blocks that cannot be pinned is told; the next one asks again. */
START_TEST(no_pinned_memory)
{
    struct seen seen;
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    cuda->fail_call(1, 2, false);
    struct tl_piece *piece = read_piece(tensor, 0, 10, &seen);
    await(&seen, 1);
    ck_assert_int_eq(seen.status, TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(seen.message, "pinning host memory") != NULL, "%s", seen.message);
    tl_piece_put(piece);
    check_all_blocks_are_free();
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(lost_device)
{
    struct seen seen[2];
    struct tl_piece *pieces[2];
    struct tl_tensor *tensor = bytes_on(gpu0, BYTES);
    check_all_blocks_are_free();
    cuda->hold(NULL, true);
    for (unsigned i = 0; i < 2; i++)
        pieces[i] = read_piece(tensor, 0, 10, &seen[i]);
    cuda->break_device(0, 700);
    cuda->hold(NULL, false);
    for (unsigned i = 0; i < 2; i++) {
        await(&seen[i], 1);
        ck_assert_int_eq(seen[i].status, TL_FAILED_PRECONDITION);
        tl_piece_put(pieces[i]);
    }
    await_sole_owner(tensor);
    tl_tensor_put(tensor);
}
END_TEST

int main(void)
{
    TCase *bytes = tcase_create("bytes");
    tcase_add_checked_fixture(bytes, setup, NULL);
    tcase_add_test(bytes, reads);
    tcase_add_test(bytes, writes);
    tcase_add_test(bytes, fences_come_before_blocks);
    tcase_add_test(bytes, blocks_are_waited_for);
    tcase_add_loop_test(bytes, a_loop_that_rests_keeps_few_blocks, 0, 2);
    tcase_add_loop_test(bytes, straight_from_and_to_pinned_memory, 0, 2);
    tcase_add_test(bytes, given_up_with_pinned_memory);
    tcase_add_test(bytes, given_up_at_a_fence);
    tcase_add_test(bytes, given_up_in_a_copy);
    tcase_add_test(bytes, given_up_on_the_way);
    tcase_add_test(bytes, calls_that_fail);
    tcase_add_test(bytes, no_pinned_memory);
    tcase_add_test(bytes, lost_device);
    Suite *suite = suite_create("piece");
    suite_add_tcase(suite, bytes);
    return run_suite(suite);
}
