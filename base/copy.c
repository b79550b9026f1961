// SPDX-License-Identifier: Apache-2.0
#include "base/copy.h"

#include <stddef.h>
#include <string.h>

#define LINE_BYTES 64
/* How many bytes are copied before their lines, which are in the first cache then, are written to. */
#define BLOCK_BYTES 4096
#define ALIAS_BYTES 4096

bool tl_copy_is_close(uintptr_t to, uintptr_t from)
{
    uintptr_t distance = (to - from) % ALIAS_BYTES;
    return distance > 0 && distance < LINE_BYTES;
}

#ifdef __SSE2__
#include <emmintrin.h>

/* Copies whole cache lines; `to` is aligned to one. Where the destination lies closely behind the source, the last line
 * is the first one to be copied: then no line is read that could be taken for the one that was written just before. */
static inline __attribute__((always_inline)) void copy_lines(char *to, const char *from, size_t line_count,
                                                             bool is_uncached)
{
    bool is_descending = tl_copy_is_close((uintptr_t)to, (uintptr_t)from);
    for (size_t i = 0; i < line_count; i++) {
        size_t offset_bytes = (is_descending ? line_count - 1 - i : i) * LINE_BYTES;
        const __m128i *source = (const __m128i *)(const void *)(from + offset_bytes);
        __m128i *target = (__m128i *)(void *)(to + offset_bytes);
        __m128i a = _mm_loadu_si128(source);
        __m128i b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2);
        __m128i d = _mm_loadu_si128(source + 3);
        if (is_uncached) {
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        } else {
            _mm_store_si128(target, a);
            _mm_store_si128(target + 1, b);
            _mm_store_si128(target + 2, c);
            _mm_store_si128(target + 3, d);
        }
    }
}

/* Streaming stores are not ordered before the stores that announce them. */
static void end_streaming(void)
{
    _mm_sfence();
}

static inline __attribute__((always_inline)) void copy_by_lines(char *to, const char *from, size_t len_bytes,
                                                                bool is_uncached)
{
    size_t head_bytes = -(uintptr_t)to % LINE_BYTES;
    if (len_bytes < head_bytes + LINE_BYTES) {
        if (len_bytes > 0) memcpy(to, from, len_bytes);
        return;
    }
    size_t line_count = (len_bytes - head_bytes) / LINE_BYTES;
    size_t copied_bytes = head_bytes + line_count * LINE_BYTES;
    memcpy(to, from, head_bytes);
    copy_lines(to + head_bytes, from + head_bytes, line_count, is_uncached);
    memcpy(to + copied_bytes, from + copied_bytes, len_bytes - copied_bytes);
}

static void copy_close(void *to, const void *from, size_t len_bytes)
{
    copy_by_lines(to, from, len_bytes, false);
}

static void stream(void *to, const void *from, size_t len_bytes)
{
    copy_by_lines(to, from, len_bytes, true);
}

#else

static void end_streaming(void)
{
}

static void copy_close(void *to, const void *from, size_t len_bytes)
{
    memcpy(to, from, len_bytes);
}

static void stream(void *to, const void *from, size_t len_bytes)
{
    if (len_bytes > 0) memcpy(to, from, len_bytes);
}

#endif

void tl_copy(void *to, const void *from, size_t len_bytes)
{
    if (len_bytes >= TL_COPY_CLOSE_BYTES && tl_copy_is_close((uintptr_t)to, (uintptr_t)from)) {
        copy_close(to, from, len_bytes);
    } else if (len_bytes > 0) {
        memcpy(to, from, len_bytes);
    }
}

void tl_copy_uncached(void *to, const void *from, size_t len_bytes)
{
    stream(to, from, len_bytes);
    end_streaming();
}

static void write_to_lines(char *start, size_t len_bytes)
{
    char *end = start + len_bytes;
    for (char *line = start + -(uintptr_t)start % LINE_BYTES; end - line >= LINE_BYTES; line += LINE_BYTES)
        *(volatile char *)line = 0;
}

static inline __attribute__((always_inline)) void copy_out(char *to, char *from, size_t len_bytes, bool is_uncached)
{
    while (len_bytes > 0) {
        size_t block_bytes = len_bytes < BLOCK_BYTES ? len_bytes : BLOCK_BYTES;
        if (is_uncached) {
            stream(to, from, block_bytes);
        } else {
            tl_copy(to, from, block_bytes);
        }
        write_to_lines(from, block_bytes);
        to += block_bytes;
        from += block_bytes;
        len_bytes -= block_bytes;
    }
}

void tl_copy_out(void *to, void *from, size_t len_bytes)
{
    copy_out(to, from, len_bytes, false);
}

void tl_copy_out_uncached(void *to, void *from, size_t len_bytes)
{
    copy_out(to, from, len_bytes, true);
    end_streaming();
}

void tl_copy_run_uncached(void *to, const void *from, size_t len_bytes)
{
    stream(to, from, len_bytes);
}

void tl_take_lines(void *from, size_t len_bytes)
{
    end_streaming();
    write_to_lines(from, len_bytes);
}
