// SPDX-License-Identifier: Apache-2.0
/*
 * TLS connections.
 *
 * OpenSSL reads from the socket itself, many records at a time. What it writes goes through a BIO of ours into a
 * buffer, so that many records leave with one system call.
 */
#include "security/tls_session.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/check.h"
#include "base/error.h"
#include "security/tls_internal.h"

/* What waits for the peer is some 130 KiB, unless the peer makes OpenSSL answer without reading the answers. */
#define MAX_OUTPUT_BYTES (1024 * 1024)
/* A buffer that has become larger is given back when it is empty. */
#define KEPT_BYTES (32 * 1024)
/* Plain bytes of a record, and more than its header and tag take. */
#define RECORD_BYTES 16384
#define RECORD_OVERHEAD_BYTES 64
/* Records that one call reads at most: a peer may put one byte into each. */
#define MAX_RECORDS 64
/* Messages of TLS itself, as for new keys, in both directions: a handshake has some 15. Then so many may come beside
 * each RENEWED_BYTES. */
#define MAX_MESSAGES 64
#define RENEWED_BYTES (1024 * 1024)
/* What a key that OpenSSL makes for a handshake takes. */
#define CONNECTION_KEY_BYTES 32

struct tl_tls_session {
    SSL *ssl;
    struct tl_tls_context *context;
    enum tl_tls_role role;
    int socket;
    char *expected_name;
    struct tl_certificate_name peer;
    struct tl_error refusal; /* why we do not accept the peer; code TL_OK: we do, or have not seen its certificate */
    uint8_t *output;         /* [output_capacity]; [output_begin, output_end) waits for the peer */
    size_t output_begin;
    size_t output_end;
    size_t output_capacity;
    unsigned message_count; /* messages of TLS itself since plain_bytes was 0 */
    size_t plain_bytes;     /* that were read since then */
};

/* ------------------------------------------------------------------------------------------------------ output -- */

/* Provides space behind output_end; false without memory, and when too much waits. */
static bool make_space(struct tl_tls_session *session, size_t len_bytes)
{
    if (session->output_begin == session->output_end) session->output_begin = session->output_end = 0;
    if (session->output_end - session->output_begin + len_bytes > MAX_OUTPUT_BYTES) return false;
    size_t needed = session->output_end + len_bytes;
    if (needed <= session->output_capacity) return true;
    uint8_t *output = realloc(session->output, needed);
    if (output == NULL) return false;
    session->output = output;
    session->output_capacity = needed;
    return true;
}

static int bio_write(BIO *bio, const char *bytes, size_t len_bytes, size_t *ret_written)
{
    struct tl_tls_session *session = BIO_get_data(bio);
    if (!make_space(session, len_bytes)) return 0;
    memcpy(session->output + session->output_end, bytes, len_bytes);
    session->output_end += len_bytes;
    *ret_written = len_bytes;
    return 1;
}

static long bio_control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio;
    (void)number;
    (void)pointer;
    return command == BIO_CTRL_FLUSH ? 1 : 0;
}

static BIO_METHOD *output_method; /* NULL: not prepared yet */
static int session_index;         /* where an SSL keeps its session */

/* Returns false without memory; the next session tries it again. */
static bool prepare(void)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    if (output_method == NULL) {
        int index = SSL_get_ex_new_index(0, NULL, NULL, NULL, NULL);
        BIO_METHOD *method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "tensorlane output");
        if (index >= 0 && method != NULL && BIO_meth_set_write_ex(method, bio_write) == 1 &&
            BIO_meth_set_ctrl(method, bio_control) == 1) {
            session_index = index;
            output_method = method;
        } else {
            BIO_meth_free(method);
        }
    }
    bool is_prepared = output_method != NULL;
    pthread_mutex_unlock(&mutex);
    return is_prepared;
}

static BIO *create_output(struct tl_tls_session *session)
{
    BIO *bio = BIO_new(output_method);
    if (bio == NULL) return NULL;
    BIO_set_data(bio, session);
    BIO_set_init(bio, 1);
    return bio;
}

