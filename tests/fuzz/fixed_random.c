// SPDX-License-Identifier: Apache-2.0
#include "fuzz/fixed_random.h"

#include <stdbool.h>
#include <stdint.h>

#include "base/random.h"
#include "base/unix_socket.h"

static _Thread_local bool has_begun;
static _Thread_local uint64_t state;

/* The linker's names. */
uint64_t __real_tl_random_u64(void);
uint64_t __wrap_tl_random_u64(void);
void __real_tl_unix_address_choose(struct tl_unix_address *address, const char *prefix);
void __wrap_tl_unix_address_choose(struct tl_unix_address *address, const char *prefix);

void fixed_random_begin(void)
{
    has_begun = true;
    state = 0;
}

/* splitmix64. None of its first numbers is 0, which tl_random_u64 never returns. */
uint64_t __wrap_tl_random_u64(void)
{
    if (!has_begun) return __real_tl_random_u64();
    uint64_t number = state += 0x9e3779b97f4a7c15;
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
    number = (number ^ number >> 27) * 0x94d049bb133111eb;
    return number ^ number >> 31;
}

/* The socket of an earlier input may still have that name. */
void __wrap_tl_unix_address_choose(struct tl_unix_address *address, const char *prefix)
{
    bool had_begun = has_begun;
    has_begun = false;
    __real_tl_unix_address_choose(address, prefix);
    has_begun = had_begun;
}
