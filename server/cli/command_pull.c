// SPDX-License-Identifier: Apache-2.0
/*
 * `tensorlane pull`: receives what a worker publishes into a file.
 *
 * Happy path: list what is published, choose by patterns, make the file beside its final name and map it, receive every
 * tensor straight into its place, check each by a checksum, compare with another file when asked, make the file
 * durable, rename it. With --device each tensor is received into memory of a GPU and copied into its place from there.
 *
 * Failure modes: whatever fails before the rename leaves nothing behind, also a signal. A tensor that is replaced by
 * one of another shape between the listing and its transfer does not fit its place: then everything is done again,
 * once.
 */
#include "server/cli/pull.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "config/device_name.h"
#include "control/client.h"
#include "control/control.h"
#include "server/cli/command.h"
#include "server/cli/interrupt.h"
#include "server/cli/output.h"
#include "server/cli/published.h"
#include "tensor/mapped_file.h"
#include "tensor/tensor_file.h"

/* Gives back everything that an attempt has; what was not committed disappears. */
static void clear_attempt(struct tl_pull *pull)
{
    for (size_t i = 0; pull->items && i < pull->listing.count; i++)
        tl_tensor_put(pull->items[i].destination);
    free(pull->items);
    pull->items = NULL;
    tl_tensor_writer_destroy(pull->writer);
    pull->writer = NULL;
    tl_listing_fini(&pull->listing);
    pull->listing = (struct tl_listing){0};
    tl_annotations_put(pull->annotations);
    pull->annotations = NULL;
    pull->total_bytes = 0;
    pull->received_count = 0;
    pull->received_bytes = 0;
    pull->mismatched_count = 0;
    pull->unmatched_count = 0;
    pull->is_misfit = false;
}

static enum tl_status choose(struct tl_pull *pull, struct tl_error *ret_error)
{
    const struct tl_call_options call = tl_target_call_options(&pull->target);
    enum tl_status status = tl_target_identify(&pull->target, ret_error);
    if (status != TL_OK) return status;
    status = tl_client_list(&call, "", &pull->listing, NULL, ret_error);
    if (status != TL_OK) return status;
    status = tl_published_select(&pull->listing, pull->patterns, pull->pattern_count, pull->excluded.items,
                                 pull->excluded.count, &pull->unmatched_count, ret_error);
    if (status != TL_OK) return status;
    if (pull->listing.count == 0)
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: %s", pull->target.address,
                            pull->excluded.count > 0 ? "every tensor is excluded" : "nothing is published");
    for (size_t i = 0; i < pull->listing.count; i++)
        pull->total_bytes += pull->listing.items[i].meta_data.size_bytes;
    return TL_OK;
}

/* What the format cannot hold is refused with what to do instead. */
static enum tl_status check_storable(const struct tl_pull *pull, struct tl_error *ret_error)
{
    if (pull->is_npy_file && pull->listing.count > 1)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s is a file for one tensor, and %zu were chosen; name one of them, or write a folder of "
                            "npy files (-o FOLDER/) or a safetensors file",
                            pull->output, pull->listing.count);
    for (size_t i = 0; i < pull->listing.count; i++) {
        const struct tl_listed *item = &pull->listing.items[i];
        if (!item->meta_data.is_dead && tl_dtype_is_plain(item->meta_data.dtype)) continue;
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "tensor '%s' %s, which no file of tensors can hold; leave it out with --exclude '%s'",
                            item->key, item->meta_data.is_dead ? "is dead" : "consists of strings", item->key);
    }
    return TL_OK;
}

static bool is_interrupted(void *context)
{
    (void)context;
    return tl_interrupt_is_set();
}

