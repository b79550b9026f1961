// SPDX-License-Identifier: Apache-2.0
/*
 * make_vgg16 [--divide N] PATH [SEED]: writes a checkpoint with the tensors of VGG16, filled with random numbers.
 *
 * Names, shapes and order are those of torchvision's vgg16().state_dict(): 32 float32 tensors, 138,357,544 parameters,
 * 553 MB. With --divide every dimension but those of the 3 x 3 kernels and the 3 colours is divided by N (2, 4 or 8):
 * the same names and ranks in a smaller file. The same seed gives the same file. The file is safetensors: a
 * little-endian 64-bit length, a JSON header of that length, the bytes of all tensors without gaps.
 *
 * The disk space is taken first, so that a full disk is an error and not a signal; the numbers are then written
 * straight into the mapped file, which gets its name when it is complete.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define HEADER_CAPACITY 8192

/* A layer has a weight of this shape and a bias of its first dimension. */
struct layer {
    const char *name;
    unsigned rank;
    uint64_t dims[4];
};

static const struct layer layers[] = {
    {"features.0", 4, {64, 3, 3, 3}},     {"features.2", 4, {64, 64, 3, 3}},    {"features.5", 4, {128, 64, 3, 3}},
    {"features.7", 4, {128, 128, 3, 3}},  {"features.10", 4, {256, 128, 3, 3}}, {"features.12", 4, {256, 256, 3, 3}},
    {"features.14", 4, {256, 256, 3, 3}}, {"features.17", 4, {512, 256, 3, 3}}, {"features.19", 4, {512, 512, 3, 3}},
    {"features.21", 4, {512, 512, 3, 3}}, {"features.24", 4, {512, 512, 3, 3}}, {"features.26", 4, {512, 512, 3, 3}},
    {"features.28", 4, {512, 512, 3, 3}}, {"classifier.0", 2, {4096, 25088}},   {"classifier.3", 2, {4096, 4096}},
    {"classifier.6", 2, {1000, 4096}},
};

/* All larger dimensions, which are multiples of 8, are divided by this. */
static uint64_t divisor = 1;

static uint64_t scaled(uint64_t dim)
{
    return dim > 3 ? dim / divisor : dim;
}

/* Appends one tensor to the header; *offset is where its bytes begin and end. */
static int put_tensor(char *header, int len, const char *layer, const char *kind, unsigned rank, const uint64_t *dims,
                      uint64_t *offset)
{
    uint64_t bytes = sizeof(float);
    len += snprintf(header + len, (size_t)(HEADER_CAPACITY - len), "%c\"%s.%s\":{\"dtype\":\"F32\",\"shape\":[",
                    len == 0 ? '{' : ',', layer, kind);
    for (unsigned i = 0; i < rank; i++) {
        len += snprintf(header + len, (size_t)(HEADER_CAPACITY - len), "%s%" PRIu64, i > 0 ? "," : "", scaled(dims[i]));
        bytes *= scaled(dims[i]);
    }
    len += snprintf(header + len, (size_t)(HEADER_CAPACITY - len), "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                    *offset, *offset + bytes);
    *offset += bytes;
    return len;
}

/* Builds the header, padded to a multiple of 8 bytes; returns its length. */
static int build_header(char *header, uint64_t *ret_data_bytes)
{
    uint64_t offset = 0;
    int len = 0;
    for (size_t i = 0; i < COUNT(layers); i++) {
        len = put_tensor(header, len, layers[i].name, "weight", layers[i].rank, layers[i].dims, &offset);
        len = put_tensor(header, len, layers[i].name, "bias", 1, layers[i].dims, &offset);
    }
    header[len++] = '}';
    while (len % 8 != 0)
        header[len++] = ' ';
    *ret_data_bytes = offset;
    return len;
}

/* splitmix64: a full-period generator of one addition, two multiplications and three shifts. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Fills values with numbers from -0.05 to 0.05. */
static void fill(float *values, uint64_t count, uint64_t seed)
{
    const float scale = 0.05f / 2147483648.0f;
    for (uint64_t i = 0; i + 1 < count; i += 2) {
        uint64_t random = next_random(&seed);
        values[i] = (float)(int32_t)(uint32_t)random * scale;
        values[i + 1] = (float)(int32_t)(uint32_t)(random >> 32) * scale;
    }
    if (count % 2) values[count - 1] = (float)(int32_t)(uint32_t)next_random(&seed) * scale;
}

static int fail(const char *path, int error_number)
{
    fprintf(stderr, "make_vgg16: %s: %s\n", path, strerror(error_number));
    return -1;
}

static int write_checkpoint(int fd, const char *path, uint64_t seed)
{
    char header[HEADER_CAPACITY];
    uint64_t data_bytes, header_bytes = (uint64_t)build_header(header, &data_bytes);
    uint64_t total_bytes = sizeof(header_bytes) + header_bytes + data_bytes;
    int error_number = posix_fallocate(fd, 0, (off_t)total_bytes);
    if (error_number != 0) return fail(path, error_number);
    char *file = mmap(NULL, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (file == MAP_FAILED) return fail(path, errno);
    for (unsigned i = 0; i < sizeof(header_bytes); i++)
        file[i] = (char)(header_bytes >> (8 * i));
    memcpy(file + sizeof(header_bytes), header, header_bytes);
    fill((float *)(void *)(file + sizeof(header_bytes) + header_bytes), data_bytes / sizeof(float), seed);
    munmap(file, total_bytes);
    printf("%s: %zu tensors, %" PRIu64 " parameters, %" PRIu64 " bytes\n", path, 2 * COUNT(layers),
           data_bytes / sizeof(float), total_bytes);
    return 0;
}

/* Takes --divide N out of the arguments; returns whether it is valid or missing. */
static int take_divisor(int *argc, char ***argv)
{
    if (*argc < 2 || strcmp((*argv)[1], "--divide") != 0) return 1;
    if (*argc < 3 || strlen((*argv)[2]) != 1 || !strchr("1248", (*argv)[2][0])) return 0;
    divisor = (uint64_t)((*argv)[2][0] - '0');
    *argc -= 2;
    *argv += 2;
    return 1;
}

int main(int argc, char **argv)
{
    char temporary[4096];
    int is_right = take_divisor(&argc, &argv);
    char *end = NULL;
    uint64_t seed = argc == 3 ? strtoull(argv[2], &end, 10) : 16;
    if (!is_right || argc < 2 || argc > 3 || (end && (*end || end == argv[2])) || argv[1][0] == '-') {
        fprintf(stderr, "usage: make_vgg16 [--divide 1|2|4|8] PATH [SEED]\n");
        return 2;
    }
    if (snprintf(temporary, sizeof(temporary), "%s.%d.tmp", argv[1], (int)getpid()) >= (int)sizeof(temporary)) {
        fprintf(stderr, "make_vgg16: the path is too long\n");
        return 1;
    }
    int fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return fail(temporary, errno) != 0;
    int code = write_checkpoint(fd, argv[1], seed);
    if (code == 0 && fsync(fd) != 0) code = fail(argv[1], errno);
    close(fd);
    if (code == 0 && rename(temporary, argv[1]) != 0) code = fail(argv[1], errno);
    if (code != 0) unlink(temporary);
    return code != 0 || fflush(stdout) != 0;
}