enum tl_tls_flushed tl_tls_session_flush(struct tl_tls_session *session)
{
    while (session->output_begin < session->output_end) {
        ssize_t sent = send(session->socket, session->output + session->output_begin,
                            session->output_end - session->output_begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            session->output_begin += (size_t)sent;
        } else if (errno == EAGAIN) {
            return TL_TLS_BLOCKED;
        } else if (errno != EINTR) {
            return TL_TLS_BROKEN;
        }
    }
    session->output_begin = session->output_end = 0;
    if (session->output_capacity > KEPT_BYTES) {
        free(session->output);
        session->output = NULL;
        session->output_capacity = 0;
    }
    return TL_TLS_FLUSHED;
}

/* ------------------------------------------------------------------------------------------------------ errors -- */

/* What a peer's alert means for who reads it. */
struct alert_text {
    int reason;
    const char *text;
};

static const struct alert_text alerts[] = {
    {SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED, "it wants a certificate of ours, and was given none"},
    {SSL_R_TLSV1_ALERT_UNKNOWN_CA, "our certificate is not of an authority that it trusts; compare security.tls.ca"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED, "our certificate has expired, or its clock is ahead"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED, "our certificate is revoked"},
    {SSL_R_SSLV3_ALERT_BAD_CERTIFICATE, "it does not accept our certificate; its log says why"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN, "it does not accept our certificate; its log says why"},
    {SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE, "our certificate may not be used for this (extendedKeyUsage)"},
    {SSL_R_TLSV1_ALERT_PROTOCOL_VERSION, "it does not take our version of TLS; compare security.tls.min_version"},
    {SSL_R_TLSV1_ALERT_NO_APPLICATION_PROTOCOL, "it does not speak HTTP/2, which ALPN asks for"},
    {SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE, "it found no parameters that both take"},
};

static const struct alert_text faults[] = {
    {SSL_R_WRONG_VERSION_NUMBER, "it does not speak TLS; is security.tls missing in its configuration?"},
    {SSL_R_HTTP_REQUEST, "it does not speak TLS but HTTP"},
    {SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE, "it has no certificate"},
    {SSL_R_UNSUPPORTED_PROTOCOL, "it offers no version of TLS that is accepted here (security.tls.min_version)"},
    {SSL_R_NO_APPLICATION_PROTOCOL, "it asks for another protocol than HTTP/2 by ALPN"},
    {SSL_R_UNEXPECTED_EOF_WHILE_READING, "it ended the connection"},
};

static const char *text_of(const struct alert_text *texts, size_t count, int reason)
{
    for (size_t i = 0; i < count; i++)
        if (texts[i].reason == reason) return texts[i].text;
    return NULL;
}

/* Composes the error after a failed call of OpenSSL; its queue is empty afterwards. */
static enum tl_tls_progress fail(const struct tl_tls_session *session, int error, int error_number,
                                 struct tl_error *ret_error)
{
    unsigned long code = ERR_peek_last_error();
    int reason = ERR_GET_REASON(code);
    const char *words = code != 0 ? ERR_reason_error_string(code) : NULL;
    bool is_heap_full = tl_tls_is_heap_full(CONNECTION_KEY_BYTES);
    ERR_clear_error();
    const char *alert = text_of(alerts, TL_ARRAY_COUNT(alerts), reason);
    const char *fault = text_of(faults, TL_ARRAY_COUNT(faults), reason);
    if (session->refusal.code != TL_OK) {
        tl_error_copy(ret_error, &session->refusal);
    } else if (alert != NULL) {
        tl_error_set(ret_error, TL_UNAUTHENTICATED, "the TLS handshake was refused: %s", alert);
    } else if (fault != NULL) {
        tl_error_set(ret_error, reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE ? TL_UNAUTHENTICATED : TL_UNAVAILABLE,
                     "no TLS connection: %s", fault);
    } else if (error == SSL_ERROR_SYSCALL) {
        tl_error_set(ret_error, TL_UNAVAILABLE, "no TLS connection: %s",
                     error_number != 0 ? strerror(error_number) : "it ended the connection");
    } else if (is_heap_full) {
        tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no TLS connection: " TL_TLS_HEAP_FULL);
    } else {
        tl_error_set(ret_error, TL_UNAVAILABLE, "no TLS connection: %s", words != NULL ? words : "unknown error");
    }
    return TL_TLS_FAILED;
}

