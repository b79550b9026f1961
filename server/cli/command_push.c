// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane push`: publishes the tensors of files on a running worker, which keeps them in its memory.
 *
 * All files are read and all names checked before the first byte is sent. The tensors then go one after the other; when
 * one fails, those before it stay published, and the error says how many they are.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "control/client.h"
#include "server/cli/command.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/progress.h"
#include "server/cli/target.h"
#include "server/cli/tensor_set.h"
#include "tensor/mapped_file.h"

#define CHUNK_BYTES (UINT64_C(1) << 20)

struct push {
    struct tl_target target;
    const char *prefix;
    uint64_t step;
    bool is_forced;
    bool is_json;
    bool is_quiet;
    struct tl_tensor_set set;
    bool has_set; /* all files were read, so that the set holds all tensors */
    struct tl_progress_bar progress;
    size_t pushed_count;
    uint64_t pushed_bytes;
    int64_t duration_ns;
};

static void add_progress(void *context, uint64_t bytes)
{
    struct push *push = context;
    push->pushed_bytes += bytes;
    tl_progress_bar_update(&push->progress, push->pushed_bytes, NULL);
}

static enum tl_status push_all(struct push *push, struct tl_error *ret_error)
{
    const struct tl_call_options call = tl_target_call_options(&push->target);
    int64_t start_ns = tl_clock_now_ns();
    push->progress = (struct tl_progress_bar){
        .verb = "pushed", .total_bytes = tl_tensor_set_bytes(&push->set), .is_quiet = push->is_quiet || push->is_json};
    tl_progress_bar_start(&push->progress);
    enum tl_status status = TL_OK;
    for (size_t i = 0; status == TL_OK && i < push->set.count; i++) {
        const struct tl_set_item *item = &push->set.items[i];
        status = tl_client_publish(&call, item->key, push->step, push->is_forced, item->tensor, CHUNK_BYTES,
                                   add_progress, push, NULL, ret_error);
        if (status == TL_OK) {
            push->pushed_count++;
        } else if (ret_error) {
            tl_error_prefix(ret_error, "tensor '%s' (%zu of %zu were published before it): ", item->key,
                            push->pushed_count, push->set.count);
        }
    }
    tl_progress_bar_end(&push->progress);
    push->duration_ns = tl_clock_now_ns() - start_ns;
    return status;
}

static bool print_json(const struct push *push, const struct tl_error *error)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "address", push->target.address);
    tl_json_out_put_u64(root, "tensors", push->pushed_count);
    tl_json_out_put_u64(root, "bytes", push->pushed_bytes);
    tl_json_out_put_u64(root, "step", push->step);
    tl_json_out_put_real(root, "seconds", (double)push->duration_ns / (double)TL_NS_PER_SEC);
    if (push->has_set) {
        tl_json_out_put_u64(root, "failed", push->set.count - push->pushed_count);
    } else {
        tl_json_out_put_json(root, "failed", "null");
    }
    if (error->code != TL_OK) tl_json_out_put_text(root, "error", error->message);
    return tl_json_out_print(root, false);
}

static void print_summary(const struct push *push)
{
    char size[32], duration[32], rate[32], target[TL_TARGET_TEXT_BYTES];
    double seconds = (double)(push->duration_ns > 0 ? push->duration_ns : 1) / (double)TL_NS_PER_SEC;
    printf("pushed %zu tensor%s, %s in %s (%s/s) to ", push->pushed_count, push->pushed_count == 1 ? "" : "s",
           tl_text_format_size(push->pushed_bytes, size, sizeof(size)),
           tl_text_format_duration(push->duration_ns, duration, sizeof(duration)),
           tl_text_format_size((uint64_t)((double)push->pushed_bytes / seconds), rate, sizeof(rate)));
    tl_output_put_escaped(stdout, tl_target_describe(&push->target, target, sizeof(target)));
    putchar('\n');
}

/* What a file has that cannot be published is named by a warning in the log. */
static enum tl_status read_files(struct push *push, char **paths, size_t path_count, struct tl_error *ret_error)
{
    if (!push->is_quiet) tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    enum tl_status status =
        tl_tensor_set_read(&push->set, (const char *const *)paths, path_count, push->prefix, ret_error);
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    return status;
}

static int run(struct push *push, char **paths, size_t path_count)
{
    struct tl_error error = {.code = TL_OK};
    enum tl_status status = tl_guard_mapped_files(&error);
    if (status == TL_OK) status = read_files(push, paths, path_count, &error);
    push->has_set = status == TL_OK;
    if (status == TL_OK) status = tl_target_identify(&push->target, &error);
    if (status == TL_OK) status = push_all(push, &error);
    int code = status == TL_OK ? TL_EXIT_OK : TL_EXIT_FAILED;
    if (status != TL_OK) tl_output_error("push", "%s", error.message);
    if (push->is_json) {
        if (!print_json(push, &error)) code = TL_EXIT_FAILED;
    } else if (status == TL_OK && !push->is_quiet) {
        print_summary(push);
    }
    tl_tensor_set_fini(&push->set);
    return tl_output_finish("push", code);
}

int tl_command_push(int argc, char **argv)
{
    struct push push = {.target = TL_TARGET_INIT, .prefix = ""};
    int first;
    const struct tl_option items[] = {
        TL_TARGET_OPTIONS(&push.target, "to"),
        {"step", 0, TL_OPTION_U64, &push.step, "N", "version of the tensors (0)"},
        {"force", 'f', TL_OPTION_FLAG, &push.is_forced, NULL, "replace tensors of a later step, too"},
        {"prefix", 0, TL_OPTION_TEXT, &push.prefix, "TEXT", "put before every name"},
        {"json", 0, TL_OPTION_FLAG, &push.is_json, NULL, "print one JSON object"},
        {"quiet", 'q', TL_OPTION_FLAG, &push.is_quiet, NULL, "print errors only"},
    };
    const struct tl_options options = {
        .command = "push",
        .usage = "FILE... --config FILE --to TASK\nFILE... --address HOST:PORT",
        .description =
            "Publishes the tensors of safetensors and .npy files on a running worker, under their own names,\n"
            "replacing what was published under them, unless that has a later step.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code >= 0) return code;
    if (first == argc) return tl_options_refuse(&options, "which files?");
    code = tl_target_resolve(&push.target, &options);
    if (code < 0) code = run(&push, argv + first, (size_t)(argc - first));
    tl_target_fini(&push.target);
    return code;
}
