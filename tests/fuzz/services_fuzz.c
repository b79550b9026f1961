// SPDX-License-Identifier: Apache-2.0
/*
 * A whole worker, and every method that it serves, on calls that are driven by hand (fake_stream.h).
 *
 * Input: one byte of options, then commands of one byte and what they need: calls of any method, messages as they come
 * from the wire or nearly right ones, half-closes, ends and breaks of calls, time that is up, and what the worker's own
 * process does meanwhile: publish, send, receive, end steps. A worker is opened and closed for each input. Its data
 * plane, whose probing takes ten times as long as the rest, is there only if the options say so.
 *
 * Every message that a call is answered with must be one that the method promises, and the pieces of a tensor must make
 * one. When all calls have broken, no receiver waits, nothing is held, and what clients have pushed is accounted for;
 * when the worker is closed, every operation has completed exactly once.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <xxhash.h>

#include <tensorlane/tensorlane.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/requests.h"
#include "control/responses.h"
#include "fakes/table_list.h"
#include "fakes/whole_steps.h"
#include "fuzz/fake_stream.h"
#include "fuzz/fixed_random.h"
#include "fuzz/kept_threads.h"
#include "fuzz/link_frames.h"
#include "server/worker_internal.h"

#define HELD_BYTES 65536
#define CHUNK_BYTES 4096
#define TEXTS 12
#define STEPS 4
#define MAX_TENSOR_BYTES (255 * 64)
#define CONFIG(protocol)                                                                                               \
    "{\"protocol\": \"" protocol "\","                                                                                 \
    " \"cluster\": {\"ps\": [\"127.0.0.1:1\"], \"worker\": [\"127.0.0.1:2\", \"127.0.0.1:3\"]},"                       \
    " \"limits\": {\"chunk\": \"4KiB\", \"inflight\": \"8KiB\", \"held\": \"64KiB\", \"waiting\": 4}}"

/* By number in an input, whose meaning does not change when another method is added. */
static const char *const methods[] = {
    "/tensorlane.v1.Transfer/Exchange",
    "/tensorlane.v1.Transfer/Receive",
    "/tensorlane.v1.Transfer/Publish",
    "/tensorlane.v1.Transfer/Withdraw",
    "/tensorlane.v1.Transfer/List",
    "/tensorlane.v1.Cluster/Identify",
    "/tensorlane.v1.Cluster/Probe",
    "/tensorlane.v1.Cluster/Echo",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
};

static const char *const texts[TEXTS] = {
    "p0",
    "p1",
    "*",
    "",
    "w",
    "tensorlane.v1.Transfer",
    "tensorlane/v1/transfer.proto",
    "[!a-o]*",
    "missing",
    "\xff",
    "\xc3\xa4/w",
    "tensorlane.v1.Frame",
};

/* What a client of Receive has so far. */
struct received {
    bool is_begun;
    uint64_t size_bytes;
    uint64_t received_bytes;
    XXH3_state_t *hash_state;
};

static struct tl_wire_arena arena;
static unsigned char tensor_bytes[MAX_TENSOR_BYTES]; /* link_frames_byte of each offset */
static struct received received[FAKE_STREAMS];

/* The state of one input. */
static struct tl_worker *worker;
static struct tl_cq *cq;
static uint64_t submitted_count;
static uint64_t completed_count;
static bool has_slow_probes; /* those of peers end at certain commands only */

/* ----------------------------------------------------------------------------------------------------- answers -- */

static void expect_piece(struct received *client, grpc_byte_buffer *message)
{
    ProtobufCMessage *base;
    struct tl_wire_data data;
    TL_CHECK(tl_wire_read(&tensorlane__v1__receive_response__descriptor, message, &arena, &base, &data, NULL) == TL_OK);
    const Tensorlane__V1__ReceiveResponse *piece = (const Tensorlane__V1__ReceiveResponse *)base;
    TL_CHECK((piece->meta_data != NULL) == !client->is_begun && data.left_bytes <= CHUNK_BYTES);
    if (!client->is_begun) {
        struct tl_meta_data meta_data;
        TL_CHECK(tl_wire_to_meta_data(piece->meta_data, &meta_data, NULL) == TL_OK);
        client->is_begun = true;
        client->size_bytes = meta_data.size_bytes;
        XXH3_64bits_reset(client->hash_state);
    }
    TL_CHECK(piece->offset == client->received_bytes);
    client->received_bytes += data.left_bytes;
    TL_CHECK(client->received_bytes <= client->size_bytes);
    while (data.left_bytes > 0) {
        const void *run;
        size_t count = tl_wire_data_next(&data, data.left_bytes, &run);
        XXH3_64bits_update(client->hash_state, run, count);
    }
    tl_wire_data_fini(&data);
    if (!piece->has_checksum) return;
    TL_CHECK(client->received_bytes == client->size_bytes);
    TL_CHECK(piece->checksum == XXH3_64bits_digest(client->hash_state));
}

