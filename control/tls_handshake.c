// SPDX-License-Identifier: Apache-2.0
/*
 * The handshake thread, which makes the handshakes and loads files that have changed.
 *
 * Happy path: other threads add connections; the thread waits for all of them, and lets each take a step
 * (tls_handshake_step.c) when something has come.
 *
 * Failure modes: each handshake has a deadline. There are places for MAX_HANDSHAKES connections that were accepted; one
 * more ends the oldest, so that others are served however many say nothing. Files that have changed and cannot be used
 * are logged once; what was loaded before stays in use. The thread opens spare descriptors again when others have been
 * closed.
 */
#include "control/tls_handshake.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "control/tls_handshake_internal.h"

#define MAX_HANDSHAKES 1024
#define MAX_EVENTS 64
#define PERIOD_NS TL_NS_PER_SEC

/* ----------------------------------------------------------------------------------------------------- thread -- */

/* Takes over a handshake that another thread has added. */
static void begin(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    if (handshake->dial != NULL) {
        tl_list_push_back(&handshakes->dialled, &handshake->place);
    } else {
        tl_list_push_back(&handshakes->accepted, &handshake->place);
        handshakes->accepted_count++;
    }
    struct tl_error error;
    struct epoll_event event = {.events = handshake->is_connecting ? EPOLLOUT : EPOLLIN, .data.ptr = handshake};
    if (handshake->connection < 0) {
        tls_handshake_fail(handshakes, handshake, &handshake->dial->failure);
    } else if (epoll_ctl(handshakes->epoll, EPOLL_CTL_ADD, handshake->connection, &event) != 0) {
        tl_error_set_errno(&error, errno, "no TLS connection");
        tls_handshake_fail(handshakes, handshake, &error);
    }
}

static void end_late(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    if (handshake->is_refused) {
        tls_handshake_end(handshakes, handshake);
        return;
    }
    struct tl_error error;
    tl_error_set(&error, TL_DEADLINE_EXCEEDED, "%s",
                 handshake->is_connecting     ? "no TCP connection within the connect time-out"
                 : handshake->session == NULL ? "it said nothing within the connect time-out"
                 : handshake->dial != NULL    ? "the TLS handshake did not end within the connect time-out"
                                              : "its TLS handshake did not end within the connect time-out");
    tls_handshake_fail(handshakes, handshake, &error);
}

static void take_added(struct tl_tls_handshakes *handshakes)
{
    struct tl_list added;
    tl_list_init(&added);
    pthread_mutex_lock(&handshakes->mutex);
    tl_list_splice_back(&added, &handshakes->added);
    pthread_mutex_unlock(&handshakes->mutex);
    struct tl_list *place;
    while ((place = tl_list_pop_front(&added)) != NULL)
        begin(handshakes, TL_CONTAINER_OF(place, struct handshake, place));
    while (handshakes->accepted_count > MAX_HANDSHAKES) {
        struct tl_error error;
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "more than %d handshakes are under way, and this is the oldest",
                     MAX_HANDSHAKES);
        tls_handshake_fail(handshakes, TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place), &error);
    }
}

/* Ends what is late or not wanted any more. Accepted ones are in the order of their deadlines. */
static void end_all_late(struct tl_tls_handshakes *handshakes)
{
    int64_t now_ns = tl_clock_now_ns();
    while (!tl_list_is_empty(&handshakes->accepted)) {
        struct handshake *oldest = TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place);
        if (now_ns < oldest->deadline_ns) break;
        end_late(handshakes, oldest);
    }
    struct tl_list *next;
    for (struct tl_list *place = handshakes->dialled.next; place != &handshakes->dialled; place = next) {
        next = place->next;
        struct handshake *handshake = TL_CONTAINER_OF(place, struct handshake, place);
        if (now_ns >= handshake->deadline_ns) {
            end_late(handshakes, handshake);
        } else if (tls_dial_is_abandoned(handshake->dial)) {
            tls_handshake_end(handshakes, handshake);
        }
    }
}

static void maybe_load(struct tl_tls_handshakes *handshakes)
{
    int64_t now_ns = tl_clock_now_ns();
    if (now_ns < handshakes->period_ns) return;
    handshakes->period_ns = now_ns + PERIOD_NS;
    if (tl_tls_context_is_current(handshakes->context, &handshakes->settings)) {
        handshakes->load_failure.code = TL_OK;
        return;
    }
    struct tl_tls_context *context;
    struct tl_error error;
    if (tl_tls_context_load(&handshakes->settings, handshakes->context, &context, &error) == TL_OK) {
        TL_LOG_AT_INFO("certificates loaded again", TL_STR("name", tl_tls_context_self(context)->text));
        tl_tls_relay_recheck(handshakes->relay, context);
        tl_tls_context_release(handshakes->context);
        handshakes->context = context;
        handshakes->load_failure.code = TL_OK;
        return;
    }
    /* Between two files that are replaced one after the other, they may not fit each other for a moment. */
    bool is_same =
        handshakes->load_failure.code != TL_OK && strcmp(handshakes->load_failure.message, error.message) == 0;
    if (is_same && !handshakes->is_failure_logged) {
        TL_LOG_AT_ERROR("changed certificates cannot be used, those before stay in use",
                        TL_STR("reason", error.message));
    }
    handshakes->is_failure_logged = is_same;
    handshakes->load_failure = error;
}

