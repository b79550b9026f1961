// SPDX-License-Identifier: Apache-2.0
/*
 * The packed form of requests and chunks.
 *
 * Numbers are varints: seven bits in each byte, the lowest first, with the highest bit set in all bytes but the last. A
 * difference is taken modulo 2^64 and travels with its sign in the lowest bit, so that small ones of either sign are
 * short. Failure modes: whatever a peer sends is either a record or an error; nothing is read beyond the field.
 */
#include "control/packed.h"

#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "tensor/transfer.h"

#define MAX_VARINT_BYTES 10

enum request_flag {
    REQUEST_TEXT = 1,           /* the text of the key follows instead of its number */
    REQUEST_KEPT = 2,           /* with REQUEST_TEXT: the key gets the next number */
    REQUEST_STEP = 4,           /* a difference of the step follows; else the step is as before */
    REQUEST_CHECKSUM = 8,       /* the request wants a checksum */
    REQUEST_RESUMES = 16,       /* the publication and the offset to resume at follow */
    REQUEST_PRIORITY = 32,      /* times the priority, 0 to 3 */
    REQUEST_SUBSCRIPTION = 128, /* a difference of the subscription follows; else there is none */
    REQUEST_ALL_FLAGS = 0xff,   /* and no other bit */
};

enum chunk_flag {
    CHUNK_OFFSET = 1,     /* the offset follows; else it is 0 */
    CHUNK_DESCRIBED = 2,  /* publication, step and meta-data follow */
    CHUNK_DEAD = 4,       /* is_dead of the meta-data */
    CHUNK_ONE_SHOT = 8,   /* is_one_shot */
    CHUNK_CHECKSUM = 16,  /* the checksum follows */
    CHUNK_ALL_FLAGS = 31, /* and no other bit */
};

/* ----------------------------------------------------------------------------------------------------- writing -- */

static void put_varint(struct tl_packer *packer, uint64_t value)
{
    while (value >= 0x80) {
        packer->bytes[packer->used++] = (unsigned char)(value | 0x80);
        value >>= 7;
    }
    packer->bytes[packer->used++] = (unsigned char)value;
}

static void put_difference(struct tl_packer *packer, uint64_t *last, uint64_t value)
{
    uint64_t difference = value - *last;
    bool is_negative = difference >> 63 != 0;
    put_varint(packer, is_negative ? ~(difference << 1) : difference << 1);
    *last = value;
}

static void put_fixed(struct tl_packer *packer, uint64_t value)
{
    for (unsigned i = 0; i < 8; i++)
        packer->bytes[packer->used++] = (unsigned char)(value >> (8 * i));
}

void tl_pack_request(struct tl_packer *packer, const Tensorlane__V1__Request *request, const struct tl_packed_key *key)
{
    bool has_step = request->step != packer->last.step;
    bool resumes = request->publication != 0 || request->resume_offset != 0;
    TL_CHECK(request->priority <= TL_MAX_PRIORITY);
    unsigned flags = (key->text != NULL ? REQUEST_TEXT : 0) | (key->text != NULL && key->is_kept ? REQUEST_KEPT : 0) |
                     (has_step ? REQUEST_STEP : 0) | (request->wants_checksum ? REQUEST_CHECKSUM : 0) |
                     (resumes ? REQUEST_RESUMES : 0) | request->priority * REQUEST_PRIORITY |
                     (request->subscription != 0 ? REQUEST_SUBSCRIPTION : 0);
    put_varint(packer, flags);
    put_difference(packer, &packer->last.number, request->number);
    if (key->text != NULL) {
        put_varint(packer, key->text_bytes);
        memcpy(packer->bytes + packer->used, key->text, key->text_bytes);
        packer->used += key->text_bytes;
    } else {
        put_difference(packer, &packer->last.key_number, key->number);
    }
    if (has_step) put_difference(packer, &packer->last.step, request->step);
    if (request->subscription != 0) put_difference(packer, &packer->last.subscription, request->subscription);
    if (!resumes) return;
    put_fixed(packer, request->publication);
    put_varint(packer, request->resume_offset);
}

