// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane pull` prints. The rate is that of receiving alone: comparing and making the file durable have times
 * of their own. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/text.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/pull.h"
#include "server/cli/table.h"

#define PATH_COUNT (TL_PATH_INLINE + 1)
#define MAX_LABELS (3 * PATH_COUNT)

static double seconds(int64_t ns)
{
    return (double)ns / (double)TL_NS_PER_SEC;
}

static uint64_t bytes_per_sec(const struct tl_pull *pull)
{
    if (pull->receive_ns <= 0) return 0;
    return (uint64_t)((double)pull->received_bytes / seconds(pull->receive_ns));
}

static size_t count_verified(const struct tl_pull *pull)
{
    size_t count = 0;
    for (size_t i = 0; pull->items && i < pull->listing.count; i++)
        count += pull->items[i].is_verified;
    return count;
}

/* How many tensors came on each path. */
static void count_paths(const struct tl_pull *pull, size_t counts[PATH_COUNT])
{
    for (size_t i = 0; pull->items && i < pull->listing.count; i++)
        if (pull->items[i].is_received && (size_t)pull->items[i].path < PATH_COUNT) counts[pull->items[i].path]++;
}

/* Why the largest of the tensors on this path did not come on a faster one; "": there is no faster one, or no reason is
 * known. */
static const char *find_reason(const struct tl_pull *pull, enum tl_path path)
{
    const char *reason = "";
    uint64_t largest_bytes = 0;
    for (size_t i = 0; pull->items && i < pull->listing.count; i++) {
        const struct tl_pull_item *item = &pull->items[i];
        uint64_t bytes = item->listed->meta_data.size_bytes;
        if (!item->is_received || item->path != path || item->path_reason[0] == '\0') continue;
        if (reason[0] != '\0' && bytes <= largest_bytes) continue;
        reason = item->path_reason;
        largest_bytes = bytes;
    }
    return reason;
}

#define LABEL_BYTES 48

/* "local zero-copy": the transport, where it has more than one path, and the path. */
static const char *label_of(const struct tl_pull_item *item, char label[LABEL_BYTES])
{
    snprintf(label, LABEL_BYTES, "%s%s%s", item->transport, item->transport[0] != '\0' ? " " : "",
             tl_path_name(item->path));
    return label;
}

/* -------------------------------------------------------------------------------------------------------- JSON -- */

static void put_details(const struct tl_pull *pull, struct tl_json_out *root)
{
    char shape[TL_SHAPE_TEXT_BYTES];
    struct tl_json_out *details = tl_json_out_put_array(root, "details");
    for (size_t i = 0; pull->items && i < pull->listing.count; i++) {
        const struct tl_pull_item *item = &pull->items[i];
        const struct tl_meta_data *meta_data = &item->listed->meta_data;
        struct tl_json_out *detail = tl_json_out_append_object(details);
        tl_json_out_put_text(detail, "name", item->listed->key);
        tl_json_out_put_text(detail, "dtype", tl_dtype_name(meta_data->dtype));
        tl_json_out_put_json(detail, "shape", tl_shape_format(&meta_data->shape, shape, sizeof(shape)));
        tl_json_out_put_u64(detail, "bytes", meta_data->size_bytes);
        tl_json_out_put_bool(detail, "received", item->is_received);
        if (!item->is_received) continue;
        tl_json_out_put_u64(detail, "step", item->step);
        tl_json_out_put_text(detail, "path", tl_path_name(item->path));
        tl_json_out_put_text(detail, "transport", item->transport);
        tl_json_out_put_real(detail, "seconds", seconds(item->duration_ns));
        tl_json_out_put_bool(detail, "verified", item->is_verified);
    }
}

static bool print_json(const struct tl_pull *pull, const struct tl_error *error)
{
    size_t counts[PATH_COUNT] = {0};
    char device[TL_DEVICE_TEXT_BYTES];
    /* Nothing is asked for when a pattern matches nothing. */
    size_t failed = pull->unmatched_count > 0 ? pull->unmatched_count
                                              : pull->listing.count - pull->received_count + pull->mismatched_count;
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_u64(root, "tensors", pull->received_count);
    tl_json_out_put_u64(root, "bytes", pull->received_bytes);
    tl_json_out_put_real(root, "seconds", seconds(pull->receive_ns));
    tl_json_out_put_u64(root, "bytes_per_second", bytes_per_sec(pull));
    tl_json_out_put_u64(root, "verified", count_verified(pull));
    if (error->code == TL_OK || failed > 0 || pull->listing.count > 0)
        tl_json_out_put_u64(root, "failed", error->code == TL_OK ? 0 : failed);
    else
        tl_json_out_put_json(root, "failed", "null"); /* which tensors there are is not known */
    struct tl_json_out *paths = tl_json_out_put_object(root, "paths");
    count_paths(pull, counts);
    for (size_t i = 0; i < PATH_COUNT; i++)
        if (counts[i] > 0) tl_json_out_put_u64(paths, tl_path_name((enum tl_path)i), counts[i]);
    struct tl_json_out *reasons = tl_json_out_put_object(root, "reasons");
    for (size_t i = 0; i < PATH_COUNT; i++) {
        const char *reason = find_reason(pull, (enum tl_path)i);
        if (reason[0] != '\0') tl_json_out_put_text(reasons, tl_path_name((enum tl_path)i), reason);
    }
    if (pull->compare_path) {
        tl_json_out_put_u64(root, "compared", pull->compared_count);
        tl_json_out_put_real(root, "compare_seconds", seconds(pull->compare_ns));
    }
    tl_json_out_put_real(root, "write_seconds", seconds(pull->commit_ns));
    tl_json_out_put_text(root, "from", pull->target.name);
    tl_json_out_put_text(root, "address", pull->target.address);
    tl_json_out_put_text(root, "output", pull->output);
    tl_json_out_put_text(root, "device", tl_device_format(pull->device, device));
    tl_json_out_put_annotations(tl_json_out_put_object(root, "metadata"), pull->annotations);
    /* It is there, too, when only the sync of its folder failed. */
    tl_json_out_put_bool(root, "complete", pull->writer && !tl_tensor_writer_temporary_path(pull->writer));
    if (error->code != TL_OK) tl_json_out_put_text(root, "error", error->message);
    if (pull->has_table) put_details(pull, root);
    return tl_json_out_print(root, false);
}

