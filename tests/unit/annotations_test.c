// SPDX-License-Identifier: Apache-2.0
/* Tests of annotations: order, limits, references. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "fakes/fault_alloc.h"

#include "fakes/run_suite.h"
#include "tensor/annotations.c"

static struct tl_annotations *annotations;
static struct tl_error error;

static struct tl_annotations *create(const struct tl_annotation *items, size_t count)
{
    struct tl_annotations *made;
    ck_assert_msg(tl_annotations_create(items, count, &made, &error) == TL_OK, "%s", error.message);
    return made;
}

static void refuse(const struct tl_annotation *items, size_t count, const char *part)
{
    ck_assert_int_eq(tl_annotations_create(items, count, &annotations, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, part));
}

START_TEST(sorted)
{
    static const struct tl_annotation items[] = {{"format", "pt"}, {"", "none"}, {"a", ""}};
    size_t count;
    annotations = create(items, TL_ARRAY_COUNT(items));
    const struct tl_annotation *sorted = tl_annotations_items(annotations, &count);
    ck_assert_uint_eq(count, 3);
    ck_assert_str_eq(sorted[0].value, "none");
    ck_assert_str_eq(sorted[1].key, "a");
    ck_assert_str_eq(sorted[2].value, "pt");
    ck_assert_uint_ge(tl_annotations_bytes(annotations), sizeof(items) + 13);
    ck_assert_ptr_eq(tl_annotations_get(annotations), annotations);
    tl_annotations_put(annotations);
    ck_assert_str_eq(sorted[2].key, "format");
    tl_annotations_put(annotations);
}
END_TEST

START_TEST(none)
{
    size_t count;
    ck_assert_ptr_null(create(NULL, 0));
    ck_assert_ptr_null(tl_annotations_get(NULL));
    ck_assert_ptr_null(tl_annotations_items(NULL, &count));
    ck_assert_uint_eq(count, 0);
    ck_assert_uint_eq(tl_annotations_bytes(NULL), 0);
    tl_annotations_put(NULL);
}
END_TEST

START_TEST(compared)
{
    static const struct tl_annotation items[] = {{"a", "1"}, {"b", "2"}}, other[] = {{"a", "1"}, {"b", "3"}},
                                      swapped[] = {{"b", "2"}, {"a", "1"}};
    struct tl_annotations *a = create(items, 2), *same = create(swapped, 2), *b = create(other, 2),
                          *less = create(items, 1);
    ck_assert_int_eq(tl_annotations_compare(a, a), 0);
    ck_assert_int_eq(tl_annotations_compare(a, same), 0);
    ck_assert_int_lt(tl_annotations_compare(a, b), 0);
    ck_assert_int_gt(tl_annotations_compare(b, a), 0);
    ck_assert_int_lt(tl_annotations_compare(less, a), 0);
    tl_annotations_put(a);
    tl_annotations_put(same);
    tl_annotations_put(b);
    tl_annotations_put(less);
}
END_TEST

START_TEST(limits)
{
    static struct tl_annotation many[TL_MAX_ANNOTATIONS + 1];
    static char keys[TL_MAX_ANNOTATIONS + 1][8];
    static char text[TL_MAX_ANNOTATIONS_BYTES + 1];
    for (unsigned i = 0; i < TL_ARRAY_COUNT(many); i++) {
        snprintf(keys[i], sizeof(keys[i]), "%u", i);
        many[i] = (struct tl_annotation){keys[i], ""};
    }
    tl_annotations_put(create(many, TL_MAX_ANNOTATIONS));
    refuse(many, TL_MAX_ANNOTATIONS + 1, "1025 annotations (__metadata__); at most 1024");
    memset(text, 'x', TL_MAX_ANNOTATIONS_BYTES);
    tl_annotations_put(create(&(struct tl_annotation){"", text}, 1));
    refuse(&(struct tl_annotation){"k", text}, 1, "65537 bytes; at most 65536");
    refuse((const struct tl_annotation[]){{"k", "a"}, {"l", ""}, {"k", "b"}}, 3, "'k' is there twice");
}
END_TEST

START_TEST(only_utf8)
{
    refuse((const struct tl_annotation[]){{"k", ""}, {"\xff", ""}}, 2, "annotation 1 (__metadata__) is not UTF-8");
    refuse((const struct tl_annotation[]){{"k", "\xed\xa0\x80"}, {"l", ""}}, 2, "annotation 0 (__metadata__) is not");
    refuse((const struct tl_annotation[]){{"k", ""}, {"l", NULL}}, 2, "annotation 1 (__metadata__) has no value");
    refuse((const struct tl_annotation[]){{NULL, ""}}, 1, "annotation 0 (__metadata__) has no key");
}
END_TEST

START_TEST(out_of_memory)
{
    fault_arm(1);
    ck_assert_int_eq(tl_annotations_create(&(struct tl_annotation){"k", "v"}, 1, &annotations, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("annotations");
    TCase *tcase = tcase_create("annotations");
    tcase_add_test(tcase, sorted);
    tcase_add_test(tcase, none);
    tcase_add_test(tcase, compared);
    tcase_add_test(tcase, limits);
    tcase_add_test(tcase, only_utf8);
    tcase_add_test(tcase, out_of_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