/* What a call of OpenSSL that has not succeeded means. */
static enum tl_tls_progress judge(const struct tl_tls_session *session, int result, struct tl_error *ret_error)
{
    int error_number = errno;
    int error = SSL_get_error(session->ssl, result);
    if (session->refusal.code != TL_OK) return fail(session, error, error_number, ret_error);
    if (error == SSL_ERROR_WANT_READ) return TL_TLS_WANTS_READ;
    if (error == SSL_ERROR_ZERO_RETURN) return TL_TLS_ENDED;
    return fail(session, error, error_number, ret_error);
}

/* ------------------------------------------------------------------------------------------------ certificates -- */

/* Says in *ret_error what is wrong with a certificate of the peer. */
static void describe_refusal(X509_STORE_CTX *store_context, struct tl_error *ret_error)
{
    int error = X509_STORE_CTX_get_error(store_context);
    X509 *certificate = X509_STORE_CTX_get_current_cert(store_context);
    char subject[256] = "";
    struct tl_certificate_name name;
    if (certificate != NULL && tl_certificate_name_of(certificate, &name, NULL) == TL_OK) {
        snprintf(subject, sizeof(subject), "%s", name.text);
    } else if (certificate != NULL) {
        (void)X509_NAME_oneline(X509_get_subject_name(certificate), subject, sizeof(subject));
    }
    const char *advice = "";
    if (error == X509_V_ERR_CERT_NOT_YET_VALID || error == X509_V_ERR_CERT_HAS_EXPIRED)
        advice = "; renew it, or correct the clock of one side";
    if (error == X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY || error == X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT ||
        error == X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN)
        advice = "; only what security.tls.ca has is trusted";
    if (error == X509_V_ERR_CRL_HAS_EXPIRED || error == X509_V_ERR_UNABLE_TO_GET_CRL)
        advice = "; bring security.tls.crl up to date";
    tl_error_set(ret_error, TL_UNAUTHENTICATED, "the certificate of \"%.200s\" is refused: %s%s", subject,
                 X509_verify_cert_error_string(error), advice);
}

/* The name is looked at while a refusal can still be told to the peer. */
static enum tl_status check_name(struct tl_tls_session *session, X509 *certificate, struct tl_error *ret_error)
{
    enum tl_status status = tl_certificate_name_of(certificate, &session->peer, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "the certificate of the peer cannot be used: ");
        return TL_UNAUTHENTICATED;
    }
    const struct tl_certificate_name *self = tl_tls_context_self(session->context);
    bool is_foreign = strcmp(session->peer.trust_domain, self->trust_domain) != 0;
    if (is_foreign && session->peer.trust_domain[0] == '\0') {
        return tl_error_set(ret_error, TL_UNAUTHENTICATED,
                            "the certificate of the peer is for the DNS name %.255s, which is of no trust domain, and "
                            "ours is for \"%s\"; issue one with a URI, spiffe://%s/...",
                            session->peer.text, self->trust_domain, self->trust_domain);
    }
    if (is_foreign) tl_certificate_name_make_foreign(&session->peer);
    if (is_foreign && !tl_tls_context_accepts(session->context, &session->peer)) {
        return tl_error_set(
            ret_error, TL_UNAUTHENTICATED,
            "the certificate of the peer is for %.255s of trust domain \"%s\", ours is for \"%s\", and no rule of "
            "security.allow names the one or the other",
            session->peer.text, session->peer.trust_domain, self->trust_domain);
    }
    /* Only tasks are workers: a client's certificate must not pass for one. */
    if (session->role == TL_TLS_DIALS && session->peer.kind != TL_CERTIFICATE_MEMBER) {
        return tl_error_set(ret_error, TL_UNAUTHENTICATED,
                            "the certificate of the peer is that of a client, %s, and a worker was dialled",
                            session->peer.text);
    }
    if (session->expected_name != NULL && strcmp(session->peer.text, session->expected_name) != 0) {
        return tl_error_set(ret_error, TL_UNAUTHENTICATED,
                            "the certificate of the peer is for %s, and not for %s, which was dialled",
                            session->peer.text, session->expected_name);
    }
    return TL_OK;
}

