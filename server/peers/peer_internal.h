// SPDX-License-Identifier: Apache-2.0
/* A peer, as its files see it: peer.c (members, requests), peer_link.c (the links to it), peer_wait.c (calls that wait
 * for peers, the description of peers), peer_calls.c (calls of operations at the peer). */
#ifndef SERVER_PEERS_PEER_INTERNAL_H
#define SERVER_PEERS_PEER_INTERNAL_H

#include "base/numbers.h"
#include "server/peers/admission.h"
#include "server/peers/data_connections.h"
#include "server/peers/rivals.h"
#include "server/worker_internal.h"

/* The calls of operations at the peer, such as tl_put, which go beside its link (peer_calls.c). */
struct peer_calls {
    struct tl_list waiting; /* struct tl_call_wait, in the order in which they came */
    size_t running_count;
    struct tl_closure round_closure; /* deferred: starts those that can go */
    struct tl_link *link;            /* ours, for calls alone, because the peer has opened the one in use; NULL: none */
};

/* The links to a peer. They set up data connections, and carry tensors themselves. */
struct peer_links {
    struct tl_link *link;     /* in use: up; NULL: none */
    int64_t link_since_ns;    /* when it came into use */
    struct tl_link *opening;  /* ours, before its handshake is over; NULL: none */
    enum tl_peer_state state; /* set by the table in peer_link.c only; UP exactly while there is a link in use */
    struct tl_error reason;   /* why it is down; code TL_OK otherwise */
    unsigned failure_count;   /* attempts since it was up last */
    bool is_retrying;         /* an attempt has failed since it was wanted anew: the reason says why it is not up now */
    int64_t down_since_ns;    /* when the first of them failed */
    bool has_left;            /* its process has closed the connection in order */
    bool has_warned;          /* its absence has been logged as a warning since it was up last */
    unsigned loss_count;      /* links that ended before TL_SETTLED_NS, in a row */
    struct tl_timer back_off; /* armed: another attempt will follow; a place is kept for it */
    struct peer_calls calls;
};

struct tl_peer {
    struct tl_worker *worker;
    tl_peer_id id;
    char name[TL_MAX_NAME_BYTES];
    char address[TL_MAX_ADDRESS_BYTES];
    bool is_self;
    struct tl_added *added; /* NULL: a task of the configuration */
    uint64_t incarnation;   /* 0: no handshake yet */
    uint64_t restart_count;
    struct tl_rivals
        rivals; /* the processes that have connected as this peer; rivals.latest is the one of incarnation */
    struct tl_list requests; /* tl_peer_request that wait until it is up, and a data connection is up or all failed */
    struct tl_closure round_closure; /* deferred while requests that could travel wait for the next round */
    unsigned awaited;                /* how many tl_worker_wait_for_peers wait for it */
    bool is_eager;
    struct tl_numbers received; /* requests whose tensors have arrived, for the next link to report */
    struct tl_numbers given_up; /* requests that broke and will not be asked again, for the next link to report */
    int64_t received_until_ns;  /* the peer drops its values for them then */
    struct tl_origin origin;    /* where its links may come from */
    struct peer_links links;
    struct tl_data_connections data; /* over links.link */
};

static inline bool tl_peer_is_removed(const struct tl_peer *peer)
{
    return peer->added != NULL && peer->added->is_removed;
}

/* peer.c */
/* Returns the peers one after the other, those that were added too; NULL: there are no more. *place begins with 0. */
struct tl_peer *tl_peers_next(const struct tl_worker *worker, size_t *place);
/* Creates a peer that is not in a list yet. */
struct tl_peer *tl_peer_create(struct tl_worker *worker, const char *name, const char *address);
/* Frees a peer without links and requests. */
void tl_peer_destroy(struct tl_peer *peer);
/* Sends the requests that wait, as far as they can travel now: some hundred at once, and the others in later rounds, so
 * that other peers have their turn. */
void tl_peer_send_waiting(struct tl_peer *peer);
/* Returns how tensors travel to it: "local", "verbs", "grpc", "self". */
const char *tl_peer_transport(const struct tl_peer *peer);
const char *tl_peer_state_name(enum tl_peer_state state);

/* peer_calls.c */
void tl_peer_calls_init(struct tl_peer *peer);
/* A link to the peer has come up, or could not be opened: starts the calls that wait, soon, or fails them. */
void tl_peer_calls_go_on(struct tl_peer *peer);

/* added_peer.c */
/* A link to an added peer is up. Returns false, and the link ends, when another process has answered than is meant. */
bool tl_added_peer_knows(struct tl_peer *peer, const struct tl_identity *who, struct tl_error *ret_error);
/* Frees all peers that were added. */
void tl_added_peers_destroy(struct tl_worker *worker);

/* peer_link.c */
/* Errors: TL_RESOURCE_EXHAUSTED: no memory for the timer of the back-off. */
enum tl_status tl_peer_link_init(struct tl_peer *peer) TL_MUST_USE;
/* The peer has no link. */
void tl_peer_link_fini(struct tl_peer *peer);
/* Ends the links to a peer that is not wanted any more. */
void tl_peer_unlink(struct tl_peer *peer);
/* Connects to a peer that is wanted, unless a back-off is under way. */
void tl_peer_want(struct tl_peer *peer);
/* Tells on the link in use which tensors have arrived, and which are not wanted any more. */
void tl_peer_acknowledge(struct tl_peer *peer);
/* Remembers the numbers of tensors that have arrived, for the next link to report. */
void tl_peer_remember_received(struct tl_peer *peer, const uint64_t *numbers, size_t count);

/* peer_wait.c */
void tl_peer_check_waits(struct tl_worker *worker);

#endif
