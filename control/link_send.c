// SPDX-License-Identifier: Apache-2.0
/*
 * The sending half of a link: requests, acknowledgements, failures and tensors for the peer.
 *
 * Whenever the stream can take a message, one frame is composed of all that waits: requests, cancels, acknowledgements,
 * failures, and pieces of tensors, as many as fit. A frame carries at most options.chunk_bytes of tensor bytes: one
 * piece of a large tensor, or hundreds of small ones. Tensors that are being sent alternate, frame by frame; how many
 * are begun is bounded by options.inflight_bytes. No tensor's bytes are sent while the peer has too much to take.
 *
 * Answers that wait must not keep versions of a published tensor that were replaced in the meantime: a peer that asks
 * for each version and takes none would keep as much memory as the worker publishes. So values are held within two
 * bounds: options.inflight_bytes for the answers of a link, and MAX_REFERENCED_FACTOR times as much for those of all
 * links together. A value that would be the only one may exceed a bound. An answer beyond one of them lets its value go
 * and asks the source again when it may be sent: it gets the version that there is then. So beyond the second bound
 * each link holds what it has begun, one value at a time.
 *
 * The bytes are slices of the tensors' own memory, which gRPC gives back when it has written them. Only tensors of at
 * most COPY_BYTES are copied, because a reference costs more than they do.
 *
 * A file may be cut or changed while it is sent, and the kernel then reads zeros or other bytes. So the last bytes of a
 * tensor that lies in a file are sent only when the kernel has read all others and the file is still what it was; these
 * last bytes are copied, and checked after that. A small tensor of a file is copied as a whole. With a checksum the
 * receiver notices, and nothing is held back.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <tensorlane/version.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "control/link_internal.h"
#include "tensor/mapped_tensor.h"
#include "tensor/piece.h"

#define MAX_REQUESTS 256
#define MAX_FAILURES 64
#define MAX_CHUNKS 256
#define MAX_NUMBERS 1024
/* The size of a frame's head; the peer accepts TL_MAX_FRAME_HEAD_BYTES. */
#define HEAD_BUDGET_BYTES (192 * 1024)
#define COPY_BYTES 256
/* A tensor in a file is copied up to this size. The end of a larger one is held back: so many bytes. */
#define FILE_COPY_BYTES (64 * 1024)
#define FILE_END_BYTES 4096
/* The answers of all links together hold at most so many times options.inflight_bytes. */
#define MAX_REFERENCED_FACTOR 16
/* Bytes hashed again for one frame before a resumed transfer goes on. */
#define CATCH_UP_BYTES (4 * 1024 * 1024)

struct tl_frame_builder {
    Tensorlane__V1__Frame frame;
    size_t head_bytes; /* estimate, never too low */
    Tensorlane__V1__ConnectionMessage *connection_messages[LINK_MAX_CONNECTION_MESSAGES];
    Tensorlane__V1__Request requests[MAX_REQUESTS];
    Tensorlane__V1__Request *request_pointers[MAX_REQUESTS];
    Tensorlane__V1__Failure failures[MAX_FAILURES];
    Tensorlane__V1__Status statuses[MAX_FAILURES];
    Tensorlane__V1__Failure *failure_pointers[MAX_FAILURES];
    struct link_serve *failed[MAX_FAILURES];
    Tensorlane__V1__Chunk chunks[MAX_CHUNKS];
    Tensorlane__V1__Chunk *chunk_pointers[MAX_CHUNKS];
    Tensorlane__V1__MetaData meta_data[MAX_CHUNKS];
    uint64_t dims[MAX_CHUNKS][TL_MAX_RANK];
    struct link_serve *complete[MAX_CHUNKS]; /* whose last piece is in this frame */
    size_t complete_count;
    grpc_slice slices[MAX_CHUNKS];
    size_t slice_count;
    uint64_t data_bytes;
};

struct tl_frame_builder *tl_frame_builder_create(void)
{
    return malloc(sizeof(struct tl_frame_builder));
}

void tl_frame_builder_destroy(struct tl_frame_builder *builder)
{
    free(builder);
}

