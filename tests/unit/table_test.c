// SPDX-License-Identifier: Apache-2.0
/* Tests of tables: into a file, and into terminals of different widths. */
#include <check.h>
#include <fcntl.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "fakes/run_suite.h"
#include "server/cli/output.h"
#include "server/cli/table.h"

static const struct tl_column columns[] = {
    {.title = "NAME", .wraps = true}, {.title = "BYTES", .is_right = true}, {.title = "WHY", .wraps = true}};

static struct tl_table *make_table(void)
{
    struct tl_table *table = tl_table_create(columns, 3);
    ck_assert_ptr_nonnull(table);
    tl_table_add(table, "%s", "a");
    tl_table_add(table, "%d", 12345678);
    tl_table_add(table, "%s", "one two three four five six seven");
    tl_table_add(table, "%s", "größer");
    tl_table_add(table, "%d", 1);
    tl_table_add(table, "%s", "");
    return table;
}

START_TEST(cells_are_aligned)
{
    FILE *file = tmpfile();
    struct tl_table *table = make_table();
    char read[512] = {0};
    ck_assert(tl_table_print(table, file));
    rewind(file);
    fread(read, 1, sizeof(read) - 1, file);
    ck_assert_str_eq(read, "NAME       BYTES  WHY\n"
                           "a       12345678  one two three four five six seven\n"
                           "größer         1\n");
    tl_table_destroy(table);
    fclose(file);
}
END_TEST

START_TEST(hostile_cells_are_escaped)
{
    FILE *file = tmpfile();
    struct tl_table *table = tl_table_create(columns, 3);
    char read[512] = {0};
    tl_table_add(table, "%s", "\x1b[2J\n");
    tl_table_add(table, "%d", 1);
    tl_table_add(table, "%s", "\xFF");
    ck_assert(tl_table_print(table, file));
    rewind(file);
    fread(read, 1, sizeof(read) - 1, file);
    ck_assert_str_eq(read, "NAME       BYTES  WHY\n\\x1B[2J\\n      1  \\xFF\n");
    tl_table_destroy(table);
    fclose(file);
}
END_TEST

START_TEST(a_table_without_rows_has_titles)
{
    FILE *file = tmpfile();
    struct tl_table *table = tl_table_create(columns, 3);
    char read[64] = {0};
    ck_assert(tl_table_print(table, file));
    rewind(file);
    fread(read, 1, sizeof(read) - 1, file);
    ck_assert_str_eq(read, "NAME  BYTES  WHY\n");
    tl_table_destroy(table);
    tl_table_destroy(NULL);
    fclose(file);
}
END_TEST

/* Prints the table on a terminal of this width and returns its output. */
static void print_on_terminal(const struct tl_table *table, unsigned short width, char *ret_text, size_t capacity)
{
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    ck_assert_int_ge(master, 0);
    ck_assert_int_eq(grantpt(master), 0);
    ck_assert_int_eq(unlockpt(master), 0);
    FILE *terminal = fopen(ptsname(master), "w");
    ck_assert_ptr_nonnull(terminal);
    struct termios raw;
    ck_assert_int_eq(tcgetattr(fileno(terminal), &raw), 0);
    cfmakeraw(&raw);
    ck_assert_int_eq(tcsetattr(fileno(terminal), TCSANOW, &raw), 0);
    const struct winsize size = {.ws_row = 24, .ws_col = width};
    ck_assert_int_eq(ioctl(master, TIOCSWINSZ, &size), 0);
    ck_assert_uint_eq(tl_output_width(terminal), width);
    ck_assert(tl_table_print(table, terminal));
    fflush(terminal);
    fclose(terminal);
    /* A terminal returns what has arrived so far, so several reads are needed; after the end comes an error. */
    size_t used = 0;
    ssize_t len;
    while (used < capacity - 1 && (len = read(master, ret_text + used, capacity - 1 - used)) > 0)
        used += (size_t)len;
    ret_text[used] = '\0';
    close(master);
}

START_TEST(wide_columns_wrap_between_words)
{
    char text[1024];
    struct tl_table *table = make_table();
    setenv("NO_COLOR", "1", 1);
    print_on_terminal(table, 32, text, sizeof(text));
    ck_assert_str_eq(text, "NAME       BYTES  WHY\n"
                           "a       12345678  one two three\n"
                           "                  four five six\n"
                           "                  seven\n"
                           "größer         1\n");
    tl_table_destroy(table);
}
END_TEST

