// SPDX-License-Identifier: Apache-2.0
/*
 * Certificates of every kind for tests, good ones and bad ones, written as files. Programs include check.h first.
 */
#ifndef FAKES_CERTIFICATES_H
#define FAKES_CERTIFICATES_H

#include <openssl/x509.h>
#include <stdbool.h>
#include <stdint.h>

/* An authority: its certificate and its key. */
struct authority {
    X509 *certificate;
    EVP_PKEY *key;
    long next_serial;
};

struct certificate_kind {
    const char *names; /* the subjectAltName in OpenSSL's words: "URI:spiffe://test/job/node/task/0,DNS:localhost" */
    long begin_s;      /* seconds from now; 0: a minute ago */
    long end_s;        /* seconds from now; 0: in an hour */
    int rsa_bits;      /* 0: an elliptic curve, P-256 */
    bool is_client;    /* extendedKeyUsage clientAuth alone; otherwise serverAuth, too */
    bool is_self_signed;
};

void authority_init(struct authority *authority, const char *name, const char *path);
/* Makes an authority whose certificate the issuer signs, with its next serial number, and which ends after so many
 * seconds (0: in an hour). */
void authority_init_below(struct authority *issuer, struct authority *authority, const char *name, long end_s,
                          const char *path);
void authority_fini(struct authority *authority);

/* Writes a certificate and its key (mode 0600). Returns the serial number. */
long authority_issue(struct authority *authority, const struct certificate_kind *kind, const char *certificate_path,
                     const char *key_path);

/* Writes a list that revokes these serial numbers. */
void authority_revoke(const struct authority *authority, const long *serials, unsigned count, const char *path);

#endif
