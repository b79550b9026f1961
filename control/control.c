// SPDX-License-Identifier: Apache-2.0
/*
 * The control object: puts loop, server, services and links together, and takes them apart in the right order.
 *
 * Stop: health turns NOT_SERVING, links drain, the server refuses new calls; at the deadline what is left is closed.
 * It has stopped when the server has (if there is one), no link is left, and devices have let go of what was pushed.
 */
#include "control/control.h"

#include <stddef.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/internal.h"
#include "control/wire.h"

/* For one unpacked message; a frame at its limits takes a few hundred KiB. */
#define ARENA_BYTES (4 * 1024 * 1024)

static enum tl_status add_services(struct tl_control *control, struct tl_error *ret_error)
{
    enum tl_status status = tl_link_service_add(control, ret_error);
    if (status == TL_OK) status = tl_transfer_service_add(control, ret_error);
    if (status == TL_OK) status = tl_cluster_service_add(control, ret_error);
    if (status == TL_OK) status = tl_probe_service_add(control, ret_error);
    if (status == TL_OK) status = tl_health_service_add(control, ret_error);
    if (status == TL_OK) status = tl_reflection_service_add(control, ret_error);
    return status;
}

static void links_deadline(struct tl_timer *timer)
{
    struct tl_control *control = TL_CONTAINER_OF(timer, struct tl_control, stop_timer);
    struct tl_error reason;
    const char *name = control->options.self.name;
    tl_error_set(&reason, TL_CANCELLED, "%s has shut down", name[0] != '\0' ? name : "the client");
    tl_links_close(control, &reason);
}

static void ask_again(struct tl_closure *closure)
{
    tl_links_ask_again(TL_CONTAINER_OF(closure, struct tl_control, ask_closure));
}

