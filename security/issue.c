// SPDX-License-Identifier: Apache-2.0
/*
 * Makes an authority and issues certificates.
 *
 * Happy path: a key is generated, a certificate of version 3 gets a random serial number, a time of validity that
 * begins a little in the past, since clocks differ, and its extensions; the authority signs it; key and certificate are
 * written. Failure modes: OpenSSL fails only for lack of memory or of random numbers, which one message reports; names
 * and hosts are checked before anything is made.
 */
#include "security/issue.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <openssl/ec.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/ip.h"
#include "security/certificate_name.h"
#include "security/pem_file.h"

#define AUTHORITY_DAYS 3650
#define CLOCK_SKEW_S (-300)
#define SERIAL_BITS 128
#define COMMON_NAME_BYTES 64 /* RFC 5280, ub-common-name */
#define MAX_DNS_BYTES 255
#define SECONDS_PER_DAY 86400

#define AUTHORITY_NAME "tensorlane development authority"
#define SCHEME "spiffe://"

struct tl_authority {
    char folder[PATH_MAX];
    char trust_domain[TL_CERTIFICATE_NAME_BYTES];
    X509 *certificate;
    EVP_PKEY *key;
};

/* ------------------------------------------------------------------------------------------------------ checks -- */

/* The path of NAME with an ending in the folder. */
static enum tl_status make_path(const char *folder, const char *name, const char *ending, char ret_path[PATH_MAX],
                                struct tl_error *ret_error)
{
    int len = snprintf(ret_path, PATH_MAX, "%s/%s%s", folder, name, ending);
    if (len >= 0 && len < PATH_MAX) return TL_OK;
    return tl_error_set_errno(ret_error, ENAMETOOLONG, "cannot write %s in %s", name, folder);
}

/* Checks a URI by the rules that peers will apply, and that its trust domain is this one. */
static enum tl_status check_uri(const char *uri, const char *trust_domain, struct tl_error *ret_error)
{
    struct tl_certificate_name name;
    const struct tl_certificate_entry entry = {.is_uri = true, .text = uri, .len_bytes = strlen(uri)};
    enum tl_status status = tl_certificate_name_choose(&entry, 1, &name, ret_error);
    if (status == TL_OK && strcmp(name.trust_domain, trust_domain) != 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s is not in the trust domain of the authority; begin the name with " SCHEME "%s/", uri,
                            trust_domain);
    }
    return status;
}

static enum tl_status check_trust_domain(const char *trust_domain, struct tl_error *ret_error)
{
    char uri[TL_CERTIFICATE_NAME_BYTES + 64];
    struct tl_error reason;
    snprintf(uri, sizeof(uri), SCHEME "%s/client", trust_domain);
    if (check_uri(uri, trust_domain, &reason) == TL_OK) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "\"%s\" is no trust domain; use lower-case letters, digits, '_' and '-' with dots between "
                        "them, such as example.org",
                        trust_domain);
}

static bool is_dns_name(const char *host)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
    for (const char *label = host;; label++) {
        size_t len = strspn(label, plain);
        if (len == 0 || len > 63) return false;
        label += len;
        if (*label == '\0') return (size_t)(label - host) <= MAX_DNS_BYTES;
        if (*label != '.') return false;
    }
}

/* --------------------------------------------------------------------------------------------------- extensions -- */

/* Adds a URI or a DNS name; false: no memory. */
static bool add_text(GENERAL_NAMES *names, int type, const char *text)
{
    GENERAL_NAME *name = GENERAL_NAME_new();
    ASN1_IA5STRING *string = ASN1_IA5STRING_new();
    if (name && string && ASN1_STRING_set(string, text, -1) == 1) {
        GENERAL_NAME_set0_value(name, type, string);
        if (sk_GENERAL_NAME_push(names, name) > 0) return true;
        string = NULL; /* It belongs to the name. */
    }
    ASN1_IA5STRING_free(string);
    GENERAL_NAME_free(name);
    return false;
}

