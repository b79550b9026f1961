// SPDX-License-Identifier: Apache-2.0
/*
 * Why a handshake did not come to its end, told by how far it came. The messages go over a reliable connection, so that
 * the cards of both sides have shown whether packets pass, and the measurement has tried packets of growing size.
 *
 * A provider without a network between the two ends (describe_route is NULL) has only the other process to blame.
 */
#include <inttypes.h>
#include <stdio.h>

#include "base/error.h"
#include "dataplane/engine/conn_internal.h"

#define SMALLEST_MTU 256

/* The largest packet that has passed, as a value of the setting that bounds packets. */
static uint64_t fitting_mtu(uint64_t passed_bytes)
{
    return passed_bytes > SMALLEST_MTU ? passed_bytes : SMALLEST_MTU;
}

/* A write has arrived, and a larger one is lost. */
static void explain_size(const struct tl_conn *conn, const struct tl_route *route, struct tl_error *ret_reason)
{
    uint64_t passed_bytes = conn->handshake.measuring.passed_bytes, lost_bytes = measure_size(conn);
    const char *device = conn->engine->provider->name, *settings = conn->engine->provider->ops->settings;
    if (lost_bytes > conn->pair->mtu_bytes) {
        tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                     "%s: packets with %" PRIu64 " bytes of data pass through %s from %s to %s, a write of %" PRIu64
                     " bytes in packets of %u does not; packets are lost under load: look at flow control (PFC, ECN) "
                     "and at the counters of the ports between the two",
                     conn->peer.name, passed_bytes, device, route->own_address, route->peer_address, lost_bytes,
                     conn->pair->mtu_bytes);
        return;
    }
    tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                 "%s: packets with %" PRIu64 " bytes of data pass through %s from %s to %s, those with %" PRIu64
                 " do not: a hop carries less than %" PRIu64 " bytes; set %s.mtu to %" PRIu64
                 ", or raise the MTU of the switch ports and interfaces between the two",
                 conn->peer.name, passed_bytes, device, route->own_address, route->peer_address, lost_bytes,
                 lost_bytes + route->head_bytes, settings, fitting_mtu(passed_bytes));
}

/* Whether a write has arrived and a larger one is lost. */
static bool is_size_the_cause(const struct tl_conn *conn)
{
    const struct measuring *measuring = &conn->handshake.measuring;
    bool is_measuring = measuring->is_started && !measuring->is_over;
    return is_measuring && measuring->passed_bytes > 0 && measure_size(conn) > measuring->passed_bytes;
}

/* Packets of the peer have arrived, and it acknowledges ours no more. */
static void explain_unanswered(const struct tl_conn *conn, const struct tl_route *route, const struct tl_error *broken,
                               struct tl_error *ret_reason)
{
    char detail[256] = "";
    if (broken != NULL) snprintf(detail, sizeof(detail), " (%.250s)", broken->message);
    tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                 "%s: its packets arrive through %s (%s) from %s, and it stopped acknowledging ours%s: its process or "
                 "machine is gone, or packets are lost; look at its log, and at the counters of the ports between the "
                 "two",
                 conn->peer.name, conn->engine->provider->name, route->own_address, route->peer_address, detail);
}

static void explain_route(const struct tl_conn *conn, const struct tl_error *broken, struct tl_error *ret_reason)
{
    const struct conn_handshake *handshake = &conn->handshake;
    const char *device = conn->engine->provider->name;
    struct tl_route route = {.blocked = ""};
    conn->pair->ops->describe_route(conn->pair, &route);
    if (!handshake->is_hello_verified && !handshake->is_opener) {
        /* This side sends nothing before the HELLO, so that it cannot tell the network from the program. */
        tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                     "%s: no HELLO arrives through %s (%s) from %s, and its log says why: its program stands still, or "
                     "%s",
                     conn->peer.name, device, route.own_address, route.peer_address, route.blocked);
    } else if (!handshake->is_hello_verified && !handshake->hello.is_sent) {
        tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                     "%s: nothing arrives through %s (%s) from %s, at any size, while the link over TCP works: %s",
                     conn->peer.name, device, route.own_address, route.peer_address, route.blocked);
    } else if (!handshake->is_hello_verified) {
        tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                     "%s: its card takes packets of %s at %s, its program does not answer; the process is stopped or "
                     "overloaded, or nothing drives it",
                     conn->peer.name, device, route.peer_address);
    } else if (is_size_the_cause(conn)) {
        explain_size(conn, &route, ret_reason);
    } else if (broken != NULL || (handshake->measuring.is_started && !handshake->measuring.is_over)) {
        explain_unanswered(conn, &route, broken, ret_reason);
    } else if (!handshake->is_peer_write_verified) {
        tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                     "%s: messages arrive through %s (%s) from %s, its writes do not; its log says which size is lost: "
                     "a hop from it to here carries less than the MTU of the two, or its process stands still",
                     conn->peer.name, device, route.own_address, route.peer_address);
    } else {
        tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                     "%s: our writes through %s arrive at %s, its program does not confirm them; the process is "
                     "stopped or overloaded, or nothing drives it",
                     conn->peer.name, device, route.peer_address);
    }
}

/* Messages and writes have passed, and a read does not. */
static void explain_read(const struct tl_conn *conn, const struct tl_error *broken, struct tl_error *ret_reason)
{
    tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                 "%s: messages and writes pass through %s, a read of its memory does not: %.300s; set protocol to "
                 "grpc+verbs here, with which peers write what this worker receives",
                 conn->peer.name, conn->engine->provider->name,
                 broken != NULL ? broken->message : "its bytes do not come");
}

void handshake_explain(const struct tl_conn *conn, const struct tl_error *broken, struct tl_error *ret_reason)
{
    if (handshake_is_reading(conn)) {
        explain_read(conn, broken, ret_reason);
        return;
    }
    if (conn->pair->ops->describe_route != NULL) {
        explain_route(conn, broken, ret_reason);
        return;
    }
    const char *missing = !conn->handshake.is_hello_verified        ? "no HELLO has arrived"
                          : !conn->handshake.is_peer_write_verified ? "no write of the peer has arrived"
                                                                    : "the peer has not confirmed our write";
    tl_error_set(ret_reason, TL_DEADLINE_EXCEEDED,
                 "%s: the data connection through %s was not up in time: %s; its process is stopped or overloaded, or "
                 "nothing drives it",
                 conn->peer.name, conn->engine->provider->name, missing);
}