static void on_send(unsigned slot, grpc_byte_buffer *message)
{
    struct tl_listing_builder builder = {0};
    struct tl_listing listing;
    struct tl_description description;
    struct tl_publish_response published;
    int health;
    uint64_t number;
    if (fake_stream_is_client(slot)) return;
    const char *method = fake_stream_called(slot);
    if (strcmp(method, "/tensorlane.v1.Transfer/Receive") == 0) {
        expect_piece(&received[slot], message);
    } else if (strcmp(method, "/tensorlane.v1.Transfer/List") == 0) {
        TL_CHECK(tl_list_response_read(message, &arena, &builder, NULL) == TL_OK);
        tl_listing_builder_finish(&builder, &listing);
        tl_listing_fini(&listing);
    } else if (strcmp(method, "/tensorlane.v1.Transfer/Publish") == 0) {
        TL_CHECK(tl_publish_response_read(message, &arena, &published, NULL) == TL_OK);
        TL_CHECK((published.publication != 0) != published.wants_data);
    } else if (strcmp(method, "/tensorlane.v1.Transfer/Withdraw") == 0) {
        TL_CHECK(tl_withdraw_response_read(message, &arena, &number, NULL) == TL_OK);
    } else if (strcmp(method, "/tensorlane.v1.Cluster/Identify") == 0) {
        TL_CHECK(tl_identify_response_read(message, &arena, &description, NULL) == TL_OK);
        TL_CHECK(strcmp(description.job, "ps") == 0 && description.peer_count == 3);
        tl_description_fini(&description);
    } else if (strncmp(method, "/grpc.health.v1.Health/", 23) == 0) {
        TL_CHECK(tl_health_response_read(message, &arena, &health, NULL) == TL_OK && health > 0);
    }
}

/* ------------------------------------------------------------------------------------------- nearly right ones -- */

/* A message of one text and two numbers, which most requests are: the field of the text, the text, the numbers. */
static grpc_byte_buffer *compose_text(struct fuzz_input *input)
{
    static const char tags[] = {0x0a, 0x0a, 0x0a, 0x0a, 0x1a, 0x22, 0x2a, 0x32};
    char message[256];
    uint8_t choice = fuzz_take_u8(input);
    const char *text = texts[fuzz_take_u8(input) % TEXTS];
    size_t length = strlen(text);
    size_t used = 0;
    message[used++] = tags[choice & 7];
    message[used++] = (char)length;
    memcpy(message + used, text, length);
    used += length;
    if ((choice & 8) != 0) {
        message[used++] = 0x10;
        message[used++] = (char)(fuzz_take_u8(input) % STEPS);
    }
    if ((choice & 16) != 0) {
        message[used++] = 0x18;
        message[used++] = 1;
    }
    return fuzz_message(message, used);
}

static uint64_t checksum_of(const unsigned char *bytes, size_t count, uint8_t flags)
{
    return XXH3_64bits(bytes, count) + ((flags & 0x40) != 0 ? 1 : 0);
}

/* A message of Publish: the first one, or a later one. */
static grpc_byte_buffer *compose_publish(struct fuzz_input *input)
{
    static const Tensorlane__V1__DType dtypes[] = {TENSORLANE__V1__DTYPE__U8, TENSORLANE__V1__DTYPE__STRING,
                                                   TENSORLANE__V1__DTYPE__F6_E2M3, TENSORLANE__V1__DTYPE__INVALID};
    static unsigned char zeros[MAX_TENSOR_BYTES];
    Tensorlane__V1__PublishRequest request = TENSORLANE__V1__PUBLISH_REQUEST__INIT;
    Tensorlane__V1__MetaData meta_data = TENSORLANE__V1__META_DATA__INIT;
    uint8_t flags = fuzz_take_u8(input);
    uint64_t size = (uint64_t)fuzz_take_u8(input) * 64;
    uint64_t dim = size;
    meta_data.dtype = dtypes[flags & 3];
    if ((flags & 3) == 1) dim = size / 8;
    if ((flags & 3) == 2) dim = size / 3 * 4;
    meta_data.is_dead = (flags & 3) == 3;
    meta_data.n_dims = (flags & 3) != 3;
    meta_data.dims = &dim;
    meta_data.size_bytes = size;
    if ((flags & 4) != 0) {
        request.key = (char *)texts[fuzz_take_u8(input) % TEXTS];
        request.meta_data = &meta_data;
    }
    /* All zeros are strings without characters; other data fits no string tensor. */
    request.data.data = (flags & 16) != 0 ? tensor_bytes : zeros;
    request.data.len = (flags & 8) != 0 ? size : (size_t)fuzz_take_u8(input) * 64;
    request.has_checksum = (flags & 32) != 0;
    request.checksum = checksum_of(request.data.data, request.data.len, flags);
    grpc_byte_buffer *message = tl_wire_write(&request.base);
    TL_CHECK(message != NULL);
    return message;
}

