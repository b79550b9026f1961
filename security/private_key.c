// SPDX-License-Identifier: Apache-2.0
/* Only interfaces that OpenSSL calls deprecated make a key out of numbers that lie in the secure heap already. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "security/private_key.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/objects.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

/* Takes the next element, which must have this tag, out of the input; NULL: it has another one, or does not fit. */
static const unsigned char *next_element(const unsigned char **input, const unsigned char *end, int wanted_tag,
                                         long *ret_len)
{
    int tag, class;
    const unsigned char *begin = *input;
    int kind = ASN1_get_object(&begin, ret_len, &tag, &class, end - begin);
    if ((kind & 0x80) != 0 || tag != wanted_tag || class != V_ASN1_UNIVERSAL) return NULL;
    *input = begin + *ret_len;
    return begin;
}

/* Makes the key of the curve with this private number. */
static EVP_PKEY *make_curve_key(int curve, const unsigned char *number, long number_len)
{
    EC_KEY *key = EC_KEY_new_by_curve_name(curve);
    BIGNUM *private = BN_secure_new();
    const EC_GROUP *group = key != NULL ? EC_KEY_get0_group(key) : NULL;
    EC_POINT *public = group != NULL ? EC_POINT_new(group) : NULL;
    EVP_PKEY *made = EVP_PKEY_new();
    bool is_made = made != NULL && private != NULL && public != NULL &&
                   BN_bin2bn(number, (int)number_len, private) != NULL && EC_KEY_set_private_key(key, private) == 1 &&
                   EC_POINT_mul(group, public, private, NULL, NULL, NULL) == 1 &&
                   EC_KEY_set_public_key(key, public) == 1 && EVP_PKEY_assign_EC_KEY(made, key) == 1;
    BN_clear_free(private);
    EC_POINT_free(public);
    if (is_made) return made;
    EC_KEY_free(key);
    EVP_PKEY_free(made);
    return NULL;
}

/* Reads an ECPrivateKey (RFC 5915): a version and the private number; its curve is in it, or known already. */
static EVP_PKEY *read_curve_key(const unsigned char *der, long len, int curve)
{
    long body_len, number_len, unused, name_len;
    const unsigned char *body = next_element(&der, der + len, V_ASN1_SEQUENCE, &body_len);
    if (body == NULL) return NULL;
    const unsigned char *end = body + body_len;
    if (next_element(&body, end, V_ASN1_INTEGER, &unused) == NULL) return NULL;
    const unsigned char *number = next_element(&body, end, V_ASN1_OCTET_STRING, &number_len);
    if (number == NULL) return NULL;
    int tag, class;
    if (curve == NID_undef && (ASN1_get_object(&body, &name_len, &tag, &class, end - body) & 0x80) == 0 && tag == 0 &&
        class == V_ASN1_CONTEXT_SPECIFIC) {
        ASN1_OBJECT *name = d2i_ASN1_OBJECT(NULL, &body, name_len);
        curve = name != NULL ? OBJ_obj2nid(name) : NID_undef;
        ASN1_OBJECT_free(name);
    }
    return curve != NID_undef ? make_curve_key(curve, number, number_len) : NULL;
}

/* An RSA key that is used through EVP_PKEY is copied into OpenSSL's provider, in ordinary memory. So the key that is
 * used has the public numbers only, and its method signs with another one, which stays in the secure heap. */
static RSA_METHOD *rsa_method; /* NULL: no memory */
static int rsa_secret_index;   /* where a key keeps the other one */

static int sign(int len_bytes, const unsigned char *bytes, unsigned char *signature, RSA *key, int padding)
{
    return RSA_private_encrypt(len_bytes, bytes, signature, RSA_get_ex_data(key, rsa_secret_index), padding);
}

static void free_secret(void *parent, void *secret, CRYPTO_EX_DATA *data, int index, long number, void *pointer)
{
    (void)parent;
    (void)data;
    (void)index;
    (void)number;
    (void)pointer;
    RSA_free(secret);
}

static void prepare_rsa(void)
{
    rsa_secret_index = RSA_get_ex_new_index(0, NULL, NULL, NULL, free_secret);
    rsa_method = RSA_meth_dup(RSA_PKCS1_OpenSSL());
    if (rsa_method == NULL || rsa_secret_index < 0 || RSA_meth_set_priv_enc(rsa_method, sign) != 1) {
        RSA_meth_free(rsa_method);
        rsa_method = NULL;
    }
}