static bool add_ip(GENERAL_NAMES *names, const struct tl_ip *ip)
{
    bool is_v4 = tl_ip_is_v4(ip);
    GENERAL_NAME *name = GENERAL_NAME_new();
    ASN1_OCTET_STRING *string = ASN1_OCTET_STRING_new();
    if (name && string && ASN1_OCTET_STRING_set(string, ip->bytes + (is_v4 ? 12 : 0), is_v4 ? 4 : 16) == 1) {
        GENERAL_NAME_set0_value(name, GEN_IPADD, string);
        if (sk_GENERAL_NAME_push(names, name) > 0) return true;
        string = NULL; /* It belongs to the name. */
    }
    ASN1_OCTET_STRING_free(string);
    GENERAL_NAME_free(name);
    return false;
}

static bool add_host(GENERAL_NAMES *names, const char *host)
{
    struct tl_ip ip;
    return tl_ip_parse(host, &ip) ? add_ip(names, &ip) : add_text(names, GEN_DNS, host);
}

static bool add_names(X509 *certificate, const char *uri, const char *const *hosts, size_t host_count)
{
    GENERAL_NAMES *names = GENERAL_NAMES_new();
    bool is_added = names && add_text(names, GEN_URI, uri);
    for (size_t i = 0; i < host_count && is_added; i++)
        is_added = add_host(names, hosts[i]);
    is_added = is_added && X509_add1_ext_i2d(certificate, NID_subject_alt_name, names, 0, X509V3_ADD_DEFAULT) == 1;
    GENERAL_NAMES_free(names);
    return is_added;
}

static bool add_extension(X509 *certificate, X509 *issuer, int nid, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, certificate, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, nid, value);
    bool is_added = extension && X509_add_ext(certificate, extension, -1) == 1;
    X509_EXTENSION_free(extension);
    return is_added;
}

/* ------------------------------------------------------------------------------------------------ certificates -- */

static bool set_serial(X509 *certificate)
{
    BIGNUM *number = BN_new();
    bool is_set = number && BN_rand(number, SERIAL_BITS, BN_RAND_TOP_ANY, BN_RAND_BOTTOM_ANY) == 1 &&
                  BN_to_ASN1_INTEGER(number, X509_get_serialNumber(certificate)) != NULL;
    BN_free(number);
    return is_set;
}

/* A certificate without extensions and signature; NULL: OpenSSL failed. */
static X509 *make_certificate(const char *common_name, const X509 *issuer, EVP_PKEY *key, int days)
{
    char cut[COMMON_NAME_BYTES + 1];
    snprintf(cut, sizeof(cut), "%s", common_name);
    X509 *certificate = X509_new();
    if (!certificate) return NULL;
    X509_NAME *subject = X509_get_subject_name(certificate);
    bool is_made = X509_set_version(certificate, X509_VERSION_3) == 1 && set_serial(certificate) &&
                   X509_time_adj_ex(X509_getm_notBefore(certificate), 0, CLOCK_SKEW_S, NULL) != NULL &&
                   X509_time_adj_ex(X509_getm_notAfter(certificate), days, 0, NULL) != NULL &&
                   X509_set_pubkey(certificate, key) == 1 &&
                   X509_NAME_add_entry_by_NID(subject, NID_commonName, MBSTRING_UTF8, (const unsigned char *)cut, -1,
                                              -1, 0) == 1 &&
                   X509_set_issuer_name(certificate, issuer ? X509_get_subject_name(issuer) : subject) == 1;
    if (is_made) return certificate;
    X509_free(certificate);
    return NULL;
}

static enum tl_status openssl_failed(const char *what, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_INTERNAL, "OpenSSL cannot make %s: %s", what, tl_pem_reason());
}

/* --------------------------------------------------------------------------------------------------- authority -- */

