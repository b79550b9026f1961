// SPDX-License-Identifier: Apache-2.0
/*
 * Finds the name in a certificate.
 *
 * Happy path: the names of the subjectAltName are bounded, a URI is split into trust domain and segments, and four
 * segments job/JOB/task/INDEX are a member; without a URI the first label of a DNS name is split at its last '-'.
 * Failure modes: a name that no rule accepts, a name with a NUL, one that is too long and two that contradict each
 * other are refused with the whole certificate. Names come from strangers: they are escaped in messages.
 */
#include "security/certificate_name.h"

#include <openssl/x509v3.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

/* A certificate with more names is refused. */
#define MAX_ENTRIES 64
#define MAX_LABEL_BYTES 63
/* What a message shows of a name. */
#define QUOTED_BYTES 160

#define SCHEME "spiffe://"
#define REMEDY "issue one with the URI spiffe://TRUST-DOMAIN/job/JOB/task/INDEX, or with that of a client"

/* Copies a name for a message: cut, with '?' for all that is not printable ASCII. */
static const char *quote(const char *text, char ret_quoted[QUOTED_BYTES])
{
    size_t len = strnlen(text, QUOTED_BYTES - 1);
    for (size_t i = 0; i < len; i++)
        ret_quoted[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    ret_quoted[len] = '\0';
    return ret_quoted;
}

/* True when the text consists of lower-case letters, digits and the other characters, and is not empty. */
static bool has_only(const char *text, size_t len_bytes, const char *others)
{
    for (size_t i = 0; i < len_bytes; i++) {
        char c = text[i];
        bool is_plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
        if (!is_plain && (c == '\0' || !strchr(others, c))) return false;
    }
    return len_bytes > 0;
}

#define UPPER_CASE "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

/* A decimal number below 2^32 without zeros in front. */
static bool is_index(const char *text, size_t len_bytes)
{
    uint64_t value = 0;
    if (len_bytes == 0 || len_bytes > 10 || (len_bytes > 1 && text[0] == '0')) return false;
    for (size_t i = 0; i < len_bytes; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        value = value * 10 + (uint64_t)(text[i] - '0');
    }
    return value <= UINT32_MAX;
}

/* True for labels of 1 to 63 of these characters with dots between them. */
static bool has_labels(const char *text, size_t len_bytes, const char *others)
{
    const char *end = text + len_bytes;
    for (;;) {
        const char *dot = memchr(text, '.', (size_t)(end - text));
        size_t len = (size_t)((dot ? dot : end) - text);
        if (len > MAX_LABEL_BYTES || !has_only(text, len, others)) return false;
        if (!dot) return true;
        text = dot + 1;
    }
}

static void set_member(struct tl_certificate_name *name, const char *job, size_t job_len, const char *index,
                       size_t index_len)
{
    name->kind = TL_CERTIFICATE_MEMBER;
    /* It fits: a URI is longer than what is made of it, and a label has 63 bytes at most. */
    snprintf(name->text, sizeof(name->text), "/job:%.*s/task:%.*s", (int)job_len, job, (int)index_len, index);
}

/* --------------------------------------------------------------------------------------------------------- URIs -- */

struct segment {
    const char *text;
    size_t len_bytes;
};

static bool is_word(const struct segment *segment, const char *word)
{
    return segment->len_bytes == strlen(word) && memcmp(segment->text, word, segment->len_bytes) == 0;
}

/* Reads the path behind the trust domain, "/job/ps/task/0". Returns NULL, or what is wrong with it. */
static const char *read_path(const char *path, struct tl_certificate_name *name)
{
    enum { MEMBER_SEGMENTS = 4 };
    struct segment segments[MEMBER_SEGMENTS] = {{0}};
    size_t count = 0;
    for (; *path == '/'; count++) {
        struct segment segment = {path + 1, strcspn(path + 1, "/")};
        if (segment.len_bytes == 0) return "its path has an empty part";
        if (!has_only(segment.text, segment.len_bytes, UPPER_CASE "._-"))
            return "its path has a character that is no letter, digit, '.', '_' or '-'";
        if (is_word(&segment, ".") || is_word(&segment, "..")) return "its path has the part . or ..";
        if (count < MEMBER_SEGMENTS) segments[count] = segment;
        path = segment.text + segment.len_bytes;
    }
    if (count == 0) return "it has no path";
    /* What looks like a member's name and is none would be a surprise as the name of a client. */
    if (!is_word(&segments[0], "job")) return NULL;
    if (count != MEMBER_SEGMENTS || !is_word(&segments[2], "task")) return "its path is not /job/JOB/task/INDEX";
    if (!is_index(segments[3].text, segments[3].len_bytes))
        return "its index is no number of 0 to 4294967295 without leading zeros";
    set_member(name, segments[1].text, segments[1].len_bytes, segments[3].text, segments[3].len_bytes);
    return NULL;
}

static const char *read_uri(const char *uri, struct tl_certificate_name *name)
{
    if (strncmp(uri, SCHEME, strlen(SCHEME)) != 0) return "it does not begin with " SCHEME;
    const char *domain = uri + strlen(SCHEME);
    size_t len = strcspn(domain, "/");
    if (!has_labels(domain, len, "_-"))
        return "its trust domain is not made of lower-case letters, digits, '_' and '-' with dots between them";
    name->kind = TL_CERTIFICATE_CLIENT;
    snprintf(name->text, sizeof(name->text), "%s", uri);
    snprintf(name->trust_domain, sizeof(name->trust_domain), "%.*s", (int)len, domain);
    return read_path(domain + len, name);
}

static enum tl_status choose_uri(const char *uri, struct tl_certificate_name *ret_name, struct tl_error *ret_error)
{
    struct tl_certificate_name name = {.kind = TL_CERTIFICATE_CLIENT};
    char quoted[QUOTED_BYTES];
    const char *wrong = read_uri(uri, &name);
    if (wrong) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the certificate's URI \"%s\" is no name: %s; " REMEDY,
                            quote(uri, quoted), wrong);
    }
    *ret_name = name;
    return TL_OK;
}

