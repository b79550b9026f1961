// SPDX-License-Identifier: Apache-2.0
/* Two engines over a fake fabric: their life, rounds, requests and tensors. Their sources are in engine_source.c. */
#include "fakes/engine_pair.h"

#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/conn_internal.h"
#include "fakes/engine_source.h"
#include "fakes/made_memory.h"
#include "fakes/pattern.h"
#include "tensor/mapped_tensor.h"

/* After so many rounds without anything to do, nothing more will happen: operations may be tried again and again, and a
 * real provider looks at some things only now and then. */
#define IDLE_ROUNDS 40
#define REAL_IDLE_ROUNDS 20000

/* -------------------------------------------------------------------------------------------------------- life -- */

void engine_pair_defaults(struct engine_pair_options *ret_options)
{
    *ret_options = (struct engine_pair_options){
        .engine = {.keys = TL_KEYS_WINDOW,
                   .slot_count = 64,
                   .work_count = 64,
                   .request_count = 64,
                   .key_count = 64,
                   .is_mapping_allowed = true,
                   .register_bytes = 64 * 1024,
                   .peer_memory = {.pool_bytes = 4 << 20, .max_pool_bytes = 16 << 20},
                   .peer_timeout_ns = TL_NS_PER_SEC,
                   .connect_ns = 5 * TL_NS_PER_SEC,
                   .cancel_ns = TL_NS_PER_SEC,
                   .parked_ns = 60 * TL_NS_PER_SEC},
        .memory = {.pool_bytes = 4 << 20,
                   .max_pool_bytes = 16 << 20,
                   .max_cached_bytes = 64 << 20,
                   .max_cached_count = 64},
    };
}

static void init_engine(struct engine_side *side)
{
    const struct engine_pair_options *options = &side->pair->options;
    static const struct tl_reactor_options reactor_options = {.spin_ns = 0};
    TL_CHECK(tl_reactor_create(side->provider, &reactor_options, &side->reactor, NULL) == TL_OK);
    TL_CHECK(tl_memory_create(side->provider, &options->memory, &side->memory, NULL) == TL_OK);
    TL_CHECK(tl_tensor_create_dead(&side->barrier, NULL) == TL_OK);
    TL_CHECK(tl_engine_create(side->reactor, side->memory, &options->engine, &engine_source_ops, side, &side->engine,
                              NULL) == TL_OK);
}

void engine_pair_init(struct engine_pair *pair, const struct engine_pair_options *options)
{
    static const char *const names[] = {"/job:left/task:0", "/job:right/task:0"};
    *pair = (struct engine_pair){.left = &pair->sides[0], .right = &pair->sides[1]};
    if (options != NULL) pair->options = *options;
    if (options == NULL) engine_pair_defaults(&pair->options);
    if (pair->options.open_provider == NULL) pair->fabric = fake_fabric_create(&pair->options.fabric);
    for (unsigned i = 0; i < 2; i++) {
        struct engine_side *side = &pair->sides[i];
        side->pair = pair;
        side->self.incarnation = 100 + i;
        snprintf(side->self.name, sizeof(side->self.name), "%s", names[i]);
        const char *name = i == 0 ? "left" : "right";
        side->provider = pair->fabric != NULL ? fake_provider_open(pair->fabric, name, &pair->options.provider)
                                              : pair->options.open_provider(name);
        tl_list_init(&side->values);
        tl_list_init(&side->serves);
        if (i == 0 || !pair->options.is_right_raw) init_engine(side);
    }
}

static void on_up(struct tl_conn *conn)
{
    struct engine_side *side = tl_conn_owner(conn);
    TL_CHECK(conn == side->conn && tl_conn_is_up(conn));
    side->up_count++;
}

static void on_closed(struct tl_conn *conn, const struct tl_error *reason)
{
    struct engine_side *side = tl_conn_owner(conn);
    TL_CHECK(conn == side->conn && !tl_conn_is_up(conn));
    TL_CHECK(reason->code == TL_OK || reason->message[0] != '\0');
    TL_CHECK(side->open_serve_count == 0 && side->open_ask_count == 0);
    side->closed_count++;
    side->reason = *reason;
    side->conn = NULL;
}

