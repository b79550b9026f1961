// SPDX-License-Identifier: Apache-2.0
/* The double of CUDA notices what it is there to notice. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/cuda_load.h"

static struct tl_cuda calls;
static void *memory, *pinned, *stream, *event;
static unsigned char on_heap[64];

static void setup(void)
{
    struct tl_error error;
    setup_cuda();
    ck_assert_int_eq(tl_cuda_load(&calls, &error), TL_OK);
    ck_assert_int_eq(calls.cudaSetDevice(0), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaMalloc(&memory, 64), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaHostAlloc(&pinned, 64, 0), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaStreamCreateWithFlags(&stream, TL_CUDA_STREAM_NON_BLOCKING), TL_CUDA_OK);
    ck_assert_int_eq(calls.cuEventCreate(&event, TL_CUDA_EVENT_DISABLE_TIMING), TL_CUDA_OK);
}

static void copy_in_stream(void *to, const void *from)
{
    ck_assert_int_eq(calls.cudaMemcpyAsync(to, from, 64, TL_CUDA_COPY_DEFAULT, stream), TL_CUDA_OK);
}

START_TEST(system_calls_fail_on_device_memory)
{
    int ends[2];
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(write(ends[1], memory, 1), -1);
    ck_assert_int_eq(errno, EFAULT);
    struct iovec ours = {.iov_base = on_heap, .iov_len = 1}, theirs = {.iov_base = memory, .iov_len = 1};
    ck_assert_int_eq(process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0), -1);
    ck_assert_int_eq(errno, EFAULT);
}
END_TEST

START_TEST(the_cpu_reads_device_memory)
{
    (void)signal(SIGSEGV, SIG_DFL); /* not that of a sanitizer */
    ck_assert_int_ne(*(volatile unsigned char *)memory, 0);
}
END_TEST

START_TEST(the_cpu_reads_pinned_memory_that_was_freed)
{
    int (*free_host)(void *) = NULL;
    *(void **)&free_host = dlsym(dlopen("libcudart.so.12", RTLD_NOW | RTLD_NOLOAD), "cudaFreeHost");
    ck_assert_ptr_nonnull(free_host);
    ck_assert_int_eq(*(volatile unsigned char *)pinned, FAKE_POISON);
    ck_assert_int_eq(free_host(pinned), 0);
    (void)signal(SIGSEGV, SIG_DFL); /* not that of a sanitizer */
    ck_assert_int_ne(*(volatile unsigned char *)pinned, 0);
}
END_TEST

START_TEST(a_source_is_read_late)
{
    unsigned char *bytes = pinned;
    cuda->hold(NULL, true);
    copy_in_stream(memory, pinned);
    ck_assert_int_eq(calls.cudaEventRecord(event, stream), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_NOT_READY);
    bytes[0] = 1;
    cuda->hold(NULL, false);
    ck_assert_int_eq(calls.cudaStreamSynchronize(stream), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_OK);
    ck_assert_int_eq(*(unsigned char *)cuda->view(memory), 1);
}
END_TEST

START_TEST(host_memory_that_is_not_pinned)
{
    copy_in_stream(memory, on_heap);
}
END_TEST

static unsigned char *map_pages(void)
{
    return mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

START_TEST(memory_is_registered)
{
    struct fake_cuda_counts counts;
    unsigned char *pages = map_pages();
    ck_assert_int_eq(calls.cudaHostRegister(pages, 8192, TL_CUDA_HOST_REGISTER_PORTABLE), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaHostRegister(pages + 4096, 4096, TL_CUDA_HOST_REGISTER_PORTABLE), 712);
    ck_assert_int_eq(calls.cudaHostRegister(pinned, 1, TL_CUDA_HOST_REGISTER_PORTABLE), 712);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.registrations, 1);
    copy_in_stream(pages + 64, memory);
    ck_assert_int_eq(calls.cudaStreamSynchronize(stream), TL_CUDA_OK);
    ck_assert_int_eq(pages[64], FAKE_POISON);
    ck_assert_int_eq(calls.cudaHostUnregister(pages), TL_CUDA_OK);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.registrations, 0);
    munmap(pages, 8192);
}
END_TEST

