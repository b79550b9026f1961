// SPDX-License-Identifier: Apache-2.0
/*
 * Receiving the tensors of a pull.
 *
 * A client worker asks for all of them in groups. At most MAX_OUTSTANDING are open at a time, which bounds the memory
 * for requests; the next group follows when half of these have come, so that the connection is never idle. No single
 * tensor has a deadline: a large pull may take as long as it takes. Only a pause has a time limit: when neither a byte
 * nor a completion has come for the time-out, everything is given up and the error says what state the worker is in. A
 * worker that has gone is waited for, one that refuses us is not: what is at its address now is another task or another
 * release.
 *
 * With --device each tensor is received into new memory of that device. When it is complete, this thread copies it into
 * its destination, which is in host memory, and gives the device memory back. So that a file may be larger than that
 * memory, no more tensors are asked for while MAX_DEVICE_BYTES of it are in use or about to be.
 */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "server/cli/interrupt.h"
#include "server/cli/pull.h"

#define MAX_OUTSTANDING 256
/* The tensor that reaches or exceeds this is the last one. */
#define MAX_DEVICE_BYTES (UINT64_C(256) << 20)
#define BATCH 64
/* How often signals, progress and pauses are looked at. */
#define TICK_NS (50 * TL_NS_PER_MS)
/* Without a byte for so long, the reason is shown. */
#define STALL_NS TL_NS_PER_SEC

/* State of the loop. */
struct receiver {
    struct tl_pull *pull;
    struct tl_worker *worker;
    tl_peer_id peer;
    struct tl_cq *cq;
    size_t next;             /* item to ask for */
    size_t open_count;       /* asked for and not completed */
    uint64_t open_bytes;     /* the same; on a device, they are also in use until they have been copied */
    uint64_t moved_bytes;    /* at the last look */
    size_t received_count;   /* at the last look */
    int64_t last_moved_ns;   /* when something moved last */
    int64_t next_look_ns;    /* when look is called again */
    char transport[16];      /* in use since the last look; "": not asked for yet, or none */
    struct tl_error error;   /* error of the first tensor that failed */
    struct tl_error trouble; /* latest error of the connection; message "": none so far */
};

static bool is_on_device(const struct tl_pull *pull)
{
    return pull->device.kind != TL_DEVICE_HOST;
}

static bool may_submit(const struct receiver *receiver)
{
    const struct tl_pull *pull = receiver->pull;
    return receiver->next < pull->listing.count && receiver->open_count < MAX_OUTSTANDING &&
           (!is_on_device(pull) || receiver->open_bytes < MAX_DEVICE_BYTES);
}

/* Takes the items that may be asked for now. Returns how many. */
static size_t take_items(struct receiver *receiver, struct tl_recv_item *ret_items)
{
    struct tl_pull *pull = receiver->pull;
    size_t count = 0;
    while (may_submit(receiver)) {
        struct tl_pull_item *item = &pull->items[receiver->next++];
        ret_items[count++] = (struct tl_recv_item){.key = item->listed->key,
                                                   .step = item->listed->step,
                                                   .destination = is_on_device(pull) ? NULL : item->destination,
                                                   .user_data = item};
        receiver->open_count++;
        receiver->open_bytes += item->listed->meta_data.size_bytes;
    }
    return count;
}

/* Asks for what may be asked for, as one group, once half of what may be open has come. */
static enum tl_status submit(struct receiver *receiver, struct tl_error *ret_error)
{
    const struct tl_pull *pull = receiver->pull;
    struct tl_recv_item items[MAX_OUTSTANDING];
    const struct tl_recv_many_options options = {.size_bytes = sizeof(options),
                                                 .item_bytes = sizeof(items[0]),
                                                 .wants_checksum = !pull->is_unchecked,
                                                 .device = pull->device};
    if (receiver->open_count > MAX_OUTSTANDING / 2) return TL_OK;
    size_t count = take_items(receiver, items);
    if (count == 0) return TL_OK;
    enum tl_status status = tl_recv_many(receiver->worker, receiver->peer, items, count, &options, TL_TIMEOUT_NONE,
                                         receiver->cq, NULL, NULL, ret_error);
    if (status != TL_OK && ret_error) tl_error_prefix(ret_error, "%zu tensors from '%s' on: ", count, items[0].key);
    return status;
}

/* Says which tensor it is about, unless it does. */
static void name_tensor(struct tl_error *error, const char *key)
{
    char name[TL_MAX_KEY_BYTES + 16];
    snprintf(name, sizeof(name), "tensor '%s': ", key);
    if (strncmp(error->message, name, strlen(name)) != 0) tl_error_prefix(error, "%s", name);
}