static const struct tl_conn_events events = {.up = on_up, .closed = on_closed};

static struct engine_side *other(struct engine_side *side)
{
    return side == side->pair->left ? side->pair->right : side->pair->left;
}

enum tl_status engine_side_try_create_conn(struct engine_side *side, struct tl_error *ret_error)
{
    struct tl_memory *memory;
    TL_CHECK(side->conn == NULL);
    enum tl_status status = made_memory(side->engine, &memory, ret_error);
    if (status != TL_OK) return status;
    fake_is_reactor = true;
    status = tl_conn_create(side->engine, memory, &other(side)->self, side->self.incarnation, side == side->pair->left,
                            &events, side, &side->conn, ret_error);
    fake_is_reactor = false;
    return status;
}

void engine_side_create_conn(struct engine_side *side)
{
    TL_CHECK(engine_side_try_create_conn(side, NULL) == TL_OK);
}

void engine_pair_connect(struct engine_pair *pair)
{
    uint8_t left[TL_CONN_ADDRESS_BYTES];
    uint8_t right[TL_CONN_ADDRESS_BYTES];
    engine_side_create_conn(pair->left);
    engine_side_create_conn(pair->right);
    uint32_t left_bytes = tl_conn_get_address(pair->left->conn, left);
    uint32_t right_bytes = tl_conn_get_address(pair->right->conn, right);
    TL_CHECK(tl_conn_connect(pair->right->conn, left, left_bytes, NULL) == TL_OK);
    TL_CHECK(tl_conn_connect(pair->left->conn, right, right_bytes, NULL) == TL_OK);
}

void engine_pair_open(struct engine_pair *pair, const struct engine_pair_options *options)
{
    engine_pair_init(pair, options);
    engine_pair_connect(pair);
    engine_pair_run(pair);
    TL_CHECK(pair->left->up_count == 1 && pair->right->up_count == 1);
}

static void fini_side(struct engine_side *side)
{
    TL_CHECK(side->conn == NULL && side->open_serve_count == 0 && side->open_ask_count == 0);
    engine_source_fini(side);
    if (side->engine == NULL) return;
    tl_tensor_put(side->barrier);
    TL_CHECK(side->pair->options.may_keep_blocks || engine_side_memory(side).pool_used_bytes == 0);
    tl_engine_destroy(side->engine);
    tl_memory_destroy(side->memory);
    tl_reactor_destroy(side->reactor);
}

void engine_pair_close(struct engine_pair *pair)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    if (pair->fabric != NULL) fake_fabric_clear_rules(pair->fabric);
    for (unsigned i = 0; i < 2; i++) {
        pair->sides[i].is_silent = false;
        if (pair->sides[i].conn != NULL) tl_conn_close(pair->sides[i].conn, &reason);
    }
    engine_pair_run(pair);
    fini_side(pair->left);
    fini_side(pair->right);
    const char *why = "";
    while (pair->fabric != NULL && fake_fabric_land_late(pair->fabric)) {
    }
    bool is_clean = pair->fabric == NULL || fake_fabric_is_clean(pair->fabric, &why);
    if (!is_clean) fprintf(stderr, "left in the fabric: %s\n", why);
    TL_CHECK(is_clean);
    for (unsigned i = 0; i < 2; i++)
        pair->sides[i].provider->ops->close(pair->sides[i].provider);
    fake_fabric_destroy(pair->fabric);
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

static void barrier_reached(void *context, struct tl_closure *closure)
{
    (void)closure;
    TL_CHECK(sem_post(context) == 0);
}

/* Waits for an empty registration. The registration thread takes registrations one after the other, and before every
 * second one at the latest it serves the requests that wait for space. */
static void pass_registration(struct tl_memory *memory, struct tl_tensor *barrier_tensor)
{
    sem_t reached;
    TL_CHECK(sem_init(&reached, 0, 0) == 0);
    struct tl_registration barrier = {
        .tensor = barrier_tensor, .access = TL_REGION_WRITE, .post = barrier_reached, .context = &reached};
    tl_list_init(&barrier.closure.link);
    tl_memory_register(memory, &barrier);
    while (sem_wait(&reached) != 0) {
    }
    TL_CHECK(barrier.error.code == TL_OK);
    tl_memory_unpin(memory, &barrier.pin);
    TL_CHECK(sem_destroy(&reached) == 0);
}

