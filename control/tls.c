// SPDX-License-Identifier: Apache-2.0
/* Puts the handshake thread and the relay together. */
#include "control/tls.h"

#include <stdlib.h>

#include "base/error.h"
#include "control/tls_handshake.h"
#include "control/tls_relay.h"

struct tl_tls {
    atomic_uint references;
    struct tl_tls_relay *relay;
    struct tl_tls_handshakes *handshakes;
    struct tl_loop *loop; /* whose owner moves bytes; NULL: none does */
};

enum tl_status tl_tls_create(const struct tl_tls_options *options, struct tl_tls **ret_tls, struct tl_error *ret_error)
{
    struct tl_tls *tls = calloc(1, sizeof(*tls));
    if (tls == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS");
    atomic_init(&tls->references, 1);
    enum tl_status status = tl_tls_relay_create(&tls->relay, ret_error);
    if (status == TL_OK) status = tl_tls_handshakes_create(options, tls->relay, &tls->handshakes, ret_error);
    if (status != TL_OK) {
        tl_tls_end(tls);
        tl_tls_release(tls);
        return status;
    }
    *ret_tls = tls;
    return TL_OK;
}

enum tl_status tl_tls_attach(struct tl_tls *tls, struct tl_loop *loop, struct tl_error *ret_error)
{
    enum tl_status status = tl_loop_enter_relay(loop, tls->relay, ret_error);
    if (status == TL_OK) tls->loop = loop;
    return status;
}

void tl_tls_end(struct tl_tls *tls)
{
    if (tls->loop != NULL) tl_loop_leave_relay(tls->loop);
    if (tls->handshakes != NULL) tl_tls_handshakes_end(tls->handshakes);
    if (tls->relay != NULL) tl_tls_relay_end(tls->relay);
}

struct tl_tls *tl_tls_retain(struct tl_tls *tls)
{
    if (tls != NULL) atomic_fetch_add(&tls->references, 1);
    return tls;
}

void tl_tls_release(struct tl_tls *tls)
{
    if (tls == NULL || atomic_fetch_sub(&tls->references, 1) > 1) return;
    tl_tls_handshakes_destroy(tls->handshakes);
    tl_tls_relay_destroy(tls->relay);
    free(tls);
}

struct tl_tls_peer *tl_tls_find(struct tl_tls *tls, uint64_t cookie)
{
    return tl_tls_relay_find(tls->relay, cookie);
}

void tl_tls_accept(struct tl_tls *tls, int connection, tl_tls_accepted_fn accepted, void *context)
{
    tl_tls_handshakes_accept(tls->handshakes, connection, accepted, context);
}

bool tl_tls_uses_spares(const struct tl_tls *tls)
{
    return tl_tls_handshakes_use_spares(tls->handshakes);
}

enum tl_status tl_tls_dial(struct tl_tls *tls, struct tl_loop *loop, const struct tl_tls_address *address,
                           tl_tls_dialled_fn dialled, void *owner, struct tl_tls_dial **ret_dial,
                           struct tl_error *ret_error)
{
    return tl_tls_handshakes_dial(tls->handshakes, loop, address, dialled, owner, ret_dial, ret_error);
}
