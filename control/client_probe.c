// SPDX-License-Identifier: Apache-2.0
/*
 * Probes: the call that asks a worker to try its peers, and what that worker does with each of them.
 *
 * A peer is tried over a connection of its own, so that dialling is tried as well, and so that a large message which is
 * lost on the way holds nothing up. Happy path: dialled; a small Echo, which says who answers; a large one to the peer,
 * and a large one from it. A large message that does not pass blocks its connection, so the other direction is tried
 * over a second one. When the connection ends during a large Echo, the peer is tried once more from the beginning. A
 * lack of descriptors, memory or threads of this process is no failure of the peer.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"
#include "control/client_call.h"
#include "control/requests.h"
#include "control/responses.h"
#include "tensorlane/v1/cluster.pb-c.h"

#define CONNECT_NS TL_NS_PER_SEC
#define ECHO_NS TL_NS_PER_SEC
#define SMALL_BYTES 256
#define LARGE_BYTES TL_MAX_ECHO_BYTES

static enum tl_status take_probes(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                  struct tl_error *ret_error)
{
    return tl_probe_response_read(message, arena, context, ret_error);
}

enum tl_status tl_client_probe(const struct tl_call_options *options, struct tl_probe_results *ret_results,
                               enum tl_call_stage *ret_stage, struct tl_error *ret_error)
{
    static const struct tl_client_method method = {
        .name = "/tensorlane.v1.Cluster/Probe", .is_single = true, .take = take_probes};
    Tensorlane__V1__ProbeRequest request = TENSORLANE__V1__PROBE_REQUEST__INIT;
    return tl_client_ask(options, &method, &request.base, ret_results, ret_stage, ret_error);
}

/* ------------------------------------------------------------------------------------------------------ a peer -- */

static enum tl_status take_echo(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                struct tl_error *ret_error)
{
    return tl_echo_response_read(message, arena, context, ret_error);
}

static int64_t no_later_than(int64_t deadline_ns, int64_t timeout_ns)
{
    int64_t left_ns = tl_clock_remaining_ns(deadline_ns);
    return left_ns < timeout_ns ? left_ns : timeout_ns;
}

/* One Echo over an open connection. */
static enum tl_status echo(struct tl_client *client, size_t send_bytes, uint32_t answer_bytes, int64_t deadline_ns,
                           struct tl_echo_response *ret_response, struct tl_error *ret_error)
{
    static const struct tl_client_method method = {
        .name = "/tensorlane.v1.Cluster/Echo", .is_single = true, .take = take_echo};
    static const char zeros[LARGE_BYTES];
    Tensorlane__V1__EchoRequest request = TENSORLANE__V1__ECHO_REQUEST__INIT;
    request.answer_bytes = answer_bytes;
    grpc_slice slice = grpc_slice_from_static_buffer(zeros, send_bytes);
    grpc_byte_buffer *message = tl_wire_write_with_data(&request.base, &slice, 1, send_bytes);
    client->response_count = 0;
    client->failure.code = client->status.code = TL_OK;
    enum tl_status status = tl_client_start(
        client, &method, ret_response, tl_clock_deadline_ns(no_later_than(deadline_ns, ECHO_NS)), message, ret_error);
    if (status != TL_OK) return status;
    tl_stream_half_close(client->stream);
    status = tl_client_wait(client, ret_error);
    if (status != TL_OK) return status;
    if (ret_response->data_bytes == answer_bytes && ret_response->checksum == XXH3_64bits(zeros, send_bytes))
        return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS,
                        "%s received other bytes than were sent to it; look at what stands between the two",
                        client->options->address);
}

/* Returns what to do instead of the question with which a message of a connection that failed may end. */
static const char *answer_of(const char *question, const char *stage)
{
    if (question[0] == '\0' || question[strlen(question) - 1] != '?') return question;
    return strcmp(stage, "tcp") == 0 ? "start the worker there, or allow TCP to it in firewalls and security groups"
                                     : "look at its process and its log on its machine: tensorlane doctor";
}

static void set_failure(struct tl_peer_probe *result, const char *stage, const char *direction,
                        const struct tl_client *client, const struct tl_error *error)
{
    const char *message = error->message, *semicolon = strstr(message, "; ");
    size_t reason_bytes = semicolon != NULL ? (size_t)(semicolon - message) : strlen(message);
    /* What this worker lacks itself says nothing about the peer. */
    result->is_ok = error->code == TL_RESOURCE_EXHAUSTED && client->status.code != TL_RESOURCE_EXHAUSTED;
    snprintf(result->reason, sizeof(result->reason), "%.*s", (int)reason_bytes, message);
    if (result->is_ok) return;
    snprintf(result->stage, sizeof(result->stage), "%s", stage);
    snprintf(result->direction, sizeof(result->direction), "%s", direction);
    snprintf(result->remedy, sizeof(result->remedy), "%s", semicolon != NULL ? answer_of(semicolon + 2, stage) : "");
}

static const char *stage_name(enum tl_call_stage stage)
{
    return stage == TL_CALL_RESOLVE ? "resolve" : stage == TL_CALL_CONNECT ? "tcp" : "grpc";
}

