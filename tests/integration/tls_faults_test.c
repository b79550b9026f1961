// SPDX-License-Identifier: Apache-2.0
/*
 * Without memory for OpenSSL, at every point: certificates are loaded, hands are shaken and certificates are issued
 * while the n-th allocation of OpenSSL fails, for many n. Each operation succeeds or says why not, and what it leaves
 * behind is as safe as without the fault: a peer that is revoked is not let in.
 */
#include <check.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "fakes/certificates.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "security/issue.h"
#include "security/tls_session.h"

#define MEMBER_0 "URI:spiffe://test/job/node/task/0"
#define MEMBER_1 "URI:spiffe://test/job/node/task/1"
/* The first allocations fail each alone, of the rest one of so many: a walk over all takes more than half a minute. */
#define FIRST_ALLOCATIONS 500
#ifdef __SANITIZE_ADDRESS__
#define STRIDE 31
#else
#define STRIDE 7
#endif
/* None of the operations allocates as often. */
#define MAX_STEPS 100000

static struct tl_error error;
static char ca[200], crl[200];
static char certificates[3][200], keys[3][200]; /* the third one is revoked */

/* ------------------------------------------------------------------------------------------------------ memory -- */

static unsigned countdown; /* the allocation that fails, counted from 1; 0: none */
static bool is_hit;

static bool fails(void)
{
    if (countdown == 0 || --countdown > 0) return false;
    is_hit = true;
    return true;
}

static void *allocate(size_t len, const char *file, int line)
{
    (void)file, (void)line;
    return fails() ? NULL : malloc(len);
}

static void *reallocate(void *memory, size_t len, const char *file, int line)
{
    (void)file, (void)line;
    return fails() ? NULL : realloc(memory, len);
}

static void release(void *memory, const char *file, int line)
{
    (void)file, (void)line;
    free(memory);
}

static void arm(unsigned number)
{
    is_hit = false;
    countdown = number;
}

static void disarm(void)
{
    countdown = 0;
    ERR_clear_error();
}

static void expect_reason(enum tl_status status)
{
    ck_assert_int_eq(error.code, status);
    ck_assert_str_ne(error.message, "");
}

/* ------------------------------------------------------------------------------------------------------- files -- */

static void setup(void)
{
    static const char *const names[] = {MEMBER_0, MEMBER_1, MEMBER_1};
    struct authority authority;
    long serial = 0;
    temp_folder_make();
    snprintf(ca, sizeof(ca), "%s/ca.pem", temp_folder);
    snprintf(crl, sizeof(crl), "%s/ca.crl", temp_folder);
    authority_init(&authority, "test authority", ca);
    for (unsigned i = 0; i < 3; i++) {
        snprintf(certificates[i], sizeof(certificates[i]), "%s/%u.pem", temp_folder, i);
        snprintf(keys[i], sizeof(keys[i]), "%s/%u.key", temp_folder, i);
        serial = authority_issue(&authority, &(struct certificate_kind){.names = names[i]}, certificates[i], keys[i]);
    }
    authority_revoke(&authority, &serial, 1, crl);
    authority_fini(&authority);
}

static void teardown(void)
{
    temp_folder_remove();
}

static enum tl_status load(unsigned which, struct tl_tls_context **ret_context)
{
    const struct tl_tls_settings settings = {
        .ca = ca, .certificate = certificates[which], .key = keys[which], .crl = crl};
    *ret_context = NULL;
    error = (struct tl_error){.code = TL_OK};
    return tl_tls_context_load(&settings, NULL, ret_context, &error);
}

static struct tl_tls_context *load_well(unsigned which)
{
    struct tl_tls_context *context;
    ck_assert_msg(load(which, &context) == TL_OK, "%s", error.message);
    return context;
}

/* --------------------------------------------------------------------------------------------------- handshakes -- */

/* Lets one side go on. Returns whether it has not failed. */
static bool advance(struct tl_tls_session *session, enum tl_tls_progress *progress)
{
    error = (struct tl_error){.code = TL_OK};
    if (*progress == TL_TLS_WANTS_READ) *progress = tl_tls_session_handshake(session, &error);
    if (*progress == TL_TLS_FAILED) ck_assert_str_ne(error.message, "");
    (void)tl_tls_session_flush(session);
    return *progress != TL_TLS_FAILED && *progress != TL_TLS_ENDED;
}

static bool shake(struct tl_tls_session *const *sessions)
{
    enum tl_tls_progress progress[2] = {TL_TLS_WANTS_READ, TL_TLS_WANTS_READ};
    for (unsigned round = 0; round < 20; round++) {
        if (!advance(sessions[1], &progress[1]) || !advance(sessions[0], &progress[0])) return false;
        /* A server says something first; the other side waits for it. */
        if (progress[0] == TL_TLS_DONE && !tl_tls_session_write(sessions[0], "x", 1)) return false;
        (void)tl_tls_session_flush(sessions[0]);
        if (progress[0] == TL_TLS_DONE && progress[1] == TL_TLS_DONE) return true;
    }
    return false;
}

