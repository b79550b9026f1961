// SPDX-License-Identifier: Apache-2.0
/* Candidates, opening, memory, and limits of the verbs provider on soft-RoCE. */
#include "tests/rdma_vm/verbs_sides.h"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/descriptors.h"
#include "fakes/run_suite.h"

/* -------------------------------------------------------------------------------------------------- candidates -- */

static const struct tl_verbs_candidate *find(const struct tl_verbs_candidate *candidates, size_t count,
                                             const char *device, const char *gid)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(candidates[i].device, device) == 0 && strcmp(candidates[i].gid, gid) == 0) return &candidates[i];
    }
    return NULL;
}

START_TEST(candidates_follow_from_the_address)
{
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    struct tl_verbs_options options = options_for(address_a());
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_uint_ge(count, 2);
    ck_assert_int_eq(candidates[0].order, 0);
    ck_assert_str_eq(candidates[0].device, "rxe0");
    ck_assert_str_eq(candidates[0].gid, address_a());
    ck_assert_str_eq(candidates[0].gid_type, "RoCE v2");
    ck_assert_str_eq(candidates[0].state, "active");
    ck_assert_str_eq(candidates[0].link_layer, "Ethernet");
    ck_assert_str_eq(candidates[0].interface, has_veth() ? "va" : "d0");
    ck_assert_uint_eq(candidates[0].mtu_bytes, 4096);
    ck_assert(candidates[0].has_windows);
    ck_assert_int_eq(candidates[1].order, -1);
    ck_assert_ptr_nonnull(strstr(candidates[1].reason, "not the worker's address"));
    for (size_t i = 0; i < count; i++)
        printf("%d %s:%u %d %s: %s\n", candidates[i].order, candidates[i].device, candidates[i].port,
               candidates[i].gid_index, candidates[i].gid, candidates[i].reason);
    free(candidates);
}
END_TEST

START_TEST(candidates_of_a_named_device)
{
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    struct tl_verbs_options options = options_for("192.0.2.1");
    options.devices = "rxe0:1";
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    /* The IPv4 address before the link-local one. */
    ck_assert_str_eq(candidates[0].gid, address_a());
    ck_assert_int_eq(candidates[1].order, 1);
    ck_assert_ptr_nonnull(strstr(candidates[1].gid, "fe80:"));
    free(candidates);
    options.gid_index = 0;
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_int_eq(candidates[0].gid_index, 0);
    const struct tl_verbs_candidate *other = find(candidates, count, "rxe0", address_a());
    ck_assert_int_eq(other->order, -1);
    ck_assert_ptr_nonnull(strstr(other->reason, "GID index 0 is asked for"));
    free(candidates);
}
END_TEST

static void expect_not_found(struct tl_verbs_options options, unsigned order, const char *part)
{
    struct tl_provider *provider = NULL;
    struct tl_error error = {0};
    ck_assert_int_eq(tl_verbs_open(&options, order, &provider, &error), TL_NOT_FOUND);
    ck_assert_ptr_null(provider);
    ck_assert_msg(strstr(error.message, part) != NULL, "no '%s' in '%s'", part, error.message);
    printf("%s\n", error.message);
}

START_TEST(what_cannot_be_opened_says_why)
{
    struct tl_verbs_options options = options_for(address_a());
    expect_not_found(options, 1, "left after the first 1");
    expect_not_found(options_for("192.0.2.1"), 0, "not the worker's address 192.0.2.1");
    options.devices = "^rxe0,^rxe1";
    expect_not_found(options, 0, "excluded by devices");
    options.devices = "mlx5_0";
    expect_not_found(options, 0, "not among devices \"mlx5_0\"");
    options.devices = "rxe0:2";
    expect_not_found(options, 0, "not among devices");
    options.devices = NULL;
    options.port = 2;
    expect_not_found(options, 0, "port 2 is asked for");
    options.port = 0;
    options.gid_index = 200;
    expect_not_found(options, 0, "GID index 200 is asked for");
}
END_TEST

