// SPDX-License-Identifier: Apache-2.0
#include "server/data_paths.h"

#include <string.h>

#include "base/reason.h"
#include "server/worker_internal.h"

/* Lets a path set out when all before it have failed. */
static void go_on(struct tl_data_paths *paths)
{
    for (size_t i = 0; i < paths->worker->plane_count; i++) {
        tl_data_path_go_on(&paths->items[i]);
        if (!tl_data_path_has_failed(&paths->items[i])) return;
    }
}

static void changed(void *owner)
{
    struct tl_data_paths *paths = owner;
    go_on(paths);
    paths->events->changed(paths->owner);
}

static void unconfirmed(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count)
{
    struct tl_data_paths *paths = owner;
    if (paths->events->unconfirmed == NULL) return;
    paths->events->unconfirmed(paths->owner, incarnation, numbers, count);
}

static const struct tl_data_path_events path_events = {.changed = changed, .unconfirmed = unconfirmed};

void tl_data_paths_init(struct tl_data_paths *paths, struct tl_worker *worker, const char *name,
                        const struct tl_data_path_events *events, void *owner)
{
    *paths = (struct tl_data_paths){.worker = worker, .events = events, .owner = owner};
    for (size_t i = 0; i < worker->plane_count; i++)
        tl_data_path_init(&paths->items[i], worker, &worker->planes[i], name, &path_events, paths);
}

void tl_data_paths_begin(struct tl_data_paths *paths, struct tl_link *link, bool is_passing)
{
    for (size_t i = 0; i < paths->worker->plane_count; i++)
        tl_data_path_begin(&paths->items[i], link, is_passing);
    go_on(paths);
}

void tl_data_paths_stay(struct tl_data_paths *paths)
{
    for (size_t i = 0; i < paths->worker->plane_count; i++)
        tl_data_path_stay(&paths->items[i]);
}

void tl_data_paths_end(struct tl_data_paths *paths)
{
    for (size_t i = 0; i < paths->worker->plane_count; i++)
        tl_data_path_end(&paths->items[i]);
}

void tl_data_paths_hear(struct tl_data_paths *paths, struct tl_link *link, const struct tl_path_message *message)
{
    for (size_t i = 0; i < paths->worker->plane_count; i++) {
        if (strcmp(paths->worker->planes[i].source->name, message->transport) != 0) continue;
        tl_data_path_hear(&paths->items[i], link, message);
        return;
    }
    if (message->kind == TL_PATH_MESSAGE_OFFER) tl_data_path_refuse_offer(paths->worker, link, message);
}

const struct tl_data_path *tl_data_paths_best(const struct tl_data_paths *paths)
{
    for (size_t i = 0; i < paths->worker->plane_count; i++) {
        if (paths->items[i].state == TL_DATA_PATH_UP) return &paths->items[i];
    }
    return NULL;
}

enum tl_data_path_use tl_data_paths_use(const struct tl_data_paths *paths, const struct tl_data_path **ret_path)
{
    enum tl_data_path_use use = TL_DATA_PATH_AVOID;
    const struct tl_data_path *best = tl_data_paths_best(paths);
    if (best != NULL) {
        *ret_path = best;
        return TL_DATA_PATH_TAKE;
    }
    for (size_t i = 0; i < paths->worker->plane_count; i++) {
        if (tl_data_path_use(&paths->items[i]) == TL_DATA_PATH_AWAIT) use = TL_DATA_PATH_AWAIT;
    }
    return use;
}

void tl_data_paths_format_reason(const struct tl_data_paths *paths, char *ret_text, size_t capacity)
{
    const struct tl_worker *worker = paths->worker;
    const struct tl_data_path *best = tl_data_paths_best(paths);
    size_t count = best != NULL ? (size_t)(best - paths->items) : worker->plane_count;
    const char *reasons[TL_MAX_PLANES];
    for (size_t i = 0; i < count; i++)
        reasons[i] = paths->items[i].reason;
    tl_planes_join(worker, reasons, count, ret_text, capacity);
}

const char *tl_data_paths_lasting_reason(struct tl_data_paths *paths)
{
    bool is_known = paths->lasting_reason != NULL;
    for (size_t i = 0; i < paths->worker->plane_count; i++) {
        is_known = is_known && paths->lasting_parts[i] == paths->items[i].lasting_reason;
        paths->lasting_parts[i] = paths->items[i].lasting_reason;
    }
    if (!is_known) {
        char text[TL_ERROR_MESSAGE_BYTES];
        tl_data_paths_format_reason(paths, text, sizeof(text));
        paths->lasting_reason = tl_reason(text);
    }
    return paths->lasting_reason;
}