enum tl_status tl_control_create(struct tl_loop *loop, const struct tl_control_options *options,
                                 struct tl_control **ret_control, struct tl_error *ret_error)
{
    struct tl_control *control = calloc(1, sizeof(*control));
    if (control == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the control plane");
    control->loop = loop;
    control->options = *options;
    tl_log_limit_init(&control->link_log.limit);
    control->stop_timer.fire = links_deadline;
    control->ask_closure.run = ask_again;
    tl_list_init(&control->links);
    tl_list_init(&control->probe_calls);
    tl_list_init(&control->walks);
    tl_list_init(&control->walk_closure.link);
    control->walk_closure.run = tl_transfer_walk_on;
    tl_list_init(&control->asking_links);
    tl_list_init(&control->ask_closure.link);
    enum tl_status status = TL_RESOURCE_EXHAUSTED;
    control->builder = tl_frame_builder_create();
    control->arena = calloc(1, sizeof(*control->arena));
    control->unsent = tl_shares_create("limits.waiting", options->max_unsent);
    control->client_keys = tl_link_create_key_shares();
    if (control->builder == NULL || control->arena == NULL || control->unsent == NULL || control->client_keys == NULL) {
        tl_error_set(ret_error, status, "no memory for the control plane");
        goto fail;
    }
    status = tl_wire_arena_init(control->arena, ARENA_BYTES, ret_error);
    if (status == TL_OK && options->tls != NULL) status = tl_tls_create(options->tls, &control->tls, ret_error);
    if (status == TL_OK && control->tls != NULL) status = tl_tls_attach(control->tls, loop, ret_error);
    if (status != TL_OK) goto fail;
    control->options.tls = NULL;
    *ret_control = control;
    return TL_OK;
fail:
    tl_control_destroy(control);
    return status;
}

enum tl_status tl_control_start(struct tl_control *control, const char *address, uint16_t *ret_port,
                                struct tl_error *ret_error)
{
    const struct tl_rpc_server_options options = {
        .keepalive_ns = control->options.keepalive_ns,
        .keepalive_timeout_ns = control->options.keepalive_timeout_ns,
        .max_unfinished_ns = control->options.stalled_timeout_ns,
        .max_message_bytes = tl_control_max_message_bytes(&control->options),
        .tls = control->tls,
        .may = control->options.handlers->may,
        .worker = control->options.worker,
        .max_calls = control->options.max_calls,
    };
    struct tl_rpc_server *server;
    enum tl_status status = tl_rpc_server_create(control->loop, &options, &server, ret_error);
    if (status != TL_OK) return status;
    control->server = server;
    status = add_services(control, ret_error);
    if (status == TL_OK) status = tl_rpc_server_start(server, address, ret_port, ret_error);
    if (status == TL_OK) return TL_OK;
    tl_rpc_server_destroy(server);
    control->server = NULL;
    return status;
}

size_t tl_control_listens(const struct tl_control *control, char (*ret_texts)[TL_CONTROL_LISTEN_BYTES], size_t capacity)
{
    _Static_assert(TL_CONTROL_LISTEN_BYTES == TL_LISTENER_TEXT_BYTES, "the texts are the listener's");
    return control->server != NULL ? tl_rpc_server_describe(control->server, ret_texts, capacity) : 0;
}

void tl_control_ask_again(struct tl_control *control)
{
    if (!tl_list_is_linked(&control->ask_closure.link)) tl_loop_defer(control->loop, &control->ask_closure);
}

void tl_control_set_health(struct tl_control *control, const char *service, enum tl_health health)
{
    if (control->health != NULL) tl_health_service_set(control->health, service, health);
}

static void maybe_stopped(struct tl_control *control)
{
    if (!control->is_stopping || !control->is_server_stopped) return;
    if (!tl_list_is_empty(&control->links) || control->moving_count > 0) return;
    tl_timers_disarm(tl_loop_timers(control->loop), &control->stop_timer);
    if (control->stopped == NULL) return;
    void (*stopped)(void *) = control->stopped;
    control->stopped = NULL;
    stopped(control->stopped_context);
}

void tl_control_link_gone(struct tl_control *control)
{
    maybe_stopped(control);
}

void tl_control_push_moved(struct tl_control *control)
{
    control->moving_count--;
    maybe_stopped(control);
}

static void server_stopped(void *context)
{
    struct tl_control *control = context;
    control->is_server_stopped = true;
    maybe_stopped(control);
}

static void stop_check(struct tl_closure *closure)
{
    maybe_stopped(TL_CONTAINER_OF(closure, struct tl_control, stop_closure));
}

void tl_control_stop(struct tl_control *control, int64_t deadline_ns, void (*stopped)(void *context), void *context)
{
    TL_CHECK(!control->is_stopping);
    control->is_stopping = true;
    control->stopped = stopped;
    control->stopped_context = context;
    control->is_server_stopped = control->server == NULL;
    if (control->health != NULL) tl_health_service_stop(control->health);
    tl_links_drain(control);
    if (tl_timers_arm(tl_loop_timers(control->loop), &control->stop_timer, deadline_ns) != TL_OK) {
        links_deadline(&control->stop_timer);
    }
    if (control->server != NULL) {
        tl_rpc_server_stop(control->server, deadline_ns, server_stopped, control);
    } else {
        control->stop_closure.run = stop_check;
        tl_loop_defer(control->loop, &control->stop_closure);
    }
}

struct tl_annotations *tl_control_share_annotations(struct tl_control *control, struct tl_annotations *annotations)
{
    if (annotations == NULL) return NULL;
    struct tl_annotations *latest = control->latest_annotations;
    if (latest == NULL || tl_annotations_compare(latest, annotations) != 0) {
        tl_annotations_put(latest);
        control->latest_annotations = tl_annotations_get(annotations);
    }
    return tl_annotations_get(control->latest_annotations);
}

struct tl_tls *tl_control_tls(const struct tl_control *control)
{
    return control->tls;
}

void tl_control_destroy(struct tl_control *control)
{
    if (control == NULL) return;
    TL_CHECK(tl_list_is_empty(&control->links) && tl_list_is_empty(&control->walks) && control->referenced_bytes == 0);
    tl_list_remove(&control->walk_closure.link);
    tl_list_remove(&control->ask_closure.link);
    tl_timers_disarm(tl_loop_timers(control->loop), &control->stop_timer);
    if (control->tls != NULL) tl_tls_end(control->tls); /* before what its thread calls */
    tl_tls_release(control->tls);
    tl_rpc_server_destroy(control->server);
    tl_health_service_destroy(control->health);
    if (control->arena != NULL) tl_wire_arena_fini(control->arena);
    free(control->arena);
    tl_frame_builder_destroy(control->builder);
    tl_spares_fini(&control->fetches);
    tl_spares_fini(&control->serves);
    tl_spares_fini(&control->keyed_serves);
    tl_spares_fini(&control->sendings);
    tl_shares_destroy(control->unsent);
    tl_shares_destroy(control->client_keys);
    tl_annotations_put(control->latest_annotations);
    tl_log_limit_fini(&control->link_log.limit);
    free(control);
}

bool tl_control_uses_spares(const struct tl_control *control)
{
    return control->server != NULL && tl_rpc_server_uses_spares(control->server);
}

int64_t tl_control_short_ns(const struct tl_control *control)
{
    return control->server != NULL ? tl_rpc_server_short_ns(control->server) : 0;
}

void tl_control_get_stats(const struct tl_control *control, struct tl_control_stats *ret_stats)
{
    *ret_stats = control->stats;
}
