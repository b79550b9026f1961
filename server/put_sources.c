// SPDX-License-Identifier: Apache-2.0
#include "server/put_sources.h"

#include <string.h>

#include "base/check.h"
#include "base/random.h"

void tl_put_sources_init(struct tl_put_sources *sources)
{
    TL_CHECK(pthread_mutex_init(&sources->mutex, NULL) == 0);
    tl_list_init(&sources->items);
}

void tl_put_sources_fini(struct tl_put_sources *sources)
{
    pthread_mutex_destroy(&sources->mutex);
}

void tl_put_sources_add(struct tl_put_sources *sources, struct tl_put_item *item, struct tl_tensor *tensor,
                        uint64_t receiver)
{
    *item = (struct tl_put_item){.tensor = tensor, .number = tl_random_u64() | 1, .receiver = receiver};
    pthread_mutex_lock(&sources->mutex);
    tl_list_push_back(&sources->items, &item->place);
    pthread_mutex_unlock(&sources->mutex);
}

void tl_put_sources_remove(struct tl_put_sources *sources, struct tl_put_item *item)
{
    if (item->tensor == NULL) return;
    pthread_mutex_lock(&sources->mutex);
    tl_list_remove(&item->place);
    pthread_mutex_unlock(&sources->mutex);
    *item = (struct tl_put_item){.tensor = NULL};
}

bool tl_put_sources_find(struct tl_put_sources *sources, const char *key, uint64_t number, uint64_t receiver,
                         struct tl_offer *ret_offer)
{
    if (strcmp(key, TL_PUT_KEY) != 0) return false;
    *ret_offer = (struct tl_offer){.tensor = NULL};
    pthread_mutex_lock(&sources->mutex);
    TL_LIST_FOREACH(&sources->items, place)
    {
        const struct tl_put_item *item = TL_CONTAINER_OF(place, const struct tl_put_item, place);
        if (item->number != number || item->receiver != receiver) continue;
        *ret_offer =
            (struct tl_offer){.tensor = tl_tensor_get(item->tensor), .step = number, .publication = item->number};
    }
    pthread_mutex_unlock(&sources->mutex);
    return true;
}