static X509 *make_authority(const char *trust_domain, EVP_PKEY *key)
{
    char uri[TL_CERTIFICATE_NAME_BYTES + 16];
    snprintf(uri, sizeof(uri), SCHEME "%s", trust_domain);
    X509 *certificate = make_certificate(AUTHORITY_NAME, NULL, key, AUTHORITY_DAYS);
    if (certificate && add_extension(certificate, certificate, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") &&
        add_extension(certificate, certificate, NID_key_usage, "critical,keyCertSign,cRLSign") &&
        add_extension(certificate, certificate, NID_subject_key_identifier, "hash") &&
        add_names(certificate, uri, NULL, 0) && X509_sign(certificate, key, EVP_sha256()) > 0)
        return certificate;
    X509_free(certificate);
    return NULL;
}

/* Adds what is new since the list was signed, and signs it. False: OpenSSL failed. */
static bool sign_list(X509_CRL *list, const struct tl_authority *authority)
{
    ASN1_INTEGER *last = X509_CRL_get_ext_d2i(list, NID_crl_number, NULL, NULL);
    ASN1_INTEGER *next = ASN1_INTEGER_new();
    ASN1_TIME *now = ASN1_TIME_new();
    X509V3_CTX context;
    X509V3_set_ctx(&context, authority->certificate, NULL, NULL, list, 0);
    X509_EXTENSION *issuer = X509V3_EXT_conf_nid(NULL, &context, NID_authority_key_identifier, "keyid:always");
    int place = X509_CRL_get_ext_by_NID(list, NID_authority_key_identifier, -1);
    if (place >= 0) X509_EXTENSION_free(X509_CRL_delete_ext(list, place));
    bool is_signed =
        next && now && issuer && ASN1_INTEGER_set_int64(next, last ? ASN1_INTEGER_get(last) + 1 : 1) == 1 &&
        X509_time_adj_ex(now, 0, CLOCK_SKEW_S, NULL) != NULL && X509_CRL_set_version(list, X509_CRL_VERSION_2) == 1 &&
        X509_CRL_set_issuer_name(list, X509_get_subject_name(authority->certificate)) == 1 &&
        X509_CRL_set1_lastUpdate(list, now) == 1 &&
        X509_CRL_set1_nextUpdate(list, X509_get0_notAfter(authority->certificate)) == 1 &&
        X509_CRL_add_ext(list, issuer, -1) == 1 &&
        X509_CRL_add1_ext_i2d(list, NID_crl_number, next, 0, X509V3_ADD_REPLACE) == 1 && X509_CRL_sort(list) == 1 &&
        X509_CRL_sign(list, authority->key, EVP_sha256()) > 0;
    X509_EXTENSION_free(issuer);
    ASN1_TIME_free(now);
    ASN1_INTEGER_free(next);
    ASN1_INTEGER_free(last);
    return is_signed;
}

/* Signs the list and writes it. */
static enum tl_status write_list(const struct tl_authority *authority, X509_CRL *list, bool replaces,
                                 struct tl_error *ret_error)
{
    char path[PATH_MAX];
    enum tl_status status = make_path(authority->folder, "ca", ".crl", path, ret_error);
    if (status == TL_OK && (!list || !sign_list(list, authority)))
        status = openssl_failed("a list of revoked certificates", ret_error);
    if (status == TL_OK) status = tl_pem_write_list(path, list, replaces, ret_error);
    return status;
}

static enum tl_status write_authority(const struct tl_authority *authority, bool replaces, struct tl_error *ret_error)
{
    char paths[3][PATH_MAX];
    const char *const all[] = {paths[0], paths[1], paths[2]};
    enum tl_status status = make_path(authority->folder, "ca", ".key", paths[0], ret_error);
    if (status == TL_OK) status = make_path(authority->folder, "ca", ".pem", paths[1], ret_error);
    if (status == TL_OK) status = make_path(authority->folder, "ca", ".crl", paths[2], ret_error);
    if (status == TL_OK && !replaces) status = tl_pem_check_absent(all, 3, ret_error);
    if (status == TL_OK) status = tl_pem_write_key(paths[0], authority->key, replaces, ret_error);
    if (status == TL_OK) status = tl_pem_write_certificate(paths[1], authority->certificate, replaces, ret_error);
    if (status != TL_OK) return status;
    X509_CRL *list = X509_CRL_new();
    status = write_list(authority, list, replaces, ret_error);
    X509_CRL_free(list);
    return status;
}

enum tl_status tl_authority_create(const char *folder, const char *trust_domain, bool replaces,
                                   struct tl_error *ret_error)
{
    struct tl_authority *authority = calloc(1, sizeof(*authority));
    if (!authority) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for an authority");
    snprintf(authority->folder, sizeof(authority->folder), "%s", folder);
    enum tl_status status = check_trust_domain(trust_domain, ret_error);
    if (status == TL_OK && mkdir(folder, 0700) != 0 && errno != EEXIST)
        status = tl_error_set_errno(ret_error, errno, "cannot make the folder %s", folder);
    if (status == TL_OK) {
        authority->key = EVP_EC_gen("P-256");
        authority->certificate = authority->key ? make_authority(trust_domain, authority->key) : NULL;
        if (!authority->certificate) status = openssl_failed("an authority", ret_error);
    }
    if (status == TL_OK) status = write_authority(authority, replaces, ret_error);
    tl_authority_destroy(authority);
    return status;
}

/* The trust domain is the URI of an authority, without a path. */
static bool find_trust_domain(const X509 *certificate, char ret_domain[TL_CERTIFICATE_NAME_BYTES])
{
    bool is_found = false;
    GENERAL_NAMES *names = X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; i < sk_GENERAL_NAME_num(names) && !is_found; i++) {
        int type;
        const ASN1_STRING *text = GENERAL_NAME_get0_value(sk_GENERAL_NAME_value(names, i), &type);
        if (type != GEN_URI) continue;
        int len = ASN1_STRING_length(text) - (int)strlen(SCHEME);
        const char *uri = (const char *)ASN1_STRING_get0_data(text);
        if (len <= 0 || len >= TL_CERTIFICATE_NAME_BYTES || strncmp(uri, SCHEME, strlen(SCHEME)) != 0) continue;
        snprintf(ret_domain, TL_CERTIFICATE_NAME_BYTES, "%.*s", len, uri + strlen(SCHEME));
        is_found = check_trust_domain(ret_domain, NULL) == TL_OK;
    }
    GENERAL_NAMES_free(names);
    return is_found;
}

