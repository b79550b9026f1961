// SPDX-License-Identifier: Apache-2.0
/* Memory of devices that other processes can map: which memory that is, exports, imports, and what may fail. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/unix_socket.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

#define MIB (UINT64_C(1) << 20)

static struct tl_error error;

/* ------------------------------------------------------------------------------------------------------- waiting -- */

struct wait {
    struct tl_device_export exporting;
    struct tl_device_import importing;
    struct tl_device_request request;
    struct tl_device_copy copy;
    sem_t done;
    int file;
    struct tl_device_memory *memory;
    struct tl_error status;
};

static void exported(struct tl_device_export *exporting, int file, const struct tl_error *status)
{
    struct wait *wait = TL_CONTAINER_OF(exporting, struct wait, exporting);
    wait->file = file;
    wait->status = *status;
    sem_post(&wait->done);
}

static int export(const struct tl_tensor *tensor)
{
    struct wait wait = {.exporting = {.memory = tl_tensor_device_memory(tensor), .done = exported}};
    sem_init(&wait.done, 0, 0);
    tl_device_export_start(&wait.exporting);
    sem_wait(&wait.done);
    error = wait.status;
    ck_assert_int_eq(wait.file >= 0, wait.status.code == TL_OK);
    return wait.file;
}

static void imported(struct tl_device_import *importing, struct tl_device_memory *memory, const struct tl_error *status)
{
    struct wait *wait = TL_CONTAINER_OF(importing, struct wait, importing);
    wait->memory = memory;
    wait->status = *status;
    sem_post(&wait->done);
}

static struct tl_device_memory *import_on(struct tl_device device, int file, uint64_t len_bytes)
{
    struct wait wait = {.importing = {.device = device, .file = file, .len_bytes = len_bytes, .done = imported}};
    sem_init(&wait.done, 0, 0);
    tl_device_import_start(&wait.importing);
    sem_wait(&wait.done);
    error = wait.status;
    ck_assert_int_eq(wait.memory != NULL, wait.status.code == TL_OK);
    return wait.memory;
}

static void requested(struct tl_device_request *request, struct tl_device_memory *memory, const struct tl_error *status)
{
    struct wait *wait = TL_CONTAINER_OF(request, struct wait, request);
    wait->memory = memory;
    wait->status = *status;
    sem_post(&wait->done);
}

static struct tl_device_memory *request(uint64_t size_bytes)
{
    struct wait wait = {.request = {.device = gpu0, .size_bytes = size_bytes, .is_shared = true, .done = requested}};
    sem_init(&wait.done, 0, 0);
    tl_device_memory_request(&wait.request);
    sem_wait(&wait.done);
    error = wait.status;
    ck_assert_int_eq(wait.memory != NULL, wait.status.code == TL_OK);
    return wait.memory;
}

static void copied(struct tl_device_copy *device_copy, const struct tl_error *status)
{
    struct wait *wait = TL_CONTAINER_OF(device_copy, struct wait, copy);
    wait->status = *status;
    sem_post(&wait->done);
}

static void copy_from(struct tl_tensor *to, const struct tl_device_memory *from)
{
    struct wait wait = {.copy = {.device = tl_tensor_device(to),
                                 .to = tl_tensor_data(to),
                                 .from = tl_device_memory_data(from),
                                 .len_bytes = tl_tensor_size_bytes(to),
                                 .done = copied}};
    sem_init(&wait.done, 0, 0);
    tl_device_copy_start(&wait.copy);
    sem_wait(&wait.done);
    ck_assert_msg(wait.status.code == TL_OK, "%s", wait.status.message);
}

static uint64_t number_of(const struct tl_tensor *tensor, uint64_t *ret_len_bytes)
{
    return tl_device_memory_number(tl_tensor_device_memory(tensor), ret_len_bytes);
}

/* -------------------------------------------------------------------------------------------------- which memory -- */

static const struct {
    uint64_t size_bytes;
    uint64_t len_bytes; /* 0: it cannot be mapped */
} sizes[] = {{1, 0},
             {MIB, 0},
             {2 * MIB - 1, 2 * MIB},
             {2 * MIB, 2 * MIB},
             {2 * MIB + 1, 0},
             {7 * MIB, 0},
             {8 * MIB + MIB / 2, 0},
             {15 * MIB, 16 * MIB},
             {16 * MIB + 1, 18 * MIB}};

