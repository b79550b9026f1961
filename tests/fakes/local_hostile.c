// SPDX-License-Identifier: Apache-2.0
/* The hostile peer: connecting by hand, and the steps of its script. */
#include "fakes/local_hostile.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/memory/pages.h"
#include "tensor/mapped_file.h"

#define SLOTS 16
#define SEGMENT_BYTES 8192
#define SOURCE_BYTES (SEGMENT_BYTES + TL_SLOT_BYTES) /* what writes and messages are made of */
#define GUARD 0xa5
#define LONGEST_READ_MS 60000

/* ------------------------------------------------------------------------------------------------- the victim -- */

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    const struct hostile *hostile = owner;
    uint8_t copy[TL_SLOT_BYTES];
    TL_CHECK(hostile->broken == 0 && len_bytes <= sizeof(copy));
    memcpy(copy, data, len_bytes);
}

static void on_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    const struct hostile *hostile = owner;
    (void)immediate;
    (void)len_bytes;
    TL_CHECK(hostile->broken == 0);
}

static void on_broken(void *owner, const struct tl_error *reason)
{
    struct hostile *hostile = owner;
    TL_CHECK(hostile->broken++ == 0 && reason->message[0] != '\0');
}

static void on_drained(void *owner)
{
    struct hostile *hostile = owner;
    TL_CHECK(hostile->broken == 1 && hostile->works_out == 0 && hostile->drained++ == 0);
}

static const struct tl_queue_pair_events events = {
    .message = on_message, .immediate = on_immediate, .broken = on_broken, .drained = on_drained};

struct posted {
    struct tl_work work;
    struct hostile *hostile;
};

static void on_done(struct tl_work *work, enum tl_status status)
{
    struct posted *posted = TL_CONTAINER_OF(work, struct posted, work);
    TL_CHECK(status == TL_OK || status == TL_CANCELLED);
    posted->hostile->works_out--;
    free(posted);
}

static struct tl_work *new_work(struct hostile *hostile)
{
    struct posted *posted = malloc(sizeof(*posted));
    TL_CHECK(posted != NULL);
    *posted = (struct posted){.work = {.magic = TL_WORK_MAGIC, .done = on_done}, .hostile = hostile};
    hostile->works_out++;
    return &posted->work;
}

static void poll_once(struct hostile *hostile)
{
    const struct local_pair *pair = local_pair_of(hostile->pair);
    /* A thread that has read writes this descriptor. */
    struct pollfd done = {.fd = local_provider_of(hostile->provider)->done_fd, .events = POLLIN};
    for (;;) { /* Disarming makes the next poll look at the sockets. */
        tl_provider_disarm(hostile->provider, true);
        unsigned events = hostile->provider->ops->poll(hostile->provider);
        if (hostile->pair == NULL || !local_pair_is_reading(pair)) return;
        int ready = events == 0 ? poll(&done, 1, LONGEST_READ_MS) : 1;
        TL_CHECK(ready == 1 || (ready < 0 && errno == EINTR)); /* libFuzzer has a timer */
    }
}

/* -------------------------------------------------------------------------------------------------- connecting -- */

static int make_memory(uint64_t len_bytes, void **ret_address)
{
    int fd = memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    TL_CHECK(fd >= 0 && ftruncate(fd, (off_t)len_bytes) == 0);
    TL_CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    if (ret_address == NULL) return fd;
    *ret_address = mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    TL_CHECK(*ret_address != MAP_FAILED);
    return fd;
}

