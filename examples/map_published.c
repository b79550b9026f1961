// SPDX-License-Identifier: Apache-2.0
/*
 * map_published: reads published weights without copying them.
 *
 *   cc map_published.c $(pkg-config --cflags --libs tensorlane) -o map_published && ./map_published
 *
 * One worker publishes a file with two tensors, a small one and one that is a thousand times as large. It also
 * publishes a tensor that it has computed, in memory that others may map (tl_tensor_create_shared). Another worker
 * receives all of them and says that it only reads them (may_map). On one host it maps them, read-only, and no byte is
 * copied, so that all take the same time. With another host or another transport the tensors are copied, and the
 * completion says so; the program is the same.
 *
 * The owner of a mapped file can still change it. So the reader reads first and then asks whether what it has read is
 * valid (tl_tensor_check), and lets the library handle the signal that comes when the file becomes shorter
 * (tl_guard_mapped_files).
 *
 * Both workers live in this one process, so that there is nothing to set up; see send_recv.c.
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <tensorlane/tensorlane.h>

#define SECOND INT64_C(1000000000)

#define SMALL_COUNT 4096
#define LARGE_COUNT (1024 * SMALL_COUNT)

/* Goes on when a call succeeded, otherwise prints the error and ends the program. */
static void must(enum tl_status status, const struct tl_error *error, const char *what)
{
    if (status == TL_OK) return;
    fprintf(stderr, "map_published: %s: %s: %s\n", what, tl_status_name(status), error->message);
    exit(EXIT_FAILURE);
}

static void expect(int is_true, const char *what)
{
    if (is_true) return;
    fprintf(stderr, "map_published: not so: %s\n", what);
    exit(EXIT_FAILURE);
}

/* ---------------------------------------------------------------------------------------------------- the file -- */

/* Writes a safetensors file of two tensors of float32, whose elements are all 1. */
static void write_file(const char *path)
{
    static const float ones[SMALL_COUNT] = {[0 ... SMALL_COUNT - 1] = 1};
    char header[512];
    int len = snprintf(header, sizeof(header),
                       "{\"small\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[0,%zu]},"
                       "\"large\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]}}",
                       SMALL_COUNT, sizeof(ones), LARGE_COUNT, sizeof(ones), sizeof(ones) * 1025);
    uint64_t header_bytes = ((uint64_t)len + 63) / 64 * 64 - 8; /* This length aligns the elements. */
    memset(header + len, ' ', sizeof(header) - (size_t)len);
    FILE *file = fopen(path, "wb");
    expect(file != NULL, "the file can be written");
    /* The length is little-endian, as all numbers are on the machines that this program runs on. */
    size_t written = fwrite(&header_bytes, sizeof(header_bytes), 1, file) + fwrite(header, header_bytes, 1, file);
    for (int i = 0; i < 1025; i++)
        written += fwrite(ones, sizeof(ones), 1, file);
    expect(written == 1027 && fclose(file) == 0, "the disk has room for the file");
}

/* --------------------------------------------------------------------------------------------------- a cluster -- */

/* Opens a socket on a free port; returns it and the port. */
static int take_port(unsigned *ret_port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    expect(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
               getsockname(fd, (struct sockaddr *)&address, &length) == 0,
           "there is a free port");
    *ret_port = ntohs(address.sin_port);
    return fd;
}

/* Describes two tasks on this machine; the first one publishes the file. */
static void write_config(char *ret_json, size_t capacity, const char *path)
{
    unsigned ports[2];
    int fds[2] = {take_port(&ports[0]), take_port(&ports[1])};
    close(fds[0]);
    close(fds[1]);
    snprintf(ret_json, capacity,
             "{\"cluster\": {\"worker\": [\"127.0.0.1:%u\", \"127.0.0.1:%u\"]}, \"log\": {\"level\": \"warn\"}, "
             "\"jobs\": {\"worker\": {\"tasks\": {\"0\": {\"publish\": [\"%s\"]}}}}}",
             ports[0], ports[1], path);
}

static struct tl_worker *open_worker(const char *json, uint32_t task)
{
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .job = "worker", .task = task};
    struct tl_worker *worker;
    struct tl_error error;
    must(tl_worker_open(&options, &worker, &error), &error, "open a worker");
    return worker;
}

/* Publishes a tensor of float32 that lies in no file, whose elements are all 1. Once it was published it must not
 * change any more: a new version is a new tensor. */
static void publish_computed(struct tl_worker *owner)
{
    const uint64_t count = LARGE_COUNT;
    struct tl_tensor *tensor;
    struct tl_error error;
    must(tl_tensor_create_shared(TL_F32, 1, &count, &tensor, &error), &error, "create a tensor");
    float *elements = tl_tensor_data(tensor);
    for (uint64_t i = 0; i < count; i++)
        elements[i] = 1;
    must(tl_publish(owner, "computed", 1, tensor, &error), &error, "publish");
    tl_tensor_put(tensor);
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

static struct tl_tensor *receive(struct tl_worker *worker, tl_peer_id peer, const char *key)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .may_map = true};
    struct tl_completion got;
    struct tl_error error;
    must(tl_recv_wait(worker, peer, key, 0, &options, 10 * SECOND, &got, &error), &error, key);
    printf("%s: %" PRIu64 " bytes, %s, in %" PRId64 " us\n", key, got.bytes, tl_path_name(got.path),
           got.duration_ns / 1000);
    /* The program must not write into mapped memory; it may write into a copy. */
    expect(tl_tensor_is_read_only(got.tensor) == (got.path == TL_PATH_MAPPED), "only mappings are read-only");
    return got.tensor;
}

static void read_all(const struct tl_tensor *tensor, uint64_t expected)
{
    const float *elements = tl_tensor_data(tensor);
    uint64_t count = tl_tensor_element_count(tensor);
    double sum = 0;
    for (uint64_t i = 0; i < count; i++)
        sum += (double)elements[i];
    /* This check says whether the sum is that of the published elements. */
    struct tl_error error;
    must(tl_tensor_check(tensor, &error), &error, "check what was read");
    expect(count == expected && sum == (double)count, "the sum is that of the file");
}

int main(void)
{
    char path[] = "/tmp/map_published_XXXXXX.safetensors";
    char json[512];
    struct tl_error error;
    must(tl_guard_mapped_files(&error), &error, "guard mapped files");
    int fd = mkstemps(path, (int)strlen(".safetensors"));
    expect(fd >= 0 && close(fd) == 0, "a temporary file can be made");
    write_file(path);
    write_config(json, sizeof(json), path);
    struct tl_worker *owner = open_worker(json, 0);
    struct tl_worker *reader = open_worker(json, 1);
    tl_peer_id peer;
    must(tl_worker_find_peer(reader, "/job:worker/task:0", &peer, &error), &error, "find the peer");

    publish_computed(owner);
    tl_tensor_put(receive(reader, peer, "small")); /* The first receive waits for the connection. */
    struct tl_tensor *small = receive(reader, peer, "small");
    struct tl_tensor *large = receive(reader, peer, "large");
    struct tl_tensor *computed = receive(reader, peer, "computed");
    read_all(small, SMALL_COUNT);

    /* What was received stays valid when its owner closes, and when the file is removed. */
    tl_worker_close(owner, TL_TIMEOUT_DEFAULT);
    tl_worker_close(reader, TL_TIMEOUT_DEFAULT);
    unlink(path);
    read_all(large, LARGE_COUNT);
    read_all(computed, LARGE_COUNT);
    tl_tensor_put(computed);
    tl_tensor_put(small);
    tl_tensor_put(large);
    printf("all well\n");
    return EXIT_SUCCESS;
}