grpc_byte_buffer *link_hello(struct tl_link *link, size_t received_count)
{
    const struct tl_identity *self = &link->control->options.self;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = TL_PROTOCOL_VERSION;
    hello.name = (char *)self->name;
    hello.incarnation = self->incarnation;
    hello.software_version = (char *)TL_VERSION;
    hello.expected_name = link->expected_name;
    hello.window_bytes = link->window.ours_bytes;
    if (tl_identity_has_host(self)) {
        hello.host = (ProtobufCBinaryData){.len = TL_HOST_BYTES, .data = (uint8_t *)self->host};
    }
    hello.host_name = (char *)self->host_name;
    hello.process_id = self->process_id;
    hello.cluster_digest = self->cluster_digest;
    hello.serves_probes = self->serves_probes;
    hello.n_received = received_count;
    hello.received = (uint64_t *)tl_numbers_items(&link->received);
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.hello = &hello;
    return tl_wire_write(&frame.base);
}

/* ---------------------------------------------------------------------------------------------------- requests -- */

static void add_requests(struct tl_link *link, struct tl_frame_builder *builder)
{
    /* An answer will show that the peer has handled this frame, and with it these. */
    uint64_t framed_before = link->confirmed_count + link->framed_count + builder->frame.n_received;
    while (!tl_list_is_empty(&link->to_request) && builder->frame.n_requests < MAX_REQUESTS &&
           builder->head_bytes < HEAD_BUDGET_BYTES) {
        struct link_fetch *entry =
            TL_CONTAINER_OF(tl_list_pop_front(&link->to_request), struct link_fetch, request_link);
        Tensorlane__V1__Request *request = &builder->requests[builder->frame.n_requests++];
        tensorlane__v1__request__init(request);
        entry->framed_before = framed_before;
        entry->fetch->is_unsettled = false; /* it has its end here, or the link breaks */
        request->number = entry->number;
        request->key = (char *)entry->fetch->key;
        request->step = entry->fetch->step;
        request->wants_checksum = entry->fetch->wants_checksum;
        if (entry->fetch->received_bytes > 0) {
            request->publication = entry->fetch->publication;
            request->resume_offset = entry->fetch->received_bytes;
        }
        builder->head_bytes += strlen(request->key) + 64;
    }
}

/* ------------------------------------------------------------------------------------------------------ serves -- */

static uint64_t bytes_left(const struct link_serve *entry)
{
    return tl_tensor_size_bytes(entry->offer.tensor) - entry->sent_bytes;
}

static bool is_unsent(enum serve_state state)
{
    return state == SERVE_FENCED || state == SERVE_READY || state == SERVE_ACTIVE || state == SERVE_STAGING ||
           state == SERVE_LEAVING || state == SERVE_FAILED;
}

/* Whether what is left of the value counts as being sent. */
static bool is_active(enum serve_state state)
{
    return state == SERVE_ACTIVE || state == SERVE_STAGING;
}

/* Whether the value is held, and waits for its turn. */
static bool is_ready(const struct link_serve *entry)
{
    return entry->state == SERVE_FENCED || entry->state == SERVE_READY;
}

static uint64_t referenced_bytes(const struct tl_link *link)
{
    return link->answers.active_bytes + link->answers.ready_bytes;
}

/* Every change of state goes through here, so that what the link and the worker count is always right. */
static void serve_set_state(struct link_serve *entry, enum serve_state state)
{
    struct tl_link *link = entry->link;
    uint64_t before_bytes = referenced_bytes(link);
    if (is_active(entry->state)) link->answers.active_bytes -= bytes_left(entry);
    if (is_ready(entry) && entry->offer.tensor != NULL) link->answers.ready_bytes -= entry->ready_bytes;
    if (is_unsent(entry->state)) link->answers.unsent_count--;
    if (entry->state == SERVE_STAGING) link->answers.staging_count--;
    entry->state = state;
    if (is_active(entry->state)) link->answers.active_bytes += bytes_left(entry);
    if (entry->state == SERVE_STAGING) link->answers.staging_count++;
    if (is_ready(entry) && entry->offer.tensor != NULL) link->answers.ready_bytes += entry->ready_bytes;
    if (is_unsent(entry->state)) link->answers.unsent_count++;
    link->control->referenced_bytes += referenced_bytes(link) - before_bytes;
}

/* Forgets what is read from a device, or will be. */
static void stop_reading(struct link_serve *entry)
{
    tl_piece_put(entry->fence_wait);
    entry->fence_wait = NULL;
    tl_device_reader_end(&entry->reader);
}

