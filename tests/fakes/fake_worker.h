// SPDX-License-Identifier: Apache-2.0
/*
 * A server on 127.0.0.1 with a scripted worker behind it, in a thread of its own.
 *
 * The server's thread only reads `script`, which the test sets before fake_worker_start. The thread writes `seen`,
 * which the test reads with fake_worker_seen or waits for with fake_worker_wait.
 */
#ifndef FAKES_FAKE_WORKER_H
#define FAKES_FAKE_WORKER_H

#include <pthread.h>

#include <tensorlane/worker.h>

#include "control/internal.h"

#define FAKE_MAX_OFFERS 8

/* A tensor that Receive finds under a key. */
struct fake_offer {
    const char *key;
    struct tl_offer offer; /* The fake owns this reference. */
};

struct fake_script {
    struct fake_offer offers[FAKE_MAX_OFFERS];
    size_t offer_count;
    bool replies_later; /* After request has returned, instead of inside it. */
    unsigned refused;   /* Actions that no caller may take, 1U << enum tl_action. */
    struct tl_error admit;
    struct tl_error publish;
    struct tl_error list;
    struct tl_error describe;
    size_t list_count; /* The tensors in every listing: "tensor/0000000" and so on. */
    size_t list_key_bytes;
    uint64_t withdraw_count;
    size_t peer_count; /* The peers in the description. */
    size_t peer_reason_bytes;
    const char *peer_reason; /* NULL: none. */
    bool has_data_plane;     /* The description has one. */
    uint64_t chunk_bytes;
    uint64_t inflight_bytes;
    int64_t request_timeout_ns;
    uint64_t max_calls;
};

struct fake_seen {
    unsigned asked[TL_ACTION_COUNT]; /* How often a caller wanted to take an action. */
    unsigned requests;
    unsigned ended[3];           /* By enum tl_serve_end. */
    struct tl_request_id ids[4]; /* The identities of the first requests. */
    uint64_t step;
    bool is_client_known; /* The latest request came with an address and without identity. */
    unsigned admitted;
    unsigned published;
    unsigned broken_off; /* Calls of publish without a tensor. */
    char key[TL_MAX_KEY_BYTES + 1];
    uint64_t published_step;
    struct tl_tensor *tensor; /* The latest tensor that was published, one reference; NULL: none. */
    char pattern[1024];
};

struct fake_worker {
    struct fake_script script;
    struct tl_loop *loop;
    struct tl_control *control;
    char address[64];
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct fake_seen seen;    /* Protected by the mutex. */
    struct tl_serve *waiting; /* Only the server's thread uses it: the latest serve that found no tensor. */
    bool is_stopped;          /* Only the server's thread uses it. */
};

/* Fills *worker with zeros and a script under which everything succeeds. */
void fake_worker_init(struct fake_worker *worker);
/* Offers a tensor, whose reference the fake takes over. */
void fake_worker_offer(struct fake_worker *worker, const char *key, struct tl_tensor *tensor);
void fake_worker_start(struct fake_worker *worker);
/* Stops the server, giving open calls the time until deadline_ns; joins the thread and frees. */
void fake_worker_stop(struct fake_worker *worker, int64_t deadline_ns);

/* Runs a function on the server's thread and returns when it has run. */
void fake_worker_run(struct fake_worker *worker, void (*function)(struct fake_worker *worker, void *context),
                     void *context);

/* Returns a copy of what was noted; its tensor belongs to the fake. */
struct fake_seen fake_worker_seen(struct fake_worker *worker);
/* Waits until the condition holds for what was noted; aborts the test after half a minute. */
void fake_worker_wait(struct fake_worker *worker, bool (*condition)(const struct fake_seen *seen));

#endif
