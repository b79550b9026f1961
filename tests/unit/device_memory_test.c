// SPDX-License-Identifier: Apache-2.0
/* Tensors on devices: how they are created, wrapped and given back, and what is refused. */
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <tensorlane/log.h>

#include "fakes/device_case.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

static struct tl_error error;
static sem_t released;
static pthread_t releasing_thread;
static void *released_data;

static void release(void *data, void *context)
{
    ck_assert_ptr_eq(context, &error);
    releasing_thread = pthread_self();
    released_data = data;
    sem_post(&released);
}

static void setup(void)
{
    ck_assert_int_eq(sem_init(&released, 0, 0), 0);
    setup_cuda();
}

static unsigned device_allocations(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts.device_allocations;
}

static void expect(enum tl_status got, enum tl_status status, const char *text)
{
    ck_assert_int_eq(got, status);
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
}

/* ---------------------------------------------------------------------------------------------------- creating -- */

START_TEST(created)
{
    const uint64_t dims[] = {3, 5};
    struct tl_tensor *tensor = NULL;
    ck_assert_int_eq(tl_tensor_create_on(gpu1, TL_F32, 2, dims, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_device(tensor).kind, TL_DEVICE_CUDA);
    ck_assert_int_eq(tl_tensor_device(tensor).index, 1);
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_F32);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 60);
    ck_assert_int_eq(look(tensor)[59], FAKE_POISON);
    ck_assert(!tl_tensor_is_read_only(tensor));
    ck_assert_uint_eq(device_allocations(), 1);
    tl_tensor_put(tl_tensor_get(tensor));
    ck_assert_uint_eq(device_allocations(), 1);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(created_without_bytes)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 0);
    ck_assert_ptr_null(tl_tensor_data(tensor));
    ck_assert_int_eq(tl_tensor_device(tensor).kind, TL_DEVICE_CUDA);
    ck_assert_uint_eq(device_allocations(), 0);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(created_on_the_host)
{
    struct tl_tensor *tensor = bytes_on(host, 4);
    ck_assert_int_eq(tl_tensor_device(tensor).kind, TL_DEVICE_HOST);
    memset(tl_tensor_data(tensor), 1, 4);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(what_cannot_be_created)
{
    const uint64_t one = 1, huge = UINT64_C(1) << 50;
    struct tl_tensor *tensor = NULL;
    struct tl_device device = gpu0;
    expect(tl_tensor_create_on(gpu0, TL_STRING, 1, &one, &tensor, &error), TL_INVALID_ARGUMENT, "STRING");
    expect(tl_tensor_create_on(gpu0, TL_U8, 1, &huge, &tensor, &error), TL_RESOURCE_EXHAUSTED, "on gpu:0");
    device.index = 2;
    expect(tl_tensor_create_on(device, TL_U8, 1, &one, &tensor, &error), TL_NOT_FOUND, "no gpu:2; CUDA sees 2");
    device.index = 64;
    expect(tl_tensor_create_on(device, TL_U8, 1, &one, &tensor, &error), TL_NOT_FOUND, "no gpu:64");
    device.index = -1;
    expect(tl_tensor_create_on(device, TL_U8, 1, &one, &tensor, &error), TL_NOT_FOUND, "no gpu:-1");
    device.kind = (enum tl_device_kind)9;
    expect(tl_tensor_create_on(device, TL_U8, 1, &one, &tensor, &error), TL_UNIMPLEMENTED, "kind 9");
    ck_assert_ptr_null(tensor);
    ck_assert_uint_eq(device_allocations(), 0);
}
END_TEST

START_TEST(not_while_a_loop_is_driven)
{
    const uint64_t one = 1;
    struct tl_tensor *tensor = bytes_on(gpu0, 1), *other = NULL;
    struct tl_tensor *from = bytes_on(host, 1);
    tl_loop_core_enter();
    expect(tl_tensor_create_on(gpu0, TL_U8, 1, &one, &other, &error), TL_FAILED_PRECONDITION, "drives a worker");
    expect(tl_tensor_copy(tensor, from, &error), TL_FAILED_PRECONDITION, "drives a worker");
    tl_tensor_put(tensor); /* frees it elsewhere */
    tl_loop_core_leave();
    ck_assert_ptr_null(other);
    tl_tensor_put(from);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- freeing -- */

static struct tl_tensor *busy;
static void *busy_stream;

static void compute(void *context)
{
    ck_assert_ptr_nonnull(context);
}

/* Frees of the device wait for a kernel from here on. */
static void hold_frees(void)
{
    busy = bytes_on(gpu0, 10);
    busy_stream = cuda->create_stream(0, false);
    cuda->hold(busy_stream, true);
    cuda->launch(busy_stream, compute, busy);
}

static void let_frees_go(void)
{
    cuda->hold(busy_stream, false);
    tl_tensor_put(busy);
}

START_TEST(a_free_that_waits_holds_up_nothing)
{
    const uint64_t size_bytes = 4;
    struct tl_tensor *tensor = bytes_on(gpu0, 10);
    hold_frees();
    tl_tensor_put(tensor);
    tensor = bytes_on(gpu0, 20);
    tl_tensor_put(tensor);
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, 4), &size_bytes);
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    tl_tensor_put(tensor);
    ck_assert_uint_eq(device_allocations(), 3);
    let_frees_go();
}
END_TEST

