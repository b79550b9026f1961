// SPDX-License-Identifier: Apache-2.0
/*
 * Reads and writes files in PEM.
 *
 * Happy path of writing: the text is made in memory that OpenSSL clears, written to a new hidden file of mode 0600
 * beside the path, made durable, and given its name: by a hard link, which never replaces a file, or by a rename, which
 * does. Failure modes: the hidden file is removed after every error, so that nothing half-written is left behind.
 */
#include "security/pem_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/random.h"

#define PRIVATE_MODE 0600
/* Larger files are refused. */
#define MAX_FILE_BYTES (1024 * 1024)

const char *tl_pem_reason(void)
{
    const char *reason = ERR_reason_error_string(ERR_peek_last_error());
    ERR_clear_error();
    return reason ? reason : "unknown error";
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

/* A key that other users can read may be theirs already. Root's may be readable for a group, as those are that a
 * container gets from Kubernetes. */
static enum tl_status check_key_mode(const char *path, const struct stat *info, struct tl_error *ret_error)
{
    mode_t refused = info->st_uid == 0 ? S_IWGRP | S_IRWXO : S_IRWXG | S_IRWXO;
    if ((info->st_mode & refused) == 0) return TL_OK;
    return tl_error_set(ret_error, TL_PERMISSION_DENIED,
                        "the key %s is open to other users (mode %04o): chmod 600 %s, and replace the key if someone "
                        "may have read it",
                        path, (unsigned)info->st_mode & 07777, path);
}

/* Reads what has the size that fstat said, or less where the file was cut meanwhile. */
static enum tl_status read_bytes(int fd, const char *path, struct tl_pem_text *text, struct tl_error *ret_error)
{
    size_t size = (size_t)text->info.st_size;
    while (text->len_bytes < size) {
        ssize_t got = read(fd, text->bytes + text->len_bytes, size - text->len_bytes);
        if (got < 0 && errno != EINTR) return tl_error_set_errno(ret_error, errno, "cannot read %s", path);
        if (got == 0) break;
        if (got > 0) text->len_bytes += (size_t)got;
    }
    return TL_OK;
}

static enum tl_status read_open_file(int fd, const char *path, bool is_key, struct tl_pem_text *text,
                                     struct tl_error *ret_error)
{
    if (fstat(fd, &text->info) != 0) return tl_error_set_errno(ret_error, errno, "cannot look at %s", path);
    if (!S_ISREG(text->info.st_mode) || text->info.st_size > MAX_FILE_BYTES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is no file in PEM of at most 1 MiB", path);
    enum tl_status status = is_key ? check_key_mode(path, &text->info, ret_error) : TL_OK;
    if (status != TL_OK) return status;
    size_t size = (size_t)text->info.st_size + 1;
    text->bytes = is_key ? OPENSSL_secure_malloc(size) : OPENSSL_malloc(size);
    if (text->bytes == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory%s to read %s", is_key ? " for keys" : "",
                            path);
    return read_bytes(fd, path, text, ret_error);
}

enum tl_status tl_pem_read_text(const char *path, bool is_key, struct tl_pem_text *ret_text, struct tl_error *ret_error)
{
    struct tl_pem_text text = {.bytes = NULL};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would keep the caller waiting */
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "cannot open %s", path);
    enum tl_status status = read_open_file(fd, path, is_key, &text, ret_error);
    (void)close(fd);
    if (status != TL_OK) {
        tl_pem_text_fini(&text);
        return status;
    }
    *ret_text = text;
    return TL_OK;
}

void tl_pem_text_fini(struct tl_pem_text *text)
{
    if (text->bytes != NULL) OPENSSL_secure_clear_free(text->bytes, (size_t)text->info.st_size + 1);
    text->bytes = NULL;
}

/* Opens the text of a file for OpenSSL. Ownership: BIO_free, tl_pem_text_fini. */
static enum tl_status open_text(const char *path, bool is_key, struct tl_pem_text *ret_text, BIO **ret_bio,
                                struct tl_error *ret_error)
{
    struct tl_pem_text text;
    enum tl_status status = tl_pem_read_text(path, is_key, &text, ret_error);
    if (status != TL_OK) return status;
    BIO *bio = BIO_new_mem_buf(text.bytes, (int)text.len_bytes);
    if (bio == NULL) {
        tl_pem_text_fini(&text);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to read %s: %s", path, tl_pem_reason());
    }
    *ret_text = text;
    *ret_bio = bio;
    return TL_OK;
}

enum tl_status tl_pem_read_certificate(const char *path, X509 **ret_certificate, struct tl_error *ret_error)
{
    struct tl_pem_text text;
    BIO *bio;
    enum tl_status status = open_text(path, false, &text, &bio, ret_error);
    if (status != TL_OK) return status;
    X509 *certificate = PEM_read_bio_X509(bio, NULL, NULL, NULL);
    BIO_free(bio);
    tl_pem_text_fini(&text);
    if (!certificate) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s has no certificate in PEM (-----BEGIN CERTIFICATE-----): %s", path, tl_pem_reason());
    }
    *ret_certificate = certificate;
    return TL_OK;
}

