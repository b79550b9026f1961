// SPDX-License-Identifier: Apache-2.0
/* Memory of the caller that is pinned for all devices: copies use it, and it is given back before it is unmapped. */
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "base/check.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

#define BYTES ((uint64_t)1 << 20)

static struct tl_error error;

/* Memory, and what was said when it was unpinned. */
struct pinned {
    struct tl_device_unpin unpin;
    struct tl_error status;
    sem_t over;
    void *address;
};

static void setup(void)
{
    setup_cuda();
}

static unsigned registrations(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts.registrations;
}

static void map(struct pinned *pinned, int flags)
{
    int file = flags & MAP_SHARED ? memfd_create("segment", MFD_CLOEXEC) : -1;
    ck_assert(file < 0 || ftruncate(file, BYTES) == 0);
    *pinned = (struct pinned){.address = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, flags, file, 0)};
    ck_assert_ptr_ne(pinned->address, MAP_FAILED);
    ck_assert_int_eq(sem_init(&pinned->over, 0, 0), 0);
    if (file >= 0) close(file);
}

static void unpinned(struct tl_device_unpin *unpin, const struct tl_error *status)
{
    struct pinned *pinned = TL_CONTAINER_OF(unpin, struct pinned, unpin);
    pinned->status = *status;
    sem_post(&pinned->over);
}

/* Ends the pinning from a thread that drives a loop, and waits for that. */
static enum tl_status unpin(struct pinned *pinned, struct tl_device device)
{
    pinned->unpin = (struct tl_device_unpin){.device = device, .address = pinned->address, .done = unpinned};
    tl_loop_core_enter();
    tl_device_unpin(&pinned->unpin);
    tl_loop_core_leave();
    while (sem_wait(&pinned->over) != 0) {
    }
    return pinned->status.code;
}

struct waiting {
    struct tl_device_copy copy;
    sem_t over;
};

static void copied(struct tl_device_copy *copy, const struct tl_error *status)
{
    ck_assert_msg(status->code == TL_OK, "%s", status->message);
    sem_post(&TL_CONTAINER_OF(copy, struct waiting, copy)->over);
}

/* Copies from the tensor to the bytes of the host, which must be pinned. */
static void copy_out(void *to, const struct tl_tensor *from)
{
    struct waiting waiting = {.copy = {.device = tl_tensor_device(from),
                                       .to = to,
                                       .from = tl_tensor_data(from),
                                       .len_bytes = tl_tensor_size_bytes(from),
                                       .is_to_host = true,
                                       .done = copied}};
    ck_assert_int_eq(sem_init(&waiting.over, 0, 0), 0);
    tl_device_copy_start(&waiting.copy);
    while (sem_wait(&waiting.over) != 0) {
    }
}

