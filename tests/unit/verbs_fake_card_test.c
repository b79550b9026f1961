// SPDX-License-Identifier: Apache-2.0
/*
 * What a card does that no card at hand can be made to do: it fails or is removed at a chosen moment, or contradicts
 * itself. This program defines the calls of rdma-core, and thereby is the card.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "dataplane/verbs/verbs_internal.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

#define DEPTH 16
#define MAX_CQ_ENTRIES 100000

/* ---------------------------------------------------------------------------------------------------- the card -- */

static struct ibv_device device = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fake_0"};
static struct ibv_device *device_list[] = {&device, NULL};
static struct ibv_context context;
static struct ibv_comp_channel channel;
static struct ibv_pd domain;
static struct ibv_cq cq;
static struct ibv_wc completions[DEPTH]; /* what the completion queue holds */
static unsigned completion_count;
static enum ibv_event_type event; /* what is reported next, as soon as the context's descriptor is readable */
static int channel_reader;        /* when it is closed, the channel's descriptor is in error */
static int largest_cq;            /* the completion queue cannot have more entries */
static int resize_error, create_error, modify_error, poll_error, send_error; /* 0: these calls succeed */
static uint32_t gid_index;                                                   /* where the port's only GID is */
static bool is_resize_ignored; /* the completion queue stays as it is, without an error */
static bool is_busy;           /* the completion queue is never empty */

struct ibv_device **ibv_get_device_list(int *ret_count)
{
    *ret_count = 1;
    return device_list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    ck_assert_ptr_eq(list, device_list);
}

const char *ibv_get_device_name(struct ibv_device *each)
{
    return each->name;
}

static int poll_cq(struct ibv_cq *queue, int capacity, struct ibv_wc *ret_completions)
{
    (void)queue;
    if (poll_error != 0) return -poll_error;
    unsigned count = (unsigned)capacity < completion_count ? (unsigned)capacity : completion_count;
    memcpy(ret_completions, completions, count * sizeof(completions[0]));
    completion_count -= count;
    memmove(completions, completions + count, completion_count * sizeof(completions[0]));
    if (is_busy && count == 0) ret_completions[count++] = (struct ibv_wc){.wr_id = UINT64_MAX};
    return (int)count;
}

static int request_notice(struct ibv_cq *queue, int is_solicited_only)
{
    (void)queue, (void)is_solicited_only;
    return 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **ret_refused)
{
    (void)qp;
    *ret_refused = request;
    return send_error;
}

static int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **ret_refused)
{
    (void)qp, (void)ret_refused;
    for (unsigned i = 0; request != NULL; request = request->next)
        ck_assert_msg(++i < 2 * DEPTH, "the list of receive requests is a circle");
    return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *each)
{
    context = (struct ibv_context){.device = each, .async_fd = eventfd(0, EFD_CLOEXEC)};
    context.ops.poll_cq = poll_cq;
    context.ops.req_notify_cq = request_notice;
    context.ops.post_send = post_send;
    context.ops.post_recv = post_receive;
    return &context;
}

int ibv_close_device(struct ibv_context *each)
{
    return close(each->async_fd);
}

int ibv_query_device(struct ibv_context *each, struct ibv_device_attr *ret_attributes)
{
    (void)each;
    *ret_attributes = (struct ibv_device_attr){
        .max_qp_wr = 4 * DEPTH, .max_qp = 4, .max_cqe = MAX_CQ_ENTRIES, .phys_port_cnt = 1, .max_mr_size = UINT64_MAX};
    return 0;
}