/* No tensor takes more than an eighth more memory for it. */
START_TEST(where_it_costs_little)
{
    uint64_t len_bytes = 0;
    struct fake_cuda_counts counts;
    struct tl_tensor *tensor = bytes_on(gpu0, sizes[_i].size_bytes);
    ck_assert_int_eq(number_of(tensor, &len_bytes) != 0, sizes[_i].len_bytes != 0);
    ck_assert_uint_eq(len_bytes, sizes[_i].len_bytes);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.handles, sizes[_i].len_bytes != 0);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(numbers_are_unique)
{
    uint64_t len_bytes;
    struct tl_tensor *first = bytes_on(gpu0, 2 * MIB), *second = bytes_on(gpu1, 2 * MIB);
    ck_assert_uint_ne(number_of(first, &len_bytes), number_of(second, &len_bytes));
    tl_tensor_put(first);
    tl_tensor_put(second);
}
END_TEST

/* It is the whole allocation for RDMA cards, too, and what CUDA copies there is over when its calls return. */
START_TEST(cards_reach_it)
{
    struct tl_device_allocation allocation;
    struct tl_tensor *tensor = bytes_on(gpu0, 15 * MIB);
    ck_assert(!cuda->is_synchronous(tl_tensor_data(tensor)));
    ck_assert_msg(tl_device_find_allocation(gpu0, (char *)tl_tensor_data(tensor) + 100, 10, &allocation, &error) ==
                      TL_OK,
                  "%s", error.message);
    ck_assert_ptr_eq(allocation.address, tl_tensor_data(tensor));
    ck_assert_uint_eq(allocation.len_bytes, 16 * MIB);
    ck_assert_int_eq(close(allocation.file), 0);
    ck_assert(cuda->is_synchronous(tl_tensor_data(tensor)));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(between_devices)
{
    struct tl_tensor *first = bytes_on(gpu0, 2 * MIB), *second = bytes_on(gpu1, 2 * MIB);
    fill(first, 1);
    copy(second, first);
    ck_assert(is_filled(second, 1));
    tl_tensor_put(first);
    tl_tensor_put(second);
}
END_TEST

/* As cudaFree does, the free waits for what the program still has in its streams. */
static void touch(void *data)
{
    *(unsigned char *)cuda->view(data) = 1;
}

START_TEST(freed_behind_all_work)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    void *stream = cuda->create_stream(0, false);
    cuda->hold(stream, true);
    cuda->launch(stream, touch, tl_tensor_data(tensor));
    tl_tensor_put(tensor);
    usleep(20 * 1000);
    cuda->hold(stream, false);
    await_unmaps();
}
END_TEST

START_TEST(where_there_is_none)
{
    uint64_t len_bytes;
    cuda->set_sharing(false);
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    ck_assert_uint_eq(number_of(tensor, &len_bytes), 0);
    ck_assert_ptr_null(request(1));
    ck_assert_int_eq(error.code, TL_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(error.message, "no other process can map memory of gpu:0: this device or its driver"));
    ck_assert_ptr_null(import_on(gpu0, open("/dev/null", O_RDONLY), 2 * MIB));
    ck_assert_int_eq(error.code, TL_UNIMPLEMENTED);
    tl_tensor_put(tensor);
}
END_TEST

static void setup_old_cuda(void)
{
    if (cuda) return;
    cuda = fake_cuda_open(11);
    cuda->set_forbidden(is_driven);
}

START_TEST(an_older_cuda)
{
    uint64_t len_bytes;
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    ck_assert_uint_eq(number_of(tensor, &len_bytes), 0);
    ck_assert_ptr_null(request(1));
    ck_assert_ptr_nonnull(strstr(error.message, "this CUDA is older than 12.1"));
    tl_tensor_put(tensor);
}
END_TEST

/* A small source is copied into such memory. */
START_TEST(however_small)
{
    uint64_t len_bytes;
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
    struct tl_device_memory *memory = request(1);
    ck_assert_uint_ge(tl_device_memory_number(memory, &len_bytes), 1);
    ck_assert_uint_eq(len_bytes, 2 * MIB);
    tl_device_memory_destroy(memory);
}
END_TEST

