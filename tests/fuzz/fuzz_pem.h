// SPDX-License-Identifier: Apache-2.0
/* Inputs of fuzz targets that are PEM: a byte that says which kind, then PEM, or its content in DER. */
#ifndef FUZZ_FUZZ_PEM_H
#define FUZZ_FUZZ_PEM_H

#include <openssl/bio.h>
#include <openssl/pem.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"

#define FUZZ_PEM_IS_DER 0x80
#define FUZZ_PEM_MAX_BYTES 100000

struct fuzz_pem {
    unsigned kind;
    const char *text;
    size_t len_bytes;
    BIO *made; /* holds the text if it was made of DER; else NULL; the caller frees it */
};

/* Makes PEM of the input, with the name of its kind if it is DER. Returns false if it is empty or too long. */
static inline bool fuzz_pem_take(const uint8_t *data, size_t len_bytes, const char *const *names, unsigned kind_count,
                                 struct fuzz_pem *ret_pem)
{
    if (len_bytes == 0 || len_bytes > FUZZ_PEM_MAX_BYTES) return false;
    *ret_pem = (struct fuzz_pem){.kind = (data[0] & ~(unsigned)FUZZ_PEM_IS_DER) % kind_count,
                                 .text = (const char *)data + 1,
                                 .len_bytes = len_bytes - 1};
    if ((data[0] & FUZZ_PEM_IS_DER) == 0) return true;
    char *text;
    ret_pem->made = BIO_new(BIO_s_mem());
    TL_CHECK(ret_pem->made != NULL);
    TL_CHECK(PEM_write_bio(ret_pem->made, names[ret_pem->kind], "", data + 1, (long)len_bytes - 1) >= 0);
    ret_pem->len_bytes = (size_t)BIO_get_mem_data(ret_pem->made, &text);
    ret_pem->text = text;
    return true;
}

#endif
