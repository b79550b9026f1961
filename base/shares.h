// SPDX-License-Identifier: Apache-2.0
/*
 * Shares: one limit of a worker, divided among its clients, so that one client cannot use it up for all others.
 *
 * A client that holds h and asks for n more of a limit L, of which t is in use, while c other clients hold something,
 * gets it when
 *
 *     h + n <= 3/4 L   and   (t + n <= L   or   h + n <= L / (c + 1))
 *
 * So a client alone reaches three quarters of the limit, and a client that stays within limit / (clients + 1) is never
 * refused, whatever the others hold. The price is that the sum may exceed the limit: a client that came when the limit
 * was used up got its share nevertheless. Clients that come one after the other and each take all they can reach
 * 3/4 L + L/2 + L/3 + ... + L/n: less than twice the limit for 4 clients, 2.7 times for 10, 4.9 times for 100.
 *
 * Fractions are rounded in favour of the client for the three quarters, against it for the share.
 *
 * Thread: any, for all functions.
 */
#ifndef BASE_SHARES_H
#define BASE_SHARES_H

#include <stdint.h>

#include <tensorlane/status.h>

struct tl_shares;
struct tl_share; /* what one client holds */

/* A client is a link, or the IP address of a caller that has no link. Clients are compared as bytes. All callers with
 * an address of another kind, as with Unix sockets, are one client, in which every byte is zero. */
struct tl_share_client {
    uint64_t link;       /* number of the link within this worker; 0: none */
    uint8_t address[16]; /* IPv6, or IPv4 mapped to it; zero with a link */
};

/* Returns the client of a caller without a link, from its address as gRPC writes it: "ipv4:10.0.0.1:4000",
 * "ipv6:[::1]:4000" or "ipv6:%5B::1%5D:4000". The port does not matter. */
struct tl_share_client tl_share_client_of(const char *address);

/* Creates shares of a limit. setting is its name in the configuration, static: "limits.waiting". Returns NULL when
 * there is no memory. Ownership: until tl_shares_destroy. */
struct tl_shares *tl_shares_create(const char *setting, uint64_t limit);

/* Ends the shares: no more may be taken. What is still held may be given back later, on any thread; the memory is freed
 * with the last of it. NULL is accepted. */
void tl_shares_destroy(struct tl_shares *shares);

/* Charges a client with amount, which is at least 1. *ret_share is needed to give it back; it is the same for all that
 * one client holds at a time.
 * Errors: TL_RESOURCE_EXHAUSTED: the rule above, naming the limit, what is in use and the remedy; no memory. */
enum tl_status tl_shares_take(struct tl_shares *shares, const struct tl_share_client *client, uint64_t amount,
                              struct tl_share **ret_share, struct tl_error *ret_error) TL_MUST_USE;

/* Gives back amount, or a part of it. The share is invalid once everything that was taken was given back. */
void tl_shares_give(struct tl_share *share, uint64_t amount);

/* Returns what all clients hold. */
uint64_t tl_shares_used(struct tl_shares *shares);

#endif