int tl_tls_session_verify(int is_accepted, X509_STORE_CTX *store_context)
{
    SSL *ssl = X509_STORE_CTX_get_ex_data(store_context, SSL_get_ex_data_X509_STORE_CTX_idx());
    struct tl_tls_session *session = ssl != NULL ? SSL_get_ex_data(ssl, session_index) : NULL;
    if (session == NULL) return is_accepted;
    if (!is_accepted) {
        if (session->refusal.code == TL_OK) describe_refusal(store_context, &session->refusal);
        return 0;
    }
    if (X509_STORE_CTX_get_error_depth(store_context) > 0) return 1;
    X509 *certificate = X509_STORE_CTX_get_current_cert(store_context);
    if (check_name(session, certificate, &session->refusal) == TL_OK) {
        session->refusal.code = TL_OK;
        return 1;
    }
    X509_STORE_CTX_set_error(store_context, X509_V_ERR_HOSTNAME_MISMATCH);
    return 0;
}

enum tl_status tl_tls_session_recheck(const struct tl_tls_session *session, const struct tl_tls_context *context,
                                      struct tl_error *ret_error)
{
    if (context == session->context) return TL_OK; /* the handshake has checked it against this one */
    const char *domain = tl_tls_context_self(context)->trust_domain;
    if (strcmp(domain, tl_tls_context_self(session->context)->trust_domain) != 0)
        return tl_error_set(ret_error, TL_UNAUTHENTICATED, "this worker's certificate is for trust domain \"%s\" now",
                            domain);
    X509 *certificate = SSL_get0_peer_certificate(session->ssl);
    X509_STORE_CTX *check = X509_STORE_CTX_new();
    enum tl_status status = TL_OK;
    if (check == NULL || certificate == NULL ||
        X509_STORE_CTX_init(check, SSL_CTX_get_cert_store(tl_tls_context_ssl(context)), certificate,
                            SSL_get_peer_cert_chain(session->ssl)) != 1) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to check a certificate");
    } else {
        (void)X509_STORE_CTX_set_default(check, session->role == TL_TLS_ACCEPTS ? "ssl_client" : "ssl_server");
        if (X509_verify_cert(check) != 1) {
            describe_refusal(check, ret_error);
            status = TL_UNAUTHENTICATED;
        }
    }
    X509_STORE_CTX_free(check);
    ERR_clear_error();
    return status;
}

/* ---------------------------------------------------------------------------------------------------- messages -- */

/* OpenSSL handles messages of TLS itself for as long as they come, within one call, so that a peer could keep the
 * thread of all connections. One that sends too many is treated as one that has ended the connection. */
static void count_message(int is_sent, int version, int kind, const void *bytes, size_t len_bytes, SSL *ssl,
                          void *context)
{
    struct tl_tls_session *session = context;
    (void)is_sent;
    (void)version;
    (void)bytes;
    (void)len_bytes;
    if (kind != SSL3_RT_HANDSHAKE && kind != SSL3_RT_ALERT) return;
    if (++session->message_count <= MAX_MESSAGES) return;
    tl_error_set(&session->refusal, TL_RESOURCE_EXHAUSTED,
                 "it sends messages of TLS without end, and no data (new keys, for instance)");
    SSL_set_shutdown(ssl, SSL_get_shutdown(ssl) | SSL_RECEIVED_SHUTDOWN);
}

