// SPDX-License-Identifier: Apache-2.0
/* Names of certificates: which are members', which are clients', and which are none. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "security/certificate_name.h"

static struct tl_certificate_name name;
static struct tl_error error;

static enum tl_status choose(const char *first, const char *second)
{
    const char *const texts[] = {first, second};
    struct tl_certificate_entry entries[2];
    size_t count = 0;
    for (size_t i = 0; i < 2; i++) {
        if (texts[i] == NULL) continue;
        bool is_uri = strstr(texts[i], "://") != NULL;
        entries[count++] =
            (struct tl_certificate_entry){.is_uri = is_uri, .text = texts[i], .len_bytes = strlen(texts[i])};
    }
    return tl_certificate_name_choose(entries, count, &name, &error);
}

static void assert_name(const char *text, enum tl_certificate_kind kind, const char *expected, const char *domain)
{
    enum tl_status status = choose(text, NULL);
    ck_assert_msg(status == TL_OK, "%s: %s", text, error.message);
    ck_assert_str_eq(name.text, expected);
    ck_assert_int_eq(name.kind, kind);
    ck_assert_str_eq(name.trust_domain, domain);
}

START_TEST(members)
{
    assert_name("spiffe://example.org/job/ps/task/0", TL_CERTIFICATE_MEMBER, "/job:ps/task:0", "example.org");
    assert_name("spiffe://a/job/My_job.1-x/task/4294967295", TL_CERTIFICATE_MEMBER, "/job:My_job.1-x/task:4294967295",
                "a");
    assert_name("ps-0.ps.default.svc.cluster.local", TL_CERTIFICATE_MEMBER, "/job:ps/task:0", "");
    assert_name("my-job-12", TL_CERTIFICATE_MEMBER, "/job:my-job/task:12", "");
}
END_TEST

/* The longest trust domain that a task's URI of 255 bytes has space for. */
START_TEST(tasks_of_other_trust_domains)
{
    char domain[TL_CERTIFICATE_NAME_BYTES] = "", uri[TL_CERTIFICATE_NAME_BYTES];
    for (unsigned i = 0; i < 116; i++)
        strcat(domain, "a.");
    strcat(domain, "b");
    ck_assert_int_eq(snprintf(uri, sizeof(uri), "spiffe://%s/job/p/task/0", domain), sizeof(uri) - 1);
    assert_name(uri, TL_CERTIFICATE_MEMBER, "/job:p/task:0", domain);
    tl_certificate_name_make_foreign(&name);
    ck_assert(name.is_foreign);
    ck_assert_str_eq(name.text, uri);
}
END_TEST

START_TEST(clients)
{
    assert_name("spiffe://example.org/client/ann", TL_CERTIFICATE_CLIENT, "spiffe://example.org/client/ann",
                "example.org");
    assert_name("spiffe://example.org/ns/prod/sa/web", TL_CERTIFICATE_CLIENT, "spiffe://example.org/ns/prod/sa/web",
                "example.org");
    assert_name("ann.example.org", TL_CERTIFICATE_CLIENT, "ann.example.org", "");
    assert_name("ps-01.example.org", TL_CERTIFICATE_CLIENT, "ps-01.example.org", "");
    assert_name("-1.example.org", TL_CERTIFICATE_CLIENT, "-1.example.org", "");
}
END_TEST

START_TEST(uris_that_are_no_names)
{
    static const char *const wrong[] = {
        "https://example.org/job/ps/task/0",
        "spiffe:///job/ps/task/0",
        "spiffe://example..org/job/ps/task/0",
        "spiffe://.org/job/ps/task/0",
        "spiffe://example.org./job/ps/task/0",
        "SPIFFE://example.org/job/ps/task/0",
        "spiffe://ex%61mple.org/job/ps/task/0",
        "spiffe://Example.org/job/ps/task/0",
        "Spiffe://example.org/job/ps/task/0",
        "spiffe://example.org",
        "spiffe://example.org/",
        "spiffe://example.org/job/ps/task/",
        "spiffe://example.org/job/ps/task/00",
        "spiffe://example.org/job/ps/task/-1",
        "spiffe://example.org/job/ps/task/4294967296",
        "spiffe://example.org/job/ps/task/0/",
        "spiffe://example.org/job//task/0",
        "spiffe://example.org/job/ps/tasks/0",
        "spiffe://example.org/job/p%73/task/0",
        "spiffe://example.org/client/../ann",
        "spiffe://example.org/client/./ann",
        "spiffe://example.org/client/an n",
        "spiffe://example.org:1/client/ann",
        "spiffe://user@example.org/client/ann",
        "spiffe://example.org/client/ann?x=1",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(wrong); i++) {
        ck_assert_msg(choose(wrong[i], NULL) == TL_INVALID_ARGUMENT, "%s", wrong[i]);
        ck_assert_msg(strstr(error.message, "/job/JOB/task/INDEX") != NULL, "%s", error.message);
    }
}
END_TEST

