// SPDX-License-Identifier: Apache-2.0
/*
 * Checks that need a GPU, through the public interface:
 *
 *   gpu_check about     what there is: GPUs, the driver, libcudart
 *   gpu_check worker    copies, and tensors within a worker
 *   gpu_check pair      tensors between two processes, over each transport
 *   gpu_check streams   the order of streams
 *   gpu_check figures   how fast copies are
 *
 * The exit status is 0, 1 when a check has failed, or 77 when there is no GPU that can be used; the last line then says
 * why. tests/gpu/run calls all of them.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/check.h"
#include "tests/gpu/libcuda.h"

#define SKIPPED 77

/* Finds the libcudart that the library has loaded, and its version. */
static bool find_runtime(char ret_path[512], int *ret_version)
{
    char line[600];
    FILE *maps = fopen("/proc/self/maps", "re");
    const char *path = NULL;
    while (maps && !path && fgets(line, sizeof(line), maps)) {
        path = strstr(line, "/libcudart") ? strchr(line, '/') : NULL;
    }
    if (maps) fclose(maps);
    if (!path) return false;
    snprintf(ret_path, 512, "%.*s", (int)strcspn(path, "\n"), path);
    void *library = dlopen(ret_path, RTLD_NOW | RTLD_NOLOAD);
    int (*get_version)(int *ret_version) = NULL;
    if (library) *(void **)&get_version = dlsym(library, "cudaRuntimeGetVersion");
    return get_version && get_version(ret_version) == 0;
}

static void print_version(const char *what, int version)
{
    printf("%s %d.%d\n", what, version / 1000, version % 1000 / 10);
}

static int tell_about(void)
{
    char name[256], path[512];
    int version, device;
    for (int i = 0; i < gpu_count(); i++) {
        GPU_CALL(cuDeviceGet, &device, i);
        GPU_CALL(cuDeviceGetName, name, sizeof(name), device);
        printf("%s: %s\n", check_place(i), name);
    }
    GPU_CALL(cuDriverGetVersion, &version);
    print_version("the driver supports CUDA", version);
    if (!find_runtime(path, &version)) {
        check_fail("about", "the library has loaded no libcudart");
        return EXIT_FAILURE;
    }
    printf("libcudart: %s\n", path);
    print_version("libcudart has version", version);
    return EXIT_SUCCESS;
}

/* Whether the library can use the first GPU. */
static bool opens(void)
{
    const struct tl_device device = {.kind = TL_DEVICE_CUDA};
    const uint64_t size_bytes = 1;
    struct tl_tensor *tensor;
    struct tl_error error;
    const char *missing = gpu_open();
    if (missing) {
        printf("%s\n", missing);
        return false;
    }
    if (tl_tensor_create_on(device, TL_U8, 1, &size_bytes, &tensor, &error) != TL_OK) {
        printf("%s\n", error.message);
        return false;
    }
    tl_tensor_put(tensor);
    return true;
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        int (*run)(void);
    } commands[] = {{"about", tell_about},
                    {"worker", check_worker},
                    {"pair", check_pair},
                    {"streams", check_streams},
                    {"figures", check_figures}};
    if (count < 2) {
        fprintf(stderr, "usage: gpu_check about|worker|pair|streams|figures\n");
        return 2;
    }
    if (!opens()) return SKIPPED;
    if (strcmp(arguments[1], "owner") == 0 && count == 4) return check_owner(arguments[2], arguments[3]);
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(arguments[1], commands[i].name) == 0) return commands[i].run();
    fprintf(stderr, "gpu_check: there is no check %s\n", arguments[1]);
    return 2;
}
