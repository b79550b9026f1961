// SPDX-License-Identifier: Apache-2.0
/*
 * Shares of a limit: a hash table of the clients that hold something.
 *
 * The shares of the IDLE_COUNT clients that gave everything back last are kept, because a client often takes and gives
 * one at a time, and making its entry anew each time would cost more than the rest.
 */
#include "base/shares.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/list.h"
#include "base/random.h"

#define IDLE_COUNT 64

struct tl_share {
    struct tl_share_client client;
    UT_hash_handle hh; /* in tl_shares.clients, by client */
    struct tl_shares *shares;
    uint64_t held;
    struct tl_list idle_link; /* in tl_shares.idle while held is 0 */
};

struct tl_shares {
    pthread_mutex_t mutex;
    const char *setting;
    uint64_t limit;
    uint64_t hash_seed;
    uint64_t used;
    struct tl_share *clients;
    struct tl_list idle; /* the one that became idle first is first */
    unsigned idle_count;
    bool is_destroyed; /* only what is held keeps it */
};

/* ----------------------------------------------------------------------------------------------------- clients -- */

/* The host of "[::1]:4000", where brackets may be percent-encoded. False: it is no such address. */
static bool parse_ipv6(const char *text, struct tl_share_client *client)
{
    char host[INET6_ADDRSTRLEN];
    text += strncmp(text, "%5B", 3) == 0 ? 3 : *text == '[';
    size_t len = strcspn(text, "]%"); /* a percent sign begins a zone or the encoded bracket */
    if (len >= sizeof(host)) return false;
    memcpy(host, text, len);
    host[len] = '\0';
    return inet_pton(AF_INET6, host, client->address) == 1;
}

static bool parse_ipv4(const char *text, struct tl_share_client *client)
{
    char host[INET_ADDRSTRLEN];
    size_t len = strcspn(text, ":");
    if (len >= sizeof(host)) return false;
    memcpy(host, text, len);
    host[len] = '\0';
    memset(client->address + 10, 0xff, 2);
    return inet_pton(AF_INET, host, client->address + 12) == 1;
}

struct tl_share_client tl_share_client_of(const char *address)
{
    struct tl_share_client client = {.link = 0};
    const size_t scheme_len = strlen("ipv4:");
    bool is_ip = (strncmp(address, "ipv4:", scheme_len) == 0 && parse_ipv4(address + scheme_len, &client)) ||
                 (strncmp(address, "ipv6:", scheme_len) == 0 && parse_ipv6(address + scheme_len, &client));
    return is_ip ? client : (struct tl_share_client){.link = 0};
}

/* ------------------------------------------------------------------------------------------------------ shares -- */

static void lock(struct tl_shares *shares)
{
    TL_CHECK(pthread_mutex_lock(&shares->mutex) == 0);
}

static void unlock(struct tl_shares *shares)
{
    TL_CHECK(pthread_mutex_unlock(&shares->mutex) == 0);
}

struct tl_shares *tl_shares_create(const char *setting, uint64_t limit)
{
    struct tl_shares *shares = calloc(1, sizeof(*shares));
    if (shares == NULL) return NULL;
    TL_CHECK(pthread_mutex_init(&shares->mutex, NULL) == 0);
    shares->setting = setting;
    shares->limit = limit;
    shares->hash_seed = tl_random_u64();
    tl_list_init(&shares->idle);
    return shares;
}

static void drop_oldest_idle(struct tl_shares *shares)
{
    struct tl_share *share = TL_CONTAINER_OF(tl_list_pop_front(&shares->idle), struct tl_share, idle_link);
    HASH_DELETE(hh, shares->clients, share);
    shares->idle_count--;
    free(share);
}

/* Unlocks, and frees the shares if nothing needs them any more. */
static void unlock_or_free(struct tl_shares *shares)
{
    bool is_over = shares->is_destroyed && shares->used == 0;
    while (is_over && shares->idle_count > 0)
        drop_oldest_idle(shares);
    unlock(shares);
    if (!is_over) return;
    TL_CHECK(pthread_mutex_destroy(&shares->mutex) == 0);
    free(shares);
}

void tl_shares_destroy(struct tl_shares *shares)
{
    if (shares == NULL) return;
    lock(shares);
    shares->is_destroyed = true;
    unlock_or_free(shares);
}

/* NULL: no memory. */
static struct tl_share *find_or_add(struct tl_shares *shares, const struct tl_share_client *client)
{
    struct tl_share *share;
    unsigned hash = (unsigned)XXH3_64bits_withSeed(client, sizeof(*client), shares->hash_seed);
    HASH_FIND_BYHASHVALUE(hh, shares->clients, client, sizeof(*client), hash, share);
    if (share != NULL) return share;
    share = calloc(1, sizeof(*share));
    if (share == NULL) return NULL;
    share->client = *client;
    share->shares = shares;
    HASH_ADD_BYHASHVALUE(hh, shares->clients, client, sizeof(*client), hash, share);
    if (share->hh.tbl == NULL) {
        free(share);
        return NULL;
    }
    tl_list_push_back(&shares->idle, &share->idle_link);
    shares->idle_count++;
    return share;
}

/* How many clients hold something, without this one. */
static uint64_t count_others(const struct tl_shares *shares, const struct tl_share *share)
{
    return HASH_COUNT(shares->clients) - shares->idle_count - (share->held > 0 ? 1 : 0);
}

static bool is_admitted(const struct tl_shares *shares, const struct tl_share *share, uint64_t amount)
{
    uint64_t held, used;
    if (!tl_add_u64(share->held, amount, &held) || !tl_add_u64(shares->used, amount, &used)) return false;
    if (held > shares->limit - shares->limit / 4) return false;
    return used <= shares->limit || held <= shares->limit / (count_others(shares, share) + 1);
}

static enum tl_status take(struct tl_shares *shares, const struct tl_share_client *client, uint64_t amount,
                           struct tl_share **ret_share, struct tl_error *ret_error)
{
    struct tl_share *share = find_or_add(shares, client);
    if (share == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the account of a client");
    if (!is_admitted(shares, share, amount))
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s (%" PRIu64 ") has no space for %" PRIu64 " more of this client, which holds %" PRIu64
                            " of %" PRIu64 " in use; one client may have three quarters; free something or raise %s",
                            shares->setting, shares->limit, amount, share->held, shares->used, shares->setting);
    if (share->held == 0) {
        tl_list_remove(&share->idle_link);
        shares->idle_count--;
    }
    share->held += amount;
    shares->used += amount;
    *ret_share = share;
    return TL_OK;
}

enum tl_status tl_shares_take(struct tl_shares *shares, const struct tl_share_client *client, uint64_t amount,
                              struct tl_share **ret_share, struct tl_error *ret_error)
{
    TL_CHECK(amount > 0);
    lock(shares);
    enum tl_status status = take(shares, client, amount, ret_share, ret_error);
    if (shares->idle_count > IDLE_COUNT) drop_oldest_idle(shares);
    unlock(shares);
    return status;
}

void tl_shares_give(struct tl_share *share, uint64_t amount)
{
    struct tl_shares *shares = share->shares;
    lock(shares);
    TL_CHECK(amount <= share->held);
    share->held -= amount;
    shares->used -= amount;
    if (amount > 0 && share->held == 0) {
        tl_list_push_back(&shares->idle, &share->idle_link);
        if (++shares->idle_count > IDLE_COUNT) drop_oldest_idle(shares);
    }
    unlock_or_free(shares);
}

uint64_t tl_shares_used(struct tl_shares *shares)
{
    lock(shares);
    uint64_t used = shares->used;
    unlock(shares);
    return used;
}