START_TEST(nodes_that_are_missing)
{
    ck_assert_int_eq(unshare(CLONE_NEWNS), 0);
    ck_assert_int_eq(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
    ck_assert_int_eq(mount("none", "/dev/infiniband", "tmpfs", 0, NULL), 0);
    expect_not_found(options_for(address_a()), 0, "/dev/infiniband");
}
END_TEST

START_TEST(library_that_is_missing)
{
    struct link_map *map = NULL;
    void *library = dlopen("libibverbs.so.1", RTLD_NOW);
    ck_assert_msg(library != NULL && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0, "%s", dlerror());
    char *path = realpath(map->l_name, NULL);
    ck_assert_int_eq(dlclose(library), 0);
    ck_assert_int_eq(unshare(CLONE_NEWNS), 0);
    ck_assert_int_eq(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
    ck_assert_int_eq(mount("/dev/null", path, NULL, MS_BIND, NULL), 0);
    expect_not_found(options_for(address_a()), 0, "libibverbs.so.1 cannot be loaded (");
    ck_assert_int_eq(umount(path), 0);
    free(path);
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    struct tl_verbs_options options = options_for(address_a());
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    free(candidates);
}
END_TEST

START_TEST(nodes_that_may_not_be_opened)
{
    ck_assert_int_eq(chmod("/dev/infiniband/uverbs0", 0600), 0);
    ck_assert_int_eq(setuid(65534), 0);
    expect_not_found(options_for(address_a()), 0, "read and write access to the nodes in /dev/infiniband");
}
END_TEST

START_TEST(opened_device_tells_its_limits)
{
    struct tl_verbs_options options = options_for(address_a());
    struct tl_provider *provider = NULL;
    struct tl_error error = {0};
    options.max_write_bytes = 65536;
    ck_assert_int_eq(tl_verbs_open(&options, 0, &provider, &error), TL_OK);
    ck_assert_uint_eq(provider->limits.max_write_bytes, 65536);
    ck_assert(provider->limits.has_windows);
    ck_assert(provider->limits.needs_regions);
    ck_assert_str_eq(provider->name, "rxe0:1");
    ck_assert_ptr_nonnull(strstr(provider->reason, "its GID is the worker's address"));
    provider->ops->close(provider);
    options.max_write_bytes = 0;
    ck_assert_int_eq(tl_verbs_open(&options, 0, &provider, &error), TL_OK);
    ck_assert_uint_eq(provider->limits.max_write_bytes, 8 * MIB);
    provider->ops->close(provider);
}
END_TEST

START_TEST(memlock_is_named_when_registering)
{
    struct rlimit limit = {MIB, MIB};
    struct tl_region *region;
    struct tl_error error = {0};
    uint8_t *memory = map_memory(4 * MIB);
    a.provider = open_at(address_a(), TL_KEYS_WINDOW);
    ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    ck_assert_int_eq(setuid(65534), 0);
    enum tl_status status = tl_region_create(a.provider, memory, 4 * MIB, TL_REGION_WRITE, &region, &error);
    ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(error.message, "ulimit -l unlimited") != NULL, "%s", error.message);
    a.provider->ops->close(a.provider);
    munmap(memory, 4 * MIB);
}
END_TEST

START_TEST(memory_that_cannot_be_registered)
{
    struct tl_region *region;
    struct tl_error error = {0};
    uint8_t *memory = map_memory(MIB);
    a.provider = open_at(address_a(), TL_KEYS_WINDOW);
    munmap(memory, MIB);
    ck_assert_int_eq(tl_region_create(a.provider, memory, MIB, TL_REGION_WRITE, &region, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_region_create(a.provider, memory, 0, TL_REGION_WRITE, &region, &error), TL_INVALID_ARGUMENT);
    a.provider->ops->close(a.provider);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ limits -- */

START_TEST(keys_that_the_device_was_not_opened_for)
{
    struct tl_queue_pair_options options = {.slot_count = 4, .work_count = 4, .keys = TL_KEYS_REGION};
    struct tl_queue_pair *pair = NULL;
    struct tl_error error = {0};
    open_both(TL_KEYS_WINDOW);
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, &error), TL_UNIMPLEMENTED);
    options.keys = TL_KEYS_WINDOW;
    options.work_count = 16385;
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "verbs.queue_depth"));
    close_both();
}
END_TEST

START_TEST(completion_queue_is_never_overrun)
{
    struct tl_queue_pair_options options = {.slot_count = 16000, .work_count = 16000, .keys = TL_KEYS_WINDOW};
    struct tl_queue_pair *pair = NULL, *other = NULL;
    struct tl_error error = {0};
    open_both(TL_KEYS_WINDOW);
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &pair, &error), TL_OK);
    options.slot_count = options.work_count = 400;
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &other, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(error.message, "completions") != NULL, "%s", error.message);
    pair->ops->destroy(pair);
    ck_assert_int_eq(tl_queue_pair_create(a.provider, &options, &side_events, &a, &other, &error), TL_OK);
    other->ops->destroy(other);
    close_both();
}
END_TEST

