// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakes/cuda/state.h"

#define PAGE_BYTES 4096
#define ALREADY_REGISTERED 712

static struct memory *memories;

static size_t whole_pages(size_t size_bytes)
{
    return (size_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static void open_arena(struct device *device)
{
    int file = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, ARENA_BYTES) != 0) misuse("the double has no memory");
    device->arena = mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_SHARED, file, 0);
    device->view = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (device->arena == MAP_FAILED || device->view == MAP_FAILED) misuse("the double has no memory");
    close(file);
}

/* An address that was never used before, with a page behind it that never is. NULL: the device is full. */
static unsigned char *take_device_memory(struct device *device, size_t size_bytes)
{
    if (!device->arena) open_arena(device);
    if (size_bytes > ARENA_BYTES || whole_pages(size_bytes) + PAGE_BYTES > ARENA_BYTES - device->used_bytes)
        return NULL;
    unsigned char *address = device->arena + device->used_bytes;
    memset(device->view + device->used_bytes, FAKE_POISON, size_bytes);
    device->used_bytes += whole_pages(size_bytes) + PAGE_BYTES;
    return address;
}

static unsigned char *take_host_memory(size_t size_bytes)
{
    unsigned char *address =
        mmap(NULL, whole_pages(size_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return NULL;
    memset(address, FAKE_POISON, size_bytes);
    return address;
}

struct memory *memory_create_locked(enum memory_kind kind, int device, size_t size_bytes, bool is_foreign)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    if (kind == MEMORY_DEVICE && !is_foreign &&
        (state_devices[device].allocated_bytes > state_capacity_bytes ||
         size_bytes > state_capacity_bytes - state_devices[device].allocated_bytes)) {
        free(memory);
        return NULL;
    }
    unsigned char *address =
        kind == MEMORY_DEVICE ? take_device_memory(&state_devices[device], size_bytes) : take_host_memory(size_bytes);
    if (!address) {
        free(memory);
        return NULL;
    }
    *memory = (struct memory){.next = memories,
                              .address = address,
                              .size_bytes = size_bytes,
                              .kind = kind,
                              .device = device,
                              .is_foreign = is_foreign};
    memories = memory;
    if (!is_foreign && kind == MEMORY_DEVICE) state_devices[device].allocated_bytes += size_bytes;
    if (!is_foreign) *(kind == MEMORY_DEVICE ? &state_counts.device_allocations : &state_counts.host_allocations) += 1;
    return memory;
}

void memory_free_locked(struct memory *memory)
{
    if (memory->is_freed) misuse("%p is freed twice", (void *)memory->address);
    memory->is_freed = true;
    if (memory->kind == MEMORY_DEVICE) {
        /* A card that has pinned the pages finds poison there; all others go back to the system. */
        unsigned char *view = memory_view_locked(memory->address);
        memset(view, FAKE_POISON, memory->size_bytes);
        if (memory->size_bytes > 0) madvise(view, whole_pages(memory->size_bytes), MADV_REMOVE);
    } else {
        mprotect(memory->address, whole_pages(memory->size_bytes), PROT_NONE);
    }
    if (memory->is_foreign) return;
    if (memory->kind == MEMORY_DEVICE) state_devices[memory->device].allocated_bytes -= memory->size_bytes;
    *(memory->kind == MEMORY_DEVICE ? &state_counts.device_allocations : &state_counts.host_allocations) -= 1;
}

/* Whether all of it is mapped. */
static bool is_mapped(const struct memory *memory)
{
    size_t in_page_bytes = (uintptr_t)memory->address % PAGE_BYTES;
    return msync(memory->address - in_page_bytes, memory->size_bytes + in_page_bytes, MS_ASYNC) == 0;
}

tl_cuda_error memory_register_locked(int device, void *address, size_t size_bytes)
{
    unsigned char *begin = address;
    for (struct memory *other = memories; other; other = other->next) {
        if (other->is_freed || begin >= other->address + other->size_bytes || other->address >= begin + size_bytes)
            continue;
        if (other->is_registered && !is_mapped(other)) misuse("%p was unmapped while it was registered", address);
        return ALREADY_REGISTERED;
    }
    struct memory *memory = calloc(1, sizeof(*memory));
    *memory = (struct memory){.next = memories,
                              .address = begin,
                              .size_bytes = size_bytes,
                              .kind = MEMORY_HOST,
                              .device = device,
                              .is_registered = true};
    if (size_bytes == 0 || !is_mapped(memory)) misuse("%zu bytes at %p cannot be registered", size_bytes, address);
    memories = memory;
    state_counts.registrations++;
    return TL_CUDA_OK;
}

void memory_unregister_locked(void *address)
{
    struct memory **place = &memories;
    while (*place && (*place)->address != address)
        place = &(*place)->next;
    struct memory *memory = *place;
    if (!memory || !memory->is_registered) misuse("%p is not registered", address);
    if (!is_mapped(memory)) misuse("%p was unmapped while it was registered", address);
    *place = memory->next;
    free(memory);
    state_counts.registrations--;
}

struct memory *memory_add_mapping_locked(int device, unsigned char *address, unsigned char *view, size_t size_bytes)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    if (!memory) return NULL;
    *memory = (struct memory){.next = memories,
                              .address = address,
                              .view = view,
                              .size_bytes = size_bytes,
                              .kind = MEMORY_DEVICE,
                              .device = device};
    memories = memory;
    return memory;
}

void memory_forget_locked(int device)
{
    fake_sharing_forget_locked(device);
    for (struct memory *memory = memories; memory; memory = memory->next) {
        if (memory->is_registered && memory->device == device && !memory->is_foreign) {
            memory->is_foreign = true;
            state_counts.registrations--;
        }
        if (memory->view) continue;
        if (memory->kind != MEMORY_DEVICE || memory->device != device || memory->is_freed || memory->is_foreign)
            continue;
        memory->is_foreign = true;
        state_counts.device_allocations--;
    }
}

struct memory *memory_find_locked(const void *address)
{
    const unsigned char *byte = address;
    for (struct memory *memory = memories; memory; memory = memory->next)
        if (byte >= memory->address && byte < memory->address + memory->size_bytes) return memory;
    return NULL;
}

void memory_check_locked(const void *address, size_t len_bytes)
{
    const struct memory *memory = memory_find_locked(address);
    if (!memory) misuse("%p is neither pinned nor memory of a device", address);
    if (memory->is_freed) misuse("%p is used after it was freed", address);
    if (len_bytes > memory->size_bytes - (size_t)((const unsigned char *)address - memory->address))
        misuse("%zu bytes at %p reach beyond their allocation", len_bytes, address);
}

void memory_check_access_locked(const void *address, int device, int access)
{
    const struct memory *memory = memory_find_locked(address);
    if (memory->view && (memory->access[device] & access) != access)
        misuse("gpu:%d may not %s %p", device, access == TL_CUDA_ACCESS_READ ? "read" : "write", address);
}

unsigned char *memory_view_locked(const void *address)
{
    const struct memory *memory = memory_find_locked(address);
    if (memory && memory->view) return memory->view + ((const unsigned char *)address - memory->address);
    for (unsigned i = 0; i < FAKE_CUDA_DEVICES; i++) {
        struct device *device = &state_devices[i];
        const unsigned char *byte = address;
        if (device->arena && byte >= device->arena && byte < device->arena + ARENA_BYTES)
            return device->view + (byte - device->arena);
    }
    return (unsigned char *)address;
}
