// SPDX-License-Identifier: Apache-2.0
#include "control/receive_hold.h"

#include <stdlib.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"

struct tl_receive_client {
    struct tl_share_client id;
    struct tl_control *control;
    uint64_t call_count;
    uint64_t held_bytes;
    uint64_t max_bytes;
    struct tl_list waiting;                 /* struct tl_receive_hold, the first comes next */
    const struct tl_receive_hold *retrying; /* the call whose retry runs; NULL: none */
    UT_hash_handle hh;
};

static struct tl_receive_client *make_client(struct tl_control *control, const struct tl_share_client *id)
{
    struct tl_receive_client *client = calloc(1, sizeof(*client));
    bool is_added = client != NULL;
    if (is_added) {
        client->id = *id;
        client->control = control;
        client->max_bytes = TL_REFERENCED_FACTOR * control->options.inflight_bytes;
        tl_list_init(&client->waiting);
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) is_added = false
        HASH_ADD(hh, control->receive_clients, id, sizeof(client->id), client);
    }
    if (is_added) return client;
    free(client);
    return NULL;
}

enum tl_status tl_receive_hold_join(struct tl_control *control, const struct tl_share_client *client,
                                    struct tl_receive_hold *hold, struct tl_error *ret_error)
{
    tl_list_init(&hold->link);
    HASH_FIND(hh, control->receive_clients, client, sizeof(*client), hold->client);
    if (hold->client == NULL) hold->client = make_client(control, client);
    if (hold->client == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a call");
    hold->client->call_count++;
    return TL_OK;
}

static bool has_space(const struct tl_receive_client *client, uint64_t bytes)
{
    return client->held_bytes <= client->max_bytes && bytes <= client->max_bytes - client->held_bytes;
}

bool tl_receive_hold_take(struct tl_receive_hold *hold, uint64_t bytes)
{
    struct tl_receive_client *client = hold->client;
    TL_CHECK(!hold->is_holding && !tl_list_is_linked(&hold->link));
    hold->bytes = tl_min_u64(bytes, client->max_bytes / 2);
    bool must_wait = !tl_list_is_empty(&client->waiting) || !has_space(client, hold->bytes);
    if (client->retrying != hold && must_wait) {
        tl_list_push_back(&client->waiting, &hold->link);
        return false;
    }
    hold->is_holding = true;
    client->held_bytes += hold->bytes;
    return true;
}

/* Retries the calls that wait, as long as there is space for the first of them. */
static void retry_waiting(struct tl_receive_client *client)
{
    while (!tl_list_is_empty(&client->waiting)) {
        struct tl_receive_hold *next = TL_CONTAINER_OF(client->waiting.next, struct tl_receive_hold, link);
        if (!has_space(client, next->bytes)) return;
        tl_list_remove(&next->link);
        client->retrying = next;
        next->retry(next);
        client->retrying = NULL;
    }
}

void tl_receive_hold_leave(struct tl_receive_hold *hold)
{
    struct tl_receive_client *client = hold->client;
    if (client == NULL) return;
    hold->client = NULL;
    tl_list_remove(&hold->link);
    if (hold->is_holding) client->held_bytes -= hold->bytes;
    client->call_count--;
    retry_waiting(client);
    if (client->call_count > 0) return;
    HASH_DEL(client->control->receive_clients, client);
    free(client);
}