/* More completions come than the queue had space for at first. */
START_TEST(completion_queue_grows)
{
    enum { PAIRS = 20, EACH = 60 };
    static struct side as[PAIRS], bs[PAIRS];
    unsigned messages = 0, drained = 0;
    open_both(TL_KEYS_WINDOW);
    struct tl_provider *provider_a = a.provider, *provider_b = b.provider;
    for (unsigned i = 0; i < PAIRS; i++) {
        struct tl_queue_pair_options options = {.slot_count = 64, .work_count = 64, .keys = TL_KEYS_WINDOW};
        struct tl_pair_address from_a, from_b;
        as[i] = (struct side){.provider = provider_a};
        bs[i] = (struct side){.provider = provider_b};
        ck_assert_int_eq(tl_queue_pair_create(provider_a, &options, &side_events, &as[i], &as[i].pair, NULL), TL_OK);
        ck_assert_int_eq(tl_queue_pair_create(provider_b, &options, &side_events, &bs[i], &bs[i].pair, NULL), TL_OK);
        as[i].pair->ops->get_address(as[i].pair, &from_a);
        bs[i].pair->ops->get_address(bs[i].pair, &from_b);
        ck_assert_int_eq(as[i].pair->ops->connect(as[i].pair, &from_b, NULL), TL_OK);
        ck_assert_int_eq(bs[i].pair->ops->connect(bs[i].pair, &from_a, NULL), TL_OK);
    }
    for (unsigned i = 0; i < PAIRS * EACH; i++)
        send_text(&as[i % PAIRS], "x", NULL);
    while (messages < PAIRS * EACH) {
        provider_a->ops->poll(provider_a);
        provider_b->ops->poll(provider_b);
        messages = 0;
        for (unsigned i = 0; i < PAIRS; i++) {
            messages += bs[i].messages;
            ck_assert_msg(as[i].broken + bs[i].broken == 0, "%s, %s", as[i].reason.message, bs[i].reason.message);
        }
    }
    for (unsigned i = 0; i < PAIRS; i++) {
        side_disconnect(&as[i]);
        side_disconnect(&bs[i]);
    }
    while (drained < 2 * PAIRS) {
        provider_a->ops->poll(provider_a);
        provider_b->ops->poll(provider_b);
        drained = 0;
        for (unsigned i = 0; i < PAIRS; i++)
            drained += as[i].drained + bs[i].drained;
    }
    for (unsigned i = 0; i < PAIRS; i++) {
        as[i].pair->ops->destroy(as[i].pair);
        bs[i].pair->ops->destroy(bs[i].pair);
    }
    close_both();
}
END_TEST

/* Returns the kernel's count of queue pairs, memory regions and completion queues. */
static void count_resources(char *ret_text, size_t capacity)
{
    FILE *pipe = popen("rdma resource show link rxe0 2> /dev/null; rdma resource show rxe0", "r");
    size_t len = fread(ret_text, 1, capacity - 1, pipe);
    ret_text[len] = '\0';
    pclose(pipe);
}

START_TEST(nothing_leaks)
{
    char before[1024], after[1024];
    unsigned descriptors = count_descriptors();
    count_resources(before, sizeof(before));
    ck_assert_ptr_nonnull(strstr(before, "qp"));
    open_both(TL_KEYS_WINDOW);
    for (unsigned i = 0; i < 200; i++) {
        side_create(&a, 16, 32, TL_KEYS_WINDOW);
        side_create(&b, 16, 32, TL_KEYS_WINDOW);
        sides_connect();
        send_text(&a, "hello", NULL);
        if (i % 3 == 0) PUMP_UNTIL(b.messages == 1);
        destroy_both();
    }
    close_both();
    count_resources(after, sizeof(after));
    ck_assert_str_eq(before, after);
    ck_assert_uint_eq(count_descriptors(), descriptors);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_device");
    TCase *tests = tcase_create("tests");
    tcase_set_timeout(tests, 90);
    tcase_add_test(tests, candidates_follow_from_the_address);
    tcase_add_test(tests, candidates_of_a_named_device);
    tcase_add_test(tests, what_cannot_be_opened_says_why);
    tcase_add_test(tests, nodes_that_are_missing);
    tcase_add_test(tests, library_that_is_missing);
    tcase_add_test(tests, nodes_that_may_not_be_opened);
    tcase_add_test(tests, opened_device_tells_its_limits);
    tcase_add_test(tests, memlock_is_named_when_registering);
    tcase_add_test(tests, memory_that_cannot_be_registered);
    tcase_add_test(tests, keys_that_the_device_was_not_opened_for);
    tcase_add_test(tests, completion_queue_is_never_overrun);
    tcase_add_test(tests, completion_queue_grows);
    tcase_add_test(tests, nothing_leaks);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
