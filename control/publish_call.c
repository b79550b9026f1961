// SPDX-License-Identifier: Apache-2.0
/*
 * Publish: one tensor from a client that has no link.
 *
 * Happy path: the first message says what comes and is admitted by the worker; the bytes of every message are copied
 * once, from gRPC's memory to the tensor; at the half-close the tensor is checked, copied to the device where the
 * worker keeps what is pushed, and published, and the answer sent. The next message is read only when the present one
 * is done with, so that gRPC's flow control holds the client back. A tensor that the first message says where to fetch
 * is fetched by the worker after the half-close, over a data connection; when it cannot be, the answer asks for the
 * bytes.
 *
 * Failure modes: more bytes than announced, or a message after the one with the checksum, is INVALID_ARGUMENT; fewer,
 * a wrong checksum or damaged strings, DATA_LOSS; a client that stalls or is too slow, DEADLINE_EXCEEDED. Whatever ends
 * the call after the worker has admitted it and before it has the tensor, the worker is called once with the failure.
 * When a call ends while its tensor is fetched or copied to the device, that is not before this has ended.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/copy.h"
#include "base/error.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "control/transfer_calls.h"
#include "tensor/delivery.h"
#include "tensor/device.h"

/*
 *   STARTING --first message, admitted--> RECEIVING --half-close, checked--> MOVING --copied--> ENDED --closed-->
 * (freed)
 *       \--refused--> ENDED                    |\--the same, kept on the host--> ENDED            ^
 *                                              |\--half-close, to be fetched--> FETCHING --> MOVING, ENDED
 *                                              \--bad bytes, stalled, broken--> ENDED   (failed, broken)
 */
enum publish_state {
    PUBLISH_STARTING,  /* for the first message; woken by the stream or the progress timer */
    PUBLISH_RECEIVING, /* for more messages or the half-close; woken the same way */
    PUBLISH_FETCHING,  /* for the worker, which fetches the tensor; woken by its end */
    PUBLISH_MOVING,    /* for the copy to the device; woken by its end */
    PUBLISH_ENDED,     /* for the end of the stream */
};

/* The copy of a tensor to the device. It may outlive the call. */
struct moving {
    struct tl_control *control;
    struct publish_call *publish; /* NULL: the call is over */
    void *admission;              /* that of a call that is over */
    struct tl_delivery *delivery;
};

/* The fetching of a tensor. It may outlive the call. */
struct fetching {
    struct tl_control *control;
    struct publish_call *publish; /* NULL: the call is over */
    void *admission;              /* that of a call that is over */
    struct tl_put_fetch *fetch;
};

struct publish_call {
    struct tl_service_call call;
    enum publish_state state;
    void *admission; /* while the worker waits for the tensor; NULL else */
    char key[TL_MAX_KEY_BYTES + 1];
    struct tl_push push;       /* its key is the one above; one reference on its annotations */
    struct tl_tensor *tensor;  /* one reference; NULL until admitted, or fetched */
    enum tl_path path;         /* how a fetched tensor has travelled */
    struct fetching *fetching; /* FETCHING; else NULL */
    struct moving *moving;     /* MOVING; else NULL */
    uint64_t received_bytes;
    XXH3_state_t *hash_state; /* over the bytes so far, because only the last message says whether it matters */
    bool has_checksum;
    uint64_t checksum;
};

/* Hands the tensor, or NULL for none, to the worker that has admitted it. */
static enum tl_status hand_over(struct publish_call *publish, struct tl_tensor *tensor, uint64_t *ret_publication,
                                struct tl_error *ret_error)
{
    struct tl_control *control = publish->call.control;
    void *admission = publish->admission;
    publish->admission = NULL;
    return control->options.handlers->publish(control->options.worker, admission, &publish->push, tensor,
                                              ret_publication, ret_error);
}

/* Informs the worker that the tensor will not come, and that its memory is free. */
static void withdraw(struct tl_control *control, void *admission)
{
    static const struct tl_push push = {.key = ""};
    uint64_t publication;
    struct tl_error error;
    (void)control->options.handlers->publish(control->options.worker, admission, &push, NULL, &publication, &error);
}

/* Frees the memory, then informs the worker, if it still waits. */
static void break_off(struct publish_call *publish)
{
    void *admission = publish->admission;
    tl_tensor_put(publish->tensor);
    publish->tensor = NULL;
    publish->admission = NULL;
    if (admission != NULL) withdraw(publish->call.control, admission);
}