void engine_side_settle(struct engine_side *side)
{
    const struct tl_conn *conn = side->conn;
    if (conn == NULL || conn->ending.held_count == 0) return;
    for (int i = 0; i < 2; i++)
        pass_registration(side->memory, side->barrier);
    for (int i = 0; i < 2 && conn->memory != side->memory; i++)
        pass_registration(conn->memory, side->barrier);
}

bool engine_side_round(struct engine_side *side)
{
    if (side->is_silent) return false;
    if (side->engine == NULL) return side->provider->ops->poll(side->provider) > 0;
    fake_is_reactor = true;
    bool did_work = tl_reactor_run_once(side->reactor, 0);
    fake_is_reactor = false;
    return did_work;
}

static bool round_of(struct engine_side *side)
{
    if (side->is_silent) return false;
    engine_side_settle(side);
    return engine_side_round(side);
}

void engine_pair_run(struct engine_pair *pair)
{
    unsigned idle_rounds = pair->fabric != NULL ? IDLE_ROUNDS : REAL_IDLE_ROUNDS;
    for (unsigned idle = 0; idle < idle_rounds; idle++) {
        bool did_work = round_of(pair->left);
        did_work |= round_of(pair->right);
        for (unsigned i = 0; i < 2 && pair->options.is_at_work != NULL; i++)
            did_work |= pair->options.is_at_work(pair->sides[i].provider);
        if (did_work) idle = 0;
    }
}

struct tl_engine_stats engine_side_stats(const struct engine_side *side)
{
    struct tl_engine_stats stats;
    tl_engine_get_stats(side->engine, &stats);
    return stats;
}

struct tl_memory_stats engine_side_memory(const struct engine_side *side)
{
    struct tl_memory_stats stats;
    tl_engine_get_memory_stats(side->engine, &stats);
    return stats;
}

/* ------------------------------------------------------------------------------------------------------ asking -- */

static enum tl_status place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct engine_ask *ask = TL_CONTAINER_OF(fetch, struct engine_ask, fetch);
    TL_CHECK(ask->is_open && fetch->destination == NULL);
    ask->place_count++;
    if (ask->is_without_memory)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: the test has no memory for it", ask->key);
    if (ask->destination != NULL) {
        if (!tl_meta_data_is_equal(meta_data, tl_tensor_meta_data(ask->destination))) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s does not fit", ask->key);
        }
        *ret_destination = tl_tensor_get(ask->destination);
        return TL_OK;
    }
    if (ask->is_unregistered) return tl_tensor_create_for(meta_data, ret_destination, ret_error);
    struct tl_device device = ask->device;
    if (meta_data->is_dead) device.kind = TL_DEVICE_HOST;
    if (fetch->allocator == NULL) return tl_tensor_create_for(meta_data, ret_destination, ret_error);
    return fetch->allocator->create(fetch->allocator->context, device, meta_data, ret_destination, ret_error);
}

static void done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct engine_ask *ask = TL_CONTAINER_OF(fetch, struct engine_ask, fetch);
    TL_CHECK(ask->is_open && fetch->transport_state == NULL && fetch->allocator == NULL);
    TL_CHECK(!tl_list_is_linked(&fetch->transport_link));
    if (result->code == TL_OK) {
        TL_CHECK(tl_fetch_is_complete(fetch) && fetch->is_verified == fetch->wants_checksum);
    } else {
        TL_CHECK(result->message[0] != '\0' || fetch->is_final);
    }
    ask->is_open = false;
    ask->done_count++;
    ask->result = *result;
    ask->side->open_ask_count--;
    if (ask->on_done != NULL) ask->on_done(ask);
}

static const struct tl_meta_data *wanted(const struct tl_fetch *fetch)
{
    const struct engine_ask *ask = TL_CONTAINER_OF(fetch, const struct engine_ask, fetch);
    return ask->destination != NULL ? tl_tensor_meta_data(ask->destination) : NULL;
}

