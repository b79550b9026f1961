// SPDX-License-Identifier: Apache-2.0
/*
 * What TLS connections of this process prove themselves with, and which authorities they trust: one reading of the
 * files of "security.tls". It never changes; when the files do, a new one is loaded (docs/security.md).
 *
 * Private keys lie in OpenSSL's secure heap, which is locked and left out of core files as far as the system permits.
 *
 * Thread: any.
 */
#ifndef SECURITY_TLS_CONTEXT_H
#define SECURITY_TLS_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "security/certificate_name.h"

/* Files in PEM. */
struct tl_tls_settings {
    const char *ca;            /* certificates of the authorities that peers' certificates come from */
    const char *certificate;   /* that of this process, followed by those between it and the authority */
    const char *key;           /* that belongs to the certificate; no other user may read it */
    const char *crl;           /* lists of revoked certificates, one for each authority; NULL: none is looked at */
    const char *foreign_names; /* as tl_tls_context_accepts has them, with a blank between two; NULL: none */
    bool is_tls12_allowed;     /* besides TLS 1.3 */
};

struct tl_tls_context;

/* Reads the files. before: what they were before, whose key is shared if it is the same; NULL: nothing. Ownership:
 * *ret_context until tl_tls_context_release.
 * Errors, which name the file and the remedy: TL_NOT_FOUND, TL_PERMISSION_DENIED: one that cannot be read, or a key
 * that other users can. TL_FAILED_PRECONDITION: the certificate is not valid now, or too weak. TL_INVALID_ARGUMENT: it
 * is none, has no name, or does not belong to the key; or foreign_names has a task of its own trust domain.
 * TL_RESOURCE_EXHAUSTED: no memory, or no more of it for keys. */
enum tl_status tl_tls_context_load(const struct tl_tls_settings *settings, const struct tl_tls_context *before,
                                   struct tl_tls_context **ret_context, struct tl_error *ret_error) TL_MUST_USE;

struct tl_tls_context *tl_tls_context_retain(struct tl_tls_context *context);
void tl_tls_context_release(struct tl_tls_context *context); /* NULL is accepted */

/* Whether the files are still those that were loaded, by their inodes, sizes and times. */
bool tl_tls_context_is_current(const struct tl_tls_context *context, const struct tl_tls_settings *settings);

/* Returns the name in the certificate of this process, valid as long as the context. */
const struct tl_certificate_name *tl_tls_context_self(const struct tl_tls_context *context);

/* Whether a peer of another trust domain is accepted: its trust domain is one of foreign_names ("other.org"), or its
 * URI is ("spiffe://other.org/job/ps/task/0"). */
bool tl_tls_context_accepts(const struct tl_tls_context *context, const struct tl_certificate_name *peer);

#endif
