// SPDX-License-Identifier: Apache-2.0
/*
 * Two engines of the data plane over one fake fabric, driven by hand in one thread, with a scripted source on each
 * side.
 *
 *     struct engine_pair pair;
 *     engine_pair_open(&pair, NULL);          two engines, one connection, up
 *     engine_side_send(right, "key", 1, tensor);
 *     engine_ask_start(left, &ask, "key", 1);
 *     engine_pair_run(&pair);                 until nothing moves any more
 *     ... look at ask, the counters, the fabric
 *     engine_ask_fini(&ask);
 *     engine_pair_close(&pair);               ends the connection; everything must have been given back
 *
 * The rules of both sides are checked all the time: a fetch is done once and a serve closed once, both before their
 * connection is; a one-shot value that was offered belongs to its asker until the serve has ended, goes when it was
 * received, waits for the same asker when the connection broke, and is there for others when the asker gave up.
 *
 * The clock does not move unless the test moves it (fake_clock.h). Only registrations of users' memory involve another
 * thread, memory's registration thread; engine_pair_run waits for it, so that a run is the same each time.
 */
#ifndef TESTS_FAKES_ENGINE_PAIR_H
#define TESTS_FAKES_ENGINE_PAIR_H

#include "dataplane/engine/engine.h"
#include "fakes/fake_provider.h"

struct engine_pair;

struct engine_side {
    struct engine_pair *pair;
    struct tl_identity self;
    struct tl_provider *provider;
    struct tl_reactor *reactor;
    struct tl_memory *memory; /* NULL as for the engine: the test plays this side. */
    struct tl_engine *engine;
    struct tl_conn *conn; /* NULL: none, or closed. */
    unsigned up_count;
    unsigned closed_count;
    struct tl_error reason;     /* The status of the latest end. */
    unsigned prefetched_count;  /* Keys that the source was told of before their requests. */
    unsigned open_serve_count;  /* Requests that the source knows and that are not closed. */
    unsigned open_ask_count;    /* Fetches that are not done. */
    unsigned ended_counts[3];   /* Counts of serves, by enum tl_serve_end. */
    enum tl_serve_end last_end; /* How the latest closed serve ended. */
    bool is_silent;             /* The side is not driven, as if its process were stopped. */
    struct tl_list values;
    struct tl_list serves;
    struct tl_tensor *barrier;
    uint64_t last_number;
};

struct engine_pair_options {
    struct fake_fabric_options fabric;
    struct fake_provider_options provider; /* The options of both sides. */
    /* Replaces the fabric's own provider; NULL: the fabric's. */
    struct tl_provider *(*open_provider)(const char *name);
    /* Returns whether a thread of such a provider is at work, after which there is more to do; NULL: it has no
     * threads. */
    bool (*is_at_work)(const struct tl_provider *provider);
    struct tl_engine_options engine; /* Options of both engines. */
    struct tl_memory_options memory;
    bool is_right_raw;    /* The right side has no engine. */
    bool may_keep_blocks; /* At the end devices are still at work on blocks of the pools. */
};

struct engine_pair {
    struct engine_pair_options options;
    struct fake_fabric *fabric; /* NULL: there is none, see open_provider. */
    struct engine_side sides[2];
    struct engine_side *left;  /* The opener. */
    struct engine_side *right; /* The accepting side. */
};

/* The options that engine_pair_open takes for NULL; copy, change and pass them. */
void engine_pair_defaults(struct engine_pair_options *ret_options);
/* Makes the two engines, without a connection. */
void engine_pair_init(struct engine_pair *pair, const struct engine_pair_options *options);
/* Makes a connection for each side; the two know each other and connect. */
void engine_pair_connect(struct engine_pair *pair);
/* Does both; then the connection is up. */
void engine_pair_open(struct engine_pair *pair, const struct engine_pair_options *options);
/* Ends the remaining connections, checks that nothing is left, and destroys the pair. All asks are finished. */
void engine_pair_close(struct engine_pair *pair);

/* Creates the connection of one side, without its peer's address. Errors: those of tl_conn_create. */
enum tl_status engine_side_try_create_conn(struct engine_side *side, struct tl_error *ret_error);
/* Does the same; it must succeed. */
void engine_side_create_conn(struct engine_side *side);
/* Runs one round of a reactor, unless the side is silent. Returns whether something was done. */
bool engine_side_round(struct engine_side *side);
/* Runs rounds of both sides until nothing happens any more. */
void engine_pair_run(struct engine_pair *pair);
/* Waits until the registration thread has done everything it was asked for; its closures are on their way. */
void engine_side_settle(struct engine_side *side);

/* ------------------------------------------------------------------------------------------------------ source -- */

/* Gives a one-shot tensor, whose reference becomes the source's. Requests that wait for it are answered. */
void engine_side_send(struct engine_side *side, const char *key, uint64_t step, struct tl_tensor *tensor);
/* Replaces what was published under the key. step: the version. */
void engine_side_publish(struct engine_side *side, const char *key, uint64_t step, struct tl_tensor *tensor);
/* From now on the source answers requests for the key with a status. */
void engine_side_refuse(struct engine_side *side, const char *key, enum tl_status code, const char *text,
                        bool is_final);
/* Returns the number of one-shot values that were not received. */
unsigned engine_side_values(const struct engine_side *side);
/* Returns whether this one-shot value is still there. */
bool engine_side_has(const struct engine_side *side, const char *key, uint64_t step);
struct tl_engine_stats engine_side_stats(const struct engine_side *side);
struct tl_memory_stats engine_side_memory(const struct engine_side *side);

/* ------------------------------------------------------------------------------------------------------ asking -- */

/* A fetch. Zero it, set its fields, start it. */
struct engine_ask {
    struct tl_fetch fetch;
    struct engine_side *side;
    char key[TL_MAX_KEY_BYTES + 1];
    /* The user's destination; NULL: the engine's choice. Only a fitting value is accepted. */
    struct tl_tensor *destination;
    struct tl_device device; /* Where a new one lies. */
    bool is_unregistered;    /* The destinations are made outside of the pool. */
    bool wants_checksum;
    bool may_map;
    bool is_without_memory; /* No destination can be made. */
    uint64_t subscription;  /* 0: none. */
    uint8_t priority;
    bool is_open;
    unsigned place_count;
    unsigned done_count;
    struct tl_error result;                  /* Set in done. */
    void (*on_done)(struct engine_ask *ask); /* Called in done; may be NULL. */
};

void engine_ask_start(struct engine_side *side, struct engine_ask *ask, const char *key, uint64_t step);
void engine_ask_cancel(struct engine_ask *ask);
/* Ends an ask that is done. Puts the destination. */
void engine_ask_fini(struct engine_ask *ask);

/* ----------------------------------------------------------------------------------------------------- tensors -- */

/* Makes a tensor of bytes that follow from the seed, in memory of its own. */
struct tl_tensor *engine_bytes(uint64_t size_bytes, uint64_t seed);
/* Makes the same in the pool of the side, so that it is registered. */
struct tl_tensor *engine_pool_bytes(struct engine_side *side, uint64_t size_bytes, uint64_t seed);
/* Makes the same in a file of its own, which has no name. */
struct tl_tensor *engine_file_bytes(uint64_t size_bytes, uint64_t seed);
bool engine_is_bytes(const struct tl_tensor *tensor, uint64_t size_bytes, uint64_t seed);

#endif
