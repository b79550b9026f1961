// SPDX-License-Identifier: Apache-2.0
/* How far a worker can be reached over TCP from here, by the size of what is sent, and what follows from that. */
#ifndef SERVER_CLI_DOCTOR_TCP_H
#define SERVER_CLI_DOCTOR_TCP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/ip.h"
#include "security/tls_context.h"
#include "server/cli/doctor.h"

/* Bytes that are sent at once to try large segments. */
#define TL_DOCTOR_LARGE_BYTES 16000
/* Segments of at most so many bytes pass wherever IPv4 does. */
#define TL_DOCTOR_SMALL_SEGMENT 500

/* How far one attempt came. Each step is tried after the one before it has worked. */
enum tl_doctor_reach {
    TL_DOCTOR_REACH_NONE,     /* no connection: error_number says why */
    TL_DOCTOR_REACH_TCP,      /* connected, and nothing was answered to a few bytes */
    TL_DOCTOR_REACH_NO_TLS,   /* connected, and TLS was not agreed on: tls_reason says why */
    TL_DOCTOR_REACH_FOREIGN,  /* what answers does not speak HTTP/2, or ends the connection */
    TL_DOCTOR_REACH_SMALL,    /* a few bytes were answered, TL_DOCTOR_LARGE_BYTES were not */
    TL_DOCTOR_REACH_LARGE_TO, /* those were answered, but a large answer did not arrive */
    TL_DOCTOR_REACH_ALL,
};

struct tl_doctor_attempt {
    enum tl_doctor_reach reach;
    int error_number;       /* why there is no connection */
    unsigned segment_bytes; /* largest segment that the kernel would send; 0: not known */
    char tls_reason[TL_ERROR_MESSAGE_BYTES];
};

/* What is tried. */
struct tl_doctor_endpoint {
    unsigned port;
    struct tl_tls_context *tls; /* NULL: without TLS */
    const char *task;           /* whose name the certificate must have */
};

/* Tries it, with segments of at most max_segment bytes in both directions (0: as large as they are). Blocks: at most 2
 * s for each step. Thread: any. */
void tl_doctor_try_tcp(const struct tl_doctor_endpoint *endpoint, const struct tl_ip *ip, unsigned max_segment,
                       struct tl_doctor_attempt *ret_attempt);

/* What was tried with one address of a task. */
struct tl_doctor_reached {
    struct tl_ip ip;
    struct tl_doctor_attempt usual;
    struct tl_doctor_attempt small; /* with TL_DOCTOR_SMALL_SEGMENT; made only where the usual one failed behind TCP */
};

/* Tries one address in both ways. */
void tl_doctor_reach(const struct tl_doctor_endpoint *endpoint, const struct tl_ip *ip,
                     struct tl_doctor_reached *ret_reached);

/* Compares what was tried with all addresses of a task: a line for each. */
void tl_doctor_judge_reached(struct tl_doctor_report *report, const char *task, unsigned port,
                             const struct tl_doctor_reached *reached, size_t count);

#endif
