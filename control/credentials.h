// SPDX-License-Identifier: Apache-2.0
/* The one place where credentials and channels are made, so that transport security has one executor. */
#ifndef CONTROL_CREDENTIALS_H
#define CONTROL_CREDENTIALS_H

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#if __has_include(<grpc/credentials.h>)
#include <grpc/credentials.h> /* newer cores have credentials in a header of their own */
#endif
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

/* Credentials that a server proves itself with. Released with grpc_server_credentials_release. */
grpc_server_credentials *tl_credentials_for_server(void);

/* Bytes of a frame that a side takes at most; the same on both sides. */
#define TL_HTTP2_FRAME_BYTES (4 * 1024 * 1024)

/* Newer cores than 1.51 wait that long, a minute by default, for a ping that was sent before the one of keepalive. */
#define TL_ARG_PING_TIMEOUT_MS "grpc.http2.ping_timeout_ms"

struct tl_call_tls;

struct tl_channel_options {
    int64_t keepalive_ns;          /* quiet time after which the connection is probed; TL_TIME_NEVER: never */
    int64_t keepalive_timeout_ns;  /* time to answer the probe */
    int64_t connect_timeout_ns;    /* for one attempt */
    uint64_t max_message_bytes;    /* received */
    const char *user_agent;        /* NULL: the library's */
    const char *authority;         /* "host:port" as its user calls the server; NULL: the address */
    const struct tl_call_tls *tls; /* NULL: none; else the certificate must be for the authority's host */
    bool is_gzip;                  /* sends gzip, and takes it, whose size is limited before it is unpacked */
};

/* A channel of its own (one TCP connection, shared with no other) to "host:port", or to a target with a scheme
 * ("ipv4:127.0.0.1:4000"). Never NULL; what is wrong with the address shows in the calls. Destroyed with
 * grpc_channel_destroy. */
grpc_channel *tl_channel_create(const char *address, const struct tl_channel_options *options);

/* The same over a connection that is there already, which is taken over. It does not connect again: when it has ended,
 * so have the calls. */
grpc_channel *tl_channel_create_from_fd(int fd, const char *target, const struct tl_channel_options *options);

#endif