static void publish_fail(struct publish_call *publish, const struct tl_error *status)
{
    publish->state = PUBLISH_ENDED;
    break_off(publish);
    tl_service_call_finish(&publish->call, status);
}

/* The first message: asks the worker, then takes the memory. */
static enum tl_status start(struct publish_call *publish, const struct tl_publish_request *request,
                            struct tl_error *ret_error)
{
    struct tl_control *control = publish->call.control;
    memcpy(publish->key, request->key, strlen(request->key) + 1);
    publish->push = (struct tl_push){.key = publish->key,
                                     .step = request->step,
                                     .may_go_back = request->may_go_back,
                                     .meta_data = request->meta_data,
                                     .annotations = tl_control_share_annotations(control, request->annotations),
                                     .source = request->source};
    enum tl_status status = control->options.handlers->admit(control->options.worker, &publish->call.client,
                                                             &publish->push, &publish->admission, ret_error);
    if (status != TL_OK) return status;
    publish->state = PUBLISH_RECEIVING;
    if (publish->push.source.number != 0) return TL_OK;
    status = tl_tensor_create_for(&publish->push.meta_data, &publish->tensor, ret_error);
    if (status != TL_OK) return status;
    tl_tensor_set_annotations(publish->tensor, publish->push.annotations);
    publish->hash_state = XXH3_createState();
    if (publish->hash_state == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for a checksum", publish->key);
    }
    XXH3_64bits_reset(publish->hash_state);
    return TL_OK;
}

static enum tl_status copy_bytes(struct publish_call *publish, struct tl_wire_data *data, struct tl_error *ret_error)
{
    uint64_t left = publish->push.meta_data.size_bytes - publish->received_bytes;
    if (data->left_bytes > left) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: %llu bytes were announced, and at least %llu were sent", publish->key,
                            (unsigned long long)publish->push.meta_data.size_bytes,
                            (unsigned long long)(publish->received_bytes + data->left_bytes));
    }
    if (data->left_bytes > 0 && publish->tensor == NULL)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: a tensor that is to be fetched comes without bytes",
                            publish->key);
    unsigned char *to = publish->tensor != NULL ? tl_tensor_data(publish->tensor) : NULL;
    while (data->left_bytes > 0) {
        const void *run;
        size_t count = tl_wire_data_next(data, data->left_bytes, &run);
        tl_copy(to + publish->received_bytes, run, count);
        XXH3_64bits_update(publish->hash_state, run, count);
        publish->received_bytes += count;
        publish->call.control->stats.bytes_received += count;
    }
    return TL_OK;
}

static enum tl_status take_request(struct publish_call *publish, struct tl_publish_request *request,
                                   struct tl_error *ret_error)
{
    bool is_progress = publish->state == PUBLISH_STARTING || request->data.left_bytes > 0;
    if (publish->state == PUBLISH_STARTING) {
        enum tl_status status = start(publish, request, ret_error);
        if (status != TL_OK) return status;
    }
    if (publish->has_checksum) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: a message after the one with the checksum",
                            publish->key);
    }
    publish->has_checksum = request->has_checksum;
    publish->checksum = request->checksum;
    enum tl_status status = copy_bytes(publish, &request->data, ret_error);
    if (status == TL_OK && is_progress) tl_service_call_expect_bytes(&publish->call, publish->received_bytes);
    return status;
}

static void publish_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct publish_call *publish = TL_CONTAINER_OF(call, struct publish_call, call);
    struct tl_publish_request request;
    struct tl_error error;
    enum tl_status status =
        tl_publish_request_read(message, call->control->arena, publish->state == PUBLISH_STARTING, &request, &error);
    if (status == TL_OK) {
        status = take_request(publish, &request, &error);
        tl_annotations_put(request.annotations);
        tl_wire_data_fini(&request.data);
    }
    if (status == TL_OK) {
        tl_service_call_read(call);
    } else {
        publish_fail(publish, &error);
    }
}

