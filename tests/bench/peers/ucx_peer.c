// SPDX-License-Identifier: Apache-2.0
/*
 * The UCX peer: tagged messages from as many buffers into as many others, over libucp.
 *
 *     ucx_peer serve SOCKET   prints "ready" once it can be called on the socket file; ends with its caller
 *     ucx_peer pull SOCKET    prints "ready VERSION", then answers "at_once BYTES TENSORS COUNT" with the seconds that
 *                             COUNT repetitions took, in each of which TENSORS messages of BYTES bytes came at once
 *
 * ucx_perftest sends one buffer again and again into one buffer, both of which stay in the processors' first caches.
 * Here each message has a buffer of its own on both sides, as tensors have. The receiver posts its receives, which name
 * their buffers, and then asks for all messages with one small message; nothing is looked up, checked or reported for
 * each. What the last repetition has received is compared after the time.
 *
 * The two exchange the addresses of their workers over the socket file. Each drives its worker itself, and polls.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <ucp/api/ucp.h>

#define ASK_TAG UINT64_C(1)
#define FIRST_TAG UINT64_C(1000) /* the first tensor's */
#define WHOLE_TAG UINT64_MAX
#define MAX_TENSORS 4096
#define MAX_ADDRESS_BYTES 65536
#define WARM_UP_COUNT 3

/* What the receiver asks for. */
struct ask {
    uint64_t size_bytes;
    uint64_t tensor_count; /* 0: nothing more comes */
};

struct peer {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    int connection;
    struct ask shape; /* what `buffers` are for */
    uint8_t *buffers[MAX_TENSORS];
};

static void die(const char *what)
{
    fprintf(stderr, "ucx_peer: %s\n", what);
    exit(EXIT_FAILURE);
}

static void check(ucs_status_t status, const char *what)
{
    if (status == UCS_OK) return;
    fprintf(stderr, "ucx_peer: %s: %s\n", what, ucs_status_string(status));
    exit(EXIT_FAILURE);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* ------------------------------------------------------------------------------------------------------ meeting -- */

static void move_all(int connection, void *bytes, size_t len_bytes, bool is_writing)
{
    for (size_t done = 0; done < len_bytes;) {
        uint8_t *at = (uint8_t *)bytes + done;
        ssize_t moved = is_writing ? write(connection, at, len_bytes - done) : read(connection, at, len_bytes - done);
        if (moved <= 0) die("the other side has gone");
        done += (size_t)moved;
    }
}

static int meet(const char *path, bool is_server)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || strlen(path) >= sizeof(address.sun_path)) die("no socket");
    strcpy(address.sun_path, path);
    if (!is_server) {
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) die("nothing listens");
        return fd;
    }
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(fd, 1) != 0) die("cannot listen");
    puts("ready");
    fflush(stdout);
    int connection = accept(fd, NULL, NULL);
    if (connection < 0) die("no connection");
    close(fd);
    return connection;
}

static void open_worker(struct peer *peer)
{
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    const ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                               .thread_mode = UCS_THREAD_MODE_SINGLE};
    check(ucp_init(&params, NULL, &peer->context), "ucp_init");
    check(ucp_worker_create(peer->context, &worker_params, &peer->worker), "ucp_worker_create");
}

static void connect_worker(struct peer *peer)
{
    ucp_address_t *own;
    size_t own_bytes;
    uint64_t sizes[2];
    static uint8_t theirs[MAX_ADDRESS_BYTES];
    check(ucp_worker_get_address(peer->worker, &own, &own_bytes), "ucp_worker_get_address");
    sizes[0] = own_bytes;
    move_all(peer->connection, &sizes[0], sizeof(sizes[0]), true);
    move_all(peer->connection, own, own_bytes, true);
    ucp_worker_release_address(peer->worker, own);
    move_all(peer->connection, &sizes[1], sizeof(sizes[1]), false);
    if (sizes[1] > sizeof(theirs)) die("an address that is too long");
    move_all(peer->connection, theirs, sizes[1], false);
    const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                                    .address = (const ucp_address_t *)theirs};
    check(ucp_ep_create(peer->worker, &params, &peer->endpoint), "ucp_ep_create");
}

/* ----------------------------------------------------------------------------------------------------- messages -- */

