// SPDX-License-Identifier: Apache-2.0
/*
 * Asking and offering, one by one or in groups. What older libraries do not have is used only here, with TL_HAS_GROUPS,
 * and in subscription.c. That the items of a group are put together counts, because a user must do that, too.
 */
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/bench/groups/groups.h"

#ifdef TL_HAS_GROUPS
static tl_op_id receive_many(struct tl_worker *worker, tl_peer_id peer, const struct groups_item *items, size_t count,
                             struct tl_cq *cq, void *user_data)
{
    struct tl_recv_item *asked = groups_allocate(count, sizeof(*asked));
    for (size_t i = 0; i < count; i++) {
        asked[i].key = items[i].key;
        asked[i].step = items[i].step;
        asked[i].destination = items[i].tensor;
        asked[i].user_data = items[i].user_data;
    }
    const struct tl_recv_many_options options = {.size_bytes = sizeof(options), .item_bytes = sizeof(*asked)};
    struct tl_error error;
    tl_op_id group;
    groups_check(tl_recv_many(worker, peer, asked, count, &options, TL_TIMEOUT_DEFAULT, cq, user_data, &group, &error),
                 "receive a group", &error);
    free(asked);
    return group + count;
}

static void send_many(struct tl_worker *worker, const struct groups_item *items, size_t count, struct tl_cq *cq,
                      void *user_data)
{
    struct tl_send_item *offered = groups_allocate(count, sizeof(*offered));
    for (size_t i = 0; i < count; i++) {
        offered[i].key = items[i].key;
        offered[i].step = items[i].step;
        offered[i].tensor = items[i].tensor;
    }
    const struct tl_send_many_options options = {
        .size_bytes = sizeof(options), .item_bytes = sizeof(*offered), .is_quiet = true};
    struct tl_error error;
    tl_op_id group;
    groups_check(tl_send_many(worker, offered, count, &options, TL_TIMEOUT_NONE, cq, user_data, &group, &error),
                 "send a group", &error);
    free(offered);
}

bool groups_is_end(const struct tl_completion *completion)
{
    return completion->kind == TL_OP_RECV_MANY || completion->kind == TL_OP_SEND_MANY;
}

static size_t wait_many(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, size_t min_count)
{
    return tl_cq_wait_many(cq, ret_completions, capacity, min_count, TL_TIMEOUT_NONE);
}
#else
static tl_op_id receive_many(struct tl_worker *worker, tl_peer_id peer, const struct groups_item *items, size_t count,
                             struct tl_cq *cq, void *user_data)
{
    (void)worker, (void)peer, (void)items, (void)count, (void)cq, (void)user_data;
    groups_die("receive a group", "this library has no groups");
}

static void send_many(struct tl_worker *worker, const struct groups_item *items, size_t count, struct tl_cq *cq,
                      void *user_data)
{
    (void)worker, (void)items, (void)count, (void)cq, (void)user_data;
    groups_die("send a group", "this library has no groups");
}

bool groups_is_end(const struct tl_completion *completion)
{
    (void)completion;
    return false;
}

static size_t wait_many(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, size_t min_count)
{
    (void)cq, (void)ret_completions, (void)capacity, (void)min_count;
    groups_die("wait for a group", "this library has no groups");
}
#endif

size_t groups_wait(struct tl_cq *cq, enum groups_how how, struct tl_completion *ret_completions, size_t capacity,
                   size_t group_count)
{
    if (how == GROUPS_MANY) return wait_many(cq, ret_completions, capacity, group_count);
    return tl_cq_wait(cq, ret_completions, capacity, TL_TIMEOUT_NONE);
}

tl_op_id groups_receive(struct tl_worker *worker, tl_peer_id peer, enum groups_how how, const struct groups_item *items,
                        size_t count, struct tl_cq *cq, void *user_data)
{
    if (how == GROUPS_MANY) return receive_many(worker, peer, items, count, cq, user_data);
    struct tl_error error;
    tl_op_id op = 0;
    for (size_t i = 0; i < count; i++) {
        const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = items[i].tensor};
        groups_check(tl_recv(worker, peer, items[i].key, items[i].step, &options, TL_TIMEOUT_DEFAULT, cq,
                             items[i].user_data, &op, &error),
                     items[i].key, &error);
    }
    return op;
}

void groups_send(struct tl_worker *worker, enum groups_how how, const struct groups_item *items, size_t count,
                 struct tl_cq *cq, void *user_data)
{
    if (how == GROUPS_MANY) {
        send_many(worker, items, count, cq, user_data);
        return;
    }
    struct tl_error error;
    tl_op_id op;
    for (size_t i = 0; i < count; i++)
        groups_check(tl_send(worker, items[i].key, items[i].step, items[i].tensor, TL_TIMEOUT_NONE, cq,
                             items[i].user_data, &op, &error),
                     items[i].key, &error);
}

void groups_run(struct tl_cq *cq, void (*handle)(void *owner, const struct tl_completion *completions, size_t count),
                void *owner)
{
    struct pollfd polled[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = tl_cq_fd(cq), .events = POLLIN}};
    struct tl_completion completions[GROUPS_COMPLETION_COUNT];
    for (;;) {
        size_t count;
        poll(polled, GROUPS_COUNT(polled), -1);
        if (polled[0].revents) return;
        if (!polled[1].revents) continue;
        while ((count = tl_cq_poll(cq, completions, GROUPS_COMPLETION_COUNT)) > 0)
            handle(owner, completions, count);
    }
}
