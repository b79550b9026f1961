// SPDX-License-Identifier: Apache-2.0
/*
 * tl_groups pull with the set "wide-deep": five workers of the cluster, each with a thread of this program.
 *
 * In a step a worker asks for the embeddings and the dense layers, sends its ids, waits until all that it asked for is
 * there, sends its gradients, and waits until the owner has everything. A command's count is the steps of each worker.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/groups/groups.h"

struct trainer {
    struct tl_worker *worker;
    struct tl_cq *cq;
    tl_peer_id owner;
    enum groups_how how;
    size_t number;
    uint64_t step;
    uint64_t step_count; /* steps that the command asks for */
    struct groups_item up[WIDE_DEEP_UP_COUNT];
    struct groups_item down[WIDE_DEEP_DOWN_COUNT]; /* user_data of an item is the item itself */
    char up_keys[WIDE_DEEP_UP_COUNT][GROUPS_KEY_BYTES];
    char down_keys[WIDE_DEEP_DOWN_COUNT][GROUPS_KEY_BYTES];
    struct tl_tensor *received[WIDE_DEEP_DOWN_COUNT]; /* in the latest step; NULL: none yet */
    size_t missing_count;                             /* tensors that were asked for in this step and have not come */
    size_t open_count;                                /* completions that have not come, of tensors and groups */
    uint64_t grpc_count;
};

/* -------------------------------------------------------------------------------------------------------- a step -- */

static void take(struct trainer *trainer, const struct tl_completion *completion)
{
    groups_check(completion->status.code, WIDE_DEEP, &completion->status);
    trainer->open_count--;
    if (completion->kind != TL_OP_RECV) return;
    size_t place = (size_t)((struct groups_item *)completion->user_data - trainer->down);
    wide_deep_check_down(completion->tensor, place);
    tl_tensor_put(trainer->received[place]);
    trainer->received[place] = completion->tensor;
    trainer->missing_count--;
    trainer->grpc_count += completion->path == TL_PATH_GRPC;
}

static void take_some(struct trainer *trainer)
{
    struct tl_completion completions[GROUPS_COMPLETION_COUNT];
    size_t count = tl_cq_wait(trainer->cq, completions, GROUPS_COMPLETION_COUNT, TL_TIMEOUT_NONE);
    for (size_t i = 0; i < count; i++)
        take(trainer, &completions[i]);
}

static void receive(struct trainer *trainer)
{
    for (size_t i = 0; i < WIDE_DEEP_EMBEDDING_COUNT; i++)
        trainer->down[i].step = trainer->step;
    trainer->missing_count = WIDE_DEEP_DOWN_COUNT;
    trainer->open_count += WIDE_DEEP_DOWN_COUNT + (trainer->how == GROUPS_MANY);
    groups_receive(trainer->worker, trainer->owner, trainer->how, trainer->down, WIDE_DEEP_DOWN_COUNT, trainer->cq,
                   NULL);
}

static void send(struct trainer *trainer, size_t first, size_t count)
{
    for (size_t i = 0; i < count; i++)
        trainer->up[first + i].step = trainer->step;
    trainer->open_count += trainer->how == GROUPS_MANY ? 1 : count;
    groups_send(trainer->worker, trainer->how, &trainer->up[first], count, trainer->cq, NULL);
}

static void *train(void *context)
{
    struct trainer *trainer = context;
    for (uint64_t i = 0; i < trainer->step_count; i++, trainer->step++) {
        receive(trainer);
        send(trainer, 0, WIDE_DEEP_COLUMN_COUNT);
        while (trainer->missing_count > 0)
            take_some(trainer);
        send(trainer, WIDE_DEEP_COLUMN_COUNT, WIDE_DEEP_GRADIENT_COUNT);
        while (trainer->open_count > 0)
            take_some(trainer);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ commands -- */

static uint64_t all_messages(const struct trainer *trainers)
{
    uint64_t count = 0;
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++)
        count += groups_message_count(trainers[i].worker);
    return count;
}

static void train_all(struct trainer *trainers, uint64_t step_count)
{
    pthread_t threads[WIDE_DEEP_WORKER_COUNT];
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++) {
        trainers[i].step_count = step_count;
        trainers[i].grpc_count = 0;
        if (pthread_create(&threads[i], NULL, train, &trainers[i]) != 0) groups_die("setup", "no thread");
    }
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++)
        pthread_join(threads[i], NULL);
}

