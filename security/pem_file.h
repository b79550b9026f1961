// SPDX-License-Identifier: Apache-2.0
/* Files in PEM with certificates, keys and lists of revoked certificates. Between siblings of this folder. */
#ifndef SECURITY_PEM_FILE_H
#define SECURITY_PEM_FILE_H

#include <openssl/x509.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include <tensorlane/status.h>

/* The newest error of OpenSSL, in its words; the queue is empty afterwards. */
const char *tl_pem_reason(void);

/* What a file has, with the state of the file when it was read. A key lies in OpenSSL's secure heap where there is one.
 */
struct tl_pem_text {
    char *bytes;
    size_t len_bytes;
    struct stat info;
};

/* Reads a file. Ownership: tl_pem_text_fini, which clears it.
 * Errors: as tl_error_set_errno. TL_INVALID_ARGUMENT: it is no file, or has more than 1 MiB. TL_PERMISSION_DENIED: it
 * is a key that other users may use; one of root's may be readable for its group. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_pem_read_text(const char *path, bool is_key, struct tl_pem_text *ret_text,
                                struct tl_error *ret_error) TL_MUST_USE;
void tl_pem_text_fini(struct tl_pem_text *text);

/* Read the first one of a file. Ownership: X509_free, EVP_PKEY_free, X509_CRL_free.
 * Errors: those of tl_pem_read_text. TL_INVALID_ARGUMENT: there is none in the file. */
enum tl_status tl_pem_read_certificate(const char *path, X509 **ret_certificate,
                                       struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_pem_read_key(const char *path, EVP_PKEY **ret_key, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_pem_read_list(const char *path, X509_CRL **ret_list, struct tl_error *ret_error) TL_MUST_USE;

/* Write a file with mode 0600, which is there as a whole or not at all. With `replaces` it takes the place of another.
 * Errors: as tl_error_set_errno. TL_ALREADY_EXISTS: there is such a file, and it is not to be replaced. */
enum tl_status tl_pem_write_certificate(const char *path, X509 *certificate, bool replaces,
                                        struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_pem_write_key(const char *path, EVP_PKEY *key, bool replaces, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_pem_write_list(const char *path, X509_CRL *list, bool replaces,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Checks that none of the files is there. Errors: TL_ALREADY_EXISTS: one is. */
enum tl_status tl_pem_check_absent(const char *const *paths, size_t count, struct tl_error *ret_error) TL_MUST_USE;

#endif
