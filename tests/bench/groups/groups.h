// SPDX-License-Identifier: Apache-2.0
/* What the halves of tl_groups share: workloads, contents, and dying with a message. */
#ifndef TESTS_BENCH_GROUPS_GROUPS_H
#define TESTS_BENCH_GROUPS_GROUPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/tensorlane.h>

#define GROUPS_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define GROUPS_KEY_BYTES 64
#define GROUPS_SUBSCRIPTION "subscription" /* the set with values that come one at a time */
/* Completions that are taken from a queue at a time. */
#define GROUPS_COMPLETION_COUNT 256
/* The owner sends from this step on, so many steps ahead of the receiver; what it publishes has version 0. */
#define GROUPS_FIRST_STEP 1
#define GROUPS_AHEAD_COUNT 2

/* How both halves ask and offer. */
enum groups_how {
    GROUPS_SINGLE = 0, /* an operation for each tensor */
    GROUPS_MANY = 1,   /* one for all of them; only with a library that has groups */
};

/* --------------------------------------------------------------------------------- tensors of a parameter server -- */

/* Tensors that one receiver fetches at once. */
struct groups_workload {
    const char *name;     /* in commands */
    const char *set;      /* the workloads that one owner has at the same time */
    const char *prefix;   /* its keys begin with this; equally long where sizes are compared */
    size_t count;         /* at most 100,000 */
    double span;          /* the largest size is so many times the smallest one, 16 bytes; 0: all have the same */
    uint64_t total_bytes; /* what all have together: their sizes are checked with it */
    bool is_sent;         /* sent step after step besides being published */
};

extern const struct groups_workload groups_workloads[];
extern const size_t groups_workload_count;

/* Returns the bytes of each tensor, [count]. Dies unless they are total_bytes together. Ownership: free. */
uint64_t *groups_sizes(const struct groups_workload *workload);

void groups_key(const struct groups_workload *workload, size_t index, char ret_key[GROUPS_KEY_BYTES]);

/* --------------------------------------------------------------------------------------------------- Wide & Deep -- */

/* One owner and its workers train a model: in each step a worker sends ids, receives their embeddings and the dense
 * layers, and sends gradients. */
#define WIDE_DEEP "wide-deep"
#define WIDE_DEEP_WORKER_COUNT 5
#define WIDE_DEEP_COLUMN_COUNT 26 /* a column of categories has ids, a deep embedding and a wide one */
#define WIDE_DEEP_EMBEDDING_COUNT (2 * WIDE_DEEP_COLUMN_COUNT)
#define WIDE_DEEP_DENSE_COUNT 10 /* five layers, weights and biases */
#define WIDE_DEEP_DOWN_COUNT (WIDE_DEEP_EMBEDDING_COUNT + WIDE_DEEP_DENSE_COUNT)
#define WIDE_DEEP_GRADIENT_COUNT WIDE_DEEP_DOWN_COUNT
#define WIDE_DEEP_UP_COUNT (WIDE_DEEP_COLUMN_COUNT + WIDE_DEEP_GRADIENT_COUNT)

/* Creates the tensor of this place among those that go up (ids, then gradients) or down (deep embeddings, wide ones,
 * dense layers), with the contents of groups_check_contents. worker: its number. */
struct tl_tensor *wide_deep_create_up(size_t worker, size_t place);
struct tl_tensor *wide_deep_create_down(size_t worker, size_t place);
void wide_deep_up_key(size_t place, char ret_key[GROUPS_KEY_BYTES]);
void wide_deep_down_key(size_t worker, size_t place, char ret_key[GROUPS_KEY_BYTES]);
/* Dies when the tensor has not the type and shape of wide_deep_create_up or _down. */
void wide_deep_check_up(const struct tl_tensor *tensor, size_t place);
void wide_deep_check_down(const struct tl_tensor *tensor, size_t place);
uint64_t wide_deep_up_seed(size_t worker, size_t place);
uint64_t wide_deep_down_seed(size_t worker, size_t place);

/* ------------------------------------------------------------------------------------------------------- helpers -- */

/* Ends the process with a line on stderr. */
void groups_die(const char *what, const char *reason) __attribute__((noreturn));
/* Dies unless status is TL_OK. */
void groups_check(enum tl_status status, const char *what, const struct tl_error *error);
/* Memory that is zero; dies when there is none. */
void *groups_allocate(size_t count, size_t size_bytes);

struct tl_tensor *groups_create_tensor(enum tl_dtype dtype, unsigned rank, const uint64_t *dims, uint64_t seed);
/* Dies when the tensor does not have the contents that this seed gives it. */
void groups_check_contents(const struct tl_tensor *tensor, uint64_t seed, const char *key);

/* A tensor to ask for or to offer. */
struct groups_item {
    const char *key;
    uint64_t step;
    struct tl_tensor *tensor; /* the destination, NULL: memory of the library; or what is sent */
    void *user_data;          /* comes back in the completion */
};

/* Asks for the items. Each has a completion; with GROUPS_MANY the group has one besides, the last, with `user_data`.
 * Returns the operation of the last item. */
tl_op_id groups_receive(struct tl_worker *worker, tl_peer_id peer, enum groups_how how, const struct groups_item *items,
                        size_t count, struct tl_cq *cq, void *user_data);
/* Offers the items without a deadline. Each has a completion; with GROUPS_MANY only the group has one, with
 * `user_data`. */
void groups_send(struct tl_worker *worker, enum groups_how how, const struct groups_item *items, size_t count,
                 struct tl_cq *cq, void *user_data);
/* Returns whether the completion is that of a group. */
bool groups_is_end(const struct tl_completion *completion);

/* What one command took. */
struct groups_taken {
    double seconds;
    uint64_t tensor_count;
    uint64_t message_count; /* and immediates of writes, between the workers, both directions */
    double cpu_seconds;     /* user and system time of this process and the owner */
    uint64_t grpc_count;    /* tensors that came over gRPC */
};

/* Takes completions, at least one. With GROUPS_MANY it waits until there are group_count, all that the program needs of
 * a group before it goes on; that may be more than the capacity. */
size_t groups_wait(struct tl_cq *cq, enum groups_how how, struct tl_completion *ret_completions, size_t capacity,
                   size_t group_count);
double groups_now(void);
/* Processor time of this process and of the one with this id. */
double groups_cpu_seconds(int owner_pid);
/* Messages in both directions since the worker was opened. */
uint64_t groups_message_count(struct tl_worker *worker);
/* Handles completions until the standard input ends, and only then returns. */
void groups_run(struct tl_cq *cq, void (*handle)(void *owner, const struct tl_completion *completions, size_t count),
                void *owner);
void groups_print(const struct groups_taken *taken);

/* -------------------------------------------------------------------------------------------------------- halves -- */

/* Each returns the exit code. config: the path of a configuration. */
int groups_serve(const char *config, enum groups_how how, const char *set);
int groups_pull(const char *config, enum groups_how how, enum tl_progress progress, const char *set, int owner_pid);
int wide_deep_serve(const char *config, enum groups_how how);
int subscription_serve(const char *config);
int subscription_pull(const char *config, enum groups_how how, enum tl_progress progress, int owner_pid);
int wide_deep_work(const char *config, enum groups_how how, enum tl_progress progress, int owner_pid);

#endif
