// SPDX-License-Identifier: Apache-2.0
/*
 * How far a side of a link sends ahead of what the other side has taken.
 *
 * What a receiver holds is bounded by HTTP/2's window. The one that gRPC begins with makes the sender stop for every
 * chunk until the one before was copied; the one that it finds by probing grows, over the loopback interface, to how
 * much the receiver can be made to hold: tens of MiB, which fall out of the caches before they are read. So that
 * neither happens, the receiver says in its Hello how much may be under way, and in its frames how much it has taken;
 * gRPC's probing then finds that much.
 *
 * Over a network the right amount depends on the round trip, and it is left to the probing.
 *
 * Failure mode: a peer that tells of more than it was sent ends the link.
 */
#include "control/endpoint.h"
#include "control/link_internal.h"

/* Enough for the sender to go on while a chunk is copied, and little enough to stay in the caches. */
#define LOOPBACK_WINDOW_BYTES (4 * 1024 * 1024)

void link_window_init(struct tl_link *link, const char *target)
{
    if (tl_endpoint_is_loopback(target)) link->window.ours_bytes = LOOPBACK_WINDOW_BYTES;
}

bool link_window_is_full(const struct tl_link *link)
{
    const struct link_window *window = &link->window;
    if (window->peers_bytes == 0 || window->sent_bytes - window->confirmed_bytes < window->peers_bytes) return false;
    /* A side that does not read would wait for ever for what it does not hear. */
    return !link->is_read_paused;
}

bool link_window_must_tell(const struct tl_link *link)
{
    const struct link_window *window = &link->window;
    return window->ours_bytes > 0 && window->taken_bytes - window->reported_bytes >= window->ours_bytes / 2;
}

uint64_t link_window_update(const struct tl_link *link)
{
    const struct link_window *window = &link->window;
    return window->ours_bytes > 0 && window->taken_bytes > window->reported_bytes ? window->taken_bytes : 0;
}

void link_window_sent(struct tl_link *link, uint64_t data_bytes)
{
    link->window.reported_bytes = link->window.taken_bytes;
    link->window.sent_bytes += data_bytes;
}

void link_window_took(struct tl_link *link, uint64_t data_bytes)
{
    link->window.taken_bytes += data_bytes;
    if (link->state != LINK_CLOSING && link_window_must_tell(link)) link_flush_later(link);
}

void link_window_heard(struct tl_link *link, uint64_t taken_bytes)
{
    struct link_window *window = &link->window;
    if (taken_bytes > window->sent_bytes) {
        link_protocol_error(link, "it has taken %llu bytes of %llu", (unsigned long long)taken_bytes,
                            (unsigned long long)window->sent_bytes);
        return;
    }
    if (taken_bytes <= window->confirmed_bytes) return;
    window->confirmed_bytes = taken_bytes;
    link_flush_later(link);
}
