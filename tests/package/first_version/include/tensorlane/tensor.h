// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORLANE_TENSOR_H
#define TENSORLANE_TENSOR_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <tensorlane/status.h>
#ifdef __cplusplus
extern "C" {
#endif
enum tl_dtype {
    TL_DTYPE_INVALID = 0,
    TL_BOOL = 1,
    TL_U8 = 2,
    TL_I8 = 3,
    TL_U16 = 4,
    TL_I16 = 5,
    TL_U32 = 6,
    TL_I32 = 7,
    TL_U64 = 8,
    TL_I64 = 9,
    TL_F16 = 10,
    TL_BF16 = 11,
    TL_F32 = 12,
    TL_F64 = 13,
    TL_C64 = 14,
    TL_C128 = 15,
    TL_F8_E4M3 = 16,
    TL_F8_E5M2 = 17,
    TL_F8_E4M3FNUZ = 18,
    TL_F8_E5M2FNUZ = 19,
    TL_F8_E8M0 = 20,
    TL_I4 = 21,
    TL_U4 = 22,
    TL_F4 = 23,
    TL_F6_E2M3 = 24,
    TL_F6_E3M2 = 25,
    TL_STRING = 26,
    TL_DTYPE_COUNT = 27,
};
#define TL_MAX_RANK 16
TL_API const char *tl_dtype_name(enum tl_dtype dtype);
TL_API unsigned tl_dtype_bits(enum tl_dtype dtype);
enum tl_device_kind {
    TL_DEVICE_HOST = 0,
    TL_DEVICE_CUDA = 1,
};
struct tl_device {
    enum tl_device_kind kind;
    int32_t index;
};
struct tl_tensor;
typedef void (*tl_release_fn)(void *data, void *context);
TL_API enum tl_status tl_tensor_create(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_tensor_create_shared(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                              struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;
struct tl_tensor_view {
    size_t size_bytes;
    enum tl_dtype dtype;
    unsigned rank;
    const uint64_t *dims;
    const int64_t *strides;
    struct tl_device device;
    void *data;
    uint64_t offset_bytes;
    uint64_t capacity_bytes;
    bool read_only;
    tl_release_fn release;
    void *release_context;
};
TL_API enum tl_status tl_tensor_wrap(const struct tl_tensor_view *view, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error) TL_MUST_USE;
struct tl_string {
    const void *data;
    uint64_t len_bytes;
};
TL_API enum tl_status tl_tensor_create_strings(unsigned rank, const uint64_t *dims, const struct tl_string *strings,
                                               struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_tensor_create_dead(struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;
TL_API struct tl_tensor *tl_tensor_get(struct tl_tensor *tensor);
TL_API void tl_tensor_put(struct tl_tensor *tensor);
TL_API enum tl_dtype tl_tensor_dtype(const struct tl_tensor *tensor);
TL_API unsigned tl_tensor_rank(const struct tl_tensor *tensor);
TL_API const uint64_t *tl_tensor_dims(const struct tl_tensor *tensor);
TL_API uint64_t tl_tensor_element_count(const struct tl_tensor *tensor);
TL_API uint64_t tl_tensor_size_bytes(const struct tl_tensor *tensor);
TL_API void *tl_tensor_data(const struct tl_tensor *tensor);
TL_API bool tl_tensor_is_dead(const struct tl_tensor *tensor);
TL_API bool tl_tensor_is_read_only(const struct tl_tensor *tensor);
TL_API enum tl_status tl_tensor_check(const struct tl_tensor *tensor, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_guard_mapped_files(struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_tensor_string(const struct tl_tensor *tensor, uint64_t index, struct tl_string *ret_string,
                                       struct tl_error *ret_error) TL_MUST_USE;
#ifdef __cplusplus
}
#endif
#endif
