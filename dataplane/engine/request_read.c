// SPDX-License-Identifier: Apache-2.0
/*
 * A request whose bytes this side reads from the memory of their owner (docs/gdr.md).
 *
 * Happy path: REQUEST says that the receiver reads, and exposes nothing. SOURCE says what the value is and where it can
 * be read. The destination is made, the bytes are read in pieces, and a write without bytes, whose immediate is the
 * handle, releases the source. The fetch is completed when the release is posted, and does not wait until it has
 * arrived. The reads of all requests of a connection take turns, and no more are posted than the card carries out at a
 * time.
 *
 * Failure modes: a read that fails breaks the queue pair, and releases nothing: the owner then knows that the value has
 * not arrived. A release may be lost when the queue pair breaks: the worker tells the owner over the link what it has
 * received over a connection that broke. Once SOURCE has come, a cancel waits for the reads that are posted, since they
 * write into the destination, and for nothing else; CANCEL leaves after them, because a card may repeat a read until it
 * has its bytes. Before SOURCE it waits for the owner's answer, which may be a value without bytes. An owner that
 * cannot show its memory answers META_DATA_UPDATE, and writes. When there is no memory to read into, the source goes
 * back with a RE_REQUEST that names no place, and the owner writes after another one: so a worker does not keep memory
 * for a peer that waits for memory itself.
 */
#include "dataplane/engine/request_internal.h"

#include "base/arith.h"
#include "base/check.h"

/* The most that one read carries: MAX_READS of them take less time than the peer time-out on any network, and what is
 * posted behind them waits for all. */
#define READ_BYTES ((uint64_t)256 * 1024)

bool requests_are_read(const struct tl_conn *conn)
{
    return conn->engine->options.is_reading && conn->pair->ops->read != NULL && conn_read_depth(conn) > 0;
}

void request_source(struct request *request, const struct tl_message *message)
{
    request->has_source = true;
    request->placement->source = message->destination;
    request->is_sender_copying = message->is_copying;
    request->is_from_device = message->is_on_device;
    request->has_checksum = message->has_checksum;
    request->checksum = message->checksum;
    request_handle(request, REQUEST_EVENT_SOURCE);
}

void request_queue_read(struct request *request)
{
    if (request_is_imported(request)) {
        request_copy_source(request);
    } else {
        request->pending.rank = VALUE_RANK(request->fetch->priority);
        conn_post_when_readable(request->conn, &request->pending);
    }
}

/* --------------------------------------------------------------------------------------------------------- end -- */

static void read_done(struct tl_work *work, enum tl_status status)
{
    struct conn_read *read = TL_CONTAINER_OF(work, struct conn_read, work);
    struct request *request = read->request;
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    read->request = NULL;
    conn->posts.reads.posted_count--;
    placement->read_count--;
    if (status != TL_OK) return; /* the queue pair is about to be drained, and the request ends then */
    conn_peer_seen(conn);
    conn_space_freed(conn);
    conn->engine->stats.bytes_received += read->len_bytes;
    if (request->state == REQUEST_CANCELLING) {
        if (placement->read_count == 0) request_handle(request, REQUEST_EVENT_STOPPED);
        return;
    }
    request->received_bytes += read->len_bytes;
    request_advance_early(request);
    if (request->received_bytes == placement->expected.meta_data.size_bytes)
        request_handle(request, REQUEST_EVENT_COMPLETE);
}

static void post_release(struct request *request)
{
    static const struct tl_descriptor nowhere;
    if (request_is_imported(request)) {
        request_release_import(request);
        return;
    }
    conn_post_write(request->conn, NULL, NULL, 0, &nowhere, 0, request->handle, NULL);
    request_handle(request, REQUEST_EVENT_RELEASED);
}

/* A release that is posted now leaves with the doorbell at the end of the round. The fetch is completed before, so that
 * the same doorbell posts what the worker asks for next. Otherwise the peer has its time-out to return each slot. */
void request_release_source(struct request *request)
{
    if (conn_may_post(request->conn)) {
        conn_pump_later(request->conn);
        post_release(request);
    } else {
        request_queue_post(request);
        request_limit(request, request->conn->engine->options.peer_timeout_ns);
    }
}

void request_tell_given_up(struct request *request)
{
    /* No answer says that CANCEL has arrived, and the connection may break before it has: the owner hears of it over
     * the link as well. */
    request->fetch->is_unsettled = true;
    conn_send_notice(request->conn, TL_MESSAGE_CANCEL, request->handle);
}

void request_return_source(struct request *request)
{
    request->has_source = false;
    request->is_source_returned = true;
    request->is_reading = false;
    request->is_sender_copying = false;
    request->is_from_device = false;
    request->has_checksum = false;
    conn_send_notice(request->conn, TL_MESSAGE_RE_REQUEST, request->handle);
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

static struct conn_read *take_entry(struct tl_conn *conn)
{
    struct conn_read *read = conn->posts.reads.entries;
    while (read < conn->posts.reads.entries + MAX_READS && read->request != NULL)
        read++;
    TL_CHECK(read < conn->posts.reads.entries + MAX_READS);
    return read;
}

bool request_post_read(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    if (request->state == REQUEST_RELEASING) {
        post_release(request);
        return false;
    }
    uint64_t size_bytes = placement->expected.meta_data.size_bytes;
    uint64_t offset_bytes = placement->asked_bytes;
    struct conn_read *read = take_entry(conn);
    *read = (struct conn_read){
        .work = {.magic = TL_WORK_MAGIC, .done = read_done},
        .request = request,
        .len_bytes = tl_min_u64(size_bytes - offset_bytes, tl_min_u64(conn->engine->piece_bytes, READ_BYTES))};
    conn->posts.reads.posted_count++;
    conn->engine->stats.reads_posted++;
    placement->read_count++;
    placement->asked_bytes += read->len_bytes;
    conn->pair->ops->read(conn->pair, placement->pin.region, (uint8_t *)placement->pin.address + offset_bytes,
                          read->len_bytes, &placement->source, offset_bytes, &read->work);
    if (request->state == REQUEST_QUEUED) request_handle(request, REQUEST_EVENT_READ);
    return placement->asked_bytes < size_bytes;
}

const char *request_how_read(const struct request *request)
{
    if (request->is_source_returned) return "written by its owner: the pool had no memory to read it into";
    if (request->is_reading) return "read from the memory of its owner";
    const char *failure = request->conn->engine->provider->read_failure;
    const char *refusal = failure != NULL ? failure : request->conn->pair->read_refusal;
    return refusal != NULL ? refusal : "written by its owner, which could not show its memory";
}
