// SPDX-License-Identifier: Apache-2.0
/*
 * Who a certificate is for: a member of the cluster, or a client with a name. docs/security.md has the rules.
 *
 * Thread: any.
 */
#ifndef SECURITY_CERTIFICATE_NAME_H
#define SECURITY_CERTIFICATE_NAME_H

#include <stdbool.h>
#include <stddef.h>

#include <tensorlane/status.h>

struct x509_st; /* OpenSSL's X509 */

/* With NUL. */
#define TL_CERTIFICATE_NAME_BYTES 256

enum tl_certificate_kind { TL_CERTIFICATE_MEMBER, TL_CERTIFICATE_CLIENT };

struct tl_certificate_name {
    enum tl_certificate_kind kind;
    bool is_foreign;                      /* its trust domain is another one, and accepted; text is the URI */
    char text[TL_CERTIFICATE_NAME_BYTES]; /* "/job:ps/task:0", "spiffe://example.org/client/ann", "host.example.org" */
    char trust_domain[TL_CERTIFICATE_NAME_BYTES]; /* "example.org"; "" for a name that is none of SPIFFE */
};

/* Makes the name one of another trust domain: "/job:ps/task:0" is then "spiffe://other.org/job/ps/task/0". */
void tl_certificate_name_make_foreign(struct tl_certificate_name *name);

/* One name of a certificate's subjectAltName. */
struct tl_certificate_entry {
    bool is_uri;      /* otherwise a DNS name */
    const char *text; /* [len_bytes], as the certificate has it: without NUL at the end, perhaps with others */
    size_t len_bytes;
};

/* Reads the names of a certificate. Errors: TL_INVALID_ARGUMENT: none of the rules fits, or two names contradict each
 * other; the message says how it ought to be. */
enum tl_status tl_certificate_name_of(const struct x509_st *certificate, struct tl_certificate_name *ret_name,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* The same for names that were taken out of one. */
enum tl_status tl_certificate_name_choose(const struct tl_certificate_entry *entries, size_t count,
                                          struct tl_certificate_name *ret_name, struct tl_error *ret_error) TL_MUST_USE;

#endif
