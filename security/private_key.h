// SPDX-License-Identifier: Apache-2.0
/*
 * Reading a private key so that no copy of it stays in memory that core files contain. OpenSSL's own decoders leave
 * copies in ordinary memory that they have freed.
 */
#ifndef SECURITY_PRIVATE_KEY_H
#define SECURITY_PRIVATE_KEY_H

#include <openssl/evp.h>
#include <stddef.h>

/* Returns the first private key of a text in PEM: RSA or an elliptic curve with a name, in the form of PKCS #8 or that
 * of its kind, without a password. NULL: there is none; OpenSSL's queue of errors may say more. Ownership:
 * EVP_PKEY_free. */
EVP_PKEY *tl_private_key_read(const char *pem, size_t len_bytes);

#endif
