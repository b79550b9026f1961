// SPDX-License-Identifier: Apache-2.0
/* Sides: what they count, and what tests ask of any queue pair. */
#include "fakes/sides.h"

#include <poll.h>
#include <string.h>

struct side a, b;
static unsigned jobs_done;

static void on_done(struct tl_work *work, enum tl_status status)
{
    struct job *job = TL_CONTAINER_OF(work, struct job, work);
    job->done++;
    job->order = ++jobs_done;
    job->status = status;
    if (job->side != NULL) job->broken_before = job->side->broken;
}

struct job new_job(void)
{
    return new_job_of(NULL);
}

struct job new_job_of(const struct side *side)
{
    return (struct job){.work = {.magic = TL_WORK_MAGIC, .done = on_done}, .side = side};
}

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->drained, 0);
    side->messages++;
    tl_quota_use(&side->provider->quota, side->members_of_message);
    side->last_len = len_bytes;
    memcpy(side->last, data, len_bytes);
    if (side->answers) side_message(side, side->last, len_bytes, NULL);
}

static void on_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->drained, 0);
    side->immediates++;
    side->last_immediate = immediate;
    side->last_immediate_len = len_bytes;
    if (side->watched != NULL) side->watched_value = *side->watched;
}

static void on_broken(void *owner, const struct tl_error *reason)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 0);
    side->broken++;
    side->reason = *reason;
}

static void on_drained(void *owner)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 1);
    ck_assert_uint_eq(side->drained, 0);
    side->drained++;
}

const struct tl_queue_pair_events side_events = {
    .message = on_message, .immediate = on_immediate, .broken = on_broken, .drained = on_drained};

void side_poll(struct side *side)
{
    if (side->provider != NULL) (void)side->provider->ops->poll(side->provider);
}

void side_create(struct side *side, uint32_t slots, uint32_t work, enum tl_keys keys)
{
    struct tl_error error = {0};
    const struct tl_queue_pair_options options = {.slot_count = slots, .work_count = work, .keys = keys};
    *side = (struct side){.name = side->name, .provider = side->provider, .peer = side->peer};
    ck_assert_msg(tl_queue_pair_create(side->provider, &options, &side_events, side, &side->pair, &error) == TL_OK,
                  "%s", error.message);
}

void side_get_address(const struct side *side, struct tl_pair_address *ret_pair_address)
{
    side->pair->ops->get_address(side->pair, ret_pair_address);
}

void side_connect(struct side *side, const struct tl_pair_address *peer)
{
    struct tl_error error = {0};
    ck_assert_msg(side->pair->ops->connect(side->pair, peer, &error) == TL_OK, "%s", error.message);
    side->is_connected = true;
}

void sides_connect(void)
{
    struct tl_pair_address from_a, from_b;
    side_get_address(&a, &from_a);
    side_get_address(&b, &from_b);
    side_connect(&a, &from_b);
    side_connect(&b, &from_a);
}

void side_message(struct side *side, const void *data, uint32_t len_bytes, struct job *job)
{
    ck_assert_msg(side->pair->ops->space(side->pair) > 0, "%s: no room: %s", side->name, side->reason.message);
    side->pair->ops->message(side->pair, data, len_bytes, job != NULL ? &job->work : NULL);
    tl_queue_pair_doorbell(side->pair);
}

void side_expose(struct side *side, struct tl_region *region, void *address, uint64_t len_bytes,
                 struct tl_exposure *ret_exposure)
{
    struct tl_error error = {0};
    ck_assert_msg(tl_queue_pair_expose(side->pair, region, address, len_bytes, ret_exposure, &error) == TL_OK, "%s",
                  error.message);
    tl_queue_pair_doorbell(side->pair);
}

void side_disconnect(struct side *side)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    side->pair->ops->disconnect(side->pair, &reason);
}

bool side_is_readable(const struct side *side, int timeout_ms)
{
    struct pollfd fd = {.fd = side->provider->fd, .events = POLLIN};
    return poll(&fd, 1, timeout_ms) == 1;
}

void fill_bytes(uint8_t *bytes, uint64_t len_bytes, unsigned seed)
{
    for (uint64_t i = 0; i < len_bytes; i++)
        bytes[i] = (uint8_t)(i * 31 + (i >> 12) + seed);
}
