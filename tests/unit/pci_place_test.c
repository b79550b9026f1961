// SPDX-License-Identifier: Apache-2.0
/* How far devices are from each other, in a tree like that of the kernel. */
#include "server/pci_place.h"

#include <check.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

/* Makes all folders of a path below the test's folder. */
static void make_folders(const char *path)
{
    char whole[1024];
    snprintf(whole, sizeof(whole), "%s", temp_path(path));
    for (char *slash = strchr(whole + strlen(temp_folder) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(whole, 0700);
        *slash = '/';
    }
    (void)mkdir(whole, 0700);
}

/* A device of the kernel, to which another path leads. */
static void make_device(const char *folder, int numa_node, const char *link)
{
    char path[512], parent[512];
    snprintf(path, sizeof(path), "devices/%s", folder);
    make_folders(path);
    snprintf(path, sizeof(path), "devices/%s/numa_node", folder);
    FILE *file = fopen(temp_path(path), "we");
    ck_assert_ptr_nonnull(file);
    fprintf(file, "%d\n", numa_node);
    fclose(file);
    snprintf(parent, sizeof(parent), "%s", link);
    *strrchr(parent, '/') = '\0';
    make_folders(parent);
    snprintf(path, sizeof(path), "devices/%s", folder);
    ck_assert_int_eq(symlink(temp_path(path), temp_path(link)), 0);
}

static void make_card(const char *name, const char *folder, int numa_node)
{
    char link[128];
    snprintf(link, sizeof(link), "class/infiniband/%s/device", name);
    make_device(folder, numa_node, link);
}

static void setup(void)
{
    temp_folder_make();
    make_device("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:10.0/0000:3d:00.0", 1, "bus/pci/devices/0000:3d:00.0");
    make_device("pci0000:5d/0000:5d:00.0/0000:5e:00.0", -1, "bus/pci/devices/0000:5e:00.0");
    make_card("near", "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:14.0/0000:3f:00.0", 1);
    make_card("port", "pci0000:3a/0000:3a:00.0/0000:3b:00.1", 1);
    make_card("bridge", "pci0000:3a/0000:3a:02.0/0000:40:00.0", 1);
    make_card("similar", "pci0000:3a/0000:3a:00/0000:40:00.0", 1);
    make_card("node", "pci0000:80/0000:80:00.0/0000:81:00.0", 1);
    make_card("far", "pci0000:10/0000:10:00.0/0000:11:00.0", 0);
    make_card("lost", "pci0000:20/0000:20:00.0/0000:21:00.0", -1);
    make_card("soft", "virtual/net/rxe", 1);
    make_card("arm", "platform/14100000.pcie/pci0000:3a/0000:3a:00.0/0000:3b:00.0", 1);
}

static const struct {
    const char *card;
    const char *distance;
} cases[] = {
    {"near", "switch"},    {"port", "switch"},   {"bridge", "host bridge"}, {"similar", "host bridge"},
    {"node", "NUMA node"}, {"far", "across"},    {"lost", "unknown"},       {"soft", "unknown"},
    {"none", "unknown"},   {"arm", "NUMA node"},
};

START_TEST(distance)
{
    enum tl_pci_distance found = tl_pci_distance_to_card(temp_folder, "0000:3d:00.0", cases[_i].card);
    ck_assert_str_eq(tl_pci_distance_name(found), cases[_i].distance);
}
END_TEST

START_TEST(what_is_not_known)
{
    ck_assert_int_eq(tl_pci_numa_node(temp_folder, "0000:3d:00.0"), 1);
    ck_assert_int_eq(tl_pci_numa_node(temp_folder, "0000:5e:00.0"), -1);
    ck_assert_int_eq(tl_pci_numa_node(temp_folder, "0000:99:00.0"), -1);
    ck_assert_int_eq(tl_pci_numa_node(temp_folder, ""), -1);
    ck_assert_int_eq(tl_pci_numa_node("/nowhere", "0000:3d:00.0"), -1);
    ck_assert_int_eq(tl_pci_distance_to_card(temp_folder, "", "near"), TL_PCI_UNKNOWN);
    ck_assert_int_eq(tl_pci_distance_to_card(temp_folder, "0000:5e:00.0", "far"), TL_PCI_UNKNOWN);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("pci_place");
    TCase *tcase = tcase_create("pci_place");
    tcase_add_checked_fixture(tcase, setup, temp_folder_remove);
    tcase_add_loop_test(tcase, distance, 0, TL_ARRAY_COUNT(cases));
    tcase_add_test(tcase, what_is_not_known);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