static void serve_free(struct link_serve *entry)
{
    struct tl_link *link = entry->link;
    serve_set_state(entry, SERVE_SENT);
    HASH_DEL(link->answers.serves, entry);
    tl_list_remove(&entry->place);
    stop_reading(entry);
    tl_tensor_put(entry->offer.tensor);
    XXH3_freeState(entry->hash_state);
    link_status_put(link, entry->failure);
    free(entry);
}

static void serve_end(struct link_serve *entry, enum tl_serve_end end)
{
    struct tl_control *control = entry->link->control;
    control->options.handlers->source.closed(control->options.worker, &entry->serve, end);
    serve_free(entry);
}

static void serve_fail(struct link_serve *entry, const struct tl_error *status)
{
    struct tl_link *link = entry->link;
    stop_reading(entry);
    serve_set_state(entry, SERVE_FAILED);
    entry->failure = link_status_get(link, status);
    tl_list_remove(&entry->place);
    tl_list_push_back(&link->answers.failures, &entry->place);
    link_flush_later(link);
}

/* Whether there is space for a value besides those that are held. The only one may have any size. */
static bool fits(uint64_t bytes, uint64_t held, uint64_t limit)
{
    return held == 0 || (bytes <= limit && held <= limit - bytes);
}

static bool fits_link(const struct link_serve *entry, uint64_t held)
{
    return fits(entry->ready_bytes, held, entry->link->control->options.inflight_bytes);
}

static bool fits_worker(const struct link_serve *entry)
{
    const struct tl_control *control = entry->link->control;
    return fits(entry->ready_bytes, control->referenced_bytes, MAX_REFERENCED_FACTOR * control->options.inflight_bytes);
}

/* Whether the answer would make the link or the worker hold too many values. One-shot values are reserved anyway. */
static bool must_let_go(const struct link_serve *entry)
{
    if (entry->offer.is_one_shot || entry->is_asking_again) return false;
    return !fits_link(entry, referenced_bytes(entry->link)) || !fits_worker(entry);
}

static void become_ready(struct link_serve *entry)
{
    serve_set_state(entry, SERVE_READY);
    tl_list_push_back(&entry->link->answers.ready, &entry->place);
    link_flush_later(entry->link);
}

static void fail_reading(struct link_serve *entry, struct tl_error *error)
{
    tl_error_prefix(error, "%s: ", entry->key);
    serve_fail(entry, error);
}

static void fence_reached(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct link_serve *entry = context;
    struct tl_error error = *status;
    TL_CHECK(entry->state == SERVE_FENCED && entry->fence_wait == piece);
    entry->fence_wait = NULL;
    tl_piece_put(piece);
    entry->link->stall.has_progressed = true; /* the peer waits for us */
    if (error.code == TL_OK) {
        become_ready(entry);
    } else {
        fail_reading(entry, &error);
    }
}

static void post_to_loop(void *loop, struct tl_closure *closure)
{
    tl_loop_post(loop, closure);
}

/* Waits for the stream of the value. Others pass by meanwhile: the stream may wait for one of them. */
static void await_fence(struct link_serve *entry)
{
    struct tl_tensor *tensor = entry->offer.tensor;
    const struct tl_piece_options options = {.tensor = tensor,
                                             .after = tl_tensor_fence(tensor),
                                             .post = post_to_loop,
                                             .loop = entry->link->control->loop,
                                             .notify = fence_reached,
                                             .context = entry};
    struct tl_error error;
    entry->fence_wait = tl_piece_read(&options);
    if (entry->fence_wait != NULL) {
        serve_set_state(entry, SERVE_FENCED);
        return;
    }
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory to wait for its stream");
    fail_reading(entry, &error);
}

static void serve_reply(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer)
{
    struct link_serve *entry = TL_CONTAINER_OF(serve, struct link_serve, serve);
    TL_CHECK(entry->state == SERVE_WAITING);
    if (status->code != TL_OK) {
        serve_fail(entry, status);
        return;
    }
    entry->offer = *offer;
    uint64_t size_bytes = tl_tensor_size_bytes(offer->tensor);
    bool can_resume = entry->asked_publication == offer->publication && entry->resume_offset <= size_bytes;
    entry->sent_bytes = can_resume ? entry->resume_offset : 0;
    entry->ready_bytes = size_bytes - entry->sent_bytes;
    struct tl_error error;
    if (entry->wants_checksum && entry->hash_state == NULL) {
        entry->hash_state = XXH3_createState();
        if (entry->hash_state == NULL) {
            tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory for a checksum");
            serve_fail(entry, &error);
            return;
        }
        XXH3_64bits_reset(entry->hash_state);
    }
    if (must_let_go(entry)) {
        tl_tensor_put(entry->offer.tensor);
        entry->offer.tensor = NULL;
    }
    if (entry->offer.tensor != NULL && tl_tensor_fence(entry->offer.tensor) != NULL) {
        await_fence(entry);
    } else {
        become_ready(entry);
    }
}