static uint64_t subscription(const struct tl_fetch *fetch)
{
    return TL_CONTAINER_OF(fetch, const struct engine_ask, fetch)->subscription;
}

static const struct tl_fetch_ops fetch_ops = {
    .place = place, .wanted = wanted, .subscription = subscription, .done = done};

void engine_ask_start(struct engine_side *side, struct engine_ask *ask, const char *key, uint64_t step)
{
    TL_CHECK(!ask->is_open);
    if (ask->fetch.ops == NULL) {
        tl_fetch_init(&ask->fetch, &fetch_ops);
        ask->fetch.number = ++side->last_number;
        ask->side = side;
        snprintf(ask->key, sizeof(ask->key), "%s", key);
        ask->fetch.key = ask->key;
        ask->fetch.step = step;
        ask->fetch.wants_checksum = ask->wants_checksum;
        ask->fetch.may_map = ask->may_map;
        ask->fetch.priority = ask->priority;
        struct tl_device device = ask->destination != NULL ? tl_tensor_device(ask->destination) : ask->device;
        ask->fetch.is_for_device = device.kind != TL_DEVICE_HOST;
    }
    ask->is_open = true;
    side->open_ask_count++;
    tl_conn_fetch(side->conn, &ask->fetch);
}

void engine_ask_cancel(struct engine_ask *ask)
{
    if (ask->is_open) tl_conn_cancel(ask->side->conn, &ask->fetch);
}

void engine_ask_fini(struct engine_ask *ask)
{
    TL_CHECK(!ask->is_open && ask->done_count > 0);
    tl_fetch_fini(&ask->fetch);
    tl_tensor_put(ask->destination);
    *ask = (struct engine_ask){.is_open = false};
}

/* ----------------------------------------------------------------------------------------------------- tensors -- */

static struct tl_tensor *fill(struct tl_tensor *tensor, uint64_t seed)
{
    pattern_fill(tl_tensor_data(tensor), tl_tensor_size_bytes(tensor), seed);
    return tensor;
}

struct tl_tensor *engine_bytes(uint64_t size_bytes, uint64_t seed)
{
    struct tl_tensor *tensor;
    TL_CHECK(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, NULL) == TL_OK);
    return fill(tensor, seed);
}

struct tl_tensor *engine_pool_bytes(struct engine_side *side, uint64_t size_bytes, uint64_t seed)
{
    const struct tl_meta_data meta_data = {
        .dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
    struct tl_tensor *tensor;
    TL_CHECK(tl_memory_tensor_create(side->memory, &meta_data, &tensor, NULL) == TL_OK);
    return fill(tensor, seed);
}

#define FILE_OFFSET_BYTES 100

struct tl_tensor *engine_file_bytes(uint64_t size_bytes, uint64_t seed)
{
    const struct tl_shape shape = {.rank = 1, .dims = {size_bytes}};
    struct tl_mapped_file *file;
    struct tl_tensor *tensor;
    struct stat info;
    int fd = memfd_create("a published file", MFD_CLOEXEC);
    struct tl_tensor *bytes = engine_bytes(size_bytes, seed);
    TL_CHECK(fd >= 0 && pwrite(fd, tl_tensor_data(bytes), size_bytes, FILE_OFFSET_BYTES) == (ssize_t)size_bytes);
    tl_tensor_put(bytes);
    TL_CHECK(fstat(fd, &info) == 0);
    const struct tl_file_stamp stamp = {.size_bytes = (uint64_t)info.st_size,
                                        .modified_seconds = info.st_mtim.tv_sec,
                                        .modified_ns = (uint32_t)info.st_mtim.tv_nsec};
    TL_CHECK(tl_mapped_file_adopt(fd, &stamp, "a published file", &file, NULL) == TL_OK);
    TL_CHECK(tl_mapped_tensor_create(file, FILE_OFFSET_BYTES, TL_U8, &shape, &tensor, NULL) == TL_OK);
    tl_mapped_file_put(file);
    return tensor;
}

bool engine_is_bytes(const struct tl_tensor *tensor, uint64_t size_bytes, uint64_t seed)
{
    return tl_tensor_size_bytes(tensor) == size_bytes && pattern_is(tl_tensor_data(tensor), size_bytes, seed);
}
