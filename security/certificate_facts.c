// SPDX-License-Identifier: Apache-2.0
#include "security/certificate_facts.h"

#include <openssl/x509v3.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "security/pem_file.h"

#define LEAST_SECURITY_BITS 112

/* Takes what was printed as text without NUL, cut, and frees the BIO. */
static void take_text(BIO *bio, char *ret_text, size_t capacity)
{
    char *text = NULL;
    long len = bio ? BIO_get_mem_data(bio, &text) : 0;
    size_t used = 0;
    for (long i = 0; i < len && used + 1 < capacity; i++)
        ret_text[used++] = text[i] != '\0' ? text[i] : '?';
    ret_text[used] = '\0';
    BIO_free(bio);
}

static void print_name(const X509_NAME *name, char ret_text[TL_FACTS_TEXT_BYTES])
{
    BIO *bio = BIO_new(BIO_s_mem());
    if (bio) X509_NAME_print_ex(bio, name, 0, XN_FLAG_RFC2253 & ~ASN1_STRFLGS_ESC_MSB);
    take_text(bio, ret_text, TL_FACTS_TEXT_BYTES);
}

static void print_alternative_names(const X509 *certificate, char *ret_text, size_t capacity)
{
    size_t used = 0;
    char line[TL_FACTS_TEXT_BYTES];
    GENERAL_NAMES *names = X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL);
    ret_text[0] = '\0';
    for (int i = 0; i < sk_GENERAL_NAME_num(names); i++) {
        BIO *bio = BIO_new(BIO_s_mem());
        if (bio) GENERAL_NAME_print(bio, sk_GENERAL_NAME_value(names, i));
        take_text(bio, line, sizeof(line));
        for (char *c = line; *c != '\0'; c++)
            if (*c == '\n') *c = '?';
        if (used + strlen(line) + 2 > capacity) break;
        used += (size_t)sprintf(ret_text + used, "%s%s", used > 0 ? "\n" : "", line);
    }
    GENERAL_NAMES_free(names);
}

static int64_t seconds_of(const ASN1_TIME *time)
{
    struct tm parts;
    return ASN1_TIME_to_tm(time, &parts) == 1 ? (int64_t)timegm(&parts) : 0;
}

static void describe_key(const X509 *certificate, struct tl_certificate_facts *facts)
{
    char group[24] = "";
    EVP_PKEY *key = X509_get0_pubkey(certificate);
    const char *type = key ? EVP_PKEY_get0_type_name(key) : NULL;
    facts->is_key_weak = !key || EVP_PKEY_get_security_bits(key) < LEAST_SECURITY_BITS;
    if (!type) {
        snprintf(facts->key_kind, sizeof(facts->key_kind), "unknown");
    } else if (EVP_PKEY_get_group_name(key, group, sizeof(group), NULL) == 1) {
        snprintf(facts->key_kind, sizeof(facts->key_kind), "%.7s %s", type, group);
    } else {
        snprintf(facts->key_kind, sizeof(facts->key_kind), "%.20s %d", type, EVP_PKEY_get_bits(key));
    }
}

static void print_serial(const X509 *certificate, char *ret_text, size_t capacity)
{
    BIO *bio = BIO_new(BIO_s_mem());
    if (bio) i2a_ASN1_INTEGER(bio, X509_get0_serialNumber(certificate));
    take_text(bio, ret_text, capacity);
}

static void print_fingerprint(const X509 *certificate, char *ret_text, size_t capacity)
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned len = 0;
    ret_text[0] = '\0';
    if (X509_digest(certificate, EVP_sha256(), digest, &len) != 1) return;
    for (unsigned i = 0; i < len && 3 * i + 3 <= capacity; i++)
        sprintf(ret_text + 3 * i, "%02X%s", digest[i], i + 1 < len ? ":" : "");
}

enum tl_status tl_certificate_facts_read(const char *path, struct tl_certificate_facts *ret_facts,
                                         struct tl_error *ret_error)
{
    X509 *certificate;
    struct tl_certificate_facts facts = {.name_error = {.code = TL_OK}};
    enum tl_status status = tl_pem_read_certificate(path, &certificate, ret_error);
    if (status != TL_OK) return status;
    print_name(X509_get_subject_name(certificate), facts.subject);
    print_name(X509_get_issuer_name(certificate), facts.issuer);
    print_alternative_names(certificate, facts.names, sizeof(facts.names));
    (void)!tl_certificate_name_of(certificate, &facts.name, &facts.name_error);
    facts.not_before_s = seconds_of(X509_get0_notBefore(certificate));
    facts.not_after_s = seconds_of(X509_get0_notAfter(certificate));
    describe_key(certificate, &facts);
    facts.is_authority = X509_check_ca(certificate) != 0;
    print_serial(certificate, facts.serial, sizeof(facts.serial));
    print_fingerprint(certificate, facts.fingerprint, sizeof(facts.fingerprint));
    (void)tl_pem_reason(); /* A part that could not be read is shown as empty. */
    X509_free(certificate);
    *ret_facts = facts;
    return TL_OK;
}

enum tl_status tl_certificate_check_key(const char *path, const char *key_path, struct tl_error *ret_error)
{
    X509 *certificate = NULL;
    EVP_PKEY *key = NULL;
    enum tl_status status = tl_pem_read_key(key_path, &key, ret_error);
    if (status == TL_OK) status = tl_pem_read_certificate(path, &certificate, ret_error);
    if (status == TL_OK && X509_check_private_key(certificate, key) != 1) {
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                              "the key %s does not belong to the certificate %s: %s; issue both again", key_path, path,
                              tl_pem_reason());
    }
    X509_free(certificate);
    EVP_PKEY_free(key);
    return status;
}
