// SPDX-License-Identifier: Apache-2.0
/* `tensorlane rm`: ends publications by pattern. Transfers that run finish. Fails when a pattern matches nothing; the
 * other patterns have been carried out then. */
#include <inttypes.h>
#include <stdio.h>

#include "base/check.h"
#include "control/client.h"
#include "control/control.h"
#include "server/cli/command.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/published.h"
#include "server/cli/target.h"

/* Says what the pattern was perhaps meant to be. */
static void report_unmatched(const struct tl_call_options *call, const char *pattern)
{
    struct tl_listing listing = {0};
    struct tl_error error;
    if (tl_client_list(call, "", &listing, NULL, &error) == TL_OK) {
        tl_published_not_found(&listing, pattern, &error);
        tl_listing_fini(&listing);
    }
    tl_output_error("rm", "%s", error.message);
}

static int withdraw(struct tl_target *target, char **patterns, size_t pattern_count, bool is_json)
{
    const struct tl_call_options call = tl_target_call_options(target);
    uint64_t total = 0;
    int code = TL_EXIT_OK;
    struct tl_error error;
    if (tl_target_identify(target, &error) != TL_OK) {
        tl_output_error("rm", "%s", error.message);
        pattern_count = 0;
        code = TL_EXIT_FAILED;
    }
    for (size_t i = 0; i < pattern_count; i++) {
        uint64_t count = 0;
        if (tl_client_withdraw(&call, patterns[i], &count, NULL, &error) != TL_OK) {
            tl_output_error("rm", "%s", error.message);
            code = TL_EXIT_FAILED;
            break;
        }
        if (count == 0) {
            report_unmatched(&call, patterns[i]);
            code = TL_EXIT_FAILED;
        }
        total += count;
    }
    if (is_json) {
        struct tl_json_out *root = tl_json_out_object();
        tl_json_out_put_text(root, "address", target->address);
        tl_json_out_put_u64(root, "withdrawn", total);
        if (!tl_json_out_print(root, false)) code = TL_EXIT_FAILED;
    } else if (total > 0) {
        printf("withdrew %" PRIu64 " tensor%s\n", total, total == 1 ? "" : "s");
    }
    return tl_output_finish("rm", code);
}

int tl_command_rm(int argc, char **argv)
{
    struct tl_target target = TL_TARGET_INIT;
    bool is_json = false;
    int first;
    const struct tl_option items[] = {
        TL_TARGET_OPTIONS(&target, "from"),
        {"json", 0, TL_OPTION_FLAG, &is_json, NULL, "print one JSON object"},
    };
    const struct tl_options options = {
        .command = "rm",
        .usage = "PATTERN... --config FILE --from TASK\nPATTERN... --address HOST:PORT",
        .description = "Withdraws what a worker publishes and what matches a shell pattern. Quote the pattern.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code >= 0) return code;
    if (first == argc) return tl_options_refuse(&options, "which tensors? '*' is all of them");
    code = tl_target_resolve(&target, &options);
    if (code < 0) code = withdraw(&target, argv + first, (size_t)(argc - first), is_json);
    tl_target_fini(&target);
    return code;
}
