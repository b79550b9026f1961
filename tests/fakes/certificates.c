// SPDX-License-Identifier: Apache-2.0
#include <check.h>
#include <fcntl.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakes/certificates.h"

static EVP_PKEY *make_key(int rsa_bits)
{
    EVP_PKEY *key = rsa_bits > 0 ? EVP_PKEY_Q_keygen(NULL, NULL, "RSA", (size_t)rsa_bits)
                                 : EVP_PKEY_Q_keygen(NULL, NULL, "EC", "P-256");
    ck_assert_ptr_nonnull(key);
    return key;
}

static void write_certificate(const X509 *certificate, const char *path)
{
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(PEM_write_X509(file, certificate), 1);
    ck_assert_int_eq(fclose(file), 0);
}

static void add_extension(X509 *certificate, X509V3_CTX *context, int nid, const char *value)
{
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, context, nid, value);
    ck_assert_msg(extension != NULL, "%s", value);
    ck_assert_int_eq(X509_add_ext(certificate, extension, -1), 1);
    X509_EXTENSION_free(extension);
}

static X509 *make_certificate(const char *common_name, EVP_PKEY *key, long serial, long begin_s, long end_s)
{
    X509 *certificate = X509_new();
    ck_assert_ptr_nonnull(certificate);
    ck_assert_int_eq(X509_set_version(certificate, X509_VERSION_3), 1);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial);
    X509_gmtime_adj(X509_getm_notBefore(certificate), begin_s != 0 ? begin_s : -60);
    X509_gmtime_adj(X509_getm_notAfter(certificate), end_s != 0 ? end_s : 3600);
    X509_set_pubkey(certificate, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                               (const unsigned char *)common_name, -1, -1, 0);
    return certificate;
}

/* Makes an authority whose certificate the issuer signs; NULL: itself. */
static void make_authority(struct authority *issuer, struct authority *authority, const char *name, long end_s,
                           const char *path)
{
    authority->key = make_key(0);
    authority->next_serial = 100;
    long serial = issuer != NULL ? issuer->next_serial++ : 1;
    authority->certificate = make_certificate(name, authority->key, serial, 0, end_s);
    if (issuer == NULL) issuer = authority;
    X509_set_issuer_name(authority->certificate, X509_get_subject_name(issuer->certificate));
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer->certificate, authority->certificate, NULL, NULL, 0);
    add_extension(authority->certificate, &context, NID_basic_constraints, "critical,CA:TRUE");
    add_extension(authority->certificate, &context, NID_key_usage, "critical,keyCertSign,cRLSign");
    add_extension(authority->certificate, &context, NID_subject_key_identifier, "hash");
    ck_assert_int_ne(X509_sign(authority->certificate, issuer->key, EVP_sha256()), 0);
    write_certificate(authority->certificate, path);
}

void authority_init(struct authority *authority, const char *name, const char *path)
{
    make_authority(NULL, authority, name, 0, path);
}

void authority_init_below(struct authority *issuer, struct authority *authority, const char *name, long end_s,
                          const char *path)
{
    make_authority(issuer, authority, name, end_s, path);
}

void authority_fini(struct authority *authority)
{
    X509_free(authority->certificate);
    EVP_PKEY_free(authority->key);
}

long authority_issue(struct authority *authority, const struct certificate_kind *kind, const char *certificate_path,
                     const char *key_path)
{
    EVP_PKEY *key = make_key(kind->rsa_bits);
    long serial = authority->next_serial++;
    X509 *certificate = make_certificate("test", key, serial, kind->begin_s, kind->end_s);
    X509 *issuer = kind->is_self_signed ? certificate : authority->certificate;
    X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, certificate, NULL, NULL, 0);
    if (kind->names != NULL) add_extension(certificate, &context, NID_subject_alt_name, kind->names);
    add_extension(certificate, &context, NID_ext_key_usage, kind->is_client ? "clientAuth" : "serverAuth,clientAuth");
    ck_assert_int_ne(X509_sign(certificate, kind->is_self_signed ? key : authority->key, EVP_sha256()), 0);
    write_certificate(certificate, certificate_path);
    int fd = open(key_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ck_assert_int_ge(fd, 0);
    FILE *file = fdopen(fd, "w");
    ck_assert_int_eq(PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL), 1);
    ck_assert_int_eq(fclose(file), 0);
    X509_free(certificate);
    EVP_PKEY_free(key);
    return serial;
}

void authority_revoke(const struct authority *authority, const long *serials, unsigned count, const char *path)
{
    X509_CRL *list = X509_CRL_new();
    ASN1_TIME *time = ASN1_TIME_new();
    ck_assert(list != NULL && time != NULL);
    X509_CRL_set_version(list, X509_CRL_VERSION_2);
    X509_CRL_set_issuer_name(list, X509_get_subject_name(authority->certificate));
    X509_gmtime_adj(time, -60);
    X509_CRL_set1_lastUpdate(list, time);
    for (unsigned i = 0; i < count; i++) {
        X509_REVOKED *revoked = X509_REVOKED_new();
        ASN1_INTEGER *serial = ASN1_INTEGER_new();
        ASN1_INTEGER_set(serial, serials[i]);
        X509_REVOKED_set_serialNumber(revoked, serial);
        X509_REVOKED_set_revocationDate(revoked, time);
        X509_CRL_add0_revoked(list, revoked);
        ASN1_INTEGER_free(serial);
    }
    X509_gmtime_adj(time, 3600);
    X509_CRL_set1_nextUpdate(list, time);
    ck_assert_int_ne(X509_CRL_sign(list, authority->key, EVP_sha256()), 0);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(PEM_write_X509_CRL(file, list), 1);
    ck_assert_int_eq(fclose(file), 0);
    ASN1_TIME_free(time);
    X509_CRL_free(list);
}