/* Returns whether the second one, which dials, is let in by the first one. */
static bool is_let_in(struct tl_tls_context *const *contexts)
{
    int sockets[2];
    struct tl_tls_session *sessions[2] = {NULL, NULL};
    bool is_in = true;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets), 0);
    for (unsigned i = 0; i < 2 && is_in; i++) {
        error = (struct tl_error){.code = TL_OK};
        enum tl_status status = tl_tls_session_create(contexts[i], i == 0 ? TL_TLS_ACCEPTS : TL_TLS_DIALS, sockets[i],
                                                      i == 0 ? NULL : "/job:node/task:0", &sessions[i], &error);
        is_in = status == TL_OK;
        if (!is_in) expect_reason(status);
    }
    is_in = is_in && shake(sessions);
    if (is_in) ck_assert_str_eq(tl_tls_session_peer(sessions[0])->text, "/job:node/task:1");
    for (unsigned i = 0; i < 2; i++) {
        tl_tls_session_destroy(sessions[i]);
        (void)close(sockets[i]);
    }
    return is_in;
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

START_TEST(loading)
{
    struct tl_tls_context *contexts[2] = {NULL, load_well(1)}, *revoked = load_well(2);
    unsigned number = 1;
    do {
        arm(number);
        enum tl_status status = load(0, &contexts[0]);
        disarm();
        if (status != TL_OK) {
            expect_reason(status);
        } else {
            ck_assert(!is_let_in((struct tl_tls_context *[]){contexts[0], revoked}));
            if (!is_hit) ck_assert(is_let_in(contexts));
            tl_tls_context_release(contexts[0]);
        }
        number += number < FIRST_ALLOCATIONS ? 1 : STRIDE;
    } while (is_hit && number < MAX_STEPS);
    ck_assert_uint_gt(number, 100);
    printf("%u allocations\n", number);
    tl_tls_context_release(contexts[1]);
    tl_tls_context_release(revoked);
}
END_TEST

/* The index says whether the peer is revoked. */
START_TEST(handshake)
{
    struct tl_tls_context *contexts[2] = {load_well(0), load_well(1 + (unsigned)_i)};
    unsigned number = 1;
    bool is_in;
    do {
        arm(number);
        is_in = is_let_in(contexts);
        disarm();
        ck_assert(!is_in || _i == 0);
        number += number < FIRST_ALLOCATIONS ? 1 : STRIDE;
    } while (is_hit && number < MAX_STEPS);
    ck_assert_uint_gt(number, 100);
    ck_assert(is_in == (_i == 0));
    printf("%u allocations\n", number);
    tl_tls_context_release(contexts[0]);
    tl_tls_context_release(contexts[1]);
}
END_TEST

static enum tl_status issue(const char *name)
{
    struct tl_authority *authority = NULL;
    error = (struct tl_error){.code = TL_OK};
    enum tl_status status = tl_authority_open(temp_folder, &authority, &error);
    const struct tl_issue_request request = {.uri = "spiffe://example.org/job/ps/task/0", .days = 9};
    if (status == TL_OK) status = tl_authority_issue(authority, name, &request, true, &error);
    tl_authority_destroy(authority);
    return status;
}

/* A certificate is there as a whole, with its key, or was not made. */
START_TEST(issuing)
{
    unsigned number = 1;
    enum tl_status status;
    ck_assert_int_eq(unlink(ca), 0);
    ck_assert_int_eq(unlink(crl), 0);
    ck_assert_msg(tl_authority_create(temp_folder, "example.org", false, &error) == TL_OK, "%s", error.message);
    do {
        arm(number);
        status = issue("ps-0");
        disarm();
        if (status != TL_OK) expect_reason(status);
        number += number < FIRST_ALLOCATIONS ? 1 : STRIDE;
    } while (is_hit && number < MAX_STEPS);
    ck_assert_int_eq(status, TL_OK);
    ck_assert_uint_gt(number, 100);
    printf("%u allocations\n", number);
    snprintf(certificates[0], sizeof(certificates[0]), "%s/ps-0.pem", temp_folder);
    snprintf(keys[0], sizeof(keys[0]), "%s/ps-0.key", temp_folder);
    tl_tls_context_release(load_well(0));
}
END_TEST

int main(void)
{
    /* Before OpenSSL allocates anything. */
    if (CRYPTO_set_mem_functions(allocate, reallocate, release) != 1) return 1;
    Suite *suite = suite_create("tls_faults");
    TCase *tcase = tcase_create("tls_faults");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 1000);
    tcase_add_test(tcase, loading);
    tcase_add_loop_test(tcase, handshake, 0, 2);
    tcase_add_test(tcase, issuing);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