static void *send_message(struct peer *peer, const void *bytes, size_t len_bytes, uint64_t tag)
{
    const ucp_request_param_t param = {.op_attr_mask = 0};
    return ucp_tag_send_nbx(peer->endpoint, bytes, len_bytes, tag, &param);
}

static void *receive_message(struct peer *peer, void *bytes, size_t len_bytes, uint64_t tag)
{
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL};
    return ucp_tag_recv_nbx(peer->worker, bytes, len_bytes, tag, WHOLE_TAG, &param);
}

static void finish(struct peer *peer, void *request)
{
    if (request == NULL) return; /* done on the spot */
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "a message");
    while (ucp_request_check_status(request) == UCS_INPROGRESS)
        ucp_worker_progress(peer->worker);
    check(ucp_request_check_status(request), "a message");
    ucp_request_free(request);
}

/* Has buffers of this shape, with the contents of the tensors, or with others. */
static void have_buffers(struct peer *peer, struct ask shape, bool is_filled)
{
    if (shape.tensor_count > MAX_TENSORS || shape.size_bytes == 0) die("no such messages");
    if (memcmp(&shape, &peer->shape, sizeof(shape)) == 0) return;
    for (uint64_t i = 0; i < peer->shape.tensor_count; i++)
        free(peer->buffers[i]);
    for (uint64_t i = 0; i < shape.tensor_count; i++) {
        peer->buffers[i] = malloc(shape.size_bytes);
        if (peer->buffers[i] == NULL) die("no memory");
        memset(peer->buffers[i], is_filled ? (int)(i % 251) : 255, shape.size_bytes);
    }
    peer->shape = shape;
}

/* ------------------------------------------------------------------------------------------------------- owner -- */

static int serve(struct peer *peer)
{
    static void *requests[MAX_TENSORS];
    for (;;) {
        struct ask ask;
        finish(peer, receive_message(peer, &ask, sizeof(ask), ASK_TAG));
        if (ask.tensor_count == 0) return EXIT_SUCCESS;
        have_buffers(peer, ask, true);
        for (uint64_t i = 0; i < ask.tensor_count; i++)
            requests[i] = send_message(peer, peer->buffers[i], ask.size_bytes, FIRST_TAG + i);
        for (uint64_t i = 0; i < ask.tensor_count; i++)
            finish(peer, requests[i]);
    }
}

/* ---------------------------------------------------------------------------------------------------- receiver -- */

static void receive_all(struct peer *peer, struct ask *ask)
{
    static void *requests[MAX_TENSORS];
    for (uint64_t i = 0; i < ask->tensor_count; i++)
        requests[i] = receive_message(peer, peer->buffers[i], ask->size_bytes, FIRST_TAG + i);
    finish(peer, send_message(peer, ask, sizeof(*ask), ASK_TAG));
    for (uint64_t i = 0; i < ask->tensor_count; i++)
        finish(peer, requests[i]);
}

static void check_contents(const struct peer *peer)
{
    for (uint64_t i = 0; i < peer->shape.tensor_count; i++)
        for (uint64_t j = 0; j < peer->shape.size_bytes; j++)
            if (peer->buffers[i][j] != i % 251) die("the bytes that were received are not those of the owner");
}

static int pull(struct peer *peer)
{
    struct ask ask;
    uint64_t count;
    printf("ready UCX %s\n", ucp_get_version_string());
    fflush(stdout);
    while (scanf("%*s %" SCNu64 " %" SCNu64 " %" SCNu64, &ask.size_bytes, &ask.tensor_count, &count) == 3) {
        have_buffers(peer, ask, false);
        for (int i = 0; i < WARM_UP_COUNT; i++)
            receive_all(peer, &ask);
        double start = now();
        for (uint64_t i = 0; i < count; i++)
            receive_all(peer, &ask);
        printf("%.9f\n", now() - start);
        fflush(stdout);
        check_contents(peer);
    }
    ask = (struct ask){.tensor_count = 0};
    finish(peer, send_message(peer, &ask, sizeof(ask), ASK_TAG));
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    static struct peer peer;
    if (argc != 3) die("usage: ucx_peer serve|pull SOCKET");
    bool is_server = strcmp(argv[1], "serve") == 0;
    peer.connection = meet(argv[2], is_server);
    open_worker(&peer);
    connect_worker(&peer);
    int status = is_server ? serve(&peer) : pull(&peer);
    /* Without an orderly end: the other side may be gone already. */
    _exit(status);
}