static const struct tl_serve_ops serve_ops = {.reply = serve_reply};

static struct link_serve *serve_create(struct tl_link *link, const Tensorlane__V1__Request *request)
{
    size_t key_bytes = strlen(request->key);
    struct link_serve *entry = calloc(1, sizeof(*entry) + key_bytes + 1);
    if (entry == NULL) return NULL;
    memcpy(entry->key, request->key, key_bytes);
    entry->link = link;
    entry->number = request->number;
    entry->wants_checksum = request->wants_checksum != 0;
    entry->asked_publication = request->publication;
    entry->resume_offset = request->resume_offset;
    entry->serve = (struct tl_serve){.ops = &serve_ops,
                                     .id = {.incarnation = link->peer.incarnation, .number = request->number},
                                     .peer = &link->peer,
                                     .key = entry->key,
                                     .step = request->step,
                                     .takes_devices = true};
    tl_list_init(&entry->place);
    bool is_added = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) is_added = false
    HASH_ADD(hh, link->answers.serves, number, sizeof(entry->number), entry);
    if (is_added) return entry;
    free(entry);
    return NULL;
}

static struct link_serve *serve_find(struct tl_link *link, uint64_t number)
{
    struct link_serve *entry;
    HASH_FIND(hh, link->answers.serves, &number, sizeof(number), entry);
    return entry;
}

void link_serve_start(struct tl_link *link, const Tensorlane__V1__Request *request)
{
    struct tl_control *control = link->control;
    if (request->number == 0 || serve_find(link, request->number) != NULL) {
        link_protocol_error(link, "request number %llu is 0 or already in use", (unsigned long long)request->number);
        return;
    }
    struct tl_error error;
    struct link_serve *entry = serve_create(link, request);
    if (entry == NULL) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s: no memory for a request", control->options.self.name);
        tl_link_close(link, &error);
        return;
    }
    if (link->state == LINK_DRAINING) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s is shutting down or uses another connection",
                     control->options.self.name);
        serve_reply(&entry->serve, &error, NULL);
        return;
    }
    control->options.handlers->source.request(control->options.worker, &entry->serve);
}

void link_serve_cancel(struct tl_link *link, uint64_t number)
{
    struct link_serve *entry = serve_find(link, number);
    if (entry != NULL) {
        serve_end(entry, TL_SERVE_CANCELLED);
        return;
    }
    struct tl_control *control = link->control;
    struct tl_request_id id = {.incarnation = link->peer.incarnation, .number = number};
    control->options.handlers->source.given_up(control->options.worker, &id);
}

void link_serve_received(struct tl_link *link, uint64_t number)
{
    struct tl_control *control = link->control;
    struct link_serve *entry = serve_find(link, number);
    if (entry != NULL && entry->state == SERVE_SENT) {
        serve_end(entry, TL_SERVE_RECEIVED);
        return;
    }
    struct tl_request_id id = {.incarnation = link->peer.incarnation, .number = number};
    control->options.handlers->source.received(control->options.worker, &id);
}

void link_serves_break(struct tl_link *link)
{
    struct link_serve *entry;
    struct link_serve *next;
    HASH_ITER(hh, link->answers.serves, entry, next)
    {
        serve_end(entry, TL_SERVE_BROKEN);
    }
}

/* ---------------------------------------------------------------------------------------------------- failures -- */

