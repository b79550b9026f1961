// SPDX-License-Identifier: Apache-2.0
/* The functions of libcudart and libcuda, in the forms of CUDA FAKE_CUDA_MAJOR. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fakes/cuda/state.h"

#define EXPORT __attribute__((visibility("default")))
#define UNSUPPORTED_IN_CAPTURE 900
#define INVALID_DEVICE 101
#define DELAY_US 300

#if FAKE_CUDA_MAJOR == 11
#define VERSION 11080
#elif FAKE_CUDA_MAJOR == 12
#define VERSION 12090
#else
#define VERSION 13000
#endif

enum { SAFE = 0, UNSAFE = 1, BLOCKS = 2 }; /* what a thread may not call while another one captures; what waits */

pthread_mutex_t state_mutex = PTHREAD_MUTEX_INITIALIZER;
struct device state_devices[FAKE_CUDA_DEVICES] = {{.index = 0}, {.index = 1}};
struct fake_cuda_counts state_counts;
size_t state_capacity_bytes = CAPACITY_BYTES;
_Thread_local struct thread_state this_thread __attribute__((tls_model("initial-exec")));

static bool (*is_forbidden)(void);
static int supported_version = VERSION, device_count = FAKE_CUDA_DEVICES;
static unsigned countdown;
static tl_cuda_error countdown_error;
static bool is_failing_for_good;
static const char *failed_call;
static struct event *events;

void misuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "fake cuda: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}

int fake_cuda_device_here(void)
{
    return this_thread.context ? this_thread.context->index : this_thread.ordinal;
}

int fake_cuda_device_count(void)
{
    return device_count;
}

int fake_cuda_supported_version(void)
{
    return supported_version;
}

/* ------------------------------------------------------------------------------------------------ every call -- */

static tl_cuda_error leave(tl_cuda_error error)
{
    pthread_mutex_unlock(&state_mutex);
    if (error != TL_CUDA_OK && error != TL_CUDA_NOT_READY) this_thread.last_error = error;
    return error;
}

static bool is_due(const char *name)
{
    if (countdown == 0 || --countdown > 0) return false;
    if (is_failing_for_good) countdown = 1;
    failed_call = name;
    return true;
}

/* A call that could spoil captures of other threads does, unless this one has said that it does not. */
static bool is_spoiling(unsigned flags)
{
    if (!(flags & UNSAFE) || this_thread.mode == TL_CUDA_CAPTURE_MODE_RELAXED) return false;
    bool is_any = false;
    for (struct stream *stream = state_streams; stream; stream = stream->next)
        if (stream->is_capturing) stream->is_spoiled = is_any = true;
    return is_any;
}

/* Takes the mutex; an error is the result of the call. */
static tl_cuda_error enter(const char *name, unsigned flags)
{
    if (is_forbidden && is_forbidden()) misuse("%s is called where that is forbidden", name);
    if (flags & BLOCKS) usleep(DELAY_US);
    pthread_mutex_lock(&state_mutex);
    if (is_due(name)) return countdown_error;
    if (is_spoiling(flags)) return UNSUPPORTED_IN_CAPTURE;
    return TL_CUDA_OK;
}

/* Makes the context of a device current, which creates it if need be. */
static void enter_context(struct device *device)
{
    if (!device->has_context) state_counts.contexts++;
    device->has_context = true;
    this_thread.context = device;
}

#define ENTER(flags)                                                                                                   \
    tl_cuda_error entered = enter(__func__, flags);                                                                    \
    if (entered != TL_CUDA_OK) return leave(entered)
#define ENTER_DEVICE(flags)                                                                                            \
    ENTER(flags);                                                                                                      \
    if (state_devices[fake_cuda_device_here()].broken) return leave(state_devices[fake_cuda_device_here()].broken);    \
    enter_context(&state_devices[fake_cuda_device_here()])

/* libcuda uses the current context and creates none. */
#define ENTER_CONTEXT()                                                                                                \
    ENTER(SAFE);                                                                                                       \
    if (!this_thread.context) return leave(TL_CUDA_INVALID_CONTEXT);                                                   \
    if (this_thread.context->broken) return leave(this_thread.context->broken)

tl_cuda_error fake_cuda_enter(const char *name)
{
    tl_cuda_error entered = enter(name, SAFE);
    if (entered != TL_CUDA_OK) return entered;
    if (!this_thread.context) return TL_CUDA_INVALID_CONTEXT;
    return this_thread.context->broken;
}

