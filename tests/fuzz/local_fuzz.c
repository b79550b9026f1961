// SPDX-License-Identifier: Apache-2.0
/*
 * A peer over the local transport that writes what it likes: introductions, packets on the socket, and a ring and words
 * that change at any time. The provider reads it and goes on: nothing but that connection ends, nothing is written
 * outside of what was exposed, and nothing is left.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/local_internal.h"
#include "dataplane/pages.h"
#include "fakes/local_hostile.h"

static void try_introduction(const uint8_t *data, size_t len_bytes)
{
    struct tl_introduction bytes = {.len_bytes = (uint32_t)len_bytes}, again;
    struct local_introduction introduction;
    memcpy(bytes.bytes, data, len_bytes);
    if (!local_introduction_read(&bytes, &introduction)) return;
    local_introduction_write(&introduction, &again);
    TL_CHECK(again.len_bytes == bytes.len_bytes && memcmp(again.bytes, bytes.bytes, again.len_bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    if (len_bytes <= TL_INTRODUCTION_MAX_BYTES) try_introduction(data, len_bytes);
    struct hostile_input input = {.data = data, .left_bytes = len_bytes};
    struct hostile hostile;
    hostile_open(&hostile);
    while (input.left_bytes > 0)
        hostile_step(&hostile, &input);
    hostile_close(&hostile);
    return 0;
}
