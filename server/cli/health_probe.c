// SPDX-License-Identifier: Apache-2.0
/*
 * One server's health, as grpc_health_probe asks for it: connect, call grpc.health.v1.Health/Check, print
 * "status: SERVING". Works with any gRPC server that has the service.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/text.h"
#include "control/client.h"
#include "control/control.h"
#include "server/cli/command.h"
#include "server/cli/health.h"
#include "server/cli/output.h"

#define DEFAULT_TIMEOUT_NS TL_NS_PER_SEC

static const char *health_name(int health)
{
    static const char *const names[] = {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"};
    return health >= 0 && (size_t)health < TL_ARRAY_COUNT(names) ? names[health] : "an unknown status";
}

static void print_options(const struct tl_health_flags *flags, const struct tl_call_options *call)
{
    char connect[32], rpc[32];
    fprintf(stderr, "asking ");
    tl_output_put_escaped(stderr, call->address);
    fprintf(stderr, " for service \"");
    tl_output_put_escaped(stderr, flags->service);
    fprintf(stderr, "\", connect time-out %s, rpc time-out %s\n",
            tl_text_format_duration(call->connect_timeout_ns, connect, sizeof(connect)),
            tl_text_format_duration(call->rpc_timeout_ns, rpc, sizeof(rpc)));
}

/* Not what the headers say: it may be a secret. */
static void print_extras(const struct tl_call_options *call)
{
    for (size_t i = 0; i < call->header_count; i++) {
        fprintf(stderr, "with header ");
        tl_output_put_escaped(stderr, call->headers[i].name);
        fputc('\n', stderr);
    }
    if (call->is_gzip) fprintf(stderr, "with gzip\n");
    if (!call->tls) return;
    fprintf(stderr, "with TLS, %s, %s a certificate of ours, for the server ",
            call->tls->is_unverified ? "whatever the server's certificate"
            : call->tls->root_certs  ? "trusting the authorities given"
                                     : "trusting the system's authorities",
            call->tls->cert_chain ? "with" : "without");
    tl_output_put_escaped(stderr, call->tls->server_name ? call->tls->server_name : call->address);
    fputc('\n', stderr);
}

/* The call failed: says why, as grpc_health_probe does, and returns its exit code. */
static int report_failure(const struct tl_call_options *call, enum tl_call_stage stage, const struct tl_error *error)
{
    char timeout[32];
    if (stage == TL_CALL_OPTIONS) {
        tl_output_error("health", "%s", error->message);
        return TL_HEALTH_EXIT_USAGE;
    }
    if (stage < TL_CALL_RPC) {
        tl_output_error("health", "failed to connect service \"%s\" within %s: %s", call->address,
                        tl_text_format_duration(call->connect_timeout_ns, timeout, sizeof(timeout)), error->message);
        return TL_HEALTH_EXIT_CONNECT;
    }
    if (error->code == TL_UNIMPLEMENTED && call->is_gzip) {
        tl_output_error("health",
                        "health rpc failed: UNIMPLEMENTED: %s; a server that takes no compressed messages needs the "
                        "probe without -gzip",
                        error->message);
    } else if (error->code == TL_UNIMPLEMENTED) {
        tl_output_error("health", "this server does not implement the grpc health protocol (grpc.health.v1.Health): %s",
                        error->message);
    } else if (error->code == TL_DEADLINE_EXCEEDED) {
        tl_output_error("health", "timeout: health rpc did not complete within %s",
                        tl_text_format_duration(call->rpc_timeout_ns, timeout, sizeof(timeout)));
    } else {
        tl_output_error("health", "health rpc failed: %s: %s", tl_status_name(error->code), error->message);
    }
    return TL_HEALTH_EXIT_RPC;
}

/* Asks and says what came of it. */
static int probe(const struct tl_health_flags *flags, const struct tl_call_options *call)
{
    enum tl_call_stage stage = TL_CALL_OPTIONS;
    struct tl_error error;
    char duration[32];
    int health = TL_HEALTH_UNKNOWN;
    if (flags->is_verbose) {
        print_options(flags, call);
        print_extras(call);
    }
    int64_t start_ns = tl_clock_now_ns();
    enum tl_status status = tl_client_check_health(call, flags->service, &health, &stage, &error);
    if (flags->is_verbose)
        fprintf(stderr, "time elapsed: %s\n",
                tl_text_format_duration(tl_clock_now_ns() - start_ns, duration, sizeof(duration)));
    if (status != TL_OK) return report_failure(call, stage, &error);
    if (health != TL_HEALTH_SERVING) {
        tl_output_error("health", "service unhealthy (responded with \"%s\")", health_name(health));
        return TL_HEALTH_EXIT_UNHEALTHY;
    }
    printf("status: %s\n", health_name(health));
    return tl_output_finish("health", TL_HEALTH_EXIT_OK);
}

int tl_health_probe(const struct tl_health_flags *flags)
{
    char local[TL_MAX_ADDRESS_BYTES];
    const char *address = flags->address;
    if (address[0] == ':' && strlen("localhost") + strlen(address) < sizeof(local)) { /* as in Go's net.Dial */
        snprintf(local, sizeof(local), "localhost%s", address);
        address = local;
    }
    struct tl_call_options options = {
        .address = address,
        .connect_timeout_ns = flags->connect_timeout_ns > 0 ? flags->connect_timeout_ns : DEFAULT_TIMEOUT_NS,
        .rpc_timeout_ns = flags->rpc_timeout_ns > 0 ? flags->rpc_timeout_ns : DEFAULT_TIMEOUT_NS,
        .user_agent = flags->user_agent ? flags->user_agent : "grpc_health_probe",
    };
    struct tl_probe_call call;
    struct tl_error error;
    int code = TL_HEALTH_EXIT_USAGE;
    if (tl_probe_call_init(&call, &flags->probe, &options, &error) == TL_OK) {
        code = probe(flags, &options);
    } else {
        tl_output_error("health", "%s", error.message);
    }
    tl_probe_call_fini(&call);
    if (flags->probe.has_tls) {
        /* gRPC's threads may be dialing once more, with a library for TLS that exit() takes apart under them. */
        fflush(NULL);
        _exit(code);
    }
    return code;
}
