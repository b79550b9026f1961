// SPDX-License-Identifier: Apache-2.0
/*
 * Structs of the public API that may grow.
 *
 * The first field of such a struct is size_bytes, which the caller sets to the sizeof of the header it was compiled
 * with. A program and the library may therefore know different versions of the struct:
 *
 *     first_bytes   the size in the first version that has this SOVERSION: a smaller struct is a mistake
 *     ours_bytes    the size that this library knows
 *     size_bytes    the size that the program knows: smaller than, equal to or larger than ours_bytes
 *
 * A new field starts at or after the former sizeof, never in the padding at the end, because a program that was
 * compiled before the field existed leaves undefined bytes in the padding.
 */
#ifndef BASE_STRUCT_VERSION_H
#define BASE_STRUCT_VERSION_H

#include <stddef.h>

#include <tensorlane/status.h>

/* First versions, for this SOVERSION. They never change. */
#define TL_WORKER_OPTIONS_FIRST_BYTES 48
#define TL_RECV_OPTIONS_FIRST_BYTES 24
#define TL_TENSOR_VIEW_FIRST_BYTES 88
#define TL_PEER_INFO_FIRST_BYTES 1728
#define TL_WORKER_STATS_FIRST_BYTES 136
#define TL_LOG_OPTIONS_FIRST_BYTES 32
#define TL_RECV_ITEM_FIRST_BYTES 40
#define TL_RECV_MANY_OPTIONS_FIRST_BYTES 48
#define TL_SEND_ITEM_FIRST_BYTES 32
#define TL_SEND_MANY_OPTIONS_FIRST_BYTES 24
#define TL_PUT_OPTIONS_FIRST_BYTES 16
#define TL_PART_FIRST_BYTES 56
#define TL_LISTING_ENTRY_FIRST_BYTES 72
#define TL_COMPLETION_BYTES 1184 /* never grows: new fields take the place of reserved bytes */

/* A larger size_bytes was not set by a caller. */
#define TL_STRUCT_MAX_BYTES 65536

/* Copies what the caller gives into a struct of our version: *theirs may be smaller or larger. What it lacks is zero.
 * name is the name of the struct's type, for messages.
 * Errors: TL_INVALID_ARGUMENT: size_bytes is below first_bytes or above TL_STRUCT_MAX_BYTES. TL_UNIMPLEMENTED: a byte
 * that this version does not know is not zero. */
enum tl_status tl_struct_read(void *ret_ours, size_t ours_bytes, size_t first_bytes, const void *theirs,
                              const char *name, struct tl_error *ret_error) TL_MUST_USE;

/* The same for an element of an array, which does not say its size itself: theirs_bytes is what the caller gives. */
enum tl_status tl_struct_read_sized(void *ret_ours, size_t ours_bytes, size_t first_bytes, const void *theirs,
                                    size_t theirs_bytes, const char *name, struct tl_error *ret_error) TL_MUST_USE;

/* Checks theirs_bytes alone, for an array that may be empty. Errors: TL_INVALID_ARGUMENT, as above. */
enum tl_status tl_struct_check_item_bytes(size_t theirs_bytes, size_t first_bytes, const char *name,
                                          struct tl_error *ret_error) TL_MUST_USE;

/* Checks size_bytes of a struct that is to be filled. Errors: TL_INVALID_ARGUMENT, as above. */
enum tl_status tl_struct_check_size(const void *theirs, size_t first_bytes, const char *name,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Fills a struct of the caller, which has passed tl_struct_check_size: with our fields as far as it reaches, then with
 * zeros. size_bytes stays what the caller has set. */
void tl_struct_fill(void *ret_theirs, const void *ours, size_t ours_bytes);

#endif