static bool is_ending(struct tl_tls_handshakes *handshakes)
{
    pthread_mutex_lock(&handshakes->mutex);
    bool is_ending = handshakes->is_ending;
    pthread_mutex_unlock(&handshakes->mutex);
    return is_ending;
}

static int sleep_ms(const struct tl_tls_handshakes *handshakes)
{
    int64_t due_ns = handshakes->period_ns;
    if (!tl_list_is_empty(&handshakes->accepted)) {
        const struct handshake *oldest = TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place);
        if (oldest->deadline_ns < due_ns) due_ns = oldest->deadline_ns;
    }
    TL_LIST_FOREACH(&handshakes->dialled, place)
    {
        const struct handshake *handshake = TL_CONTAINER_OF(place, struct handshake, place);
        if (handshake->deadline_ns < due_ns) due_ns = handshake->deadline_ns;
    }
    return (int)((tl_clock_remaining_ns(due_ns) + TL_NS_PER_MS - 1) / TL_NS_PER_MS);
}

static void *run(void *argument)
{
    struct tl_tls_handshakes *handshakes = argument;
    struct epoll_event events[MAX_EVENTS];
    while (!is_ending(handshakes)) {
        int count = epoll_wait(handshakes->epoll, events, MAX_EVENTS, sleep_ms(handshakes));
        for (int i = 0; i < count; i++) {
            eventfd_t ignored;
            if (events[i].data.ptr == NULL)
                (void)eventfd_read(handshakes->event, &ignored);
            else
                tls_handshake_step(handshakes, events[i].data.ptr);
        }
        take_added(handshakes);
        end_all_late(handshakes);
        maybe_load(handshakes);
        tls_handshake_keep_spares(handshakes);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

/* Copies the settings; false without memory. */
static bool copy_settings(struct tl_tls_handshakes *handshakes, const struct tl_tls_settings *settings)
{
    const char *const from[] = {settings->ca, settings->certificate, settings->key, settings->crl,
                                settings->foreign_names};
    for (size_t i = 0; i < TL_ARRAY_COUNT(from); i++) {
        handshakes->strings[i] = from[i] != NULL ? strdup(from[i]) : NULL;
        if (from[i] != NULL && handshakes->strings[i] == NULL) return false;
    }
    handshakes->settings = (struct tl_tls_settings){.ca = handshakes->strings[0],
                                                    .certificate = handshakes->strings[1],
                                                    .key = handshakes->strings[2],
                                                    .crl = handshakes->strings[3],
                                                    .foreign_names = handshakes->strings[4],
                                                    .is_tls12_allowed = settings->is_tls12_allowed};
    return true;
}

static enum tl_status open_descriptors(struct tl_tls_handshakes *handshakes, struct tl_error *ret_error)
{
    handshakes->epoll = epoll_create1(EPOLL_CLOEXEC);
    handshakes->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (handshakes->epoll >= 0 && handshakes->event >= 0 &&
        epoll_ctl(handshakes->epoll, EPOLL_CTL_ADD, handshakes->event, &event) == 0)
        return TL_OK;
    return tl_error_set_errno(ret_error, errno, "cannot wait for TLS handshakes");
}

enum tl_status tl_tls_handshakes_create(const struct tl_tls_options *options, struct tl_tls_relay *relay,
                                        struct tl_tls_handshakes **ret_handshakes, struct tl_error *ret_error)
{
    struct tl_tls_handshakes *handshakes = calloc(1, sizeof(*handshakes));
    if (handshakes == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS handshakes");
    handshakes->relay = relay;
    handshakes->timeout_ns = options->handshake_timeout_ns;
    handshakes->keepalive_timeout_ns = options->keepalive_timeout_ns;
    pthread_mutex_init(&handshakes->mutex, NULL);
    tl_log_limit_init(&handshakes->log_limit);
    tl_list_init(&handshakes->added);
    tl_list_init(&handshakes->accepted);
    tl_list_init(&handshakes->dialled);
    handshakes->epoll = handshakes->event = -1;
    enum tl_status status = TL_OK;
    if (!copy_settings(handshakes, &options->settings))
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS handshakes");
    if (status == TL_OK) status = tl_tls_context_load(&handshakes->settings, NULL, &handshakes->context, ret_error);
    if (status == TL_OK) status = open_descriptors(handshakes, ret_error);
    if (status == TL_OK) tls_handshake_keep_spares(handshakes);
    if (status == TL_OK) status = tl_thread_start("tl-tls-shake", run, handshakes, &handshakes->thread, ret_error);
    if (status != TL_OK) {
        tl_tls_handshakes_destroy(handshakes);
        return status;
    }
    handshakes->has_thread = true;
    *ret_handshakes = handshakes;
    return TL_OK;
}

void tl_tls_handshakes_end(struct tl_tls_handshakes *handshakes)
{
    if (!handshakes->has_thread) return;
    pthread_mutex_lock(&handshakes->mutex);
    handshakes->is_ending = true;
    pthread_mutex_unlock(&handshakes->mutex);
    (void)eventfd_write(handshakes->event, 1);
    pthread_join(handshakes->thread, NULL);
    take_added(handshakes);
    while (!tl_list_is_empty(&handshakes->accepted))
        tls_handshake_end(handshakes, TL_CONTAINER_OF(handshakes->accepted.next, struct handshake, place));
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "closed before the TLS handshake ended");
    while (!tl_list_is_empty(&handshakes->dialled))
        tls_handshake_fail(handshakes, TL_CONTAINER_OF(handshakes->dialled.next, struct handshake, place), &error);
}

void tl_tls_handshakes_destroy(struct tl_tls_handshakes *handshakes)
{
    if (handshakes == NULL) return;
    tl_tls_context_release(handshakes->context);
    if (handshakes->epoll >= 0) (void)close(handshakes->epoll);
    if (handshakes->event >= 0) (void)close(handshakes->event);
    while (handshakes->spare_count > 0)
        (void)close(handshakes->spares[--handshakes->spare_count]);
    pthread_mutex_destroy(&handshakes->mutex);
    tl_log_limit_fini(&handshakes->log_limit);
    for (size_t i = 0; i < TL_ARRAY_COUNT(handshakes->strings); i++)
        free(handshakes->strings[i]);
    free(handshakes);
}

/* Gives it to the thread; false: that has ended, and the handshake was freed. */
static bool add(struct tl_tls_handshakes *handshakes, struct handshake *handshake)
{
    pthread_mutex_lock(&handshakes->mutex);
    bool is_added = !handshakes->is_ending;
    if (is_added) tl_list_push_back(&handshakes->added, &handshake->place);
    pthread_mutex_unlock(&handshakes->mutex);
    if (is_added) {
        (void)eventfd_write(handshakes->event, 1);
    } else {
        if (handshake->connection >= 0) (void)close(handshake->connection);
        free(handshake);
    }
    return is_added;
}

bool tl_tls_handshakes_use_spares(const struct tl_tls_handshakes *handshakes)
{
    return atomic_load(&handshakes->uses_spares);
}

void tl_tls_handshakes_accept(struct tl_tls_handshakes *handshakes, int connection, tl_tls_accepted_fn accepted,
                              void *context)
{
    struct handshake *handshake = calloc(1, sizeof(*handshake));
    if (handshake == NULL) {
        (void)close(connection);
        return;
    }
    tl_list_init(&handshake->place);
    handshake->connection = connection;
    handshake->accepted = accepted;
    handshake->context = context;
    handshake->deadline_ns = tl_clock_deadline_ns(handshakes->timeout_ns);
    (void)tl_endpoint_peer(connection, handshake->target);
    (void)add(handshakes, handshake);
}

enum tl_status tl_tls_handshakes_dial(struct tl_tls_handshakes *handshakes, struct tl_loop *loop,
                                      const struct tl_tls_address *address, tl_tls_dialled_fn dialled, void *owner,
                                      struct tl_tls_dial **ret_dial, struct tl_error *ret_error)
{
    struct handshake *handshake = calloc(1, sizeof(*handshake));
    struct tl_tls_dial *dial = tls_dial_create(loop, address, dialled, owner);
    if (handshake == NULL || dial == NULL) {
        free(handshake);
        if (dial != NULL) tls_dial_free(dial);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to dial %s", address->label);
    }
    tl_list_init(&handshake->place);
    handshake->dial = dial;
    handshake->deadline_ns = address->deadline_ns;
    snprintf(handshake->target, sizeof(handshake->target), "%s", address->target);
    handshake->connection = tls_dial_connect(address->target, handshakes->keepalive_timeout_ns, &dial->failure);
    handshake->is_connecting = true;
    *ret_dial = dial;
    if (add(handshakes, handshake)) return TL_OK;
    *ret_dial = NULL;
    tls_dial_free(dial);
    return tl_error_set(ret_error, TL_CANCELLED, "%s was not dialled: this process is closing", address->label);
}
