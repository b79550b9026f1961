// SPDX-License-Identifier: Apache-2.0
/*
 * A program of the first version with this SONAME. package.py compiles it with the headers beside it, which never
 * change, and runs it with the library of today. Without arguments it uses every struct of the API, in the sizes of its
 * headers and in larger ones, as a program of a later version would. With "layout" it prints where the fields lie;
 * package.py compares that with what the headers of today say.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/tensorlane.h>

#define COUNT 5

static struct tl_error error;

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (condition) break;                                                                                          \
        fprintf(stderr, "line %d: not so: %s; last error: %s\n", __LINE__, #condition, error.message);                 \
        exit(EXIT_FAILURE);                                                                                            \
    } while (0)

/* ------------------------------------------------------------------------------------------------------ layout -- */

#define STRUCT(type) printf("%s %zu\n", #type, sizeof(struct type))
#define FIELD(type, field)                                                                                             \
    printf("%s.%s %zu %zu\n", #type, #field, offsetof(struct type, field), sizeof(((struct type *)0)->field))

static void print_options(void)
{
    STRUCT(tl_worker_options);
    FIELD(tl_worker_options, size_bytes);
    FIELD(tl_worker_options, config_path);
    FIELD(tl_worker_options, config_json);
    FIELD(tl_worker_options, job);
    FIELD(tl_worker_options, task);
    FIELD(tl_worker_options, is_client);
    FIELD(tl_worker_options, progress);
    STRUCT(tl_recv_options);
    FIELD(tl_recv_options, size_bytes);
    FIELD(tl_recv_options, destination);
    FIELD(tl_recv_options, wants_checksum);
    FIELD(tl_recv_options, may_map);
    STRUCT(tl_tensor_view);
    FIELD(tl_tensor_view, size_bytes);
    FIELD(tl_tensor_view, dtype);
    FIELD(tl_tensor_view, rank);
    FIELD(tl_tensor_view, dims);
    FIELD(tl_tensor_view, strides);
    FIELD(tl_tensor_view, device);
    FIELD(tl_tensor_view, data);
    FIELD(tl_tensor_view, offset_bytes);
    FIELD(tl_tensor_view, capacity_bytes);
    FIELD(tl_tensor_view, read_only);
    FIELD(tl_tensor_view, release);
    FIELD(tl_tensor_view, release_context);
    STRUCT(tl_log_options);
    FIELD(tl_log_options, level);
    FIELD(tl_log_options, format);
    FIELD(tl_log_options, write);
    FIELD(tl_log_options, context);
    STRUCT(tl_device);
    STRUCT(tl_string);
    STRUCT(tl_error);
    FIELD(tl_error, message);
}

static void print_results(void)
{
    STRUCT(tl_completion);
    FIELD(tl_completion, size_bytes);
    FIELD(tl_completion, op);
    FIELD(tl_completion, kind);
    FIELD(tl_completion, user_data);
    FIELD(tl_completion, status);
    FIELD(tl_completion, tensor);
    FIELD(tl_completion, step);
    FIELD(tl_completion, path);
    FIELD(tl_completion, path_reason);
    FIELD(tl_completion, bytes);
    FIELD(tl_completion, duration_ns);
    FIELD(tl_completion, is_verified);
    STRUCT(tl_peer_info);
    FIELD(tl_peer_info, id);
    FIELD(tl_peer_info, name);
    FIELD(tl_peer_info, address);
    FIELD(tl_peer_info, state);
    FIELD(tl_peer_info, incarnation);
    FIELD(tl_peer_info, restart_count);
    FIELD(tl_peer_info, transport);
    FIELD(tl_peer_info, reason);
    STRUCT(tl_worker_stats);
    FIELD(tl_worker_stats, tensors_sent);
    FIELD(tl_worker_stats, tensors_received);
    FIELD(tl_worker_stats, bytes_sent);
    FIELD(tl_worker_stats, bytes_received);
    FIELD(tl_worker_stats, bytes_copied_send);
    FIELD(tl_worker_stats, frames_sent);
    FIELD(tl_worker_stats, frames_received);
    FIELD(tl_worker_stats, requests_retried);
    FIELD(tl_worker_stats, tensors_dropped);
    FIELD(tl_worker_stats, waiting_receivers);
    FIELD(tl_worker_stats, held_tensors);
    FIELD(tl_worker_stats, held_bytes);
    FIELD(tl_worker_stats, published_tensors);
    FIELD(tl_worker_stats, published_bytes);
    FIELD(tl_worker_stats, open_operations);
    FIELD(tl_worker_stats, protocol_errors);
}

/* ------------------------------------------------------------------------------------------------------- using -- */

/* What a later version may have: the same struct with fields at its end. */
#define LATER(type)                                                                                                    \
    struct {                                                                                                           \
        struct type first;                                                                                             \
        uint64_t added[3];                                                                                             \
    }

static struct tl_worker *open_worker(void)
{
    LATER(tl_worker_options)
    options = {.first = {.size_bytes = sizeof(options),
                         .config_json = "{\"cluster\": {\"node\": [\"127.0.0.1:1\"]}, \"listen\": \"127.0.0.1:0\"}",
                         .job = "node"}};
    struct tl_worker *worker;
    options.added[1] = 1;
    EXPECT(tl_worker_open(&options.first, &worker, &error) == TL_UNIMPLEMENTED);
    options.added[1] = 0;
    EXPECT(tl_worker_open(&options.first, &worker, &error) == TL_OK);
    tl_worker_close(worker, 0);
    options.first.size_bytes = sizeof(options.first);
    options.added[1] = 1;
    EXPECT(tl_worker_open(&options.first, &worker, &error) == TL_OK);
    return worker;
}

static void publish(struct tl_worker *worker, float *data, bool is_later)
{
    const uint64_t dims[] = {2};
    struct tl_tensor *tensor;
    LATER(tl_tensor_view)
    view = {.first = {.size_bytes = is_later ? sizeof(view) : sizeof(view.first),
                      .dtype = TL_F32,
                      .rank = 1,
                      .dims = dims,
                      .data = data,
                      .capacity_bytes = 2 * sizeof(float)},
            .added = {!is_later}};
    EXPECT(tl_tensor_wrap(&view.first, &tensor, &error) == TL_OK);
    EXPECT(tl_publish(worker, "weights", 7, tensor, &error) == TL_OK);
    tl_tensor_put(tensor);
}

/* All of them come in one array, so that its stride has to fit. */
static void receive(struct tl_worker *worker, tl_peer_id peer, struct tl_cq *cq, bool is_later)
{
    LATER(tl_recv_options)
    options = {.first = {.size_bytes = is_later ? sizeof(options) : sizeof(options.first)}, .added = {!is_later}};
    struct tl_completion got[COUNT];
    tl_op_id op;
    size_t count = 0;
    for (uintptr_t i = 0; i < COUNT; i++)
        EXPECT(tl_recv(worker, peer, "weights", 0, &options.first, TL_TIMEOUT_DEFAULT, cq, (void *)i, &op, &error) ==
               TL_OK);
    memset(got, 0xff, sizeof(got));
    while (count < COUNT)
        count += tl_cq_wait(cq, got + count, COUNT - count, TL_TIMEOUT_NONE);
    for (uintptr_t i = 0; i < COUNT; i++) {
        EXPECT(got[i].size_bytes == sizeof(got[i]) && got[i].user_data == (void *)i);
        EXPECT(got[i].status.code == TL_OK && got[i].kind == TL_OP_RECV && got[i].step == 7 && got[i].bytes == 8);
        EXPECT(((const float *)tl_tensor_data(got[i].tensor))[1] == 2.0F);
        for (size_t j = 0; j < sizeof(got[i].reserved) / sizeof(got[i].reserved[0]); j++)
            EXPECT(got[i].reserved[j] == 0);
        tl_tensor_put(got[i].tensor);
    }
    options.first.size_bytes = sizeof(options);
    options.added[2] = 1; /* behind the device and the part, which the first version did not know */
    EXPECT(tl_recv(worker, peer, "weights", 0, &options.first, TL_TIMEOUT_DEFAULT, cq, NULL, &op, &error) ==
           TL_UNIMPLEMENTED);
}

static void look(struct tl_worker *worker, tl_peer_id peer)
{
    LATER(tl_worker_stats) stats = {.first = {.size_bytes = sizeof(stats)}, .added = {1, 1}};
    EXPECT(tl_worker_stats(worker, &stats.first, &error) == TL_OK);
    EXPECT(stats.first.size_bytes == sizeof(stats) && stats.first.published_bytes == 8);
    EXPECT(stats.added[0] == 0 && stats.added[1] == 0);
    stats.first.size_bytes = sizeof(stats.first);
    stats.added[0] = 77;
    EXPECT(tl_worker_stats(worker, &stats.first, &error) == TL_OK && stats.added[0] == 77);
    stats.first.size_bytes--;
    EXPECT(tl_worker_stats(worker, &stats.first, &error) == TL_INVALID_ARGUMENT);
    LATER(tl_peer_info) info = {.first = {.size_bytes = sizeof(info)}, .added = {1, 1}};
    EXPECT(tl_worker_peer_info(worker, peer, &info.first, &error) == TL_OK);
    EXPECT(strcmp(info.first.name, "/job:node/task:0") == 0 && info.first.reason.code == TL_OK && info.added[0] == 0);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "layout") == 0) {
        print_options();
        print_results();
        return EXIT_SUCCESS;
    }
    static float data[] = {1.0F, 2.0F};
    struct tl_worker *worker = open_worker();
    struct tl_cq *cq;
    tl_peer_id peer;
    EXPECT(tl_cq_create(&cq, &error) == TL_OK);
    EXPECT(tl_worker_find_peer(worker, tl_worker_name(worker), &peer, &error) == TL_OK);
    for (int is_later = 0; is_later < 2; is_later++) {
        publish(worker, data, is_later);
        receive(worker, peer, cq, is_later);
    }
    look(worker, peer);
    tl_worker_close(worker, TL_TIMEOUT_DEFAULT);
    tl_cq_destroy(cq);
    return EXIT_SUCCESS;
}
