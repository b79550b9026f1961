// SPDX-License-Identifier: Apache-2.0
/* Sends and receives of tensors on devices: what is refused, where the destination comes from, and how an operation
 * ends while it waits for a device. */
#include "fakes/operation_case.h"

#include "fakes/device_case.h"
#include "fakes/run_suite.h"

static const struct tl_meta_data four_bytes = {.dtype = TL_U8, .shape = {1, {4}}, .size_bytes = 4};
static const struct tl_meta_data five_bytes = {.dtype = TL_U8, .shape = {1, {5}}, .size_bytes = 5};

static void setup_device(void)
{
    setup();
    setup_cuda();
}

static enum tl_status try_receive(const struct tl_recv_options *options)
{
    struct op_single *single;
    enum tl_status status = create_receive_of(&worker, 1, "key", 1, options, TL_NS_PER_SEC, &single, &error);
    if (status == TL_OK) adopt(single);
    return status;
}

static void create_receive_on(struct tl_device device, struct tl_tensor *destination)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .device = device, .destination = destination};
    enum tl_status status = try_receive(&options);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void expect_refused(const struct tl_recv_options *options, enum tl_status status, const char *text)
{
    ck_assert_int_eq(try_receive(options), status);
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
}

static void fetch_ends(enum tl_status code, const char *message)
{
    struct tl_error result = {.code = code};
    snprintf(result.message, sizeof(result.message), "%s", message);
    op->receive.request.fetch.ops->done(&op->receive.request.fetch, &result);
}

/* ----------------------------------------------------------------------------------------------------- options -- */

START_TEST(options_that_are_refused)
{
    struct tl_tensor *on_gpu = bytes_on(gpu0, 4);
    struct tl_recv_options options = {.size_bytes = sizeof(options), .device = gpu0, .destination = tensor};
    expect_refused(&options, TL_INVALID_ARGUMENT, "is on host, and not on gpu:0");
    options.device = gpu1;
    options.destination = on_gpu;
    expect_refused(&options, TL_INVALID_ARGUMENT, "is on gpu:0, and not on gpu:1");
    options.destination = NULL;
    options.may_map = true;
    expect_refused(&options, TL_INVALID_ARGUMENT, "cannot be mapped");
    options.may_map = false;
    options.device.index = 7;
    expect_refused(&options, TL_NOT_FOUND, "no gpu:7");
    options.device.kind = (enum tl_device_kind)9;
    expect_refused(&options, TL_UNIMPLEMENTED, "kind 9");
    tl_tensor_put(on_gpu);
}
END_TEST

/* The struct of a program that knows no devices ends before the field, and what lies behind it is not read. */
START_TEST(options_of_an_older_program)
{
    struct tl_recv_options options = {.size_bytes = TL_RECV_OPTIONS_FIRST_BYTES, .unused = 1, .device = gpu0};
    ck_assert_uint_ge(offsetof(struct tl_recv_options, device), TL_RECV_OPTIONS_FIRST_BYTES);
    ck_assert_int_eq(try_receive(&options), TL_OK);
    ck_assert_ptr_null(op->receive.rare);
    tl_op_receive_fini(op);
    free_op(op);
}
END_TEST

/* ------------------------------------------------------------------------------------------------ destinations -- */

static void placed(struct tl_fetch *fetch, const struct tl_error *status)
{
    ck_assert_ptr_eq(fetch, &op->receive.request.fetch);
    note("placed:");
    note(status->code == TL_OK ? "ok" : status->message);
}

static enum tl_status place(const struct tl_meta_data *meta_data, struct tl_tensor **ret_destination)
{
    struct tl_fetch *fetch = &op->receive.request.fetch;
    return fetch->ops->place(fetch, meta_data, ret_destination, &error);
}

/* The fetch is over a link, whose peer has announced a value. */
static void announce(const struct tl_meta_data *meta_data)
{
    struct tl_tensor *destination = tensor;
    op->receive.request.fetch.placed = placed;
    ck_assert_int_eq(place(meta_data, &destination), TL_OK);
    ck_assert_ptr_null(destination);
}

static void start_receive_on(struct tl_device device)
{
    create_receive_on(device, NULL);
    start_op();
    check_calls("fetch");
}

