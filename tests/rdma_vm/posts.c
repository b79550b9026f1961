// SPDX-License-Identifier: Apache-2.0
/*
 * A library that is loaded before libtensorlane, with RTLD_GLOBAL, and stands between workers and the card. libibverbs
 * reaches the card through a table of functions in each device's context; when a device is opened, this library
 * exchanges the function that posts to queue pairs.
 *
 * It notes what is posted until posts_take fetches the notes. It can also turn one write or message into that of a
 * lying peer: see posts_redirect, posts_redirect_source and posts_falsify. The programs use it through posts.py.
 *
 * Failure modes: posts that do not fit into the notes are counted, and posts_take reports them.
 */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_POSTS 65536
#define MAX_DEVICES 64

/* One work request; posts.py has the same. */
struct post {
    uint32_t opcode; /* enum ibv_wr_opcode */
    uint32_t queue_pair;
    uint64_t local; /* For a write: where it reads; for a read: where it writes; for a bind: what it exposes. */
    uint64_t remote;
    uint64_t len_bytes;
    uint32_t key;        /* For a write or read: the peer's key; for a bind: the new key. */
    uint32_t region_key; /* For a bind: the key of the region behind it. */
};

/* How to change the next write that reads at `from`, or the next SOURCE that shows the memory there. */
struct redirection {
    uint64_t from, to;
    uint32_t key;
    bool is_of_source;
    bool is_set;
};

/* How many bytes of a slot are in front of its first message (docs/protocol.md). */
#define BATCH_HEAD_BYTES 4
/* The first byte of a SOURCE. Its descriptor has the address (8 bytes) and the key (4 bytes). */
#define SOURCE_TYPE 13

/* How to change the next message of the type that contains the text. */
struct falsification {
    char text[64]; /* The empty string stands for no text. */
    uint8_t type;  /* the first byte of a message */
    uint8_t place; /* The place of the two bytes to falsify; 0: those in front of the text. */
};

typedef int post_send_fn(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **ret_refused);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* Protects everything in this struct. */
static struct post posts[MAX_POSTS];
static size_t post_count, lost_count;
static bool is_noting;
static struct redirection redirection;
static struct falsification falsification;
static struct {
    struct ibv_context *context;
    post_send_fn *post_send;
} devices[MAX_DEVICES];

/* Python calls these functions. */
void posts_begin(void);
long posts_take(struct post *ret_posts, size_t capacity);
void posts_redirect(uint64_t from, uint64_t to, uint32_t key);
void posts_redirect_source(uint64_t from, uint64_t to, uint32_t key);
bool posts_is_redirected(void);
void posts_falsify(uint8_t type, uint8_t place, const char *text);
bool posts_is_falsified(void);

static bool is_write(const struct ibv_send_wr *request)
{
    return request->opcode == IBV_WR_RDMA_WRITE || request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static void note(const struct ibv_qp *qp, const struct ibv_send_wr *request)
{
    struct post post = {.opcode = request->opcode, .queue_pair = qp->qp_num};
    if (is_write(request) || request->opcode == IBV_WR_RDMA_READ) {
        if (request->num_sge > 0) {
            post.local = request->sg_list->addr;
            post.len_bytes = request->sg_list->length;
        }
        post.remote = request->wr.rdma.remote_addr;
        post.key = request->wr.rdma.rkey;
    } else if (request->opcode == IBV_WR_BIND_MW) {
        post.local = request->bind_mw.bind_info.addr;
        post.len_bytes = request->bind_mw.bind_info.length;
        post.key = request->bind_mw.rkey;
        post.region_key = request->bind_mw.bind_info.mr->rkey;
    }
    if (!is_noting) return;
    if (post_count < MAX_POSTS) {
        posts[post_count++] = post;
    } else {
        lost_count++;
    }
}

static void redirect(struct ibv_send_wr *request)
{
    if (!redirection.is_set || redirection.is_of_source || !is_write(request) || request->num_sge == 0) return;
    if (request->sg_list->addr != redirection.from) return;
    redirection.is_set = false;
    request->wr.rdma.remote_addr = redirection.to;
    request->wr.rdma.rkey = redirection.key;
}

static void redirect_source(const struct ibv_send_wr *request)
{
    if (!redirection.is_set || !redirection.is_of_source) return;
    if (request->opcode != IBV_WR_SEND || request->num_sge == 0) return;
    uint8_t *message = (uint8_t *)(uintptr_t)request->sg_list->addr + BATCH_HEAD_BYTES;
    size_t len_bytes = request->sg_list->length - BATCH_HEAD_BYTES;
    uint8_t *address = memmem(message, len_bytes, &redirection.from, sizeof(redirection.from));
    if (message[0] != SOURCE_TYPE || address == NULL) return;
    redirection.is_set = false;
    memcpy(address, &redirection.to, sizeof(redirection.to));
    memcpy(address + sizeof(redirection.to), &redirection.key, sizeof(redirection.key));
}

/* The false length reaches beyond the slot. */
static void falsify(const struct ibv_send_wr *request)
{
    size_t text_bytes = strlen(falsification.text);
    if (text_bytes == 0 || request->opcode != IBV_WR_SEND || request->num_sge == 0) return;
    uint8_t *message = (uint8_t *)(uintptr_t)request->sg_list->addr + BATCH_HEAD_BYTES;
    uint32_t len_bytes = request->sg_list->length - BATCH_HEAD_BYTES;
    uint8_t *text = memmem(message, len_bytes, falsification.text, text_bytes);
    if (message[0] != falsification.type || text == NULL) return;
    falsification.text[0] = '\0';
    memset(falsification.place != 0 ? message + falsification.place : text - 1, 0xff, 2);
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *first, struct ibv_send_wr **ret_refused)
{
    post_send_fn *real = NULL;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < MAX_DEVICES && real == NULL; i++) {
        if (devices[i].context == qp->context) real = devices[i].post_send;
    }
    for (struct ibv_send_wr *request = first; request != NULL; request = request->next) {
        redirect(request);
        redirect_source(request);
        falsify(request);
        note(qp, request);
    }
    pthread_mutex_unlock(&mutex);
    if (real == NULL) abort();
    return real(qp, first, ret_refused);
}