static void *create_100(void *unused)
{
    (void)unused;
    return bytes_on(gpu0, 100);
}

/* Also when another thread has asked for the free. */
START_TEST(an_allocation_waits_for_the_frees_that_it_needs)
{
    const uint64_t too_much = 111;
    pthread_t thread;
    void *created;
    cuda->set_capacity(110);
    struct tl_tensor *tensor = bytes_on(gpu0, 100);
    hold_frees();
    tl_tensor_put(tensor);
    ck_assert_int_eq(pthread_create(&thread, NULL, create_100, NULL), 0);
    usleep(1000);
    ck_assert_uint_eq(device_allocations(), 2);
    let_frees_go();
    ck_assert_int_eq(pthread_join(thread, &created), 0);
    expect(tl_tensor_create_on(gpu0, TL_U8, 1, &too_much, &tensor, &error), TL_RESOURCE_EXHAUSTED, "111 bytes");
    tl_tensor_put(created);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- wrapping -- */

START_TEST(wrapped)
{
    const uint64_t size_bytes = 100;
    unsigned char *data = cuda->allocate(0, size_bytes + 8);
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = view_of(gpu0, data, &size_bytes);
    view.offset_bytes = 8;
    view.capacity_bytes = size_bytes + 8;
    view.release = release;
    view.release_context = &error;
    ck_assert_msg(tl_tensor_wrap(&view, &tensor, &error) == TL_OK, "%s", error.message);
    ck_assert_ptr_eq(tl_tensor_data(tensor), data + 8);
    ck_assert_int_eq(tl_tensor_device(tensor).kind, TL_DEVICE_CUDA);
    tl_tensor_put(tensor);
    sem_wait(&released);
    ck_assert_ptr_eq(released_data, data);
    ck_assert(!pthread_equal(releasing_thread, pthread_self()));
    ck_assert_uint_eq(device_allocations(), 0);
}
END_TEST

START_TEST(wrapped_without_release_and_without_bytes)
{
    const uint64_t size_bytes = 4, nothing = 0;
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, 4), &size_bytes);
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    tl_tensor_put(tensor);
    view = view_of(gpu0, NULL, &nothing);
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(wrapped_by_an_older_program)
{
    struct {
        struct tl_tensor_view view;
    } older;
    const uint64_t size_bytes = 4;
    struct tl_tensor *tensor = NULL;
    older.view = view_of(gpu0, cuda->allocate(0, 4), &size_bytes);
    older.view.size_bytes = offsetof(struct tl_tensor_view, stream);
    ck_assert_uint_eq(older.view.size_bytes, 88);
    older.view.stream = TL_STREAM_NONE; /* what its memory holds there */
    ck_assert_int_eq(tl_tensor_wrap(&older.view, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_stream(tensor), TL_STREAM_DEFAULT);
    tl_tensor_put(tensor);
}
END_TEST

static void refuse(struct tl_tensor_view view, enum tl_status status, const char *text)
{
    struct tl_tensor *tensor = NULL;
    view.release = release;
    expect(tl_tensor_wrap(&view, &tensor, &error), status, text);
    ck_assert_ptr_null(tensor);
    ck_assert_int_ne(sem_trywait(&released), 0);
}

START_TEST(what_cannot_be_wrapped)
{
    const uint64_t size_bytes = 4096;
    static unsigned char on_host[4096];
    unsigned char *data = cuda->allocate(0, size_bytes);
    refuse(view_of(gpu1, data, &size_bytes), TL_INVALID_ARGUMENT, "is memory of gpu:0, not of gpu:1");
    refuse(view_of(gpu0, on_host, &size_bytes), TL_INVALID_ARGUMENT, "not memory of gpu:0");
    refuse(view_of(gpu0, cuda->allocate_managed(size_bytes), &size_bytes), TL_UNIMPLEMENTED, "managed memory");
    refuse(view_of(gpu0, data + 1, &size_bytes), TL_INVALID_ARGUMENT, "not memory of gpu:0");
    struct tl_tensor_view view = view_of(gpu0, data, &size_bytes);
    view.device.index = 7;
    refuse(view, TL_NOT_FOUND, "gpu:7");
    view = view_of(gpu0, data, &size_bytes);
    view.dtype = TL_STRING;
    refuse(view, TL_INVALID_ARGUMENT, "STRING");
}
END_TEST

/* A release callback that waits for a lock, such as Python's, which the thread that uses the device holds. */
static pthread_mutex_t lock_of_the_program = PTHREAD_MUTEX_INITIALIZER;

static void release_under_a_lock(void *data, void *context)
{
    pthread_mutex_lock(&lock_of_the_program);
    pthread_mutex_unlock(&lock_of_the_program);
    tl_tensor_put(bytes_on(gpu0, 10)); /* and one that uses the device */
    release(data, context);
}

START_TEST(a_release_that_waits_holds_up_nothing)
{
    const uint64_t size_bytes = 4;
    struct tl_tensor *tensor = NULL, *other;
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, 4), &size_bytes);
    view.release = release_under_a_lock;
    view.release_context = &error;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    pthread_mutex_lock(&lock_of_the_program);
    tl_tensor_put(tensor);
    tensor = bytes_on(gpu0, 1000);
    other = bytes_on(host, 1000);
    copy(tensor, other);
    tl_tensor_put(other);
    tl_tensor_put(tensor);
    pthread_mutex_unlock(&lock_of_the_program);
    sem_wait(&released);
}
END_TEST