/* --------------------------------------------------------------------------------------------- the own process -- */

static struct tl_tensor *make_tensor(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    TL_CHECK(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, NULL) == TL_OK);
    if (size_bytes > 0) memcpy(tl_tensor_data(tensor), tensor_bytes, size_bytes);
    return tensor;
}

static const char *take_key(struct fuzz_input *input)
{
    return link_frames_keys[fuzz_take_u8(input) % LINK_FRAMES_MAX_KEYS];
}

static void publish_own(struct fuzz_input *input)
{
    struct tl_tensor *tensor = make_tensor((uint64_t)fuzz_take_u8(input) * 64);
    TL_CHECK(tl_publish(worker, take_key(input), fuzz_take_u8(input) % STEPS, tensor, NULL) == TL_OK);
    tl_tensor_put(tensor);
}

static void send_own(struct fuzz_input *input)
{
    struct tl_tensor *tensor = make_tensor((uint64_t)fuzz_take_u8(input) * 64);
    const char *key = take_key(input);
    enum tl_status status =
        tl_send(worker, key, fuzz_take_u8(input) % STEPS, tensor, TL_TIMEOUT_DEFAULT, cq, NULL, NULL, NULL);
    if (status == TL_OK) submitted_count++;
    tl_tensor_put(tensor);
}

static void receive_own(struct fuzz_input *input)
{
    static const char *const names[] = {LINK_FRAMES_PEER, LINK_FRAMES_SELF};
    uint8_t flags = fuzz_take_u8(input);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .wants_checksum = (flags & 2) != 0};
    tl_peer_id peer;
    const char *key = take_key(input);
    TL_CHECK(tl_worker_find_peer(worker, names[flags & 1], &peer, NULL) == TL_OK);
    enum tl_status status =
        tl_recv(worker, peer, key, fuzz_take_u8(input) % STEPS, &options, TL_TIMEOUT_DEFAULT, cq, NULL, NULL, NULL);
    if (status == TL_OK) submitted_count++;
}

static void end_own(uint8_t byte)
{
    uint64_t step = byte % STEPS;
    if ((byte & 0x80) != 0) {
        TL_CHECK(tl_worker_abort_step(worker, step, (byte & 0x40) != 0 ? TL_UNAVAILABLE : TL_ABORTED, "enough", NULL) ==
                 TL_OK);
    } else if ((byte & 0x20) != 0) {
        enum tl_status status = tl_withdraw(worker, link_frames_keys[byte % LINK_FRAMES_MAX_KEYS], NULL);
        TL_CHECK(status == TL_OK || status == TL_NOT_FOUND);
    } else {
        TL_CHECK(tl_worker_end_step(worker, step, NULL, NULL) == TL_OK);
    }
}

static void take_completions(void)
{
    struct tl_completion completion;
    while (tl_cq_poll(cq, &completion, 1) == 1) {
        completed_count++;
        TL_CHECK(completion.status.code == TL_OK || completion.status.message[0] != '\0');
        tl_tensor_put(completion.tensor);
    }
}

/* -------------------------------------------------------------------------------------------------------- time -- */

#define MAX_SKIPPED_NS (24 * 3600 * TL_NS_PER_SEC)
#define READ_NS 1000
#define SLOW_READ_NS (200 * READ_NS)

/* This thread's clock while commands run, or 0: each reading of it takes a fixed time, so that what an input reaches
 * does not depend on the machine, and commands skip time. With the real one, timers that are armed again and again
 * would always be due before those that wait for long. The linker passes the calls here. */
static _Thread_local int64_t clock_ns;
static int64_t read_ns;

