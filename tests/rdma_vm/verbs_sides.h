// SPDX-License-Identifier: Apache-2.0
/*
 * Two queue pairs, a and b, of two opened devices in one process, for the tests of the verbs provider. They run inside
 * the guest, with rxe0 alone (packets go through the loop of rdma_rxe) or with rxe0 and rxe1 at both ends of a veth
 * pair.
 *
 * Everything here fails the running test when it does not work.
 */
#ifndef TESTS_RDMA_VM_VERBS_SIDES_H
#define TESTS_RDMA_VM_VERBS_SIDES_H

#include "dataplane/verbs/verbs.h"
#include "fakes/sides.h"

/* make_memory fills these: a writes from its memory, b is written to. */
extern uint8_t *source, *target;
extern struct tl_region *source_region, *target_region;

bool has_veth(void);
const char *address_a(void);
const char *address_b(void);
struct tl_verbs_options options_for(const char *address);
struct tl_provider *open_at(const char *address, enum tl_keys keys);
void open_both(enum tl_keys keys);
void set_up(uint32_t slots, uint32_t work, enum tl_keys keys);
void destroy_both(void);
void close_both(void);
void tear_down(void);
uint8_t *map_memory(uint64_t len_bytes);
struct tl_region *make_region(struct side *side, void *memory, uint64_t len_bytes, enum tl_region_access access);
void send_text(struct side *side, const char *text, struct job *job);
/* Waits until the peer can write to an exposure, which is so once a message posted after it has arrived. */
void let_expose_happen(struct side *side);
void make_memory(uint64_t len_bytes);
void drop_memory(void); /* close_both does so, too. */
/* Writes from a's source into what b has exposed; the caller rings the doorbell. */
void write_to(const struct tl_exposure *exposure, uint64_t from, uint64_t len_bytes, uint64_t to, bool tells,
              struct job *job);

#endif
