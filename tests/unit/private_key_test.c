// SPDX-License-Identifier: Apache-2.0
/* Private keys of every form that is read, where their numbers lie, and texts that are none. integration.tls_workers
 * looks for them in all memory of a process. */
/* Only interfaces that OpenSSL calls deprecated show the numbers of a key where they lie. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include <check.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <string.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "security/pem_file.h"
#include "security/private_key.h"

enum form { PKCS8, TRADITIONAL, WITH_PASSWORD };

/* Writes the key; the text lies in a static buffer. */
static const char *write_key(EVP_PKEY *key, enum form form)
{
    static char text[8192];
    BIO *out = BIO_new(BIO_s_mem());
    const EVP_CIPHER *cipher = form == WITH_PASSWORD ? EVP_aes_128_cbc() : NULL;
    int written = form == TRADITIONAL
                      ? PEM_write_bio_PrivateKey_traditional(out, key, NULL, NULL, 0, NULL, NULL)
                      : PEM_write_bio_PKCS8PrivateKey(out, key, cipher, "secret", cipher != NULL ? 6 : 0, NULL, NULL);
    ck_assert_int_eq(written, 1);
    int len = BIO_read(out, text, sizeof(text) - 1);
    ck_assert_int_gt(len, 0);
    text[len] = '\0';
    BIO_free(out);
    return text;
}

static EVP_PKEY *make(const char *kind, const char *curve)
{
    EVP_PKEY *key = curve != NULL              ? EVP_PKEY_Q_keygen(NULL, NULL, kind, curve)
                    : strcmp(kind, "RSA") == 0 ? EVP_PKEY_Q_keygen(NULL, NULL, kind, (size_t)2048)
                                               : EVP_PKEY_Q_keygen(NULL, NULL, kind);
    ck_assert_ptr_nonnull(key);
    return key;
}

static void assert_read(const char *kind, const char *curve, enum form form)
{
    EVP_PKEY *key = make(kind, curve);
    const char *text = write_key(key, form);
    EVP_PKEY *found = tl_private_key_read(text, strlen(text));
    ck_assert_msg(found != NULL, "%s", text);
    ck_assert_int_eq(EVP_PKEY_eq(key, found), 1);
    /* It signs, and the other one confirms that. */
    uint8_t signature[512];
    size_t len = sizeof(signature);
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    ck_assert_int_eq(EVP_DigestSignInit(context, NULL, EVP_sha256(), NULL, found), 1);
    ck_assert_int_eq(EVP_DigestSign(context, signature, &len, (const uint8_t *)"text", 4), 1);
    EVP_MD_CTX_reset(context);
    ck_assert_int_eq(EVP_DigestVerifyInit(context, NULL, EVP_sha256(), NULL, key), 1);
    ck_assert_int_eq(EVP_DigestVerify(context, signature, len, (const uint8_t *)"text", 4), 1);
    EVP_MD_CTX_free(context);
    EVP_PKEY_free(found);
    EVP_PKEY_free(key);
}

START_TEST(forms)
{
    assert_read("EC", "P-256", PKCS8);
    assert_read("EC", "P-256", TRADITIONAL);
    assert_read("EC", "P-384", PKCS8);
    assert_read("EC", "P-521", TRADITIONAL);
    assert_read("RSA", NULL, PKCS8);
    assert_read("RSA", NULL, TRADITIONAL);
}
END_TEST

/* What the kernel leaves out of core files. */
START_TEST(secrets_lie_in_the_secure_heap)
{
    ck_assert_int_ne(CRYPTO_secure_malloc_init(256 * 1024, 32), 0);
    EVP_PKEY *key = make("EC", "P-256");
    const char *written = write_key(key, PKCS8);
    temp_folder_make();
    temp_write(temp_path("key.pem"), written, strlen(written));
    ck_assert_int_eq(chmod(temp_path("key.pem"), 0600), 0);
    struct tl_pem_text text;
    struct tl_error error;
    ck_assert_int_eq(tl_pem_read_text(temp_path("key.pem"), true, &text, &error), TL_OK);
    ck_assert_int_eq(CRYPTO_secure_allocated(text.bytes), 1);
    EVP_PKEY *found = tl_private_key_read(text.bytes, text.len_bytes);
    const BIGNUM *number = EC_KEY_get0_private_key(EVP_PKEY_get0_EC_KEY(found));
    ck_assert_int_ne(BN_get_flags(number, BN_FLG_SECURE), 0);
    tl_pem_text_fini(&text);
    EVP_PKEY_free(found);
    EVP_PKEY_free(key);
    key = make("RSA", NULL);
    written = write_key(key, PKCS8);
    size_t used = CRYPTO_secure_used();
    found = tl_private_key_read(written, strlen(written));
    /* What OpenSSL would copy has the public numbers only; the others are behind its method. */
    ck_assert_ptr_null(RSA_get0_d(EVP_PKEY_get0_RSA(found)));
    ck_assert_ptr_null(RSA_get0_p(EVP_PKEY_get0_RSA(found)));
    ck_assert_uint_ge(CRYPTO_secure_used(), used + 2048 / 8 + 5 * 1024 / 8);
    EVP_PKEY_free(found);
    ck_assert_uint_eq(CRYPTO_secure_used(), used);
    EVP_PKEY_free(key);
    temp_folder_remove();
}
END_TEST

static void assert_none(const char *text, size_t len)
{
    ck_assert_ptr_null(tl_private_key_read(text, len));
    ERR_clear_error();
}

START_TEST(texts_that_are_none)
{
    EVP_PKEY *key = make("EC", "P-256");
    const char *text = write_key(key, WITH_PASSWORD);
    assert_none(text, strlen(text));
    assert_none("", 0);
    assert_none("nonsense", 8);
    static const char *const broken[] = {
        "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n",
        "-----BEGIN EC PRIVATE KEY-----\nMAA=\n-----END EC PRIVATE KEY-----\n",
        "-----BEGIN EC PRIVATE KEY-----\nMAMCAQE=\n-----END EC PRIVATE KEY-----\n",
        "-----BEGIN RSA PRIVATE KEY-----\nMAMCAQE=\n-----END RSA PRIVATE KEY-----\n",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(broken); i++)
        assert_none(broken[i], strlen(broken[i]));
    /* Every beginning of a good one. */
    for (int form = PKCS8; form <= TRADITIONAL; form++) {
        text = write_key(key, (enum form)form);
        for (size_t len = 0; len + 2 < strlen(text); len++)
            assert_none(text, len);
    }
    EVP_PKEY_free(key);
    key = make("ED25519", NULL);
    text = write_key(key, PKCS8);
    assert_none(text, strlen(text));
    EVP_PKEY_free(key);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("private_key");
    TCase *tcase = tcase_create("private_key");
    tcase_add_test(tcase, forms);
    tcase_add_test(tcase, secrets_lie_in_the_secure_heap);
    tcase_add_test(tcase, texts_that_are_none);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
