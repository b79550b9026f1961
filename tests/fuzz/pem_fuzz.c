// SPDX-License-Identifier: Apache-2.0
/*
 * Any bytes as one of the files of "security.tls": authorities, certificates beside a good key, a list of revoked ones.
 * The files that have nothing to do with it are left out: to read the same good ones each time takes longer.
 *
 * Input: one byte that says which file, and whether what follows is PEM or its content in DER, then the file. What is
 * refused has a reason in a text that may be logged, and what is accepted can be used.
 */
#include <openssl/err.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/text.h"
#include "fuzz/fuzz_pem.h"
#include "security/tls_context.h"

enum { KIND_CA, KIND_CERTIFICATE, KIND_CRL, KIND_COUNT };

static const char *const names[KIND_COUNT] = {PEM_STRING_X509, PEM_STRING_X509, PEM_STRING_X509_CRL};

/* The key of the certificate in corpus/pem/certificate_own, as RFC 5915 has it: its number is 7, on the curve P-256. */
static const unsigned char good_key[] = {0x30, 0x31, 0x02, 0x01, 0x01, 0x04, 0x20, 0,    0,    0, 0, 0, 0,
                                         0,    0,    0,    0,    0,    0,    0,    0,    0,    0, 0, 0, 0,
                                         0,    0,    0,    0,    0,    0,    0,    0,    0,    0, 0, 0, 7,
                                         0xa0, 0x0a, 6,    8,    42,   0x86, 0x48, 0xce, 0x3d, 3, 1, 7};

/* The good key, and the file that comes from the input; each is a file in memory. */
static char key[32], fuzzed[32];
static int fuzzed_fd;

static int make_file(char path[32])
{
    int fd = memfd_create("pem", MFD_CLOEXEC);
    TL_CHECK(fd >= 0 && fchmod(fd, 0600) == 0);
    snprintf(path, 32, "/proc/self/fd/%d", fd);
    return fd;
}

static void start(void)
{
    FILE *file = fdopen(make_file(key), "w");
    TL_CHECK(file != NULL);
    TL_CHECK(PEM_write(file, PEM_STRING_ECPRIVATEKEY, "", good_key, sizeof(good_key)) > 0 && fflush(file) == 0);
    fuzzed_fd = make_file(fuzzed);
}

static void try_file(const struct fuzz_pem *pem)
{
    struct tl_error error = {.code = TL_OK};
    struct tl_tls_context *context = NULL;
    struct tl_tls_settings settings = {.ca = pem->kind == KIND_CA ? fuzzed : NULL,
                                       .certificate = pem->kind == KIND_CERTIFICATE ? fuzzed : NULL,
                                       .key = pem->kind == KIND_CERTIFICATE ? key : NULL,
                                       .crl = pem->kind == KIND_CRL ? fuzzed : NULL};
    TL_CHECK(ftruncate(fuzzed_fd, 0) == 0);
    TL_CHECK(pwrite(fuzzed_fd, pem->text, pem->len_bytes, 0) == (ssize_t)pem->len_bytes);
    enum tl_status status = tl_tls_context_load(&settings, NULL, &context, &error);
    TL_CHECK((status == TL_OK) == (context != NULL));
    if (status != TL_OK) {
        TL_CHECK(error.code == status && error.message[0] != '\0');
        TL_CHECK(tl_text_is_utf8(error.message, strlen(error.message)));
    } else if (pem->kind == KIND_CERTIFICATE) {
        TL_CHECK(tl_tls_context_self(context)->text[0] != '\0');
    }
    tl_tls_context_release(context);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    struct fuzz_pem pem;
    if (key[0] == '\0') start();
    if (!fuzz_pem_take(data, len_bytes, names, KIND_COUNT, &pem)) return 0;
    try_file(&pem);
    BIO_free(pem.made);
    ERR_clear_error();
    return 0;
}
