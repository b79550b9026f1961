// SPDX-License-Identifier: Apache-2.0
/*
 * Loading what TLS needs.
 *
 * Happy path: the files are stamped, read and parsed, checked against each other and against the clock, and become one
 * SSL_CTX with all its settings. Failure modes: a file that is replaced while it is read has another stamp later, and
 * is read again then.
 */
#include "security/tls_context.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "security/pem_file.h"
#include "security/private_key.h"
#include "security/tls_internal.h"

/* Keys of this process: one has at most a few KiB, and OpenSSL keeps 32 bytes for each connection. */
#define SECURE_HEAP_BYTES (4 << 20)
/* What a key takes at most. */
#define KEY_BYTES 4096
/* RSA with 2,048 bits, elliptic curves with 224, and no SHA-1. */
#define SECURITY_LEVEL 2
/* AES with 128 bits is as safe as is known to be needed, and takes a quarter less time than with 256. */
#define CIPHERS "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
/* Without those that encrypt with the key of the certificate, which signs only. */
#define CIPHERS_TLS12 "DEFAULT:!kRSA"
/* Bytes that one read takes from a socket. */
#define READ_BYTES (128 * 1024)

enum { FILE_CA, FILE_CERTIFICATE, FILE_KEY, FILE_CRL, FILE_COUNT };

/* Tells one state of a file from another. */
struct stamp {
    ino_t inode;
    dev_t device;
    off_t size;
    struct timespec changed;
};

struct tl_tls_context {
    atomic_uint references;
    SSL_CTX *ssl;
    struct tl_certificate_name self;
    char *foreign_names; /* "" : none */
    struct stamp stamps[FILE_COUNT];
};

/* ------------------------------------------------------------------------------------------------------- files -- */

static const char *file_of(const struct tl_tls_settings *settings, unsigned which)
{
    const char *const files[FILE_COUNT] = {settings->ca, settings->certificate, settings->key, settings->crl};
    return files[which];
}

static struct stamp stamp_of(const struct stat *info)
{
    return (struct stamp){
        .inode = info->st_ino, .device = info->st_dev, .size = info->st_size, .changed = info->st_ctim};
}

/* ------------------------------------------------------------------------------------------------------ checks -- */

static enum tl_status check_validity(const char *path, X509 *certificate, struct tl_error *ret_error)
{
    if (X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "the certificate %s has expired; issue another one (tensorlane cert issue)", path);
    }
    if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "the certificate %s is not valid yet; is the clock of this machine right?", path);
    }
    return TL_OK;
}

static enum tl_status add_chain(SSL_CTX *ssl, BIO *text, const char *path, struct tl_error *ret_error)
{
    X509 *between;
    while ((between = PEM_read_bio_X509(text, NULL, NULL, NULL)) != NULL) {
        if (SSL_CTX_add0_chain_cert(ssl, between) == 1) continue;
        X509_free(between);
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s cannot be used: %s", path, tl_pem_reason());
    }
    bool is_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    const char *reason = tl_pem_reason();
    if (is_end) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has a certificate that cannot be read: %s", path, reason);
}

static enum tl_status use_certificate(struct tl_tls_context *context, const char *path, const char *pem, size_t len,
                                      struct tl_error *ret_error)
{
    BIO *text = BIO_new_mem_buf(pem, (int)len);
    X509 *certificate = text != NULL ? PEM_read_bio_X509(text, NULL, NULL, NULL) : NULL;
    enum tl_status status = TL_OK;
    if (certificate == NULL) {
        (void)tl_pem_reason();
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has no certificate in PEM", path);
    }
    if (status == TL_OK) status = check_validity(path, certificate, ret_error);
    if (status == TL_OK) {
        status = tl_certificate_name_of(certificate, &context->self, ret_error);
        if (status != TL_OK) tl_error_prefix(ret_error, "%s: ", path);
    }
    if (status == TL_OK && SSL_CTX_use_certificate(context->ssl, certificate) != 1) {
        status = tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                              "the certificate %s cannot be used: %s; RSA needs 2,048 bits, elliptic curves 224, and "
                              "SHA-1 does not suffice",
                              path, tl_pem_reason());
    }
    if (status == TL_OK) status = add_chain(context->ssl, text, path, ret_error);
    X509_free(certificate);
    BIO_free(text);
    return status;
}

