// SPDX-License-Identifier: Apache-2.0
/* Shell patterns, compared with a second matcher that tries everything. */
#include "base/glob.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "fakes/run_suite.h"

static bool is_match(const char *pattern, const char *name)
{
    struct tl_glob *glob = tl_glob_create(pattern);
    ck_assert_ptr_nonnull(glob);
    bool result = tl_glob_is_match(glob, name);
    tl_glob_destroy(glob);
    return result;
}

START_TEST(names_that_match)
{
    static const char *const pairs[][2] = {
        {"", ""},
        {"*", ""},
        {"*", "a/b.c"},
        {"a*c", "abc"},
        {"a*c", "ac"},
        {"*.weight", "layer/0.weight"},
        {"a?c", "abc"},
        {"a?c", "a\xc3\xa9"
                "c"},
        {"[abc]x", "bx"},
        {"[a-c]", "b"},
        {"[!a-c]", "d"},
        {"[^a-c]", "d"},
        {"[]]", "]"},
        {"[!]]", "x"},
        {"[a-]", "-"},
        {"[\\]]", "]"},
        {"[", "["},
        {"[ab", "[ab"},
        {"\\*", "*"},
        {"\\\\", "\\"},
        {"\\", "\\"},
        {"*ab*ab*", "xxabyyabzz"},
        {"a**b", "ab"},
        {"\xff*", "\xffz"},
        {"[\xc3\xa0-\xc3\xbf]", "\xc3\xa9"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(pairs); i++)
        ck_assert_msg(is_match(pairs[i][0], pairs[i][1]), "%s %s", pairs[i][0], pairs[i][1]);
}
END_TEST

START_TEST(names_that_do_not_match)
{
    static const char *const pairs[][2] = {
        {"", "a"},        {"a", ""},       {"a", "ab"}, {"?", ""},         {"?", "ab"},    {"a*c", "abd"},
        {"[a-c]", "d"},   {"[!a-c]", "b"}, {"[]", "]"}, {"\\*", "x"},      {"*ab", "aba"}, {"[z-a]", "m"},
        {"\xfe", "\xff"}, {"[ab", "a"},    {"A", "a"},  {"*a*b*c", "acb"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(pairs); i++)
        ck_assert_msg(!is_match(pairs[i][0], pairs[i][1]), "%s %s", pairs[i][0], pairs[i][1]);
}
END_TEST

/* A matcher that tries every '*' again would take longer than the machine lasts. */
START_TEST(many_stars)
{
    char pattern[401], name[401];
    for (size_t i = 0; i < 400; i += 2)
        memcpy(pattern + i, "*a", 2);
    pattern[399] = 'b';
    pattern[400] = '\0';
    memset(name, 'a', 400);
    name[400] = '\0';
    ck_assert(!is_match(pattern, name));
    memset(pattern, '[', 400);
    pattern[0] = '*';
    memset(name, '[', 400);
    ck_assert(is_match(pattern, name));
    name[399] = 'x';
    ck_assert(!is_match(pattern, name));
}
END_TEST

/* ---- a second matcher, for patterns of 'a' to 'd', '*', '?', backslashes and sets without ranges ---- */

/* Returns what follows the set that begins at `set`, or NULL when the set has no end. */
static const char *end_of_set(const char *set)
{
    const char *p = set + 1;
    if (*p == '!') p++;
    for (bool is_first = true; is_first || *p != ']'; is_first = false) {
        if (*p == '\\' && p[1]) p++;
        if (*p == '\0') return NULL;
        p++;
    }
    return p + 1;
}

static bool is_in_set(const char *set, const char *end, char c)
{
    bool is_inverted = set[1] == '!', is_member = false;
    for (const char *p = set + 1 + is_inverted; p < end - 1; p++) {
        if (*p == '\\' && p + 1 < end - 1) p++;
        is_member |= *p == c;
    }
    return is_member != is_inverted;
}

static bool reference(const char *pattern, const char *name)
{
    if (*pattern == '\0') return *name == '\0';
    if (*pattern == '*') return reference(pattern + 1, name) || (*name && reference(pattern, name + 1));
    if (*name == '\0') return false;
    if (*pattern == '?') return reference(pattern + 1, name + 1);
    const char *end = *pattern == '[' ? end_of_set(pattern) : NULL;
    if (end != NULL) return is_in_set(pattern, end, *name) && reference(end, name + 1);
    if (*pattern == '\\' && pattern[1]) pattern++;
    return *pattern == *name && reference(pattern + 1, name + 1);
}

START_TEST(random_patterns_match_as_by_trying_everything)
{
    unsigned matches = 0;
    srandom(7);
    for (unsigned round = 0; round < 200000; round++) {
        char pattern[13], name[11];
        size_t pattern_len = (size_t)(random() % 12), name_len = (size_t)(random() % 10);
        for (size_t i = 0; i < pattern_len; i++)
            pattern[i] = "aabbcd**?[]!\\"[random() % 13];
        for (size_t i = 0; i < name_len; i++)
            name[i] = "aaabbbccd[]!"[random() % 12];
        pattern[pattern_len] = name[name_len] = '\0';
        bool expected = reference(pattern, name);
        ck_assert_msg(is_match(pattern, name) == expected, "%s %s", pattern, name);
        matches += expected;
    }
    ck_assert_uint_gt(matches, 1000);
}
END_TEST

/* The states lie in words of 64 bits. */
START_TEST(items_at_the_borders_of_words)
{
    char pattern[400], name[400];
    for (size_t len = 1; len < 260; len++) {
        memset(pattern, '?', len);
        memset(name, 'x', len);
        pattern[len - 1] = 'y';
        name[len - 1] = 'y';
        pattern[len] = name[len] = '\0';
        ck_assert_msg(is_match(pattern, name), "%zu", len);
        name[len - 1] = 'x';
        ck_assert_msg(!is_match(pattern, name), "%zu", len);
        memcpy(pattern + len, "*z", 3);
        memcpy(name + len - 1, "yabcz", 6);
        ck_assert_msg(is_match(pattern, name), "%zu", len);
        name[len + 3] = 'y';
        ck_assert_msg(!is_match(pattern, name), "%zu", len);
    }
}
END_TEST

START_TEST(characters_that_are_not_ascii)
{
    static const char *const pairs[][2] = {
        {"[\xc3\xa0-\xc3\xbf]*", "\xc3\xa0z"},
        {"?\xe2\x82\xac", "x\xe2\x82\xac"},
        {"[!a]", "\xf0\x9f\x98\x80"},
        {"[\xf0\x9f\x98\x80-\xff]", "\xc0"},
        {"*\xff", "\xff"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(pairs); i++)
        ck_assert_msg(is_match(pairs[i][0], pairs[i][1]), "%s %s", pairs[i][0], pairs[i][1]);
    ck_assert(!is_match("[\xc3\xa0-\xc3\xbf]", "\xc3\x9f"));
    ck_assert(!is_match("\xc3", "\xc3\xa0"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("glob");
    TCase *tcase = tcase_create("glob");
    tcase_add_test(tcase, names_that_match);
    tcase_add_test(tcase, names_that_do_not_match);
    tcase_add_test(tcase, many_stars);
    tcase_add_test(tcase, random_patterns_match_as_by_trying_everything);
    tcase_add_test(tcase, items_at_the_borders_of_words);
    tcase_add_test(tcase, characters_that_are_not_ascii);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
