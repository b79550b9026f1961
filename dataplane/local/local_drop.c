// SPDX-License-Identifier: Apache-2.0
#include "dataplane/local/local_drop.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/error.h"
#include "base/thread.h"
#include "dataplane/memory/pages.h"
#include "tensor/mapped_file.h"

static void drop_segment(const struct local_peer_segment *segment)
{
    if (segment->address != NULL) tl_pages_unmap(segment->address, segment->len_bytes);
    free(segment->populated_chunks);
}

static void drop_file(const struct local_peer_file *file)
{
    tl_mapped_file_put(file->file);
    tl_error_drop(file->refusal);
}

static void drop(struct local_leftovers *leftovers)
{
    for (unsigned i = 0; i < leftovers->fd_count; i++)
        close(leftovers->fds[i]);
    local_ring_unmap(&leftovers->ring);
    for (size_t i = 0; i < leftovers->mapped_count; i++)
        drop_segment(&leftovers->mapped[i]);
    drop_segment(&leftovers->segment);
    for (size_t i = 0; leftovers->files != NULL && i < LOCAL_FILES; i++)
        drop_file(&leftovers->files[i]);
    drop_file(&leftovers->file);
    for (size_t i = 0; leftovers->memories != NULL && i < LOCAL_MEMORIES; i++)
        if (leftovers->memories[i].number != 0) close(leftovers->memories[i].fd);
    free(leftovers->memories);
    free(leftovers->mapped);
    free(leftovers->files);
}

static void *run_drop(void *leftovers)
{
    drop(leftovers);
    free(leftovers);
    return NULL;
}

void local_drop(const struct local_leftovers *leftovers)
{
    struct tl_error error;
    struct local_leftovers *copy = malloc(sizeof(*copy)), own = *leftovers;
    if (copy != NULL) *copy = *leftovers;
    if (copy != NULL && tl_thread_start("tl-drop", run_drop, copy, NULL, &error) == TL_OK) return;
    free(copy);
    drop(&own);
}
