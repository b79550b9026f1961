// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that processes can map: allocations with handles, addresses that are reserved, and what is mapped there.
 *
 * An allocation is a file in memory whose name says on which device it lies. An export is another descriptor of that
 * file, and an import looks at the name; so a process can import what another one, also a double of another process,
 * has created. The kernel keeps the file for as long as one process has it open or mapped.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakes/cuda/state.h"

#define GRANULARITY_BYTES ((size_t)2 << 20)
#define NAME "fake-cuda-memory-of-gpu"

struct allocation {
    struct allocation *next;
    int file;
    int device;
    size_t size_bytes;
    bool is_imported; /* it does not count against the device here */
    unsigned uses;    /* its handle, if it was not released, and mappings */
    bool has_handle;
    bool is_forgotten; /* its device is broken */
};

/* Addresses, which are used once. */
struct reservation {
    struct reservation *next;
    unsigned char *address;
    size_t len_bytes;
    bool is_freed;
    struct memory *memory; /* what is mapped; NULL: nothing */
    struct allocation *allocation;
};

static struct allocation *allocations;
static struct reservation *reservations;
static bool is_on = true;

void fake_sharing_set(bool has_sharing)
{
    pthread_mutex_lock(&state_mutex);
    is_on = has_sharing;
    pthread_mutex_unlock(&state_mutex);
}

bool fake_sharing_is_on(void)
{
    return is_on;
}

void fake_sharing_forget_locked(int device)
{
    for (struct allocation *allocation = allocations; allocation; allocation = allocation->next) {
        if (allocation->device != device || allocation->is_forgotten) continue;
        allocation->is_forgotten = true;
        if (allocation->has_handle) state_counts.handles--;
    }
    for (struct reservation *reservation = reservations; reservation; reservation = reservation->next) {
        if (reservation->is_freed || !reservation->memory || reservation->memory->device != device) continue;
        state_counts.reservations--;
        state_counts.mappings--;
    }
}

static struct reservation *find_reservation(unsigned long long address, size_t len_bytes, const char *what)
{
    for (struct reservation *reservation = reservations; reservation; reservation = reservation->next) {
        if ((uintptr_t)reservation->address != address || reservation->is_freed) continue;
        if (reservation->len_bytes == len_bytes) return reservation;
    }
    misuse("%s of %zu bytes at %#llx, which are not reserved so", what, len_bytes, address);
}

static struct allocation *find_allocation(unsigned long long handle, const char *what)
{
    for (struct allocation *allocation = allocations; allocation; allocation = allocation->next)
        if ((uintptr_t)allocation == handle && allocation->has_handle) return allocation;
    misuse("%s of a handle that is none", what);
}

static struct allocation *add_allocation(int file, int device, size_t size_bytes, bool is_imported)
{
    struct allocation *allocation = calloc(1, sizeof(*allocation));
    *allocation = (struct allocation){.next = allocations,
                                      .file = file,
                                      .device = device,
                                      .size_bytes = size_bytes,
                                      .is_imported = is_imported,
                                      .uses = 1,
                                      .has_handle = true};
    allocations = allocation;
    state_counts.handles++;
    if (!is_imported) state_devices[device].allocated_bytes += size_bytes;
    return allocation;
}

static void put_allocation(struct allocation *allocation)
{
    if (--allocation->uses > 0) return;
    close(allocation->file);
    if (!allocation->is_imported) state_devices[allocation->device].allocated_bytes -= allocation->size_bytes;
}

/* -------------------------------------------------------------------------------------------------- allocations -- */

static void check_properties(const struct tl_cuda_properties *properties)
{
    if (properties->type != TL_CUDA_ALLOCATION_PINNED || properties->handle_types != TL_CUDA_HANDLE_FILE ||
        properties->location.type != TL_CUDA_LOCATION_DEVICE || properties->location.id < 0 ||
        properties->location.id >= FAKE_CUDA_DEVICES || properties->windows || properties->compression != 0 ||
        properties->usage != 0)
        misuse("memory with these properties");
}