int __real_clock_gettime(clockid_t clock, struct timespec *ret_time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret_time);

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret_time)
{
    if (clock != CLOCK_MONOTONIC || clock_ns == 0) return __real_clock_gettime(clock, ret_time);
    clock_ns += read_ns;
    ret_time->tv_sec = clock_ns / TL_NS_PER_SEC;
    ret_time->tv_nsec = clock_ns % TL_NS_PER_SEC;
    return 0;
}

int __real_epoll_wait(int fd, struct epoll_event *events, int capacity, int timeout_ms);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int capacity, int timeout_ms);

/* The worker's helper would run its loop beside this thread when nothing else has for a while. */
int __wrap_epoll_wait(int fd, struct epoll_event *events, int capacity, int timeout_ms)
{
    return __real_epoll_wait(fd, events, capacity, timeout_ms > 0 ? -1 : timeout_ms);
}

/* Goes on to when the first timer is due, or each one that is armed now. */
static void skip_time(bool is_to_last)
{
    struct tl_timers *timers = tl_loop_timers(worker->loop);
    int64_t until_ns = tl_timers_next_due_ns(timers);
    for (size_t i = 0; is_to_last && i < timers->count; i++)
        until_ns = timers->heap[i]->due_ns > until_ns ? timers->heap[i]->due_ns : until_ns;
    if (until_ns == TL_TIME_NEVER) return;
    if (until_ns > clock_ns) clock_ns += until_ns - clock_ns < MAX_SKIPPED_NS ? until_ns - clock_ns : MAX_SKIPPED_NS;
    (void)tl_timers_fire_due(timers, tl_clock_now_ns(), &(struct tl_quota){0});
}

/* ---------------------------------------------------------------------------------------------------- commands -- */

static void open_call(size_t method)
{
    int slot = fake_stream_accept(fake_stream_method(methods[method % TL_ARRAY_COUNT(methods)]));
    if (slot < 0) return;
    XXH3_state_t *hash_state = received[slot].hash_state;
    received[slot] = (struct received){.hash_state = hash_state};
}

static void give_command(uint8_t command, struct fuzz_input *input)
{
    unsigned slot = fuzz_take_u8(input) % FAKE_STREAMS;
    if (command == 1) (void)fake_stream_give(slot, fuzz_take_message(input));
    if (command == 2) (void)fake_stream_give(slot, compose_text(input));
    if (command == 3) (void)fake_stream_give(slot, compose_publish(input));
    if (command == 4) (void)fake_stream_give(slot, link_frames_compose(input, (slot & 4) != 0));
}

static void call_command(uint8_t command, struct fuzz_input *input)
{
    struct tl_error status;
    unsigned slot = fuzz_take_u8(input) % FAKE_STREAMS;
    tl_error_set(&status, TL_UNAVAILABLE, "the connection broke");
    if (command == 5) (void)fake_stream_take(slot);
    if (command == 6) (void)fake_stream_half_close(slot);
    if (command == 7) (void)fake_stream_end(slot);
    if (command == 8) (void)fake_stream_break(slot, &status);
}

static void take_all(void)
{
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++)
        (void)fake_stream_take(slot);
}

static void run_command(struct fuzz_input *input)
{
    uint8_t byte = fuzz_take_u8(input);
    uint8_t command = byte & 15;
    if (command == 0) open_call(fuzz_take_u8(input));
    if (command >= 1 && command <= 4) give_command(command, input);
    if (command >= 5 && command <= 8) call_command(command, input);
    if (command == 9) skip_time((byte & 16) != 0);
    if (command == 10) publish_own(input);
    if (command == 11) send_own(input);
    if (command == 12) receive_own(input);
    if (command == 13) end_own(fuzz_take_u8(input));
    if (command >= 14) take_all();
    if (command == 14 && (byte & 16) != 0) has_slow_probes = (byte & 32) != 0;
    if (!has_slow_probes || command == 15) kept_threads_run_held();
    (void)tl_loop_run_once(worker->loop, 0);
    take_completions();
}

/* --------------------------------------------------------------------------------------------------------- end -- */

/* Without calls there is nothing left of their requests. */
static void expect_nothing_held(void)
{
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    /* What was reserved for askers that could come back is free again; they do not come. */
    TL_CHECK(expire_all(worker->table, INT64_MAX - 1) == TL_TIME_NEVER);
    for (uint64_t step = 0; step < STEPS; step++)
        TL_CHECK(tl_worker_end_step(worker, step, NULL, NULL) == TL_OK);
    (void)table_withdraw_matching(worker->table, "*");
    take_completions();
    TL_CHECK(tl_worker_stats(worker, &stats, NULL) == TL_OK);
    TL_CHECK(stats.waiting_receivers == 0);
    TL_CHECK(tl_shares_used(worker->sources.pushed) == 0);
}