/* Checks that the two files are those of an authority that can issue now. */
static enum tl_status check_authority(struct tl_authority *authority, const char *path, const char *key_path,
                                      struct tl_error *ret_error)
{
    if (X509_check_ca(authority->certificate) != 1 ||
        !find_trust_domain(authority->certificate, authority->trust_domain)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s is no authority with a trust domain; tensorlane cert init makes one in another folder",
                            path);
    }
    if (X509_check_private_key(authority->certificate, authority->key) == 1) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "the key %s does not belong to %s (%s); take both from the same authority", key_path, path,
                        tl_pem_reason());
}

enum tl_status tl_authority_open(const char *folder, struct tl_authority **ret_authority, struct tl_error *ret_error)
{
    char path[PATH_MAX], key_path[PATH_MAX];
    struct tl_authority *authority = calloc(1, sizeof(*authority));
    if (!authority) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for an authority");
    snprintf(authority->folder, sizeof(authority->folder), "%s", folder);
    enum tl_status status = make_path(folder, "ca", ".pem", path, ret_error);
    if (status == TL_OK) status = make_path(folder, "ca", ".key", key_path, ret_error);
    if (status == TL_OK) status = tl_pem_read_certificate(path, &authority->certificate, ret_error);
    if (status == TL_OK) status = tl_pem_read_key(key_path, &authority->key, ret_error);
    if (status == TL_OK) status = check_authority(authority, path, key_path, ret_error);
    if (status == TL_NOT_FOUND) {
        tl_error_prefix(ret_error, "there is no authority in %s, tensorlane cert init -o %s makes one: ", folder,
                        folder);
    }
    if (status == TL_OK) {
        *ret_authority = authority;
        return TL_OK;
    }
    tl_authority_destroy(authority);
    return status;
}

