// SPDX-License-Identifier: Apache-2.0
/* `tensorlane ls`: what a worker publishes, as a table or as JSON. Fails when a pattern matches nothing. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/text.h"
#include "control/client.h"
#include "control/control.h"
#include "server/cli/command.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/published.h"
#include "server/cli/table.h"
#include "server/cli/target.h"

static uint64_t total_bytes(const struct tl_listing *listing)
{
    uint64_t total = 0;
    for (size_t i = 0; i < listing->count; i++)
        total += listing->items[i].meta_data.size_bytes;
    return total;
}

static const char *dtype_text(const struct tl_meta_data *meta_data)
{
    return meta_data->is_dead ? "dead" : tl_dtype_name(meta_data->dtype);
}

static bool print_table(const struct tl_listing *listing)
{
    static const struct tl_column columns[] = {
        {.title = "NAME", .wraps = true},    {.title = "DTYPE"},
        {.title = "SHAPE", .wraps = true},   {.title = "BYTES", .is_right = true},
        {.title = "STEP", .is_right = true},
    };
    char shape[TL_SHAPE_TEXT_BYTES], size[32];
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < listing->count; i++) {
        const struct tl_listed *item = &listing->items[i];
        tl_table_add(table, "%s", item->key);
        tl_table_add(table, "%s", dtype_text(&item->meta_data));
        tl_table_add(table, "%s", tl_shape_format(&item->meta_data.shape, shape, sizeof(shape)));
        tl_table_add(table, "%" PRIu64, item->meta_data.size_bytes);
        tl_table_add(table, "%" PRIu64, item->step);
    }
    bool is_printed = tl_table_print(table, stdout);
    tl_table_destroy(table);
    printf("%zu tensor%s, %s\n", listing->count, listing->count == 1 ? "" : "s",
           tl_text_format_size(total_bytes(listing), size, sizeof(size)));
    return is_printed;
}

/* maps: [map_count], the annotations of what is listed, each once. */
static bool print_json(const struct tl_target *target, const struct tl_listing *listing,
                       const struct tl_annotations *const *maps, size_t map_count)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "address", target->address);
    tl_json_out_put_u64(root, "count", listing->count);
    tl_json_out_put_u64(root, "bytes", total_bytes(listing));
    struct tl_json_out *tensors = tl_json_out_put_array(root, "tensors");
    for (size_t i = 0; i < listing->count; i++) {
        const struct tl_listed *item = &listing->items[i];
        char shape[TL_SHAPE_TEXT_BYTES];
        struct tl_json_out *tensor = tl_json_out_append_object(tensors);
        tl_json_out_put_text(tensor, "name", item->key);
        tl_json_out_put_text(tensor, "dtype", dtype_text(&item->meta_data));
        tl_json_out_put_json(tensor, "shape", tl_shape_format(&item->meta_data.shape, shape, sizeof(shape)));
        tl_json_out_put_u64(tensor, "bytes", item->meta_data.size_bytes);
        tl_json_out_put_u64(tensor, "step", item->step);
        if (item->annotations)
            tl_json_out_put_u64(tensor, "metadata", tl_published_find_annotations(maps, map_count, item->annotations));
    }
    struct tl_json_out *metadata = tl_json_out_put_array(root, "metadata");
    for (size_t i = 0; i < map_count; i++)
        tl_json_out_put_annotations(tl_json_out_append_object(metadata), maps[i]);
    return tl_json_out_print(root, false);
}

static int list(struct tl_target *target, const char *const *patterns, size_t pattern_count, bool is_json)
{
    const struct tl_call_options call = tl_target_call_options(target);
    struct tl_listing listing = {0};
    struct tl_error error;
    enum tl_status status = tl_target_identify(target, &error);
    if (status == TL_OK) status = tl_client_list(&call, "", &listing, NULL, &error);
    if (status == TL_OK) status = tl_published_select(&listing, patterns, pattern_count, NULL, 0, NULL, &error);
    const struct tl_annotations **maps = NULL;
    size_t map_count = 0;
    if (status == TL_OK) status = tl_published_annotations(&listing, &maps, &map_count, &error);
    bool is_printed = false;
    if (status != TL_OK) {
        tl_output_error("ls", "%s", error.message);
    } else {
        is_printed = is_json ? print_json(target, &listing, maps, map_count) : print_table(&listing);
        if (!is_printed) tl_output_error("ls", "no memory for the output");
    }
    free(maps);
    tl_listing_fini(&listing);
    return tl_output_finish("ls", is_printed ? TL_EXIT_OK : TL_EXIT_FAILED);
}

int tl_command_ls(int argc, char **argv)
{
    struct tl_target target = TL_TARGET_INIT;
    bool is_json = false;
    int first;
    const struct tl_option items[] = {
        TL_TARGET_OPTIONS(&target, "from"),
        {"json", 0, TL_OPTION_FLAG, &is_json, NULL, "print one JSON object"},
    };
    const struct tl_options options = {
        .command = "ls",
        .usage = "[PATTERN...] --config FILE --from TASK\n[PATTERN...] --address HOST:PORT",
        .description = "Lists what a worker publishes: all of it, or what matches a shell pattern.",
        .items = items,
        .count = TL_ARRAY_COUNT(items),
        .usage_exit = TL_EXIT_USAGE,
    };
    int code = tl_options_parse(&options, argc, argv, &first);
    if (code < 0) code = tl_target_resolve(&target, &options);
    if (code < 0) code = list(&target, (const char *const *)argv + first, (size_t)(argc - first), is_json);
    tl_target_fini(&target);
    return code;
}
