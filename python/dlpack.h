// SPDX-License-Identifier: Apache-2.0
/*
 * The structs of DLPack, through which packages exchange tensors without copying them.
 *
 * Source: DLPack 1.1, dlpack.h (https://dmlc.github.io/dlpack/latest/c_api.html) and the protocol of Python
 * (https://data-apis.org/array-api/latest/design_topics/data_interchange.html). The names here are this project's.
 */
#ifndef PYTHON_DLPACK_H
#define PYTHON_DLPACK_H

#include <stdint.h>

#define DLPACK_MAJOR 1
#define DLPACK_MINOR 1

/* The names of capsules, before and after a consumer has taken what is in them. */
#define DLPACK_CAPSULE "dltensor"
#define DLPACK_CAPSULE_USED "used_dltensor"
#define DLPACK_CAPSULE_VERSIONED "dltensor_versioned"
#define DLPACK_CAPSULE_VERSIONED_USED "used_dltensor_versioned"

enum dlpack_device_kind {
    DLPACK_CPU = 1,
    DLPACK_CUDA = 2,
    DLPACK_CUDA_HOST = 3, /* memory of the host that is pinned for GPUs */
};

enum dlpack_code {
    DLPACK_INT = 0,
    DLPACK_UINT = 1,
    DLPACK_FLOAT = 2,
    DLPACK_BFLOAT = 4,
    DLPACK_COMPLEX = 5,
    DLPACK_BOOL = 6,
    DLPACK_F8_E4M3FN = 10,
    DLPACK_F8_E4M3FNUZ = 11,
    DLPACK_F8_E5M2 = 12,
    DLPACK_F8_E5M2FNUZ = 13,
    DLPACK_F8_E8M0FNU = 14,
    DLPACK_F6_E2M3FN = 15,
    DLPACK_F6_E3M2FN = 16,
    DLPACK_F4_E2M1FN = 17,
};

enum dlpack_flag {
    DLPACK_READ_ONLY = 1,
    DLPACK_IS_COPIED = 2,
    DLPACK_IS_PADDED = 4, /* each element smaller than a byte has a byte of its own */
};

struct dlpack_device {
    int32_t kind; /* enum dlpack_device_kind, or another one */
    int32_t index;
};

struct dlpack_dtype {
    uint8_t code; /* enum dlpack_code, or another one */
    uint8_t bits;
    uint16_t lanes; /* 1 for everything but vectors */
};

struct dlpack_tensor {
    void *data;
    struct dlpack_device device;
    int32_t rank;
    struct dlpack_dtype dtype;
    int64_t *dims;    /* [rank] */
    int64_t *strides; /* [rank] in elements; NULL: row-major without gaps */
    uint64_t offset_bytes;
};

/* What is in a capsule without a version. */
struct dlpack_managed {
    struct dlpack_tensor tensor;
    void *context; /* the producer's */
    void (*deleter)(struct dlpack_managed *self);
};

/* What is in a capsule with a version. */
struct dlpack_versioned {
    uint32_t major;
    uint32_t minor;
    void *context; /* the producer's */
    void (*deleter)(struct dlpack_versioned *self);
    uint64_t flags; /* enum dlpack_flag */
    struct dlpack_tensor tensor;
};

#endif
