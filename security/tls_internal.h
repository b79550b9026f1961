// SPDX-License-Identifier: Apache-2.0
/* What tls_context.c and tls_session.c share: OpenSSL's objects. */
#ifndef SECURITY_TLS_INTERNAL_H
#define SECURITY_TLS_INTERNAL_H

#include <openssl/ssl.h>

#include "security/tls_context.h"

/* OpenSSL's object that connections are made of. Thread: any. */
SSL_CTX *tl_tls_context_ssl(const struct tl_tls_context *context);

#define TL_TLS_HEAP_FULL "no locked memory is left for keys, because this process has too many TLS connections"

/* Whether no more of the memory that keys lie in can be had. Thread: any. */
bool tl_tls_is_heap_full(size_t size_bytes);

/* Called by OpenSSL for each certificate of a peer (tls_session.c). */
int tl_tls_session_verify(int is_accepted, X509_STORE_CTX *store_context);

#endif
