// SPDX-License-Identifier: Apache-2.0
/*
 * The probes of a provider.
 *
 *   target                        initiator
 *   exposes its memory, message ----->
 *                    <----- write with an immediate, or a read
 *
 * The one that then has the bytes compares them. The message tells the initiator that the memory is exposed, as in a
 * real transfer, so that both kinds of operations have been seen to work. Failure modes: a call that is refused, a
 * queue pair that breaks, nothing that comes in time, bytes that differ. Then as after success both queue pairs are
 * disconnected and drained before the memory goes.
 */
#include "dataplane/probe.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "dataplane/memory/pages.h"

/* It takes more than one packet where the settings allow that in one write. */
#define PROBE_BYTES 8192
#define IMMEDIATE UINT32_C(0x50524f42)
/* Enough for one message and one write each way. */
#define QUEUE_DEPTH 16
#define PAUSE_NS 50000

struct end {
    struct probe *probe;
    struct tl_queue_pair *pair; /* NULL: not created */
    bool is_connected;
    bool is_drained;
};

struct probe {
    struct tl_provider *provider;
    struct end target, initiator;
    bool is_reading;
    uint8_t *memory;    /* PROBE_BYTES for the bytes that come, then as many that they come from */
    uint64_t len_bytes; /* how many of these are written or read */
    struct tl_region *region;
    struct tl_exposure exposure;
    struct tl_work moved;
    bool has_message;
    bool has_immediate;
    bool is_moved;           /* the card has completed the write or read */
    struct tl_error failure; /* code TL_OK: nothing has failed */
};

static void fail(struct probe *probe, const struct tl_error *reason)
{
    if (probe->failure.code == TL_OK) probe->failure = *reason;
}

/* ------------------------------------------------------------------------------------------------------ events -- */

static void compare(struct probe *probe)
{
    struct tl_error reason;
    if (memcmp(probe->memory, probe->memory + PROBE_BYTES, probe->len_bytes) == 0) return;
    tl_error_set(&reason, TL_DATA_LOSS, "it has delivered wrong bytes");
    fail(probe, &reason);
}

static void move_done(struct tl_work *work, enum tl_status status)
{
    struct probe *probe = TL_CONTAINER_OF(work, struct probe, moved);
    probe->is_moved = status == TL_OK;
    if (probe->is_moved && probe->is_reading) compare(probe);
}

/* Called at the initiator: the target's memory is exposed. */
static void message_came(void *owner, const void *data, uint32_t len_bytes)
{
    const struct end *end = owner;
    struct probe *probe = end->probe;
    const struct tl_descriptor *descriptor = &probe->exposure.descriptor;
    struct tl_error reason;
    if (end != &probe->initiator || probe->has_message || len_bytes != descriptor->len_bytes ||
        memcmp(data, descriptor->bytes, len_bytes) != 0) {
        tl_error_set(&reason, TL_DATA_LOSS, "a message has arrived that was not sent");
        fail(probe, &reason);
        return;
    }
    probe->has_message = true;
    struct tl_queue_pair *pair = probe->initiator.pair;
    if (probe->is_reading) {
        pair->ops->read(pair, probe->region, probe->memory, probe->len_bytes, descriptor, 0, &probe->moved);
    } else {
        pair->ops->write(pair, probe->region, probe->memory + PROBE_BYTES, probe->len_bytes, descriptor, 0, true,
                         IMMEDIATE, &probe->moved);
    }
    tl_queue_pair_doorbell(pair);
}

/* Called at the target: the bytes are there. */
static void immediate_came(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    const struct end *end = owner;
    struct probe *probe = end->probe;
    struct tl_error reason;
    if (end == &probe->target && immediate == IMMEDIATE && len_bytes == probe->len_bytes && !probe->is_reading) {
        probe->has_immediate = true;
        compare(probe);
        return;
    }
    tl_error_set(&reason, TL_DATA_LOSS, "it has delivered wrong bytes");
    fail(probe, &reason);
}

static void pair_broken(void *owner, const struct tl_error *reason)
{
    const struct end *end = owner;
    fail(end->probe, reason);
}

static void pair_drained(void *owner)
{
    struct end *end = owner;
    end->is_drained = true;
}

static const struct tl_queue_pair_events events = {
    .message = message_came, .immediate = immediate_came, .broken = pair_broken, .drained = pair_drained};

/* ------------------------------------------------------------------------------------------------------ course -- */

static enum tl_status make_memory(struct probe *probe, struct tl_error *ret_error)
{
    probe->len_bytes = tl_min_u64(PROBE_BYTES, probe->provider->limits.max_write_bytes);
    enum tl_status status = tl_region_map(probe->provider, 2 * (uint64_t)PROBE_BYTES, &probe->region, ret_error);
    if (status != TL_OK) return status;
    probe->memory = probe->region->address;
    for (size_t i = PROBE_BYTES; i < 2 * (size_t)PROBE_BYTES; i += sizeof(uint64_t)) {
        uint64_t number = tl_random_u64();
        memcpy(probe->memory + i, &number, sizeof(number));
    }
    return TL_OK;
}

static enum tl_status make_pair(struct probe *probe, enum tl_keys keys, struct end *end, struct tl_error *ret_error)
{
    const struct tl_queue_pair_options options = {.slot_count = QUEUE_DEPTH, .work_count = QUEUE_DEPTH, .keys = keys};
    end->probe = probe;
    return tl_queue_pair_create(probe->provider, &options, &events, end, &end->pair, ret_error);
}