static void check_contents(const struct trainer *trainer)
{
    for (size_t place = 0; place < WIDE_DEEP_DOWN_COUNT; place++)
        groups_check_contents(trainer->received[place], wide_deep_down_seed(trainer->number, place),
                              trainer->down_keys[place]);
}

static void run(struct trainer *trainers, uint64_t step_count, int owner_pid)
{
    struct groups_taken taken = {.tensor_count =
                                     WIDE_DEEP_WORKER_COUNT * step_count * (WIDE_DEEP_UP_COUNT + WIDE_DEEP_DOWN_COUNT)};
    uint64_t messages = all_messages(trainers);
    double cpu_seconds = groups_cpu_seconds(owner_pid), start = groups_now();
    train_all(trainers, step_count);
    taken.seconds = groups_now() - start;
    taken.cpu_seconds = groups_cpu_seconds(owner_pid) - cpu_seconds;
    taken.message_count = all_messages(trainers) - messages;
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++) {
        check_contents(&trainers[i]);
        taken.grpc_count += trainers[i].grpc_count;
    }
    groups_print(&taken);
}

/* --------------------------------------------------------------------------------------------------------- setup -- */

static void open_trainer(struct trainer *trainer, size_t number, const char *config, enum tl_progress progress)
{
    struct tl_error error;
    const struct tl_worker_options options = {.size_bytes = sizeof(options),
                                              .config_path = config,
                                              .job = "worker",
                                              .task = (uint32_t)number,
                                              .progress = progress};
    groups_check(tl_worker_open(&options, &trainer->worker, &error), "open", &error);
    groups_check(tl_cq_create(&trainer->cq, &error), "create a completion queue", &error);
    groups_check(tl_worker_find_peer(trainer->worker, "/job:ps/task:0", &trainer->owner, &error), "find the owner",
                 &error);
    trainer->number = number;
    trainer->step = GROUPS_FIRST_STEP;
    for (size_t place = 0; place < WIDE_DEEP_UP_COUNT; place++) {
        wide_deep_up_key(place, trainer->up_keys[place]);
        trainer->up[place] =
            (struct groups_item){.key = trainer->up_keys[place], .tensor = wide_deep_create_up(number, place)};
    }
    for (size_t place = 0; place < WIDE_DEEP_DOWN_COUNT; place++) {
        wide_deep_down_key(number, place, trainer->down_keys[place]);
        trainer->down[place] =
            (struct groups_item){.key = trainer->down_keys[place], .user_data = &trainer->down[place]};
    }
}

static void close_trainer(struct trainer *trainer)
{
    tl_worker_close(trainer->worker, 0);
    tl_cq_destroy(trainer->cq);
    for (size_t place = 0; place < WIDE_DEEP_UP_COUNT; place++)
        tl_tensor_put(trainer->up[place].tensor);
    for (size_t place = 0; place < WIDE_DEEP_DOWN_COUNT; place++)
        tl_tensor_put(trainer->received[place]);
}

int wide_deep_work(const char *config, enum groups_how how, enum tl_progress progress, int owner_pid)
{
    struct trainer trainers[WIDE_DEEP_WORKER_COUNT] = {0};
    uint64_t step_count;
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++) {
        trainers[i].how = how;
        open_trainer(&trainers[i], i, config, progress);
    }
    printf("ready tensorlane %s\n", tl_version());
    fflush(stdout);
    while (scanf("%*s %*s %*s %" SCNu64, &step_count) == 1)
        run(trainers, step_count, owner_pid);
    for (size_t i = 0; i < WIDE_DEEP_WORKER_COUNT; i++)
        close_trainer(&trainers[i]);
    return EXIT_SUCCESS;
}
