// SPDX-License-Identifier: Apache-2.0
/*
 * How fast a connection is. It is measured during the handshake, when nothing else travels on the connection.
 *
 * Happy path: writes without an immediate go into the block that the peer has exposed for the handshake; the peer's
 * software does not notice them. Small writes come first, one after the other; the fastest is the latency, there and
 * back. Large writes follow; the fastest gives the rate. When the last of them was fast, several are posted in a row,
 * so that the time of a start does not count. Between the two come single writes of growing size, as large as one
 * packet may be; when one of them is lost, its size is part of the reason (handshake_reason.c). A write is over when
 * the peer's card has acknowledged it. The write that the handshake verifies follows on the same queue pair.
 *
 * Failure modes: none of its own. A queue pair that breaks ends the handshake.
 */
#include "base/arith.h"
#include "base/clock.h"
#include "dataplane/engine/conn_internal.h"

#define LATENCY_ROUNDS 4
#define LATENCY_BYTES 8
#define MIN_SIZE 512
#define MAX_SIZE 4096
#define RATE_ROUNDS 2
/* The row of writes is left out when one write alone takes longer than this, so that measuring takes little time. */
#define SLOW_NS (TL_NS_PER_MS / 4)

static uint64_t at_least_one(int64_t ns)
{
    return ns > 0 ? (uint64_t)ns : 1;
}

/* How many writes of growing size fit into one packet each. */
static unsigned size_rounds(const struct tl_conn *conn)
{
    unsigned count = 0;
    uint64_t size = MIN_SIZE;
    while (size <= MAX_SIZE && size <= conn->pair->mtu_bytes && size <= conn->engine->piece_bytes) {
        size *= 2;
        count++;
    }
    return count;
}

uint64_t measure_size(const struct tl_conn *conn)
{
    unsigned round = conn->handshake.measuring.round;
    if (round < LATENCY_ROUNDS) return LATENCY_BYTES;
    round -= LATENCY_ROUNDS;
    if (round < size_rounds(conn)) return (uint64_t)MIN_SIZE << round;
    return tl_min_u64(PROBE_BYTES, conn->engine->piece_bytes);
}

static void begin_round(struct measuring *measuring, unsigned writes)
{
    measuring->writes_left = writes;
    measuring->writes_open = 0;
    measuring->bytes = 0;
}

/* Posts one write of the round. */
static bool take_write(struct pending_post *pending)
{
    struct measuring *measuring = TL_CONTAINER_OF(pending, struct measuring, pending);
    struct tl_conn *conn = TL_CONTAINER_OF(measuring, struct tl_conn, handshake.measuring);
    uint64_t len_bytes = measure_size(conn);
    if (measuring->bytes == 0) measuring->began_ns = tl_clock_now_ns();
    measuring->bytes += len_bytes;
    measuring->writes_left--;
    struct tl_work *work = &measuring->writes[measuring->writes_left].work;
    measuring->writes_open++;
    conn->pair->ops->write(conn->pair, conn->handshake.probe.region, conn->handshake.probe.bytes + PROBE_BYTES,
                           len_bytes, &conn->handshake.probe.peer, 0, false, 0, work);
    return measuring->writes_left > 0;
}

/* Evaluates a round. Returns false when it was the last. */
static bool end_round(struct tl_conn *conn)
{
    struct measuring *measuring = &conn->handshake.measuring;
    struct tl_conn_measures *measures = &conn->handshake.measures;
    const unsigned sizes_end = LATENCY_ROUNDS + size_rounds(conn), rate_end = sizes_end + RATE_ROUNDS;
    if (measuring->passed_bytes < measure_size(conn)) measuring->passed_bytes = measure_size(conn);
    uint64_t took_ns = at_least_one(tl_clock_now_ns() - measuring->began_ns);
    unsigned round = measuring->round++;
    if (round < LATENCY_ROUNDS) {
        if (round == 0 || took_ns < measures->latency_ns) measures->latency_ns = took_ns;
    }
    if (round < sizes_end) {
        begin_round(measuring, 1);
        return true;
    }
    uint64_t rate = measuring->bytes * (uint64_t)TL_NS_PER_SEC / took_ns;
    if (rate > measures->bytes_per_second) measures->bytes_per_second = rate;
    bool is_row_next = round + 1 == rate_end;
    begin_round(measuring, is_row_next ? MEASURE_WRITES : 1);
    return round + 1 < rate_end || (is_row_next && took_ns < SLOW_NS);
}

static void write_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct measured_write, work)->conn;
    struct measuring *measuring = &conn->handshake.measuring;
    measuring->writes_open--;
    conn_space_freed(conn);
    if (status != TL_OK || measuring->writes_left > 0 || measuring->writes_open > 0) return;
    if (end_round(conn)) {
        conn_post_when_space(conn, &measuring->pending);
    } else {
        measuring->is_over = true;
        handshake_measured(conn);
    }
}

void measure_init(struct tl_conn *conn)
{
    struct measuring *measuring = &conn->handshake.measuring;
    tl_list_init(&measuring->pending.place);
    measuring->pending.post = take_write;
    for (unsigned i = 0; i < MEASURE_WRITES; i++)
        measuring->writes[i] = (struct measured_write){{.magic = TL_WORK_MAGIC, .done = write_done}, conn};
    begin_round(measuring, 1);
}

void measure_start(struct tl_conn *conn)
{
    conn->handshake.measuring.is_started = true;
    conn_post_when_space(conn, &conn->handshake.measuring.pending);
}
