// SPDX-License-Identifier: Apache-2.0
/* The parts of `tensorlane cert`. */
#ifndef SERVER_CLI_CERT_H
#define SERVER_CLI_CERT_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "server/cli/options.h"

struct tl_cert_flags {
    const char *folder;       /* has the authority and what it issues */
    const char *trust_domain; /* a new authority is for this one */
    const char *config_path;  /* NULL: TF_CONFIG, or none where there are names */
    struct tl_texts names;
    struct tl_texts hosts;
    uint32_t days;
    bool replaces; /* files that are there already */
    bool is_json;
};

/* Issues a certificate for each of flags->names, or without them for each task of the configuration and one for a
 * client, and prints their files. Errors: of tl_authority_open, tl_authority_issue and the functions that read a
 * configuration. TL_INVALID_ARGUMENT: a name is none, or two have the same file. TL_CANCELLED: a signal came
 * (interrupt.h); what was printed is issued, and nothing of the rest is there. */
enum tl_status tl_cert_issue(const struct tl_cert_flags *flags, struct tl_error *ret_error) TL_MUST_USE;

/* Prints what a file with a certificate says. Warnings go to stderr. Errors: of tl_certificate_facts_read.
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_cert_show(const char *path, bool is_json, struct tl_error *ret_error) TL_MUST_USE;

#endif