void tl_certificate_name_make_foreign(struct tl_certificate_name *name)
{
    name->is_foreign = true;
    if (name->kind != TL_CERTIFICATE_MEMBER || name->trust_domain[0] == '\0') return;
    const char *job = name->text + strlen("/job:"), *index = strrchr(name->text, ':') + 1;
    int job_len = (int)(strchr(job, '/') - job);
    char uri[TL_CERTIFICATE_NAME_BYTES];
    int len = snprintf(uri, sizeof(uri), SCHEME "%.*s/job/%.*s/task/%s", (int)strlen(name->trust_domain),
                       name->trust_domain, job_len, job, index);
    TL_CHECK(len > 0 && (size_t)len < sizeof(uri)); /* as it did in the certificate */
    memcpy(name->text, uri, sizeof(uri));
}

/* ---------------------------------------------------------------------------------------------------- DNS names -- */

/* Reads a DNS name; false when it cannot be one, as a wildcard cannot. */
static bool read_dns(const char *text, struct tl_certificate_name *name)
{
    if (!has_labels(text, strlen(text), UPPER_CASE "_-")) return false;
    *name = (struct tl_certificate_name){.kind = TL_CERTIFICATE_CLIENT};
    snprintf(name->text, sizeof(name->text), "%s", text);
    size_t label_len = strcspn(text, ".");
    const char *dash = memrchr(text, '-', label_len);
    if (!dash || dash == text) return true;
    size_t index_len = label_len - (size_t)(dash + 1 - text);
    if (is_index(dash + 1, index_len)) set_member(name, text, (size_t)(dash - text), dash + 1, index_len);
    return true;
}

