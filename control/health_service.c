// SPDX-License-Identifier: Apache-2.0
/*
 * grpc.health.v1.Health: the health of each service by name, for clients that ask once and clients that watch.
 *
 * Happy path: Check answers and ends. Watch sends the present health, stays, and sends every change; a service that is
 * not known yet is SERVICE_UNKNOWN until it is. A watcher that does not read gets only the latest health once it does,
 * never a queue of old ones.
 *
 * When the server stops, every service becomes NOT_SERVING; a watcher is sent that and ended with UNAVAILABLE.
 *
 * Failure modes: Check of an unknown service is NOT_FOUND; watchers beyond their client's share of MAX_WATCHERS
 * (base/shares.h) are refused with RESOURCE_EXHAUSTED.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "grpc/health/v1/health.pb-c.h"

#define MAX_SERVICES 16
#define MAX_WATCHERS 1024
#define MAX_SERVICE_NAME_BYTES 128

struct named_health {
    char name[MAX_SERVICE_NAME_BYTES];
    enum tl_health health;
};

struct tl_health_service {
    struct named_health services[MAX_SERVICES]; /* [service_count] */
    size_t service_count;
    struct tl_list watches;
    struct tl_shares *watchers; /* MAX_WATCHERS, divided among the clients */
    bool is_stopping;
};

struct watch_call {
    struct tl_service_call call;
    struct tl_list link;    /* in the service's watches once the request was read */
    struct tl_share *share; /* one of MAX_WATCHERS, from then on */
    char name[TL_MAX_SYMBOL_BYTES + 1];
    bool is_sent; /* sent_health was sent */
    enum tl_health sent_health;
};

static struct named_health *find(struct tl_health_service *service, const char *name)
{
    for (size_t i = 0; i < service->service_count; i++) {
        if (strcmp(service->services[i].name, name) == 0) return &service->services[i];
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- Check -- */

static void check_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct tl_control *control = call->control;
    const char *name;
    struct tl_error error;
    if (tl_health_request_read(message, control->arena, &name, &error) != TL_OK) {
        tl_service_call_finish(call, &error);
        return;
    }
    const struct named_health *found = find(control->health, name);
    if (found == NULL) {
        tl_error_set(&error, TL_NOT_FOUND,
                     "the service \"%s\" is not known here; the empty name asks for the whole worker", name);
        tl_service_call_finish(call, &error);
        return;
    }
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)found->health;
    tl_service_call_answer(call, &response.base);
}

static const struct tl_service_call_ops check_ops = {
    .size_bytes = sizeof(struct tl_service_call),
    .request = check_request,
};

static void check_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &check_ops);
}

/* ------------------------------------------------------------------------------------------------------- Watch -- */

/* Sends what has changed, or ends the call of a stopping server that has nothing more to send. */
static void watch_advance(struct tl_service_call *call)
{
    struct watch_call *watch = TL_CONTAINER_OF(call, struct watch_call, call);
    struct tl_health_service *service = call->control->health;
    if (!tl_stream_can_send(call->stream)) return;
    const struct named_health *found = find(service, watch->name);
    enum tl_health health = found != NULL ? found->health : TL_HEALTH_SERVICE_UNKNOWN;
    if (!watch->is_sent || watch->sent_health != health) {
        watch->is_sent = true;
        watch->sent_health = health;
        Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
        response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)health;
        tl_service_call_send(call, tl_wire_write(&response.base));
    } else if (service->is_stopping) {
        struct tl_error status;
        tl_error_set(&status, TL_UNAVAILABLE, "the worker is shutting down");
        tl_service_call_finish(call, &status);
    }
}

static void watch_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct watch_call *watch = TL_CONTAINER_OF(call, struct watch_call, call);
    struct tl_health_service *service = call->control->health;
    const char *name;
    struct tl_error error;
    enum tl_status status = tl_health_request_read(message, call->control->arena, &name, &error);
    if (status == TL_OK && tl_shares_take(service->watchers, &call->client.client, 1, &watch->share, NULL) != TL_OK) {
        status = tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%d calls of Watch may be open, and %llu are; use Check",
                              MAX_WATCHERS, (unsigned long long)tl_shares_used(service->watchers));
    }
    if (status != TL_OK) {
        tl_service_call_finish(call, &error);
        return;
    }
    memcpy(watch->name, name, strlen(name) + 1);
    tl_list_init(&watch->link);
    tl_list_push_back(&service->watches, &watch->link);
    watch_advance(call);
}

static void watch_closed(struct tl_service_call *call, bool is_delivered)
{
    (void)is_delivered;
    struct watch_call *watch = TL_CONTAINER_OF(call, struct watch_call, call);
    if (watch->link.next == NULL) return;
    tl_list_remove(&watch->link);
    tl_shares_give(watch->share, 1);
}

static const struct tl_service_call_ops watch_ops = {
    .size_bytes = sizeof(struct watch_call),
    .request = watch_request,
    .sent = watch_advance,
    .closed = watch_closed,
};

static void watch_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &watch_ops);
}

static void advance_all(struct tl_health_service *service)
{
    TL_LIST_FOREACH(&service->watches, link)
    {
        watch_advance(&TL_CONTAINER_OF(link, struct watch_call, link)->call);
    }
}

/* ----------------------------------------------------------------------------------------------------- service -- */

enum tl_status tl_health_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    if (control->health == NULL) {
        control->health = calloc(1, sizeof(*control->health));
        if (control->health == NULL) {
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the health service");
        }
        tl_list_init(&control->health->watches);
        control->health->watchers = tl_shares_create("watchers", MAX_WATCHERS);
        if (control->health->watchers == NULL) {
            free(control->health);
            control->health = NULL;
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the health service");
        }
        tl_health_service_set(control->health, "", TL_HEALTH_NOT_SERVING);
    }
    enum tl_status status = tl_rpc_server_add_health_method(control->server, "/grpc.health.v1.Health/Check",
                                                            TL_ACTION_HEALTH, check_accept, control, ret_error);
    if (status != TL_OK) return status;
    return tl_rpc_server_add_health_method(control->server, "/grpc.health.v1.Health/Watch", TL_ACTION_HEALTH,
                                           watch_accept, control, ret_error);
}

void tl_health_service_set(struct tl_health_service *service, const char *name, enum tl_health health)
{
    struct named_health *found = find(service, name);
    if (found == NULL) {
        TL_CHECK(service->service_count < MAX_SERVICES && strlen(name) < MAX_SERVICE_NAME_BYTES);
        found = &service->services[service->service_count++];
        snprintf(found->name, sizeof(found->name), "%s", name);
    }
    found->health = health;
    advance_all(service);
}

void tl_health_service_stop(struct tl_health_service *service)
{
    service->is_stopping = true;
    for (size_t i = 0; i < service->service_count; i++)
        service->services[i].health = TL_HEALTH_NOT_SERVING;
    advance_all(service);
}

void tl_health_service_destroy(struct tl_health_service *service)
{
    if (service == NULL) return;
    TL_CHECK(tl_list_is_empty(&service->watches));
    tl_shares_destroy(service->watchers);
    free(service);
}
