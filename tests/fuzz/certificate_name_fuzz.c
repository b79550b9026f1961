// SPDX-License-Identifier: Apache-2.0
/*
 * The names in a certificate. Input: "D" and a certificate in DER, or the names alone, a line for each: "U" and a URI,
 * or "N" and a DNS name.
 *
 * A name that is accepted is printable text without separators that it must not have, and means the same again when it
 * is the only name of another certificate; a refusal says why.
 */
#include <openssl/err.h>
#include <openssl/x509.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "security/certificate_name.h"

#define MAX_ENTRIES 80

static enum tl_status choose_one(bool is_uri, const char *text, struct tl_certificate_name *ret_name)
{
    const struct tl_certificate_entry entry = {.is_uri = is_uri, .text = text, .len_bytes = strlen(text)};
    return tl_certificate_name_choose(&entry, 1, ret_name, NULL);
}

static bool is_plain(const char *text)
{
    size_t len = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/:");
    return len > 0 && text[len] == '\0';
}

/* The URI of a member whose name is "/job:JOB/task:INDEX". */
static void expect_member(const struct tl_certificate_name *name)
{
    char uri[3 * TL_CERTIFICATE_NAME_BYTES], text[TL_CERTIFICATE_NAME_BYTES];
    struct tl_certificate_name again;
    memcpy(text, name->text, sizeof(text));
    TL_CHECK(strncmp(text, "/job:", 5) == 0);
    char *separator = strstr(text + 5, "/task:");
    TL_CHECK(separator && separator > text + 5);
    *separator = '\0';
    TL_CHECK(!strpbrk(text + 5, "/:"));
    snprintf(uri, sizeof(uri), "spiffe://%s/job/%s/task/%s", name->trust_domain[0] ? name->trust_domain : "a", text + 5,
             separator + strlen("/task:"));
    TL_CHECK(choose_one(true, uri, &again) == TL_OK && again.kind == TL_CERTIFICATE_MEMBER);
    TL_CHECK(strcmp(again.text, name->text) == 0);
}

static void expect_promises(const struct tl_certificate_name *name)
{
    struct tl_certificate_name again;
    TL_CHECK(memchr(name->text, '\0', sizeof(name->text)) && is_plain(name->text));
    TL_CHECK(memchr(name->trust_domain, '\0', sizeof(name->trust_domain)));
    TL_CHECK(name->trust_domain[0] == '\0' || (is_plain(name->trust_domain) && !strpbrk(name->trust_domain, ":/")));
    if (name->kind == TL_CERTIFICATE_MEMBER) {
        expect_member(name);
        return;
    }
    bool is_uri = strncmp(name->text, "spiffe://", strlen("spiffe://")) == 0;
    TL_CHECK(is_uri == (name->trust_domain[0] != '\0'));
    TL_CHECK(is_uri || !strpbrk(name->text, ":/"));
    TL_CHECK(choose_one(is_uri, name->text, &again) == TL_OK && again.kind == TL_CERTIFICATE_CLIENT);
    TL_CHECK(strcmp(again.text, name->text) == 0 && strcmp(again.trust_domain, name->trust_domain) == 0);
}

static void judge(enum tl_status status, const struct tl_certificate_name *name, const struct tl_error *error)
{
    if (status == TL_OK) {
        expect_promises(name);
        return;
    }
    TL_CHECK(status == TL_INVALID_ARGUMENT && error->code == status && strstr(error->message, "; issue one with"));
    TL_CHECK(tl_text_is_utf8(error->message, strlen(error->message)));
}

static size_t split(const char *text, size_t len_bytes, struct tl_certificate_entry entries[MAX_ENTRIES])
{
    size_t count = 0;
    while (len_bytes > 0 && count < MAX_ENTRIES) {
        const char *end = memchr(text, '\n', len_bytes);
        size_t line_len = end ? (size_t)(end - text) : len_bytes;
        if (line_len > 0)
            entries[count++] =
                (struct tl_certificate_entry){.is_uri = text[0] == 'U', .text = text + 1, .len_bytes = line_len - 1};
        size_t taken = line_len + (end ? 1 : 0);
        text += taken;
        len_bytes -= taken;
    }
    return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    struct tl_certificate_name name;
    struct tl_error error = {.code = TL_OK};
    if (len_bytes > 0 && data[0] == 'D') {
        const unsigned char *der = data + 1;
        X509 *certificate = d2i_X509(NULL, &der, (long)len_bytes - 1);
        if (certificate) judge(tl_certificate_name_of(certificate, &name, &error), &name, &error);
        X509_free(certificate);
        ERR_clear_error();
        return 0;
    }
    struct tl_certificate_entry entries[MAX_ENTRIES];
    size_t count = split((const char *)data, len_bytes, entries);
    judge(tl_certificate_name_choose(entries, count, &name, &error), &name, &error);
    return 0;
}
