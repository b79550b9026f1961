// SPDX-License-Identifier: Apache-2.0
/*
 * Files of published tensors that a peer may map.
 *
 * Happy path: the owner of a file passes its descriptor over the socket, once, with a number that messages then use.
 * The packet is in the peer's socket before the message is in its ring, and the peer takes the packet first, so that
 * the file is mapped before a message names it. The file stays known until LOCAL_FILES others have come. Memory without
 * a file is passed each time and forgotten once it was named, because it could not be freed before.
 *
 * Failure modes: the socket is full, the number was forgotten, the file has changed since its owner opened it, or it
 * cannot be mapped: the caller gets an error, and the tensor is copied.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/text.h"
#include "dataplane/local/local_drop.h"
#include "tensor/mapped_file.h"

/* ----------------------------------------------------------------------------------------------------- sharing -- */

static uint64_t find_shared(const struct local_pair *pair, uint64_t file_id)
{
    for (unsigned i = 0; i < LOCAL_FILES; i++) {
        if (pair->files.shared[i].file_id == file_id) return pair->files.shared[i].number;
    }
    return 0;
}

/* Passes the file to the peer. Returns its number; 0: it cannot be passed now. */
static uint64_t pass(struct local_pair *pair, const struct tl_mapped_file *file)
{
    struct tl_file_stamp stamp;
    uint64_t number = pair->files.last_shared + 1;
    tl_mapped_file_get_stamp(file, &stamp);
    const struct local_file_packet packet = {.kind = LOCAL_PACKET_FILE,
                                             .number = number,
                                             .size_bytes = stamp.size_bytes,
                                             .modified_seconds = stamp.modified_seconds,
                                             .modified_ns = stamp.modified_ns};
    if (!local_send_counted(pair, &packet, sizeof(packet), tl_mapped_file_fd(file))) return 0;
    pair->files.last_shared = number;
    pair->files.shared[number % LOCAL_FILES] =
        (struct local_shared_file){.number = number, .file_id = tl_mapped_file_id(file)};
    return number;
}

enum tl_status local_share(struct tl_queue_pair *base, struct tl_mapped_file *file,
                           struct tl_descriptor *ret_descriptor, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    const char *name = base->provider->name;
    if (pair->state != LOCAL_CONNECTED) return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: not connected", name);
    if (pair->files.shared == NULL) pair->files.shared = calloc(LOCAL_FILES, sizeof(*pair->files.shared));
    if (pair->files.shared == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory to share files", name);
    }
    uint64_t number = tl_mapped_file_is_memory(file) ? 0 : find_shared(pair, tl_mapped_file_id(file));
    if (number == 0) number = pass(pair, file);
    if (number == 0) {
        return tl_error_set(ret_error, TL_UNAVAILABLE, "%s: the descriptor of %s cannot be sent now", name,
                            tl_mapped_file_path(file));
    }
    ret_descriptor->len_bytes = sizeof(number);
    memcpy(ret_descriptor->bytes, &number, sizeof(number));
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- mapping -- */

/* Returns the path of the file if this process can see one, otherwise a text in its place. */
static const char *describe(int fd, char *buffer, size_t capacity)
{
    char link[32];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, buffer, capacity - 1);
    if (len <= 0 || !tl_text_is_utf8(buffer, (size_t)len)) return "a file of the peer's";
    buffer[len] = '\0';
    return buffer;
}

void local_file_came(struct local_pair *pair, const struct local_file_packet *packet, int fd)
{
    char path[512];
    struct tl_error error;
    if (packet->number > pair->files.last_peers && pair->files.peers == NULL)
        pair->files.peers = calloc(LOCAL_FILES, sizeof(*pair->files.peers));
    if (packet->number <= pair->files.last_peers || pair->files.peers == NULL) {
        close(fd);
        if (packet->number <= pair->files.last_peers)
            local_pair_violation(pair, "a file whose number does not follow the one before");
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no memory for the peer's files");
        return;
    }
    struct local_peer_file *known = &pair->files.peers[packet->number % LOCAL_FILES];
    const struct tl_file_stamp stamp = {.size_bytes = packet->size_bytes,
                                        .modified_seconds = packet->modified_seconds,
                                        .modified_ns = packet->modified_ns};
    if (known->file != NULL)
        local_drop(&(struct local_leftovers){.file = *known});
    else
        tl_error_drop(known->refusal);
    *known = (struct local_peer_file){.number = packet->number};
    pair->files.last_peers = packet->number;
    if (tl_mapped_file_adopt(fd, &stamp, describe(fd, path, sizeof(path)), &known->file, &error) != TL_OK)
        known->refusal = tl_error_keep(&error);
}

static struct local_peer_file *find(const struct local_pair *pair, uint64_t number)
{
    if (pair->files.peers == NULL || number == 0) return NULL;
    struct local_peer_file *known = &pair->files.peers[number % LOCAL_FILES];
    return known->number == number ? known : NULL;
}

enum tl_status local_map(struct tl_queue_pair *base, const struct tl_descriptor *descriptor,
                         struct tl_mapped_file **ret_file, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    uint64_t number = 0;
    if (descriptor->len_bytes == sizeof(number)) memcpy(&number, descriptor->bytes, sizeof(number));
    struct local_peer_file *known = find(pair, number);
    if (known == NULL) {
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s: the peer has not passed this file", base->provider->name);
    }
    if (known->file == NULL) return tl_error_copy(ret_error, known->refusal);
    enum tl_status status = tl_mapped_file_check(known->file, NULL, 0, ret_error);
    if (status != TL_OK) return status;
    *ret_file = known->file;
    if (tl_mapped_file_is_memory(known->file)) {
        *known = (struct local_peer_file){0};
    } else {
        (void)tl_mapped_file_get(known->file);
    }
    return TL_OK;
}
