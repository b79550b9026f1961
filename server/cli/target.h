// SPDX-License-Identifier: Apache-2.0
/*
 * The worker that ls, pull, push and rm talk to: a task of a cluster (--config C --from /job:ps/task:0) or whatever
 * listens at an address (--address HOST:PORT), with certificates where it wants them (--tls-ca-cert and so on).
 */
#ifndef SERVER_CLI_TARGET_H
#define SERVER_CLI_TARGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/worker.h>

#include "config/config.h"
#include "control/client.h"
#include "server/cli/options.h"

struct tl_target {
    /* The flags. */
    const char *config_path;
    const char *task_name;
    const char *given_address;
    const char *ca_path, *certificate_path, *key_path; /* with given_address: all three, or none */
    int64_t timeout_ns;
    const char *protocol; /* for a client, instead of the configuration's; NULL: that, or auto */
    /* Known after tl_target_resolve. */
    char name[TL_MAX_NAME_BYTES]; /* "" with --address, until tl_target_identify, or for ever */
    char address[TL_MAX_ADDRESS_BYTES];
    struct tl_config *config; /* with --address what the flags say of TLS; NULL: nothing */
};

/* What a target is before its flags are read. */
#define TL_TARGET_INIT                                                                                                 \
    {                                                                                                                  \
        .timeout_ns = INT64_C(60000000000)                                                                             \
    }

/* The flags of a target, for a command's table; preposition is "from" or "to". */
#define TL_TARGET_OPTIONS(target, preposition)                                                                         \
    {"config",       'c',                                                                                              \
     TL_OPTION_TEXT, &(target)->config_path,                                                                           \
     "FILE",         "the cluster's JSON file, - for standard input; without it TF_CONFIG"},                           \
        {preposition, 0, TL_OPTION_TEXT, &(target)->task_name, "TASK", "the worker, as /job:ps/task:0 or ps:0"},       \
        {"address", 'a', TL_OPTION_TEXT, &(target)->given_address, "HOST:PORT", "the worker, without a cluster"},      \
        {"tls-ca-cert", 0, TL_OPTION_TEXT, &(target)->ca_path, "FILE", "trusted authorities, with --address"},         \
        {"tls-client-cert", 0, TL_OPTION_TEXT, &(target)->certificate_path, "FILE", "our certificate, likewise"},      \
        {"tls-client-key", 0, TL_OPTION_TEXT, &(target)->key_path, "FILE", "its key, likewise"},                       \
    {                                                                                                                  \
        "timeout", 0, TL_OPTION_DURATION, &(target)->timeout_ns, "DURATION",                                           \
            "give up when nothing has moved for that long (60s)"                                                       \
    }

/* Finds name and address. Returns -1, or the exit code after a line on stderr. Ownership: tl_target_fini, also then. */
int tl_target_resolve(struct tl_target *target, const struct tl_options *options);

/* How to call the target: the longest part of the time-out that finding and connecting may take is 10 s. */
struct tl_call_options tl_target_call_options(const struct tl_target *target);

/* Asks the process at the target's address who it is, so that nothing is read from, or done to, another worker than the
 * one that was meant. With --address its name is learnt, unless security.allow does not let the caller see peers.
 * Errors: of tl_client_identify. TL_FAILED_PRECONDITION: it is another task, a client, or of another protocol version.
 */
enum tl_status tl_target_identify(struct tl_target *target, struct tl_error *ret_error) TL_MUST_USE;

/* What is wrong with the target will not pass by itself, so that waiting for it makes no sense. */
bool tl_target_is_hopeless(enum tl_status code);

/* Opens a client that is no member of a cluster and finds the target, whose name is known, among its peers. Its
 * tensors travel as the configuration's top level says.
 * Errors: of tl_worker_open and tl_worker_find_peer. Ownership: *ret_worker until tl_worker_close. */
enum tl_status tl_target_open_client(struct tl_target *target, struct tl_worker **ret_worker, tl_peer_id *ret_peer,
                                     struct tl_error *ret_error) TL_MUST_USE;

void tl_target_fini(struct tl_target *target);

/* "/job:ps/task:0 at 10.0.0.1:4000", for messages; returns buffer. */
char *tl_target_describe(const struct tl_target *target, char *buffer, size_t capacity);
#define TL_TARGET_TEXT_BYTES (TL_MAX_NAME_BYTES + TL_MAX_ADDRESS_BYTES + 8)

#endif
