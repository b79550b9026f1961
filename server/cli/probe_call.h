// SPDX-License-Identifier: Apache-2.0
/* What the call of `tensorlane health` to one address carries besides the question: headers, compression, TLS. The
 * flags are those of grpc_health_probe, and so is what they may be combined with. */
#ifndef SERVER_CLI_PROBE_CALL_H
#define SERVER_CLI_PROBE_CALL_H

#include <stdbool.h>

#include "control/client.h"
#include "server/cli/options.h"

struct tl_probe_flags {
    struct tl_texts headers; /* each "name: value" */
    bool is_gzip;
    bool has_tls;
    bool is_unverified;
    const char *ca_path;   /* NULL: the authorities that the system trusts */
    const char *cert_path; /* NULL exactly when key_path is */
    const char *key_path;
    const char *server_name; /* NULL: the address's host */
};

/* Checks what goes together. Returns -1, or the exit code after a line on stderr. */
int tl_probe_flags_check(const struct tl_probe_flags *flags, const struct tl_options *options);

/* True when one of them was given. */
bool tl_probe_flags_are_used(const struct tl_probe_flags *flags);

struct tl_probe_call {
    struct tl_call_header *headers; /* names and values: one text each, with the value behind the name's end */
    size_t header_count;
    struct tl_call_tls tls;
    char *root_certs, *cert_chain, *private_key;
};

/* Takes the headers apart, reads the files and writes the result into *options, which uses what is in *call.
 * Errors: TL_INVALID_ARGUMENT: a header without colon, or a file without what it should have. TL_RESOURCE_EXHAUSTED: no
 * memory. As tl_error_set_errno: a file cannot be read. Ownership: tl_probe_call_fini, also after an error. */
enum tl_status tl_probe_call_init(struct tl_probe_call *call, const struct tl_probe_flags *flags,
                                  struct tl_call_options *options, struct tl_error *ret_error) TL_MUST_USE;
void tl_probe_call_fini(struct tl_probe_call *call);

#endif