static void add_failures(struct tl_link *link, struct tl_frame_builder *builder)
{
    while (!tl_list_is_empty(&link->answers.failures) && builder->frame.n_failures < MAX_FAILURES &&
           builder->head_bytes < HEAD_BUDGET_BYTES) {
        struct link_serve *entry =
            TL_CONTAINER_OF(tl_list_pop_front(&link->answers.failures), struct link_serve, place);
        enum tl_status code = entry->failure != NULL ? entry->failure->code : TL_RESOURCE_EXHAUSTED;
        const char *message = entry->failure != NULL ? entry->failure->message : "no memory";
        size_t i = builder->frame.n_failures++;
        builder->failed[i] = entry;
        tensorlane__v1__failure__init(&builder->failures[i]);
        tensorlane__v1__status__init(&builder->statuses[i]);
        builder->statuses[i].code = (uint32_t)code;
        builder->statuses[i].message = (char *)message;
        builder->failures[i].number = entry->number;
        builder->failures[i].status = &builder->statuses[i];
        builder->failures[i].is_final = entry->serve.is_final;
        builder->head_bytes += strlen(message) + 48;
    }
}

/* ------------------------------------------------------------------------------------------------------ chunks -- */

/* Asks the source for a value in the place of the one that was let go. If there is one, the serve is the first that is
 * ready; otherwise it waits for one, or it has failed. */
static void serve_ask_again(struct link_serve *entry)
{
    struct tl_control *control = entry->link->control;
    serve_set_state(entry, SERVE_WAITING);
    tl_list_remove(&entry->place);
    entry->is_asking_again = true;
    control->options.handlers->source.closed(control->options.worker, &entry->serve, TL_SERVE_CANCELLED);
    control->options.handlers->source.request(control->options.worker, &entry->serve);
    entry->is_asking_again = false;
    if (entry->state != SERVE_READY) return;
    tl_list_remove(&entry->place);
    tl_list_push_front(&entry->link->answers.ready, &entry->place);
}

/* Whether the value has bytes, on a device. */
static bool is_on_device(const struct link_serve *entry)
{
    return tl_tensor_is_on_device(entry->offer.tensor) && tl_tensor_size_bytes(entry->offer.tensor) > 0;
}

/* Whether nothing is left to be read, also when nothing had to be sent but a checksum. */
static bool is_all_read(const struct tl_device_reader *reader)
{
    return reader->read_bytes == tl_tensor_size_bytes(reader->tensor);
}

/* A piece of the value was read from its device, or could not be. */
static void staged(struct tl_device_reader *reader, const struct tl_error *status)
{
    struct link_serve *entry = TL_CONTAINER_OF(reader, struct link_serve, reader);
    struct tl_error error = *status;
    entry->link->stall.has_progressed = true; /* the peer waits for us */
    if (status->code != TL_OK) {
        fail_reading(entry, &error);
    } else if (entry->state == SERVE_STAGING && (tl_device_reader_bytes(reader) > 0 || is_all_read(reader))) {
        serve_set_state(entry, SERVE_ACTIVE);
        tl_list_push_back(&entry->link->answers.active, &entry->place);
        link_flush_later(entry->link);
    }
}

static void begin_staging(struct link_serve *entry)
{
    struct tl_control *control = entry->link->control;
    struct tl_error error;
    serve_set_state(entry, SERVE_STAGING);
    entry->reader = (struct tl_device_reader){.loop = control->loop,
                                              .tensor = entry->offer.tensor,
                                              .hash_state = entry->hash_state,
                                              .skip_bytes = entry->sent_bytes,
                                              .copied_bytes = &control->stats.bytes_copied_send,
                                              .came = staged,
                                              .is_fence_reached = true};
    if (tl_device_reader_begin(&entry->reader, &error) != TL_OK) fail_reading(entry, &error);
}

static void activate_ready(struct tl_link *link)
{
    while (!tl_list_is_empty(&link->answers.ready)) {
        struct link_serve *entry = TL_CONTAINER_OF(link->answers.ready.next, struct link_serve, place);
        if (!fits_link(entry, link->answers.active_bytes)) return;
        if (entry->offer.tensor == NULL) {
            if (link->answers.active_bytes > 0 && !fits_worker(entry)) return;
            serve_ask_again(entry);
            continue;
        }
        tl_list_remove(&entry->place);
        if (is_on_device(entry) && (bytes_left(entry) > 0 || entry->hash_state != NULL)) {
            begin_staging(entry);
            continue;
        }
        tl_list_push_back(&link->answers.active, &entry->place);
        serve_set_state(entry, SERVE_ACTIVE);
    }
}