static bool is_of_data_plane(enum tl_path path)
{
    return path == TL_PATH_ZERO_COPY || path == TL_PATH_BOUNCE || path == TL_PATH_GPU_DIRECT ||
           path == TL_PATH_GPU_PROXY || path == TL_PATH_INLINE;
}

/* The paths of a data plane are those of the transport that is in use now, which is asked for once in each look: to ask
 * takes longer than to receive a small tensor. */
static void note_transport(struct receiver *receiver, struct tl_pull_item *item)
{
    struct tl_peer_info info = {.size_bytes = sizeof(info)};
    if (!is_of_data_plane(item->path)) return;
    if (receiver->transport[0] == '\0' && tl_worker_peer_info(receiver->worker, receiver->peer, &info, NULL) == TL_OK &&
        strcmp(info.transport, "grpc") != 0)
        snprintf(receiver->transport, sizeof(receiver->transport), "%s", info.transport);
    snprintf(item->transport, sizeof(item->transport), "%s", receiver->transport);
}

/* Whether the tensor was replaced by one of another shape, which does not fit its place in the output. */
static bool is_misfit(const struct tl_pull *pull, const struct tl_completion *completion)
{
    const struct tl_pull_item *item = completion->user_data;
    if (!is_on_device(pull)) return completion->status.code == TL_FAILED_PRECONDITION;
    return completion->status.code == TL_OK &&
           !tl_meta_data_is_equal(tl_tensor_meta_data(completion->tensor), &item->listed->meta_data);
}

static void take_completion(struct receiver *receiver, const struct tl_completion *completion)
{
    if (completion->kind != TL_OP_RECV) return; /* the end of a group says nothing new */
    struct tl_pull *pull = receiver->pull;
    struct tl_pull_item *item = completion->user_data;
    struct tl_error result = completion->status;
    bool was_replaced = is_misfit(pull, completion);
    if (is_on_device(pull) && result.code == TL_OK)
        result.code = tl_tensor_copy(item->destination, completion->tensor, &result);
    receiver->open_count--;
    receiver->open_bytes -= item->listed->meta_data.size_bytes;
    tl_tensor_put(completion->tensor);
    if (result.code == TL_OK) {
        item->is_received = true;
        item->is_verified = completion->is_verified;
        item->path = completion->path;
        item->path_reason = completion->path_reason;
        note_transport(receiver, item);
        item->step = completion->step;
        item->duration_ns = completion->duration_ns;
        pull->received_count++;
        pull->received_bytes += completion->bytes;
        return;
    }
    if (receiver->error.code != TL_OK) return;
    receiver->error = result;
    pull->is_misfit = was_replaced;
    name_tensor(&receiver->error, item->listed->key);
}

/* Remembers what was wrong with the connection last: a worker that breaks off again and again may be connected at the
 * moment when it matters. */
static void look_at_peer(struct receiver *receiver, struct tl_peer_info *ret_info)
{
    *ret_info = (struct tl_peer_info){.size_bytes = sizeof(*ret_info)};
    enum tl_status status = tl_worker_peer_info(receiver->worker, receiver->peer, ret_info, NULL);
    if (status == TL_OK && ret_info->reason.code != TL_OK) receiver->trouble = ret_info->reason;
}

static const char *state_of(const struct tl_peer_info *info)
{
    static const char *const states[] = {"idle", "being connected to", "connected", "out of reach"};
    return (size_t)info->state < TL_ARRAY_COUNT(states) ? states[info->state] : "in an unknown state";
}

/* Nothing has moved for some time: says why, as far as that is known, and how long it may last. */
static void describe_stall(const struct receiver *receiver, const struct tl_peer_info *info, int64_t now_ns,
                           char *ret_text, size_t capacity)
{
    int64_t stall_ns = now_ns - receiver->last_moved_ns;
    int64_t left_ns = receiver->pull->target.timeout_ns - stall_ns;
    const char *reason = info->reason.code != TL_OK ? info->reason.message : "";
    snprintf(ret_text, capacity, "nothing has come for %.0f s, gives up in %.0f s: the worker is %s%s%.900s",
             (double)stall_ns / 1e9, left_ns > 0 ? (double)left_ns / 1e9 : 0.0, state_of(info),
             reason[0] != '\0' ? ": " : "", reason);
}