enum tl_status tl_pem_read_key(const char *path, EVP_PKEY **ret_key, struct tl_error *ret_error)
{
    struct tl_pem_text text;
    BIO *bio;
    enum tl_status status = open_text(path, true, &text, &bio, ret_error);
    if (status != TL_OK) return status;
    char no_password[] = ""; /* instead of asking for one */
    EVP_PKEY *key = PEM_read_bio_PrivateKey(bio, NULL, NULL, no_password);
    BIO_free(bio);
    tl_pem_text_fini(&text);
    if (!key) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has no private key in PEM without a password: %s", path,
                            tl_pem_reason());
    }
    *ret_key = key;
    return TL_OK;
}

enum tl_status tl_pem_read_list(const char *path, X509_CRL **ret_list, struct tl_error *ret_error)
{
    struct tl_pem_text text;
    BIO *bio;
    enum tl_status status = open_text(path, false, &text, &bio, ret_error);
    if (status != TL_OK) return status;
    X509_CRL *list = PEM_read_bio_X509_CRL(bio, NULL, NULL, NULL);
    BIO_free(bio);
    tl_pem_text_fini(&text);
    if (!list) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has no list of revoked certificates in PEM: %s", path,
                            tl_pem_reason());
    }
    *ret_list = list;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- writing -- */

static enum tl_status already_there(const char *path, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_ALREADY_EXISTS, "%s is there already; --force replaces it", path);
}

/* Makes the names in the folder of a file durable, where the file system can do that. */
static void sync_folder(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".");
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

/* Writes a new file and makes it durable. False: errno says why. */
static bool write_new(const char *path, const char *text, size_t len_bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, PRIVATE_MODE);
    if (fd < 0) return false;
    bool is_written = fchmod(fd, PRIVATE_MODE) == 0;
    while (is_written && len_bytes > 0) {
        ssize_t written = write(fd, text, len_bytes);
        if (written < 0 && errno == EINTR) continue;
        is_written = written >= 0;
        if (is_written) text += written, len_bytes -= (size_t)written;
    }
    is_written = is_written && fsync(fd) == 0;
    int error_number = errno;
    close(fd);
    if (!is_written) unlink(path);
    errno = error_number;
    return is_written;
}

/* Gives the text of `bio` the name. */
static enum tl_status write_file(const char *path, BIO *bio, bool replaces, struct tl_error *ret_error)
{
    char hidden[PATH_MAX];
    char *text;
    long len_bytes = BIO_get_mem_data(bio, &text);
    const char *slash = strrchr(path, '/');
    int folder_len = slash ? (int)(slash - path + 1) : 0;
    int len =
        snprintf(hidden, sizeof(hidden), "%.*s.%s.%016" PRIx64, folder_len, path, path + folder_len, tl_random_u64());
    if (len < 0 || (size_t)len >= sizeof(hidden))
        return tl_error_set_errno(ret_error, ENAMETOOLONG, "cannot write %s", path);
    if (!write_new(hidden, text, (size_t)len_bytes))
        return tl_error_set_errno(ret_error, errno, "cannot write %s", path);
    bool is_named = (replaces ? rename(hidden, path) : link(hidden, path)) == 0;
    int error_number = errno;
    if (!is_named || !replaces) unlink(hidden);
    if (is_named) {
        sync_folder(path);
        return TL_OK;
    }
    if (!replaces && error_number == EEXIST) return already_there(path, ret_error);
    return tl_error_set_errno(ret_error, error_number, "cannot write %s", path);
}

/* Writes what was made by OpenSSL, if it was, and frees it. */
static enum tl_status finish_writing(const char *path, BIO *bio, bool is_made, bool replaces,
                                     struct tl_error *ret_error)
{
    enum tl_status status =
        is_made ? write_file(path, bio, replaces, ret_error)
                : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot make %s: %s", path, tl_pem_reason());
    BIO_free(bio);
    return status;
}

enum tl_status tl_pem_write_certificate(const char *path, X509 *certificate, bool replaces, struct tl_error *ret_error)
{
    BIO *bio = BIO_new(BIO_s_mem());
    bool is_made = bio && PEM_write_bio_X509(bio, certificate) == 1;
    return finish_writing(path, bio, is_made, replaces, ret_error);
}

enum tl_status tl_pem_write_key(const char *path, EVP_PKEY *key, bool replaces, struct tl_error *ret_error)
{
    BIO *bio = BIO_new(BIO_s_secmem());
    bool is_made = bio && PEM_write_bio_PrivateKey(bio, key, NULL, NULL, 0, NULL, NULL) == 1;
    return finish_writing(path, bio, is_made, replaces, ret_error);
}

enum tl_status tl_pem_write_list(const char *path, X509_CRL *list, bool replaces, struct tl_error *ret_error)
{
    BIO *bio = BIO_new(BIO_s_mem());
    bool is_made = bio && PEM_write_bio_X509_CRL(bio, list) == 1;
    return finish_writing(path, bio, is_made, replaces, ret_error);
}

enum tl_status tl_pem_check_absent(const char *const *paths, size_t count, struct tl_error *ret_error)
{
    struct stat info;
    for (size_t i = 0; i < count; i++)
        if (lstat(paths[i], &info) == 0) return already_there(paths[i], ret_error);
    return TL_OK;
}