START_TEST(a_full_device)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    cuda->set_capacity(3 * MIB);
    ck_assert_ptr_null(request(1));
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    tl_tensor_put(tensor); /* whose memory the next one waits for */
    struct tl_device_memory *memory = request(1);
    ck_assert_ptr_nonnull(memory);
    tl_device_memory_destroy(memory);
    await_unmaps();
    cuda->set_capacity(512 * MIB);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- imports -- */

/* One copy on the importing device, whichever that is, and the memory stays until the import goes. */
START_TEST(imported_and_copied)
{
    const struct tl_device device = _i == 0 ? gpu0 : gpu1;
    struct fake_cuda_counts before, after;
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB), *to = bytes_on(device, 2 * MIB);
    fill(tensor, 3);
    cuda->get_counts(&before);
    struct tl_device_memory *memory = import_on(device, export(tensor), 2 * MIB);
    ck_assert_msg(memory != NULL, "%s", error.message);
    tl_tensor_put(tensor);
    await_frees(1);
    copy_from(to, memory);
    cuda->get_counts(&after);
    ck_assert_uint_eq(after.copies, before.copies + 1);
    ck_assert(is_filled(to, 3));
    tl_device_memory_destroy(memory);
    tl_tensor_put(to);
}
END_TEST

static int open_foreign(int number)
{
    if (number == 0) return open("/dev/zero", O_RDWR | O_CLOEXEC);
    if (number == 1) return memfd_create("other", MFD_CLOEXEC);
    return -1;
}

/* What a peer sends may be anything, and of any size. */
START_TEST(what_is_no_such_memory)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    int file = _i == 3 ? export(tensor) : open_foreign(_i);
    ck_assert_ptr_null(import_on(gpu0, file, _i == 3 ? 4 * MIB : 2 * MIB));
    ck_assert_int_eq(error.code, TL_INTERNAL);
    ck_assert_ptr_nonnull(strstr(error.message, "mapping memory of another process"));
    ck_assert_int_eq(fcntl(file, F_GETFD), -1);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(sizes_that_are_no_pages)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    ck_assert_ptr_null(import_on(gpu0, export(tensor), _i == 0 ? 4096 : UINT64_MAX));
    tl_tensor_put(tensor);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ failures -- */

/* Whichever call fails, all is given back; an allocation that need not be shared is made all the same. */
START_TEST(a_call_fails)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    bool was_hit = true;
    for (unsigned number = 1; was_hit; number++) {
        ck_assert_uint_lt(number, 20);
        cuda->fail_call(number, 719, false);
        int file = _i == 1 ? export(tensor) : -1;
        struct tl_device_memory *memory = _i == 0 ? request(1) : NULL;
        if (_i == 1 && file >= 0) memory = import_on(gpu0, file, 2 * MIB);
        if (_i == 2) ck_assert_int_eq(tl_device_memory_create(gpu0, 2 * MIB, &memory, &error), TL_OK);
        was_hit = cuda->failed_call() != NULL;
        cuda->fail_call(0, 0, false);
        if (was_hit && !memory) ck_assert_int_eq(error.code, TL_INTERNAL);
        ck_assert(was_hit || memory != NULL);
        tl_device_memory_destroy(memory);
        await_frees(1);
        struct fake_cuda_counts counts;
        do {
            cuda->get_counts(&counts);
        } while (counts.handles > 1 || counts.reservations > 1);
    }
    tl_tensor_put(tensor);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- watches -- */

struct watch {
    struct tl_device_watch base;
    atomic_uint freed_count;
};

static void freed(struct tl_device_watch *base)
{
    atomic_fetch_add(&TL_CONTAINER_OF(base, struct watch, base)->freed_count, 1);
}

