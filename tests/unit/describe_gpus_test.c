// SPDX-License-Identifier: Apache-2.0
/* What a worker reports about GPUs, with a card that is told what it reaches, and devices that are made up. */
#include <check.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "fakes/run_suite.h"

#define tl_device_list_open fake_list_open
#define tl_memory_look_direct fake_look_direct
#define tl_pci_distance_to_card fake_distance
#include "server/transports/describe_gpus.c"

static unsigned open_count;
static bool is_lost;

enum tl_status fake_list_open(struct tl_device_info **ret_devices, size_t *ret_count, struct tl_error *ret_error)
{
    struct tl_device_info *infos = calloc(2, sizeof(*infos));
    ck_assert_ptr_nonnull(infos);
    (void)ret_error;
    for (int i = 0; i < 2; i++) {
        infos[i] = (struct tl_device_info){.device = {.kind = TL_DEVICE_CUDA, .index = i}, .is_lost = is_lost};
        snprintf(infos[i].name, sizeof(infos[i].name), "Model %d", i);
        snprintf(infos[i].pci_address, sizeof(infos[i].pci_address), "0000:3%d:00.0", i);
    }
    *ret_devices = infos;
    *ret_count = open_count;
    return TL_OK;
}

static bool is_known;
static const char *why_not[2]; /* by enum tl_region_access */

bool fake_look_direct(struct tl_memory *memory, struct tl_device device, enum tl_keys keys,
                      enum tl_region_access access, const char **ret_why_not)
{
    (void)memory;
    (void)device;
    ck_assert_int_eq(keys, TL_KEYS_REGION);
    *ret_why_not = why_not[access];
    return is_known;
}

enum tl_pci_distance fake_distance(const char *sys, const char *address, const char *card)
{
    ck_assert_str_eq(sys, "/sys");
    ck_assert_str_eq(card, "mlx5_0");
    return strcmp(address, "0000:30:00.0") == 0 ? TL_PCI_SWITCH : TL_PCI_ACROSS;
}

static struct tl_worker worker;
static struct tl_transport transport;
static struct tl_description description;

static void setup(void)
{
    static const struct tl_config_task task;
    worker = (struct tl_worker){.setup.task = &task, .data_plane.transport_count = 2};
    transport = (struct tl_transport){.options.engine.keys = TL_KEYS_REGION};
    worker.data_plane.transports[0] = (struct tl_transport_slot){.source = &tl_transport_local};
    worker.data_plane.transports[1] =
        (struct tl_transport_slot){.source = &tl_transport_verbs, .transport = &transport, .is_wanted = true};
    open_count = 2;
}

/* Describes the GPUs; the caller calls tl_description_fini. */
static void ask(void)
{
    struct tl_error error;
    description = (struct tl_description){0};
    description.data_plane = calloc(1, sizeof(*description.data_plane));
    ck_assert_ptr_nonnull(description.data_plane);
    description.data_plane->device = strdup("mlx5_0");
    ck_assert_int_eq(tl_transports_describe_gpus(&worker, &description, &error), TL_OK);
}

static void expect(const char *path, const char *reason, bool is_slower)
{
    ask();
    ck_assert_uint_eq(description.gpu_count, 2);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_str_eq(description.gpus[i].path, path);
        ck_assert_str_eq(description.gpus[i].reason, reason);
        ck_assert(description.gpus[i].is_slower == is_slower);
    }
    tl_description_fini(&description);
}

START_TEST(paths_and_reasons)
{
    expect("", "the card tries it with the first tensor", false);
    is_known = true;
    expect("gpu-direct", "the card reaches the GPU", false);
    why_not[TL_REGION_WRITE] = "gpu:0 does not order writes";
    expect("gpu-direct", "when they are sent; received as gpu-proxy: gpu:0 does not order writes", false);
    why_not[TL_REGION_READ] = why_not[TL_REGION_WRITE] = "nvidia-peermem is missing";
    expect("gpu-proxy", "nvidia-peermem is missing", true);
    transport.options.engine.is_bounce_forced = true;
    expect("gpu-proxy", "verbs.bounce is set", false);
    transport.options.engine.is_gpu_proxy_forced = true;
    expect("gpu-proxy", "gpu.proxy is set", false);
    worker.data_plane.transports[1].transport = NULL;
    worker.data_plane.transports[1].reason = "rdma is off";
    expect("grpc", "rdma is off", false);
}
END_TEST

START_TEST(what_is_known_of_each)
{
    worker.settings.device = (struct tl_device){.kind = TL_DEVICE_CUDA, .index = 1};
    is_lost = true;
    ask();
    const struct tl_gpu_description *gpus = description.gpus;
    ck_assert_str_eq(gpus[0].name, "gpu:0");
    ck_assert_str_eq(gpus[1].name, "gpu:1");
    ck_assert_str_eq(gpus[1].model, "Model 1");
    ck_assert_str_eq(gpus[1].pci_address, "0000:31:00.0");
    ck_assert(!gpus[0].is_kept_on && gpus[1].is_kept_on);
    ck_assert(gpus[0].is_lost && gpus[1].is_lost);
    ck_assert_str_eq(gpus[0].card, "mlx5_0");
    ck_assert_str_eq(gpus[0].distance, "switch");
    ck_assert_str_eq(gpus[1].distance, "across");
    tl_description_fini(&description);
    worker.setup.task = NULL; /* a client publishes nothing */
    worker.data_plane.transports[1].transport = NULL;
    worker.data_plane.transports[1].reason = "";
    ask();
    ck_assert(!description.gpus[1].is_kept_on);
    ck_assert_str_eq(description.gpus[1].card, "");
    ck_assert_str_eq(description.gpus[1].distance, "");
    tl_description_fini(&description);
}
END_TEST

START_TEST(none_is_open)
{
    open_count = 0;
    ask();
    ck_assert_uint_eq(description.gpu_count, 0);
    ck_assert_ptr_null(description.gpus);
    tl_description_fini(&description);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("describe_gpus");
    TCase *tcase = tcase_create("describe_gpus");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, paths_and_reasons);
    tcase_add_test(tcase, what_is_known_of_each);
    tcase_add_test(tcase, none_is_open);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