/* Hashes up to where the transfer goes on; false while there is more to hash, or when the serve has failed. */
static bool serve_catch_up(struct link_serve *entry)
{
    if (entry->hash_state == NULL || entry->hashed_bytes == entry->sent_bytes) return true;
    if (is_on_device(entry)) return true; /* hashed when it was read */
    uint64_t take = tl_min_u64(entry->sent_bytes - entry->hashed_bytes, CATCH_UP_BYTES);
    struct tl_error error;
    if (tl_tensor_check_readable(entry->offer.tensor, entry->hashed_bytes, take, &error) != TL_OK) {
        serve_fail(entry, &error);
        return false;
    }
    const unsigned char *data = tl_tensor_data(entry->offer.tensor);
    XXH3_64bits_update(entry->hash_state, data + entry->hashed_bytes, (size_t)take);
    entry->hashed_bytes += take;
    entry->link->stall.has_progressed = true; /* the peer waits for us */
    return entry->hashed_bytes == entry->sent_bytes;
}

static void announce(struct link_serve *entry, struct tl_frame_builder *builder, size_t i)
{
    Tensorlane__V1__Chunk *chunk = &builder->chunks[i];
    tl_wire_from_meta_data(tl_tensor_meta_data(entry->offer.tensor), builder->dims[i], &builder->meta_data[i]);
    chunk->meta_data = &builder->meta_data[i];
    chunk->publication = entry->offer.publication;
    chunk->step = entry->offer.step;
    chunk->is_one_shot = entry->offer.is_one_shot;
    entry->is_announced = true;
    builder->head_bytes += 64 + 10 * (size_t)builder->meta_data[i].n_dims;
}

/* Whether the bytes must be checked after they were read, because no checksum shows a change. */
static bool is_of_a_file(const struct link_serve *entry)
{
    return entry->hash_state == NULL && tl_tensor_may_change(entry->offer.tensor);
}

static bool is_copied(const struct link_serve *entry)
{
    uint64_t size_bytes = tl_tensor_size_bytes(entry->offer.tensor);
    if (size_bytes <= COPY_BYTES) return true;
    return is_of_a_file(entry) && (size_bytes <= FILE_COPY_BYTES || bytes_left(entry) <= FILE_END_BYTES);
}

/* Reads the next bytes on the host, as far as the CPU does: hashes them, if asked to, and copies or refers to them.
 * What is read here is checked before, and again after, because a file may be cut in between and be read as zeros. */
static enum tl_status take_host_bytes(struct link_serve *entry, uint64_t count, grpc_slice *ret_slice,
                                      struct tl_error *ret_error)
{
    struct tl_tensor *tensor = entry->offer.tensor;
    bool is_copy = is_copied(entry);
    enum tl_status status = tl_tensor_check_readable(tensor, entry->sent_bytes, count, ret_error);
    if (status != TL_OK) return status;
    const unsigned char *data = (const unsigned char *)tl_tensor_data(tensor) + entry->sent_bytes;
    if (entry->hash_state != NULL) {
        XXH3_64bits_update(entry->hash_state, data, (size_t)count);
        entry->hashed_bytes += count;
    }
    grpc_slice slice = is_copy ? grpc_slice_from_copied_buffer((const char *)data, (size_t)count)
                               : tl_wire_slice_of_tensor(tensor, entry->sent_bytes, count);
    if (is_copy) entry->link->control->stats.bytes_copied_send += count;
    if (is_copy || entry->hash_state != NULL) {
        status = tl_tensor_check_readable(tensor, entry->sent_bytes, count, ret_error);
    }
    if (status == TL_OK) {
        *ret_slice = slice;
    } else {
        grpc_slice_unref(slice);
    }
    return status;
}

static enum tl_status take_bytes(struct link_serve *entry, uint64_t count, grpc_slice *ret_slice,
                                 struct tl_error *ret_error)
{
    if (!is_on_device(entry)) return take_host_bytes(entry, count, ret_slice, ret_error);
    *ret_slice = tl_device_reader_take(&entry->reader, count);
    return TL_OK;
}

/* How many bytes the next piece of an active tensor has. */
static uint64_t next_bytes(const struct link_serve *entry, const struct tl_frame_builder *builder)
{
    uint64_t left = bytes_left(entry);
    if (is_on_device(entry)) left = tl_device_reader_bytes(&entry->reader);
    if (is_of_a_file(entry) && !is_copied(entry)) left -= FILE_END_BYTES;
    return tl_min_u64(left, entry->link->control->options.chunk_bytes - builder->data_bytes);
}

