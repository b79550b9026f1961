// SPDX-License-Identifier: Apache-2.0
/*
 * Any bytes as a private key, and as one of the files of "security.tls" beside good ones: authorities, certificates, a
 * list of revoked ones.
 *
 * Input: one byte that says which file, and whether what follows is PEM or its content in DER, then the file. What is
 * refused has a reason in a text that may be logged, and what is accepted can be used.
 */
#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/text.h"
#include "security/issue.h"
#include "security/private_key.h"
#include "security/tls_context.h"

#define IS_DER 0x80

/* The kinds of input: private keys in three forms, then files of a context. */
enum { KIND_KEY, KIND_CURVE_KEY, KIND_RSA_KEY, KIND_CA, KIND_CERTIFICATE, KIND_CRL, KIND_COUNT };

static const char *const names[KIND_COUNT] = {PEM_STRING_PKCS8INF, PEM_STRING_ECPRIVATEKEY, PEM_STRING_RSA,
                                              PEM_STRING_X509,     PEM_STRING_X509,         PEM_STRING_X509_CRL};

/* The good files, and the one that comes from the input; each is a file in memory. */
static char ca[32], certificate[32], key[32], fuzzed[32];
static int fuzzed_fd;

static int make_file(char path[32])
{
    int fd = memfd_create("pem", MFD_CLOEXEC);
    TL_CHECK(fd >= 0 && fchmod(fd, 0600) == 0);
    snprintf(path, 32, "/proc/self/fd/%d", fd);
    return fd;
}

/* Takes a file out of the folder. */
static void take_file(const char *folder, const char *name, char path[32])
{
    char from[64], text[8192];
    snprintf(from, sizeof(from), "%s/%s", folder, name);
    int fd = open(from, O_RDONLY | O_CLOEXEC);
    ssize_t len = read(fd, text, sizeof(text));
    TL_CHECK(len > 0 && write(make_file(path), text, (size_t)len) == len);
    close(fd);
    unlink(from);
}

static void start(void)
{
    char folder[] = "/tmp/tensorlane-XXXXXX", rest[64];
    struct tl_authority *authority;
    struct tl_error error;
    const struct tl_issue_request request = {.uri = "spiffe://example.org/job/ps/task/0", .days = 100};
    TL_CHECK(mkdtemp(folder) != NULL);
    TL_CHECK(tl_authority_create(folder, "example.org", false, &error) == TL_OK);
    TL_CHECK(tl_authority_open(folder, &authority, &error) == TL_OK);
    TL_CHECK(tl_authority_issue(authority, "own", &request, false, &error) == TL_OK);
    tl_authority_destroy(authority);
    take_file(folder, "ca.pem", ca);
    take_file(folder, "own.pem", certificate);
    take_file(folder, "own.key", key);
    snprintf(rest, sizeof(rest), "%s/ca.key", folder);
    unlink(rest);
    snprintf(rest, sizeof(rest), "%s/ca.crl", folder);
    unlink(rest);
    TL_CHECK(rmdir(folder) == 0);
    fuzzed_fd = make_file(fuzzed);
}

static void try_key(const char *text, size_t len_bytes)
{
    EVP_PKEY *read = tl_private_key_read(text, len_bytes);
    if (read != NULL) TL_CHECK(EVP_PKEY_get_bits(read) > 0);
    EVP_PKEY_free(read);
}

static void try_file(unsigned kind, const char *text, size_t len_bytes)
{
    struct tl_error error = {.code = TL_OK};
    struct tl_tls_context *context = NULL;
    struct tl_tls_settings settings = {.ca = kind == KIND_CA ? fuzzed : ca,
                                       .certificate = kind == KIND_CERTIFICATE ? fuzzed : certificate,
                                       .key = key,
                                       .crl = kind == KIND_CRL ? fuzzed : NULL};
    TL_CHECK(ftruncate(fuzzed_fd, 0) == 0 && pwrite(fuzzed_fd, text, len_bytes, 0) == (ssize_t)len_bytes);
    enum tl_status status = tl_tls_context_load(&settings, &context, &error);
    TL_CHECK((status == TL_OK) == (context != NULL));
    if (status != TL_OK) {
        TL_CHECK(error.code == status && error.message[0] != '\0');
        TL_CHECK(tl_text_is_utf8(error.message, strlen(error.message)));
    } else {
        TL_CHECK(tl_tls_context_self(context)->text[0] != '\0');
    }
    tl_tls_context_release(context);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    if (ca[0] == '\0') start();
    if (len_bytes == 0 || len_bytes > 100000) return 0;
    unsigned kind = (data[0] & 0x7f) % KIND_COUNT;
    const char *text = (const char *)data + 1;
    size_t text_bytes = len_bytes - 1;
    BIO *pem = NULL;
    if ((data[0] & IS_DER) != 0) {
        char *made;
        pem = BIO_new(BIO_s_mem());
        TL_CHECK(pem != NULL && PEM_write_bio(pem, names[kind], "", data + 1, (long)len_bytes - 1) >= 0);
        text_bytes = (size_t)BIO_get_mem_data(pem, &made);
        text = made;
    }
    if (kind <= KIND_RSA_KEY)
        try_key(text, text_bytes);
    else
        try_file(kind, text, text_bytes);
    BIO_free(pem);
    ERR_clear_error();
    return 0;
}
