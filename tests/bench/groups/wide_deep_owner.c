// SPDX-License-Identifier: Apache-2.0
/*
 * tl_groups serve with the set "wide-deep": the owner of the embeddings and dense layers.
 *
 * Publishes the dense layers, prints "ready PID", and asks each worker for the ids and gradients of its next step. When
 * ids of a column have arrived, it sends the column's two embeddings; in groups, those of all columns that have arrived
 * at the same time. Embeddings are not looked up: that costs the same however they travel. What comes in the first step
 * is compared with what was sent. A worker that goes away ends what it was asked for, and is not asked again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/bench/groups/groups.h"

struct trainer;

/* A tensor that a worker sends in each step. */
struct upload {
    struct trainer *trainer;
    uint64_t step; /* that it was asked for, or will be asked for next */
    char key[GROUPS_KEY_BYTES];
};

/* Uploads that are asked for together: all ids, or all gradients. */
struct upload_group {
    struct trainer *trainer;
    size_t first, count;
};

/* A worker as its owner has it. */
struct trainer {
    size_t number;
    tl_peer_id peer;
    struct upload uploads[WIDE_DEEP_UP_COUNT];
    struct upload_group ids, gradients;
    struct tl_tensor *embeddings[WIDE_DEEP_EMBEDDING_COUNT];
    char embedding_keys[WIDE_DEEP_EMBEDDING_COUNT][GROUPS_KEY_BYTES];
    struct groups_item ready[WIDE_DEEP_EMBEDDING_COUNT]; /* embeddings whose ids came with the latest completions */
    size_t ready_count;
};

struct owner {
    struct tl_worker *worker;
    struct tl_cq *cq;
    enum groups_how how;
    struct trainer trainers[WIDE_DEEP_WORKER_COUNT];
};

static void ask(struct owner *owner, struct trainer *trainer, size_t first, size_t count, struct upload_group *group)
{
    struct groups_item items[WIDE_DEEP_UP_COUNT];
    for (size_t i = 0; i < count; i++) {
        struct upload *upload = &trainer->uploads[first + i];
        items[i] = (struct groups_item){.key = upload->key, .step = upload->step, .user_data = upload};
    }
    groups_receive(owner->worker, trainer->peer, group ? owner->how : GROUPS_SINGLE, items, count, owner->cq, group);
}

/* The two embeddings of a column can be sent. */
static void make_ready(struct trainer *trainer, size_t column, uint64_t step)
{
    for (size_t place = column; place < WIDE_DEEP_EMBEDDING_COUNT; place += WIDE_DEEP_COLUMN_COUNT)
        trainer->ready[trainer->ready_count++] = (struct groups_item){
            .key = trainer->embedding_keys[place], .step = step, .tensor = trainer->embeddings[place]};
}

static void send_ready(struct owner *owner, struct trainer *trainer)
{
    if (trainer->ready_count == 0) return;
    groups_send(owner->worker, owner->how, trainer->ready, trainer->ready_count, owner->cq, NULL);
    trainer->ready_count = 0;
}

static void take_upload(struct owner *owner, const struct tl_completion *completion)
{
    struct upload *upload = completion->user_data;
    struct trainer *trainer = upload->trainer;
    size_t place = (size_t)(upload - trainer->uploads);
    wide_deep_check_up(completion->tensor, place);
    if (upload->step == GROUPS_FIRST_STEP)
        groups_check_contents(completion->tensor, wide_deep_up_seed(trainer->number, place), upload->key);
    tl_tensor_put(completion->tensor);
    if (place < WIDE_DEEP_COLUMN_COUNT) make_ready(trainer, place, upload->step);
    upload->step++;
    if (owner->how == GROUPS_MANY) return;
    send_ready(owner, trainer);
    ask(owner, trainer, place, 1, NULL);
}

static void handle(void *context, const struct tl_completion *completions, size_t count)
{
    struct owner *owner = context;
    for (size_t i = 0; i < count; i++) {
        if (completions[i].status.code == TL_CANCELLED) continue;
        groups_check(completions[i].status.code, WIDE_DEEP, &completions[i].status);
        if (completions[i].kind == TL_OP_RECV) {
            take_upload(owner, &completions[i]);
        } else if (groups_is_end(&completions[i]) && completions[i].user_data) {
            struct upload_group *group = completions[i].user_data;
            ask(owner, group->trainer, group->first, group->count, group);
        }
    }
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++)
        send_ready(owner, &owner->trainers[i]);
}

/* --------------------------------------------------------------------------------------------------------- setup -- */

static void publish_dense(struct owner *owner)
{
    for (size_t place = WIDE_DEEP_EMBEDDING_COUNT; place < WIDE_DEEP_DOWN_COUNT; place++) {
        char key[GROUPS_KEY_BYTES];
        struct tl_error error;
        struct tl_tensor *tensor = wide_deep_create_down(0, place);
        wide_deep_down_key(0, place, key);
        groups_check(tl_publish(owner->worker, key, 0, tensor, &error), key, &error);
        tl_tensor_put(tensor);
    }
}

static void start_trainer(struct owner *owner, struct trainer *trainer, size_t number)
{
    char name[32];
    struct tl_error error;
    trainer->number = number;
    snprintf(name, sizeof(name), "/job:worker/task:%zu", number);
    groups_check(tl_worker_find_peer(owner->worker, name, &trainer->peer, &error), name, &error);
    for (size_t place = 0; place < WIDE_DEEP_EMBEDDING_COUNT; place++) {
        trainer->embeddings[place] = wide_deep_create_down(number, place);
        wide_deep_down_key(number, place, trainer->embedding_keys[place]);
    }
    for (size_t place = 0; place < WIDE_DEEP_UP_COUNT; place++) {
        trainer->uploads[place].trainer = trainer;
        trainer->uploads[place].step = GROUPS_FIRST_STEP;
        wide_deep_up_key(place, trainer->uploads[place].key);
    }
    trainer->ids = (struct upload_group){trainer, 0, WIDE_DEEP_COLUMN_COUNT};
    trainer->gradients = (struct upload_group){trainer, WIDE_DEEP_COLUMN_COUNT, WIDE_DEEP_GRADIENT_COUNT};
    ask(owner, trainer, trainer->ids.first, trainer->ids.count, &trainer->ids);
    ask(owner, trainer, trainer->gradients.first, trainer->gradients.count, &trainer->gradients);
}

int wide_deep_serve(const char *config, enum groups_how how)
{
    struct owner owner = {.how = how};
    struct tl_error error;
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_path = config, .job = "ps"};
    groups_check(tl_worker_open(&options, &owner.worker, &error), "open", &error);
    groups_check(tl_cq_create(&owner.cq, &error), "create a completion queue", &error);
    publish_dense(&owner);
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++)
        start_trainer(&owner, &owner.trainers[i], i);
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    groups_run(owner.cq, handle, &owner);
    tl_worker_close(owner.worker, 0);
    tl_cq_destroy(owner.cq);
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++)
        for (size_t place = 0; place < WIDE_DEEP_EMBEDDING_COUNT; place++)
            tl_tensor_put(owner.trainers[i].embeddings[place]);
    return EXIT_SUCCESS;
}