static void break_calls(void)
{
    struct tl_error status;
    tl_error_set(&status, TL_UNAVAILABLE, "the connection broke");
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++)
        (void)fake_stream_break(slot, &status);
}

static void close_worker(void)
{
    clock_ns = 0; /* it waits for threads, which have another */
    fake_stream_ends_itself = true;
    tl_worker_close(worker, 0);
    fake_stream_ends_itself = false;
    take_completions();
    kept_threads_run_held();
    TL_CHECK(completed_count == submitted_count);
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++)
        TL_CHECK(!fake_stream_is_open(slot));
    tl_cq_destroy(cq);
}

/* ------------------------------------------------------------------------------------------------------- start -- */

/* The memory of the worker's arena, which the next worker gets. To make and free 4 MiB under AddressSanitizer takes a
 * third of the time of a small input. The linker passes the calls here. */
static void *kept_memory;
static size_t kept_bytes;

enum tl_status __real_tl_wire_arena_init(struct tl_wire_arena *made, size_t capacity, struct tl_error *ret_error);
enum tl_status __wrap_tl_wire_arena_init(struct tl_wire_arena *made, size_t capacity, struct tl_error *ret_error);
void __real_tl_wire_arena_fini(struct tl_wire_arena *ended);
void __wrap_tl_wire_arena_fini(struct tl_wire_arena *ended);

enum tl_status __wrap_tl_wire_arena_init(struct tl_wire_arena *made, size_t capacity, struct tl_error *ret_error)
{
    bool is_kept = kept_memory != NULL && capacity == kept_bytes;
    enum tl_status status = __real_tl_wire_arena_init(made, is_kept ? 1 : capacity, ret_error);
    if (status != TL_OK || !is_kept) return status;
    free(made->memory);
    made->memory = kept_memory;
    made->capacity = capacity;
    kept_memory = NULL;
    return TL_OK;
}

void __wrap_tl_wire_arena_fini(struct tl_wire_arena *ended)
{
    if (kept_memory == NULL && ended->memory != NULL) {
        kept_memory = ended->memory;
        kept_bytes = ended->capacity;
        ended->memory = NULL;
    }
    __real_tl_wire_arena_fini(ended);
}

static void open_worker(bool has_data_plane)
{
    const struct tl_worker_options options = {.size_bytes = sizeof(options),
                                              .config_json = has_data_plane ? CONFIG("auto") : CONFIG("grpc"),
                                              .job = "ps",
                                              .task = 0,
                                              .progress = TL_PROGRESS_CALLER};
    TL_CHECK(tl_worker_open(&options, &worker, NULL) == TL_OK);
    TL_CHECK(tl_cq_create(&cq, NULL) == TL_OK);
    submitted_count = 0;
    completed_count = 0;
}

static void start(void)
{
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    TL_CHECK(tl_wire_arena_init(&arena, 4 << 20, NULL) == TL_OK);
    kept_threads_hold("tl-probe");
    /* gRPC's threads live as long as any loop; without this loop they would be started for each worker. */
    static struct tl_loop *keeper;
    TL_CHECK(tl_loop_create(&keeper, NULL) == TL_OK);
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++) {
        received[slot].hash_state = XXH3_createState();
        TL_CHECK(received[slot].hash_state != NULL);
    }
    fake_stream_on_send = on_send;
    for (size_t i = 0; i < MAX_TENSOR_BYTES; i++)
        tensor_bytes[i] = link_frames_byte(i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    fixed_random_begin();
    if (arena.memory == NULL) start();
    struct fuzz_input input = {.data = data, .left = len_bytes};
    uint8_t options = fuzz_take_u8(&input);
    bool is_closed_amid = (options & 1) != 0;
    open_worker((options & 2) != 0);
    TL_CHECK(fake_stream_method_count() == TL_ARRAY_COUNT(methods));
    clock_ns = tl_clock_now_ns();
    read_ns = (options & 12) == 12 ? SLOW_READ_NS : READ_NS;
    has_slow_probes = false;
    while (input.left > 0)
        run_command(&input);
    if (!is_closed_amid) {
        break_calls();
        expect_nothing_held();
    }
    close_worker();
    return 0;
}
