// SPDX-License-Identifier: Apache-2.0
/*
 * tl_groups serve: the owner of the workloads of a set.
 *
 * Publishes all tensors, offers those that are also sent a few steps ahead, prints "ready PID", and offers the next
 * step whenever one was received: of a tensor, or of the whole workload when it is sent in groups. Ends with its
 * standard input.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/bench/groups/groups.h"

/* A workload as its owner has it. */
struct stock {
    size_t count;
    char (*keys)[GROUPS_KEY_BYTES];
    struct groups_item *items; /* those that are offered next; user_data of an item is the item itself */
};

struct owner {
    struct tl_worker *worker;
    struct tl_cq *cq;
    enum groups_how how;
    struct stock *stocks; /* [groups_workload_count], without count for those of other sets */
};

static void publish(struct owner *owner, struct stock *stock, const struct groups_workload *workload)
{
    struct tl_error error;
    uint64_t *sizes = groups_sizes(workload);
    stock->count = workload->count;
    stock->keys = groups_allocate(stock->count, sizeof(*stock->keys));
    stock->items = groups_allocate(stock->count, sizeof(*stock->items));
    for (size_t i = 0; i < stock->count; i++) {
        struct groups_item *item = &stock->items[i];
        groups_key(workload, i, stock->keys[i]);
        *item =
            (struct groups_item){stock->keys[i], GROUPS_FIRST_STEP, groups_create_tensor(TL_U8, 1, &sizes[i], i), item};
        groups_check(tl_publish(owner->worker, item->key, 0, item->tensor, &error), item->key, &error);
    }
    free(sizes);
}

static void offer_all(struct owner *owner, struct stock *stock)
{
    groups_send(owner->worker, owner->how, stock->items, stock->count, owner->cq, stock);
    for (size_t i = 0; i < stock->count; i++)
        stock->items[i].step++;
}

static void offer_again(void *context, const struct tl_completion *completions, size_t count)
{
    struct owner *owner = context;
    for (size_t i = 0; i < count; i++) {
        groups_check(completions[i].status.code, "a send", &completions[i].status);
        if (groups_is_end(&completions[i])) {
            offer_all(owner, completions[i].user_data);
            continue;
        }
        struct groups_item *item = completions[i].user_data;
        groups_send(owner->worker, GROUPS_SINGLE, item, 1, owner->cq, NULL);
        item->step++;
    }
}

static void start(struct owner *owner, const char *set)
{
    bool is_known = false;
    owner->stocks = groups_allocate(groups_workload_count, sizeof(*owner->stocks));
    for (size_t i = 0; i < groups_workload_count; i++) {
        const struct groups_workload *workload = &groups_workloads[i];
        if (strcmp(workload->set, set) != 0) continue;
        is_known = true;
        publish(owner, &owner->stocks[i], workload);
        for (int j = 0; workload->is_sent && j < GROUPS_AHEAD_COUNT; j++)
            offer_all(owner, &owner->stocks[i]);
    }
    if (!is_known) groups_die(set, "no workload is in a set of this name");
}

static void stop(struct owner *owner)
{
    tl_worker_close(owner->worker, 0);
    tl_cq_destroy(owner->cq);
    for (size_t i = 0; i < groups_workload_count; i++) {
        struct stock *stock = &owner->stocks[i];
        for (size_t j = 0; j < stock->count; j++)
            tl_tensor_put(stock->items[j].tensor);
        free(stock->items);
        free(stock->keys);
    }
    free(owner->stocks);
}

int groups_serve(const char *config, enum groups_how how, const char *set)
{
    struct owner owner = {.how = how};
    struct tl_error error;
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_path = config, .job = "ps"};
    groups_check(tl_worker_open(&options, &owner.worker, &error), "open", &error);
    groups_check(tl_cq_create(&owner.cq, &error), "create a completion queue", &error);
    start(&owner, set);
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    groups_run(owner.cq, offer_again, &owner);
    stop(&owner);
    return EXIT_SUCCESS;
}