/* A task of the own trust domain is called /job:JOB/task:INDEX, so that no caller would have its URI as a name. */
static enum tl_status check_foreign_names(const struct tl_tls_context *context, struct tl_error *ret_error)
{
    char own[TL_CERTIFICATE_NAME_BYTES + 16];
    int len = snprintf(own, sizeof(own), "spiffe://%s/job/", context->self.trust_domain);
    for (const char *word = context->foreign_names; *word != '\0'; word += *word == ' ') {
        size_t word_len = strcspn(word, " ");
        if (strncmp(word, own, (size_t)len) == 0)
            return tl_error_set(
                ret_error, TL_INVALID_ARGUMENT,
                "security.allow names %.*s, a task of this trust domain; write it as \"task:JOB:INDEX\"", (int)word_len,
                word);
        word += word_len;
    }
    return TL_OK;
}

/* Returns the key of the context before if it is the same one, and frees the other. A connection keeps its context for
 * as long as it lives: without this, each reading of the files could take more of the secure heap. */
static EVP_PKEY *share_key(EVP_PKEY *key, const struct tl_tls_context *before)
{
    EVP_PKEY *known = before != NULL ? SSL_CTX_get0_privatekey(before->ssl) : NULL;
    if (key == NULL || known == NULL || EVP_PKEY_eq(key, known) != 1 || EVP_PKEY_up_ref(known) != 1) return key;
    EVP_PKEY_free(key);
    return known;
}

static enum tl_status use_key(SSL_CTX *ssl, const struct tl_tls_settings *settings, const struct tl_tls_context *before,
                              const char *pem, size_t len, struct tl_error *ret_error)
{
    EVP_PKEY *key = share_key(tl_private_key_read(pem, len), before);
    enum tl_status status = TL_OK;
    if (key == NULL && tl_tls_is_heap_full(KEY_BYTES)) {
        (void)tl_pem_reason();
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "the key %s cannot be read: " TL_TLS_HEAP_FULL,
                              settings->key);
    } else if (key == NULL) {
        (void)tl_pem_reason();
        status =
            tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                         "%s has no private key in PEM that can be used: RSA, or an elliptic curve with a name, and "
                         "no password",
                         settings->key);
    } else if (SSL_CTX_use_PrivateKey(ssl, key) != 1 || SSL_CTX_check_private_key(ssl) != 1) {
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the key %s does not belong to the certificate %s: %s",
                              settings->key, settings->certificate, tl_pem_reason());
    }
    EVP_PKEY_free(key);
    return status;
}

/* Adds every certificate, or every list, in the text. */
static enum tl_status trust(SSL_CTX *ssl, const char *path, bool is_crl, const char *pem, size_t len,
                            struct tl_error *ret_error)
{
    BIO *text = BIO_new_mem_buf(pem, (int)len);
    STACK_OF(X509_INFO) *items = text != NULL ? PEM_X509_INFO_read_bio(text, NULL, NULL, NULL) : NULL;
    X509_STORE *store = SSL_CTX_get_cert_store(ssl);
    int added = 0;
    bool is_ok = items != NULL;
    for (int i = 0; is_ok && i < sk_X509_INFO_num(items); i++) {
        const X509_INFO *item = sk_X509_INFO_value(items, i);
        if (is_crl && item->crl != NULL) {
            is_ok = X509_STORE_add_crl(store, item->crl) == 1;
            added++;
        }
        if (!is_crl && item->x509 != NULL) {
            is_ok = X509_STORE_add_cert(store, item->x509) == 1 && SSL_CTX_add_client_CA(ssl, item->x509) == 1;
            added++;
        }
    }
    if (is_crl) (void)X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK);
    sk_X509_INFO_pop_free(items, X509_INFO_free);
    BIO_free(text);
    const char *reason = tl_pem_reason();
    if (is_ok && added > 0) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has no %s in PEM%s%s", path,
                        is_crl ? "list of revoked certificates" : "certificate", is_ok ? "" : ": ",
                        is_ok ? "" : reason);
}

