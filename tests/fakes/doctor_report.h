// SPDX-License-Identifier: Apache-2.0
/* For tests of `tensorlane doctor`: folders that stand for those of the kernel, and a report whose lines are compared.
 */
#ifndef FAKES_DOCTOR_REPORT_H
#define FAKES_DOCTOR_REPORT_H

#include "server/cli/doctor.h"

extern struct tl_doctor_report report;
extern struct tl_doctor_roots roots;

/* A checked fixture: an empty report, and empty folders. */
void make_roots(void);
void remove_roots(void);

/* Makes a file below the folder of the test and the folders in which it is: "sys/module/siw/refcnt". */
void make_file(const char *path, const char *content);

/* Compares the last line: what is exact, "" means empty, all other texts are parts. */
void check_last(enum tl_doctor_verdict verdict, const char *what, const char *value, const char *cause,
                const char *remedy);

#endif