/* Makes the key that is used. Owns the secret one, also when it fails. */
static EVP_PKEY *hide_rsa_key(RSA *secret)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, prepare_rsa);
    RSA_clear_flags(secret, RSA_FLAG_CACHE_PRIVATE); /* what it prepares for its primes would be in ordinary memory */
    RSA *key = RSA_new();
    EVP_PKEY *made = EVP_PKEY_new();
    BIGNUM *modulus = BN_dup(RSA_get0_n(secret)), *exponent = BN_dup(RSA_get0_e(secret));
    bool has_numbers = key != NULL && RSA_set0_key(key, modulus, exponent, NULL) == 1;
    if (!has_numbers) {
        BN_free(modulus);
        BN_free(exponent);
    }
    bool owns_secret = has_numbers && rsa_method != NULL && RSA_set_method(key, rsa_method) == 1 &&
                       RSA_set_ex_data(key, rsa_secret_index, secret) == 1;
    if (!owns_secret) RSA_free(secret);
    if (owns_secret && made != NULL && EVP_PKEY_assign_RSA(made, key) == 1) return made;
    RSA_free(key);
    EVP_PKEY_free(made);
    return NULL;
}

static EVP_PKEY *read_rsa_key(const unsigned char *der, long len)
{
    RSA *secret = d2i_RSAPrivateKey(NULL, &der, len);
    return secret != NULL ? hide_rsa_key(secret) : NULL;
}

/* PKCS #8: which kind of key it is, and the key. The structure is cleared when it is freed. */
static EVP_PKEY *read_any_key(const unsigned char *der, long len)
{
    PKCS8_PRIV_KEY_INFO *info = d2i_PKCS8_PRIV_KEY_INFO(NULL, &der, len);
    const ASN1_OBJECT *kind;
    const X509_ALGOR *algorithm;
    const unsigned char *key;
    int key_len, parameter_type;
    const void *parameter;
    EVP_PKEY *made = NULL;
    if (info != NULL && PKCS8_pkey_get0(&kind, &key, &key_len, &algorithm, info) == 1) {
        X509_ALGOR_get0(NULL, &parameter_type, &parameter, algorithm);
        if (OBJ_obj2nid(kind) == NID_rsaEncryption) {
            made = read_rsa_key(key, key_len);
        } else if (OBJ_obj2nid(kind) == NID_X9_62_id_ecPublicKey && parameter_type == V_ASN1_OBJECT) {
            made = read_curve_key(key, key_len, OBJ_obj2nid(parameter));
        }
    }
    PKCS8_PRIV_KEY_INFO_free(info);
    return made;
}

/* Copying leaves bytes of the key in vector registers. A thread that is made next inherits them, and finds them on its
 * stack when the dynamic linker saves registers there. Copies of every length class use them all. */
static void overwrite_registers(void)
{
    unsigned char nothing[2][2048] = {{0}};
    void *(*volatile copy)(void *, const void *, size_t) = memmove; /* called, whatever the compiler makes of it */
    for (size_t len = 16; len <= sizeof(nothing[0]); len *= 2)
        (void)copy(nothing[1], nothing[0], len);
}

EVP_PKEY *tl_private_key_read(const char *pem, size_t len_bytes)
{
    static const char *const names[] = {PEM_STRING_PKCS8INF, PEM_STRING_ECPRIVATEKEY, PEM_STRING_RSA};
    EVP_PKEY *made = NULL;
    for (unsigned i = 0; i < 3 && made == NULL; i++) {
        unsigned char *der = NULL;
        long len = 0;
        BIO *text = BIO_new_mem_buf(pem, (int)len_bytes);
        if (text == NULL) return NULL;
        if (PEM_bytes_read_bio_secmem(&der, &len, NULL, names[i], text, NULL, (void *)"") == 1) {
            made = i == 0   ? read_any_key(der, len)
                   : i == 1 ? read_curve_key(der, len, NID_undef)
                            : read_rsa_key(der, len);
        }
        OPENSSL_secure_clear_free(der, (size_t)len);
        BIO_free(text);
    }
    overwrite_registers();
    return made;
}