/* Adds the next piece of an active tensor; false when it has failed instead. */
static bool add_chunk(struct link_serve *entry, struct tl_frame_builder *builder)
{
    struct tl_link *link = entry->link;
    uint64_t count = next_bytes(entry, builder);
    struct tl_error error;
    if (count > 0 && take_bytes(entry, count, &builder->slices[builder->slice_count], &error) != TL_OK) {
        serve_fail(entry, &error);
        return false;
    }
    size_t i = builder->frame.n_chunks++;
    Tensorlane__V1__Chunk *chunk = &builder->chunks[i];
    tensorlane__v1__chunk__init(chunk);
    chunk->number = entry->number;
    chunk->offset = entry->sent_bytes;
    chunk->len_bytes = count;
    builder->head_bytes += 64;
    if (!entry->is_announced) announce(entry, builder, i);
    if (count > 0) builder->slice_count++;
    builder->data_bytes += count;
    entry->sent_bytes += count;
    link->answers.active_bytes -= count;
    link->control->referenced_bytes -= count;
    link->control->stats.bytes_sent += count;
    if (bytes_left(entry) > 0) return true;
    if (entry->hash_state != NULL) {
        chunk->has_checksum = 1;
        chunk->checksum = XXH3_64bits_digest(entry->hash_state);
    }
    builder->complete[builder->complete_count++] = entry;
    return true;
}

/* A piece was sent: where the serve waits for the next one. */
static void wait_for_next(struct link_serve *entry, bool was_copied)
{
    struct tl_link *link = entry->link;
    tl_list_remove(&entry->place);
    if (bytes_left(entry) == 0) return;
    struct tl_error error;
    if (is_on_device(entry) && tl_device_reader_go_on(&entry->reader, &error) != TL_OK) {
        fail_reading(entry, &error);
        return;
    }
    if (is_on_device(entry) && tl_device_reader_bytes(&entry->reader) == 0) {
        serve_set_state(entry, SERVE_STAGING);
        return;
    }
    /* Its end would be copied, and the bytes before it were not: they leave first. */
    bool is_leaving = !was_copied && is_of_a_file(entry) && is_copied(entry);
    if (is_leaving) serve_set_state(entry, SERVE_LEAVING);
    tl_list_push_back(is_leaving ? &link->answers.leaving : &link->answers.active, &entry->place);
}

void link_serves_left(struct tl_link *link)
{
    TL_LIST_FOREACH(&link->answers.leaving, place)
    {
        serve_set_state(TL_CONTAINER_OF(place, struct link_serve, place), SERVE_ACTIVE);
    }
    tl_list_splice_back(&link->answers.active, &link->answers.leaving);
}

/* Adds pieces of the active tensors, one after the other, until the frame is full. */
static void add_chunks(struct tl_link *link, struct tl_frame_builder *builder)
{
    activate_ready(link);
    struct tl_list waiting; /* those that must hash first */
    tl_list_init(&waiting);
    while (!tl_list_is_empty(&link->answers.active) && builder->frame.n_chunks < MAX_CHUNKS &&
           builder->head_bytes < HEAD_BUDGET_BYTES && builder->data_bytes < link->control->options.chunk_bytes) {
        struct link_serve *entry = TL_CONTAINER_OF(link->answers.active.next, struct link_serve, place);
        if (!serve_catch_up(entry)) {
            if (entry->state != SERVE_ACTIVE) continue;
            tl_list_remove(&entry->place);
            tl_list_push_back(&waiting, &entry->place);
            continue;
        }
        bool was_copied = is_copied(entry);
        if (!add_chunk(entry, builder)) continue;
        wait_for_next(entry, was_copied);
        activate_ready(link);
    }
    if (!tl_list_is_empty(&waiting)) {
        tl_list_splice_back(&link->answers.active, &waiting);
        link_flush_later(link);
    }
}

/* ------------------------------------------------------------------------------------------------------ frames -- */

static bool is_anything_waiting(const struct tl_link *link)
{
    return !tl_list_is_empty(&link->connection_messages) || !tl_list_is_empty(&link->to_request) ||
           link->cancels.count > 0 || link->received.count > link->framed_count ||
           !tl_list_is_empty(&link->answers.failures) || link_window_must_report(link) ||
           ((!tl_list_is_empty(&link->answers.ready) || !tl_list_is_empty(&link->answers.active)) &&
            !link_window_is_full(link));
}

