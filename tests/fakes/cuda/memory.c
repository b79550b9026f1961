// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakes/cuda/state.h"

#define PAGE_BYTES 4096

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
        size_bytes > state_capacity_bytes - state_devices[device].allocated_bytes) {
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
        memset(memory_view_locked(memory->address), FAKE_POISON, memory->size_bytes);
    } else {
        mprotect(memory->address, whole_pages(memory->size_bytes), PROT_NONE);
    }
    if (memory->is_foreign) return;
    if (memory->kind == MEMORY_DEVICE) state_devices[memory->device].allocated_bytes -= memory->size_bytes;
    *(memory->kind == MEMORY_DEVICE ? &state_counts.device_allocations : &state_counts.host_allocations) -= 1;
}

void memory_forget_locked(int device)
{
    for (struct memory *memory = memories; memory; memory = memory->next) {
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

unsigned char *memory_view_locked(const void *address)
{
    for (unsigned i = 0; i < FAKE_CUDA_DEVICES; i++) {
        struct device *device = &state_devices[i];
        const unsigned char *byte = address;
        if (device->arena && byte >= device->arena && byte < device->arena + ARENA_BYTES)
            return device->view + (byte - device->arena);
    }
    return (unsigned char *)address;
}