START_TEST(memory_that_is_not_registered_any_more)
{
    unsigned char *pages = map_pages();
    ck_assert_int_eq(calls.cudaHostRegister(pages, 8192, TL_CUDA_HOST_REGISTER_PORTABLE), TL_CUDA_OK);
    cuda->hold(NULL, true);
    copy_in_stream(pages, memory);
    ck_assert_int_eq(calls.cudaHostUnregister(pages), TL_CUDA_OK);
    cuda->hold(NULL, false);
    (void)calls.cudaStreamSynchronize(stream);
}
END_TEST

START_TEST(memory_that_is_unmapped_while_it_is_registered)
{
    unsigned char *pages = map_pages();
    ck_assert_int_eq(calls.cudaHostRegister(pages, 8192, TL_CUDA_HOST_REGISTER_PORTABLE), TL_CUDA_OK);
    munmap(pages, 8192);
    (void)calls.cudaHostUnregister(pages);
}
END_TEST

START_TEST(memory_that_is_unregistered_twice)
{
    unsigned char *pages = map_pages();
    ck_assert_int_eq(calls.cudaHostRegister(pages, 8192, TL_CUDA_HOST_REGISTER_PORTABLE), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaHostUnregister(pages), TL_CUDA_OK);
    (void)calls.cudaHostUnregister(pages);
}
END_TEST

START_TEST(memory_that_was_freed)
{
    ck_assert_int_eq(calls.cudaFree(memory), TL_CUDA_OK);
    copy_in_stream(memory, pinned);
}
END_TEST

START_TEST(memory_that_is_freed_twice)
{
    ck_assert_int_eq(calls.cudaFree(memory), TL_CUDA_OK);
    (void)calls.cudaFree(memory);
}
END_TEST

START_TEST(beyond_an_allocation)
{
    (void)calls.cudaMemcpyAsync((char *)memory + 1, pinned, 64, TL_CUDA_COPY_DEFAULT, stream);
}
END_TEST

START_TEST(a_stream_of_another_device)
{
    ck_assert_int_eq(calls.cudaSetDevice(1), TL_CUDA_OK);
    copy_in_stream(memory, pinned);
}
END_TEST

START_TEST(an_event_of_another_device)
{
    ck_assert_int_eq(calls.cudaSetDevice(1), TL_CUDA_OK);
    (void)calls.cudaEventRecord(event, stream);
}
END_TEST

START_TEST(a_call_while_a_loop_is_driven)
{
    tl_loop_core_enter();
    (void)calls.cudaEventQuery(event);
}
END_TEST

START_TEST(an_event_in_a_stream_that_is_captured)
{
    cuda->begin_capture(stream);
    (void)calls.cuEventRecord(event, stream);
}
END_TEST

START_TEST(a_capture_is_spoiled)
{
    int mode = TL_CUDA_CAPTURE_MODE_RELAXED;
    void *captured = cuda->create_stream(0, false);
    cuda->begin_capture(captured);
    ck_assert_int_ne(calls.cudaEventQuery(event), TL_CUDA_OK);
    ck_assert(!cuda->end_capture(captured));
    ck_assert_int_eq(calls.cudaThreadExchangeStreamCaptureMode(&mode), TL_CUDA_OK);
    cuda->begin_capture(captured);
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_OK);
    ck_assert(cuda->end_capture(captured));
}
END_TEST

static void note(void *context)
{
    *(unsigned char *)context = 1;
}

START_TEST(the_legacy_stream_waits)
{
    static unsigned char has_run;
    void *blocking = cuda->create_stream(0, true);
    cuda->hold(blocking, true);
    cuda->launch(blocking, note, &has_run);
    ck_assert_int_eq(calls.cuEventRecord(event, (void *)1), TL_CUDA_OK);
    copy_in_stream(memory, pinned);
    ck_assert_int_eq(calls.cudaStreamSynchronize(stream), TL_CUDA_OK); /* does not block: it waits for neither */
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_NOT_READY);
    cuda->hold(blocking, false);
    ck_assert_int_eq(calls.cudaStreamSynchronize((void *)1), TL_CUDA_OK);
    ck_assert_int_eq(has_run, 1);
}
END_TEST

START_TEST(contexts_are_not_popped)
{
    void *context;
    ck_assert_int_eq(calls.cuCtxGetCurrent(&context), TL_CUDA_OK);
    for (int i = 0; i < 9; i++)
        (void)calls.cuCtxPushCurrent(context);
}
END_TEST

START_TEST(a_context_that_is_none)
{
    (void)calls.cuCtxPushCurrent(NULL);
}
END_TEST