void tl_authority_destroy(struct tl_authority *authority)
{
    if (!authority) return;
    X509_free(authority->certificate);
    EVP_PKEY_free(authority->key);
    free(authority);
}

const char *tl_authority_trust_domain(const struct tl_authority *authority)
{
    return authority->trust_domain;
}

/* ----------------------------------------------------------------------------------------------------- issuing -- */

static enum tl_status check_request(const struct tl_authority *authority, const struct tl_issue_request *request,
                                    struct tl_error *ret_error)
{
    struct tl_ip ip;
    int days, seconds;
    enum tl_status status = check_uri(request->uri, authority->trust_domain, ret_error);
    if (status != TL_OK) return status;
    for (size_t i = 0; i < request->host_count; i++) {
        const char *host = request->hosts[i];
        if (tl_ip_parse(host, &ip) || is_dns_name(host)) continue;
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "\"%s\" is no host; write a DNS name or an IP address without a port", host);
    }
    if (request->days == 0 || request->days > TL_ISSUE_MAX_DAYS) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a certificate is valid for 1 to %d days, not for %u",
                            TL_ISSUE_MAX_DAYS, request->days);
    }
    if (ASN1_TIME_diff(&days, &seconds, NULL, X509_get0_notAfter(authority->certificate)) == 1 &&
        (int64_t)days * SECONDS_PER_DAY + seconds >= (int64_t)request->days * SECONDS_PER_DAY)
        return TL_OK;
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "the authority ends in %d days, before a certificate of %u days would; choose fewer --days, or "
                        "make another authority (cert init)",
                        days, request->days);
}

static X509 *make_leaf(const struct tl_authority *authority, const char *name, const struct tl_issue_request *request,
                       EVP_PKEY *key)
{
    X509 *issuer = authority->certificate;
    X509 *certificate = make_certificate(name, issuer, key, (int)request->days);
    if (certificate && add_extension(certificate, issuer, NID_basic_constraints, "critical,CA:FALSE") &&
        add_extension(certificate, issuer, NID_key_usage, "critical,digitalSignature") &&
        add_extension(certificate, issuer, NID_ext_key_usage, "serverAuth,clientAuth") &&
        add_extension(certificate, issuer, NID_subject_key_identifier, "hash") &&
        add_extension(certificate, issuer, NID_authority_key_identifier, "keyid:always") &&
        add_names(certificate, request->uri, request->hosts, request->host_count) &&
        X509_sign(certificate, authority->key, EVP_sha256()) > 0)
        return certificate;
    X509_free(certificate);
    return NULL;
}

enum tl_status tl_authority_check_absent(const struct tl_authority *authority, const char *name,
                                         struct tl_error *ret_error)
{
    char path[PATH_MAX], key_path[PATH_MAX];
    const char *const paths[] = {key_path, path};
    enum tl_status status = make_path(authority->folder, name, ".key", key_path, ret_error);
    if (status == TL_OK) status = make_path(authority->folder, name, ".pem", path, ret_error);
    return status == TL_OK ? tl_pem_check_absent(paths, 2, ret_error) : status;
}