/* The function that the header's inline form calls for a context without extensions. */
#undef ibv_query_port
int ibv_query_port(struct ibv_context *each, uint8_t port, struct _compat_ibv_port_attr *ret_attributes)
{
    struct ibv_port_attr *attributes = (void *)ret_attributes;
    (void)each, (void)port;
    attributes->state = IBV_PORT_ACTIVE;
    attributes->max_mtu = attributes->active_mtu = IBV_MTU_4096;
    attributes->gid_tbl_len = 4;
    attributes->max_msg_sz = 1u << 30;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *each, uint32_t port, uint32_t index, struct ibv_gid_entry *ret_entry,
                      uint32_t flags, size_t entry_size)
{
    (void)each, (void)flags, (void)entry_size;
    if (index != gid_index) return ENODATA;
    *ret_entry = (struct ibv_gid_entry){.gid_index = index, .port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2};
    ck_assert(verbs_address_to_gid("10.0.0.1", ret_entry->gid.raw));
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *each, struct ibv_gid_entry *entries, size_t capacity, uint32_t flags,
                             size_t entry_size)
{
    ck_assert_uint_ge(capacity, 1);
    ck_assert_int_eq(_ibv_query_gid_ex(each, 1, gid_index, entries, flags, entry_size), 0);
    return 1;
}

int ibv_get_async_event(struct ibv_context *each, struct ibv_async_event *ret_event)
{
    uint64_t count;
    if (read(each->async_fd, &count, sizeof(count)) != sizeof(count)) return -1;
    *ret_event = (struct ibv_async_event){.event_type = event, .element.port_num = 1};
    return 0;
}

void ibv_ack_async_event(struct ibv_async_event *each)
{
    (void)each;
}

const char *ibv_event_type_str(enum ibv_event_type type)
{
    (void)type;
    return "event";
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    (void)status;
    return "status";
}

enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *each)
{
    domain = (struct ibv_pd){.context = each};
    return &domain;
}

int ibv_dealloc_pd(struct ibv_pd *each)
{
    ck_assert_ptr_eq(each, &domain);
    return 0;
}

static struct ibv_mr *make_region(void *address, size_t len_bytes)
{
    struct ibv_mr *region = calloc(1, sizeof(*region));
    ck_assert_ptr_nonnull(region);
    *region = (struct ibv_mr){.context = &context, .pd = &domain, .addr = address, .length = len_bytes};
    return region;
}

/* The header's inline form calls the one or the other. */
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *each, void *address, size_t len_bytes, int access)
{
    (void)each, (void)access;
    return make_region(address, len_bytes);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *each, void *address, size_t len_bytes, uint64_t iova, unsigned access)
{
    (void)each, (void)iova, (void)access;
    return make_region(address, len_bytes);
}

int ibv_dereg_mr(struct ibv_mr *region)
{
    free(region);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *each)
{
    int ends[2];
    ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
    channel_reader = ends[0];
    channel = (struct ibv_comp_channel){.context = each, .fd = ends[1]};
    return &channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *each)
{
    return close(each->fd);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *each, int capacity, void *owner, struct ibv_comp_channel *on,
                             int vector)
{
    (void)vector;
    cq = (struct ibv_cq){.context = each, .cqe = capacity, .cq_context = owner, .channel = on};
    return &cq;
}

int ibv_resize_cq(struct ibv_cq *queue, int capacity)
{
    if (resize_error != 0) return resize_error;
    if (capacity > largest_cq) return EINVAL;
    if (!is_resize_ignored) queue->cqe = capacity;
    return 0;
}

int ibv_destroy_cq(struct ibv_cq *queue)
{
    ck_assert_ptr_eq(queue, &cq);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *each, struct ibv_cq **ret_cq, void **ret_context)
{
    (void)each, (void)ret_cq, (void)ret_context;
    errno = EIO;
    return -1;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *each, struct ibv_qp_init_attr *attributes)
{
    struct ibv_qp *qp = create_error == 0 ? calloc(1, sizeof(*qp)) : NULL;
    errno = create_error;
    if (qp == NULL) return NULL;
    *qp = (struct ibv_qp){.context = &context, .pd = each, .qp_context = attributes->qp_context, .qp_num = 17};
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
    (void)qp, (void)attributes, (void)mask;
    return modify_error;
}