START_TEST(several_names)
{
    ck_assert_int_eq(choose("spiffe://a/job/ps/task/0", "spiffe://a/job/ps/task/0"), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose("spiffe://a/client/ann", "ps-0.example.org"), TL_OK);
    ck_assert_str_eq(name.text, "spiffe://a/client/ann");
    ck_assert_int_eq(choose("localhost", "ps-3.example.org"), TL_OK);
    ck_assert_str_eq(name.text, "/job:ps/task:3");
    ck_assert_int_eq(choose("ps-3.example.org", "ps-3"), TL_OK);
    ck_assert_int_eq(choose("ps-3.example.org", "ps-4.example.org"), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose("*.example.org", NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose(NULL, NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose("", NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose("ps-0..example.org", NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose("ps-0.example.org.", NULL), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(choose("ps-0.example.org", "https://example.org/"), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(hostile_names)
{
    static const char with_nul[] = "ps-0.example.org\0.evil.org";
    struct tl_certificate_entry entry = {.text = with_nul, .len_bytes = sizeof(with_nul) - 1};
    ck_assert_int_eq(tl_certificate_name_choose(&entry, 1, &name, &error), TL_INVALID_ARGUMENT);
    entry = (struct tl_certificate_entry){.is_uri = true, .text = "spiffe://a\n\x1B[2J", .len_bytes = 15};
    ck_assert_int_eq(tl_certificate_name_choose(&entry, 1, &name, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "\"spiffe://a??[2J\""));
    static char large[1000];
    memset(large, 'a', sizeof(large));
    entry = (struct tl_certificate_entry){.text = large, .len_bytes = TL_CERTIFICATE_NAME_BYTES};
    ck_assert_int_eq(tl_certificate_name_choose(&entry, 1, &name, &error), TL_INVALID_ARGUMENT);
    /* Labels of 63, and so many of them that the name has 255. */
    for (size_t i = 63; i < sizeof(large); i += 64)
        large[i] = '.';
    entry.len_bytes--;
    ck_assert_int_eq(tl_certificate_name_choose(&entry, 1, &name, &error), TL_OK);
    ck_assert_uint_eq(strlen(name.text), TL_CERTIFICATE_NAME_BYTES - 1);
    large[63] = 'a';
    ck_assert_int_eq(tl_certificate_name_choose(&entry, 1, &name, &error), TL_INVALID_ARGUMENT);
    struct tl_certificate_entry many[100];
    for (size_t i = 0; i < 100; i++)
        many[i] = (struct tl_certificate_entry){.text = "a", .len_bytes = 1};
    ck_assert_int_eq(tl_certificate_name_choose(many, 100, &name, &error), TL_INVALID_ARGUMENT);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("certificate_name");
    TCase *names = tcase_create("names");
    tcase_add_test(names, members);
    tcase_add_test(names, tasks_of_other_trust_domains);
    tcase_add_test(names, clients);
    suite_add_tcase(suite, names);
    TCase *uris = tcase_create("uris");
    tcase_add_test(uris, uris_that_are_no_names);
    suite_add_tcase(suite, uris);
    TCase *several = tcase_create("several");
    tcase_add_test(several, several_names);
    suite_add_tcase(suite, several);
    TCase *hostile = tcase_create("hostile");
    tcase_add_test(hostile, hostile_names);
    suite_add_tcase(suite, hostile);
    return run_suite(suite);
}