START_TEST(a_device_is_full)
{
    void *more = NULL;
    cuda->set_capacity(65);
    ck_assert_int_eq(calls.cudaMalloc(&more, 2), TL_CUDA_NO_MEMORY);
    ck_assert_int_eq(calls.cudaMalloc(&more, 1), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaFree(memory), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaMalloc(&memory, 64), TL_CUDA_OK);
}
END_TEST

/* A thread that has chosen no device uses the first one, which gets a context by that. */
static void *use_the_first_device(void *unused)
{
    int mode = TL_CUDA_CAPTURE_MODE_RELAXED;
    ck_assert_int_eq(calls.cudaThreadExchangeStreamCaptureMode(&mode), TL_CUDA_OK);
    return unused;
}

START_TEST(contexts_are_counted)
{
    struct fake_cuda_counts counts;
    struct tl_error error;
    pthread_t thread;
    cuda = fake_cuda_open(_i);
    ck_assert_int_eq(tl_cuda_load(&calls, &error), TL_OK);
    ck_assert_int_eq(calls.cudaSetDevice(1), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaFree(NULL), TL_CUDA_OK);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.contexts, 1);
    ck_assert_int_eq(pthread_create(&thread, NULL, use_the_first_device, NULL), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.contexts, 2);
}
END_TEST

START_TEST(calls_fail)
{
    cuda->fail_call(2, 999, false);
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_OK);
    ck_assert_int_eq(calls.cudaEventQuery(event), 999);
    ck_assert_str_eq(cuda->failed_call(), "cudaEventQuery");
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_OK);
    cuda->fail_call(1, 998, true);
    ck_assert_int_eq(calls.cudaEventQuery(event), 998);
    ck_assert_int_eq(calls.cudaStreamQuery(stream), 998);
    cuda->fail_call(0, 0, false);
    ck_assert_int_eq(calls.cudaEventQuery(event), TL_CUDA_OK);
    cuda->break_device(0, 700);
    ck_assert_int_eq(calls.cudaEventQuery(event), 700);
    ck_assert_int_eq(calls.cudaFree(memory), 700);
    ck_assert_int_eq(calls.cudaSetDevice(1), TL_CUDA_OK);
}
END_TEST

static void add_ends(TCase *tcase, int number)
{
    tcase_add_test_raise_signal(tcase, host_memory_that_is_not_pinned, number);
    tcase_add_test_raise_signal(tcase, memory_that_is_not_registered_any_more, number);
    tcase_add_test_raise_signal(tcase, memory_that_is_unmapped_while_it_is_registered, number);
    tcase_add_test_raise_signal(tcase, memory_that_is_unregistered_twice, number);
    tcase_add_test_raise_signal(tcase, memory_that_was_freed, number);
    tcase_add_test_raise_signal(tcase, memory_that_is_freed_twice, number);
    tcase_add_test_raise_signal(tcase, beyond_an_allocation, number);
    tcase_add_test_raise_signal(tcase, a_stream_of_another_device, number);
    tcase_add_test_raise_signal(tcase, an_event_of_another_device, number);
    tcase_add_test_raise_signal(tcase, a_call_while_a_loop_is_driven, number);
    tcase_add_test_raise_signal(tcase, an_event_in_a_stream_that_is_captured, number);
    tcase_add_test_raise_signal(tcase, contexts_are_not_popped, number);
    tcase_add_test_raise_signal(tcase, a_context_that_is_none, number);
}

int main(void)
{
    Suite *suite = suite_create("fake_cuda");
    TCase *tcase = tcase_create("fake_cuda");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, system_calls_fail_on_device_memory);
    tcase_add_test(tcase, a_source_is_read_late);
    tcase_add_test(tcase, a_capture_is_spoiled);
    tcase_add_test(tcase, the_legacy_stream_waits);
    tcase_add_test(tcase, calls_fail);
    tcase_add_test(tcase, a_device_is_full);
    tcase_add_test(tcase, memory_is_registered);
    add_ends(tcase, SIGABRT);
    tcase_add_test_raise_signal(tcase, the_cpu_reads_device_memory, SIGSEGV);
    tcase_add_test_raise_signal(tcase, the_cpu_reads_pinned_memory_that_was_freed, SIGSEGV);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("releases");
    tcase_add_loop_test(tcase, contexts_are_counted, 11, 14);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
