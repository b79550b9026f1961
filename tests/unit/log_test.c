// SPDX-License-Identifier: Apache-2.0
/* The log: both formats, escaping, cutting, and a stderr that cannot be written. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <pthread.h>
#include <regex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/text.h"
#include "fakes/run_suite.h"

static int log_fd; /* The file that stderr writes to. */
static char output[1 << 20];

static void setup(void)
{
    char path[] = "/tmp/tensorlane-log-XXXXXX";
    log_fd = mkstemp(path);
    ck_assert_int_ge(log_fd, 0);
    unlink(path);
    ck_assert_int_ge(dup2(log_fd, STDERR_FILENO), 0);
    tl_log_configure(TL_LOG_DEBUG, TL_LOG_KEY_VALUE);
}

/* Returns everything that was written so far. */
static const char *written(void)
{
    ssize_t len = pread(log_fd, output, sizeof(output) - 1, 0);
    ck_assert_int_ge(len, 0);
    output[len] = '\0';
    return output;
}

/* Returns what follows the time stamp and level of the only line, which are checked; without the newline. */
static const char *rest_of_line(const char *pattern)
{
    regex_t regex;
    regmatch_t match[2];
    char *line = (char *)written();
    ck_assert_int_eq(regcomp(&regex, pattern, REG_EXTENDED), 0);
    ck_assert_msg(regexec(&regex, line, 2, match, 0) == 0, "%s", line);
    regfree(&regex);
    char *end = strchr(line, '\n');
    ck_assert_ptr_nonnull(end);
    ck_assert_str_eq(end, "\n");
    *end = '\0';
    return line + match[1].rm_so;
}

#define KEY_VALUE_START                                                                                                \
    "^ts=20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\\.[0-9]{3}Z level=info (.*)"

START_TEST(levels)
{
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    ck_assert(tl_log_is_enabled(TL_LOG_ERROR));
    ck_assert(tl_log_is_enabled(TL_LOG_WARN));
    ck_assert(!tl_log_is_enabled(TL_LOG_INFO));
    TL_LOG_AT_INFO("no");
    TL_LOG_AT_DEBUG("no", TL_U64("n", 1));
    ck_assert_str_eq(written(), "");
    TL_LOG_AT_ERROR("yes");
    TL_LOG_AT_WARN("yes", TL_U64("n", 1));
    ck_assert_ptr_nonnull(strstr(written(), "level=error msg=\"yes\"\n"));
    ck_assert_ptr_nonnull(strstr(written(), "level=warn msg=\"yes\" n=1\n"));
}
END_TEST

START_TEST(parse_level)
{
    enum tl_log_level level = TL_LOG_ERROR;
    ck_assert(tl_log_parse_level("debug", &level));
    ck_assert_int_eq(level, TL_LOG_DEBUG);
    ck_assert(tl_log_parse_level("error", &level));
    ck_assert_int_eq(level, TL_LOG_ERROR);
    ck_assert(tl_log_parse_level("warn", &level));
    ck_assert(tl_log_parse_level("info", &level));
    ck_assert(!tl_log_parse_level("Info", &level));
    ck_assert(!tl_log_parse_level("", &level));
    ck_assert_int_eq(level, TL_LOG_INFO);
}
END_TEST

START_TEST(key_value)
{
    TL_LOG_AT_INFO("worker ready", TL_STR("address", "127.0.0.1:4000"), TL_I64("i", -5), TL_U64("u", UINT64_MAX),
                   TL_INCARNATION("h", 0xBEEF), TL_BOOLEAN("b", true), TL_BOOLEAN("c", false), TL_STR("empty", ""),
                   TL_STR("none", NULL), TL_STR("spaced", "a b"), TL_STR("equal", "a=b"));
    ck_assert_str_eq(
        rest_of_line(KEY_VALUE_START),
        "msg=\"worker ready\" address=127.0.0.1:4000 i=-5 u=18446744073709551615 h=0x000000000000beef b=true c=false "
        "empty= none= spaced=\"a b\" equal=\"a=b\"");
}
END_TEST

START_TEST(key_value_is_escaped)
{
    TL_LOG_AT_INFO("a\"b\\c", TL_STR("k", "x\ny\tz\x1b[31m\x7f"), TL_STR("bad", "\xff\xc3"), TL_STR("c1", "\xc2\x9b"),
                   TL_STR("good", "caf\xc3\xa9 \xf0\x9f\x98\x80"));
    ck_assert_str_eq(rest_of_line(KEY_VALUE_START),
                     "msg=\"a\\\"b\\\\c\" k=\"x\\ny\\tz\\x1b[31m\\x7f\" bad=\"\\xff\\xc3\" c1=\"\\u009b\" "
                     "good=\"caf\xc3\xa9 \xf0\x9f\x98\x80\"");
}
END_TEST

