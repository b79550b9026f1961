// SPDX-License-Identifier: Apache-2.0
/*
 * A data path: how one peer is reached by the data plane, over one link at a time.
 *
 *                  ours                                        theirs
 *      OFF --link--> CREATING --introduced--> OFFERED     OFF --link--> EXPECTING <--refused by us, broken--
 *                       ^                       | ANSWER                    | OFFER                         |
 *                       |pause over             v                           v                               |
 *                    BACK_OFF <--failed-- CONNECTING --verified--> UP <-- CONNECTING ----------------------->
 *                       ^-------------------broken-----------------'
 *      any state --final refusal--> REFUSED, until another link; --link lost--> OFF
 *
 * The side that opened the link offers, and offers again with growing pauses when an attempt fails or the connection
 * breaks; the other side answers. Without a data plane of our own the path is REFUSED from the beginning, and the peer
 * is told so, with the reason. Every attempt has a deadline. Who sees a path break tells the other side, over the link.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_DATA_PATH_H
#define SERVER_DATA_PATH_H

#include <stddef.h>

#include "base/timer.h"
#include "control/link.h"

struct tl_worker;
struct tl_session;

enum tl_data_path_state {
    TL_DATA_PATH_OFF,        /* waits for a link */
    TL_DATA_PATH_EXPECTING,  /* waits for the peer's offer; for the first one not for ever */
    TL_DATA_PATH_CREATING,   /* waits for the reactor to make the connection, and its introduction */
    TL_DATA_PATH_OFFERED,    /* waits for the peer's answer */
    TL_DATA_PATH_CONNECTING, /* waits for the connection to be verified */
    TL_DATA_PATH_UP,         /* carries requests */
    TL_DATA_PATH_BACK_OFF,   /* waits for the pause to end */
    TL_DATA_PATH_REFUSED,    /* cannot be had on this link; waits for another */
};

struct tl_data_path_events {
    /* What tl_data_path_use says may be another than before. */
    void (*changed)(void *owner);
    /* A session ends: the peer may not have heard that the tensors of these requests have arrived. */
    void (*unconfirmed)(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count);
};

struct tl_data_path {
    struct tl_worker *worker;
    const char *name; /* of the peer; "" for a client */
    const struct tl_data_path_events *events;
    void *owner;
    enum tl_data_path_state state;
    struct tl_link *link;       /* NULL: OFF */
    struct tl_session *session; /* from CREATING to UP, of our side; NULL: none */
    uint64_t attempt;           /* of the latest offer, ours or the peer's */
    bool is_first;              /* no attempt on this link has ended yet */
    bool is_left;               /* the peer has closed it in order: it restarts, or will be offered one again */
    unsigned failure_count;     /* attempts in a row */
    struct tl_timer timer;      /* end of the attempt, or of the pause */
    char reason[TL_ERROR_MESSAGE_BYTES]; /* why it cannot be used; "" when UP */
    const char *lasting_reason;          /* the same for completions (base/reason.h) */
    char logged[TL_ERROR_MESSAGE_BYTES]; /* the reason that was logged last */
    bool has_logged;
};

/* What a request should do. */
enum tl_data_path_use {
    TL_DATA_PATH_TAKE,  /* travel on path->session */
    TL_DATA_PATH_AWAIT, /* wait: `changed` will be called */
    TL_DATA_PATH_AVOID, /* it cannot be used now */
};

/* name lives as long as the path. */
void tl_data_path_init(struct tl_data_path *path, struct tl_worker *worker, const char *name,
                       const struct tl_data_path_events *events, void *owner);
/* This link is in use from now on, in place of another or of none. */
void tl_data_path_begin(struct tl_data_path *path, struct tl_link *link);
/* There is no link any more. Harmless when there was none. */
void tl_data_path_end(struct tl_data_path *path);
/* What the peer tells on any link of its. */
void tl_data_path_hear(struct tl_data_path *path, struct tl_link *link, const struct tl_path_message *message);

enum tl_data_path_use tl_data_path_use(const struct tl_data_path *path);

#endif