/* A small message in each direction, and who answers. Returns whether the peer is to be tried further. */
static bool try_small(struct tl_client *client, int64_t deadline_ns, struct tl_peer_probe *result)
{
    struct tl_echo_response response = {0};
    struct tl_error error;
    int64_t began_ns = tl_clock_unix_ns();
    enum tl_status status = echo(client, SMALL_BYTES, SMALL_BYTES, deadline_ns, &response, &error);
    if (status == TL_UNIMPLEMENTED) {
        snprintf(result->reason, sizeof(result->reason), "it is of a release that cannot be probed");
        return false;
    }
    if (status != TL_OK) {
        if (status == TL_DEADLINE_EXCEEDED) {
            tl_error_set(&error, status,
                         "%s takes connections but does not answer %d bytes in time; it is stopped or overloaded: see "
                         "its log and its load",
                         result->address, SMALL_BYTES);
        }
        set_failure(result, "small", "both", client, &error);
        return false;
    }
    int64_t ended_ns = tl_clock_unix_ns();
    result->incarnation = response.incarnation;
    if (response.unix_ns != 0) result->clock_offset_ns = response.unix_ns - (began_ns + (ended_ns - began_ns) / 2);
    if (strcmp(response.name, result->name) == 0) return true;
    tl_error_set(&error, TL_FAILED_PRECONDITION,
                 "%s answers as %s on host %s, process %" PRIu64
                 "; correct the address in cluster.json, /etc/hosts or DNS, or start the right worker there",
                 result->address, response.name[0] != '\0' ? response.name : "a client", response.host_name,
                 response.process_id);
    set_failure(result, "identity", "both", client, &error);
    return false;
}

/* A large message in one direction. Returns whether it arrived. */
static bool try_large(struct tl_client *client, bool is_from, int64_t deadline_ns, struct tl_error *ret_error)
{
    struct tl_echo_response response = {0};
    return echo(client, is_from ? SMALL_BYTES : LARGE_BYTES, is_from ? LARGE_BYTES : SMALL_BYTES, deadline_ns,
                &response, ret_error) == TL_OK;
}

/* Whether a large message was lost on the way. Other errors are those of the connection. */
static bool is_loss(const struct tl_error *error)
{
    return error->code == TL_DEADLINE_EXCEEDED || error->code == TL_DATA_LOSS;
}

static void set_lost(struct tl_peer_probe *result, const char *direction, const struct tl_client *client,
                     const struct tl_error *cause)
{
    const char *way = strcmp(direction, "to") == 0     ? "to it"
                      : strcmp(direction, "from") == 0 ? "from it"
                                                       : "in either direction";
    struct tl_error error = *cause;
    if (cause->code == TL_DEADLINE_EXCEEDED) {
        tl_error_set(&error, TL_DEADLINE_EXCEEDED,
                     "%s answers %d bytes over gRPC, and %d bytes do not arrive %s: a hop drops large packets without "
                     "saying so; lower the MTU of the sending interface to what every hop carries, let ICMP "
                     "\"fragmentation needed\" pass, or set net.ipv4.tcp_mtu_probing to 1",
                     result->address, SMALL_BYTES, LARGE_BYTES, way);
    }
    set_failure(result, is_loss(cause) ? "large" : "grpc", direction, client, &error);
}

/* Large messages to the peer and from it. Returns false when the connection ended meanwhile. */
static bool try_both_ways(struct tl_client *client, int64_t deadline_ns, struct tl_peer_probe *result)
{
    struct tl_error to, from;
    if (try_large(client, false, deadline_ns, &to)) {
        if (try_large(client, true, deadline_ns, &from)) return true;
        set_lost(result, "from", client, &from);
        return is_loss(&from);
    }
    if (!is_loss(&to)) {
        set_lost(result, "to", client, &to);
        return false;
    }
    struct tl_call_options options = *client->options;
    options.connect_timeout_ns = no_later_than(deadline_ns, CONNECT_NS);
    struct tl_client second;
    if (tl_client_open(&second, &options, &from) != TL_OK) {
        set_failure(result, stage_name(second.stage), "to", &second, &from);
    } else {
        bool arrives = try_large(&second, true, deadline_ns, &from);
        set_lost(result, arrives || !is_loss(&from) ? "to" : "both", client, &to);
    }
    tl_client_close(&second);
    return true;
}

/* Returns false when the connection ended while large messages were tried. */
static bool try_peer(struct tl_peer_probe *result, struct tl_tls *secure, int64_t deadline_ns)
{
    int64_t connect_ns = no_later_than(deadline_ns, CONNECT_NS);
    if (connect_ns <= 0) return true;
    const struct tl_call_options options = {.address = result->address,
                                            .secure = secure,
                                            .expected_name = result->name,
                                            .connect_timeout_ns = connect_ns,
                                            .rpc_timeout_ns = ECHO_NS};
    struct tl_client client;
    struct tl_error error;
    bool is_over = true;
    if (tl_client_open(&client, &options, &error) != TL_OK) {
        set_failure(result, stage_name(client.stage), "to", &client, &error);
    } else if (try_small(&client, deadline_ns, result)) {
        is_over = try_both_ways(&client, deadline_ns, result);
    }
    tl_client_close(&client);
    return is_over;
}

static void forget_failure(struct tl_peer_probe *result)
{
    result->is_ok = true;
    result->stage[0] = result->direction[0] = result->reason[0] = result->remedy[0] = '\0';
}

void tl_client_probe_peer(struct tl_peer_probe *result, struct tl_tls *secure, int64_t deadline_ns)
{
    forget_failure(result);
    /* A connection may end because its peer is started anew. */
    if (!try_peer(result, secure, deadline_ns)) {
        forget_failure(result);
        (void)try_peer(result, secure, deadline_ns);
    }
    result->ended_ns = tl_clock_now_ns();
    if (result->ended_ns < deadline_ns) return;
    /* What was cut off may have been on its way. */
    forget_failure(result);
    snprintf(result->reason, sizeof(result->reason), "the time was over before it was probed");
}