/* -------------------------------------------------------------------------------------------------- for people -- */

static bool print_table(const struct tl_pull *pull)
{
    static const struct tl_column columns[] = {
        {.title = "TENSOR", .wraps = true},
        {.title = "SHAPE", .wraps = true},
        {.title = "DTYPE"},
        {.title = "BYTES", .is_right = true},
        {.title = "PATH"},
        {.title = "TIME", .is_right = true},
    };
    char text[TL_SHAPE_TEXT_BYTES], label[LABEL_BYTES];
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < pull->listing.count; i++) {
        const struct tl_pull_item *item = &pull->items[i];
        const struct tl_meta_data *meta_data = &item->listed->meta_data;
        tl_table_add(table, "%s", item->listed->key);
        tl_table_add(table, "%s", tl_shape_format(&meta_data->shape, text, sizeof(text)));
        tl_table_add(table, "%s", tl_dtype_name(meta_data->dtype));
        tl_table_add(table, "%" PRIu64, meta_data->size_bytes);
        tl_table_add(table, "%s", label_of(item, label));
        tl_table_add(table, "%s", tl_text_format_duration(item->duration_ns, text, sizeof(text)));
    }
    bool is_printed = tl_table_print(table, stdout);
    tl_table_destroy(table);
    return is_printed;
}

/* How many tensors came over which transport on which path, in the order in which they first did. */
static void print_paths(const struct tl_pull *pull)
{
    char labels[MAX_LABELS][LABEL_BYTES], label[LABEL_BYTES];
    size_t counts[MAX_LABELS] = {0}, label_count = 0;
    for (size_t i = 0; i < pull->listing.count; i++) {
        size_t place = 0;
        if (!pull->items[i].is_received) continue;
        label_of(&pull->items[i], label);
        while (place < label_count && strcmp(labels[place], label) != 0)
            place++;
        if (place == MAX_LABELS) continue;
        if (place == label_count) memcpy(labels[label_count++], label, sizeof(label));
        counts[place]++;
    }
    printf("; paths:");
    for (size_t i = 0; i < label_count; i++)
        printf("%s %s %zu", i > 0 ? "," : "", labels[i], counts[i]);
}

static void print_summary(const struct tl_pull *pull)
{
    char size[32], duration[32], rate[32], text[TL_TARGET_TEXT_BYTES];
    printf("pulled %zu tensor%s, %s in %s (%s/s) from ", pull->received_count, pull->received_count == 1 ? "" : "s",
           tl_text_format_size(pull->received_bytes, size, sizeof(size)),
           tl_text_format_duration(pull->receive_ns, duration, sizeof(duration)),
           tl_text_format_size(bytes_per_sec(pull), rate, sizeof(rate)));
    tl_output_put_escaped(stdout, tl_target_describe(&pull->target, text, sizeof(text)));
    print_paths(pull);
    for (size_t i = 0; i < PATH_COUNT; i++) {
        const char *reason = find_reason(pull, (enum tl_path)i);
        if (reason[0] == '\0') continue;
        printf("\n%s because: ", tl_path_name((enum tl_path)i));
        tl_output_put_escaped(stdout, reason);
    }
    if (pull->is_unchecked) {
        printf("\nnot verified (--no-checksum)");
    } else {
        printf("\nverified %zu of %zu by checksum", count_verified(pull), pull->received_count);
    }
    if (pull->compare_path) {
        printf("; compared %zu of %zu with ", pull->compared_count, pull->received_count);
        tl_output_put_escaped(stdout, pull->compare_path);
        printf(" in %s: equal", tl_text_format_duration(pull->compare_ns, duration, sizeof(duration)));
    }
    printf("; wrote ");
    tl_output_put_escaped(stdout, pull->output);
    printf(" in %s\n", tl_text_format_duration(pull->commit_ns, duration, sizeof(duration)));
}

bool tl_pull_report(const struct tl_pull *pull, const struct tl_error *error)
{
    if (pull->is_json) return print_json(pull, error);
    if (error->code != TL_OK) return true;
    if (pull->has_table && !print_table(pull)) return false;
    if (!pull->is_quiet) print_summary(pull);
    return true;
}
