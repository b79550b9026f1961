// SPDX-License-Identifier: Apache-2.0
/*
 * Any bytes as a private key, in three forms.
 *
 * Input: one byte that says which form, and whether what follows is PEM or its content in DER, then the key. What is
 * accepted can be used.
 */
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <stdint.h>

#include "base/check.h"
#include "fuzz/fuzz_pem.h"
#include "security/private_key.h"

static const char *const forms[] = {PEM_STRING_PKCS8INF, PEM_STRING_ECPRIVATEKEY, PEM_STRING_RSA};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    struct fuzz_pem pem;
    if (!fuzz_pem_take(data, len_bytes, forms, TL_ARRAY_COUNT(forms), &pem)) return 0;
    EVP_PKEY *key = tl_private_key_read(pem.text, pem.len_bytes);
    if (key != NULL) TL_CHECK(EVP_PKEY_get_bits(key) > 0);
    EVP_PKEY_free(key);
    BIO_free(pem.made);
    ERR_clear_error();
    return 0;
}
