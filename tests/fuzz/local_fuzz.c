// SPDX-License-Identifier: Apache-2.0
/*
 * A peer over the local transport that writes what it likes: addresses, packets on the socket, and a ring and words
 * that change at any time. The provider reads it and goes on: nothing but that connection ends, nothing is written
 * outside of what was exposed, and nothing is left.
 *
 * All inputs come to one provider, as all peers of a worker do.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/memory/pages.h"
#include "fakes/local_hostile.h"

int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until);

/* The thread that copies memory would end, and be started anew, when the machine has stood still for long. The linker
 * passes the call here. */
int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until)
{
    (void)until;
    return pthread_cond_wait(cond, mutex);
}

static void try_address(const uint8_t *data, size_t len_bytes)
{
    struct tl_pair_address bytes = {.len_bytes = (uint32_t)len_bytes}, again;
    struct local_address pair_address;
    memcpy(bytes.bytes, data, len_bytes);
    if (!local_address_read(&bytes, &pair_address)) return;
    local_address_write(&pair_address, &again);
    TL_CHECK(again.len_bytes == bytes.len_bytes && memcmp(again.bytes, bytes.bytes, again.len_bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    if (len_bytes <= TL_PAIR_ADDRESS_MAX_BYTES) try_address(data, len_bytes);
    static struct tl_provider *provider;
    struct tl_error error;
    if (provider == NULL) TL_CHECK(tl_local_open(&(struct tl_local_options){0}, &provider, &error) == TL_OK);
    struct hostile_input input = {.data = data, .left_bytes = len_bytes};
    struct hostile hostile;
    hostile_open_on(&hostile, provider);
    while (input.left_bytes > 0)
        hostile_step(&hostile, &input);
    hostile_close(&hostile);
    TL_CHECK(local_provider_of(provider)->pair_count == 0 && tl_list_is_empty(&local_provider_of(provider)->gone));
    return 0;
}