static enum tl_status connect_to(struct end *end, const struct end *other, struct tl_error *ret_error)
{
    struct tl_pair_address pair_address;
    other->pair->ops->get_address(other->pair, &pair_address);
    enum tl_status status = end->pair->ops->connect(end->pair, &pair_address, ret_error);
    end->is_connected = status == TL_OK;
    return status;
}

static enum tl_status start(struct probe *probe, enum tl_keys keys, struct tl_error *ret_error)
{
    struct tl_queue_pair *pair;
    if (keys == TL_KEYS_WINDOW && !probe->provider->limits.has_windows) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "it has no memory windows; set verbs.keys to \"region\" if peers may write all memory "
                            "that is made for them");
    }
    enum tl_status status = make_memory(probe, ret_error);
    if (status == TL_OK) status = make_pair(probe, keys, &probe->target, ret_error);
    if (status == TL_OK) status = make_pair(probe, keys, &probe->initiator, ret_error);
    if (status == TL_OK) status = connect_to(&probe->initiator, &probe->target, ret_error);
    if (status == TL_OK) status = connect_to(&probe->target, &probe->initiator, ret_error);
    if (status != TL_OK) return status;
    pair = probe->target.pair;
    status = probe->is_reading
                 ? tl_queue_pair_expose_source(pair, probe->region, probe->memory + PROBE_BYTES, PROBE_BYTES, false,
                                               &probe->exposure, ret_error)
                 : tl_queue_pair_expose(pair, probe->region, probe->memory, PROBE_BYTES, &probe->exposure, ret_error);
    if (status != TL_OK) return status;
    pair->ops->message(pair, probe->exposure.descriptor.bytes, probe->exposure.descriptor.len_bytes, NULL);
    tl_queue_pair_doorbell(pair);
    return TL_OK;
}

static void poll_once(const struct probe *probe)
{
    static const struct timespec pause = {.tv_nsec = PAUSE_NS};
    if (probe->provider->ops->poll(probe->provider) == 0) nanosleep(&pause, NULL);
}

static bool is_over(const struct probe *probe)
{
    return probe->is_moved && (probe->is_reading || probe->has_immediate);
}

static void wait_for_bytes(struct probe *probe, int64_t timeout_ns)
{
    int64_t deadline_ns = tl_clock_deadline_ns(timeout_ns);
    struct tl_error reason;
    while (probe->failure.code == TL_OK && !is_over(probe)) {
        if (tl_clock_now_ns() >= deadline_ns) {
            tl_error_set(&reason, TL_DEADLINE_EXCEEDED, "%s within %lld ms",
                         !probe->has_message     ? "no message has arrived"
                         : probe->is_reading     ? "its bytes have not come"
                         : !probe->has_immediate ? "it has not arrived"
                                                 : "the card has not confirmed it",
                         (long long)(timeout_ns / TL_NS_PER_MS));
            fail(probe, &reason);
            return;
        }
        poll_once(probe);
    }
}

static void disconnect(const struct end *end)
{
    static const struct tl_error over = {TL_CANCELLED, "the probe is over"};
    if (end->is_connected) end->pair->ops->disconnect(end->pair, &over);
}

static void finish(struct probe *probe)
{
    struct end *const ends[] = {&probe->target, &probe->initiator};
    for (size_t i = 0; i < TL_ARRAY_COUNT(ends); i++)
        disconnect(ends[i]);
    for (size_t i = 0; i < TL_ARRAY_COUNT(ends); i++) {
        while (ends[i]->is_connected && !ends[i]->is_drained)
            poll_once(probe);
    }
    for (size_t i = 0; i < TL_ARRAY_COUNT(ends); i++) {
        if (ends[i]->pair != NULL) ends[i]->pair->ops->destroy(ends[i]->pair);
    }
    if (probe->region == NULL) return;
    tl_region_destroy(probe->region);
    tl_pages_unmap(probe->memory, 2 * (uint64_t)PROBE_BYTES);
}

/* Without a card that reads there is nothing to try. */
static bool is_impossible(const struct probe *probe)
{
    return probe->is_reading && probe->initiator.pair->read_depth == 0;
}

static enum tl_status run(struct probe *probe, enum tl_keys keys, int64_t timeout_ns, struct tl_error *ret_error)
{
    struct tl_provider *provider = probe->provider;
    struct tl_error reason;
    probe->moved = (struct tl_work){.magic = TL_WORK_MAGIC, .done = move_done};
    if (start(probe, keys, &reason) == TL_OK) {
        if (!is_impossible(probe)) wait_for_bytes(probe, timeout_ns);
    } else {
        fail(probe, &reason);
    }
    reason = probe->failure;
    finish(probe);
    if (reason.code == TL_OK) return TL_OK;
    /* The caller knows the provider, whose name need not be in front. */
    size_t name_len = strlen(provider->name);
    bool is_named =
        strncmp(reason.message, provider->name, name_len) == 0 && strncmp(reason.message + name_len, ": ", 2) == 0;
    return tl_error_set(ret_error, reason.code, "a probe %s failed: %.900s", probe->is_reading ? "read" : "write",
                        reason.message + (is_named ? name_len + 2 : 0));
}

enum tl_status tl_provider_probe(struct tl_provider *provider, enum tl_keys keys, int64_t timeout_ns,
                                 struct tl_error *ret_error)
{
    struct probe probe = {.provider = provider};
    return run(&probe, keys, timeout_ns, ret_error);
}

enum tl_status tl_provider_probe_reads(struct tl_provider *provider, int64_t timeout_ns, struct tl_error *ret_error)
{
    struct probe probe = {.provider = provider, .is_reading = true};
    return run(&probe, TL_KEYS_WINDOW, timeout_ns, ret_error);
}
