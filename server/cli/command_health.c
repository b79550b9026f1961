// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane health`: with an address a drop-in for grpc_health_probe, with --config the state of a whole cluster.
 *
 * Its flags may be written with one dash or two, and its exit codes are those of grpc_health_probe, so that it can
 * stand in a container's probe instead of it.
 */
#include "server/cli/health.h"

#include <stdio.h>
#include <string.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/clock.h"
#include "server/cli/command.h"
#include "server/cli/options.h"
#include "server/cli/output.h"

#define DEFAULT_INTERVAL_NS (2 * TL_NS_PER_SEC)

static const char no_alts[] =
    "ALTS works on Google's machines only, and this program does not have it; use -tls, or nothing";
static const char no_spiffe[] =
    "this program does not speak with a SPIFFE agent; give it what the agent writes to files, "
    "with -tls -tls-ca-cert -tls-client-cert -tls-client-key";

/* Checks what goes together and runs the right half. */
static int dispatch(struct tl_health_flags *flags, const struct tl_options *options, int argc, char **argv)
{
    if (argc > 1) return tl_options_refuse(options, "%s: one address at a time", argv[1]);
    if (argc == 1 && flags->address) return tl_options_refuse(options, "%s: the address is given twice", argv[0]);
    if (argc == 1) flags->address = argv[0];
    if (flags->address && flags->config_path)
        return tl_options_refuse(options, "either an address or --config, not both");
    if (flags->config_path) {
        if (flags->service[0]) return tl_options_refuse(options, "--service belongs to an address, not to --config");
        if (tl_probe_flags_are_used(&flags->probe))
            return tl_options_refuse(options, "--rpc-header, --gzip and --tls belong to an address, not to --config");
        return tl_health_cluster(flags);
    }
    if (flags->is_json || flags->is_watching || flags->has_pairs || flags->has_incarnations || flags->is_local ||
        flags->is_quick)
        return tl_options_refuse(options,
                                 "--json, --watch, --pairs, --incarnations, --quick and --local belong to --config");
    if (!flags->address || !flags->address[0])
        return tl_options_refuse(options, "whose health? -addr HOST:PORT or --config FILE");
    int code = tl_probe_flags_check(&flags->probe, options);
    return code >= 0 ? code : tl_health_probe(flags);
}

int tl_command_health(int argc, char **argv)
{
    struct tl_health_flags flags = {.service = "", .interval_ns = DEFAULT_INTERVAL_NS};
    bool wants_version = false;
    int first;
    const struct tl_option items[] = {
        {"addr", 0, TL_OPTION_TEXT, &flags.address, "HOST:PORT", "the server to ask"},
        {"service", 0, TL_OPTION_TEXT, &flags.service, "NAME", "the service to ask about (the whole server)"},
        {"connect-timeout", 0, TL_OPTION_DURATION, &flags.connect_timeout_ns, "DURATION",
         "for connecting (1s; with -config 5s)"},
        {"rpc-timeout", 0, TL_OPTION_DURATION, &flags.rpc_timeout_ns, "DURATION",
         "for the answer (1s; with -config 5s)"},
        {"user-agent", 0, TL_OPTION_TEXT, &flags.user_agent, "TEXT", "user agent to send (grpc_health_probe)"},
        {"v", 0, TL_OPTION_FLAG, &flags.is_verbose, NULL, "print each step to stderr"},
        {"version", 0, TL_OPTION_FLAG, &wants_version, NULL, "print the version"},
        {"config", 'c', TL_OPTION_TEXT, &flags.config_path, "FILE", "ask all workers of this cluster"},
        {"json", 0, TL_OPTION_FLAG, &flags.is_json, NULL, "with -config: print one JSON object"},
        {"pairs", 0, TL_OPTION_FLAG, &flags.has_pairs, NULL, "with -config: also how every worker sees every other"},
        {"incarnations", 0, TL_OPTION_FLAG, &flags.has_incarnations, NULL,
         "with -config: also the incarnation of every worker"},
        {"quick", 0, TL_OPTION_FLAG, &flags.is_quick, NULL, "with -config: workers do not probe each other"},
        {"local", 0, TL_OPTION_FLAG, &flags.is_local, NULL, "with -config: this is the machine of all workers"},
        {"watch", 0, TL_OPTION_FLAG, &flags.is_watching, NULL, "with -config: repeat until interrupted"},
        {"interval", 0, TL_OPTION_DURATION, &flags.interval_ns, "DURATION",
         "with -watch: pause between two rounds (2s)"},
        {"rpc-header", 0, TL_OPTION_TEXTS, &flags.probe.headers, "'NAME: VALUE'", "header to send; may be repeated"},
        {"gzip", 0, TL_OPTION_FLAG, &flags.probe.is_gzip, NULL, "compress the request, take a compressed answer"},
        {"tls", 0, TL_OPTION_FLAG, &flags.probe.has_tls, NULL, "use TLS"},
        {"tls-ca-cert", 0, TL_OPTION_TEXT, &flags.probe.ca_path, "FILE", "trusted authorities (those of the system)"},
        {"tls-client-cert", 0, TL_OPTION_TEXT, &flags.probe.cert_path, "FILE", "our certificate"},
        {"tls-client-key", 0, TL_OPTION_TEXT, &flags.probe.key_path, "FILE", "its key"},
        {"tls-server-name", 0, TL_OPTION_TEXT, &flags.probe.server_name, "NAME",
         "name in the server's certificate (the host)"},
        {"tls-no-verify", 0, TL_OPTION_FLAG, &flags.probe.is_unverified, NULL, "accept any certificate of the server"},
        {"alts", 0, TL_OPTION_REFUSED, NULL, no_alts, ""},
        {"spiffe", 0, TL_OPTION_REFUSED, NULL, no_spiffe, ""},
    };
    const struct tl_options options = {
        .command = "health",
        .usage = "HOST:PORT\n-addr HOST:PORT [-service NAME]\n--config FILE [--json] [--pairs] [--incarnations] "
                 "[--quick] [--local]\n--config FILE --watch [--interval DURATION]",
        .description = "Asks one gRPC server for its health, as grpc_health_probe does, or all workers of a cluster.\n"
                       "Exit codes: 0 healthy, 1 usage or configuration, 2 not connected, 3 call failed, 4 unhealthy.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .is_single_dash = true,
        .usage_exit = TL_HEALTH_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code < 0 && wants_version) {
        printf("%s\n", tl_version());
        code = tl_output_finish("health", TL_HEALTH_EXIT_OK);
    }
    if (code < 0) code = dispatch(&flags, &options, argc - first, argv + first);
    tl_texts_fini(&flags.probe.headers);
    return code;
}
