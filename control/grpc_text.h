// SPDX-License-Identifier: Apache-2.0
/* What gRPC says of a connection, in the sentences that the commands have for the same. */
#ifndef CONTROL_GRPC_TEXT_H
#define CONTROL_GRPC_TEXT_H

#include <stddef.h>

#include <tensorlane/status.h>

/* Rewrites the message of a call that has failed. It names the address, says what happened and what to look at; a
 * message that is not gRPC's own only gets the address in front. The code stays. */
void tl_grpc_text_explain(struct tl_error *error, const char *address);

/* Takes away what the current core of gRPC writes around the reason why a call has failed: "Socket closed" of
 * "Stream removed (Socket closed)". Another text stays. */
void tl_grpc_text_unwrap(char *text);

/* The first address in a text of gRPC's, without its scheme: "10.0.0.1:4000" for "ipv4:10.0.0.1:4000: Got goaway",
 * "[::1]:4000" for "transport:0x1 peer:ipv6:%5B::1%5D:4000 ..."; "" when there is none, or when it does not fit.
 * capacity: of buffer, in bytes. Returns buffer. */
const char *tl_grpc_text_address(const char *text, char *buffer, size_t capacity);

#endif