tl_cuda_error fake_cuda_leave(tl_cuda_error error)
{
    return leave(error);
}

/* ----------------------------------------------------------------------------------------------------- runtime -- */

#define DECLARE(name, parameters) EXPORT tl_cuda_error name parameters;
TL_CUDA_RUNTIME_FUNCTIONS(DECLARE)
EXPORT const char *cudaGetErrorString(tl_cuda_error error);

/* A driver runs all releases of its major version. */
static bool is_too_old(void)
{
    return supported_version / 1000 < VERSION / 1000;
}

tl_cuda_error cudaRuntimeGetVersion(int *ret_version)
{
    ENTER(SAFE);
    if (VERSION < 12000 && is_too_old()) return leave(TL_CUDA_TOO_OLD);
    *ret_version = VERSION;
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaDriverGetVersion(int *ret_version)
{
    ENTER(SAFE);
    *ret_version = supported_version;
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaGetDeviceCount(int *ret_count)
{
    ENTER(SAFE);
    if (is_too_old()) return leave(TL_CUDA_TOO_OLD);
    if (device_count == 0) return leave(TL_CUDA_NO_DEVICE);
    *ret_count = device_count;
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaSetDevice(int device)
{
    ENTER(SAFE);
    if (device < 0 || device >= device_count) return leave(INVALID_DEVICE);
    if (state_devices[device].broken) return leave(state_devices[device].broken);
    this_thread.ordinal = device;
    this_thread.context = NULL;
    if (VERSION >= 12000) enter_context(&state_devices[device]);
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaMalloc(void **ret_memory, size_t size_bytes)
{
    ENTER_DEVICE(UNSAFE | BLOCKS);
    struct memory *memory = memory_create_locked(MEMORY_DEVICE, fake_cuda_device_here(), size_bytes, false);
    if (!memory) return leave(TL_CUDA_NO_MEMORY);
    *ret_memory = memory->address;
    return leave(TL_CUDA_OK);
}

/* Waits for all of the device, as the real one does. */
tl_cuda_error cudaFree(void *address)
{
    ENTER_DEVICE(UNSAFE | BLOCKS);
    if (!address) return leave(TL_CUDA_OK);
    struct memory *memory = memory_find_locked(address);
    if (!memory || memory->kind != MEMORY_DEVICE || memory->address != address) misuse("%p cannot be freed", address);
    streams_wait_locked(memory->device);
    if (state_devices[memory->device].broken) return leave(state_devices[memory->device].broken);
    memory_free_locked(memory);
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaHostAlloc(void **ret_memory, size_t size_bytes, unsigned flags)
{
    (void)flags;
    ENTER_DEVICE(UNSAFE | BLOCKS);
    struct memory *memory = memory_create_locked(MEMORY_HOST, fake_cuda_device_here(), size_bytes, false);
    if (!memory) return leave(TL_CUDA_NO_MEMORY);
    *ret_memory = memory->address;
    return leave(TL_CUDA_OK);
}

/* The library never calls it: what it pins, it keeps. */
EXPORT tl_cuda_error cudaFreeHost(void *address);
tl_cuda_error cudaFreeHost(void *address)
{
    ENTER_DEVICE(UNSAFE | BLOCKS);
    struct memory *memory = memory_find_locked(address);
    if (!memory || memory->kind != MEMORY_HOST) misuse("%p cannot be freed", address);
    streams_wait_locked(memory->device);
    memory_free_locked(memory);
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaHostRegister(void *address, size_t size_bytes, unsigned flags)
{
    ENTER_DEVICE(UNSAFE | BLOCKS);
    if (flags != TL_CUDA_HOST_REGISTER_PORTABLE) misuse("memory is registered for one device, with flags %u", flags);
    return leave(memory_register_locked(fake_cuda_device_here(), address, size_bytes));
}

tl_cuda_error cudaHostUnregister(void *address)
{
    ENTER_DEVICE(UNSAFE | BLOCKS);
    memory_unregister_locked(address);
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaPointerGetAttributes(struct tl_cuda_pointer *ret_pointer, const void *address)
{
    ENTER_DEVICE(SAFE);
    struct memory *memory = memory_find_locked(address);
    if (memory && memory->is_freed) misuse("%p is looked at after it was freed", address);
    memset(ret_pointer, 0, VERSION >= 13000 ? 88 : 24);
    ret_pointer->type = memory ? (int)memory->kind : TL_CUDA_MEMORY_UNKNOWN;
    ret_pointer->device = memory ? memory->device : -2;
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaStreamCreateWithFlags(void **ret_stream, unsigned flags)
{
    ENTER_DEVICE(UNSAFE);
    *ret_stream = stream_create_locked(fake_cuda_device_here(), !(flags & TL_CUDA_STREAM_NON_BLOCKING), false);
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaStreamQuery(void *handle)
{
    ENTER(UNSAFE);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream) misuse("%p is not a stream", handle);
    if (state_devices[stream->device].broken) return leave(state_devices[stream->device].broken);
    return leave(stream->first ? TL_CUDA_NOT_READY : TL_CUDA_OK);
}

tl_cuda_error cudaStreamSynchronize(void *handle)
{
    ENTER(UNSAFE);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream) misuse("%p is not a stream", handle);
    while (stream->first && !state_devices[stream->device].broken) {
        pthread_mutex_unlock(&state_mutex);
        usleep(DELAY_US);
        pthread_mutex_lock(&state_mutex);
    }
    return leave(state_devices[stream->device].broken);
}

static tl_cuda_error exchange_capture_mode(int *mode)
{
    ENTER_CONTEXT();
    int before = this_thread.mode;
    this_thread.mode = *mode;
    *mode = before;
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER_DEVICE(SAFE);
    int before = this_thread.mode;
    this_thread.mode = *mode;
    *mode = before;
    return leave(TL_CUDA_OK);
}

static struct event *find_event(void *handle)
{
    for (struct event *event = events; event; event = event->next)
        if (event == handle) return event;
    misuse("%p is not an event", handle);
}

tl_cuda_error cudaEventRecord(void *event_handle, void *handle)
{
    ENTER_DEVICE(SAFE);
    struct event *event = find_event(event_handle);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream || stream->device != event->device || event->device != fake_cuda_device_here())
        misuse("an event, its stream and the current device are not of one device");
    stream_push_locked(stream, (struct op){.event = event});
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaEventQuery(void *handle)
{
    ENTER(UNSAFE);
    struct event *event = find_event(handle);
    if (state_devices[event->device].broken) return leave(state_devices[event->device].broken);
    return leave(event->reached < event->recorded ? TL_CUDA_NOT_READY : TL_CUDA_OK);
}

tl_cuda_error cudaMemcpyAsync(void *to, const void *from, size_t len_bytes, int kind, void *handle)
{
    ENTER_DEVICE(SAFE);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream || stream->device != fake_cuda_device_here()) misuse("a copy in a stream of another device");
    if (kind != TL_CUDA_COPY_DEFAULT) misuse("a copy of kind %d", kind);
    memory_check_locked(to, len_bytes);
    memory_check_locked(from, len_bytes);
    state_counts.begun_bytes += len_bytes;
    stream_push_locked(stream, (struct op){.to = to, .from = from, .len_bytes = len_bytes});
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t len_bytes,
                                  void *handle)
{
    ENTER_DEVICE(SAFE);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream || stream->device != fake_cuda_device_here()) misuse("a copy in a stream of another device");
    memory_check_locked(to, len_bytes);
    memory_check_locked(from, len_bytes);
    if (memory_find_locked(to)->device != to_device || memory_find_locked(from)->device != from_device)
        misuse("a copy from gpu:%d to gpu:%d between other devices", from_device, to_device);
    stream_push_locked(stream, (struct op){.to = to, .from = from, .len_bytes = len_bytes, .is_between_devices = true});
    return leave(TL_CUDA_OK);
}

tl_cuda_error cudaGetLastError(void)
{
    tl_cuda_error error = this_thread.last_error;
    if (is_forbidden && is_forbidden()) misuse("%s is called where that is forbidden", __func__);
    this_thread.last_error = TL_CUDA_OK;
    return error;
}

const char *cudaGetErrorString(tl_cuda_error error)
{
    return error == TL_CUDA_NO_MEMORY ? "out of memory" : "an error of the double";
}

/* ------------------------------------------------------------------------------------------------------ driver -- */

static tl_cuda_error device_get(int *ret_device, int index)
{
    ENTER(SAFE);
    if (index < 0 || index >= device_count) return leave(INVALID_DEVICE);
    *ret_device = FIRST_DEVICE + index;
    return leave(TL_CUDA_OK);
}

static tl_cuda_error device_get_name(char *ret_name, int capacity, int device)
{
    ENTER(SAFE);
    if (device < FIRST_DEVICE) misuse("%d is not a device", device);
    snprintf(ret_name, (size_t)capacity, "Fake GPU %d", device - FIRST_DEVICE);
    return leave(TL_CUDA_OK);
}

static tl_cuda_error device_get_pci_bus_id(char *ret_address, int capacity, int device)
{
    ENTER(SAFE);
    if (device < FIRST_DEVICE) misuse("%d is not a device", device);
    snprintf(ret_address, (size_t)capacity, "FA0%d:3B:00.0", device - FIRST_DEVICE);
    return leave(TL_CUDA_OK);
}

static tl_cuda_error device_total_mem(size_t *ret_bytes, int device)
{
    ENTER(SAFE);
    if (device < FIRST_DEVICE) misuse("%d is not a device", device);
    *ret_bytes = state_capacity_bytes;
    return leave(TL_CUDA_OK);
}

static tl_cuda_error ctx_get_current(void **ret_context)
{
    ENTER(SAFE);
    *ret_context = this_thread.context;
    return leave(TL_CUDA_OK);
}

static tl_cuda_error ctx_push_current(void *context)
{
    ENTER(SAFE);
    if (!context) misuse("no context is pushed");
    if (this_thread.depth == sizeof(this_thread.below) / sizeof(this_thread.below[0]))
        misuse("contexts are not popped");
    this_thread.below[this_thread.depth++] = this_thread.context;
    this_thread.context = context;
    return leave(TL_CUDA_OK);
}

static tl_cuda_error ctx_pop_current(void **ret_context)
{
    ENTER(SAFE);
    if (this_thread.depth == 0) misuse("no context was pushed");
    *ret_context = this_thread.context;
    this_thread.context = this_thread.below[--this_thread.depth];
    return leave(TL_CUDA_OK);
}

static tl_cuda_error stream_is_capturing(void *handle, int *ret_capture)
{
    ENTER_CONTEXT();
    int device = fake_cuda_device_here();
    struct stream *stream = stream_find_locked(handle, device);
    if (!stream || stream->device != device) return leave(TL_CUDA_INVALID_HANDLE);
    if (stream->is_legacy && streams_captured_locked(device)) return leave(TL_CUDA_CAPTURE_IMPLICIT);
    *ret_capture = stream->is_capturing;
    return leave(TL_CUDA_OK);
}

static tl_cuda_error event_create(void **ret_event, unsigned flags)
{
    ENTER_CONTEXT();
    if (flags != TL_CUDA_EVENT_DISABLE_TIMING) misuse("an event with flags %u", flags);
    struct event *event = calloc(1, sizeof(*event));
    event->next = events;
    event->device = fake_cuda_device_here();
    events = event;
    state_counts.events++;
    *ret_event = event;
    return leave(TL_CUDA_OK);
}

static tl_cuda_error event_record(void *event_handle, void *handle)
{
    ENTER_CONTEXT();
    int device = fake_cuda_device_here();
    struct event *event = find_event(event_handle);
    struct stream *stream = stream_find_locked(handle, device);
    if (!stream || stream->device != device || event->device != device) return leave(TL_CUDA_INVALID_HANDLE);
    if (stream->is_capturing) misuse("an event is recorded in a stream that is being captured");
    if (stream->is_legacy && streams_captured_locked(device))
        misuse("an event is recorded in the legacy stream while another one is being captured");
    stream_push_locked(stream, (struct op){.event = event});
    return leave(TL_CUDA_OK);
}

static const struct fake_entry entries[] = {
    {"cuDeviceGet", (void *)device_get},
    {"cuDeviceGetName", (void *)device_get_name},
    {"cuDeviceGetPCIBusId", (void *)device_get_pci_bus_id},
    {"cuDeviceTotalMem", (void *)device_total_mem},
    {"cuCtxGetCurrent", (void *)ctx_get_current},
    {"cuCtxPushCurrent", (void *)ctx_push_current},
    {"cuCtxPopCurrent", (void *)ctx_pop_current},
    {"cuThreadExchangeStreamCaptureMode", (void *)exchange_capture_mode},
    {"cuStreamIsCapturing", (void *)stream_is_capturing},
    {"cuEventCreate", (void *)event_create},
    {"cuEventRecord", (void *)event_record},
};

static tl_cuda_error find_entry(const char *name, void **ret_function)
{
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        if (strcmp(entries[i].name, name) != 0) continue;
        *ret_function = entries[i].function;
        return leave(TL_CUDA_OK);
    }
    for (const struct fake_entry *entry = fake_dmabuf_entries; entry->name; entry++) {
        if (strcmp(entry->name, name) != 0) continue;
        *ret_function = entry->function;
        return leave(TL_CUDA_OK);
    }
    for (const struct fake_entry *entry = fake_sharing_entries; entry->name; entry++) {
        if (strcmp(entry->name, name) != 0) continue;
        *ret_function = entry->function;
        return leave(TL_CUDA_OK);
    }
    return leave(TL_CUDA_INVALID_VALUE);
}

#if FAKE_CUDA_MAJOR == 11
EXPORT tl_cuda_error cudaGetDriverEntryPoint(const char *name, void **ret_function, unsigned long long flags);
tl_cuda_error cudaGetDriverEntryPoint(const char *name, void **ret_function, unsigned long long flags)
{
    ENTER(SAFE);
    if (flags != 0) misuse("flags %llu", flags);
    return find_entry(name, ret_function);
}
#elif FAKE_CUDA_MAJOR == 12
EXPORT tl_cuda_error cudaGetDriverEntryPoint(const char *name, void **ret_function, unsigned long long flags,
                                             int *ret_found);
tl_cuda_error cudaGetDriverEntryPoint(const char *name, void **ret_function, unsigned long long flags, int *ret_found)
{
    ENTER(SAFE);
    if (flags != 0) misuse("flags %llu", flags);
    *ret_found = 0;
    return find_entry(name, ret_function);
}
#else
EXPORT tl_cuda_error cudaGetDriverEntryPointByVersion(const char *name, void **ret_function, unsigned version,
                                                      unsigned long long flags, int *ret_found);
tl_cuda_error cudaGetDriverEntryPointByVersion(const char *name, void **ret_function, unsigned version,
                                               unsigned long long flags, int *ret_found)
{
    ENTER(SAFE);
    if (flags != 0 || version < 11000 || version > VERSION) misuse("flags %llu, version %u", flags, version);
    *ret_found = 0;
    return find_entry(name, ret_function);
}
#endif

/* ----------------------------------------------------------------------------------------------------- control -- */

static void set_forbidden(bool (*function)(void))
{
    is_forbidden = function;
}

static void set_machine(int version, int count)
{
    supported_version = version;
    device_count = count;
}

static void set_capacity(size_t size_bytes)
{
    pthread_mutex_lock(&state_mutex);
    state_capacity_bytes = size_bytes;
    pthread_mutex_unlock(&state_mutex);
}

static void fail_call(unsigned number, int error, bool is_for_good)
{
    pthread_mutex_lock(&state_mutex);
    countdown = number;
    countdown_error = error;
    is_failing_for_good = is_for_good;
    if (number > 0) failed_call = NULL;
    pthread_mutex_unlock(&state_mutex);
}

static const char *get_failed_call(void)
{
    pthread_mutex_lock(&state_mutex);
    const char *name = failed_call;
    pthread_mutex_unlock(&state_mutex);
    return name;
}

static void break_device(int device, int error)
{
    pthread_mutex_lock(&state_mutex);
    state_devices[device].broken = error;
    streams_drop_locked(device);
    memory_forget_locked(device);
    pthread_mutex_unlock(&state_mutex);
}

static void get_counts(struct fake_cuda_counts *ret_counts)
{
    pthread_mutex_lock(&state_mutex);
    *ret_counts = state_counts;
    pthread_mutex_unlock(&state_mutex);
}

static void get_thread(struct fake_cuda_thread *ret_thread)
{
    *ret_thread = (struct fake_cuda_thread){.device = fake_cuda_device_here(),
                                            .context = this_thread.context,
                                            .pushed = this_thread.depth,
                                            .capture_mode = this_thread.mode,
                                            .last_error = this_thread.last_error};
}

static void make_current(int device)
{
    this_thread.ordinal = device;
    this_thread.context = &state_devices[device];
}

static void *allocate(int device, size_t size_bytes)
{
    pthread_mutex_lock(&state_mutex);
    void *address = memory_create_locked(MEMORY_DEVICE, device, size_bytes, true)->address;
    pthread_mutex_unlock(&state_mutex);
    return address;
}

static void *allocate_managed(size_t size_bytes)
{
    pthread_mutex_lock(&state_mutex);
    void *address = memory_create_locked(MEMORY_MANAGED, 0, size_bytes, true)->address;
    pthread_mutex_unlock(&state_mutex);
    return address;
}

static void free_foreign(void *address)
{
    pthread_mutex_lock(&state_mutex);
    struct memory *memory = memory_find_locked(address);
    streams_wait_locked(memory->device);
    memory_free_locked(memory);
    pthread_mutex_unlock(&state_mutex);
}

static bool is_synchronous(const void *address)
{
    pthread_mutex_lock(&state_mutex);
    memory_check_locked(address, 1);
    const struct memory *memory = memory_find_locked(address);
    bool is_set = memory->is_synchronous || (state_devices[memory->device].flags & TL_CUDA_CONTEXT_SYNC_MEMOPS) != 0;
    pthread_mutex_unlock(&state_mutex);
    return is_set;
}

static void *reach(const void *address)
{
    pthread_mutex_lock(&state_mutex);
    void *mapped = memory_view_locked(address);
    const struct memory *memory = mapped != address ? memory_find_locked(address) : NULL;
    if (mapped != address && (!memory || memory->is_freed)) misuse("a card touches %p, which was freed", address);
    pthread_mutex_unlock(&state_mutex);
    return mapped;
}

static void *view(const void *address)
{
    pthread_mutex_lock(&state_mutex);
    memory_check_locked(address, 1);
    void *mapped = memory_view_locked(address);
    pthread_mutex_unlock(&state_mutex);
    return mapped;
}

static void *create_stream(int device, bool is_blocking)
{
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = stream_create_locked(device, is_blocking, true);
    pthread_mutex_unlock(&state_mutex);
    return stream;
}

static void launch(void *handle, void (*run)(void *context), void *context)
{
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream) misuse("%p is not a stream", handle);
    stream_push_locked(stream, (struct op){.run = run, .context = context});
    pthread_mutex_unlock(&state_mutex);
}

static void begin_capture(void *handle)
{
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = handle;
    stream->is_capturing = true;
    stream->is_spoiled = false;
    pthread_mutex_unlock(&state_mutex);
}

static bool end_capture(void *handle)
{
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = handle;
    stream->is_capturing = false;
    bool was_left_alone = !stream->is_spoiled;
    pthread_mutex_unlock(&state_mutex);
    return was_left_alone;
}

/* Programs in Python call these. */
EXPORT unsigned fake_cuda_allocations(void);
unsigned fake_cuda_allocations(void)
{
    struct fake_cuda_counts counts;
    get_counts(&counts);
    return counts.device_allocations;
}

EXPORT uint64_t fake_cuda_begun_bytes(void);
uint64_t fake_cuda_begun_bytes(void)
{
    struct fake_cuda_counts counts;
    get_counts(&counts);
    return counts.begun_bytes;
}

EXPORT void fake_cuda_hold(bool is_held);
void fake_cuda_hold(bool is_held)
{
    streams_hold(NULL, is_held);
}

EXPORT void *fake_cuda_view(const void *address);
void *fake_cuda_view(const void *address)
{
    return view(address);
}

EXPORT extern const struct fake_cuda fake_cuda_table;
const struct fake_cuda fake_cuda_table = {
    .set_forbidden = set_forbidden,
    .set_seed = streams_set_seed,
    .set_machine = set_machine,
    .set_capacity = set_capacity,
    .fail_call = fail_call,
    .failed_call = get_failed_call,
    .break_device = break_device,
    .get_counts = get_counts,
    .get_thread = get_thread,
    .make_current = make_current,
    .allocate = allocate,
    .allocate_managed = allocate_managed,
    .free = free_foreign,
    .set_direct = fake_dmabuf_set,
    .set_sharing = fake_sharing_set,
    .order_writes = fake_dmabuf_order_writes,
    .is_synchronous = is_synchronous,
    .reach = reach,
    .view = view,
    .create_stream = create_stream,
    .launch = launch,
    .hold = streams_hold,
    .begin_capture = begin_capture,
    .end_capture = end_capture,
};