START_TEST(an_alias_is_where_its_base_is)
{
    struct tl_tensor *tensor = bytes_on(gpu1, 4), *alias = NULL;
    tl_tensor_set_stream(tensor, TL_STREAM_NONE);
    ck_assert_int_eq(tl_tensor_create_alias(tensor, release, &error, &alias, &error), TL_OK);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_tensor_device(alias).index, 1);
    ck_assert_int_eq(tl_tensor_stream(alias), TL_STREAM_NONE);
    ck_assert(tl_tensor_is_on_device(alias));
    ck_assert_uint_eq(device_allocations(), 1);
    tl_tensor_put(alias);
    ck_assert_int_eq(sem_trywait(&released), 0); /* at once: it is the library's */
}
END_TEST

/* ----------------------------------------------------------------------------------------- beside the program -- */

START_TEST(nothing_is_loaded_without_a_device)
{
    struct tl_tensor *from = bytes_on(host, 100), *to = bytes_on(host, 100);
    char line[512];
    fill(from, 1);
    ck_assert_int_eq(tl_tensor_copy(to, from, &error), TL_OK);
    ck_assert(is_filled(to, 1));
    tl_tensor_put(from);
    tl_tensor_put(to);
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof(line), maps))
        ck_assert_msg(strstr(line, "cuda") == NULL, "%s", line);
    fclose(maps);
}
END_TEST

