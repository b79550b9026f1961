// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane doctor`: what was found on this machine, line by line, and the checks that find it.
 *
 * Each check takes what it looks at as arguments, so that a test can show it any machine: the folders of the kernel in
 * struct tl_doctor_roots, limits as numbers, devices as a list.
 */
#ifndef SERVER_CLI_DOCTOR_H
#define SERVER_CLI_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

/* ------------------------------------------------------------------------------------------------------ report -- */

enum tl_doctor_verdict {
    TL_DOCTOR_OK,
    TL_DOCTOR_NOTE,    /* it works, but does less than it might, or may surprise */
    TL_DOCTOR_FAULT,   /* workers cannot do what the configuration asks for */
    TL_DOCTOR_UNKNOWN, /* it cannot be found out here; the cause says which privilege or which side is missing */
};

struct tl_doctor_line {
    enum tl_doctor_verdict verdict;
    char what[96];
    char value[512];
    char cause[TL_ERROR_MESSAGE_BYTES]; /* "": there is nothing to explain */
    char remedy[TL_ERROR_MESSAGE_BYTES];
};

/* Zeroed memory is an empty report. */
struct tl_doctor_report {
    struct tl_doctor_line *lines; /* [count] */
    size_t count, capacity;
    bool is_incomplete; /* there was no memory for a line */
};

/* Appends a line; the format is that of its value. */
void tl_doctor_add(struct tl_doctor_report *report, enum tl_doctor_verdict verdict, const char *what,
                   const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Explains the last line: "cause; remedy". */
void tl_doctor_explain(struct tl_doctor_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same where the two are known already, and the cause may have a semicolon of its own. */
void tl_doctor_explain_both(struct tl_doctor_report *report, const char *cause, const char *remedy);

/* Appends a text to a list, separated by commas; what does not fit is left out. */
void tl_doctor_append(char *list, size_t capacity, const char *text);

size_t tl_doctor_count(const struct tl_doctor_report *report, enum tl_doctor_verdict verdict);

/* Print the report to standard output, with the version, the host and the time. False: no memory, now or for a line. */
bool tl_doctor_print_text(const struct tl_doctor_report *report);
bool tl_doctor_print_json(const struct tl_doctor_report *report);

void tl_doctor_report_fini(struct tl_doctor_report *report);

/* ----------------------------------------------------------------------------------------------------- machine -- */

/* The folders in which the kernel and the system tell about the machine. */
struct tl_doctor_roots {
    const char *proc; /* "/proc" */
    const char *sys;  /* "/sys" */
    const char *etc;  /* "/etc" */
};

/* What the tasks of this machine need; without a configuration the defaults. */
struct tl_doctor_needs {
    bool is_rdma_required; /* a task does not start without an RDMA card */
    bool is_rdma_refused;  /* no task wants one */
    uint64_t connections;  /* limits.connections */
    size_t peer_count;     /* other tasks of the cluster */
    uint64_t pool_bytes;   /* one piece of verbs.pool */
    uint32_t queue_depth;  /* verbs.queue_depth; 0: the default */
};

/* The versions of tensorlane, its protocols and the kernel. */
void tl_doctor_check_versions(struct tl_doctor_report *report, const struct tl_doctor_roots *roots);

/* The limit of locked memory; lock_error is what tl_verbs_check_memlock says of it. UINT64_MAX: there is no limit. */
void tl_doctor_check_memlock(struct tl_doctor_report *report, const struct tl_doctor_needs *needs, uint64_t limit_bytes,
                             const struct tl_error *lock_error);

/* The hard limit of open files, to which `serve` raises its own. UINT64_MAX: there is no limit. */
void tl_doctor_check_nofile(struct tl_doctor_report *report, const struct tl_doctor_needs *needs, uint64_t limit);

/* The modules for RDMA and cards that lack theirs. */
void tl_doctor_check_modules(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                             const struct tl_doctor_needs *needs);

void tl_doctor_check_huge_pages(struct tl_doctor_report *report, const struct tl_doctor_roots *roots);
void tl_doctor_check_numa(struct tl_doctor_report *report, const struct tl_doctor_roots *roots);

/* Whether processes may read each other's memory, which the transport within a host uses. */
void tl_doctor_check_tracing(struct tl_doctor_report *report, const struct tl_doctor_roots *roots);

/* Whether the messages of the kernel can be read. */
void tl_doctor_check_kernel_log(struct tl_doctor_report *report, const struct tl_doctor_roots *roots, bool is_root);

/* ------------------------------------------------------------------------------------------- files of the kernel -- */

/* Reads the first line of root/path, without its end. False: there is no such file. */
bool tl_doctor_read_line(char *ret_line, size_t capacity, const char *root, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Whether root/path exists. */
bool tl_doctor_has_path(const char *root, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
