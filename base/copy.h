// SPDX-License-Identifier: Apache-2.0
/* Copying bytes with regard to the processors' caches. */
#ifndef BASE_COPY_H
#define BASE_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Copies like memcpy, and is as fast where the destination lies closely behind the source (tl_copy_is_close). */
void tl_copy(void *to, const void *from, size_t len_bytes);
/* From so many bytes on memcpy, and the kernel when it copies for a system call, may use "rep movsb". */
#define TL_COPY_CLOSE_BYTES 2048
/* Returns whether `to` lies 1 to 63 bytes after `from`, when both are taken modulo 4,096. Processors compare only these
 * bits of the addresses to find out whether a load must wait for a store before it, so that "rep movsb" can take ten
 * times as long there: on AMD's Zen 3 it was seen for 1 to 31 bytes, and the C library avoids it on some processors of
 * Intel for 1 to 63. It is no rare case: malloc places large memory 16 bytes behind the start of a page, and memory
 * that processes share starts with a page. */
bool tl_copy_is_close(uintptr_t to, uintptr_t from);

/* Copies like memcpy, but past the processor's caches where it can: the destination is not read into the caches first,
 * and does not displace their contents, such as the pieces that are copied next. It is faster for a piece of something
 * larger than the caches, and slower for anything else. A thread that is notified after the copy sees the bytes. */
void tl_copy_uncached(void *to, const void *from, size_t len_bytes);

/* Copies like memcpy out of memory that another processor writes and this one reads, again and again. Afterwards the
 * content of `from` is undefined: something is written to each cache line that lies wholly within it, so that only this
 * processor has the line. To write to a line that several processors have takes the other processor four to six times
 * as long, because it must wait until each has given the line up. */
void tl_copy_out(void *to, void *from, size_t len_bytes);
/* Copies as tl_copy_out does, but past the caches, as tl_copy_uncached does. */
void tl_copy_out_uncached(void *to, void *from, size_t len_bytes);
/* Copies one of many runs past the caches. A thread that is notified after tl_take_lines sees the bytes. */
void tl_copy_run_uncached(void *to, const void *from, size_t len_bytes);
/* Comes after the last copy out of this memory: writes to its cache lines as tl_copy_out does. */
void tl_take_lines(void *from, size_t len_bytes);

#endif
