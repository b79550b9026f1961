// SPDX-License-Identifier: Apache-2.0
/* What the files of this folder share: the control object and the services that are added to its server. */
#ifndef CONTROL_INTERNAL_H
#define CONTROL_INTERNAL_H

#include "base/list.h"
#include "base/log_limit.h"
#include "base/spares.h"
#include "control/control.h"
#include "control/rpc_server.h"

#define TL_PROTOCOL_VERSION 1
/* The answers of all links together hold at most so many times options.inflight_bytes, and the Receive calls of each
 * client as much. */
#define TL_REFERENCED_FACTOR 16

struct tl_wire_arena;
struct tl_frame_builder;
struct tl_health_service;
struct tl_receive_client;

/* What the log says of links that were ended (link_log.c). */
struct tl_link_log {
    struct tl_log_limit limit; /* for each address and kind of reason */
    uint64_t unlogged_count;   /* links that were ended since the latest that was logged */
};

struct tl_control {
    struct tl_loop *loop;
    struct tl_control_options options;
    struct tl_rpc_server *server; /* NULL: a client */
    struct tl_tls *tls;           /* NULL: none */
    struct tl_health_service *health;
    struct tl_list links;          /* all, of both sides */
    struct tl_shares *unsent;      /* options.max_unsent, divided among the links */
    struct tl_shares *client_keys; /* keys that are kept by number for clients, divided among their links */
    uint64_t referenced_bytes;     /* left to send of the values that the answers of all links refer to */
    uint64_t link_count;           /* since create: the number of the newest link */
    struct tl_link_log link_log;
    struct tl_list asking_links;      /* those that wait to be admitted */
    struct tl_closure ask_closure;    /* asks for them again */
    struct tl_spares fetches;         /* link_fetch, to be used again */
    struct tl_spares serves;          /* link_serve without a key of its own */
    struct tl_spares keyed_serves;    /* link_serve with space for a short key */
    struct tl_spares sendings;        /* link_sending */
    struct tl_wire_arena *arena;      /* the message that is being handled */
    struct tl_frame_builder *builder; /* the frame that is being composed */
    struct tl_control_stats stats;
    struct tl_list probe_calls;                /* calls that wait for the end of a probe (probe_service.c) */
    struct tl_list walks;                      /* calls that look for a pattern, the one that goes on next first */
    struct tl_closure walk_closure;            /* lets the first of them go on; deferred while there are any */
    struct tl_receive_client *receive_clients; /* hash by client: those with Receive calls (receive_hold.h) */
    struct tl_request_id foreign_id; /* id of the latest Receive of a client without identity; number 0: none yet */
    size_t moving_count;             /* tensors that clients publish and that are fetched, or copied to a device */
    struct tl_annotations *latest_annotations; /* those that the latest push brought, one reference; NULL if none */
    bool is_stopping;
    bool is_server_stopped;
    struct tl_timer stop_timer;     /* the links' deadline */
    struct tl_closure stop_closure; /* without a server: looks at the links once the stop has been asked for */
    void (*stopped)(void *context);
    void *stopped_context;
};

/* Largest message that is ever received: a chunk and what stands before it. */
#define TL_MAX_FRAME_HEAD_BYTES (256 * 1024)
static inline uint64_t tl_control_max_message_bytes(const struct tl_control_options *options)
{
    return options->chunk_bytes > 16 * 1024 * 1024 ? options->chunk_bytes + TL_MAX_FRAME_HEAD_BYTES
                                                   : 16 * 1024 * 1024 + TL_MAX_FRAME_HEAD_BYTES;
}

/* Space to compose one frame; one per control. */
struct tl_frame_builder *tl_frame_builder_create(void);
void tl_frame_builder_destroy(struct tl_frame_builder *builder);

/* A reference to annotations that say the same: those of the latest Publish, if they do, so that all tensors of a file
 * share them although each is published by a call of its own. NULL for NULL. */
struct tl_annotations *tl_control_share_annotations(struct tl_control *control, struct tl_annotations *annotations);

void tl_transfer_walk_on(struct tl_closure *closure);

/* control->client_keys. NULL: no memory. */
struct tl_shares *tl_link_create_key_shares(void);

/* Each adds the methods of one service to control->server before it starts. */
enum tl_status tl_link_service_add(struct tl_control *control, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_transfer_service_add(struct tl_control *control, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_cluster_service_add(struct tl_control *control, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_probe_service_add(struct tl_control *control, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_reflection_service_add(struct tl_control *control, struct tl_error *ret_error) TL_MUST_USE;

/* The health service keeps state: the health of each service name and the calls that watch. It starts with "", the
 * whole worker, as NOT_SERVING. At most 16 services, whose names have at most 127 bytes. */
enum tl_status tl_health_service_add(struct tl_control *control, struct tl_error *ret_error) TL_MUST_USE;
void tl_health_service_set(struct tl_health_service *service, const char *name, enum tl_health health);
/* Ends all Watch calls, as a server that stops must. */
void tl_health_service_stop(struct tl_health_service *service);
void tl_health_service_destroy(struct tl_health_service *service); /* NULL is accepted */

/* One of control->moving_count has ended. */
void tl_control_push_moved(struct tl_control *control);

/* Asks for all links that wait to be admitted once more (control/link.c). */
void tl_links_ask_again(struct tl_control *control);
/* The end of links at stop (control/link.c): drains them all; tl_control_link_gone is called as each goes. */
void tl_links_drain(struct tl_control *control);
void tl_links_close(struct tl_control *control, const struct tl_error *reason);
void tl_control_link_gone(struct tl_control *control);

#endif
