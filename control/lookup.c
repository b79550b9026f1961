// SPDX-License-Identifier: Apache-2.0
/*
 * Look-ups.
 *
 * Happy path: the thread resolves and dials, writes down what it found and posts the look-up to its loop, which calls
 * the owner and frees it. Failure modes: getaddrinfo cannot be stopped. A look-up that is abandoned is freed by its
 * last user: the thread, or the loop when it was posted already. The thread touches the loop only under the mutex and
 * only when the look-up is not abandoned, so that the loop may go before the thread does.
 */
#include "control/lookup.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

struct tl_lookup {
    struct tl_closure closure; /* to the loop, once is_found */
    struct tl_loop *loop;
    struct tl_endpoint endpoint;
    int64_t deadline_ns;
    tl_lookup_done_fn done;
    tl_lookup_ips_fn ips_done; /* NULL: `done` is called */
    void *owner;

    pthread_mutex_t mutex; /* guards is_abandoned and is_found */
    bool is_abandoned;
    bool is_found; /* the thread is over; the loop has the closure */

    /* The thread's until is_found, then the loop's. */
    char target[TL_ENDPOINT_TARGET_BYTES];
    struct tl_ip ips[TL_LOOKUP_MAX_IPS];
    size_t ip_count;
    struct tl_error error; /* code TL_OK: target, or ips, are set */
};

static void lookup_free(struct tl_lookup *lookup)
{
    pthread_mutex_destroy(&lookup->mutex);
    free(lookup);
}

static size_t list_ips(const struct addrinfo *found, struct tl_ip ret_ips[TL_LOOKUP_MAX_IPS])
{
    size_t count = 0;
    for (const struct addrinfo *item = found; item != NULL && count < TL_LOOKUP_MAX_IPS; item = item->ai_next)
        count += tl_ip_of_sockaddr(item->ai_addr, &ret_ips[count]);
    return count;
}

/* What is looked up belongs to this thread until is_found. */
static void *run(void *argument)
{
    struct tl_lookup *lookup = argument;
    struct addrinfo *found;
    if (tl_endpoint_resolve(&lookup->endpoint, TL_TIME_NEVER, &found, &lookup->error) == TL_OK) {
        enum tl_status status = TL_OK;
        if (lookup->ips_done != NULL) {
            lookup->ip_count = list_ips(found, lookup->ips);
        } else {
            status = tl_endpoint_dial(&lookup->endpoint, found, lookup->deadline_ns, lookup->target, &lookup->error);
        }
        if (status == TL_OK) lookup->error = (struct tl_error){.code = TL_OK};
        freeaddrinfo(found);
    }
    pthread_mutex_lock(&lookup->mutex);
    lookup->is_found = true;
    bool is_abandoned = lookup->is_abandoned;
    if (!is_abandoned) tl_loop_post(lookup->loop, &lookup->closure);
    pthread_mutex_unlock(&lookup->mutex);
    if (is_abandoned) lookup_free(lookup);
    return NULL;
}

static void deliver(struct tl_closure *closure)
{
    struct tl_lookup *lookup = TL_CONTAINER_OF(closure, struct tl_lookup, closure);
    /* Waits for the thread to leave the mutex. */
    pthread_mutex_lock(&lookup->mutex);
    bool is_abandoned = lookup->is_abandoned;
    pthread_mutex_unlock(&lookup->mutex);
    if (!is_abandoned && lookup->ips_done != NULL) {
        lookup->ips_done(lookup->owner, lookup->ips, lookup->ip_count, &lookup->error);
    } else if (!is_abandoned) {
        lookup->done(lookup->owner, lookup->target, &lookup->error);
    }
    lookup_free(lookup);
}

/* Copies the look-up, and starts its thread. */
static enum tl_status start(const struct tl_lookup *wanted, struct tl_lookup **ret_lookup, struct tl_error *ret_error)
{
    struct tl_lookup *lookup = malloc(sizeof(*lookup));
    if (lookup == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to look up a host");
    *lookup = *wanted;
    lookup->closure.run = deliver;
    pthread_mutex_init(&lookup->mutex, NULL);
    enum tl_status status = tl_thread_start("tl-lookup", run, lookup, NULL, ret_error);
    if (status != TL_OK) {
        lookup_free(lookup);
        return status;
    }
    *ret_lookup = lookup;
    return TL_OK;
}

enum tl_status tl_lookup_start(struct tl_loop *loop, const struct tl_endpoint *endpoint, int64_t deadline_ns,
                               tl_lookup_done_fn done, void *owner, struct tl_lookup **ret_lookup,
                               struct tl_error *ret_error)
{
    const struct tl_lookup wanted = {
        .loop = loop, .endpoint = *endpoint, .deadline_ns = deadline_ns, .done = done, .owner = owner};
    return start(&wanted, ret_lookup, ret_error);
}

enum tl_status tl_lookup_ips(struct tl_loop *loop, const struct tl_endpoint *endpoint, tl_lookup_ips_fn done,
                             void *owner, struct tl_lookup **ret_lookup, struct tl_error *ret_error)
{
    const struct tl_lookup wanted = {.loop = loop, .endpoint = *endpoint, .ips_done = done, .owner = owner};
    return start(&wanted, ret_lookup, ret_error);
}

void tl_lookup_abandon(struct tl_lookup *lookup)
{
    pthread_mutex_lock(&lookup->mutex);
    lookup->is_abandoned = true;
    pthread_mutex_unlock(&lookup->mutex);
}