static void call(struct hostile *hostile, const struct local_address *victim, void (*show)(int ring_fd))
{
    void *memory;
    int fd = make_memory(local_ring_bytes(SLOTS), &memory);
    local_ring_place(&hostile->ring, memory, SLOTS);
    if (show != NULL) show(fd);
    const uint64_t proof = 42;
    struct local_hello hello = caller_hello(victim, SLOTS);
    hello.proof_address = (uintptr_t)&proof;
    hello.proof = proof;
    caller_call(&hostile->caller, victim, &hello, fd);
    while (!local_pair_of(hostile->pair)->has_connected) {
        TL_CHECK(hostile->broken == 0);
        poll_once(hostile);
    }
    close(fd);
    fd = caller_take(&hostile->caller, &hello);
    memory = mmap(NULL, local_ring_bytes(hello.slot_count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    TL_CHECK(memory != MAP_FAILED);
    local_ring_place(&hostile->theirs, memory, hello.slot_count);
    hostile->theirs_fd = fd;
}

static void expose(struct hostile *hostile)
{
    struct tl_error error;
    TL_CHECK(tl_region_map(hostile->provider, SEGMENT_BYTES, &hostile->region, &error) == TL_OK);
    TL_CHECK(tl_queue_pair_expose(hostile->pair, hostile->region, hostile->region->address, SEGMENT_BYTES,
                                  &hostile->exposure, &error) == TL_OK);
    hostile->users = malloc(HOSTILE_TARGET_BYTES);
    hostile->source = calloc(1, SOURCE_BYTES);
    TL_CHECK(hostile->users != NULL && hostile->source != NULL);
    memset(hostile->users, GUARD, HOSTILE_TARGET_BYTES);
    if (hostile->pair->outside_refusal != NULL) return;
    TL_CHECK(tl_queue_pair_expose(hostile->pair, NULL, hostile->users + HOSTILE_TARGET_BYTES / 4,
                                  HOSTILE_TARGET_BYTES / 2, &hostile->users_exposure, &error) == TL_OK);
}

/* Opens both sides on the provider that is there. */
static void open_sides(struct hostile *hostile, void (*show)(int ring_fd))
{
    struct tl_error error;
    struct tl_pair_address bytes;
    struct local_address victim;
    const struct tl_queue_pair_options options = {.slot_count = SLOTS, .work_count = 16, .keys = TL_KEYS_REGION};
    TL_CHECK(tl_queue_pair_create(hostile->provider, &options, &events, hostile, &hostile->pair, &error) == TL_OK);
    hostile->pair->ops->get_address(hostile->pair, &bytes);
    TL_CHECK(local_address_read(&bytes, &victim));
    caller_open(&hostile->caller, &victim);
    local_address_write(&hostile->caller.self, &bytes);
    TL_CHECK(hostile->pair->ops->connect(hostile->pair, &bytes, &error) == TL_OK);
    call(hostile, &victim, show);
    expose(hostile);
    hostile->segment = make_memory(SEGMENT_BYTES, NULL);
    hostile->unsealed = memfd_create("hostile", MFD_CLOEXEC);
    TL_CHECK(hostile->unsealed >= 0 && ftruncate(hostile->unsealed, SEGMENT_BYTES) == 0);
}

void hostile_open_shown(struct hostile *hostile, void (*show)(int ring_fd))
{
    struct tl_error error;
    *hostile = (struct hostile){.owns_provider = true};
    TL_CHECK(tl_local_open(&(struct tl_local_options){0}, &hostile->provider, &error) == TL_OK);
    open_sides(hostile, show);
}

void hostile_open(struct hostile *hostile)
{
    hostile_open_shown(hostile, NULL);
}

void hostile_open_on(struct hostile *hostile, struct tl_provider *provider)
{
    *hostile = (struct hostile){.provider = provider};
    open_sides(hostile, NULL);
}

/* ------------------------------------------------------------------------------------------------------ script -- */

static uint64_t take(struct hostile_input *input, unsigned len_bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < len_bytes && input->left_bytes > 0; i++, input->left_bytes--)
        value |= (uint64_t)*input->data++ << (8 * i);
    return value;
}

/* Takes a number that is near a valid size, or far from it. */
static uint64_t take_size(struct hostile_input *input)
{
    switch (take(input, 1) % 6) {
    case 0:
        return take(input, 1);
    case 1:
        return take(input, 2);
    case 2:
        return UINT64_MAX - take(input, 2);
    case 3:
        return HOSTILE_TARGET_BYTES / 2 - take(input, 1) + 2;
    case 4:
        return (UINT64_C(1) << (take(input, 1) % 64)) - 1;
    default:
        return take(input, 8);
    }
}

static void write_slot(struct hostile *hostile, struct hostile_input *input)
{
    uint32_t number = hostile->sequence + (take(input, 1) % 8 == 0 ? (uint32_t)take_size(input) : 0);
    struct local_slot *slot = local_ring_slot(&hostile->theirs, number);
    slot->kind = take(input, 1) % 8 == 0 ? (uint16_t)take(input, 2) : (uint16_t)(1 + take(input, 1) % 3);
    slot->flags = (uint16_t)take(input, 1);
    slot->immediate = (uint32_t)take(input, 4);
    slot->message_bytes = take(input, 1) % 4 == 0 ? (uint32_t)take_size(input) : (uint32_t)(take(input, 2) % 1200);
    if (slot->kind != LOCAL_SLOT_MESSAGE) {
        slot->len_bytes = take_size(input);
        slot->offset_bytes = take(input, 1) % 2 ? take_size(input) : 0;
        slot->source = take(input, 1) % 2 ? take_size(input) : (uintptr_t)hostile->source;
        slot->exposure = take(input, 1) % 4 ? 0 : (uint32_t)take_size(input);
        slot->generation = take(input, 1) % 4 ? 0 : (uint32_t)take_size(input);
    }
    atomic_store_explicit(&slot->sequence, number + 1, memory_order_release);
    if (number == hostile->sequence) hostile->sequence++;
}

static void write_word(struct hostile *hostile, struct hostile_input *input)
{
    _Atomic uint32_t *const words[] = {&hostile->ring.head->state,      &hostile->ring.head->consumed,
                                       &hostile->ring.head->answered,   &hostile->ring.head->packets,
                                       &hostile->theirs.head->state,    &hostile->theirs.head->consumed,
                                       &hostile->theirs.head->answered, &hostile->theirs.head->packets};
    _Atomic uint32_t *word = words[take(input, 1) % TL_ARRAY_COUNT(words)];
    uint32_t value =
        take(input, 1) % 2 ? atomic_load_explicit(word, memory_order_relaxed) + 1 : (uint32_t)take_size(input);
    atomic_store_explicit(word, value, memory_order_relaxed);
}

/* Fills in what the victim compares with the file, or nearly that. Returns the file's descriptor. */
static int fill_file_packet(struct hostile *hostile, struct hostile_input *input, struct local_file_packet *packet)
{
    const int files[] = {hostile->segment, hostile->unsealed, hostile->caller.out};
    int fd = files[take(input, 1) % TL_ARRAY_COUNT(files)];
    struct stat info;
    TL_CHECK(fstat(fd, &info) == 0);
    packet->number = hostile->file_number + 1;
    if (take(input, 1) % 8 == 0) packet->number = take_size(input);
    hostile->file_number = packet->number;
    packet->size_bytes = take(input, 1) % 4 ? (uint64_t)info.st_size : take_size(input);
    packet->modified_seconds = info.st_mtim.tv_sec;
    packet->modified_ns = take(input, 1) % 4 ? (uint32_t)info.st_mtim.tv_nsec : (uint32_t)take_size(input);
    return fd;
}

/* Sends a packet, or writes to the victim's eventfd. */
static void send_packet(struct hostile *hostile, struct hostile_input *input)
{
    union local_packet packet;
    memset(&packet, 0, sizeof(packet));
    packet.kind = (uint32_t)take(input, 1) % 8;
    if (packet.kind == 0) {
        uint64_t count = take_size(input);
        (void)!write(hostile->caller.wake_out, &count, sizeof(count));
        return;
    }
    packet.segment.number = take(input, 1) % 2 ? 1 : (uint32_t)take_size(input);
    packet.segment.len_bytes = take(input, 1) % 4 ? SEGMENT_BYTES : take_size(input);
    static const size_t sizes[] = {4, sizeof(struct local_segment_packet), sizeof(struct local_hello), 1};
    size_t len_bytes = sizes[1];
    bool is_memory = packet.kind == LOCAL_PACKET_MEMORY || packet.kind == LOCAL_PACKET_FORGET;
    if (is_memory) {
        uint64_t number = hostile->memory_number + (packet.kind == LOCAL_PACKET_MEMORY ? 1 : 0);
        if (take(input, 1) % 4)
            packet.memory.number = hostile->memory_number = number;
        else
            packet.memory.number = take_size(input);
        packet.memory.len_bytes = take_size(input);
        len_bytes = sizeof(packet.memory);
    }
    int fd = hostile->segment;
    if (packet.kind == LOCAL_PACKET_FILE) {
        fd = fill_file_packet(hostile, input, &packet.file);
        len_bytes = sizeof(packet.file);
    }
    if (take(input, 1) % 4 == 0) len_bytes = sizes[take(input, 1) % TL_ARRAY_COUNT(sizes)];
    bool has_fd = packet.kind != LOCAL_PACKET_DETACH && packet.kind != LOCAL_PACKET_FORGET;
    if (take(input, 1) % 8 == 0) has_fd = !has_fd;
    (void)local_send(hostile->caller.out, &packet, len_bytes, has_fd ? fd : -1);
}

/* Looks for memory of a device that the peer has named. */
static void find_memory(struct hostile *hostile, struct hostile_input *input)
{
    struct tl_peer_memory memory;
    struct local_memory_descriptor part = {.number = take(input, 1) % 2 ? hostile->memory_number : take_size(input),
                                           .offset_bytes = take_size(input)};
    struct tl_descriptor descriptor = {.len_bytes = sizeof(part)};
    uint64_t len_bytes = take_size(input);
    int file = -1;
    memcpy(descriptor.bytes, &part, sizeof(part));
    enum tl_status status = hostile->pair->ops->find_memory(hostile->pair, &descriptor, len_bytes, &memory,
                                                            take(input, 1) % 2 ? &file : NULL, NULL);
    if (file >= 0) close(file);
    if (status != TL_OK) return;
    TL_CHECK(memory.number == part.number && memory.offset_bytes <= memory.len_bytes);
    TL_CHECK(len_bytes <= memory.len_bytes - memory.offset_bytes);
}

/* Maps a file that the peer has passed, and reads it. */
static void map_file(struct hostile *hostile, struct hostile_input *input)
{
    struct tl_mapped_file *file;
    uint64_t number = take(input, 1) % 2 ? hostile->file_number : take_size(input);
    struct tl_descriptor descriptor = {.len_bytes = take(input, 1) % 8 ? sizeof(number) : sizeof(number) - 1};
    memcpy(descriptor.bytes, &number, sizeof(number));
    if (hostile->pair->ops->map(hostile->pair, &descriptor, &file, NULL) != TL_OK) return;
    TL_CHECK(tl_mapped_file_size_bytes(file) == SEGMENT_BYTES);
    uint8_t copy[SEGMENT_BYTES];
    memcpy(copy, tl_mapped_file_data(file), SEGMENT_BYTES);
    tl_mapped_file_put(file);
}

/* Posts what a correct side posts meanwhile, to places that the peer has named. */
static void post(struct hostile *hostile, struct hostile_input *input)
{
    struct tl_queue_pair *pair = hostile->pair;
    if (hostile->broken > 0 || pair->ops->space(pair) < 2) return;
    unsigned choice = (unsigned)take(input, 1) % 8;
    if (choice == 4) {
        map_file(hostile, input);
    } else if (choice == 0) {
        find_memory(hostile, input);
    } else if (choice % 2) {
        pair->ops->message(pair, hostile->source, (uint32_t)take(input, 2) % TL_SLOT_BYTES, new_work(hostile));
    } else {
        struct local_descriptor place = {.kind = 1 + (uint32_t)take(input, 1) % 3,
                                         .number = take(input, 1) % 2 ? 1 : (uint32_t)take_size(input),
                                         .offset_bytes = take(input, 1) % 2 ? 0 : take_size(input),
                                         .len_bytes = take(input, 1) % 2 ? 64 : take_size(input)};
        struct tl_descriptor descriptor = {.len_bytes = sizeof(place)};
        memcpy(descriptor.bytes, &place, sizeof(place));
        pair->ops->write(pair, NULL, hostile->source, take(input, 2) % SEGMENT_BYTES, &descriptor,
                         take(input, 1) % 2 ? 0 : take_size(input), true, 1, new_work(hostile));
    }
    tl_queue_pair_doorbell(pair);
}

void hostile_step(struct hostile *hostile, struct hostile_input *input)
{
    switch (take(input, 1) % 8) {
    case 0:
    case 1:
    case 2:
        write_slot(hostile, input);
        break;
    case 3:
        write_word(hostile, input);
        break;
    case 4:
        send_packet(hostile, input);
        break;
    case 5:
        post(hostile, input);
        break;
    case 6: { /* writes anywhere in the ring */
        uint64_t at_bytes = take(input, 3) % (hostile->theirs.len_bytes - 8);
        uint64_t value = take(input, 8);
        memcpy((char *)hostile->theirs.head + at_bytes, &value, sizeof(value));
        break;
    }
    default:
        poll_once(hostile);
        break;
    }
    poll_once(hostile);
}

void hostile_close(struct hostile *hostile)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    hostile->pair->ops->disconnect(hostile->pair, &reason);
    for (unsigned i = 0; i < 1000 && hostile->drained == 0; i++)
        poll_once(hostile);
    TL_CHECK(hostile->drained == 1);
    hostile->pair->ops->destroy(hostile->pair);
    hostile->pair = NULL;
    for (unsigned i = 0; i < HOSTILE_TARGET_BYTES / 4; i++)
        TL_CHECK(hostile->users[i] == GUARD && hostile->users[HOSTILE_TARGET_BYTES - 1 - i] == GUARD);
    void *address = hostile->region->address;
    tl_region_destroy(hostile->region);
    tl_pages_unmap(address, SEGMENT_BYTES);
    poll_once(hostile);
    if (hostile->owns_provider) hostile->provider->ops->close(hostile->provider);
    caller_close(&hostile->caller);
    close(hostile->segment);
    close(hostile->unsealed);
    close(hostile->theirs_fd);
    local_ring_unmap(&hostile->ring);
    local_ring_unmap(&hostile->theirs);
    free(hostile->users);
    free(hostile->source);
}
