// SPDX-License-Identifier: Apache-2.0
/*
 * Random numbers that are the same ones for each input. They decide which keys of a hash table share a chain, and how
 * long pauses are, and so what an input reaches: with others each time, the same input would reach something else when
 * it is read again. Names of sockets, and threads that have not begun an input, get random numbers as ever. The linker
 * passes the calls here (--wrap=tl_random_u64,--wrap=tl_unix_address_choose).
 */
#ifndef FUZZ_FIXED_RANDOM_H
#define FUZZ_FIXED_RANDOM_H

/* The calling thread gets the first number again, and the others in their order. */
void fixed_random_begin(void);

#endif
