// SPDX-License-Identifier: Apache-2.0
/* The beginning of programs that test groups of receives and sends: two workers, over gRPC, within a host, or with a
 * fake card each; and the items of a group. */
#ifndef FAKES_GROUP_CASE_H
#define FAKES_GROUP_CASE_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/cluster.h"
#include "fakes/fake_transport.h"
#include "fakes/run_suite.h"

#define KEY_BYTES 24
#define VALUE_BYTES 96

static struct cluster cluster;
static struct fake_transport transport;
static bool has_cards;
static struct tl_cq *cq;
static struct tl_error error;

static struct tl_worker *open_task(unsigned task)
{
    return has_cards ? fake_transport_open(&transport, task, cluster.progress) : cluster_open(&cluster, task);
}

static void open_pair(const char *protocol)
{
    cluster_init(&cluster, 3, "\"limits\": {\"waiting\": 200000}, \"timeouts\": {\"connect\": \"1s\"}");
    has_cards = strcmp(protocol, "verbs") == 0;
    if (has_cards) {
        fake_transport_init(&transport, &cluster);
    } else {
        cluster.protocol = protocol;
    }
    open_task(0);
    open_task(1);
    cq = cluster_cq();
}

static void setup_grpc(void)
{
    open_pair("grpc");
}

static void setup_local(void)
{
    open_pair("auto");
}

static void setup_verbs(void)
{
    open_pair("verbs");
}

static void teardown(void)
{
    if (cluster.workers[1] != NULL) cluster_close(&cluster, 1);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    if (has_cards) fake_transport_fini(&transport);
}

/* Items "k0" and so on of step 1; user_data is the place. */
struct items {
    struct tl_recv_item *items;
    char (*keys)[KEY_BYTES];
    size_t count;
};

static inline struct items make_items(size_t count)
{
    struct items made = {.items = calloc(count + 1, sizeof(*made.items)), .count = count};
    made.keys = calloc(count + 1, sizeof(*made.keys));
    for (size_t i = 0; i < count; i++) {
        snprintf(made.keys[i], KEY_BYTES, "k%zu", i);
        made.items[i] = (struct tl_recv_item){.key = made.keys[i], .step = 1, .user_data = (void *)i};
    }
    return made;
}

static inline void free_items(struct items *made)
{
    free(made->items);
    free(made->keys);
}

static inline struct tl_recv_many_options group_options(void)
{
    return (struct tl_recv_many_options){.size_bytes = sizeof(struct tl_recv_many_options),
                                         .item_bytes = sizeof(struct tl_recv_item)};
}

/* Worker 1 asks for the items from worker `from`. */
static inline tl_op_id ask_from(unsigned from, const struct items *made, const struct tl_recv_many_options *options)
{
    tl_op_id id;
    enum tl_status status = tl_recv_many(cluster.workers[1], cluster_peer(cluster.workers[1], from), made->items,
                                         made->count, options, CLUSTER_LONG, cq, &cluster, &id, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return id;
}

static inline tl_op_id ask(const struct items *made, const struct tl_recv_many_options *options)
{
    return ask_from(0, made, options);
}

/* Worker `by` publishes the items from `first` on, each with a pattern of its own. */
static inline void publish_from(unsigned by, size_t first, size_t count)
{
    struct tl_send_item *items = calloc(count + 1, sizeof(*items));
    struct items made = make_items(first + count);
    for (size_t i = 0; i < count; i++)
        items[i] = (struct tl_send_item){
            .key = made.keys[first + i], .step = 1, .tensor = cluster_tensor(VALUE_BYTES, (unsigned)(first + i))};
    size_t published;
    ck_assert_int_eq(tl_publish_many(cluster.workers[by], items, count, sizeof(*items), &published, &error), TL_OK);
    ck_assert_uint_eq(published, count);
    for (size_t i = 0; i < count; i++)
        tl_tensor_put(items[i].tensor);
    free(items);
    free_items(&made);
}

static inline void publish_values(size_t first, size_t count)
{
    publish_from(0, first, count);
}

/* Checks the completion of a member, and puts its tensor. */
static inline void check_member(const struct tl_completion *completion, tl_op_id group)
{
    size_t place = completion->item;
    ck_assert_int_eq(completion->kind, TL_OP_RECV);
    ck_assert_msg(completion->status.code == TL_OK, "%s", completion->status.message);
    ck_assert_uint_eq(completion->op, group + 1 + place);
    ck_assert_uint_eq((size_t)completion->user_data, place);
    ck_assert(cluster_tensor_is(completion->tensor, VALUE_BYTES, (unsigned)place));
    tl_tensor_put(completion->tensor);
}

/* Checks the completion of the group, and that nothing comes after it. */
static inline void check_group(const struct tl_completion *completion, tl_op_id group, enum tl_status status,
                               uint64_t ok_count, uint64_t failed_count)
{
    ck_assert_int_eq(completion->kind, TL_OP_RECV_MANY);
    ck_assert_msg(completion->status.code == status, "%s", completion->status.message);
    ck_assert_uint_eq(completion->op, group);
    ck_assert_ptr_eq(completion->user_data, &cluster);
    ck_assert_ptr_null(completion->tensor);
    ck_assert_uint_eq(completion->ok_count, ok_count);
    ck_assert_uint_eq(completion->failed_count, failed_count);
}

static inline void expect_members(tl_op_id group, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct tl_completion completion = cluster_next(cq);
        check_member(&completion, group);
    }
}

static inline void expect_failed(size_t count, enum tl_status status)
{
    for (size_t i = 0; i < count; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_int_eq(completion.kind, TL_OP_RECV);
        ck_assert_msg(completion.status.code == status, "%s", completion.status.message);
        ck_assert_ptr_null(completion.tensor);
    }
}

static inline void expect_group(tl_op_id group, enum tl_status status, uint64_t ok_count, uint64_t failed_count)
{
    struct tl_completion completion = cluster_next(cq);
    check_group(&completion, group, status, ok_count, failed_count);
}

static inline void wait_for_waiting(unsigned owner, uint64_t count)
{
    CLUSTER_UNTIL(cluster_stats(cluster.workers[owner]).waiting_receivers == count);
}

static inline void no_operation_is_open(unsigned worker)
{
    CLUSTER_UNTIL(cluster_stats(cluster.workers[worker]).open_operations == 0);
}

/* Runs the case over each of the ways on which two workers exchange tensors. */
static inline void add_cases(Suite *suite, void (*add)(TCase *tcase))
{
    static const struct {
        const char *name;
        void (*setup)(void);
    } ways[] = {{"grpc", setup_grpc}, {"local", setup_local}, {"verbs", setup_verbs}};
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        TCase *tcase = tcase_create(ways[i].name);
        tcase_add_checked_fixture(tcase, ways[i].setup, teardown);
        tcase_set_timeout(tcase, 300);
        add(tcase);
        suite_add_tcase(suite, tcase);
    }
}

#endif
