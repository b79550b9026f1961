// SPDX-License-Identifier: Apache-2.0
/*
 * Whether the memory of each GPU can be shown to RDMA cards: exported as a dma-buf, or by its address; and whether
 * there is a card. It calls tensor/device.h, because the public interface shows no dma-buf. Results and exit status are
 * those of gpu_check.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tensor/device.h"

#define SIZE_BYTES (UINT64_C(4) << 20)
#define MAX_DEVICES 16
#define SKIPPED 77

/* The file must be one that another process or card can take over. */
static int check_file(const struct tl_device_allocation *allocation, int gpu)
{
    struct stat state;
    bool is_right = fstat(allocation->file, &state) == 0 && allocation->len_bytes >= SIZE_BYTES;
    printf("%-6s dma-buf gpu:%d: %llu bytes are exported, at offset %llu of the file\n", is_right ? "ok" : "FAIL", gpu,
           (unsigned long long)allocation->len_bytes, (unsigned long long)allocation->offset_bytes);
    close(allocation->file);
    return is_right ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int check_export(int gpu, struct tl_device_memory *memory)
{
    struct tl_device_allocation allocation;
    struct tl_error error;
    const struct tl_device device = {TL_DEVICE_CUDA, gpu};
    enum tl_status status =
        tl_device_find_allocation(device, tl_device_memory_data(memory), SIZE_BYTES, &allocation, &error);
    if (status == TL_OK && allocation.file >= 0) return check_file(&allocation, gpu);
    bool is_failed = status != TL_OK && status != TL_UNIMPLEMENTED;
    printf("%-6s dma-buf gpu:%d: %s%s\n", is_failed ? "FAIL" : "skip", gpu,
           status != TL_OK ? error.message : allocation.why_no_file,
           status == TL_OK ? "; a card can know the memory by its address (nvidia-peermem)" : "");
    return is_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

static void print_cards(void)
{
    DIR *folder = opendir("/sys/class/infiniband");
    unsigned count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (entry->d_name[0] == '.') continue;
        printf("ok     RDMA card: %s\n", entry->d_name);
        count++;
    }
    if (folder) closedir(folder);
    if (count == 0) printf("skip   RDMA card: this machine has none (/sys/class/infiniband)\n");
}

int main(void)
{
    int result = SKIPPED;
    struct tl_error error;
    for (int gpu = 0; gpu < MAX_DEVICES; gpu++) {
        struct tl_device_memory *memory;
        const struct tl_device device = {TL_DEVICE_CUDA, gpu};
        enum tl_status status = tl_device_memory_create(device, SIZE_BYTES, &memory, &error);
        if (status == TL_NOT_FOUND && gpu > 0) break;
        if (status != TL_OK) {
            printf("%s\n", error.message);
            return result;
        }
        if (check_export(gpu, memory) != EXIT_SUCCESS || result == EXIT_FAILURE) {
            result = EXIT_FAILURE;
        } else {
            result = EXIT_SUCCESS;
        }
        tl_device_memory_destroy(memory);
    }
    print_cards();
    return result;
}