START_TEST(json)
{
    json_error_t error;
    tl_log_configure(TL_LOG_DEBUG, TL_LOG_JSON);
    TL_LOG_AT_DEBUG("a \"b\"", TL_STR("s", "x\ny\\\x01\xff"), TL_I64("i", INT64_MIN), TL_U64("u", 7),
                    TL_INCARNATION("h", 0xBEEF), TL_BOOLEAN("b", true), TL_STR("none", NULL));
    const char *line = written();
    ck_assert_str_eq(strchr(line, '\n'), "\n");
    json_t *root = json_loads(line, JSON_REJECT_DUPLICATES, &error);
    ck_assert_msg(root != NULL, "%s: %s", line, error.text);
    ck_assert_uint_eq(strlen(json_string_value(json_object_get(root, "ts"))), strlen("2026-01-02T03:04:05.678Z"));
    ck_assert_str_eq(json_string_value(json_object_get(root, "level")), "debug");
    ck_assert_str_eq(json_string_value(json_object_get(root, "msg")), "a \"b\"");
    ck_assert_str_eq(json_string_value(json_object_get(root, "s")), "x\ny\\\x01\xef\xbf\xbd");
    ck_assert_int_eq(json_integer_value(json_object_get(root, "i")), INT64_MIN);
    ck_assert_int_eq(json_integer_value(json_object_get(root, "u")), 7);
    ck_assert_str_eq(json_string_value(json_object_get(root, "h")), "0x000000000000beef");
    ck_assert(json_is_true(json_object_get(root, "b")));
    ck_assert_str_eq(json_string_value(json_object_get(root, "none")), "");
    json_decref(root);
}
END_TEST

/* Values grow by a byte, so that the cut falls on every place of an escape sequence. */
START_TEST(json_is_cut_whole)
{
    static char value[5000];
    tl_log_configure(TL_LOG_DEBUG, TL_LOG_JSON);
    for (size_t shift = 0; shift < 16; shift++) {
        memset(value, 'a', shift);
        for (size_t i = shift; i + 4 < sizeof(value) - 1; i += 4)
            memcpy(value + i, "\x01\xe2\x82\xac", 4);
        ck_assert_int_eq(ftruncate(log_fd, 0), 0);
        ck_assert_int_eq(lseek(log_fd, 0, SEEK_SET), 0);
        TL_LOG_AT_INFO("long", TL_STR("value", value), TL_STR("after", "lost"));
        const char *line = written();
        ck_assert_uint_le(strlen(line), 4096);
        ck_assert_uint_ge(strlen(line), 3904);
        ck_assert(tl_text_is_utf8(line, strlen(line)));
        json_t *root = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        ck_assert_ptr_nonnull(root);
        ck_assert(json_is_true(json_object_get(root, "cut")));
        ck_assert_ptr_null(json_object_get(root, "after"));
        json_decref(root);
    }
}
END_TEST

/* Fields of every length just before the end are whole or missing. */
START_TEST(fields_are_cut_whole)
{
    static char value[4096];
    for (size_t len = 3904; len < 4064; len++) {
        memset(value, 'a', len);
        value[len] = '\0';
        ck_assert_int_eq(ftruncate(log_fd, 0), 0);
        ck_assert_int_eq(lseek(log_fd, 0, SEEK_SET), 0);
        tl_log_configure(TL_LOG_DEBUG, len % 2 ? TL_LOG_JSON : TL_LOG_KEY_VALUE);
        TL_LOG_AT_INFO("long", TL_STR("value", value), TL_U64("number", 1234567), TL_STR("last", "x y"));
        const char *line = written();
        size_t line_len = strlen(line);
        ck_assert_uint_le(line_len, 4096);
        ck_assert_int_eq(line[line_len - 1], '\n');
        if (len % 2) {
            json_t *root = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
            ck_assert_msg(root != NULL, "%zu", len);
            json_decref(root);
        } else {
            bool is_cut = strstr(line, " cut=true\n") != NULL;
            ck_assert(is_cut || strstr(line, " number=1234567 last=\"x y\"\n"));
            ck_assert(!strstr(line, "number=") || strstr(line, "number=1234567 "));
        }
    }
}
END_TEST

