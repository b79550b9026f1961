// SPDX-License-Identifier: Apache-2.0
/* The thread in which handshakes are made and files are loaded again; it hands what has passed to the relay. */
#ifndef CONTROL_TLS_HANDSHAKE_H
#define CONTROL_TLS_HANDSHAKE_H

#include "control/tls.h"
#include "control/tls_relay.h"

struct tl_tls_handshakes;

/* The relay outlives it. Errors: as tl_tls_create. */
enum tl_status tl_tls_handshakes_create(const struct tl_tls_options *options, struct tl_tls_relay *relay,
                                        struct tl_tls_handshakes **ret_handshakes,
                                        struct tl_error *ret_error) TL_MUST_USE;
/* Ends all handshakes and the thread. */
void tl_tls_handshakes_end(struct tl_tls_handshakes *handshakes);
/* They were ended. NULL is accepted. */
void tl_tls_handshakes_destroy(struct tl_tls_handshakes *handshakes);

/* As tl_tls_accept and tl_tls_dial. */
void tl_tls_handshakes_accept(struct tl_tls_handshakes *handshakes, int connection, tl_tls_accepted_fn accepted,
                              void *context);
enum tl_status tl_tls_handshakes_dial(struct tl_tls_handshakes *handshakes, struct tl_loop *loop,
                                      const struct tl_tls_address *address, tl_tls_dialled_fn dialled, void *owner,
                                      struct tl_tls_dial **ret_dial, struct tl_error *ret_error) TL_MUST_USE;

/* As tl_tls_uses_spares. */
bool tl_tls_handshakes_use_spares(const struct tl_tls_handshakes *handshakes);

#endif
