// SPDX-License-Identifier: Apache-2.0
#include "base/struct_version.h"

#include <string.h>

#include <tensorlane/version.h>

#include "base/error.h"

static size_t size_of(const void *theirs)
{
    size_t size_bytes;
    memcpy(&size_bytes, theirs, sizeof(size_bytes));
    return size_bytes;
}

static enum tl_status check_size(size_t size_bytes, size_t first_bytes, const char *field, const char *name,
                                 struct tl_error *ret_error)
{
    if (size_bytes >= first_bytes && size_bytes <= TL_STRUCT_MAX_BYTES) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s of struct %s is %zu; set it to sizeof(struct %s)", field,
                        name, size_bytes, name);
}

enum tl_status tl_struct_check_size(const void *theirs, size_t first_bytes, const char *name,
                                    struct tl_error *ret_error)
{
    return check_size(size_of(theirs), first_bytes, "size_bytes", name, ret_error);
}

enum tl_status tl_struct_check_item_bytes(size_t theirs_bytes, size_t first_bytes, const char *name,
                                          struct tl_error *ret_error)
{
    return check_size(theirs_bytes, first_bytes, "item_bytes", name, ret_error);
}

/* Copies a struct whose size has been checked. */
static enum tl_status read_fields(void *ret_ours, size_t ours_bytes, const void *theirs, size_t theirs_bytes,
                                  const char *name, struct tl_error *ret_error)
{
    const unsigned char *bytes = theirs;
    for (size_t i = ours_bytes; i < theirs_bytes; i++)
        if (bytes[i] != 0)
            return tl_error_set(ret_error, TL_UNIMPLEMENTED,
                                "byte %zu of struct %s is set, and version %s of the library knows %zu bytes of it; "
                                "use a newer library or leave the new fields zero",
                                i, name, tl_version(), ours_bytes);
    size_t common_bytes = theirs_bytes < ours_bytes ? theirs_bytes : ours_bytes;
    memcpy(ret_ours, theirs, common_bytes);
    memset((unsigned char *)ret_ours + common_bytes, 0, ours_bytes - common_bytes);
    return TL_OK;
}

enum tl_status tl_struct_read(void *ret_ours, size_t ours_bytes, size_t first_bytes, const void *theirs,
                              const char *name, struct tl_error *ret_error)
{
    enum tl_status status = tl_struct_check_size(theirs, first_bytes, name, ret_error);
    return status != TL_OK ? status : read_fields(ret_ours, ours_bytes, theirs, size_of(theirs), name, ret_error);
}

enum tl_status tl_struct_read_sized(void *ret_ours, size_t ours_bytes, size_t first_bytes, const void *theirs,
                                    size_t theirs_bytes, const char *name, struct tl_error *ret_error)
{
    enum tl_status status = tl_struct_check_item_bytes(theirs_bytes, first_bytes, name, ret_error);
    return status != TL_OK ? status : read_fields(ret_ours, ours_bytes, theirs, theirs_bytes, name, ret_error);
}

void tl_struct_fill(void *ret_theirs, const void *ours, size_t ours_bytes)
{
    const size_t head_bytes = sizeof(size_t);
    size_t size_bytes = size_of(ret_theirs);
    size_t common_bytes = size_bytes < ours_bytes ? size_bytes : ours_bytes;
    unsigned char *bytes = ret_theirs;
    memcpy(bytes + head_bytes, (const unsigned char *)ours + head_bytes, common_bytes - head_bytes);
    memset(bytes + common_bytes, 0, size_bytes - common_bytes);
}
