// SPDX-License-Identifier: Apache-2.0
/* What an authority makes, what it refuses to make, and what it leaves behind: each case reads the files as others
 * would. */
#include <check.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "security/certificate_facts.h"
#include "security/issue.h"

static struct tl_authority *authority;
static struct tl_error error;

static void open_authority(void)
{
    ck_assert_int_eq(tl_authority_open(temp_folder, &authority, &error), TL_OK);
}

static void set_up(void)
{
    temp_folder_make();
    ck_assert_int_eq(tl_authority_create(temp_folder, "example.org", false, &error), TL_OK);
    open_authority();
}

static void tear_down(void)
{
    tl_authority_destroy(authority);
    temp_folder_remove();
}

static enum tl_status issue(const char *file, const char *uri, const char *const *hosts, size_t count, uint32_t days)
{
    const struct tl_issue_request request = {.uri = uri, .hosts = hosts, .host_count = count, .days = days};
    return tl_authority_issue(authority, file, &request, false, &error);
}

static void issue_task(const char *file)
{
    ck_assert_msg(issue(file, "spiffe://example.org/job/ps/task/0", NULL, 0, 90) == TL_OK, "%s", error.message);
}

static X509 *read_certificate(const char *name)
{
    FILE *file = fopen(temp_path(name), "r");
    ck_assert_ptr_nonnull(file);
    X509 *certificate = PEM_read_X509(file, NULL, NULL, NULL);
    fclose(file);
    ck_assert_ptr_nonnull(certificate);
    return certificate;
}

/* What OpenSSL says of a certificate under the authority and its list: X509_V_OK or an error. */
static int verify(const char *name)
{
    X509 *root = read_certificate("ca.pem"), *certificate = read_certificate(name);
    X509_STORE *store = X509_STORE_new();
    X509_STORE_CTX *context = X509_STORE_CTX_new();
    FILE *file = fopen(temp_path("ca.crl"), "r");
    X509_CRL *list = PEM_read_X509_CRL(file, NULL, NULL, NULL);
    fclose(file);
    ck_assert_int_eq(X509_STORE_add_cert(store, root), 1);
    ck_assert_int_eq(X509_STORE_add_crl(store, list), 1);
    X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK | X509_V_FLAG_X509_STRICT);
    ck_assert_int_eq(X509_STORE_CTX_init(context, store, certificate, NULL), 1);
    int result = X509_verify_cert(context) == 1 ? X509_V_OK : X509_STORE_CTX_get_error(context);
    X509_STORE_CTX_free(context);
    X509_STORE_free(store);
    X509_CRL_free(list);
    X509_free(certificate);
    X509_free(root);
    return result;
}

static void assert_private(const char *const *names, size_t count)
{
    struct stat info;
    for (size_t i = 0; i < count; i++) {
        ck_assert_int_eq(stat(temp_path(names[i]), &info), 0);
        ck_assert_msg((info.st_mode & 07777) == 0600, "%s has mode %o", names[i], info.st_mode & 07777);
    }
}

START_TEST(files_have_mode_0600_whatever_the_umask_is)
{
    static const char *const names[] = {"ca.pem", "ca.key", "ca.crl", "ps-0.pem", "ps-0.key"};
    umask(0);
    ck_assert_int_eq(tl_authority_create(temp_folder, "example.org", true, &error), TL_OK);
    assert_private(names, 3);
    open_authority();
    umask(0277);
    issue_task("ps-0");
    assert_private(names, TL_ARRAY_COUNT(names));
    ck_assert_uint_eq(temp_entry_count(temp_folder), TL_ARRAY_COUNT(names));
}
END_TEST

START_TEST(certificates_pass_strict_verification)
{
    issue_task("ps-0");
    ck_assert_int_eq(verify("ps-0.pem"), X509_V_OK);
    X509 *first = read_certificate("ps-0.pem"), *root = read_certificate("ca.pem");
    ck_assert_int_eq(X509_check_purpose(first, X509_PURPOSE_SSL_SERVER, 0), 1);
    ck_assert_int_eq(X509_check_purpose(first, X509_PURPOSE_SSL_CLIENT, 0), 1);
    ck_assert_int_eq(X509_check_ca(first), 0);
    ck_assert_int_eq(X509_check_ca(root), 1);
    ck_assert_int_eq(X509_get_pathlen(root), 0);
    ck_assert_uint_eq(X509_get_key_usage(root), KU_KEY_CERT_SIGN | KU_CRL_SIGN);
    ck_assert_uint_eq(X509_get_key_usage(first), KU_DIGITAL_SIGNATURE);
    issue_task("again");
    X509 *second = read_certificate("again.pem");
    ck_assert_int_ne(ASN1_INTEGER_cmp(X509_get0_serialNumber(first), X509_get0_serialNumber(second)), 0);
    X509_free(second);
    X509_free(first);
    X509_free(root);
}
END_TEST