static tl_cuda_error get_granularity(size_t *ret_bytes, const struct tl_cuda_properties *properties, int option)
{
    tl_cuda_error error = fake_cuda_enter("cuMemGetAllocationGranularity");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    check_properties(properties);
    if (option != TL_CUDA_GRANULARITY_MINIMUM) misuse("granularity %d", option);
    *ret_bytes = GRANULARITY_BYTES;
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error create(unsigned long long *ret_handle, size_t size_bytes,
                            const struct tl_cuda_properties *properties, unsigned long long flags)
{
    char name[sizeof(NAME) + 8];
    tl_cuda_error error = fake_cuda_enter("cuMemCreate");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    check_properties(properties);
    int device = properties->location.id;
    if (size_bytes == 0 || size_bytes % GRANULARITY_BYTES != 0 || flags != 0)
        misuse("memory of %zu bytes, which are no whole pages, or flags %llu", size_bytes, flags);
    /* The capacity may have been lowered below what is allocated. */
    size_t used_bytes = state_devices[device].allocated_bytes;
    if (used_bytes > state_capacity_bytes || size_bytes > state_capacity_bytes - used_bytes)
        return fake_cuda_leave(TL_CUDA_NO_MEMORY);
    snprintf(name, sizeof(name), NAME "%d", device);
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size_bytes) != 0) misuse("the double has no memory");
    unsigned char *bytes = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (bytes == MAP_FAILED) misuse("the double has no memory");
    memset(bytes, FAKE_POISON, size_bytes);
    munmap(bytes, size_bytes);
    *ret_handle = (uintptr_t)add_allocation(file, device, size_bytes, false);
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error release(unsigned long long handle)
{
    tl_cuda_error error = fake_cuda_enter("cuMemRelease");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    struct allocation *allocation = find_allocation(handle, "a release");
    allocation->has_handle = false;
    state_counts.handles--;
    put_allocation(allocation);
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error export_file(void *ret_file, unsigned long long handle, int type, unsigned long long flags)
{
    tl_cuda_error error = fake_cuda_enter("cuMemExportToShareableHandle");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    const struct allocation *allocation = find_allocation(handle, "an export");
    if (type != TL_CUDA_HANDLE_FILE || flags != 0) misuse("an export of type %d, flags %llu", type, flags);
    int file = dup(allocation->file);
    if (file < 0) misuse("there is no descriptor for an export");
    memcpy(ret_file, &file, sizeof(file));
    return fake_cuda_leave(TL_CUDA_OK);
}

/* On which device the memory of a file lies; -1: the file is no such memory. */
static int device_of(int file)
{
    static const char begin[] = "/memfd:" NAME;
    char link[32], target[64] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    if (readlink(link, target, sizeof(target) - 1) < 0 || strncmp(target, begin, strlen(begin)) != 0) return -1;
    int device = atoi(target + strlen(begin));
    return device >= 0 && device < FAKE_CUDA_DEVICES ? device : -1;
}

static tl_cuda_error import_file(unsigned long long *ret_handle, void *handle, int type)
{
    tl_cuda_error error = fake_cuda_enter("cuMemImportFromShareableHandle");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    int file = (int)(intptr_t)handle, device = device_of(file);
    struct stat status;
    if (type != TL_CUDA_HANDLE_FILE) misuse("an import of type %d", type);
    if (device < 0 || fstat(file, &status) != 0) return fake_cuda_leave(TL_CUDA_INVALID_VALUE);
    file = dup(file);
    if (file < 0) misuse("there is no descriptor for an import");
    *ret_handle = (uintptr_t)add_allocation(file, device, (size_t)status.st_size, true);
    state_counts.imports++;
    return fake_cuda_leave(TL_CUDA_OK);
}

/* ---------------------------------------------------------------------------------------------------- addresses -- */

static tl_cuda_error reserve(unsigned long long *ret_address, size_t len_bytes, size_t alignment,
                             unsigned long long hint, unsigned long long flags)
{
    tl_cuda_error error = fake_cuda_enter("cuMemAddressReserve");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    if (len_bytes == 0 || alignment != 0 || hint != 0 || flags != 0)
        misuse("%zu addresses at %#llx, aligned to %zu, flags %llu", len_bytes, hint, alignment, flags);
    if (len_bytes % GRANULARITY_BYTES != 0) return fake_cuda_leave(TL_CUDA_INVALID_VALUE);
    /* With a page behind it that never is memory. */
    void *address = mmap(NULL, len_bytes + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return fake_cuda_leave(TL_CUDA_NO_MEMORY);
    struct reservation *reservation = calloc(1, sizeof(*reservation));
    *reservation = (struct reservation){.next = reservations, .address = address, .len_bytes = len_bytes};
    reservations = reservation;
    state_counts.reservations++;
    *ret_address = (uintptr_t)address;
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error free_addresses(unsigned long long address, size_t len_bytes)
{
    tl_cuda_error error = fake_cuda_enter("cuMemAddressFree");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    struct reservation *reservation = find_reservation(address, len_bytes, "a free");
    if (reservation->memory && !reservation->memory->is_freed) misuse("addresses are freed that are mapped");
    reservation->is_freed = true;
    state_counts.reservations--;
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error map(unsigned long long address, size_t len_bytes, size_t offset_bytes, unsigned long long handle,
                         unsigned long long flags)
{
    tl_cuda_error error = fake_cuda_enter("cuMemMap");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    struct allocation *allocation = find_allocation(handle, "a mapping");
    struct reservation *reservation = find_reservation(address, len_bytes, "a mapping");
    if (offset_bytes != 0 || flags != 0 || reservation->memory)
        misuse("a mapping at %zu, flags %llu", offset_bytes, flags);
    if (len_bytes > allocation->size_bytes) return fake_cuda_leave(TL_CUDA_INVALID_VALUE);
    void *mapped = mmap(reservation->address, len_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->file, 0);
    void *view = mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocation->file, 0);
    if (mapped == MAP_FAILED || view == MAP_FAILED) misuse("the double has no memory");
    reservation->memory = memory_add_mapping_locked(allocation->device, reservation->address, view, len_bytes);
    reservation->allocation = allocation;
    allocation->uses++;
    state_counts.mappings++;
    return fake_cuda_leave(TL_CUDA_OK);
}

/* Does not wait for the device, as the real one does not. */
static tl_cuda_error unmap(unsigned long long address, size_t len_bytes)
{
    tl_cuda_error error = fake_cuda_enter("cuMemUnmap");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    struct reservation *reservation = find_reservation(address, len_bytes, "an unmap");
    struct memory *memory = reservation->memory;
    if (!memory || memory->is_freed) misuse("an unmap of what is not mapped");
    memory->is_freed = true;
    munmap(memory->view, memory->size_bytes);
    if (mmap(memory->address, memory->size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
             -1, 0) == MAP_FAILED)
        misuse("the double has no memory");
    state_counts.mappings--;
    put_allocation(reservation->allocation);
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error set_access(unsigned long long address, size_t len_bytes, const struct tl_cuda_access *accesses,
                                size_t count)
{
    tl_cuda_error error = fake_cuda_enter("cuMemSetAccess");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    struct memory *memory = find_reservation(address, len_bytes, "access")->memory;
    if (!memory || memory->is_freed) misuse("access to what is not mapped");
    for (size_t i = 0; i < count; i++) {
        const struct tl_cuda_access *access = &accesses[i];
        if (access->location.type != TL_CUDA_LOCATION_DEVICE || access->location.id < 0 ||
            access->location.id >= FAKE_CUDA_DEVICES ||
            (access->flags != TL_CUDA_ACCESS_READ && access->flags != TL_CUDA_ACCESS_READ_WRITE))
            misuse("access %d of device %d", access->flags, access->location.id);
        memory->access[access->location.id] = access->flags;
    }
    return fake_cuda_leave(TL_CUDA_OK);
}

#if FAKE_CUDA_MAJOR > 11
/* ----------------------------------------------------------------------------------------------------- contexts -- */

static tl_cuda_error get_flags(unsigned *ret_flags)
{
    tl_cuda_error error = fake_cuda_enter("cuCtxGetFlags");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    *ret_flags = state_devices[fake_cuda_device_here()].flags;
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error set_flags(unsigned flags)
{
    tl_cuda_error error = fake_cuda_enter("cuCtxSetFlags");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    state_devices[fake_cuda_device_here()].flags = flags;
    return fake_cuda_leave(TL_CUDA_OK);
}
#endif

const struct fake_entry fake_sharing_entries[] = {
    {"cuMemGetAllocationGranularity", (void *)get_granularity},
    {"cuMemCreate", (void *)create},
    {"cuMemRelease", (void *)release},
    {"cuMemAddressReserve", (void *)reserve},
    {"cuMemAddressFree", (void *)free_addresses},
    {"cuMemMap", (void *)map},
    {"cuMemUnmap", (void *)unmap},
    {"cuMemSetAccess", (void *)set_access},
    {"cuMemExportToShareableHandle", (void *)export_file},
    {"cuMemImportFromShareableHandle", (void *)import_file},
#if FAKE_CUDA_MAJOR > 11
    {"cuCtxGetFlags", (void *)get_flags},
    {"cuCtxSetFlags", (void *)set_flags},
#endif
    {NULL, NULL},
};