START_TEST(a_watch_is_called)
{
    struct watch first = {.base.freed = freed}, second = {.base.freed = freed};
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    tl_device_watch_start(&first.base, tl_tensor_device_memory(tensor));
    tl_device_watch_start(&second.base, tl_tensor_device_memory(tensor));
    tl_device_watch_end(&second.base);
    ck_assert_uint_eq(first.freed_count, 0);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(first.freed_count, 1);
    ck_assert_uint_eq(second.freed_count, 0);
    tl_device_watch_end(&first.base);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- two processes -- */

#define CHANNEL "DEVICE_SHARE_TEST_SOCKET"

/* The other process: copies from what it gets. */
START_TEST(reader)
{
    int socket = atoi(getenv(CHANNEL));
    char kind;
    size_t len_bytes, fd_count;
    int fds[TL_UNIX_MAX_DESCRIPTORS];
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
    while (tl_unix_socket_receive(socket, &kind, 1, &len_bytes, fds, &fd_count) == TL_UNIX_NOTHING)
        usleep(1000);
    struct tl_device_memory *memory = import_on(gpu0, fds[0], 2 * MIB);
    ck_assert_msg(memory != NULL, "%s", error.message);
    (void)!write(socket, "i", 1);
    (void)!read(socket, &kind, 1); /* the owner has put the tensor, or is dead */
    struct tl_tensor *to = bytes_on(gpu0, 2 * MIB);
    copy_from(to, memory);
    ck_assert(is_filled(to, 5));
    tl_tensor_put(to);
    tl_device_memory_destroy(memory);
    await_unmaps();
}
END_TEST

static int run_reader(void)
{
    Suite *suite = suite_create("reader");
    TCase *tcase = tcase_create("reader");
    tcase_add_checked_fixture(tcase, setup_cuda, NULL);
    tcase_add_test(tcase, reader);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}

static pid_t start_reader(int *ret_socket)
{
    int ends[2];
    char number[16];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    snprintf(number, sizeof(number), "%d", ends[1]);
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        setenv(CHANNEL, number, 1);
        execl("/proc/self/exe", "device_share_test", NULL);
        _exit(9);
    }
    close(ends[1]);
    *ret_socket = ends[0];
    return child;
}

/* The memory stays for the reader when its owner has given it back. */
START_TEST(read_by_another_process)
{
    char answer;
    int socket, status, file;
    pid_t child = start_reader(&socket);
    struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
    fill(tensor, 5);
    file = export(tensor);
    ck_assert(tl_unix_socket_send(socket, NULL, "m", 1, &file, 1));
    close(file);
    ck_assert_int_eq(read(socket, &answer, 1), 1);
    tl_tensor_put(tensor);
    await_frees(0);
    await_unmaps();
    close(socket);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
}
END_TEST

/* And when the owner is killed. */
START_TEST(its_owner_is_killed)
{
    int socket, status;
    pid_t child = start_reader(&socket);
    pid_t owner = fork();
    if (owner == 0) {
        struct tl_tensor *tensor = bytes_on(gpu0, 2 * MIB);
        fill(tensor, 5);
        int file = export(tensor);
        if (!tl_unix_socket_send(socket, NULL, "m", 1, &file, 1)) _exit(9);
        char answer;
        (void)!read(socket, &answer, 1);
        (void)raise(SIGKILL);
    }
    close(socket);
    ck_assert_int_eq(waitpid(owner, &status, 0), owner);
    ck_assert(WIFSIGNALED(status));
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
}
END_TEST

int main(void)
{
    if (getenv(CHANNEL)) return run_reader();
    Suite *suite = suite_create("device_share");
    TCase *tcase = tcase_create("device_share");
    tcase_add_checked_fixture(tcase, setup_cuda, teardown_cuda);
    tcase_add_loop_test(tcase, where_it_costs_little, 0, TL_ARRAY_COUNT(sizes));
    tcase_add_test(tcase, numbers_are_unique);
    tcase_add_test(tcase, cards_reach_it);
    tcase_add_test(tcase, between_devices);
    tcase_add_test(tcase, freed_behind_all_work);
    tcase_add_test(tcase, where_there_is_none);
    tcase_add_test(tcase, however_small);
    tcase_add_test(tcase, a_full_device);
    tcase_add_loop_test(tcase, imported_and_copied, 0, 2);
    tcase_add_loop_test(tcase, what_is_no_such_memory, 0, 4);
    tcase_add_loop_test(tcase, sizes_that_are_no_pages, 0, 2);
    tcase_add_loop_test(tcase, a_call_fails, 0, 3);
    tcase_add_test(tcase, a_watch_is_called);
    suite_add_tcase(suite, tcase);
    TCase *old = tcase_create("an older CUDA");
    tcase_add_checked_fixture(old, setup_old_cuda, teardown_cuda);
    tcase_add_test(old, an_older_cuda);
    suite_add_tcase(suite, old);
    TCase *processes = tcase_create("processes");
    tcase_add_checked_fixture(processes, setup_cuda, NULL);
    tcase_add_test(processes, read_by_another_process);
    tcase_add_test(processes, its_owner_is_killed);
    suite_add_tcase(suite, processes);
    return run_suite(suite);
}