START_TEST(words_that_are_too_long_are_broken)
{
    char text[1024];
    struct tl_table *table = tl_table_create(columns, 3);
    setenv("NO_COLOR", "1", 1);
    tl_table_add(table, "%s", "0123456789abcdefghijklmnopqrstuvwxyz");
    tl_table_add(table, "%d", 7);
    tl_table_add(table, "%s", "x");
    print_on_terminal(table, 27, text, sizeof(text));
    ck_assert_str_eq(text, "NAME             BYTES  WHY\n"
                           "0123456789abcde      7  x\n"
                           "fghijklmnopqrst\n"
                           "uvwxyz\n");
    tl_table_destroy(table);
}
END_TEST

static const struct tl_column optional_columns[] = {{.title = "NAME", .wraps = true},
                                                    {.title = "DEVICE", .is_optional = true},
                                                    {.title = "SIZE", .is_optional = true, .is_right = true}};

static struct tl_table *make_table_with_notes(void)
{
    struct tl_table *table = tl_table_create(optional_columns, 3);
    ck_assert_ptr_nonnull(table);
    tl_table_add(table, "a");
    tl_table_add(table, "-");
    tl_table_add(table, "1");
    tl_table_add_note(table, "reason", "one two three four five six seven eight nine ten eleven twelve thirteen x");
    tl_table_add_note(table, "remedy", "");
    tl_table_add(table, "b");
    tl_table_add(table, "%s", "");
    tl_table_add(table, "22");
    tl_table_add_note(table, "remedy", "\033");
    return table;
}

START_TEST(notes_stand_below_their_row_and_columns_without_text_are_left_out)
{
    FILE *file = tmpfile();
    struct tl_table *table = make_table_with_notes();
    char read[512] = {0};
    ck_assert(tl_table_print(table, file));
    rewind(file);
    fread(read, 1, sizeof(read) - 1, file);
    ck_assert_str_eq(read, "NAME  SIZE\n"
                           "a        1\n"
                           "    reason: one two three four five six seven eight nine ten eleven twelve\n"
                           "            thirteen x\n"
                           "b       22\n"
                           "    remedy: \\x1B\n");
    tl_table_destroy(table);
    fclose(file);
}
END_TEST

START_TEST(notes_fit_the_terminal)
{
    char text[1024];
    struct tl_table *table = make_table_with_notes();
    setenv("NO_COLOR", "1", 1);
    print_on_terminal(table, 40, text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, "    reason: one two three four five six\n"
                                       "            seven eight nine ten eleven\n"
                                       "            twelve thirteen x\n"));
    tl_table_destroy(table);
}
END_TEST

START_TEST(colours_are_for_terminals)
{
    char text[1024];
    struct tl_table *table = tl_table_create(columns, 3);
    unsetenv("NO_COLOR");
    setenv("TERM", "xterm", 1);
    tl_table_add(table, "a");
    tl_table_add(table, "1");
    tl_table_paint(table, TL_COLOUR_RED);
    tl_table_add(table, "b");
    print_on_terminal(table, 80, text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, "\033[31m1\033[0m"));
    ck_assert_ptr_nonnull(strstr(text, "\033[1mNAME\033[0m"));
    tl_table_destroy(table);
}
END_TEST

int main(void)
{
    setlocale(LC_CTYPE, "C.UTF-8");
    Suite *suite = suite_create("table");
    TCase *tcase = tcase_create("table");
    tcase_add_test(tcase, cells_are_aligned);
    tcase_add_test(tcase, hostile_cells_are_escaped);
    tcase_add_test(tcase, a_table_without_rows_has_titles);
    tcase_add_test(tcase, wide_columns_wrap_between_words);
    tcase_add_test(tcase, words_that_are_too_long_are_broken);
    tcase_add_test(tcase, notes_stand_below_their_row_and_columns_without_text_are_left_out);
    tcase_add_test(tcase, notes_fit_the_terminal);
    tcase_add_test(tcase, colours_are_for_terminals);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