START_TEST(the_thread_of_the_caller_stays_as_it_was)
{
    const uint64_t size_bytes = 4;
    struct fake_cuda_thread before, after;
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, 4), &size_bytes);
    for (int round = 0; round < 2; round++) { /* first without a current device */
        if (round == 1) cuda->make_current(1);
        cuda->get_thread(&before);
        struct tl_tensor *own = bytes_on(gpu0, 4), *on_host = bytes_on(host, 4);
        ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
        copy(own, tensor);
        copy(on_host, own);
        view.device = gpu1; /* fails */
        ck_assert_int_ne(tl_tensor_wrap(&view, &own, &error), TL_OK);
        view.device = gpu0;
        tl_tensor_put(own);
        tl_tensor_put(on_host);
        tl_tensor_put(tensor);
        cuda->get_thread(&after);
        ck_assert_int_eq(after.device, before.device);
        ck_assert_ptr_eq(after.context, before.context);
        ck_assert_uint_eq(after.pushed, 0);
        ck_assert_int_eq(after.capture_mode, before.capture_mode);
        ck_assert_int_eq(after.last_error, 0);
    }
}
END_TEST

START_TEST(a_capture_elsewhere_is_left_alone)
{
    const uint64_t size_bytes = 4;
    void *stream = cuda->create_stream(0, false);
    struct tl_tensor *tensor = NULL;
    struct tl_tensor_view view = view_of(gpu0, cuda->allocate(0, 4), &size_bytes);
    cuda->begin_capture(stream);
    struct tl_tensor *own = bytes_on(gpu0, 4), *on_host = bytes_on(host, 4);
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, &error), TL_OK);
    copy(own, tensor);
    copy(on_host, own);
    tl_tensor_put(own);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
    tensor = bytes_on(gpu0, 4);
    ck_assert(cuda->end_capture(stream));
    tl_tensor_put(tensor);
}
END_TEST

