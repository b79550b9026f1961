// SPDX-License-Identifier: Apache-2.0
/*
 * Readers of memory of other processes (process_vm_readv). Such a call can wait for pages that the other process keeps
 * back (userfaultfd) or that lie in a file, so that a thread makes it. The thread of a reader starts with the first
 * reading, and ends when there was none for a second.
 *
 * Thread: one thread calls the functions of a reader.
 */
#ifndef DATAPLANE_MEMORY_MEMORY_READER_H
#define DATAPLANE_MEMORY_MEMORY_READER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <tensorlane/status.h>

struct tl_memory_reader;

/* Bytes of another process's memory. */
struct tl_memory_reading {
    pid_t process;
    uint64_t source;
    uint8_t *destination; /* not written any more once tl_memory_reader_take_back has returned */
    uint64_t len_bytes;
    bool is_buffered; /* the bytes go through a buffer, so that the destination can be taken back at any time */
};

/* Creates a reader. done_fd is an eventfd that is written when a reading has ended; it must stay open until
 * tl_memory_reader_destroy. Returns NULL when there is no memory. */
struct tl_memory_reader *tl_memory_reader_create(int done_fd);
/* Starts a reading; there is only one at a time. Errors: TL_RESOURCE_EXHAUSTED: no thread. */
enum tl_status tl_memory_reader_read(struct tl_memory_reader *reader, const struct tl_memory_reading *reading,
                                     struct tl_error *ret_error) TL_MUST_USE;
/* Returns whether a reading was started whose end tl_memory_reader_is_done has not returned yet. NULL is accepted. */
bool tl_memory_reader_is_busy(const struct tl_memory_reader *reader);
/* Returns whether the reading has ended; it returns true once. ret_error is an errno, or 0 when all bytes were read. */
bool tl_memory_reader_is_done(struct tl_memory_reader *reader, int *ret_error);
/* Takes the destination of the reading back: its owner may use it again. Blocks while a call writes there directly. */
void tl_memory_reader_take_back(struct tl_memory_reader *reader);
/* Does the same without blocking: stops the reading, and returns false while a call still writes to the destination. In
 * that case the eventfd is written when the call has returned. */
bool tl_memory_reader_try_to_take_back(struct tl_memory_reader *reader);
/* Destroys the reader. If it has a thread, that thread frees it as soon as its last call returns. The destination of a
 * reading must have been taken back before. NULL is accepted. */
void tl_memory_reader_destroy(struct tl_memory_reader *reader);

#endif
