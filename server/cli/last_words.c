// SPDX-License-Identifier: Apache-2.0
/*
 * A control plane without a worker behind it: handlers that describe a worker that does not serve, and refuse the rest.
 *
 * Happy path: listen, answer until the time is over, stop. Failure modes: what keeps the worker from starting may keep
 * this from listening as well (the port is taken, no threads); then there are no last words. Peers that try to connect
 * get TL_UNAVAILABLE with the reason, which they log and try again, as with a worker that is not started.
 */
#include "server/cli/last_words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "base/text.h"
#include "control/control.h"
#include "server/cli/remedy.h"
#include "server/tls_options.h"
#include "server/peers/permissions.h"

/* How often it looks for a signal. */
#define ROUND_NS (50 * TL_NS_PER_MS)

struct speaker {
    const struct tl_last_words *words;
    uint64_t incarnation;
    int64_t start_ns;
    struct tl_loop *loop;
    struct tl_control *control;
    struct tl_permissions *permissions; /* NULL: everybody may do everything */
    bool is_stopped;
};

static enum tl_status refuse(const struct speaker *speaker, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_UNAVAILABLE, "%s could not start: %.700s", speaker->words->task->name,
                        speaker->words->message);
}

/* ---------------------------------------------------------------------------------------------------- handlers -- */

static void request(void *context, struct tl_serve *serve)
{
    struct tl_error refusal;
    (void)refuse(context, &refusal);
    serve->ops->reply(serve, &refusal, NULL);
}

static void closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    (void)context;
    (void)serve;
    (void)end;
}

static void forget(void *context, const struct tl_request_id *id)
{
    (void)context;
    (void)id;
}

static enum tl_link_admission admit_link(void *context, const struct tl_identity *peer, struct tl_error *ret_error)
{
    (void)peer;
    (void)refuse(context, ret_error);
    return TL_LINK_REFUSED;
}

static enum tl_status may(void *context, const struct tl_identity *caller, enum tl_action action,
                          struct tl_error *ret_error)
{
    const struct speaker *speaker = context;
    return tl_permissions_check(speaker->permissions, caller, action, ret_error);
}

static enum tl_status admit(void *context, const struct tl_identity *client, const struct tl_push *push,
                            void **ret_admission, struct tl_error *ret_error)
{
    (void)client;
    (void)push;
    (void)ret_admission;
    return refuse(context, ret_error);
}

static enum tl_status walk_begin(void *context, const struct tl_identity *client, const char *pattern, bool withdraws,
                                 struct tl_walk **ret_walk, struct tl_error *ret_error)
{
    (void)client;
    (void)pattern;
    (void)withdraws;
    (void)ret_walk;
    return refuse(context, ret_error);
}

static enum tl_status describe(void *context, struct tl_description *ret_description, struct tl_error *ret_error)
{
    const struct speaker *speaker = context;
    const struct tl_config_task *task = speaker->words->task;
    const char *remedy;
    size_t len = tl_remedy_split(speaker->words->message, &remedy);
    char host_name[TL_HOST_NAME_BYTES];
    tl_text_host_name(host_name, sizeof(host_name));
    ret_description->job = strdup(task->job);
    ret_description->task = task->index;
    ret_description->incarnation = speaker->incarnation;
    ret_description->software_version = strdup(tl_version());
    ret_description->host_name = strdup(host_name);
    ret_description->process_id = (uint64_t)getpid();
    ret_description->unix_ns = tl_clock_unix_ns();
    ret_description->uptime_ns = (uint64_t)(tl_clock_now_ns() - speaker->start_ns);
    ret_description->reason = strndup(speaker->words->message, len);
    ret_description->remedy = strdup(remedy);
    if (ret_description->job != NULL && ret_description->software_version != NULL &&
        ret_description->host_name != NULL && ret_description->reason != NULL && ret_description->remedy != NULL)
        return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a description");
}

static const struct tl_control_handlers handlers = {
    .source = {.request = request, .closed = closed, .received = forget, .given_up = forget},
    .may = may,
    .admit_link = admit_link,
    .admit = admit,
    .walk_begin = walk_begin,
    .describe = describe,
};

/* ------------------------------------------------------------------------------------------------------ speaking -- */

static enum tl_status listen_at(struct speaker *speaker, struct tl_error *ret_error)
{
    const struct tl_settings *settings = &speaker->words->task->settings;
    struct tl_tls_options tls;
    struct tl_control_options options = {
        .tls = tl_tls_options_of(settings, &tls) ? &tls : NULL,
        .self = {.incarnation = speaker->incarnation},
        .chunk_bytes = settings->chunk_bytes,
        .inflight_bytes = settings->inflight_bytes,
        .max_calls = settings->connections,
        .max_unsent = settings->waiting_receivers,
        .connect_timeout_ns = settings->connect_timeout_ns,
        .max_link_age_ns = TL_TIME_NEVER,
        .request_timeout_ns = settings->request_timeout_ns,
        .stalled_timeout_ns = settings->stalled_timeout_ns,
        .keepalive_ns = settings->keepalive_ns,
        .keepalive_timeout_ns = settings->keepalive_timeout_ns,
        .handlers = &handlers,
        .worker = speaker,
    };
    uint16_t port;
    snprintf(options.self.name, sizeof(options.self.name), "%s", speaker->words->task->name);
    enum tl_status status = tl_loop_create(&speaker->loop, ret_error);
    if (status == TL_OK && settings->security.ca != NULL)
        status = tl_permissions_create(speaker->words->config, &settings->security, speaker->words->task->name,
                                       &speaker->permissions, ret_error);
    if (status == TL_OK) status = tl_control_create(speaker->loop, &options, &speaker->control, ret_error);
    if (status == TL_OK) status = tl_control_start(speaker->control, speaker->words->listen, &port, ret_error);
    return status;
}

static void answer(const struct speaker *speaker)
{
    static const struct timespec no_time;
    int64_t end_ns = tl_clock_deadline_ns(speaker->words->duration_ns);
    while (tl_clock_remaining_ns(end_ns) > 0) {
        int64_t round_ns = tl_clock_deadline_ns(ROUND_NS);
        (void)tl_loop_run_once(speaker->loop, round_ns < end_ns ? round_ns : end_ns);
        int signal_number = sigtimedwait(speaker->words->signals, NULL, &no_time);
        if (signal_number == SIGTERM || signal_number == SIGINT) return;
    }
}

static void stopped(void *context)
{
    struct speaker *speaker = context;
    speaker->is_stopped = true;
}

void tl_last_words_say(const struct tl_last_words *words)
{
    struct speaker speaker = {.words = words, .incarnation = tl_random_u64(), .start_ns = tl_clock_now_ns()};
    struct tl_error error;
    if (listen_at(&speaker, &error) == TL_OK) {
        if (words->listening != NULL) words->listening(words);
        answer(&speaker);
        tl_control_stop(speaker.control, tl_clock_now_ns(), stopped, &speaker);
        while (!speaker.is_stopped)
            (void)tl_loop_run_once(speaker.loop, TL_TIME_NEVER);
    }
    tl_control_destroy(speaker.control);
    tl_loop_destroy(speaker.loop);
    tl_permissions_destroy(speaker.permissions);
}