/* -------------------------------------------------------------------------------------------------- SSL_CTX -- */

/* HTTP/2 is what is spoken here; a client that does not ask for it by ALPN is none of gRPC. */
static const unsigned char alpn[] = {2, 'h', '2'};

static int choose_alpn(SSL *ssl, const unsigned char **ret_chosen, unsigned char *ret_len, const unsigned char *offered,
                       unsigned int offered_len, void *unused)
{
    (void)ssl;
    (void)unused;
    unsigned char *chosen;
    if (SSL_select_next_proto(&chosen, ret_len, alpn, sizeof(alpn), offered, offered_len) != OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_ALERT_FATAL;
    *ret_chosen = chosen;
    return SSL_TLSEXT_ERR_OK;
}

static void prepare_openssl(void)
{
    /* The program may have done it already. */
    if (CRYPTO_secure_malloc_initialized() || CRYPTO_secure_malloc_init(SECURE_HEAP_BYTES, 32) == 1) return;
    TL_LOG_AT_WARN("private keys lie in memory that is not locked, and may be written to swap space",
                   TL_STR("remedy", "let the process lock 4 MiB more (ulimit -l, LimitMEMLOCK, --ulimit memlock)"));
}

bool tl_tls_is_heap_full(size_t size_bytes)
{
    void *memory = OPENSSL_secure_malloc(size_bytes);
    OPENSSL_secure_free(memory);
    return memory == NULL;
}

/* One that both accepts and dials. */
static SSL_CTX *create_ssl(bool is_tls12_allowed)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, prepare_openssl);
    SSL_CTX *ssl = SSL_CTX_new(TLS_method());
    if (ssl == NULL) return NULL;
    SSL_CTX_set_security_level(ssl, SECURITY_LEVEL);
    (void)SSL_CTX_set_ciphersuites(ssl, CIPHERS);
    (void)SSL_CTX_set_cipher_list(ssl, CIPHERS_TLS12);
    (void)SSL_CTX_set_min_proto_version(ssl, is_tls12_allowed ? TLS1_2_VERSION : TLS1_3_VERSION);
    (void)SSL_CTX_set_options(ssl, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                       SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_CIPHER_SERVER_PREFERENCE);
    (void)SSL_CTX_set_num_tickets(ssl, 0);
    (void)SSL_CTX_set_session_cache_mode(ssl, SSL_SESS_CACHE_OFF);
    (void)SSL_CTX_set_mode(ssl, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_read_ahead(ssl, 1);
    SSL_CTX_set_default_read_buffer_len(ssl, READ_BYTES);
    SSL_CTX_set_verify(ssl, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, tl_tls_session_verify);
    SSL_CTX_set_alpn_select_cb(ssl, choose_alpn, NULL);
    if (SSL_CTX_set_alpn_protos(ssl, alpn, sizeof(alpn)) != 0) {
        SSL_CTX_free(ssl);
        return NULL;
    }
    return ssl;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

static enum tl_status load_file(struct tl_tls_context *context, const struct tl_tls_settings *settings,
                                const struct tl_tls_context *before, unsigned which, struct tl_error *ret_error)
{
    const char *path = file_of(settings, which);
    struct tl_pem_text text;
    if (path == NULL) return TL_OK;
    enum tl_status status = tl_pem_read_text(path, which == FILE_KEY, &text, ret_error);
    if (status != TL_OK) return status;
    context->stamps[which] = stamp_of(&text.info);
    switch (which) {
    case FILE_CERTIFICATE:
        status = use_certificate(context, path, text.bytes, text.len_bytes, ret_error);
        break;
    case FILE_KEY:
        status = use_key(context->ssl, settings, before, text.bytes, text.len_bytes, ret_error);
        break;
    default:
        status = trust(context->ssl, path, which == FILE_CRL, text.bytes, text.len_bytes, ret_error);
    }
    tl_pem_text_fini(&text);
    return status;
}

enum tl_status tl_tls_context_load(const struct tl_tls_settings *settings, const struct tl_tls_context *before,
                                   struct tl_tls_context **ret_context, struct tl_error *ret_error)
{
    struct tl_tls_context *context = calloc(1, sizeof(*context));
    SSL_CTX *ssl = create_ssl(settings->is_tls12_allowed);
    if (context != NULL)
        context->foreign_names = strdup(settings->foreign_names != NULL ? settings->foreign_names : "");
    if (context == NULL || ssl == NULL || context->foreign_names == NULL) {
        bool is_heap_full = tl_tls_is_heap_full(KEY_BYTES);
        ERR_clear_error();
        if (context != NULL) free(context->foreign_names);
        SSL_CTX_free(ssl);
        free(context);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for TLS%s",
                            is_heap_full ? ": " TL_TLS_HEAP_FULL : "");
    }
    atomic_init(&context->references, 1);
    context->ssl = ssl;
    enum tl_status status = TL_OK;
    for (unsigned which = 0; which < FILE_COUNT && status == TL_OK; which++)
        status = load_file(context, settings, before, which, ret_error);
    if (status == TL_OK) status = check_foreign_names(context, ret_error);
    if (status != TL_OK) {
        tl_tls_context_release(context);
        return status;
    }
    *ret_context = context;
    return TL_OK;
}