/* As the drivers do, it drops what the completion queue holds of the queue pair. */
int ibv_destroy_qp(struct ibv_qp *qp)
{
    completion_count = 0;
    free(qp);
    return 0;
}

/* ------------------------------------------------------------------------------------------ the owner of it -- */

static struct tl_provider *provider;
static struct tl_queue_pair *pair;
static struct tl_error error, reason;
static unsigned message_count, broken_count, drained_count, cancelled_count;
static void (*in_message)(void); /* what the owner does for each message; NULL: nothing */

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    (void)owner, (void)data, (void)len_bytes;
    ck_assert_uint_eq(drained_count, 0);
    message_count++;
    if (in_message != NULL) in_message();
}

static void on_broken(void *owner, const struct tl_error *why)
{
    (void)owner;
    reason = *why;
    broken_count++;
}

static void on_drained(void *owner)
{
    (void)owner;
    drained_count++;
}

static void on_work_done(struct tl_work *work, enum tl_status status)
{
    (void)work;
    ck_assert_int_eq(status, TL_CANCELLED);
    cancelled_count++;
}

static const struct tl_queue_pair_events events = {.message = on_message, .broken = on_broken, .drained = on_drained};

static enum tl_status create_pair(void)
{
    const struct tl_queue_pair_options options = {DEPTH, DEPTH, TL_KEYS_REGION};
    return tl_queue_pair_create(provider, &options, &events, NULL, &pair, &error);
}

static void setup(void)
{
    struct tl_verbs_options options;
    struct tl_pair_address address;
    largest_cq = MAX_CQ_ENTRIES;
    tl_verbs_options_init(&options);
    options.queue_depth = DEPTH;
    options.keys = TL_KEYS_REGION;
    ck_assert_msg(tl_verbs_open(&options, 0, &provider, &error) == TL_OK, "%s", error.message);
    ck_assert_msg(create_pair() == TL_OK, "%s", error.message);
    pair->ops->get_address(pair, &address);
    ck_assert_msg(pair->ops->connect(pair, &address, &error) == TL_OK, "%s", error.message);
}

static void poll_device(void)
{
    for (unsigned i = 0; i < 4; i++)
        provider->ops->poll(provider);
}

/* The queue pair has broken and drained, and a sleep does not end at once. */
static void expect_end(void)
{
    ck_assert_uint_eq(broken_count, 1);
    ck_assert_uint_eq(drained_count, 1);
    ck_assert(tl_provider_arm(provider));
    pair->ops->destroy(pair);
    provider->ops->close(provider);
}

/* The completion queue has what the peer has sent into this slot. */
static void receive(uint32_t slot)
{
    ck_assert_uint_lt(completion_count, DEPTH);
    completions[completion_count++] = (struct ibv_wc){.wr_id = verbs_pair_of(pair)->slots.slots[slot].request.wr_id,
                                                      .status = IBV_WC_SUCCESS,
                                                      .opcode = IBV_WC_RECV,
                                                      .byte_len = 4};
}

static void disconnect(void)
{
    tl_error_set(&error, TL_CANCELLED, "the owner disconnects");
    pair->ops->disconnect(pair, &error);
}

