// SPDX-License-Identifier: Apache-2.0
/* tl_groups pull: receives the workloads of a set as commands say, see tl_groups.c. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/groups/groups.h"

#define ABSENT "absent"
#define ABSENT_IN "4096" /* the workload whose last key is replaced */
#define ABSENT_KEY "absent/column-249/0999"
#define UNWRITTEN 0xa5

/* A workload as its receiver has it. */
struct intake {
    const struct groups_workload *workload;
    uint64_t *sizes;
    char (*keys)[GROUPS_KEY_BYTES];
    struct groups_item *items;   /* user_data of an item is the item itself */
    struct tl_tensor **received; /* [count] of the latest repetition into memory of the library; NULL: none */
    struct tl_tensor **views;    /* [count] of the buffer, one directly behind the other */
    unsigned char *buffer;       /* total_bytes of this program's memory */
    uint64_t next_step;          /* the step to ask for next of what is sent */
};

struct client {
    struct tl_worker *worker;
    struct tl_cq *cq;
    tl_peer_id owner;
    int owner_pid;
    enum groups_how how;
    struct intake *intakes; /* [groups_workload_count], without workload for those of other sets */
};

/* What a command asks for. */
struct command {
    struct intake *intake;
    bool is_sent;
    bool is_into_views;
    bool is_absent;
    uint64_t count;
};

/* ----------------------------------------------------------------------------------------------------- receiving -- */

static void put_received(struct intake *intake)
{
    for (size_t i = 0; i < intake->workload->count; i++) {
        tl_tensor_put(intake->received[i]);
        intake->received[i] = NULL;
    }
}

static void prepare(const struct command *command)
{
    struct intake *intake = command->intake;
    uint64_t step = command->is_sent ? intake->next_step++ : 0;
    size_t count = intake->workload->count;
    for (size_t i = 0; i < count; i++) {
        intake->items[i].step = step;
        intake->items[i].tensor = command->is_into_views ? intake->views[i] : NULL;
    }
    if (!command->is_into_views) put_received(intake);
    intake->items[count - 1].key = command->is_absent ? ABSENT_KEY : intake->keys[count - 1];
}

/* A tensor that has come; that of the absent key ends when it is cancelled. */
static void take(const struct command *command, const struct tl_completion *completion, struct groups_taken *taken)
{
    struct intake *intake = command->intake;
    size_t index = (size_t)((struct groups_item *)completion->user_data - intake->items);
    if (command->is_absent && index == intake->workload->count - 1) {
        if (completion->status.code == TL_OK) groups_die(ABSENT_KEY, "exists");
        return;
    }
    groups_check(completion->status.code, intake->keys[index], &completion->status);
    taken->tensor_count++;
    taken->grpc_count += completion->path == TL_PATH_GRPC;
    /* A value that was written had an immediate, which is no message of its own. */
    taken->message_count += completion->path == TL_PATH_ZERO_COPY || completion->path == TL_PATH_BOUNCE;
    if (command->is_into_views)
        tl_tensor_put(completion->tensor);
    else
        intake->received[index] = completion->tensor;
}

/* Takes so many completions, of tensors or of groups. */
static void take_all(struct client *client, const struct command *command, size_t count, struct groups_taken *taken)
{
    struct tl_completion completions[GROUPS_COMPLETION_COUNT];
    while (count > 0) {
        size_t limit = count < GROUPS_COMPLETION_COUNT ? count : GROUPS_COMPLETION_COUNT;
        size_t taken_count = groups_wait(client->cq, client->how, completions, limit, count);
        count -= taken_count;
        for (size_t i = 0; i < taken_count; i++) {
            if (!groups_is_end(&completions[i]))
                take(command, &completions[i], taken);
            else if (!command->is_absent)
                groups_check(completions[i].status.code, command->intake->workload->name, &completions[i].status);
        }
    }
}

/* The time of a repetition with an absent key ends when all other tensors are there. */
static void repeat(struct client *client, const struct command *command, struct groups_taken *taken)
{
    struct intake *intake = command->intake;
    size_t count = intake->workload->count, end_count = client->how == GROUPS_MANY;
    double start = groups_now();
    prepare(command);
    tl_op_id last =
        groups_receive(client->worker, client->owner, client->how, intake->items, count, client->cq, intake);
    if (!command->is_absent) {
        take_all(client, command, count + end_count, taken);
        taken->seconds += groups_now() - start;
        return;
    }
    take_all(client, command, count - 1, taken);
    taken->seconds += groups_now() - start;
    if (tl_cancel(client->worker, last) != TL_OK) groups_die(ABSENT_KEY, "its receive is not open any more");
    take_all(client, command, 1 + end_count, taken);
}

/* Compares what the latest repetition has received; what the next command receives must be written anew. */
static void check_contents(const struct command *command)
{
    struct intake *intake = command->intake;
    size_t count = intake->workload->count - command->is_absent;
    for (size_t i = 0; i < count; i++) {
        const struct tl_tensor *tensor = command->is_into_views ? intake->views[i] : intake->received[i];
        if (tl_tensor_size_bytes(tensor) != intake->sizes[i]) groups_die(intake->keys[i], "has another size than sent");
        groups_check_contents(tensor, i, intake->keys[i]);
    }
    if (command->is_into_views)
        memset(intake->buffer, UNWRITTEN, intake->workload->total_bytes);
    else
        put_received(intake);
}