enum tl_status tl_authority_issue(struct tl_authority *authority, const char *name,
                                  const struct tl_issue_request *request, bool replaces, struct tl_error *ret_error)
{
    char path[PATH_MAX], key_path[PATH_MAX];
    EVP_PKEY *key = NULL;
    X509 *certificate = NULL;
    enum tl_status status = check_request(authority, request, ret_error);
    if (status == TL_OK) status = make_path(authority->folder, name, ".key", key_path, ret_error);
    if (status == TL_OK) status = make_path(authority->folder, name, ".pem", path, ret_error);
    if (status == TL_OK && !replaces) status = tl_authority_check_absent(authority, name, ret_error);
    if (status == TL_OK) {
        key = EVP_EC_gen("P-256");
        certificate = key ? make_leaf(authority, name, request, key) : NULL;
        if (!certificate) status = openssl_failed("a certificate", ret_error);
    }
    if (status == TL_OK) status = tl_pem_write_key(key_path, key, replaces, ret_error);
    if (status == TL_OK) status = tl_pem_write_certificate(path, certificate, replaces, ret_error);
    X509_free(certificate);
    EVP_PKEY_free(key);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- revoking -- */

/* Reads the list of the authority, or makes an empty one where there is none. */
static enum tl_status read_list(const struct tl_authority *authority, X509_CRL **ret_list, struct tl_error *ret_error)
{
    char path[PATH_MAX];
    X509_CRL *list = NULL;
    enum tl_status status = make_path(authority->folder, "ca", ".crl", path, ret_error);
    if (status == TL_OK) status = tl_pem_read_list(path, &list, ret_error);
    if (status == TL_NOT_FOUND) {
        *ret_list = X509_CRL_new();
        return *ret_list ? TL_OK : openssl_failed("a list of revoked certificates", ret_error);
    }
    if (status != TL_OK) return status;
    if (X509_CRL_verify(list, authority->key) == 1) {
        *ret_list = list;
        return TL_OK;
    }
    X509_CRL_free(list);
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "%s was not signed by the authority beside it (%s); remove it to begin a new list", path,
                        tl_pem_reason());
}

static bool add_revoked(X509_CRL *list, const X509 *certificate)
{
    X509_REVOKED *revoked = X509_REVOKED_new();
    ASN1_TIME *now = X509_gmtime_adj(NULL, 0);
    bool is_added = revoked && now &&
                    X509_REVOKED_set_serialNumber(revoked, (ASN1_INTEGER *)X509_get0_serialNumber(certificate)) == 1 &&
                    X509_REVOKED_set_revocationDate(revoked, now) == 1 && X509_CRL_add0_revoked(list, revoked) == 1;
    ASN1_TIME_free(now);
    if (!is_added) X509_REVOKED_free(revoked);
    return is_added;
}

/* Adds one certificate to the list, where it is not in it. */
static enum tl_status revoke_one(const struct tl_authority *authority, X509_CRL *list, const char *path, size_t *count,
                                 struct tl_error *ret_error)
{
    X509 *certificate;
    X509_REVOKED *revoked;
    enum tl_status status = tl_pem_read_certificate(path, &certificate, ret_error);
    if (status != TL_OK) return status;
    bool is_own = X509_verify(certificate, authority->key) == 1 && X509_check_ca(certificate) == 0;
    if (!is_own) {
        (void)tl_pem_reason(); /* The signature is another's, which the message says. */
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                              "%s was not issued by the authority in %s; revoke it where it was issued", path,
                              authority->folder);
    } else if (X509_CRL_get0_by_cert(list, &revoked, certificate) != 1) {
        if (add_revoked(list, certificate)) {
            (*count)++;
        } else {
            status = openssl_failed("a list of revoked certificates", ret_error);
        }
    }
    X509_free(certificate);
    return status;
}

enum tl_status tl_authority_revoke(struct tl_authority *authority, const char *const *paths, size_t count,
                                   size_t *ret_count, struct tl_error *ret_error)
{
    X509_CRL *list = NULL;
    size_t new_count = 0;
    enum tl_status status = read_list(authority, &list, ret_error);
    for (size_t i = 0; i < count && status == TL_OK; i++)
        status = revoke_one(authority, list, paths[i], &new_count, ret_error);
    if (status == TL_OK) status = write_list(authority, list, true, ret_error);
    if (status == TL_OK) *ret_count = new_count;
    X509_CRL_free(list);
    return status;
}
