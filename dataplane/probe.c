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
 *
 * A device takes the place of the memory of one end. What a write brings there is compared by the caller, which can
 * copy it to the host.
 */
#include "dataplane/probe.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "dataplane/memory/pages.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

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
    struct tl_region *device_region; /* memory of a device; NULL: both ends lie on the host */
    uint8_t *on_device;              /* PROBE_BYTES */
    bool is_to_device;               /* the bytes go to the device; false: they come from there */
    const uint8_t *bytes;            /* PROBE_BYTES to write; NULL: any */
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
    if (probe->is_to_device) return;
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
        bool is_from_device = probe->device_region != NULL && !probe->is_to_device;
        pair->ops->write(pair, is_from_device ? probe->device_region : probe->region,
                         is_from_device ? probe->on_device : probe->memory + PROBE_BYTES, probe->len_bytes, descriptor,
                         0, true, IMMEDIATE, &probe->moved);
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
    if (probe->bytes != NULL) {
        memcpy(probe->memory + PROBE_BYTES, probe->bytes, PROBE_BYTES);
        return TL_OK;
    }
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
    struct tl_region *target = probe->is_to_device ? probe->device_region : probe->region;
    status = probe->is_reading
                 ? tl_queue_pair_expose_source(pair, probe->region, probe->memory + PROBE_BYTES, PROBE_BYTES, false,
                                               &probe->exposure, ret_error)
                 : tl_queue_pair_expose(pair, target, probe->is_to_device ? probe->on_device : probe->memory,
                                        PROBE_BYTES, &probe->exposure, ret_error);
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

/* ---------------------------------------------------------------------------------------------------- devices -- */

static void fill_at_random(const struct tl_tensor *tensor)
{
    uint8_t *bytes = tl_tensor_data(tensor);
    for (size_t i = 0; i < PROBE_BYTES; i += sizeof(uint64_t)) {
        uint64_t number = tl_random_u64();
        memcpy(bytes + i, &number, sizeof(number));
    }
}

/* The memory of a probe of a device. */
struct device_memory {
    struct tl_tensor *on_device;
    struct tl_tensor *sent;     /* on the host */
    struct tl_tensor *returned; /* on the host */
    struct tl_region *region;   /* registered for on_device */
};

static enum tl_status make_device_memory(struct tl_provider *provider, struct tl_device device,
                                         struct device_memory *ret_memory, struct tl_error *ret_error)
{
    static const uint64_t size_bytes = PROBE_BYTES;
    struct tl_device_allocation allocation;
    enum tl_status status = tl_tensor_create(TL_U8, 1, &size_bytes, &ret_memory->sent, ret_error);
    if (status == TL_OK) status = tl_tensor_create(TL_U8, 1, &size_bytes, &ret_memory->returned, ret_error);
    if (status == TL_OK) status = tl_tensor_create_on(device, TL_U8, 1, &size_bytes, &ret_memory->on_device, ret_error);
    if (status != TL_OK) return status;
    tl_tensor_set_stream(ret_memory->on_device, TL_STREAM_NONE);
    status =
        tl_device_find_allocation(device, tl_tensor_data(ret_memory->on_device), PROBE_BYTES, &allocation, ret_error);
    if (status != TL_OK) return status;
    status = tl_region_create_on(provider, &allocation, TL_REGION_WRITE, &ret_memory->region, ret_error);
    if (allocation.file >= 0) close(allocation.file);
    return status;
}

/* Writes from the device, or to it, what CUDA has put there or finds there. */
static enum tl_status run_with(struct tl_provider *provider, enum tl_keys keys, const struct device_memory *memory,
                               bool is_to_device, int64_t timeout_ns, struct tl_error *ret_error)
{
    struct probe probe = {.provider = provider,
                          .device_region = memory->region,
                          .on_device = tl_tensor_data(memory->on_device),
                          .is_to_device = is_to_device,
                          .bytes = tl_tensor_data(memory->sent)};
    fill_at_random(memory->sent);
    enum tl_status status = TL_OK;
    if (!is_to_device) status = tl_tensor_copy(memory->on_device, memory->sent, ret_error);
    if (status == TL_OK) status = run(&probe, keys, timeout_ns, ret_error);
    if (status != TL_OK || !is_to_device) return status;
    status = tl_tensor_copy(memory->returned, memory->on_device, ret_error);
    if (status != TL_OK) return status;
    if (memcmp(tl_tensor_data(memory->sent), tl_tensor_data(memory->returned), probe.len_bytes) == 0) return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS, "a probe write failed: the device has other bytes");
}

enum tl_status tl_provider_probe_device(const struct tl_provider *provider, enum tl_keys keys, struct tl_device device,
                                        int64_t timeout_ns, struct tl_error *ret_error)
{
    struct tl_provider *again;
    struct device_memory memory = {.region = NULL};
    enum tl_status status = tl_provider_reopen(provider, &again, ret_error);
    if (status != TL_OK) return status;
    status = make_device_memory(again, device, &memory, ret_error);
    if (status == TL_OK) status = run_with(again, keys, &memory, false, timeout_ns, ret_error);
    if (status == TL_OK) status = run_with(again, keys, &memory, true, timeout_ns, ret_error);
    tl_region_destroy(memory.region);
    tl_tensor_put(memory.on_device);
    tl_tensor_put(memory.sent);
    tl_tensor_put(memory.returned);
    again->ops->close(again);
    return status;
}