/* The device reports that it has failed. */
static void fail_device(void)
{
    event = IBV_EVENT_DEVICE_FATAL;
    ck_assert_int_eq(eventfd_write(context.async_fd, 1), 0);
    tl_provider_disarm(provider, true);
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

START_TEST(a_card_that_keeps_work)
{
    disconnect();
    poll_device();
    ck_assert_uint_eq(broken_count, 1);
    ck_assert_uint_eq(drained_count, 0);
    fake_clock_advance(TL_NS_PER_SEC);
    poll_device();
    expect_end();
}
END_TEST

START_TEST(a_device_that_fails_while_a_queue_pair_flushes)
{
    disconnect();
    poll_device();
    ck_assert_uint_eq(drained_count, 0);
    fail_device();
    poll_device();
    expect_end();
}
END_TEST

/* The descriptors of a removed device are in error for ever. */
START_TEST(a_removed_device_lets_its_thread_sleep)
{
    struct pollfd asleep = {.fd = provider->fd, .events = POLLIN};
    ck_assert_int_eq(poll(&asleep, 1, 0), 0);
    ck_assert_int_eq(close(channel_reader), 0);
    ck_assert_int_eq(poll(&asleep, 1, 0), 1);
    fail_device();
    poll_device();
    ck_assert(tl_provider_arm(provider));
    ck_assert_int_eq(poll(&asleep, 1, 0), 0);
    expect_end();
}
END_TEST

/* The peer knows that the message has arrived, and does not send it again. */
START_TEST(a_message_is_kept_when_the_device_fails)
{
    receive(0);
    fail_device();
    poll_device();
    ck_assert_uint_eq(message_count, 1);
    expect_end();
}
END_TEST

START_TEST(a_message_is_kept_when_the_card_refuses_a_request)
{
    struct tl_work work = {.magic = TL_WORK_MAGIC, .done = on_work_done};
    receive(0);
    send_error = ENOMEM;
    pair->ops->message(pair, "text", 4, &work);
    tl_queue_pair_doorbell(pair);
    poll_device();
    ck_assert_uint_eq(message_count, 1);
    ck_assert_uint_eq(cancelled_count, 1);
    expect_end();
}
END_TEST

START_TEST(a_message_is_kept_when_the_card_does_not_flush)
{
    receive(0);
    modify_error = EIO;
    disconnect();
    poll_device();
    ck_assert_uint_eq(message_count, 1);
    expect_end();
}
END_TEST

/* The owner disconnects while it is given the first of two. */
START_TEST(a_message_is_kept_when_the_owner_disconnects)
{
    receive(0);
    receive(1);
    modify_error = EIO;
    in_message = disconnect;
    poll_device();
    ck_assert_uint_eq(message_count, 2);
    expect_end();
}
END_TEST

/* The thread was held up for long, between two polls. */
START_TEST(a_message_is_kept_when_patience_ends)
{
    disconnect();
    poll_device();
    receive(0);
    fake_clock_advance(TL_NS_PER_SEC);
    poll_device();
    ck_assert_uint_eq(message_count, 1);
    expect_end();
}
END_TEST

START_TEST(a_device_that_fails_with_several_queue_pairs)
{
    struct tl_queue_pair *connected = pair;
    ck_assert_int_eq(create_pair(), TL_OK);
    fail_device();
    poll_device();
    ck_assert_uint_eq(broken_count, 2);
    ck_assert_uint_eq(drained_count, 2);
    connected->ops->destroy(connected);
    pair->ops->destroy(pair);
    provider->ops->close(provider);
}
END_TEST

START_TEST(a_completion_queue_that_is_never_empty)
{
    is_busy = true;
    modify_error = EIO;
    disconnect();
    poll_device();
    fake_clock_advance(TL_NS_PER_SEC);
    poll_device();
    ck_assert_uint_eq(drained_count, 0);
    fake_clock_advance(TL_NS_PER_SEC);
    poll_device();
    ck_assert_uint_eq(drained_count, 1);
    is_busy = false;
    poll_device();
    expect_end();
}
END_TEST

START_TEST(a_completion_queue_that_cannot_be_read)
{
    poll_error = EIO;
    poll_device();
    ck_assert_str_eq(reason.message, "fake_0:1: the completion queue cannot be read");
    expect_end();
}
END_TEST

START_TEST(a_slot_that_is_completed_twice)
{
    for (uint32_t i = 0; i <= 4; i++)
        receive(i < 4 ? i : 3);
    poll_device();
    ck_assert_uint_eq(message_count, 4);
    ck_assert_ptr_nonnull(strstr(reason.message, "the card completed a slot that it does not have"));
    expect_end();
}
END_TEST

START_TEST(a_completion_queue_that_is_not_enlarged)
{
    struct verbs_device *opened = verbs_device_of(provider);
    uint32_t reserved = opened->cq.reserved;
    is_resize_ignored = true;
    ck_assert_int_eq(verbs_device_reserve(opened, 5000, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(error.message, "fake_0:1: cannot enlarge the completion queue to 5036: it still has 1024; lower "
                                    "verbs.queue_depth, or connect fewer peers");
    ck_assert_uint_eq(opened->cq.reserved, reserved);
    is_resize_ignored = false;
    /* When the card cannot double it, it is made as large as it must be. */
    largest_cq = 1100;
    ck_assert_int_eq(verbs_device_reserve(opened, 1100 - reserved, &error), TL_OK);
    ck_assert_uint_eq(opened->cq.capacity, 1100);
    ck_assert_int_eq(verbs_device_reserve(opened, 1, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(error.message, "fake_0:1: cannot enlarge the completion queue to 1101: Invalid argument");
}
END_TEST

/* The kernel answers with ENOMEM when a process without rights has locked too much memory. */
START_TEST(the_limit_of_locked_memory_is_named)
{
    const struct rlimit limit = {64 * 1024, 64 * 1024};
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    const struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    ck_assert_int_eq(syscall(SYS_capset, &header, none), 0);
    create_error = ENOMEM;
    ck_assert_int_eq(create_pair(), TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(error.message, "of locked memory, the limit is 65.5 KB; raise it: ulimit -l") != NULL, "%s",
                  error.message);
    resize_error = ENOMEM;
    error = (struct tl_error){0};
    ck_assert_int_eq(verbs_device_reserve(verbs_device_of(provider), 5000, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(error.message, "of locked memory, the limit is 65.5 KB; raise it: ulimit -l") != NULL, "%s",
                  error.message);
}
END_TEST

/* Addresses come and go, which moves the one that the device was opened with. */
START_TEST(a_device_is_opened_again_where_its_address_is)
{
    struct tl_provider *again = NULL;
    gid_index = 3;
    ck_assert_msg(tl_provider_reopen(provider, &again, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(verbs_device_of(again)->port.gid_index, 3);
    gid_index = 4; /* Beyond the table. */
    ck_assert_int_eq(tl_provider_reopen(provider, &again, &error), TL_UNAVAILABLE);
    ck_assert_str_eq(error.message, "fake_0:1: the address 10.0.0.1 has gone from the port");
}
END_TEST

#define ADD(suite, test) add_own_case(suite, #test, setup, NULL, test)

int main(void)
{
    Suite *suite = suite_create("verbs_fake_card");
    ADD(suite, a_card_that_keeps_work);
    ADD(suite, a_device_that_fails_while_a_queue_pair_flushes);
    ADD(suite, a_removed_device_lets_its_thread_sleep);
    ADD(suite, a_message_is_kept_when_the_device_fails);
    ADD(suite, a_message_is_kept_when_the_card_refuses_a_request);
    ADD(suite, a_message_is_kept_when_the_card_does_not_flush);
    ADD(suite, a_message_is_kept_when_the_owner_disconnects);
    ADD(suite, a_message_is_kept_when_patience_ends);
    ADD(suite, a_device_that_fails_with_several_queue_pairs);
    ADD(suite, a_completion_queue_that_is_never_empty);
    ADD(suite, a_completion_queue_that_cannot_be_read);
    ADD(suite, a_slot_that_is_completed_twice);
    ADD(suite, a_completion_queue_that_is_not_enlarged);
    ADD(suite, the_limit_of_locked_memory_is_named);
    ADD(suite, a_device_is_opened_again_where_its_address_is);
    return run_suite(suite);
}