struct tl_tls_context *tl_tls_context_retain(struct tl_tls_context *context)
{
    atomic_fetch_add(&context->references, 1);
    return context;
}

void tl_tls_context_release(struct tl_tls_context *context)
{
    if (context == NULL || atomic_fetch_sub(&context->references, 1) > 1) return;
    SSL_CTX_free(context->ssl);
    free(context->foreign_names);
    free(context);
}

bool tl_tls_context_is_current(const struct tl_tls_context *context, const struct tl_tls_settings *settings)
{
    for (unsigned which = 0; which < FILE_COUNT; which++) {
        const struct stamp *loaded = &context->stamps[which];
        const char *path = file_of(settings, which);
        struct stat info;
        if (path == NULL) continue;
        if (stat(path, &info) != 0) return false;
        struct stamp now = stamp_of(&info);
        if (now.inode != loaded->inode || now.device != loaded->device || now.size != loaded->size ||
            now.changed.tv_sec != loaded->changed.tv_sec || now.changed.tv_nsec != loaded->changed.tv_nsec)
            return false;
    }
    return true;
}

const struct tl_certificate_name *tl_tls_context_self(const struct tl_tls_context *context)
{
    return &context->self;
}

/* Whether a list with a blank between two has the word. */
static bool has_word(const char *list, const char *word)
{
    size_t len = strlen(word);
    for (; len > 0 && *list != '\0'; list += *list == ' ') {
        size_t list_len = strcspn(list, " ");
        if (list_len == len && memcmp(list, word, len) == 0) return true;
        list += list_len;
    }
    return false;
}

bool tl_tls_context_accepts(const struct tl_tls_context *context, const struct tl_certificate_name *peer)
{
    /* A DNS name is of no trust domain, even if it is spelt like one. */
    if (peer->trust_domain[0] == '\0') return false;
    return has_word(context->foreign_names, peer->trust_domain) || has_word(context->foreign_names, peer->text);
}

SSL_CTX *tl_tls_context_ssl(const struct tl_tls_context *context)
{
    return context->ssl;
}
