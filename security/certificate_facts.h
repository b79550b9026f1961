// SPDX-License-Identifier: Apache-2.0
/* What a file with a certificate says, for people who look at it. */
#ifndef SECURITY_CERTIFICATE_FACTS_H
#define SECURITY_CERTIFICATE_FACTS_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "security/certificate_name.h"

#define TL_FACTS_TEXT_BYTES 256

/* Texts are as the certificate has them, cut, and may contain anything but NUL. */
struct tl_certificate_facts {
    char subject[TL_FACTS_TEXT_BYTES];
    char issuer[TL_FACTS_TEXT_BYTES];
    char names[16 *
               TL_FACTS_TEXT_BYTES]; /* the subjectAltName, a line for each: "URI:spiffe://example.org/client/ann" */
    struct tl_error name_error;      /* code TL_OK: `name` is what peers will take from it */
    struct tl_certificate_name name;
    int64_t not_before_s, not_after_s; /* seconds since 1970 */
    char key_kind[32];                 /* "EC prime256v1", "RSA 2048" */
    bool is_key_weak;                  /* fewer than 112 bits of security: handshakes refuse it */
    bool is_authority;                 /* it issues certificates; no worker proves itself with it */
    char serial[64];                   /* hexadecimal */
    char fingerprint[96];              /* SHA-256: "AB:CD:..." */
};

/* Reads the first certificate of a file in PEM. Errors: as tl_error_set_errno. TL_INVALID_ARGUMENT: there is none. */
enum tl_status tl_certificate_facts_read(const char *path, struct tl_certificate_facts *ret_facts,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* Checks that a key can be used with the certificate of a file. Errors: as tl_error_set_errno: one of them cannot be
 * read. TL_PERMISSION_DENIED: other users may read the key. TL_INVALID_ARGUMENT: one is none, or the key belongs to
 * another certificate. */
enum tl_status tl_certificate_check_key(const char *path, const char *key_path, struct tl_error *ret_error) TL_MUST_USE;

#endif