/* The real function, which ours replaces. */
static void *real_function(const char *name)
{
    void *library = dlopen("libibverbs.so.1", RTLD_LAZY);
    void *function = library != NULL ? dlsym(library, name) : NULL;
    if (function == NULL) abort();
    return function;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *(*real)(struct ibv_device *);
    *(void **)&real = real_function("ibv_open_device");
    struct ibv_context *context = real(device);
    if (context == NULL) return NULL;
    pthread_mutex_lock(&mutex);
    size_t i = 0;
    while (devices[i].context != NULL && i < MAX_DEVICES - 1)
        i++;
    devices[i].context = context;
    devices[i].post_send = context->ops.post_send;
    context->ops.post_send = post_send;
    pthread_mutex_unlock(&mutex);
    return context;
}

/* Another device may get the context's address, so this one is forgotten first. */
int ibv_close_device(struct ibv_context *context)
{
    int (*real)(struct ibv_context *);
    *(void **)&real = real_function("ibv_close_device");
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < MAX_DEVICES; i++) {
        if (devices[i].context == context) devices[i].context = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return real(context);
}

/* Begins to note what is posted. */
void posts_begin(void)
{
    pthread_mutex_lock(&mutex);
    is_noting = true;
    post_count = lost_count = 0;
    pthread_mutex_unlock(&mutex);
}

/* Moves the notes out, in the order of posting. Returns how many there are, or -1 when some were lost or do not fit. */
long posts_take(struct post *ret_posts, size_t capacity)
{
    pthread_mutex_lock(&mutex);
    long count = lost_count == 0 && post_count <= capacity ? (long)post_count : -1;
    for (long i = 0; i < count; i++)
        ret_posts[i] = posts[i];
    post_count = lost_count = 0;
    pthread_mutex_unlock(&mutex);
    return count;
}

/* Redirects the next write that reads at `from`: it goes to `to`, with this key. */
void posts_redirect(uint64_t from, uint64_t to, uint32_t key)
{
    pthread_mutex_lock(&mutex);
    redirection = (struct redirection){from, to, key, false, true};
    pthread_mutex_unlock(&mutex);
}

/* Redirects the next SOURCE that shows the memory at `from`: it names `to`, and this key. */
void posts_redirect_source(uint64_t from, uint64_t to, uint32_t key)
{
    pthread_mutex_lock(&mutex);
    redirection = (struct redirection){from, to, key, true, true};
    pthread_mutex_unlock(&mutex);
}

/* Returns whether that write or message has been posted. */
bool posts_is_redirected(void)
{
    pthread_mutex_lock(&mutex);
    bool is_redirected = !redirection.is_set;
    pthread_mutex_unlock(&mutex);
    return is_redirected;
}

/* Falsifies the next message of the type that contains the text: the two bytes at the place become a wrong length. */
void posts_falsify(uint8_t type, uint8_t place, const char *text)
{
    pthread_mutex_lock(&mutex);
    falsification.type = type;
    falsification.place = place;
    strncpy(falsification.text, text, sizeof(falsification.text) - 1);
    pthread_mutex_unlock(&mutex);
}

/* Returns whether that message has been posted. */
bool posts_is_falsified(void)
{
    pthread_mutex_lock(&mutex);
    bool is_falsified = falsification.text[0] == '\0';
    pthread_mutex_unlock(&mutex);
    return is_falsified;
}