START_TEST(placed_on_a_device)
{
    struct tl_tensor *destination;
    start_receive_on(gpu0);
    announce(&four_bytes);
    run_posted();
    check_calls("placed: ok");
    ck_assert_int_eq(place(&four_bytes, &destination), TL_OK);
    ck_assert_int_eq(tl_tensor_device(destination).kind, TL_DEVICE_CUDA);
    ck_assert_ptr_null(op->receive.rare->allocated);
    op->receive.request.fetch.destination = destination;
    fetch_ends(TL_OK, "");
    check_calls("complete: ok");
    tl_tensor_put(op->tensor);
}
END_TEST

START_TEST(what_cannot_be_allocated)
{
    const struct tl_meta_data huge = {
        .dtype = TL_U8, .shape = {1, {UINT64_C(1) << 50}}, .size_bytes = UINT64_C(1) << 50};
    start_receive_on(gpu0);
    announce(&huge);
    run_posted();
    ck_assert_ptr_nonnull(strstr(calls, "placed: tensor 'key': allocating 1125899906842624 bytes failed on gpu:0"));
    calls[0] = '\0';
    fetch_ends(TL_RESOURCE_EXHAUSTED, "none");
    check_calls("give_up complete: none");
}
END_TEST

/* A connection breaks while the memory is allocated: the next one finds it, if it fits. */
START_TEST(placed_for_the_next_connection)
{
    struct tl_tensor *destination;
    bool is_before = _i < 2, is_other = _i % 2 == 1; /* the closure comes before the next connection; another value */
    start_receive_on(gpu0);
    announce(&four_bytes);
    fetch_ends(TL_UNAVAILABLE, "broken");
    ck_assert_ptr_null(op->receive.request.fetch.placed);
    if (is_before) run_posted();
    fake_clock_advance(TL_RECEIVE_FIRST_BACK_OFF_NS);
    tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    check_calls("fetch");
    if (is_other) {
        announce(&five_bytes);
    } else if (!is_before) {
        announce(&four_bytes);
    }
    if (!is_before && is_other) run_posted(); /* the former one, which was given up */
    if (!is_before || is_other) {
        if (calls[0] == '\0') run_posted();
        check_calls("placed: ok");
    }
    op->receive.request.fetch.placed = placed;
    ck_assert_int_eq(place(is_other ? &five_bytes : &four_bytes, &destination), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(destination), is_other ? 5 : 4);
    op->receive.request.fetch.destination = destination;
    fetch_ends(TL_OK, "");
    check_calls("complete: ok");
    tl_tensor_put(op->tensor);
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

START_TEST(receive_that_ends_while_memory_is_allocated)
{
    start_receive_on(gpu0);
    announce(&four_bytes);
    can_cancel = true;
    if (_i == 0) {
        ck_assert(tl_op_receive_end(op, &why));
        check_calls("give_up complete: why");
    } else {
        fake_clock_advance(TL_NS_PER_SEC);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
        ck_assert_ptr_nonnull(strstr(calls, "give_up complete: key of step 1 did not come"));
    }
    unsigned count = device_allocations_at_last();
    ck_assert_uint_eq(count, posted != NULL);
    if (posted != NULL) run_posted(); /* it was on its way */
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

static enum tl_status allocate(void *context, struct tl_device device, const struct tl_meta_data *meta_data,
                               struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_tensor **later = context;
    char name[TL_DEVICE_TEXT_BYTES];
    note(tl_device_format(device, name));
    if (meta_data->size_bytes == 5) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory");
    *ret_tensor = *later;
    *later = NULL;
    return TL_OK;
}

/* Where a transport has an allocator, that allocates on devices too, now or later. */
START_TEST(placed_by_the_allocator)
{
    struct tl_tensor *later = NULL, *destination = tensor;
    const struct tl_allocator allocator = {.create = allocate, .context = &later};
    start_receive_on(gpu0);
    op->receive.request.fetch.allocator = &allocator;
    ck_assert_int_eq(place(&five_bytes, &destination), TL_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(error.message, "tensor 'key': no memory");
    ck_assert_int_eq(place(&four_bytes, &destination), TL_OK);
    ck_assert_ptr_null(destination);
    later = tensor;
    ck_assert_int_eq(place(&four_bytes, &destination), TL_OK);
    ck_assert_ptr_eq(destination, tensor);
    check_calls("gpu:0 gpu:0 gpu:0");
    ck_assert_ptr_null(op->receive.rare->allocation);
    fetch_ends(TL_CANCELLED, "no");
    check_calls("give_up complete: no");
}
END_TEST

/* A transport has no memory to copy the value through: it may come over the link, if that is allowed. */
START_TEST(turned_away_for_lack_of_memory)
{
    worker.data_plane.is_transport_required = _i == 1;
    start_receive_on(gpu0);
    op->receive.request.fetch.is_rerouted = true;
    fetch_ends(TL_RESOURCE_EXHAUSTED, "verbs.max_pool");
    check_calls(_i == 1 ? "give_up complete: verbs.max_pool" : "fetch_on_link");
    if (_i == 1) return;
    op->receive.request.fetch.is_rerouted = false;
    fetch_ends(TL_CANCELLED, "no");
    check_calls("give_up complete: no");
}
END_TEST

/* An owner that lacks memory now is asked again over the data connection where the link is not allowed. */
START_TEST(turned_away_for_now)
{
    worker.data_plane.is_transport_required = _i == 1;
    start_receive_on(gpu0);
    op->receive.request.fetch.is_rerouted = true;
    fetch_ends(TL_UNAVAILABLE, "its owner must copy it");
    check_calls(_i == 1 ? "" : "fetch_on_link");
    ck_assert_int_eq(op->state, _i == 1 ? OP_RETRYING : OP_RUNNING);
    if (_i == 1) tl_op_handle(op, OP_EVENT_RETRY, NULL);
    if (_i == 1) check_calls("fetch");
    op->receive.request.fetch.is_rerouted = false;
    fetch_ends(TL_CANCELLED, "no");
    check_calls("give_up complete: no");
}
END_TEST

START_TEST(strings_and_dead_tensors_lie_on_the_host)
{
    const struct tl_meta_data values[] = {{.is_dead = true}, {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 8}};
    struct tl_tensor *destination;
    start_receive_on(gpu0);
    ck_assert_int_eq(place(&values[_i], &destination), TL_OK);
    ck_assert_int_eq(tl_tensor_device(destination).kind, TL_DEVICE_HOST);
    op->receive.request.fetch.destination = destination;
    fetch_ends(TL_OK, "");
    check_calls("complete: ok");
    tl_tensor_put(op->tensor);
}
END_TEST

/* ------------------------------------------------------------------------------------------------ the stream -- */

static struct tl_tensor *behind_work(void **ret_stream)
{
    struct tl_tensor *on_gpu = bytes_on(gpu0, 4);
    fill(on_gpu, 3);
    *ret_stream = cuda->create_stream(0, false);
    cuda->hold(*ret_stream, true);
    tl_tensor_set_stream(on_gpu, (tl_stream)*ret_stream);
    return on_gpu;
}

/* The peer is asked when what the stream of the destination holds has been done. */
START_TEST(destination_behind_a_stream)
{
    void *stream;
    struct tl_tensor *destination = behind_work(&stream);
    create_receive_on(gpu0, destination);
    start_op();
    ck_assert_int_eq(op->state, OP_FENCED);
    check_calls("");
    cuda->hold(stream, false);
    run_posted();
    check_calls("fetch");
    ck_assert_int_eq(op->state, OP_RUNNING);
    struct tl_tensor *placed = NULL;
    ck_assert_int_eq(place(&four_bytes, &placed), TL_OK);
    ck_assert_ptr_eq(placed, destination);
    tl_tensor_put(placed);
    fetch_ends(TL_CANCELLED, "no");
    check_calls("give_up complete: no");
    tl_tensor_put(destination);
}
END_TEST

START_TEST(destination_whose_stream_has_nothing_to_wait_for)
{
    struct tl_tensor *destination = bytes_on(gpu0, 4);
    tl_tensor_set_stream(destination, TL_STREAM_NONE);
    create_receive_on(gpu0, destination);
    start_op();
    check_calls("fetch");
    can_cancel = true;
    ck_assert(tl_op_receive_end(op, &why));
    check_calls("give_up complete: why");
    tl_tensor_put(destination);
}
END_TEST

START_TEST(receive_that_ends_behind_a_stream)
{
    void *stream;
    struct tl_tensor *destination = behind_work(&stream);
    create_receive_on(gpu0, destination);
    start_op();
    if (_i == 0) {
        ck_assert(tl_op_receive_end(op, &why));
        check_calls("give_up complete: why");
    } else {
        fake_clock_advance(TL_NS_PER_SEC);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
        check_calls(
            "give_up complete: key of step 1 waited for 1.00 s: a stream on gpu:0 has not done what comes before");
    }
    ck_assert(!tl_tensor_is_shared(destination));
    cuda->hold(stream, false);
    tl_tensor_put(destination);
    ck_assert_uint_eq(device_allocations_at_last(), 0);
    ck_assert_ptr_null(posted);
}
END_TEST

START_TEST(a_stream_that_is_captured)
{
    struct tl_tensor *on_gpu = bytes_on(gpu0, 4);
    void *stream = cuda->create_stream(0, true);
    struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = on_gpu};
    tl_tensor_set_stream(on_gpu, (tl_stream)stream);
    cuda->begin_capture(stream);
    expect_refused(&options, TL_FAILED_PRECONDITION, "being captured");
    struct op_single *single;
    ck_assert_int_eq(create_send_of(&worker, "key", 1, on_gpu, TL_NS_PER_SEC, &single, &error), TL_FAILED_PRECONDITION);
    ck_assert_msg(strstr(error.message, "being captured") != NULL, "%s", error.message);
    ck_assert(cuda->end_capture(stream));
    ck_assert(!tl_tensor_is_shared(on_gpu));
    tl_tensor_put(on_gpu);
}
END_TEST

START_TEST(sent_with_its_fence)
{
    void *stream;
    struct tl_tensor *on_gpu = behind_work(&stream);
    struct op_single *single;
    ck_assert_int_eq(create_send_of(&worker, "key", 1, on_gpu, TL_NS_PER_SEC, &single, &error), TL_OK);
    adopt(single);
    start_op();
    check_calls("send");
    ck_assert_ptr_nonnull(tl_tensor_fence(value));
    ck_assert_ptr_null(tl_tensor_fence(on_gpu));
    op->send.sender.over(&op->send.sender, &(struct tl_error){.code = TL_OK});
    tl_tensor_put(value);
    run_posted();
    check_calls("complete: ok");
    cuda->hold(stream, false);
    tl_tensor_put(on_gpu);
}
END_TEST

/* ------------------------------------------------------------------------------------------ within the worker -- */

/* The table has a value on a device, whose stream is held. */
static void *offer_to_self(struct tl_device wanted, struct tl_tensor *destination, bool is_one_shot)
{
    void *stream;
    struct tl_tensor *on_gpu = behind_work(&stream);
    struct tl_offer offer = {.is_one_shot = is_one_shot, .step = 1};
    struct tl_device_fence *fence = NULL;
    is_self = true;
    create_receive_on(wanted, destination);
    start_op();
    check_calls("receive");
    ck_assert_int_eq(tl_tensor_create_alias(on_gpu, NULL, NULL, &offer.tensor, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_record_fence(on_gpu, &fence, &error), TL_OK);
    tl_tensor_set_fence(offer.tensor, fence);
    tl_tensor_put(on_gpu);
    op->receive.rare->receiver.deliver(&op->receive.rare->receiver, &(struct tl_error){.code = TL_OK}, &offer);
    ck_assert_int_eq(op->state, OP_DELIVERING);
    check_calls("");
    return stream;
}

static void run_to_the_end(void)
{
    while (calls[0] == '\0')
        run_posted();
}

START_TEST(delivered_by_reference)
{
    void *stream = offer_to_self(gpu0, NULL, false);
    struct tl_tensor *offered = op->receive.rare->offer.tensor;
    cuda->hold(stream, false);
    run_to_the_end();
    check_calls("complete: ok acknowledge");
    ck_assert_ptr_eq(tl_tensor_data(op->tensor), tl_tensor_data(offered));
    ck_assert_int_eq(tl_tensor_stream(op->tensor), TL_STREAM_NONE);
    ck_assert_int_eq(op->receive.request.fetch.path, TL_PATH_SELF);
    tl_tensor_put(op->tensor);
}
END_TEST

/* Its sender takes it back while it waits for the stream. */
START_TEST(taken_back_before_it_is_delivered)
{
    void *stream = offer_to_self(gpu0, NULL, true);
    reserved = NULL;
    cuda->hold(stream, false);
    run_to_the_end();
    check_calls("receive");
    ck_assert_int_eq(op->state, OP_RUNNING);
    can_cancel = true;
    ck_assert(tl_op_receive_end(op, &why));
    check_calls("give_up complete: why");
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

/* To the host, since no device was asked for, and into a destination. */
START_TEST(delivered_as_a_copy)
{
    struct tl_tensor *destination = _i == 0 ? NULL : bytes_on(host, 4);
    void *stream = offer_to_self(host, destination, true);
    cuda->hold(stream, false);
    run_to_the_end();
    check_calls("complete: ok acknowledge");
    ck_assert(is_filled(op->tensor, 3));
    ck_assert_int_eq(tl_tensor_device(op->tensor).kind, TL_DEVICE_HOST);
    tl_tensor_put(op->tensor);
    tl_tensor_put(destination);
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

START_TEST(does_not_fit_its_destination)
{
    struct tl_tensor *destination = bytes_on(host, 5);
    is_self = true;
    create_receive_on(host, destination);
    start_op();
    const struct tl_offer offer = {.tensor = bytes_on(gpu0, 4), .step = 1};
    op->receive.rare->receiver.deliver(&op->receive.rare->receiver, &(struct tl_error){.code = TL_OK}, &offer);
    ck_assert_msg(strstr(calls, "receive release give_up complete: key of ") == calls, "%s", calls);
    tl_tensor_put(destination);
    ck_assert_uint_eq(device_allocations_at_last(), 0);
}
END_TEST

/* While it waits for the stream, the value is given back at once; a copy that runs is awaited, and counts. */
START_TEST(delivery_that_ends)
{
    void *stream = offer_to_self(gpu1, NULL, true);
    if (_i == 0) {
        ck_assert(tl_op_receive_end(op, &why));
        check_calls("release give_up complete: why");
        cuda->hold(stream, false);
    } else if (_i == 1) {
        fake_clock_advance(TL_NS_PER_SEC);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
        ck_assert_msg(strstr(calls, "a stream on gpu:0 has not done") != NULL, "%s", calls);
        cuda->hold(stream, false);
    } else {
        cuda->hold(stream, false);
        run_posted(); /* the stream */
        ck_assert_int_eq(op->state, OP_DELIVERING);
        if (_i == 2) {
            ck_assert(tl_op_receive_end(op, &why)); /* the memory is being allocated */
            check_calls("release give_up complete: why");
            return;
        }
        cuda->hold(NULL, true);
        run_posted(); /* the memory */
        ck_assert(tl_op_receive_end(op, &why));
        ck_assert_int_eq(op->state, OP_CANCELLING);
        ck_assert(!tl_op_receive_end(op, &why));
        check_calls("");
        cuda->hold(NULL, false);
        run_to_the_end();
        check_calls("complete: ok acknowledge");
        ck_assert(is_filled(op->tensor, 3));
        tl_tensor_put(op->tensor);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("operation_device");
    TCase *tcase = tcase_create("operation_device");
    tcase_add_checked_fixture(tcase, setup_device, NULL);
    tcase_add_test(tcase, options_that_are_refused);
    tcase_add_test(tcase, options_of_an_older_program);
    tcase_add_test(tcase, placed_on_a_device);
    tcase_add_test(tcase, what_cannot_be_allocated);
    tcase_add_loop_test(tcase, placed_for_the_next_connection, 0, 4);
    tcase_add_loop_test(tcase, receive_that_ends_while_memory_is_allocated, 0, 2);
    tcase_add_test(tcase, placed_by_the_allocator);
    tcase_add_loop_test(tcase, turned_away_for_lack_of_memory, 0, 2);
    tcase_add_loop_test(tcase, turned_away_for_now, 0, 2);
    tcase_add_loop_test(tcase, strings_and_dead_tensors_lie_on_the_host, 0, 2);
    tcase_add_test(tcase, destination_behind_a_stream);
    tcase_add_test(tcase, destination_whose_stream_has_nothing_to_wait_for);
    tcase_add_loop_test(tcase, receive_that_ends_behind_a_stream, 0, 2);
    tcase_add_test(tcase, a_stream_that_is_captured);
    tcase_add_test(tcase, sent_with_its_fence);
    tcase_add_test(tcase, delivered_by_reference);
    tcase_add_test(tcase, taken_back_before_it_is_delivered);
    tcase_add_loop_test(tcase, delivered_as_a_copy, 0, 2);
    tcase_add_test(tcase, does_not_fit_its_destination);
    tcase_add_loop_test(tcase, delivery_that_ends, 0, 4);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
