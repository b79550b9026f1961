// SPDX-License-Identifier: Apache-2.0
/* `tensorlane cert`: makes a development authority, issues and revokes certificates, and shows what is in them. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/check.h"
#include "base/text.h"
#include "config/config.h"
#include "security/issue.h"
#include "server/cli/cert.h"
#include "server/cli/command.h"
#include "server/cli/interrupt.h"
#include "server/cli/options.h"
#include "server/cli/output.h"

#define CERT_DESCRIPTION                                                                                               \
    "init    makes an authority for development in a folder: ca.pem, ca.key and ca.crl\n"                              \
    "issue   makes NAME.pem and NAME.key for each task of a cluster and for its tools, or for some names\n"            \
    "show    prints what a certificate says and who its holder is for tensorlane\n"                                    \
    "revoke  adds certificates to ca.crl, the list of those that are refused"

#define CERT_USAGE                                                                                                     \
    "init [-o FOLDER] [--trust-domain DOMAIN]\n"                                                                       \
    "issue --config FILE [-o FOLDER]\n"                                                                                \
    "issue --name NAME... [--host HOST]... [-o FOLDER]\n"                                                              \
    "show FILE [--json]\n"                                                                                             \
    "revoke FILE... [-o FOLDER]"

static int report(enum tl_status status, const struct tl_error *error)
{
    if (status == TL_OK) return tl_output_finish("cert", TL_EXIT_OK);
    tl_output_error("cert", "%s", error->message);
    return tl_output_finish("cert", TL_EXIT_FAILED);
}

static int init(const struct tl_cert_flags *flags)
{
    struct tl_error error;
    enum tl_status status = tl_authority_create(flags->folder, flags->trust_domain, flags->replaces, &error);
    if (status == TL_OK) {
        tl_output_put_escaped(stdout, flags->folder);
        printf("/ca.pem: the authority of spiffe://%s\n", flags->trust_domain);
    }
    return report(status, &error);
}

static int issue(const struct tl_cert_flags *flags, const struct tl_options *options)
{
    struct tl_error error = {.code = TL_OK};
    if (flags->names.count == 0 && !flags->config_path && !tl_config_tf_text())
        return tl_options_refuse(options, "for which tasks? --config FILE or --name NAME");
    int code = report(tl_cert_issue(flags, &error), &error);
    if (error.code == TL_CANCELLED) tl_interrupt_die();
    return code;
}

static int show(const struct tl_cert_flags *flags, const struct tl_options *options, int count, char **paths)
{
    struct tl_error error = {.code = TL_OK};
    if (count != 1) return tl_options_refuse(options, "which file? one certificate in PEM");
    return report(tl_cert_show(paths[0], flags->is_json, &error), &error);
}

static int revoke(const struct tl_cert_flags *flags, const struct tl_options *options, int count, char **paths)
{
    struct tl_error error = {.code = TL_OK};
    struct tl_authority *authority = NULL;
    size_t new_count = 0;
    if (count == 0) return tl_options_refuse(options, "which files? the certificates to revoke");
    enum tl_status status = tl_authority_open(flags->folder, &authority, &error);
    if (status == TL_OK)
        status = tl_authority_revoke(authority, (const char *const *)paths, (size_t)count, &new_count, &error);
    tl_authority_destroy(authority);
    if (status == TL_OK) {
        tl_output_put_escaped(stdout, flags->folder);
        printf("/ca.crl: %zu certificate%s revoked\n", new_count, new_count == 1 ? "" : "s");
    }
    return report(status, &error);
}

static int refuse_action(const struct tl_options *options, const char *action)
{
    static const char *const actions[] = {"init", "issue", "show", "revoke"};
    const char *nearest = tl_text_nearest(action, actions, TL_ARRAY_COUNT(actions));
    if (nearest) return tl_options_refuse(options, "%s: no such action; did you mean %s?", action, nearest);
    return tl_options_refuse(options, "%s: no such action; there are init, issue, show and revoke", action);
}

static int run(const struct tl_cert_flags *flags, const struct tl_options *options, int count, char **arguments)
{
    if (count == 0) return tl_options_refuse(options, "init, issue, show or revoke?");
    const char *action = arguments[0];
    if (strcmp(action, "show") == 0) return show(flags, options, count - 1, arguments + 1);
    if (strcmp(action, "revoke") == 0) return revoke(flags, options, count - 1, arguments + 1);
    bool is_init = strcmp(action, "init") == 0;
    if (!is_init && strcmp(action, "issue") != 0) return refuse_action(options, action);
    if (count > 1) return tl_options_refuse(options, "unexpected argument %s", arguments[1]);
    return is_init ? init(flags) : issue(flags, options);
}

int tl_command_cert(int argc, char **argv)
{
    struct tl_cert_flags flags = {.folder = "certs", .trust_domain = "example.org", .days = 90};
    int first;
    const struct tl_option items[] = {
        {"folder", 'o', TL_OPTION_TEXT, &flags.folder, "FOLDER", "of the authority and what it issues (certs)"},
        {"trust-domain", 0, TL_OPTION_TEXT, &flags.trust_domain, "DOMAIN", "init: of all names (example.org)"},
        {"config", 'c', TL_OPTION_TEXT, &flags.config_path, "FILE", "issue: the cluster; without it TF_CONFIG"},
        {"name", 'n', TL_OPTION_TEXTS, &flags.names, "NAME", "issue: ps:0, ann or a spiffe:// URI; may be repeated"},
        {"host", 0, TL_OPTION_TEXTS, &flags.hosts, "HOST", "issue: a name or address of the host; may be repeated"},
        {"days", 0, TL_OPTION_U32, &flags.days, "N", "issue: how long it is valid (90)"},
        {"force", 0, TL_OPTION_FLAG, &flags.replaces, NULL, "init, issue: replace files that are there"},
        {"json", 0, TL_OPTION_FLAG, &flags.is_json, NULL, "show: print one JSON object"},
    };
    const struct tl_options options = {
        .command = "cert",
        .usage = CERT_USAGE,
        .description = CERT_DESCRIPTION,
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    /* Keys must not lie in a core file. */
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code < 0 && (flags.days == 0 || flags.days > TL_ISSUE_MAX_DAYS))
        code = tl_options_refuse(&options, "--days %u: not a number from 1 to %d", flags.days, TL_ISSUE_MAX_DAYS);
    if (code < 0) code = run(&flags, &options, argc - first, argv + first);
    tl_texts_fini(&flags.names);
    tl_texts_fini(&flags.hosts);
    return code;
}