static void count_plain(struct tl_tls_session *session, size_t len_bytes)
{
    session->plain_bytes += len_bytes;
    if (session->plain_bytes < RENEWED_BYTES) return;
    session->plain_bytes = 0;
    session->message_count = 0;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

enum tl_status tl_tls_session_create(struct tl_tls_context *context, enum tl_tls_role role, int socket,
                                     const char *expected_name, struct tl_tls_session **ret_session,
                                     struct tl_error *ret_error)
{
    struct tl_tls_session *session = prepare() ? calloc(1, sizeof(*session)) : NULL;
    if (session == NULL) goto fail;
    session->context = tl_tls_context_retain(context);
    session->role = role;
    session->socket = socket;
    session->expected_name = expected_name != NULL ? strdup(expected_name) : NULL;
    session->ssl = SSL_new(tl_tls_context_ssl(context));
    BIO *input = BIO_new_socket(socket, BIO_NOCLOSE);
    BIO *output = create_output(session);
    if (session->ssl == NULL || input == NULL || output == NULL ||
        (expected_name != NULL && session->expected_name == NULL) ||
        SSL_set_ex_data(session->ssl, session_index, session) != 1) {
        BIO_free(input);
        BIO_free(output);
        goto fail;
    }
    SSL_set_msg_callback(session->ssl, count_message);
    SSL_set_msg_callback_arg(session->ssl, session);
    SSL_set0_rbio(session->ssl, input);
    SSL_set0_wbio(session->ssl, output);
    if (role == TL_TLS_ACCEPTS)
        SSL_set_accept_state(session->ssl);
    else
        SSL_set_connect_state(session->ssl);
    *ret_session = session;
    return TL_OK;

fail:
    ERR_clear_error();
    tl_tls_session_destroy(session);
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a TLS connection");
}

void tl_tls_session_destroy(struct tl_tls_session *session)
{
    if (session == NULL) return;
    SSL_free(session->ssl);
    tl_tls_context_release(session->context);
    free(session->expected_name);
    free(session->output);
    free(session);
}

enum tl_tls_progress tl_tls_session_handshake(struct tl_tls_session *session, struct tl_error *ret_error)
{
    ERR_clear_error();
    errno = 0;
    int result = SSL_do_handshake(session->ssl);
    if (result != 1) return judge(session, result, ret_error);
    const unsigned char *protocol;
    unsigned int protocol_len;
    SSL_get0_alpn_selected(session->ssl, &protocol, &protocol_len);
    if (protocol_len == 0) {
        /* OpenSSL refuses what does not fit, but not a peer that says nothing of protocols. */
        tl_error_set(ret_error, TL_UNAVAILABLE, "no TLS connection: it does not ask for HTTP/2 by ALPN, as gRPC does");
        return TL_TLS_FAILED;
    }
    if (session->role == TL_TLS_ACCEPTS) return TL_TLS_DONE;
    /* A server looks at our certificate after its own part is done, and says nothing unless it refuses it. What it
     * sends first otherwise is the beginning of HTTP/2. */
    char byte;
    result = SSL_peek(session->ssl, &byte, 1);
    return result == 1 ? TL_TLS_DONE : judge(session, result, ret_error);
}

const struct tl_certificate_name *tl_tls_session_peer(const struct tl_tls_session *session)
{
    return &session->peer;
}

int64_t tl_tls_session_not_after(const struct tl_tls_session *session)
{
    const STACK_OF(X509) *chain = SSL_get0_verified_chain(session->ssl);
    int64_t first = 0;
    int count = sk_X509_num(chain);
    /* The authority that is trusted comes from a file of ours, which may have a newer certificate of it by then. */
    for (int i = 0; i < (count > 1 ? count - 1 : count); i++) {
        struct tm end;
        if (ASN1_TIME_to_tm(X509_get0_notAfter(sk_X509_value(chain, i)), &end) != 1) return 0;
        int64_t not_after = (int64_t)timegm(&end);
        if (i == 0 || not_after < first) first = not_after;
    }
    return first;
}

enum tl_tls_progress tl_tls_session_read(struct tl_tls_session *session, void *bytes, size_t capacity,
                                         size_t *ret_len_bytes, struct tl_error *ret_error)
{
    size_t len_bytes = 0;
    enum tl_tls_progress progress = TL_TLS_DONE;
    ERR_clear_error();
    for (unsigned records = 0; records < MAX_RECORDS && len_bytes < capacity; records++) {
        size_t got = 0;
        errno = 0;
        int result = SSL_read_ex(session->ssl, (uint8_t *)bytes + len_bytes, capacity - len_bytes, &got);
        len_bytes += got;
        count_plain(session, got);
        if (result == 1) continue;
        progress = judge(session, result, ret_error);
        break;
    }
    *ret_len_bytes = len_bytes;
    return progress;
}

bool tl_tls_session_write(struct tl_tls_session *session, const void *bytes, size_t len_bytes)
{
    size_t written;
    ERR_clear_error();
    /* The space for all records at once: a buffer that grows with each of them is copied each time. */
    if (!make_space(session, len_bytes + (len_bytes / RECORD_BYTES + 1) * RECORD_OVERHEAD_BYTES)) return false;
    bool is_written = SSL_write_ex(session->ssl, bytes, len_bytes, &written) == 1 && written == len_bytes;
    ERR_clear_error();
    return is_written;
}

void tl_tls_session_write_end(struct tl_tls_session *session)
{
    ERR_clear_error();
    (void)SSL_shutdown(session->ssl);
    ERR_clear_error();
}