static void run(struct client *client, const struct command *command)
{
    struct groups_taken taken = {0};
    uint64_t messages = groups_message_count(client->worker);
    double cpu_seconds = groups_cpu_seconds(client->owner_pid);
    for (uint64_t i = 0; i < command->count; i++)
        repeat(client, command, &taken);
    taken.cpu_seconds = groups_cpu_seconds(client->owner_pid) - cpu_seconds;
    taken.message_count += groups_message_count(client->worker) - messages;
    check_contents(command);
    groups_print(&taken);
}

/* ------------------------------------------------------------------------------------------------------ commands -- */

static struct intake *find_intake(struct client *client, const char *name)
{
    if (strcmp(name, ABSENT) == 0) name = ABSENT_IN;
    for (size_t i = 0; i < groups_workload_count; i++)
        if (client->intakes[i].workload && strcmp(groups_workloads[i].name, name) == 0) return &client->intakes[i];
    groups_die(name, "no workload of this set has this name");
}

static void run_commands(struct client *client)
{
    char name[32], source[32], memory[32];
    uint64_t count;
    while (scanf("%31s %31s %31s %" SCNu64, name, source, memory, &count) == 4) {
        const struct command command = {.intake = find_intake(client, name),
                                        .is_sent = strcmp(source, "sent") == 0,
                                        .is_into_views = strcmp(memory, "views") == 0,
                                        .is_absent = strcmp(name, ABSENT) == 0,
                                        .count = count};
        if (command.is_sent && !command.intake->workload->is_sent) groups_die(name, "is only published");
        run(client, &command);
    }
}

/* --------------------------------------------------------------------------------------------------------- setup -- */

static void create_views(struct intake *intake)
{
    const struct groups_workload *workload = intake->workload;
    uint64_t offset = 0;
    intake->buffer = groups_allocate(1, workload->total_bytes);
    memset(intake->buffer, UNWRITTEN, workload->total_bytes);
    for (size_t i = 0; i < workload->count; i++) {
        struct tl_error error;
        const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                            .dtype = TL_U8,
                                            .rank = 1,
                                            .dims = &intake->sizes[i],
                                            .data = intake->buffer,
                                            .offset_bytes = offset,
                                            .capacity_bytes = workload->total_bytes};
        groups_check(tl_tensor_wrap(&view, &intake->views[i], &error), "wrap memory", &error);
        offset += intake->sizes[i];
    }
}

static void create_intake(struct intake *intake, const struct groups_workload *workload)
{
    intake->workload = workload;
    intake->sizes = groups_sizes(workload);
    intake->keys = groups_allocate(workload->count, sizeof(*intake->keys));
    intake->items = groups_allocate(workload->count, sizeof(*intake->items));
    intake->received = groups_allocate(workload->count, sizeof(*intake->received));
    intake->views = groups_allocate(workload->count, sizeof(*intake->views));
    intake->next_step = GROUPS_FIRST_STEP;
    for (size_t i = 0; i < workload->count; i++) {
        groups_key(workload, i, intake->keys[i]);
        intake->items[i] = (struct groups_item){.key = intake->keys[i], .user_data = &intake->items[i]};
    }
    create_views(intake);
}

static void destroy_intake(struct intake *intake)
{
    if (!intake->workload) return;
    put_received(intake);
    for (size_t i = 0; i < intake->workload->count; i++)
        tl_tensor_put(intake->views[i]);
    free(intake->buffer);
    free(intake->views);
    free(intake->received);
    free(intake->items);
    free(intake->keys);
    free(intake->sizes);
}

static void open_client(struct client *client, const char *config, enum tl_progress progress)
{
    struct tl_error error;
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_path = config, .is_client = true, .progress = progress};
    groups_check(tl_worker_open(&options, &client->worker, &error), "open", &error);
    groups_check(tl_cq_create(&client->cq, &error), "create a completion queue", &error);
    groups_check(tl_worker_find_peer(client->worker, "/job:ps/task:0", &client->owner, &error), "find the owner",
                 &error);
}

int groups_pull(const char *config, enum groups_how how, enum tl_progress progress, const char *set, int owner_pid)
{
    struct client client = {.how = how, .owner_pid = owner_pid};
    open_client(&client, config, progress);
    client.intakes = groups_allocate(groups_workload_count, sizeof(*client.intakes));
    for (size_t i = 0; i < groups_workload_count; i++)
        if (strcmp(groups_workloads[i].set, set) == 0) create_intake(&client.intakes[i], &groups_workloads[i]);
    printf("ready tensorlane %s\n", tl_version());
    fflush(stdout);
    run_commands(&client);
    tl_worker_close(client.worker, 0);
    tl_cq_destroy(client.cq);
    for (size_t i = 0; i < groups_workload_count; i++)
        destroy_intake(&client.intakes[i]);
    free(client.intakes);
    return EXIT_SUCCESS;
}