START_TEST(validity_begins_before_now)
{
    int days, seconds;
    ck_assert_int_eq(issue("ps-0", "spiffe://example.org/job/ps/task/0", NULL, 0, 7), TL_OK);
    X509 *certificate = read_certificate("ps-0.pem");
    ck_assert_int_eq(ASN1_TIME_diff(&days, &seconds, X509_get0_notBefore(certificate), X509_get0_notAfter(certificate)),
                     1);
    ck_assert_int_eq(days, 7);
    ck_assert_int_eq(seconds, 300);
    ck_assert_int_lt(X509_cmp_current_time(X509_get0_notBefore(certificate)), 0);
    X509_free(certificate);
    ck_assert_int_eq(issue("x", "spiffe://example.org/client/x", NULL, 0, 0), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(issue("x", "spiffe://example.org/client/x", NULL, 0, TL_ISSUE_MAX_DAYS + 1), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(certificates_name_the_hosts)
{
    static const char *const hosts[] = {"ps-0.example.org", "10.0.0.7", "fd00::7"};
    static const char *const wrong[] = {"", "a..b", "a b", "host:4000", "[::1]", "*.example.org", "x,DNS:evil"};
    ck_assert_int_eq(issue("ps-0", "spiffe://example.org/job/ps/task/0", hosts, TL_ARRAY_COUNT(hosts), 90), TL_OK);
    X509 *certificate = read_certificate("ps-0.pem");
    ck_assert_int_eq(X509_check_host(certificate, hosts[0], 0, 0, NULL), 1);
    ck_assert_int_eq(X509_check_ip_asc(certificate, hosts[1], 0), 1);
    ck_assert_int_eq(X509_check_ip_asc(certificate, hosts[2], 0), 1);
    ck_assert_int_ne(X509_check_host(certificate, "other.example.org", 0, 0, NULL), 1);
    X509_free(certificate);
    for (size_t i = 0; i < TL_ARRAY_COUNT(wrong); i++) {
        ck_assert_int_eq(issue("x", "spiffe://example.org/client/x", &wrong[i], 1, 90), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "is no host; write"));
    }
}
END_TEST

START_TEST(names_are_of_the_trust_domain)
{
    static const char *const wrong[] = {"spiffe://example.com/job/ps/task/0", "spiffe://org/client/ann",
                                        "spiffe://example.org.evil/client/ann"};
    static const char *const domains[] = {"", "Example.org", "a/b", "a..b", "a b", "spiffe://a"};
    struct tl_certificate_facts facts;
    ck_assert_str_eq(tl_authority_trust_domain(authority), "example.org");
    for (size_t i = 0; i < TL_ARRAY_COUNT(wrong); i++) {
        ck_assert_int_eq(issue("x", wrong[i], NULL, 0, 90), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "begin the name with spiffe://example.org/"));
    }
    ck_assert_int_eq(issue("x", "spiffe://example.org/job/ps/task/x", NULL, 0, 90), TL_INVALID_ARGUMENT);
    for (size_t i = 0; i < TL_ARRAY_COUNT(domains); i++)
        ck_assert_int_eq(tl_authority_create(temp_path("new"), domains[i], false, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_ne(access(temp_path("new"), F_OK), 0);
    issue_task("ps-0");
    ck_assert_int_eq(tl_certificate_facts_read(temp_path("ps-0.pem"), &facts, &error), TL_OK);
    ck_assert_str_eq(facts.name.text, "/job:ps/task:0");
    ck_assert_str_eq(facts.name.trust_domain, "example.org");
    ck_assert_uint_eq(strlen(facts.fingerprint), 95);
}
END_TEST

START_TEST(files_are_replaced_only_on_request)
{
    const struct tl_issue_request request = {.uri = "spiffe://example.org/client/ann", .days = 90};
    struct tl_certificate_facts before, after;
    ck_assert_int_eq(tl_authority_create(temp_folder, "example.org", false, &error), TL_ALREADY_EXISTS);
    issue_task("ps-0");
    ck_assert_int_eq(tl_certificate_facts_read(temp_path("ps-0.pem"), &before, &error), TL_OK);
    ck_assert_int_eq(issue("ps-0", "spiffe://example.org/client/ann", NULL, 0, 90), TL_ALREADY_EXISTS);
    ck_assert_int_eq(tl_certificate_facts_read(temp_path("ps-0.pem"), &after, &error), TL_OK);
    ck_assert_str_eq(before.fingerprint, after.fingerprint);
    ck_assert_int_eq(tl_authority_issue(authority, "ps-0", &request, true, &error), TL_OK);
    ck_assert_int_eq(tl_certificate_facts_read(temp_path("ps-0.pem"), &after, &error), TL_OK);
    ck_assert_str_eq(after.name.text, request.uri);
    ck_assert_int_eq(tl_certificate_check_key(temp_path("ps-0.pem"), temp_path("ps-0.key"), &error), TL_OK);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 5);
}
END_TEST

START_TEST(revoked_certificates_are_in_the_list)
{
    size_t count = 0;
    char first[256], second[256], root[256];
    snprintf(first, sizeof(first), "%s", temp_path("ps-0.pem"));
    snprintf(second, sizeof(second), "%s", temp_path("b.pem"));
    snprintf(root, sizeof(root), "%s", temp_path("ca.pem"));
    issue_task("ps-0");
    issue_task("b");
    issue_task("c");
    ck_assert_int_eq(tl_authority_revoke(authority, (const char *[]){first}, 1, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 1);
    ck_assert_int_eq(tl_authority_revoke(authority, (const char *[]){first, second}, 2, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 1);
    ck_assert_int_eq(verify("ps-0.pem"), X509_V_ERR_CERT_REVOKED);
    ck_assert_int_eq(verify("b.pem"), X509_V_ERR_CERT_REVOKED);
    ck_assert_int_eq(verify("c.pem"), X509_V_OK);
    ck_assert_int_eq(tl_authority_revoke(authority, (const char *[]){root}, 1, &count, &error), TL_INVALID_ARGUMENT);
    /* A list that is not there is begun anew; one of another authority is not touched. */
    ck_assert_int_eq(unlink(temp_path("ca.crl")), 0);
    ck_assert_int_eq(tl_authority_revoke(authority, (const char *[]){second}, 1, &count, &error), TL_OK);
    ck_assert_int_eq(verify("ps-0.pem"), X509_V_OK);
    ck_assert_int_eq(verify("b.pem"), X509_V_ERR_CERT_REVOKED);
    ck_assert_int_eq(tl_authority_create(temp_path("other"), "example.org", false, &error), TL_OK);
    ck_assert_int_eq(rename(temp_path("other/ca.crl"), temp_path("ca.crl")), 0);
    ck_assert_int_eq(tl_authority_revoke(authority, (const char *[]){second}, 1, &count, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "was not signed by the authority beside it"));
}
END_TEST

START_TEST(authorities_that_cannot_be_used)
{
    struct tl_authority *opened = NULL;
    ck_assert_int_eq(tl_authority_open(temp_path("nowhere"), &opened, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "tensorlane cert init -o"));
    ck_assert_int_eq(chmod(temp_path("ca.key"), 0604), 0);
    ck_assert_int_eq(tl_authority_open(temp_folder, &opened, &error), TL_PERMISSION_DENIED);
    ck_assert_ptr_nonnull(strstr(error.message, "chmod 600"));
    ck_assert_int_eq(chmod(temp_path("ca.key"), 0600), 0);
    issue_task("ps-0");
    ck_assert_int_eq(rename(temp_path("ps-0.key"), temp_path("ca.key")), 0);
    ck_assert_int_eq(tl_authority_open(temp_folder, &opened, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "does not belong to"));
    ck_assert_int_eq(rename(temp_path("ps-0.pem"), temp_path("ca.pem")), 0);
    ck_assert_int_eq(tl_authority_open(temp_folder, &opened, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "is no authority with a trust domain"));
    temp_write(temp_path("ca.pem"), "x", 1);
    ck_assert_int_eq(tl_authority_open(temp_folder, &opened, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "has no certificate in PEM"));
    ck_assert_ptr_null(opened);
}
END_TEST

START_TEST(nothing_is_left_where_a_file_cannot_be_written)
{
    issue_task("ps-0");
    ck_assert_int_eq(mkdir(temp_path("b.pem"), 0700), 0);
    ck_assert_int_eq(issue("b", "spiffe://example.org/client/b", NULL, 0, 90), TL_ALREADY_EXISTS);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 6);
    ck_assert_int_eq(issue("no/folder", "spiffe://example.org/client/b", NULL, 0, 90), TL_NOT_FOUND);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 6);
}
END_TEST

int main(void)
{
    const struct {
        const char *name;
        const TTest *test;
    } tests[] = {
        {"modes", files_have_mode_0600_whatever_the_umask_is},
        {"verify", certificates_pass_strict_verification},
        {"validity", validity_begins_before_now},
        {"hosts", certificates_name_the_hosts},
        {"trust_domain", names_are_of_the_trust_domain},
        {"replace", files_are_replaced_only_on_request},
        {"revoke", revoked_certificates_are_in_the_list},
        {"open", authorities_that_cannot_be_used},
        {"errors", nothing_is_left_where_a_file_cannot_be_written},
    };
    Suite *suite = suite_create("issue");
    for (size_t i = 0; i < TL_ARRAY_COUNT(tests); i++) {
        TCase *tcase = tcase_create(tests[i].name);
        tcase_add_checked_fixture(tcase, i == 0 ? temp_folder_make : set_up, tear_down);
        tcase_add_test(tcase, tests[i].test);
        suite_add_tcase(suite, tcase);
    }
    return run_suite(suite);
}