/* The frame was sent: ends the serves that have nothing more to send. */
static void finish_frame(struct tl_link *link, struct tl_frame_builder *builder)
{
    link_connections_sent(link, builder->frame.n_connections);
    tl_numbers_drop(&link->cancels, builder->frame.n_cancels);
    link->framed_count += builder->frame.n_received;
    for (size_t i = 0; i < builder->frame.n_failures; i++) {
        struct link_serve *entry = builder->failed[i];
        serve_end(entry, entry->offer.tensor == NULL ? TL_SERVE_RECEIVED : TL_SERVE_CANCELLED);
    }
    for (size_t i = 0; i < builder->complete_count; i++) {
        struct link_serve *entry = builder->complete[i];
        link->control->stats.tensors_sent++;
        if (!entry->offer.is_one_shot) {
            serve_end(entry, TL_SERVE_RECEIVED);
            continue;
        }
        serve_set_state(entry, SERVE_SENT);
        tl_tensor_put(entry->offer.tensor);
        entry->offer.tensor = NULL;
    }
}

static void send_frame(struct tl_link *link)
{
    if (!tl_stream_can_send(link->stream) || !is_anything_waiting(link)) return;
    struct tl_frame_builder *builder = link->control->builder;
    tensorlane__v1__frame__init(&builder->frame);
    builder->head_bytes = 0;
    builder->complete_count = 0;
    builder->slice_count = 0;
    builder->data_bytes = 0;
    builder->frame.requests = builder->request_pointers;
    builder->frame.failures = builder->failure_pointers;
    builder->frame.chunks = builder->chunk_pointers;
    builder->frame.cancels = (uint64_t *)tl_numbers_items(&link->cancels);
    builder->frame.n_cancels = tl_min_u64(link->cancels.count, MAX_NUMBERS);
    builder->frame.n_received = tl_min_u64(link->received.count - link->framed_count, MAX_NUMBERS);
    if (builder->frame.n_received > 0) {
        builder->frame.received = (uint64_t *)tl_numbers_items(&link->received) + link->framed_count;
    }
    builder->frame.taken_bytes = link_window_update(link);
    builder->frame.connections = builder->connection_messages;
    builder->frame.n_connections = link_connections_add(link, builder->connection_messages);
    builder->head_bytes = 10 * (1 + builder->frame.n_cancels + builder->frame.n_received) +
                          builder->frame.n_connections * sizeof(struct tl_connection_message);
    add_requests(link, builder);
    if (!link_window_is_full(link)) add_chunks(link, builder);
    add_failures(link, builder);
    for (size_t i = 0; i < builder->frame.n_requests; i++)
        builder->request_pointers[i] = &builder->requests[i];
    for (size_t i = 0; i < builder->frame.n_failures; i++)
        builder->failure_pointers[i] = &builder->failures[i];
    for (size_t i = 0; i < builder->frame.n_chunks; i++)
        builder->chunk_pointers[i] = &builder->chunks[i];
    bool is_empty = builder->frame.n_connections + builder->frame.n_requests + builder->frame.n_failures +
                        builder->frame.n_chunks + builder->frame.n_cancels + builder->frame.n_received ==
                    0;
    if (is_empty && !link_window_must_report(link)) return;
    grpc_byte_buffer *message =
        tl_wire_write_with_data(&builder->frame.base, builder->slices, builder->slice_count, builder->data_bytes);
    for (size_t i = 0; i < builder->slice_count; i++)
        grpc_slice_unref(builder->slices[i]);
    if (message == NULL) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "%s: no memory for a frame", link->control->options.self.name);
        tl_link_close(link, &error);
        return;
    }
    link->control->stats.frames_sent++;
    tl_stream_report_sent_by_kernel(link->stream, !tl_list_is_empty(&link->answers.leaving));
    tl_stream_send(link->stream, message);
    link_window_sent(link, builder->data_bytes);
    link_stall_sent(link, builder->frame.n_chunks);
    finish_frame(link, builder);
}

void link_send_frames(struct tl_link *link)
{
    if (link->state != LINK_UP && link->state != LINK_DRAINING) return;
    send_frame(link);
    link_unsent_release_quota(link);
    if (link->state != LINK_CLOSING) link_stall_watch(link);
}