/* Pinned by one device, it serves all; the memory of a segment, which others may have mapped, does too. */
START_TEST(copies_use_it)
{
    struct pinned pinned;
    struct tl_tensor *tensors[2] = {bytes_on(gpu0, BYTES / 2), bytes_on(gpu1, BYTES / 2)};
    map(&pinned, _i == 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    ck_assert_int_eq(tl_device_pin(gpu1, pinned.address, BYTES, &error), TL_OK);
    ck_assert_uint_eq(registrations(), 1);
    for (unsigned i = 0; i < 2; i++) {
        fill(tensors[i], i);
        copy_out((char *)pinned.address + i * BYTES / 2, tensors[i]);
        ck_assert_mem_eq((char *)pinned.address + i * BYTES / 2, look(tensors[i]), BYTES / 2);
        tl_tensor_put(tensors[i]);
    }
    ck_assert_int_eq(unpin(&pinned, gpu1), TL_OK);
    ck_assert_uint_eq(registrations(), 0);
    munmap(pinned.address, BYTES);
}
END_TEST

START_TEST(refused)
{
    struct pinned pinned, other;
    const struct tl_device none = {.kind = TL_DEVICE_CUDA, .index = 9};
    map(&pinned, MAP_PRIVATE | MAP_ANONYMOUS);
    map(&other, MAP_PRIVATE | MAP_ANONYMOUS);
    ck_assert_int_eq(tl_device_pin(none, pinned.address, BYTES, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_device_pin(gpu0, pinned.address, BYTES, &error), TL_OK);
    ck_assert_int_eq(tl_device_pin(gpu1, (char *)pinned.address + 4096, 4096, &error), TL_INTERNAL);
    ck_assert_msg(strstr(error.message, "pinning 4096 bytes of the host failed on gpu:1") != NULL, "%s", error.message);
    cuda->fail_call(1, 2, false);
    ck_assert_int_eq(tl_device_pin(gpu0, other.address, BYTES, &error), TL_RESOURCE_EXHAUSTED);
    tl_loop_core_enter();
    ck_assert_int_eq(tl_device_pin(gpu0, other.address, BYTES, &error), TL_FAILED_PRECONDITION);
    tl_loop_core_leave();
    ck_assert_uint_eq(registrations(), 1);
    ck_assert_int_eq(unpin(&pinned, gpu0), TL_OK);
    ck_assert_int_eq(tl_device_pin(gpu0, pinned.address, BYTES, &error), TL_OK); /* once more */
    ck_assert_int_eq(unpin(&pinned, gpu0), TL_OK);
    munmap(pinned.address, BYTES);
    munmap(other.address, BYTES);
}
END_TEST

/* Each call of CUDA fails once: an error is reported, and the next try works. What cannot be unpinned is said to be. */
START_TEST(a_call_fails_once)
{
    struct pinned pinned;
    bool was_hit;
    tl_tensor_put(bytes_on(gpu0, 0)); /* opens the device, which is kept */
    for (unsigned number = 1; number < 3; number++) {
        map(&pinned, MAP_PRIVATE | MAP_ANONYMOUS);
        cuda->fail_call(number, 999, false);
        enum tl_status status = tl_device_pin(gpu0, pinned.address, BYTES, &error);
        if (status == TL_OK) status = unpin(&pinned, gpu0);
        was_hit = cuda->failed_call() != NULL;
        cuda->fail_call(0, 0, false);
        ck_assert(was_hit);
        ck_assert_int_eq(status, TL_INTERNAL);
        ck_assert_uint_eq(registrations(), number == 2);
        if (number == 1) ck_assert_int_eq(tl_device_pin(gpu0, pinned.address, BYTES, &error), TL_OK);
        ck_assert_int_eq(unpin(&pinned, gpu0), TL_OK);
        munmap(pinned.address, BYTES);
    }
}
END_TEST

/* Memory that was pinned when its device broke is not given back: CUDA does not let go of it. */
START_TEST(lost_device)
{
    struct pinned pinned, other;
    map(&pinned, MAP_PRIVATE | MAP_ANONYMOUS);
    map(&other, MAP_PRIVATE | MAP_ANONYMOUS);
    ck_assert_int_eq(tl_device_pin(gpu0, pinned.address, BYTES, &error), TL_OK);
    cuda->break_device(0, 700);
    ck_assert_int_eq(unpin(&pinned, gpu0), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_device_pin(gpu0, other.address, BYTES, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_device_pin(gpu1, other.address, BYTES, &error), TL_OK);
    ck_assert_int_eq(unpin(&other, gpu1), TL_OK);
    munmap(other.address, BYTES);
}
END_TEST

/* A process that is forked has its memory, and none of it is pinned. */
START_TEST(forked)
{
    struct pinned pinned;
    int result;
    map(&pinned, MAP_PRIVATE | MAP_ANONYMOUS);
    ck_assert_int_eq(tl_device_pin(gpu0, pinned.address, BYTES, &error), TL_OK);
    pid_t child = fork();
    if (child == 0) _exit(unpin(&pinned, gpu0) == TL_OK && munmap(pinned.address, BYTES) == 0 ? 0 : 1);
    ck_assert_int_eq(waitpid(child, &result, 0), child);
    ck_assert_int_eq(result, 0);
    ck_assert_uint_eq(registrations(), 1);
    ck_assert_int_eq(unpin(&pinned, gpu0), TL_OK);
    munmap(pinned.address, BYTES);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_pin");
    TCase *tcase = tcase_create("device_pin");
    tcase_add_checked_fixture(tcase, setup, teardown_cuda);
    tcase_add_loop_test(tcase, copies_use_it, 0, 2);
    tcase_add_test(tcase, refused);
    tcase_add_test(tcase, a_call_fails_once);
    tcase_add_test(tcase, lost_device);
    tcase_add_test(tcase, forked);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