/* Chooses the first name of a member, else the first name. Two members contradict each other. */
static enum tl_status choose_dns(const struct tl_certificate_entry *entries, size_t count,
                                 struct tl_certificate_name *ret_name, struct tl_error *ret_error)
{
    struct tl_certificate_name chosen = {.text = ""}, name;
    char text[TL_CERTIFICATE_NAME_BYTES];
    for (size_t i = 0; i < count; i++) {
        snprintf(text, sizeof(text), "%.*s", (int)entries[i].len_bytes, entries[i].text);
        if (!read_dns(text, &name)) continue;
        bool has_member = chosen.text[0] != '\0' && chosen.kind == TL_CERTIFICATE_MEMBER;
        if (has_member && name.kind == TL_CERTIFICATE_MEMBER && strcmp(name.text, chosen.text) != 0) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "the certificate's DNS names are those of %s and of %s; " REMEDY, chosen.text,
                                name.text);
        }
        if (chosen.text[0] == '\0' || (!has_member && name.kind == TL_CERTIFICATE_MEMBER)) chosen = name;
    }
    if (chosen.text[0] == '\0') {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the certificate has no name in its subjectAltName; " REMEDY);
    }
    *ret_name = chosen;
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------- certificates -- */

/* Checks bounds, and finds the URI: NULL where there is none. */
static enum tl_status check_entries(const struct tl_certificate_entry *entries, size_t count,
                                    const struct tl_certificate_entry **ret_uri, struct tl_error *ret_error)
{
    *ret_uri = NULL;
    if (count > MAX_ENTRIES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the certificate has more than %d names; " REMEDY,
                            MAX_ENTRIES);
    }
    for (size_t i = 0; i < count; i++) {
        if (entries[i].len_bytes >= TL_CERTIFICATE_NAME_BYTES) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "a name of the certificate has %zu bytes, and may have %d; " REMEDY,
                                entries[i].len_bytes, TL_CERTIFICATE_NAME_BYTES - 1);
        }
        if (memchr(entries[i].text, '\0', entries[i].len_bytes)) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a name of the certificate has a NUL in it; " REMEDY);
        }
        if (!entries[i].is_uri) continue;
        if (*ret_uri)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the certificate has more than one URI; " REMEDY);
        *ret_uri = &entries[i];
    }
    return TL_OK;
}

enum tl_status tl_certificate_name_choose(const struct tl_certificate_entry *entries, size_t count,
                                          struct tl_certificate_name *ret_name, struct tl_error *ret_error)
{
    char text[TL_CERTIFICATE_NAME_BYTES];
    const struct tl_certificate_entry *uri;
    enum tl_status status = check_entries(entries, count, &uri, ret_error);
    if (status != TL_OK) return status;
    if (!uri) return choose_dns(entries, count, ret_name, ret_error);
    snprintf(text, sizeof(text), "%.*s", (int)uri->len_bytes, uri->text);
    return choose_uri(text, ret_name, ret_error);
}

enum tl_status tl_certificate_name_of(const struct x509_st *certificate, struct tl_certificate_name *ret_name,
                                      struct tl_error *ret_error)
{
    struct tl_certificate_entry entries[MAX_ENTRIES + 1];
    size_t count = 0;
    GENERAL_NAMES *names = X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; i < sk_GENERAL_NAME_num(names) && count <= MAX_ENTRIES; i++) {
        int type;
        const ASN1_STRING *text = GENERAL_NAME_get0_value(sk_GENERAL_NAME_value(names, i), &type);
        if (type != GEN_URI && type != GEN_DNS) continue;
        entries[count++] = (struct tl_certificate_entry){.is_uri = type == GEN_URI,
                                                         .text = (const char *)ASN1_STRING_get0_data(text),
                                                         .len_bytes = (size_t)ASN1_STRING_length(text)};
    }
    enum tl_status status = tl_certificate_name_choose(entries, count, ret_name, ret_error);
    GENERAL_NAMES_free(names);
    return status;
}