/* Nothing has moved for too long: says what is known of the worker. */
static enum tl_status report_no_answer(const struct receiver *receiver, const struct tl_peer_info *info,
                                       struct tl_error *ret_error)
{
    char timeout[32], target[TL_TARGET_TEXT_BYTES];
    const struct tl_pull *pull = receiver->pull;
    const char *join = info->reason.code != TL_OK ? ": " : receiver->trouble.code != TL_OK ? "; before that: " : "";
    tl_text_format_duration(pull->target.timeout_ns, timeout, sizeof(timeout));
    tl_target_describe(&pull->target, target, sizeof(target));
    return tl_error_set(ret_error, TL_DEADLINE_EXCEEDED,
                        "%s: nothing was received for %s, with %zu of %zu tensors complete; the worker is %s%s%s",
                        target, timeout, pull->received_count, pull->listing.count, state_of(info), join,
                        receiver->trouble.message);
}

/* Shows progress; fails when nothing has moved for too long, a signal came, or the disk takes no more. */
static enum tl_status look(struct receiver *receiver, struct tl_error *ret_error)
{
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    struct tl_peer_info info;
    int64_t now_ns = tl_clock_now_ns();
    uint64_t moved_bytes = receiver->moved_bytes;
    if (tl_interrupt_is_set()) return tl_error_set(ret_error, TL_CANCELLED, "interrupted");
    if (tl_worker_stats(receiver->worker, &stats, NULL) == TL_OK) moved_bytes = stats.bytes_received;
    bool has_moved = receiver->pull->received_count != receiver->received_count || moved_bytes != receiver->moved_bytes;
    if (has_moved) receiver->last_moved_ns = now_ns;
    receiver->moved_bytes = moved_bytes;
    receiver->received_count = receiver->pull->received_count;
    receiver->transport[0] = '\0';
    receiver->next_look_ns = now_ns + TICK_NS;
    enum tl_status status = tl_tensor_writer_check(receiver->pull->writer, ret_error);
    if (status != TL_OK) return status;
    look_at_peer(receiver, &info);
    char stall[TL_ERROR_MESSAGE_BYTES];
    bool is_stalled = now_ns - receiver->last_moved_ns >= STALL_NS;
    if (is_stalled) describe_stall(receiver, &info, now_ns, stall, sizeof(stall));
    tl_progress_bar_update(&receiver->pull->bar, moved_bytes, is_stalled ? stall : NULL);
    if (info.state != TL_PEER_UP && tl_target_is_hopeless(info.reason.code)) {
        char target[TL_TARGET_TEXT_BYTES];
        tl_error_copy(ret_error, &info.reason);
        tl_error_prefix(ret_error, "%s: ", tl_target_describe(&receiver->pull->target, target, sizeof(target)));
        return info.reason.code;
    }
    if (now_ns - receiver->last_moved_ns < receiver->pull->target.timeout_ns) return TL_OK;
    return report_no_answer(receiver, &info, ret_error);
}

static enum tl_status run_loop(struct receiver *receiver, struct tl_error *ret_error)
{
    struct tl_completion completions[BATCH];
    for (;;) {
        enum tl_status status = submit(receiver, ret_error);
        if (status != TL_OK) return status;
        if (receiver->open_count == 0) return TL_OK;
        size_t count = tl_cq_wait(receiver->cq, completions, BATCH, TICK_NS);
        for (size_t i = 0; i < count; i++)
            take_completion(receiver, &completions[i]);
        if (receiver->error.code != TL_OK) return tl_error_copy(ret_error, &receiver->error);
        if (tl_clock_now_ns() >= receiver->next_look_ns) status = look(receiver, ret_error);
        if (status != TL_OK) return status;
    }
}

enum tl_status tl_pull_receive(struct tl_pull *pull, struct tl_error *ret_error)
{
    struct receiver receiver = {.pull = pull};
    enum tl_status status = tl_target_open_client(&pull->target, &receiver.worker, &receiver.peer, ret_error);
    if (status == TL_OK) status = tl_cq_create(&receiver.cq, ret_error);
    if (status == TL_OK) {
        tl_progress_bar_start(&pull->bar);
        receiver.last_moved_ns = tl_clock_now_ns();
        int64_t start_ns = receiver.last_moved_ns;
        status = run_loop(&receiver, ret_error);
        pull->receive_ns = tl_clock_now_ns() - start_ns;
        tl_progress_bar_end(&pull->bar);
    }
    /* Completes what is still open; the queue drops it. */
    tl_worker_close(receiver.worker, 0);
    tl_cq_destroy(receiver.cq);
    return status;
}
