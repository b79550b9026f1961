// SPDX-License-Identifier: Apache-2.0
/* The engine: what all its connections share. */
#include "dataplane/engine/engine.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "dataplane/engine/conn_internal.h"

enum tl_status tl_engine_create(struct tl_reactor *reactor, struct tl_memory *memory,
                                const struct tl_engine_options *options, const struct tl_source_ops *source,
                                void *source_context, struct tl_engine **ret_engine, struct tl_error *ret_error)
{
    TL_CHECK(options->slot_count >= 16 && options->work_count >= 16 && options->inline_bytes <= TL_INLINE_BYTES);
    TL_CHECK(options->request_count > 0);
    struct tl_engine *engine = calloc(1, sizeof(*engine));
    if (engine == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane");
    engine->reactor = reactor;
    engine->provider = tl_reactor_provider(reactor);
    engine->memory = memory;
    engine->options = *options;
    engine->options.request_count = (uint32_t)tl_min_u64(options->request_count, TL_MAX_REQUESTS);
    engine->source = (struct engine_source){.ops = source, .context = source_context};
    uint64_t max_bytes = engine->provider->limits.max_write_bytes;
    engine->piece_bytes =
        options->piece_bytes > 0 && options->piece_bytes < max_bytes ? options->piece_bytes : max_bytes;
    tl_list_init(&engine->conns);
    if (options->keys == TL_KEYS_REGION) {
        enum tl_status status =
            tl_peer_memories_create(engine->provider, &options->peer_memory, &engine->peer_memories, ret_error);
        if (status != TL_OK) {
            tl_engine_destroy(engine);
            return status;
        }
    }
    *ret_engine = engine;
    return TL_OK;
}

void tl_engine_destroy(struct tl_engine *engine)
{
    if (engine == NULL) return;
    TL_CHECK(tl_list_is_empty(&engine->conns));
    tl_peer_memories_destroy(engine->peer_memories);
    tl_spares_fini(&engine->spares.requests);
    tl_spares_fini(&engine->spares.placements);
    tl_spares_fini(&engine->spares.responses);
    tl_spares_fini(&engine->spares.sendings);
    tl_spares_fini(&engine->spares.texts);
    tl_spares_fini(&engine->spares.meta_data);
    free(engine);
}

void tl_engine_get_stats(const struct tl_engine *engine, struct tl_engine_stats *ret_stats)
{
    *ret_stats = engine->stats;
}

void tl_engine_get_memory_stats(const struct tl_engine *engine, struct tl_memory_stats *ret_stats)
{
    tl_memory_get_stats(engine->memory, ret_stats);
    if (engine->peer_memories != NULL) tl_peer_memories_add_stats(engine->peer_memories, ret_stats);
}

void tl_engine_make_memory(struct tl_engine *engine, struct tl_memory_making *making)
{
    if (engine->peer_memories != NULL) {
        tl_peer_memories_make(engine->peer_memories, making);
        return;
    }
    making->memory = NULL;
    making->error.code = TL_OK;
    making->error.message[0] = '\0';
    making->post(making->context, &making->closure);
}