/* Listing opens nothing. */
START_TEST(listed)
{
    struct tl_device_info *devices = NULL;
    struct fake_cuda_counts counts;
    size_t count = 0;
    cuda = fake_cuda_open(_i);
    cuda->set_capacity(100);
    ck_assert_msg(tl_device_list(&devices, &count, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(count, 2);
    ck_assert_int_eq(devices[1].device.kind, TL_DEVICE_CUDA);
    ck_assert_int_eq(devices[1].device.index, 1);
    ck_assert_str_eq(devices[1].name, "Fake GPU 1");
    ck_assert_str_eq(devices[1].pci_address, "fa01:3b:00.0");
    ck_assert_uint_eq(devices[1].memory_bytes, 100);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.contexts, 0);
    free(devices);
}
END_TEST

/* The devices that are open are known without a call of CUDA, and of a lost one that it is lost. */
START_TEST(those_that_are_open)
{
    struct tl_device_info *devices = NULL;
    size_t count = 7;
    ck_assert_int_eq(tl_device_list_open(&devices, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 0);
    free(devices);
    cuda = fake_cuda_open(_i);
    ck_assert_int_eq(tl_device_open(gpu1, &error), TL_OK);
    cuda->fail_call(1, 999, false);
    ck_assert_int_eq(tl_device_list_open(&devices, &count, &error), TL_OK);
    ck_assert_ptr_null(cuda->failed_call());
    cuda->fail_call(0, 0, false);
    ck_assert_uint_eq(count, 1);
    ck_assert_int_eq(devices[0].device.index, 1);
    ck_assert_str_eq(devices[0].name, "Fake GPU 1");
    ck_assert_str_eq(devices[0].pci_address, "fa01:3b:00.0");
    ck_assert(!devices[0].is_lost);
    free(devices);
    struct tl_tensor *tensor = bytes_on(gpu1, 10), *on_host = bytes_on(host, 10);
    cuda->break_device(1, 700);
    ck_assert_int_eq(tl_tensor_copy(on_host, tensor, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_device_list_open(&devices, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 1);
    ck_assert(devices[0].is_lost);
    free(devices);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

/* What a driver does not tell stays empty; without a count there is no list. */
START_TEST(listed_in_part)
{
    struct tl_device_info *devices = NULL;
    size_t count = 0;
    cuda = fake_cuda_open(12);
    cuda->fail_call((unsigned)_i, 999, true);
    enum tl_status status = tl_device_list(&devices, &count, &error);
    if (status != TL_OK) {
        ck_assert_ptr_nonnull(cuda->failed_call());
        ck_assert_ptr_null(devices);
        return;
    }
    ck_assert_uint_eq(count, 2);
    ck_assert_int_eq(cuda->failed_call() == NULL, devices[1].pci_address[0] != '\0');
    free(devices);
}
END_TEST

/* A context takes some hundred MB of its device. */
START_TEST(no_context_on_another_device)
{
    struct fake_cuda_counts counts;
    cuda = fake_cuda_open(_i);
    struct tl_tensor *tensor = bytes_on(gpu1, 4), *on_host = bytes_on(host, 4);
    copy(on_host, tensor);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
    await_frees(0);
    cuda->get_counts(&counts);
    ck_assert_uint_eq(counts.contexts, 1);
}
END_TEST

/* A process that is forked has no threads of the device, and CUDA does not work in it. */
START_TEST(a_forked_process_is_refused)
{
    const uint64_t one = 1;
    struct tl_tensor *tensor = bytes_on(gpu0, 4), *on_host = bytes_on(host, 4), *other = NULL;
    copy(on_host, tensor);
    pid_t child = fork();
    if (child == 0) {
        bool is_refused = tl_tensor_create_on(gpu0, TL_U8, 1, &one, &other, &error) == TL_FAILED_PRECONDITION &&
                          strstr(error.message, "forked") != NULL &&
                          tl_tensor_copy(tensor, on_host, &error) == TL_FAILED_PRECONDITION;
        tl_tensor_put(tensor);
        _exit(is_refused ? 0 : 1);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%x", (unsigned)status);
    copy(tensor, on_host);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

/* The threads of a device never end, so their code must stay when the program closes the library. */
START_TEST(the_library_stays)
{
    char path[512], line[512];
    const uint64_t nothing = 0;
    struct tl_tensor *tensor;
    enum tl_status (*create_on)(struct tl_device, enum tl_dtype, unsigned, const uint64_t *, struct tl_tensor **,
                                struct tl_error *) = NULL;
    void (*put)(struct tl_tensor *) = NULL;
    snprintf(path, sizeof(path), "%s/lib/libtensorlane.so.1", getenv("TENSORLANE_BUILD"));
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    ck_assert_msg(library != NULL, "%s", dlerror());
    *(void **)&create_on = dlsym(library, "tl_tensor_create_on");
    *(void **)&put = dlsym(library, "tl_tensor_put");
    ck_assert(create_on && put);
    ck_assert_msg(create_on(gpu0, TL_U8, 1, &nothing, &tensor, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(dlclose(library), 0);
    FILE *maps = fopen("/proc/self/maps", "r");
    bool is_there = false;
    while (fgets(line, sizeof(line), maps))
        is_there = is_there || strstr(line, "libtensorlane.so") != NULL;
    fclose(maps);
    ck_assert(is_there);
    put(tensor); /* and what it has made can be used */
}
END_TEST

/* -------------------------------------------------------------------------------------------------------- loss -- */

START_TEST(the_end_of_the_process_is_no_loss)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 4), *on_host = bytes_on(host, 4);
    log_capture_begin();
    cuda->break_device(0, _i == 0 ? 4 : 700);
    ck_assert_int_eq(tl_tensor_copy(on_host, tensor, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_tensor_copy(on_host, tensor, &error), TL_FAILED_PRECONDITION);
    ck_assert_uint_eq(log_capture_count("a device is lost"), _i == 0 ? 0 : 1);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

static void use_in_log(enum tl_log_level level, const char *line, size_t len_bytes, void *context)
{
    const uint64_t one = 1;
    struct tl_tensor *tensor;
    struct tl_error *ret_error = context;
    (void)level;
    if (!memmem(line, len_bytes, "a device is lost", 16)) return;
    ck_assert_int_ne(tl_tensor_create_on(gpu1, TL_U8, 1, &one, &tensor, ret_error), TL_OK);
    sem_post(&released);
}

/* It runs on a thread of the device, which would wait for itself. */
START_TEST(a_log_function_cannot_use_devices)
{
    const struct tl_log_options options = {
        .size_bytes = sizeof(options), .level = TL_LOG_INFO, .write = use_in_log, .context = &error};
    struct tl_error copy_error;
    struct tl_tensor *tensor = bytes_on(gpu0, 4), *on_host = bytes_on(host, 4);
    tl_tensor_put(bytes_on(gpu1, 4));
    ck_assert_int_eq(tl_log_set(&options, &error), TL_OK);
    cuda->break_device(0, 700);
    ck_assert_int_eq(tl_tensor_copy(on_host, tensor, &copy_error), TL_FAILED_PRECONDITION);
    sem_wait(&released);
    ck_assert_int_eq(tl_log_set(NULL, &copy_error), TL_OK);
    expect(error.code, TL_FAILED_PRECONDITION, "or a device");
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

START_TEST(a_device_that_breaks_is_lost_alone)
{
    const uint64_t one = 1;
    struct tl_tensor *tensor = bytes_on(gpu0, 4), *on_host = bytes_on(host, 4), *other = NULL;
    cuda->break_device(0, 700);
    expect(tl_tensor_copy(on_host, tensor, &error), TL_FAILED_PRECONDITION, "gpu:0 is lost until this process");
    expect(tl_tensor_create_on(gpu0, TL_U8, 1, &one, &other, &error), TL_FAILED_PRECONDITION, "gpu:0 is lost");
    tl_tensor_put(tensor);
    tensor = bytes_on(gpu1, 4);
    copy(tensor, on_host);
    copy(on_host, tensor);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

START_TEST(an_allocation_notices_the_loss)
{
    const uint64_t one = 1;
    struct tl_tensor *tensor = bytes_on(gpu0, 4), *other = NULL;
    cuda->break_device(0, 719);
    expect(tl_tensor_create_on(gpu0, TL_U8, 1, &one, &other, &error), TL_FAILED_PRECONDITION, "CUDA error 719");
    tl_tensor_put(tensor);
}
END_TEST

/* About so many calls does it take to use everything; how often events are asked varies. */
#define CALLS 125

/* Uses everything. Returns the first error. */
static enum tl_status use_everything(void)
{
    const uint64_t size_bytes = 6 << 20;
    void *data = cuda->allocate(0, size_bytes);
    struct tl_tensor_view view = view_of(gpu0, data, &size_bytes);
    struct tl_tensor *tensors[3] = {bytes_on(host, size_bytes)};
    fill(tensors[0], 3);
    enum tl_status status = tl_tensor_create_on(gpu0, TL_U8, 1, &size_bytes, &tensors[1], &error);
    if (status == TL_OK) status = tl_tensor_wrap(&view, &tensors[2], &error);
    if (status == TL_OK) status = tl_tensor_copy(tensors[1], tensors[0], &error);
    if (status == TL_OK) status = tl_tensor_copy(tensors[2], tensors[1], &error);
    if (status == TL_OK) memset(tl_tensor_data(tensors[0]), 0, size_bytes);
    if (status == TL_OK) status = tl_tensor_copy(tensors[0], tensors[2], &error);
    if (status == TL_OK) ck_assert(is_filled(tensors[0], 3));
    for (int i = 0; i < 3; i++)
        tl_tensor_put(tensors[i]);
    return status;
}

/* Each call of CUDA fails once: an error is reported, nothing is left behind, and the next try works. */
START_TEST(a_call_fails_once)
{
    cuda->fail_call((unsigned)_i, 999, false);
    enum tl_status status = use_everything();
    const char *failed = cuda->failed_call();
    cuda->fail_call(0, 0, false);
    if (!failed) ck_assert_int_eq(status, TL_OK);
    ck_assert_msg(use_everything() == TL_OK, "after %s failed: %s", failed, error.message);
    await_frees(failed && strcmp(failed, "cudaFree") == 0 && device_allocations() > 0 ? 1 : 0);
}
END_TEST

/* From some call on all fail: everything is an error, and the process lives. */
START_TEST(all_calls_fail_from_then_on)
{
    cuda->fail_call((unsigned)_i, 700, true);
    enum tl_status status = use_everything();
    if (cuda->failed_call() && status == TL_OK) status = use_everything();
    ck_assert_int_eq(cuda->failed_call() != NULL, status != TL_OK);
    if (status != TL_OK) ck_assert_int_ne(use_everything(), TL_OK);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_memory");
    TCase *tcase = tcase_create("device_memory");
    tcase_add_checked_fixture(tcase, setup, teardown_cuda);
    tcase_add_test(tcase, created);
    tcase_add_test(tcase, created_without_bytes);
    tcase_add_test(tcase, created_on_the_host);
    tcase_add_test(tcase, what_cannot_be_created);
    tcase_add_test(tcase, not_while_a_loop_is_driven);
    tcase_add_test(tcase, a_free_that_waits_holds_up_nothing);
    tcase_add_test(tcase, an_allocation_waits_for_the_frees_that_it_needs);
    tcase_add_test(tcase, wrapped);
    tcase_add_test(tcase, wrapped_without_release_and_without_bytes);
    tcase_add_test(tcase, wrapped_by_an_older_program);
    tcase_add_test(tcase, what_cannot_be_wrapped);
    tcase_add_test(tcase, a_release_that_waits_holds_up_nothing);
    tcase_add_test(tcase, an_alias_is_where_its_base_is);
    tcase_add_test(tcase, the_thread_of_the_caller_stays_as_it_was);
    tcase_add_test(tcase, a_capture_elsewhere_is_left_alone);
    tcase_add_test(tcase, a_forked_process_is_refused);
    tcase_add_test(tcase, the_library_stays);
    tcase_add_test(tcase, a_device_that_breaks_is_lost_alone);
    tcase_add_test(tcase, an_allocation_notices_the_loss);
    tcase_add_loop_test(tcase, the_end_of_the_process_is_no_loss, 0, 2);
    tcase_add_test(tcase, a_log_function_cannot_use_devices);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("failing_calls");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, a_call_fails_once, 1, CALLS);
    tcase_add_loop_test(tcase, all_calls_fail_from_then_on, 1, CALLS);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("without_cuda");
    tcase_add_test(tcase, nothing_is_loaded_without_a_device);
    tcase_add_loop_test(tcase, no_context_on_another_device, 11, 14);
    tcase_add_loop_test(tcase, listed, 11, 14);
    tcase_add_loop_test(tcase, those_that_are_open, 11, 14);
    tcase_add_loop_test(tcase, listed_in_part, 1, 30);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
