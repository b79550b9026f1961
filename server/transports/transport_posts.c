// SPDX-License-Identifier: Apache-2.0
/* What the loop and the reactor of a transport post to each other: all closures of a round in one post. */
#include "server/transports/transport.h"

#include "dataplane/reactor.h"
#include "server/worker_internal.h"

static void post_to_reactor(struct tl_closure *closure)
{
    struct tl_transport *transport = TL_CONTAINER_OF(closure, struct tl_transport, to_reactor.post_closure);
    tl_reactor_post_all(transport->reactor, &transport->to_reactor.closures);
}

/* The transport may be gone as soon as the closures are posted. */
static void post_to_loop(struct tl_closure *closure)
{
    struct tl_transport *transport = TL_CONTAINER_OF(closure, struct tl_transport, to_loop.post_closure);
    tl_progress_post_all(&transport->worker->progress, &transport->to_loop.closures);
}

void tl_transport_send(struct tl_transport *transport, struct tl_closure *closure)
{
    struct tl_outbox *outbox = &transport->to_reactor;
    if (tl_list_is_empty(&outbox->closures)) tl_loop_defer_last(transport->worker->loop, &outbox->post_closure);
    tl_list_push_back(&outbox->closures, &closure->link);
}

void tl_transport_send_back(struct tl_transport *transport, struct tl_closure *closure)
{
    struct tl_outbox *outbox = &transport->to_loop;
    if (tl_list_is_empty(&outbox->closures)) tl_reactor_defer_last(transport->reactor, &outbox->post_closure);
    tl_list_push_back(&outbox->closures, &closure->link);
}

bool tl_transport_executor_send(const struct tl_executor *executor, const struct tl_executor *to,
                                struct tl_closure *closure)
{
    struct tl_transport *transport =
        (struct tl_transport *)TL_CONTAINER_OF(executor, const struct tl_transport, executor);
    if (to != &transport->worker->executor) return false;
    tl_transport_send_back(transport, closure);
    return true;
}

void tl_transport_executor_defer(const struct tl_executor *executor, struct tl_closure *closure)
{
    tl_reactor_defer(TL_CONTAINER_OF(executor, const struct tl_transport, executor)->reactor, closure);
}

bool tl_worker_executor_send(const struct tl_executor *executor, const struct tl_executor *to,
                             struct tl_closure *closure)
{
    const struct tl_worker *worker = TL_CONTAINER_OF(executor, const struct tl_worker, executor);
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        struct tl_transport *transport = worker->data_plane.transports[i].transport;
        if (transport == NULL || to != &transport->executor) continue;
        tl_transport_send(transport, closure);
        return true;
    }
    return false;
}

void tl_transport_init_posts(struct tl_transport *transport)
{
    tl_list_init(&transport->to_reactor.closures);
    tl_list_init(&transport->to_loop.closures);
    transport->to_reactor.post_closure.run = post_to_reactor;
    transport->to_loop.post_closure.run = post_to_loop;
}
