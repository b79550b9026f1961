// SPDX-License-Identifier: Apache-2.0
/*
 * Files of published tensors that a peer may map.
 *
 * Happy path: who shares a file passes its descriptor over the socket, once, with a number; messages name the number.
 * The packet is in the peer's socket before the message is in its ring, and taken from there before the message is: the
 * helper thread has mapped the file when it is named. It stays known until LOCAL_FILES others have come. Memory, which
 * would not be free so long, is passed each time, and forgotten when it was named.
 *
 * Failure modes: a socket that is full, a number that was forgotten, a file that is not any more what its owner has
 * opened, or none that can be mapped: an error, after which the tensor is copied.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "dataplane/local/local_internal.h"
#include "tensor/mapped_file.h"

/* Wire form of what names a file. */
struct file_name {
    uint64_t number;
};

/* ----------------------------------------------------------------------------------------------------- sharing -- */

static uint64_t find_shared(const struct local_pair *pair, uint64_t file_id)
{
    for (unsigned i = 0; i < LOCAL_FILES; i++) {
        if (pair->shared_files[i].file_id == file_id) return pair->shared_files[i].number;
    }
    return 0;
}

/* 0: not now. */
static uint64_t pass(struct local_pair *pair, const struct tl_mapped_file *file)
{
    struct tl_file_stamp stamp;
    uint64_t number = pair->last_shared_file + 1;
    tl_mapped_file_get_stamp(file, &stamp);
    const struct local_file_packet packet = {.kind = LOCAL_PACKET_FILE,
                                             .number = number,
                                             .size_bytes = stamp.size_bytes,
                                             .modified_seconds = stamp.modified_seconds,
                                             .modified_ns = stamp.modified_ns};
    if (!local_send_counted(pair, &packet, sizeof(packet), tl_mapped_file_fd(file))) return 0;
    pair->last_shared_file = number;
    pair->shared_files[number % LOCAL_FILES] =
        (struct local_shared_file){.number = number, .file_id = tl_mapped_file_id(file)};
    return number;
}

enum tl_status local_share(struct tl_queue_pair *base, struct tl_mapped_file *file,
                           struct tl_descriptor *ret_descriptor, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    const char *name = base->provider->name;
    if (pair->state != LOCAL_CONNECTED) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: not connected", name);
    if (pair->shared_files == NULL) pair->shared_files = calloc(LOCAL_FILES, sizeof(*pair->shared_files));
    if (pair->shared_files == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory to share files", name);
    }
    struct file_name name_of_file = {.number = 0};
    if (!tl_mapped_file_is_memory(file)) name_of_file.number = find_shared(pair, tl_mapped_file_id(file));
    if (name_of_file.number == 0) name_of_file.number = pass(pair, file);
    if (name_of_file.number == 0) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: %s cannot be passed now", name, tl_mapped_file_path(file));
    }
    ret_descriptor->len_bytes = sizeof(name_of_file);
    memcpy(ret_descriptor->bytes, &name_of_file, sizeof(name_of_file));
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- mapping -- */

void local_file_free(struct local_peer_file *file)
{
    tl_mapped_file_put(file->file);
    free(file->refusal);
    *file = (struct local_peer_file){0};
}

void local_file_forget(struct local_pair *pair, struct local_peer_file *known)
{
    if (known->file != NULL) local_pair_count_bytes(pair, -(int64_t)tl_mapped_file_size_bytes(known->file));
    *known = (struct local_peer_file){0};
}

struct local_peer_file *local_file_place(struct local_pair *pair, const struct local_file_packet *packet)
{
    if (packet->number <= pair->last_peer_file) {
        local_pair_violation(pair, "a file with a wrong number");
        return NULL;
    }
    if (pair->peer_files == NULL) pair->peer_files = calloc(LOCAL_FILES, sizeof(*pair->peer_files));
    if (pair->peer_files == NULL) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no memory for the peer's files");
        return NULL;
    }
    return &pair->peer_files[packet->number % LOCAL_FILES];
}

void local_file_came(struct local_pair *pair, const struct local_file_packet *packet, struct tl_mapped_file *file,
                     const struct tl_error *refusal)
{
    struct local_peer_file *known = &pair->peer_files[packet->number % LOCAL_FILES];
    pair->last_peer_file = packet->number;
    known->number = packet->number;
    known->file = file;
    if (file != NULL) {
        local_pair_count_bytes(pair, (int64_t)tl_mapped_file_size_bytes(file));
    } else {
        known->refusal = malloc(sizeof(*known->refusal));
        if (known->refusal != NULL) *known->refusal = *refusal;
    }
}

static struct local_peer_file *find(const struct local_pair *pair, uint64_t number)
{
    if (pair->peer_files == NULL || number == 0) return NULL;
    struct local_peer_file *known = &pair->peer_files[number % LOCAL_FILES];
    return known->number == number ? known : NULL;
}

enum tl_status local_map(struct tl_queue_pair *base, const struct tl_descriptor *descriptor,
                         struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    struct file_name name = {0};
    if (descriptor->len_bytes == sizeof(name)) memcpy(&name, descriptor->bytes, sizeof(name));
    struct local_peer_file *known = find(pair, name.number);
    if (known == NULL) {
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: the peer has not passed this file", base->provider->name);
    }
    if (known->file == NULL) {
        return known->refusal != NULL
                   ? tl_error_copy(ret_error, known->refusal)
                   : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for files", base->provider->name);
    }
    enum tl_status status = tl_mapped_file_check(known->file, NULL, 0, ret_error);
    if (status != TL_OK) return status;
    *ret_file = known->file;
    if (tl_mapped_file_is_memory(known->file)) {
        local_file_forget(pair, known);
    } else {
        (void)tl_mapped_file_get(known->file);
    }
    return TL_OK;
}
