// SPDX-License-Identifier: Apache-2.0
/* Two sides over verbs: how they are made and ended. */
#include "tests/rdma_vm/verbs_sides.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"

uint8_t *source, *target;
struct tl_region *source_region, *target_region;

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
    a = (struct side){.name = "a", .provider = open_at(address_a(), keys), .peer = &b};
    b = (struct side){.name = "b", .provider = open_at(address_b(), keys), .peer = &a};
}

void set_up(uint32_t slots, uint32_t work, enum tl_keys keys)
{
    open_both(keys);
    side_create(&a, slots, work, keys);
    side_create(&b, slots, work, keys);
    sides_connect();
}

void destroy_both(void)
{
    side_disconnect(&a);
    side_disconnect(&b);
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

void send_text(struct side *side, const char *text, struct job *job)
{
    side_message(side, text, (uint32_t)strlen(text), job);
}

/* Waits until the peer can write to an exposure, which is so once a message posted after it has arrived. */
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
    fill_bytes(source, len_bytes, 1);
    source_region = make_region(&a, source, len_bytes, TL_REGION_READ);
    target_region = make_region(&b, target, len_bytes, TL_REGION_WRITE);
}

void write_to(const struct tl_exposure *exposure, uint64_t from, uint64_t len_bytes, uint64_t to, bool tells,
              struct job *job)
{
    a.pair->ops->write(a.pair, source_region, source + from, len_bytes, &exposure->descriptor, to, tells, 0xcafe0001,
                       job != NULL ? &job->work : NULL);
}
