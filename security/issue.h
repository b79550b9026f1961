// SPDX-License-Identifier: Apache-2.0
/*
 * A development authority, the certificates that it issues and the list of those that it revokes. It lies in a folder:
 * ca.pem, ca.key and ca.crl. A certificate and its key are NAME.pem and NAME.key there. All files have mode 0600, and
 * each is written as a whole or not at all.
 *
 * Keys are P-256. The trust domain is in the authority's own certificate, so that it is said once, when it is made.
 *
 * Thread: any. Blocks: for the disk.
 */
#ifndef SECURITY_ISSUE_H
#define SECURITY_ISSUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

struct tl_authority;

/* What a certificate shall say. */
struct tl_issue_request {
    const char *uri;          /* "spiffe://example.org/job/ps/task/0" */
    const char *const *hosts; /* [host_count]: DNS names and IP addresses under which standard clients verify it */
    size_t host_count;
    uint32_t days; /* from now, 1 to TL_ISSUE_MAX_DAYS */
};

#define TL_ISSUE_MAX_DAYS 3650

/* Makes an authority that is valid for ten years, with an empty list. The folder is made, with mode 0700, where it is
 * not there. Errors: as tl_error_set_errno: a file cannot be written. TL_ALREADY_EXISTS: there is one, and it is not to
 * be replaced. TL_INVALID_ARGUMENT: no trust domain. */
enum tl_status tl_authority_create(const char *folder, const char *trust_domain, bool replaces,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* Reads an authority. Ownership: *ret_authority until tl_authority_destroy. Errors: as tl_error_set_errno: a file
 * cannot be read; TL_NOT_FOUND: there is none. TL_PERMISSION_DENIED: other users may read the key.
 * TL_INVALID_ARGUMENT: the files are none of an authority. */
enum tl_status tl_authority_open(const char *folder, struct tl_authority **ret_authority,
                                 struct tl_error *ret_error) TL_MUST_USE;
void tl_authority_destroy(struct tl_authority *authority); /* NULL is accepted */

/* "example.org". It belongs to the authority. */
const char *tl_authority_trust_domain(const struct tl_authority *authority);

/* Checks that neither FOLDER/NAME.pem nor FOLDER/NAME.key is there. Errors: TL_ALREADY_EXISTS: one is. */
enum tl_status tl_authority_check_absent(const struct tl_authority *authority, const char *name,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* Writes FOLDER/NAME.key, then FOLDER/NAME.pem. Errors: as tl_error_set_errno: a file cannot be written.
 * TL_ALREADY_EXISTS: one is there, and is not to be replaced. TL_INVALID_ARGUMENT: the URI is no name of this trust
 * domain, or a host is none. TL_FAILED_PRECONDITION: the authority ends before. */
enum tl_status tl_authority_issue(struct tl_authority *authority, const char *name,
                                  const struct tl_issue_request *request, bool replaces,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* Adds the certificates of these files to FOLDER/ca.crl, which is made where it is not there. *ret_count is how many
 * were not in it yet. Nothing has changed after an error.
 * Errors: as tl_error_set_errno: a file cannot be read, or the list not be written. TL_INVALID_ARGUMENT: a certificate
 * is none, or another authority's; the list is none of this authority. */
enum tl_status tl_authority_revoke(struct tl_authority *authority, const char *const *paths, size_t count,
                                   size_t *ret_count, struct tl_error *ret_error) TL_MUST_USE;

#endif
