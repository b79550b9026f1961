// SPDX-License-Identifier: Apache-2.0
/*
 * Parts of tensors: boxes and ranges of bytes, and their names.
 *
 * A part is a tensor: its owner makes it out of the value, and the transports see a tensor of that shape. A request
 * asks for it by a name, which has the part in front of the key:
 *
 *     tensorlane.part/bSTART+SIZE,START+SIZE/KEY      a box, one pair for each dimension
 *     tensorlane.part/rOFFSET+LENGTH,.../KEY          ranges of bytes, in any order
 *
 * The numbers are hexadecimal. A part that lies in one piece shows the memory of the value, and so does a large box for
 * a transport that takes tensors without an address (tl_tensor_is_in_runs). Any other is copied together.
 */
#ifndef TENSOR_PART_H
#define TENSOR_PART_H

#include <string.h>

#include <tensorlane/worker.h>

#include "tensor/tensor.h"

#define TL_PART_PREFIX "tensorlane.part/"

/* Whether a name asks for a part. */
static inline bool tl_part_is_name(const char *name)
{
    return name[0] == TL_PART_PREFIX[0] && strncmp(name, TL_PART_PREFIX, sizeof(TL_PART_PREFIX) - 1) == 0;
}

/* Writes the name of a part. Errors: TL_INVALID_ARGUMENT: the part is none, or its name has more than TL_MAX_KEY_BYTES
 * bytes. */
enum tl_status tl_part_name(const struct tl_part *part, const char *key, char ret_name[TL_MAX_KEY_BYTES + 1],
                            struct tl_error *ret_error) TL_MUST_USE;

/* Returns the key in the name of a part; NULL: it is no such name. */
const char *tl_part_key(const char *name);

/* What a part may cost. */
struct tl_part_costs {
    bool copies;     /* it is never a view of the value */
    bool takes_runs; /* it may be a tensor without an address */
    /* Called before memory for a copy is taken; errors refuse the part. NULL: it may be copied. */
    enum tl_status (*charge)(void *context, uint64_t bytes, struct tl_error *ret_error);
    void *context;
};

/* Puts the part that the name says in the place of a value; a dead value stays.
 * Errors, after which the value stays: TL_OUT_OF_RANGE: the part reaches beyond the value, or its rank is another one.
 * TL_FAILED_PRECONDITION: strings, or a box that begins or ends within a byte. TL_UNIMPLEMENTED: it is not in one
 * piece, and lies on a device. TL_DATA_LOSS: as tl_tensor_check. TL_RESOURCE_EXHAUSTED: no memory. Those of
 * costs->charge.
 */
enum tl_status tl_part_take(const char *name, const struct tl_part_costs *costs, struct tl_tensor **value,
                            struct tl_error *ret_error) TL_MUST_USE;

#endif
