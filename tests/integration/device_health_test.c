// SPDX-License-Identifier: Apache-2.0
/* A worker whose process loses a GPU lives on, and `tensorlane health` says what has become of it. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

static struct cluster cluster;
static struct tl_error error;
static char output[16384];

static void setup(void)
{
    char json[CLUSTER_JSON_BYTES];
    setup_cuda();
    temp_folder_make();
    cluster_init(&cluster, 2, NULL);
    cluster_open_all(&cluster);
    cluster_write_json(&cluster, json);
    FILE *file = fopen(temp_path("cluster.json"), "we");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_ge(fputs(json, file), 0);
    ck_assert_int_eq(fclose(file), 0);
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    temp_folder_remove();
}

/* Runs health from outside of the process. Returns its exit status. */
static int run_health(const char *flag)
{
    char command[2048];
    snprintf(command, sizeof(command), "%s health -connect-timeout 60s -rpc-timeout 60s --quick %s --config %s",
             getenv("TENSORLANE"), flag, temp_path("cluster.json"));
    FILE *program = popen(command, "re");
    ck_assert_ptr_nonnull(program);
    output[fread(output, 1, sizeof(output) - 1, program)] = '\0';
    return pclose(program);
}

static void expect_output(const char *text)
{
    ck_assert_msg(strstr(output, text) != NULL, "no \"%s\" in:\n%s", text, output);
}

START_TEST(a_device_is_lost)
{
    struct tl_tensor *tensor = bytes_on(gpu1, 100), *on_host = bytes_on(host, 100), *sent = cluster_tensor(100, 3);
    copy(on_host, tensor);
    ck_assert_int_eq(run_health("--json"), 0);
    expect_output("\"troubles\": []");
    cuda->break_device(1, 700);
    ck_assert_int_eq(tl_tensor_copy(on_host, tensor, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_ne(run_health("--json"), 0);
    expect_output("\"stage\": \"serving\"");
    expect_output("\"reason\": \"gpu:1 is lost: ");
    expect_output("(CUDA error 700)\"");
    expect_output("\"what\": \"device\"");
    expect_output("\"remedy\": \"start the worker's process anew; ");
    ck_assert_int_ne(run_health(""), 0);
    expect_output("gpu:1 is lost: ");
    expect_output("NVRM: Xid");
    /* The workers go on. */
    struct tl_cq *cq = cluster_cq();
    cluster_send(cluster.workers[0], "t", 0, sent, cq);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "t", 0));
    cluster_expect(cq, TL_OK);
    tl_cq_destroy(cq);
    tl_tensor_put(sent);
    tl_tensor_put(tensor);
    tl_tensor_put(on_host);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_health");
    TCase *tcase = tcase_create("device_health");
    if (!getenv("TENSORLANE") || getenv("TENSORLANE")[0] == '\0') {
        printf("the program tensorlane was not built\n");
        return 77;
    }
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, a_device_is_lost);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
