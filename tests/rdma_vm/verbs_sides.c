// SPDX-License-Identifier: Apache-2.0
/* Two sides: what they count, and how they are made and ended. */
#include "tests/rdma_vm/verbs_sides.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"

struct side a, b;
uint8_t *source, *target;
struct tl_region *source_region, *target_region;
static unsigned jobs_done;

static void on_done(struct tl_work *work, enum tl_status status)
{
    struct job *job = TL_CONTAINER_OF(work, struct job, work);
    job->done++;
    job->order = ++jobs_done;
    job->status = status;
    if (job->side != NULL) job->broken_before = job->side->broken;
}

struct job new_job(const struct side *side)
{
    return (struct job){.work = {TL_WORK_MAGIC, on_done}, .side = side};
}

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct side *side = owner;
    side->messages++;
    side->last_len = len_bytes;
    memcpy(side->last, data, len_bytes);
    if (!side->answers) return;
    ck_assert_uint_gt(side->pair->ops->room(side->pair), 0);
    side->pair->ops->message(side->pair, data, len_bytes, NULL);
    tl_queue_pair_ring(side->pair);
}

static void on_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct side *side = owner;
    side->immediates++;
    side->last_immediate = immediate;
    side->last_immediate_len = len_bytes;
}

static void on_broken(void *owner, const struct tl_error *reason)
{
    struct side *side = owner;
    side->broken++;
    side->reason = *reason;
}

static void on_drained(void *owner)
{
    struct side *side = owner;
    ck_assert_uint_eq(side->broken, 1);
    side->drained++;
}

const struct tl_queue_pair_events pair_events = {on_message, on_immediate, on_broken, on_drained};

/* -------------------------------------------------------------------------------------------------------- set-up -- */

bool has_veth(void)
{
    return access("/sys/class/infiniband/rxe1", F_OK) == 0;
}

const char *address_a(void)
{
    return has_veth() ? "10.9.0.1" : "10.10.0.1";
}

const char *address_b(void)
{
    return has_veth() ? "10.9.0.2" : "10.10.0.1";
}

struct tl_verbs_options options_for(const char *address)
{
    struct tl_verbs_options options;
    tl_verbs_options_init(&options);
    options.address = address;
    options.timeout = 12;
    options.queue_depth = 16384;
    return options;
}

struct tl_provider *open_at(const char *address, enum tl_keys keys)
{
    struct tl_error error = {0};
    struct tl_provider *provider = NULL;
    struct tl_verbs_options options = options_for(address);
    options.keys = keys;
    ck_assert_msg(tl_verbs_open(&options, 0, &provider, &error) == TL_OK, "%s", error.message);
    return provider;
}

void open_both(enum tl_keys keys)
{
    a = (struct side){.provider = open_at(address_a(), keys), .peer = &b};
    b = (struct side){.provider = open_at(address_b(), keys), .peer = &a};
    jobs_done = 0;
}

void create_pair(struct side *side, uint32_t slots, uint32_t work, enum tl_keys keys)
{
    struct tl_error error = {0};
    struct tl_queue_pair_options options = {slots, work, keys};
    struct side fresh = {.provider = side->provider, .peer = side->peer};
    *side = fresh;
    ck_assert_msg(tl_queue_pair_create(side->provider, &options, &pair_events, side, &side->pair, &error) == TL_OK,
                  "%s", error.message);
}

void connect_both(void)
{
    struct tl_error error = {0};
    struct tl_introduction from_a, from_b;
    a.pair->ops->introduce(a.pair, &from_a);
    b.pair->ops->introduce(b.pair, &from_b);
    ck_assert_msg(a.pair->ops->connect(a.pair, &from_b, &error) == TL_OK, "%s", error.message);
    ck_assert_msg(b.pair->ops->connect(b.pair, &from_a, &error) == TL_OK, "%s", error.message);
}

void set_up(uint32_t slots, uint32_t work, enum tl_keys keys)
{
    open_both(keys);
    create_pair(&a, slots, work, keys);
    create_pair(&b, slots, work, keys);
    connect_both();
}

void sever_pair(struct side *side)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    side->pair->ops->sever(side->pair, &reason);
}

void destroy_both(void)
{
    sever_pair(&a);
    sever_pair(&b);
    PUMP_UNTIL(a.drained && b.drained);
    a.pair->ops->destroy(a.pair);
    b.pair->ops->destroy(b.pair);
}

void drop_memory(void)
{
    if (source_region == NULL) return;
    uint64_t len_bytes = source_region->len_bytes;
    tl_region_destroy(source_region);
    tl_region_destroy(target_region);
    munmap(source, len_bytes);
    munmap(target, len_bytes);
    source_region = target_region = NULL;
}

void close_both(void)
{
    drop_memory();
    a.provider->ops->close(a.provider);
    b.provider->ops->close(b.provider);
}

void tear_down(void)
{
    destroy_both();
    close_both();
}

uint8_t *map_memory(uint64_t len_bytes)
{
    void *memory = mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert(memory != MAP_FAILED);
    return memory;
}

struct tl_region *make_region(struct side *side, void *memory, uint64_t len_bytes, enum tl_region_access access)
{
    struct tl_error error = {0};
    struct tl_region *region = NULL;
    ck_assert_msg(tl_region_create(side->provider, memory, len_bytes, access, &region, &error) == TL_OK, "%s",
                  error.message);
    return region;
}

void fill_memory(uint8_t *memory, uint64_t len_bytes, unsigned seed)
{
    for (uint64_t i = 0; i < len_bytes; i++)
        memory[i] = (uint8_t)(i * 31 + (i >> 12) + seed);
}

void expose_memory(struct side *side, struct tl_region *region, void *address, uint64_t len_bytes,
                   struct tl_exposure *ret_exposure)
{
    struct tl_error error = {0};
    ck_assert_msg(tl_queue_pair_expose(side->pair, region, address, len_bytes, ret_exposure, &error) == TL_OK, "%s",
                  error.message);
    tl_queue_pair_ring(side->pair);
}

void send_text(struct side *side, const char *text, struct job *job)
{
    side->pair->ops->message(side->pair, text, (uint32_t)strlen(text), job != NULL ? &job->work : NULL);
    tl_queue_pair_ring(side->pair);
}

/* An exposure is there once a message posted after it has arrived. */
void let_expose_happen(struct side *side)
{
    unsigned before = side->peer->messages;
    send_text(side, "exposed", NULL);
    PUMP_UNTIL(side->peer->messages > before);
}

void make_memory(uint64_t len_bytes)
{
    source = map_memory(len_bytes);
    target = map_memory(len_bytes);
    fill_memory(source, len_bytes, 1);
    source_region = make_region(&a, source, len_bytes, TL_REGION_READ);
    target_region = make_region(&b, target, len_bytes, TL_REGION_WRITE);
}

bool is_readable(const struct side *side, int timeout_ms)
{
    struct pollfd fd = {.fd = side->provider->fd, .events = POLLIN};
    return poll(&fd, 1, timeout_ms) == 1;
}

void write_to(const struct tl_exposure *exposure, uint64_t from, uint64_t len_bytes, uint64_t to, bool tells,
              struct job *job)
{
    a.pair->ops->write(a.pair, source_region, source + from, len_bytes, &exposure->descriptor, to, tells, 0xcafe0001,
                       job != NULL ? &job->work : NULL);
}