static enum tl_status create_writer(struct tl_pull *pull, struct tl_error *ret_error)
{
    const struct tl_writer_stop stop = {.is_wanted = is_interrupted};
    size_t count = pull->listing.count;
    struct tl_tensor_slot *slots = calloc(count, sizeof(*slots));
    pull->items = calloc(count, sizeof(*pull->items));
    if (!slots || !pull->items) {
        free(slots);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a list of %zu tensors", count);
    }
    for (size_t i = 0; i < count; i++) {
        pull->items[i].listed = &pull->listing.items[i];
        slots[i].name = pull->listing.items[i].key;
        slots[i].meta_data = pull->listing.items[i].meta_data;
    }
    enum tl_status status;
    if (pull->is_npy_file)
        status = tl_npy_file_writer_create(pull->output, slots, &stop, &pull->writer, ret_error);
    else if (pull->is_npy)
        status = tl_npy_writer_create(pull->output, slots, count, &stop, &pull->writer, ret_error);
    else
        status = tl_safetensors_writer_create(pull->output, slots, count, pull->annotations, &stop, &pull->writer,
                                              ret_error);
    free(slots);
    for (size_t i = 0; status == TL_OK && i < count; i++)
        pull->items[i].destination = tl_tensor_writer_destination(pull->writer, i);
    return status;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
/* What is smaller is received in no time, */
#define MIN_PREPARED_BYTES (UINT64_C(16) << 20)
/* and of more than this the system would begin to write what has not been received yet. */
#define MAX_PREPARED_BYTES (UINT64_C(1) << 30)

/* Allocates the pages of the output in advance, so that copying into them does not wait for the kernel. Kernels before
 * 5.14 cannot do that. */
static void prepare_pages(struct tl_pull *pull)
{
    const uintptr_t page_mask = (uintptr_t)sysconf(_SC_PAGESIZE) - 1;
    int64_t start_ns = tl_clock_now_ns();
    if (pull->total_bytes < MIN_PREPARED_BYTES || pull->total_bytes > MAX_PREPARED_BYTES) return;
    for (size_t i = 0; i < pull->listing.count; i++) {
        struct tl_tensor *destination = pull->items[i].destination;
        uintptr_t begin = (uintptr_t)tl_tensor_data(destination) & ~page_mask;
        uintptr_t end = (uintptr_t)tl_tensor_data(destination) + tl_tensor_size_bytes(destination);
        if (begin != 0 && !tl_interrupt_is_set()) (void)madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
    }
    pull->prepare_ns = tl_clock_now_ns() - start_ns;
}

static enum tl_status commit(struct tl_pull *pull, struct tl_error *ret_error)
{
    int64_t start_ns = tl_clock_now_ns();
    if (tl_interrupt_is_set()) return tl_error_set(ret_error, TL_CANCELLED, "interrupted");
    for (size_t i = 0; i < pull->listing.count; i++) {
        tl_tensor_put(pull->items[i].destination);
        pull->items[i].destination = NULL;
    }
    enum tl_status status = tl_tensor_writer_commit(pull->writer, ret_error);
    pull->commit_ns = pull->prepare_ns + tl_clock_now_ns() - start_ns;
    return status;
}

static enum tl_status attempt(struct tl_pull *pull, struct tl_error *ret_error)
{
    char text[TL_TARGET_TEXT_BYTES + 64], target[TL_TARGET_TEXT_BYTES];
    pull->bar = (struct tl_progress_bar){.verb = "pulled", .is_quiet = pull->is_quiet || pull->is_json};
    snprintf(text, sizeof(text), "asking %s what it publishes",
             tl_target_describe(&pull->target, target, sizeof(target)));
    tl_progress_bar_print(&pull->bar, text);
    enum tl_status status = choose(pull, ret_error);
    pull->bar.total_bytes = pull->total_bytes;
    if (status == TL_OK) status = check_storable(pull, ret_error);
    if (status == TL_OK && !pull->is_npy) status = tl_pull_merge_annotations(pull, ret_error);
    if (status != TL_OK) return status;
    /* From here on there is something to remove. */
    tl_interrupt_catch();
    tl_progress_bar_start(&pull->bar);
    status = create_writer(pull, ret_error);
    if (status == TL_OK) prepare_pages(pull);
    if (status == TL_OK) status = tl_pull_receive(pull, ret_error);
    if (status == TL_OK && pull->compare_path) status = tl_pull_compare(pull, ret_error);
    if (status == TL_OK) tl_progress_bar_print(&pull->bar, "making the output durable");
    if (status == TL_OK) status = commit(pull, ret_error);
    return status;
}

/* Opens the device before anything is asked for, which loads CUDA. Without --device nothing is done. */
static enum tl_status open_device(const struct tl_pull *pull, struct tl_error *ret_error)
{
    char name[TL_DEVICE_TEXT_BYTES];
    if (pull->device.kind == TL_DEVICE_HOST) return TL_OK;
    enum tl_status status = tl_device_open(pull->device, ret_error);
    if (status != TL_OK) tl_error_prefix(ret_error, "--device %s: ", tl_device_format(pull->device, name));
    return status;
}

/* A file that cannot be read is known before anything is received. Without --verify-against nothing is done. */
static enum tl_status check_compare_file(const struct tl_pull *pull, struct tl_error *ret_error)
{
    struct tl_tensor_list list = {0};
    if (!pull->compare_path) return TL_OK;
    enum tl_status status = tl_tensor_file_read(pull->compare_path, &list, ret_error);
    if (status == TL_OK) tl_tensor_list_fini(&list);
    return status;
}

static int run(struct tl_pull *pull)
{
    struct tl_error error = {.code = TL_OK};
    enum tl_status status = tl_guard_mapped_files(&error);
    if (status == TL_OK) status = open_device(pull, &error);
    if (status == TL_OK) status = check_compare_file(pull, &error);
    if (status == TL_OK) status = attempt(pull, &error);
    if (status != TL_OK && pull->is_misfit) {
        clear_attempt(pull);
        status = attempt(pull, &error);
    }
    if (status == TL_OK) error.code = TL_OK;
    int code = status == TL_OK ? TL_EXIT_OK : TL_EXIT_FAILED;
    tl_progress_bar_end(&pull->bar);
    if (status != TL_OK && !tl_interrupt_is_set()) tl_output_error("pull", "%s", error.message);
    if (!tl_pull_report(pull, &error)) {
        tl_output_error("pull", "no memory for the output");
        code = TL_EXIT_FAILED;
    }
    clear_attempt(pull);
    code = tl_output_finish("pull", code);
    if (status != TL_OK) tl_interrupt_die();
    return code;
}

/* ------------------------------------------------------------------------------------------------------- flags -- */

static bool ends_with(const char *text, const char *end)
{
    size_t len = strlen(text), end_len = strlen(end);
    return len >= end_len && strcmp(text + len - end_len, end) == 0;
}

/* Chooses the format and checks that the path fits it; -1, or the exit code. */
static int choose_format(struct tl_pull *pull, char *output, const struct tl_options *options)
{
    struct stat info;
    size_t len = strlen(output);
    bool has_slash = len > 0 && output[len - 1] == '/';
    if (len == 0) return tl_options_refuse(options, "-o '': an empty path");
    if (strcmp(output, "-") == 0)
        return tl_options_refuse(options, "-o -: tensors are received into a file and cannot go into a pipe");
    bool is_npy_file = ends_with(output, ".npy");
    if (!pull->format) pull->format = has_slash || is_npy_file ? "npy" : "safetensors";
    pull->is_npy = strcmp(pull->format, "npy") == 0;
    pull->is_npy_file = pull->is_npy && is_npy_file;
    if (!pull->is_npy && strcmp(pull->format, "safetensors") != 0)
        return tl_options_refuse(options, "--format %s: there are safetensors and npy", pull->format);
    if (ends_with(output, ".npz"))
        return tl_options_refuse(options,
                                 "-o %s: npz archives are not written; end the path in .npy for one tensor, or "
                                 "in / for a folder of npy files",
                                 output);
    if (!pull->is_npy && is_npy_file)
        return tl_options_refuse(options, "-o %s: a safetensors file must not end in .npy; choose another name",
                                 output);
    if (!pull->is_npy && (has_slash || (stat(output, &info) == 0 && S_ISDIR(info.st_mode))))
        return tl_options_refuse(options, "-o %s: a folder; name a file, or use --format npy", output);
    while (len > 1 && output[len - 1] == '/')
        output[--len] = '\0';
    const char *slash = strrchr(output, '/'), *name = slash ? slash + 1 : output;
    if (*name == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return tl_options_refuse(options, "-o %s: it does not end in the name of a file or folder to write", output);
    pull->output = output;
    return -1;
}

/* Reads "gpu:0"; -1, or the exit code. */
static int choose_device(struct tl_pull *pull, const char *text, const struct tl_options *options)
{
    if (tl_device_name_parse(text, &pull->device) && pull->device.kind != TL_DEVICE_HOST) return -1;
    return tl_options_refuse(options, "--device %s: not a GPU; write one as gpu:0, and see tensorlane devices", text);
}

#define WORD_OF(value, word) word ", "
#define STRING_OF(value, word) word,

/* -1, or the exit code. */
static int check_protocol(const char *protocol, const struct tl_options *options)
{
    static const char *const protocols[] = {TL_PROTOCOLS(STRING_OF)};
    for (size_t i = 0; i < TL_ARRAY_COUNT(protocols); i++)
        if (strcmp(protocol, protocols[i]) == 0) return -1;
    return tl_options_refuse(options, "--protocol %s: there are " TL_PROTOCOLS(WORD_OF) "and no other", protocol);
}

static int parse_and_run(struct tl_pull *pull, int argc, char **argv)
{
    int first;
    char *output = NULL;
    const char *device = NULL;
    bool is_checked = true;
    const struct tl_option items[] = {
        TL_TARGET_OPTIONS(&pull->target, "from"),
        {"output", 'o', TL_OPTION_TEXT, &output, "PATH", "the file to write, or the folder when it ends in /"},
        {"format", 0, TL_OPTION_TEXT, &pull->format, "FORMAT", "safetensors, or npy: NAME.npy, or a folder of them"},
        {"protocol", 0, TL_OPTION_TEXT, &pull->target.protocol, "PROTOCOL",
         TL_PROTOCOLS(WORD_OF) "instead of the configuration's"},
        {"device", 0, TL_OPTION_TEXT, &device, "DEVICE",
         "receive into the memory of this GPU (gpu:0) and write from there"},
        {"exclude", 'x', TL_OPTION_TEXTS, &pull->excluded, "PATTERN", "leave out what matches; may be repeated"},
        {"checksum", 0, TL_OPTION_FLAG, &is_checked, NULL, "verify every tensor end to end (the default)"},
        {"no-checksum", 0, TL_OPTION_FLAG, &pull->is_unchecked, NULL, "do not"},
        {"verify-against", 0, TL_OPTION_TEXT, &pull->compare_path, "FILE",
         "compare every tensor with this file's before the output appears"},
        {"table", 't', TL_OPTION_FLAG, &pull->has_table, NULL, "print a table of the tensors"},
        {"json", 0, TL_OPTION_FLAG, &pull->is_json, NULL, "print one JSON object, also after a failure"},
        {"quiet", 'q', TL_OPTION_FLAG, &pull->is_quiet, NULL, "print errors only"},
    };
    const struct tl_options options = {
        .command = "pull",
        .usage = "[PATTERN...] --config FILE --from TASK -o PATH\n[PATTERN...] --address HOST:PORT -o PATH",
        .description = "Receives what a worker publishes, all of it or what matches a shell pattern, into a file.\n"
                       "The file appears only when it is complete and verified.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code >= 0) return code;
    if (!output) return tl_options_refuse(&options, "where to? -o PATH");
    pull->is_unchecked = pull->is_unchecked || !is_checked;
    pull->patterns = (const char *const *)argv + first;
    pull->pattern_count = (size_t)(argc - first);
    code = device ? choose_device(pull, device, &options) : -1;
    if (code < 0 && pull->target.protocol) code = check_protocol(pull->target.protocol, &options);
    if (code < 0) code = choose_format(pull, output, &options);
    if (code < 0) code = tl_target_resolve(&pull->target, &options);
    return code >= 0 ? code : run(pull);
}

int tl_command_pull(int argc, char **argv)
{
    struct tl_pull pull = {.target = TL_TARGET_INIT};
    int code = parse_and_run(&pull, argc, argv);
    tl_target_fini(&pull.target);
    tl_texts_fini(&pull.excluded);
    return code;
}
