// SPDX-License-Identifier: Apache-2.0
/* Files that queue pairs of a fabric share: named by their number, and mapped by taking a reference. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "fakes/fake_fabric.h"
#include "tensor/mapped_file.h"

static struct tl_mapped_file *find(const struct fake_fabric *fabric, uint64_t pair_number, uint64_t file_id)
{
    TL_LIST_FOREACH(&fabric->shared, link)
    {
        const struct fake_shared *shared = TL_CONTAINER_OF(link, struct fake_shared, link);
        if (shared->pair_number == pair_number && tl_mapped_file_id(shared->file) == file_id) return shared->file;
    }
    return NULL;
}

void fake_share(struct fake_pair *pair, struct tl_mapped_file *file, struct tl_descriptor *ret_descriptor)
{
    struct fake_provider *provider = fake_provider_of(pair);
    const struct fake_file_name name = {.magic = FAKE_FILE_MAGIC, .file_id = tl_mapped_file_id(file)};
    TL_CHECK(pair->peer_number != 0 && !pair->is_break_reported);
    provider->counters.shares++;
    if (find(provider->fabric, pair->number, name.file_id) == NULL) {
        struct fake_shared *shared = fake_alloc(sizeof(*shared));
        shared->pair_number = pair->number;
        shared->file = tl_mapped_file_get(file);
        tl_list_push_back(&provider->fabric->shared, &shared->link);
    }
    *ret_descriptor = (struct tl_descriptor){.len_bytes = sizeof(name)};
    memcpy(ret_descriptor->bytes, &name, sizeof(name));
}

struct tl_mapped_file *fake_map(struct fake_pair *pair, const struct tl_descriptor *descriptor)
{
    struct fake_provider *provider = fake_provider_of(pair);
    struct fake_file_name name = {0};
    if (descriptor->len_bytes == sizeof(name)) memcpy(&name, descriptor->bytes, sizeof(name));
    struct tl_mapped_file *file = find(provider->fabric, pair->peer_number, name.file_id);
    if (name.magic != FAKE_FILE_MAGIC || file == NULL) return NULL;
    provider->counters.maps++;
    return tl_mapped_file_get(file);
}

void fake_forget_shared(struct fake_pair *pair)
{
    TL_LIST_FOREACH_SAFE(&fake_provider_of(pair)->fabric->shared, link)
    {
        struct fake_shared *shared = TL_CONTAINER_OF(link, struct fake_shared, link);
        if (shared->pair_number != pair->number) continue;
        tl_list_remove(link);
        tl_mapped_file_put(shared->file);
        free(shared);
    }
}
