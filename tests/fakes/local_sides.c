// SPDX-License-Identifier: Apache-2.0
/* Sides over the local provider: creating and ending them. */
#include "fakes/local_sides.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dataplane/memory/pages.h"

void side_open(struct side *side, const char *name, const struct tl_local_options *options)
{
    struct tl_error error = {0};
    *side = (struct side){.name = name};
    static const struct tl_local_options defaults;
    ck_assert_msg(tl_local_open(options != NULL ? options : &defaults, &side->provider, &error) == TL_OK, "%s",
                  error.message);
}

void side_write(struct side *side, const void *source, uint64_t len_bytes, const struct tl_exposure *exposure,
                uint64_t offset_bytes, bool has_immediate, uint32_t immediate, struct job *job)
{
    ck_assert_msg(side->pair->ops->space(side->pair) > 0, "%s: no space: %s", side->name, side->reason.message);
    side->pair->ops->write(side->pair, NULL, source, len_bytes, &exposure->descriptor, offset_bytes, has_immediate,
                           immediate, job != NULL ? &job->work : NULL);
    tl_queue_pair_doorbell(side->pair);
}

struct tl_region *side_map(struct side *side, uint64_t len_bytes)
{
    struct tl_region *region;
    struct tl_error error = {0};
    ck_assert_msg(tl_region_map(side->provider, len_bytes, &region, &error) == TL_OK, "%s", error.message);
    return region;
}

void region_drop(struct tl_region *region)
{
    void *address = region->address;
    uint64_t len_bytes = region->len_bytes;
    tl_region_destroy(region);
    tl_pages_unmap(address, len_bytes);
}

void side_end(struct side *side)
{
    if (side->pair == NULL) return;
    side_disconnect(side);
    int64_t end_ns = tl_clock_now_ns() + PATIENCE_NS;
    while (side->is_connected && !side->drained) {
        side_poll(side);
        ck_assert_msg(tl_clock_now_ns() < end_ns, "%s is never drained", side->name);
    }
    side->pair->ops->destroy(side->pair);
    side->pair = NULL;
}

void side_close(struct side *side)
{
    side_end(side);
    if (side->provider != NULL) side->provider->ops->close(side->provider);
    side->provider = NULL;
}

void sides_set_up_with(uint32_t slots, uint32_t work, const struct tl_local_options *options)
{
    side_open(&a, "a", options);
    side_open(&b, "b", options);
    side_create(&a, slots, work, TL_KEYS_REGION);
    side_create(&b, slots, work, TL_KEYS_REGION);
    sides_connect();
    side_message(&a, "", 0, NULL);
    side_message(&b, "", 0, NULL);
    PUMP_UNTIL(a.messages == 1 && b.messages == 1);
    a.messages = b.messages = 0;
    /* These polls read all packets that the handshake has sent. */
    for (unsigned i = 0; i < 4; i++) {
        tl_provider_disarm(a.provider, true);
        tl_provider_disarm(b.provider, true);
        side_poll(&a);
        side_poll(&b);
    }
}

void sides_set_up(const struct tl_local_options *options)
{
    sides_set_up_with(16, 16, options);
}

void sides_tear_down(void)
{
    side_close(&a);
    side_close(&b);
}

unsigned count_mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "re");
    ck_assert_ptr_nonnull(file);
    char control_socket[512];
    unsigned count = 0;
    while (fgets(control_socket, sizeof(control_socket), file) != NULL)
        count += strstr(control_socket, "memfd:tensorlane") != NULL;
    ck_assert_int_eq(fclose(file), 0);
    return count;
}

void send_address(int fd, const struct side *side)
{
    struct tl_pair_address pair_address;
    side_get_address(side, &pair_address);
    ck_assert_int_eq(send(fd, pair_address.bytes, pair_address.len_bytes, MSG_NOSIGNAL), pair_address.len_bytes);
}

bool receive_address(int fd, struct tl_pair_address *ret_pair_address)
{
    ssize_t len_bytes = recv(fd, ret_pair_address->bytes, sizeof(ret_pair_address->bytes), 0);
    if (len_bytes <= 0) return false;
    ret_pair_address->len_bytes = (uint32_t)len_bytes;
    return true;
}