static enum tl_status check_complete(const struct publish_call *publish, struct tl_error *ret_error)
{
    if (publish->state == PUBLISH_STARTING) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the client sent no message; the first one carries key and meta-data");
    }
    if (publish->received_bytes != publish->push.meta_data.size_bytes) {
        return tl_error_set(ret_error, TL_DATA_LOSS, "%s: %llu bytes were announced, but only %llu were sent",
                            publish->key, (unsigned long long)publish->push.meta_data.size_bytes,
                            (unsigned long long)publish->received_bytes);
    }
    uint64_t checksum = XXH3_64bits_digest(publish->hash_state);
    if (publish->has_checksum && publish->checksum != checksum) {
        return tl_error_set(ret_error, TL_DATA_LOSS,
                            "%s: the bytes that arrived have checksum %016llx, the client sent %016llx; send it again",
                            publish->key, (unsigned long long)checksum, (unsigned long long)publish->checksum);
    }
    enum tl_status status = tl_tensor_check_strings(publish->tensor, ret_error);
    if (status != TL_OK) tl_error_prefix(ret_error, "%s: ", publish->key);
    return status;
}

/* Publishes the complete tensor. */
static void answer(struct publish_call *publish)
{
    Tensorlane__V1__PublishResponse response = TENSORLANE__V1__PUBLISH_RESPONSE__INIT;
    struct tl_error error;
    if (hand_over(publish, publish->tensor, &response.publication, &error) != TL_OK) {
        publish_fail(publish, &error);
        return;
    }
    if (publish->push.source.number == 0) publish->call.control->stats.tensors_received++;
    response.path = (uint32_t)publish->path;
    publish->state = PUBLISH_ENDED;
    tl_service_call_answer(&publish->call, &response.base);
}

/* ----------------------------------------------------------------------------------------------------- a device -- */

/* Strings stay on the host. */
static bool is_kept_on_device(const struct publish_call *publish)
{
    const struct tl_meta_data *meta_data = &publish->push.meta_data;
    return publish->call.control->options.device.kind != TL_DEVICE_HOST && !meta_data->is_dead &&
           tl_dtype_is_plain(meta_data->dtype);
}

/* The device has not taken the tensor. */
static void refuse(struct publish_call *publish, const struct tl_error *cause)
{
    struct tl_error error;
    char device[TL_DEVICE_TEXT_BYTES];
    tl_device_format(publish->call.control->options.device, device);
    tl_error_set(
        &error, cause->code, "%s cannot be kept on %s: %s%s", publish->key, device, cause->message,
        cause->code == TL_RESOURCE_EXHAUSTED
            ? "; withdraw what is published there (tensorlane rm), free memory of the GPU, or set \"device\" of "
              "the worker to \"host\""
            : "");
    publish_fail(publish, &error);
}

static void moved(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    struct moving *moving = context;
    struct publish_call *publish = moving->publish;
    struct tl_control *control = moving->control;
    if (publish == NULL) {
        tl_tensor_put(tensor);
        withdraw(control, moving->admission);
    } else if (status->code != TL_OK) {
        publish->moving = NULL;
        refuse(publish, status);
    } else {
        publish->moving = NULL;
        tl_tensor_put(publish->tensor);
        publish->tensor = tensor;
        tl_tensor_set_stream(tensor, TL_STREAM_NONE); /* nothing else has worked with its memory */
        tl_tensor_set_annotations(tensor, publish->push.annotations);
        answer(publish);
    }
    free(moving);
    tl_control_push_moved(control);
}

static void post_to_loop(void *loop, struct tl_closure *closure)
{
    tl_loop_post(loop, closure);
}

/* Copies the tensor to the device. The client has sent everything, so that nothing is expected of it. */
static void move(struct publish_call *publish)
{
    struct tl_control *control = publish->call.control;
    struct tl_error error;
    struct moving *moving = calloc(1, sizeof(*moving));
    const struct tl_delivery_options options = {.value = publish->tensor,
                                                .device = control->options.device,
                                                .post = post_to_loop,
                                                .loop = control->loop,
                                                .done = moved,
                                                .context = moving};
    if (moving != NULL) {
        *moving = (struct moving){.control = control, .publish = publish};
        publish->state = PUBLISH_MOVING;
        publish->moving = moving;
        control->moving_count++;
        tl_service_call_expect_nothing(&publish->call);
        if (tl_delivery_start(&options, &moving->delivery)) return;
        control->moving_count--;
        publish->moving = NULL;
        free(moving);
    }
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s: no memory to copy the tensor to its device", publish->key);
    publish_fail(publish, &error);
}