START_TEST(errno_is_kept)
{
    errno = ENOTTY;
    TL_LOG_AT_INFO("x");
    ck_assert_int_eq(errno, ENOTTY);
    close(STDERR_FILENO);
    TL_LOG_AT_INFO("x");
    ck_assert_int_eq(errno, ENOTTY);
}
END_TEST

START_TEST(full_disk_loses_the_line)
{
    int fd = open("/dev/full", O_WRONLY);
    if (fd < 0) return;
    dup2(fd, STDERR_FILENO);
    TL_LOG_AT_INFO("lost");
    ck_assert_str_eq(written(), "");
}
END_TEST

/* With the default action of SIGPIPE the process would end. */
START_TEST(closed_pipe_loses_the_line)
{
    int ends[2];
    sigset_t pending;
    signal(SIGPIPE, SIG_DFL);
    ck_assert_int_eq(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    TL_LOG_AT_INFO("lost");
    TL_LOG_AT_INFO("lost");
    sigpending(&pending);
    ck_assert_int_eq(sigismember(&pending, SIGPIPE), 0);
}
END_TEST

/* A SIGPIPE that another thread waits for is not taken away. */
START_TEST(pending_sigpipe_stays)
{
    sigset_t pipe_only, pending;
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    ck_assert_int_eq(pthread_sigmask(SIG_BLOCK, &pipe_only, NULL), 0);
    raise(SIGPIPE);
    TL_LOG_AT_INFO("x");
    sigpending(&pending);
    ck_assert_int_eq(sigismember(&pending, SIGPIPE), 1);
}
END_TEST

enum { WRITERS = 4, LINES = 200 };

static void *write_lines(void *argument)
{
    for (int i = 0; i < LINES; i++)
        TL_LOG_AT_INFO("line", TL_STR("padding", argument));
    return NULL;
}

START_TEST(lines_do_not_mix)
{
    static char padding[WRITERS][400];
    pthread_t threads[WRITERS];
    unsigned counts[WRITERS] = {0};
    /* Each write goes to the end, as with a log file. */
    ck_assert_int_eq(fcntl(STDERR_FILENO, F_SETFL, O_APPEND), 0);
    for (int i = 0; i < WRITERS; i++) {
        memset(padding[i], 'a' + i, sizeof(padding[i]) - 1);
        ck_assert_int_eq(pthread_create(&threads[i], NULL, write_lines, padding[i]), 0);
    }
    for (int i = 0; i < WRITERS; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    char *state = NULL;
    for (char *line = strtok_r((char *)written(), "\n", &state); line; line = strtok_r(NULL, "\n", &state)) {
        const char *value = strstr(line, " padding=");
        ck_assert_ptr_nonnull(value);
        value += strlen(" padding=");
        ck_assert_str_eq(value, padding[value[0] - 'a']);
        counts[value[0] - 'a']++;
    }
    for (int i = 0; i < WRITERS; i++)
        ck_assert_uint_eq(counts[i], LINES);
}
END_TEST

/* --------------------------------------------------------------------------------- a reader that does not read -- */

enum reader { PIPE, SOCKET, TERMINAL, READERS };

/* Replaces standard error by a pipe; reader_fd, which does not block, reads it. */
static int make_reader(enum reader reader)
{
    int ends[2];
    if (reader == PIPE) {
        ck_assert_int_eq(pipe(ends), 0);
        ck_assert_int_eq(fcntl(ends[1], F_SETPIPE_SZ, 4096), 4096);
    } else if (reader == SOCKET) {
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    } else {
        struct termios raw;
        ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
        ck_assert_int_ge(ends[0], 0);
        ck_assert_int_eq(grantpt(ends[0]) | unlockpt(ends[0]), 0);
        ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY);
        ck_assert_int_ge(ends[1], 0);
        ck_assert_int_eq(tcgetattr(ends[1], &raw), 0);
        cfmakeraw(&raw);
        ck_assert_int_eq(tcsetattr(ends[1], TCSANOW, &raw), 0);
    }
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    return ends[0];
}

/* Fills the pipe. */
static void fill(void)
{
    if (isatty(STDERR_FILENO)) {
        tcflow(STDERR_FILENO, TCOOFF);
        return;
    }
    static const char dots[4096] = {[0 ... 4095] = '.'};
    fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
    for (size_t len = sizeof(dots); len > 0; len /= 2)
        while (write(STDERR_FILENO, dots, len) > 0) {
        }
    fcntl(STDERR_FILENO, F_SETFL, 0);
}

/* Reads everything that is there, or up to the text; returns it without the dots. */
static const char *drain(int fd, const char *until)
{
    size_t len = 0;
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    if (isatty(STDERR_FILENO)) tcflow(STDERR_FILENO, TCOON);
    output[0] = '\0';
    while (!(until && strstr(output, until)) && poll(&ready, 1, until ? -1 : 0) > 0) {
        ssize_t count = read(fd, output + len, sizeof(output) - 1 - len);
        if (count <= 0) break;
        len += (size_t)count;
        output[len] = '\0';
    }
    return output + strspn(output, ".");
}

START_TEST(stderr_without_a_reader)
{
    int fd = make_reader((enum reader)_i);
    fill();
    for (int i = 0; i < 3; i++)
        TL_LOG_AT_ERROR("lost");
    drain(fd, NULL);
    TL_LOG_AT_ERROR("after");
    TL_LOG_AT_ERROR("last");
    regex_t regex;
    ck_assert_int_eq(regcomp(&regex,
                             "^ts=[^ ]* level=warn msg=\"lines were lost here: standard error could not be written "
                             "without waiting\" lines=3\nts=[^ ]* level=error msg=\"after\"\nts=[^ ]* level=error "
                             "msg=\"last\"\n$",
                             REG_EXTENDED),
                     0);
    const char *text = drain(fd, "\"last\"\n");
    ck_assert_msg(regexec(&regex, text, 0, NULL, 0) == 0, "%s", text);
    regfree(&regex);
    ck_assert_int_eq(fcntl(STDERR_FILENO, F_GETFL) & O_NONBLOCK, 0);
}
END_TEST

START_TEST(stderr_without_a_reader_from_several_threads)
{
    static char nothing[] = "";
    pthread_t threads[WRITERS];
    int fd = make_reader((enum reader)_i);
    fill();
    for (int i = 0; i < WRITERS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, write_lines, nothing), 0);
    for (int i = 0; i < WRITERS; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    drain(fd, NULL);
    tl_log_configure(TL_LOG_ERROR, TL_LOG_JSON);
    TL_LOG_AT_ERROR("after");
    json_t *root = json_loads(drain(fd, "\"after\"}\n"), JSON_DISABLE_EOF_CHECK, NULL);
    ck_assert_ptr_nonnull(root);
    ck_assert_int_eq(json_integer_value(json_object_get(root, "lines")), WRITERS * LINES);
    json_decref(root);
}
END_TEST

START_TEST(a_line_that_is_cut_off_has_its_own_end)
{
    static char text[6000];
    int fd = make_reader(PIPE);
    memset(text, 'a', sizeof(text));
    text[sizeof(text) - 1] = '\n';
    tl_log_put(text, sizeof(text));
    const char *start = drain(fd, NULL);
    ck_assert_uint_eq(strspn(start, "a"), 4096);
    ck_assert_str_eq(start + 4096, "");
    TL_LOG_AT_ERROR("after");
    start = drain(fd, "\"after\"\n");
    ck_assert_msg(strncmp(start, "\nts=", 4) == 0, "%s", start);
    ck_assert_ptr_nonnull(strstr(start, " lines=1\nts="));
    tl_log_put("whole\n", 6);
    ck_assert_str_eq(drain(fd, "\n"), "whole\n");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("log");
    TCase *tcase = tcase_create("log");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, levels);
    tcase_add_test(tcase, parse_level);
    tcase_add_test(tcase, key_value);
    tcase_add_test(tcase, key_value_is_escaped);
    tcase_add_test(tcase, json);
    tcase_add_test(tcase, json_is_cut_whole);
    tcase_add_test(tcase, fields_are_cut_whole);
    tcase_add_test(tcase, errno_is_kept);
    tcase_add_test(tcase, full_disk_loses_the_line);
    tcase_add_test(tcase, closed_pipe_loses_the_line);
    tcase_add_test(tcase, pending_sigpipe_stays);
    tcase_add_test(tcase, lines_do_not_mix);
    tcase_add_loop_test(tcase, stderr_without_a_reader, 0, READERS);
    tcase_add_loop_test(tcase, stderr_without_a_reader_from_several_threads, 0, READERS);
    tcase_add_test(tcase, a_line_that_is_cut_off_has_its_own_end);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