static void put_description(struct tl_packer *packer, const Tensorlane__V1__Chunk *chunk)
{
    const Tensorlane__V1__MetaData *meta_data = chunk->meta_data;
    put_difference(packer, &packer->last.publication, chunk->publication);
    put_difference(packer, &packer->last.step, chunk->step);
    put_varint(packer, (uint64_t)meta_data->dtype);
    put_varint(packer, meta_data->n_dims);
    for (size_t i = 0; i < meta_data->n_dims; i++)
        put_varint(packer, meta_data->dims[i]);
    put_varint(packer, meta_data->size_bytes);
}

void tl_pack_chunk(struct tl_packer *packer, const Tensorlane__V1__Chunk *chunk)
{
    bool is_dead = chunk->meta_data != NULL && chunk->meta_data->is_dead;
    unsigned flags = (chunk->offset != 0 ? CHUNK_OFFSET : 0) | (chunk->meta_data != NULL ? CHUNK_DESCRIBED : 0) |
                     (is_dead ? CHUNK_DEAD : 0) | (chunk->is_one_shot ? CHUNK_ONE_SHOT : 0) |
                     (chunk->has_checksum ? CHUNK_CHECKSUM : 0);
    put_varint(packer, flags);
    put_difference(packer, &packer->last.number, chunk->number);
    put_varint(packer, chunk->len_bytes);
    if (chunk->offset != 0) put_varint(packer, chunk->offset);
    if (chunk->meta_data != NULL) put_description(packer, chunk);
    if (chunk->has_checksum) put_fixed(packer, chunk->checksum);
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

static __attribute__((noinline)) bool take_long_varint(struct tl_unpacker *unpacker, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < MAX_VARINT_BYTES && unpacker->at < unpacker->end; i++) {
        uint64_t byte = *unpacker->at++;
        if (i == MAX_VARINT_BYTES - 1 && byte > 1) return false; /* more than 64 bits */
        value |= (byte & 0x7f) << (7 * i);
        if ((byte & 0x80) == 0) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

/* Most have one byte. */
static inline bool take_varint(struct tl_unpacker *unpacker, uint64_t *ret_value)
{
    if (unpacker->at == unpacker->end || (*unpacker->at & 0x80) != 0) return take_long_varint(unpacker, ret_value);
    *ret_value = *unpacker->at++;
    return true;
}

static bool take_difference(struct tl_unpacker *unpacker, uint64_t *last)
{
    uint64_t value;
    if (!take_varint(unpacker, &value)) return false;
    *last += (value >> 1) ^ (0 - (value & 1));
    return true;
}

static bool take_fixed(struct tl_unpacker *unpacker, uint64_t *ret_value)
{
    if (unpacker->end - unpacker->at < 8) return false;
    uint64_t value = 0;
    for (unsigned i = 0; i < 8; i++)
        value |= (uint64_t)*unpacker->at++ << (8 * i);
    *ret_value = value;
    return true;
}

static bool take_key(struct tl_unpacker *unpacker, uint64_t flags, struct tl_packed_key *ret_key)
{
    *ret_key = (struct tl_packed_key){.is_kept = (flags & REQUEST_KEPT) != 0};
    if ((flags & REQUEST_TEXT) != 0) {
        uint64_t length;
        if (!take_varint(unpacker, &length) || length > (uint64_t)(unpacker->end - unpacker->at)) return false;
        ret_key->text = (const char *)unpacker->at;
        ret_key->text_bytes = (size_t)length;
        unpacker->at += length;
        return true;
    }
    if (ret_key->is_kept || !take_difference(unpacker, &unpacker->last.key_number)) return false;
    ret_key->number = (uint32_t)unpacker->last.key_number;
    return unpacker->last.key_number <= UINT32_MAX;
}

static bool take_request(struct tl_unpacker *unpacker, Tensorlane__V1__Request *ret_request,
                         struct tl_packed_key *ret_key)
{
    uint64_t flags;
    if (!take_varint(unpacker, &flags) || (flags & ~(uint64_t)REQUEST_ALL_FLAGS) != 0) return false;
    if (!take_difference(unpacker, &unpacker->last.number) || !take_key(unpacker, flags, ret_key)) return false;
    if ((flags & REQUEST_STEP) != 0 && !take_difference(unpacker, &unpacker->last.step)) return false;
    bool has_subscription = (flags & REQUEST_SUBSCRIPTION) != 0;
    if (has_subscription &&
        (!take_difference(unpacker, &unpacker->last.subscription) || unpacker->last.subscription == 0)) {
        return false;
    }
    tensorlane__v1__request__init(ret_request);
    ret_request->subscription = has_subscription ? unpacker->last.subscription : 0;
    ret_request->number = unpacker->last.number;
    ret_request->step = unpacker->last.step;
    ret_request->wants_checksum = (flags & REQUEST_CHECKSUM) != 0;
    ret_request->priority = (uint32_t)(flags / REQUEST_PRIORITY) & TL_MAX_PRIORITY;
    if ((flags & REQUEST_RESUMES) == 0) return true;
    return take_fixed(unpacker, &ret_request->publication) && take_varint(unpacker, &ret_request->resume_offset);
}

enum tl_status tl_unpack_request(struct tl_unpacker *unpacker, Tensorlane__V1__Request *ret_request,
                                 struct tl_packed_key *ret_key, struct tl_error *ret_error)
{
    if (take_request(unpacker, ret_request, ret_key)) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "packed requests that are no such records");
}

static bool take_description(struct tl_unpacker *unpacker, uint64_t flags, struct tl_unpacked_chunk *ret_chunk)
{
    uint64_t dtype;
    uint64_t rank;
    if (!take_difference(unpacker, &unpacker->last.publication) || !take_difference(unpacker, &unpacker->last.step) ||
        !take_varint(unpacker, &dtype) || dtype > INT32_MAX || !take_varint(unpacker, &rank) || rank > TL_MAX_RANK) {
        return false;
    }
    for (uint64_t i = 0; i < rank; i++)
        if (!take_varint(unpacker, &ret_chunk->dims[i])) return false;
    Tensorlane__V1__MetaData *meta_data = &ret_chunk->meta_data;
    tensorlane__v1__meta_data__init(meta_data);
    meta_data->dtype = (Tensorlane__V1__DType)dtype;
    meta_data->n_dims = (size_t)rank;
    meta_data->dims = ret_chunk->dims;
    meta_data->is_dead = (flags & CHUNK_DEAD) != 0;
    ret_chunk->chunk.meta_data = meta_data;
    ret_chunk->chunk.publication = unpacker->last.publication;
    ret_chunk->chunk.step = unpacker->last.step;
    return take_varint(unpacker, &meta_data->size_bytes);
}

static bool take_chunk(struct tl_unpacker *unpacker, struct tl_unpacked_chunk *ret_chunk)
{
    uint64_t flags;
    Tensorlane__V1__Chunk *chunk = &ret_chunk->chunk;
    tensorlane__v1__chunk__init(chunk);
    if (!take_varint(unpacker, &flags) || (flags & ~(uint64_t)CHUNK_ALL_FLAGS) != 0) return false;
    if ((flags & CHUNK_DESCRIBED) == 0 && (flags & (CHUNK_DEAD | CHUNK_ONE_SHOT)) != 0) return false;
    if (!take_difference(unpacker, &unpacker->last.number) || !take_varint(unpacker, &chunk->len_bytes)) return false;
    if ((flags & CHUNK_OFFSET) != 0 && !take_varint(unpacker, &chunk->offset)) return false;
    if ((flags & CHUNK_DESCRIBED) != 0 && !take_description(unpacker, flags, ret_chunk)) return false;
    chunk->number = unpacker->last.number;
    chunk->is_one_shot = (flags & CHUNK_ONE_SHOT) != 0;
    chunk->has_checksum = (flags & CHUNK_CHECKSUM) != 0;
    return !chunk->has_checksum || take_fixed(unpacker, &chunk->checksum);
}

enum tl_status tl_unpack_chunk(struct tl_unpacker *unpacker, struct tl_unpacked_chunk *ret_chunk,
                               struct tl_error *ret_error)
{
    if (take_chunk(unpacker, ret_chunk)) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "packed chunks that are no such records");
}