/* The call is over. A copy that runs is left to end by itself. */
static void leave_moving(struct publish_call *publish)
{
    struct moving *moving = publish->moving;
    if (moving == NULL) return;
    publish->moving = NULL;
    if (tl_delivery_stop(moving->delivery)) {
        moving->control->moving_count--; /* the server has not stopped yet, because this call is part of it */
        free(moving);
        return;
    }
    moving->publish = NULL;
    moving->admission = publish->admission;
    publish->admission = NULL;
}

/* The tensor is complete. */
static void complete(struct publish_call *publish)
{
    if (is_kept_on_device(publish)) {
        move(publish);
    } else {
        answer(publish);
    }
}

/* ----------------------------------------------------------------------------------------------------- fetching -- */

static void ask_for_bytes(struct publish_call *publish)
{
    Tensorlane__V1__PublishResponse response = TENSORLANE__V1__PUBLISH_RESPONSE__INIT;
    response.wants_data = 1;
    break_off(publish);
    publish->state = PUBLISH_ENDED;
    tl_service_call_answer(&publish->call, &response.base);
}

static void fetched(void *context, struct tl_tensor *tensor, enum tl_path path, const struct tl_error *status)
{
    struct fetching *fetching = context;
    struct publish_call *publish = fetching->publish;
    struct tl_control *control = fetching->control;
    void *admission = fetching->admission;
    free(fetching);
    if (publish == NULL) {
        tl_tensor_put(tensor);
        withdraw(control, admission);
    } else if (status->code != TL_OK) {
        publish->fetching = NULL;
        ask_for_bytes(publish);
    } else {
        publish->fetching = NULL;
        publish->tensor = tensor;
        publish->path = path;
        tl_tensor_set_annotations(tensor, publish->push.annotations);
        complete(publish);
    }
    tl_control_push_moved(control);
}

/* The client has said everything, so that nothing is expected of it. */
static void fetch(struct publish_call *publish)
{
    struct tl_control *control = publish->call.control;
    const struct tl_control_handlers *handlers = control->options.handlers;
    struct tl_error error;
    struct fetching *fetching = handlers->fetch_put != NULL ? calloc(1, sizeof(*fetching)) : NULL;
    if (fetching == NULL || handlers->fetch_put(control->options.worker, &publish->call.client, &publish->push, fetched,
                                                fetching, &fetching->fetch, &error) != TL_OK) {
        free(fetching);
        ask_for_bytes(publish);
        return;
    }
    fetching->control = control;
    fetching->publish = publish;
    publish->state = PUBLISH_FETCHING;
    publish->fetching = fetching;
    control->moving_count++;
    tl_service_call_expect_nothing(&publish->call);
}

/* The call is over. The fetch ends by itself, when nothing can write its memory any more. */
static void leave_fetching(struct publish_call *publish)
{
    struct tl_control *control = publish->call.control;
    struct fetching *fetching = publish->fetching;
    if (fetching == NULL) return;
    publish->fetching = NULL;
    fetching->publish = NULL;
    fetching->admission = publish->admission;
    publish->admission = NULL;
    control->options.handlers->stop_fetch(control->options.worker, fetching->fetch);
}

/* ---------------------------------------------------------------------------------------------------------- end -- */

static void publish_half_closed(struct tl_service_call *call)
{
    struct publish_call *publish = TL_CONTAINER_OF(call, struct publish_call, call);
    struct tl_error error;
    if (publish->state == PUBLISH_RECEIVING && publish->push.source.number != 0) {
        fetch(publish);
    } else if (check_complete(publish, &error) != TL_OK) {
        publish_fail(publish, &error);
    } else {
        complete(publish);
    }
}

static void publish_closed(struct tl_service_call *call, bool is_delivered)
{
    (void)is_delivered;
    struct publish_call *publish = TL_CONTAINER_OF(call, struct publish_call, call);
    leave_fetching(publish);
    leave_moving(publish);
    break_off(publish);
    tl_annotations_put(publish->push.annotations);
    if (publish->hash_state != NULL) XXH3_freeState(publish->hash_state);
}

static const struct tl_service_call_ops publish_ops = {
    .size_bytes = sizeof(struct publish_call),
    .is_stream = true,
    .request = publish_request,
    .half_closed = publish_half_closed,
    .closed = publish_closed,
};

void tl_publish_call_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &publish_ops);
}
