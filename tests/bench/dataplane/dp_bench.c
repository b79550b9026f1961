// SPDX-License-Identifier: Apache-2.0
/*
 * What the data-plane engine costs on a real provider, without a worker around it: one process serves published
 * tensors, another one receives them, again and again, over one connection.
 *
 *   dp_bench --size BYTES --outstanding N --count N [--provider verbs|local] [--keys window|region] [--allocate]
 *            [--user-memory] [--map] [--bounce] [--read] [--thread] [--spin-us N] [--apart]
 *
 * Each of the outstanding ones is received into the same destination again and again, as a loop over steps does it, and
 * as the programs that this is compared with do; with --allocate into a new one each time. With --user-memory the
 * destinations lie outside of the pool. With --map there is none: what is published lies in a file, which is mapped.
 * With --read the receiver reads the tensors.
 *
 * Prints one JSON object: the median and other quantiles of the time from the fetch to its done, tensors and bytes per
 * second, CPU seconds of the receiver, and the counters of the engine over the measured part.
 *
 * With --thread a thread of its own drives the receiver's reactor, and the caller sleeps until it is told; without, the
 * caller drives it. The server drives its reactor itself; both spin before they sleep. With --apart each process stays
 * on a processor of its own.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/engine.h"
#include "dataplane/local/local.h"
#include "dataplane/verbs/verbs.h"
#include "tensor/mapped_tensor.h"
#include "tests/fakes/made_memory.h"
#include "processors.h"

#define SERVER_INCARNATION 11
#define CLIENT_INCARNATION 22

struct settings {
    uint64_t size_bytes;
    unsigned outstanding;
    unsigned count;
    unsigned warm_up;
    enum tl_keys keys;
    bool is_allocating;
    bool is_bounced;
    bool is_reading;
    bool is_local;
    bool is_users_memory;
    bool is_mapped;
    bool has_thread;
    bool is_apart;
    int64_t spin_ns;
};

static struct settings settings = {
    .size_bytes = 8, .outstanding = 1, .count = 2000, .warm_up = 200, .spin_ns = 200 * 1000};

/* -------------------------------------------------------------------------------------------------- both sides -- */

struct side {
    struct tl_provider *provider;
    struct tl_memory *memory;
    struct tl_reactor *reactor;
    struct tl_engine *engine;
    struct tl_conn *conn;
    bool is_up;
    bool is_closed;
    struct tl_error reason;
    struct tl_tensor *published; /* the server's */
};

static _Noreturn void die(const char *what, const struct tl_error *error)
{
    fprintf(stderr, "dp_bench: %s: %s\n", what, error->message);
    exit(1);
}

static void up(struct tl_conn *conn)
{
    ((struct side *)tl_conn_owner(conn))->is_up = true;
}

static void closed(struct tl_conn *conn, const struct tl_error *reason)
{
    struct side *side = tl_conn_owner(conn);
    side->is_closed = true;
    side->reason = *reason;
    side->conn = NULL;
}

static const struct tl_conn_events conn_events = {.up = up, .closed = closed};

static void source_request(void *context, struct tl_serve *serve)
{
    struct side *side = context;
    static const struct tl_error ok = {.code = TL_OK};
    struct tl_offer offer = {.tensor = tl_tensor_get(side->published), .publication = 1};
    serve->is_final = true;
    serve->ops->reply(serve, &ok, &offer);
}

static void source_closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    (void)context;
    (void)serve;
    (void)end;
}

static const struct tl_source_ops source = {.request = source_request, .closed = source_closed};

static enum tl_status open_provider(struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    if (settings.is_local) return tl_local_open(&(struct tl_local_options){0}, ret_provider, ret_error);
    struct tl_verbs_options verbs;
    tl_verbs_options_init(&verbs);
    verbs.keys = settings.keys;
    verbs.gid_index = 1;
    return tl_verbs_open(&verbs, 0, ret_provider, ret_error);
}

/* To register much takes longer than to receive small tensors. */
static uint64_t pool_bytes(void)
{
    bool is_small = settings.size_bytes * settings.outstanding <= 64 << 10;
    return settings.is_local || is_small ? 4 << 20 : 64 << 20;
}

static void side_open(struct side *side, uint64_t self, uint64_t peer_incarnation, bool is_opener)
{
    struct tl_error error;
    if (open_provider(&side->provider, &error) != TL_OK) die("device", &error);
    const struct tl_memory_options memory = {.pool_bytes = pool_bytes(),
                                             .max_pool_bytes = UINT64_C(1) << 30,
                                             .max_cached_bytes = UINT64_C(1) << 30,
                                             .max_cached_count = 4096};
    if (tl_memory_create(side->provider, &memory, &side->memory, &error) != TL_OK) die("memory", &error);
    const struct tl_reactor_options reactor = {.spin_ns = settings.spin_ns};
    if (tl_reactor_create(side->provider, &reactor, &side->reactor, &error) != TL_OK) die("reactor", &error);
    const struct tl_engine_options options = {.keys = settings.keys,
                                              .peer_memory = memory,
                                              .slot_count = 256,
                                              .work_count = 256,
                                              .request_count = 1024,
                                              .key_count = 1024,
                                              .piece_bytes = 4 << 20,
                                              .register_bytes = 64 << 10,
                                              .copy_bytes = settings.is_local ? TL_LOCAL_COPY_BYTES : 0,
                                              .is_mapping_allowed = settings.is_mapped,
                                              .is_bounce_forced = settings.is_bounced,
                                              .is_reading = settings.is_reading,
                                              .peer_timeout_ns = 5 * TL_NS_PER_SEC,
                                              .connect_ns = 10 * TL_NS_PER_SEC,
                                              .cancel_ns = 5 * TL_NS_PER_SEC,
                                              .parked_ns = 60 * TL_NS_PER_SEC};
    if (tl_engine_create(side->reactor, side->memory, &options, &source, side, &side->engine, &error) != TL_OK) {
        die("engine", &error);
    }
    struct tl_identity peer = {.source = TL_IDENTITY_CLAIMED, .incarnation = peer_incarnation};
    snprintf(peer.name, sizeof(peer.name), "%s", is_opener ? "the server" : "the client");
    struct tl_memory *made;
    if (made_memory(side->engine, &made, &error) != TL_OK) die("memory of the peer", &error);
    if (tl_conn_create(side->engine, made, &peer, self, is_opener, &conn_events, side, &side->conn, &error) != TL_OK) {
        die("connection", &error);
    }
}

static void side_close(struct side *side)
{
    while (!side->is_closed)
        (void)tl_reactor_run_once(side->reactor, TL_TIME_NEVER);
    tl_engine_destroy(side->engine);
    tl_tensor_put(side->published);
    tl_memory_destroy(side->memory);
    tl_reactor_destroy(side->reactor);
    side->provider->ops->close(side->provider);
}

static void put_address(const struct side *side, int fd)
{
    uint8_t bytes[TL_CONN_ADDRESS_BYTES];
    uint32_t len_bytes = tl_conn_get_address(side->conn, bytes);
    TL_CHECK(write(fd, bytes, len_bytes) == (ssize_t)len_bytes);
}

static void connect_with_next(struct side *side, int fd)
{
    uint8_t bytes[TL_CONN_ADDRESS_BYTES];
    ssize_t len_bytes = read(fd, bytes, sizeof(bytes));
    struct tl_error error;
    if (len_bytes <= 0) exit(1);
    if (tl_conn_connect(side->conn, bytes, (uint32_t)len_bytes, &error) != TL_OK) die("connect", &error);
}

static struct tl_tensor *make_tensor(struct tl_memory *memory)
{
    const struct tl_meta_data meta_data = {
        .dtype = TL_U8, .shape = {.rank = 1, .dims = {settings.size_bytes}}, .size_bytes = settings.size_bytes};
    struct tl_tensor *tensor;
    struct tl_error error;
    if (tl_memory_tensor_create(memory, &meta_data, &tensor, &error) != TL_OK) die("tensor", &error);
    memset(tl_tensor_data(tensor), 0x5a, (size_t)settings.size_bytes);
    return tensor;
}

static struct tl_tensor *make_users_tensor(void)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    if (tl_tensor_create(TL_U8, 1, &settings.size_bytes, &tensor, &error) != TL_OK) die("tensor", &error);
    memset(tl_tensor_data(tensor), 0, (size_t)settings.size_bytes);
    return tensor;
}

/* In a file without a name, every page of which is there. */
static struct tl_tensor *make_file_tensor(void)
{
    const struct tl_shape shape = {.rank = 1, .dims = {settings.size_bytes}};
    struct tl_tensor *tensor;
    struct tl_mapped_file *file;
    struct tl_error error;
    struct stat info;
    int fd = memfd_create("dp_bench", MFD_CLOEXEC);
    TL_CHECK(fd >= 0 && ftruncate(fd, (off_t)settings.size_bytes) == 0);
    TL_CHECK(fallocate(fd, 0, 0, (off_t)settings.size_bytes) == 0 && fstat(fd, &info) == 0);
    const struct tl_file_stamp stamp = {.size_bytes = settings.size_bytes,
                                        .modified_seconds = info.st_mtim.tv_sec,
                                        .modified_ns = (uint32_t)info.st_mtim.tv_nsec};
    if (tl_mapped_file_adopt(fd, &stamp, "a published file", &file, &error) != TL_OK ||
        tl_mapped_tensor_create(file, 0, TL_U8, &shape, &tensor, &error) != TL_OK) {
        die("file", &error);
    }
    tl_mapped_file_put(file);
    return tensor;
}

struct cpu {
    double user_sec;
    double system_sec;
};

static struct cpu cpu_used(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (struct cpu){(double)usage.ru_utime.tv_sec + (double)usage.ru_utime.tv_usec / 1e6,
                        (double)usage.ru_stime.tv_sec + (double)usage.ru_stime.tv_usec / 1e6};
}

static int serve(int fd)
{
    struct side side = {.is_up = false};
    side_open(&side, SERVER_INCARNATION, CLIENT_INCARNATION, false);
    side.published = settings.is_mapped ? make_file_tensor() : make_tensor(side.memory);
    connect_with_next(&side, fd);
    put_address(&side, fd);
    while (!side.is_closed)
        (void)tl_reactor_run_once(side.reactor, TL_TIME_NEVER);
    int status = side.reason.code == TL_OK ? 0 : 1;
    if (status != 0) fprintf(stderr, "dp_bench: server: %s\n", side.reason.message);
    side_close(&side);
    return status;
}

/* ------------------------------------------------------------------------------------------------------ client -- */

struct asked {
    struct tl_fetch fetch;
    struct tl_closure closure;
    struct tl_tensor *destination; /* NULL: none yet, or a new one each time */
    int64_t begun_ns;
};

struct client {
    struct side side;
    struct asked *asked; /* [outstanding] */
    uint64_t *times_ns;  /* [count] */
    unsigned begun;
    unsigned done;
    unsigned goal;
    uint64_t next_number;
    unsigned paths[TL_PATH_INLINE + 1];
    pthread_t thread;
    sem_t over; /* what the caller waits for */
    atomic_int phase;
};

static struct client client;

static void begin(struct asked *asked, int64_t now_ns)
{
    client.begun++;
    asked->begun_ns = now_ns;
    asked->fetch.may_map = settings.is_mapped;
    asked->fetch.number = ++client.next_number;
    tl_conn_fetch(client.side.conn, &asked->fetch);
}

static enum tl_status place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    struct asked *asked = TL_CONTAINER_OF(fetch, struct asked, fetch);
    if (asked->destination != NULL) {
        *ret_destination = tl_tensor_get(asked->destination);
        return TL_OK;
    }
    static const struct tl_device host = {.kind = TL_DEVICE_HOST};
    enum tl_status status =
        fetch->allocator->create(fetch->allocator->context, host, meta_data, ret_destination, ret_error);
    if (status == TL_OK && !settings.is_allocating) asked->destination = tl_tensor_get(*ret_destination);
    return status;
}

static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct asked *asked = TL_CONTAINER_OF(fetch, struct asked, fetch);
    if (result->code != TL_OK) die("fetch", result);
    int64_t now_ns = tl_clock_now_ns();
    client.times_ns[client.done++] = (uint64_t)(now_ns - asked->begun_ns);
    client.paths[fetch->path]++;
    if (settings.has_thread && settings.outstanding == 1) {
        sem_post(&client.over);
    } else if (client.begun < client.goal) {
        begin(asked, now_ns);
    } else if (settings.has_thread && client.done == client.goal) {
        sem_post(&client.over);
    }
}

static const struct tl_fetch_ops fetch_ops = {.place = place, .done = fetch_done};

static void *drive(void *context)
{
    (void)context;
    while (atomic_load(&client.phase) == 0)
        (void)tl_reactor_run_once(client.side.reactor, TL_TIME_NEVER);
    return NULL;
}

static void begin_posted(struct tl_closure *closure)
{
    begin(TL_CONTAINER_OF(closure, struct asked, closure), tl_clock_now_ns());
}

/* One round trip through another thread, as a caller that sleeps sees it. */
static void run_through_thread(void)
{
    while (client.done < client.goal) {
        int64_t begun_ns = tl_clock_now_ns();
        unsigned first = settings.outstanding < client.goal ? settings.outstanding : client.goal;
        for (unsigned i = 0; i < first; i++)
            tl_reactor_post(client.side.reactor, &client.asked[i].closure);
        while (sem_wait(&client.over) != 0)
            TL_CHECK(errno == EINTR);
        if (settings.outstanding == 1) client.times_ns[client.done - 1] = (uint64_t)(tl_clock_now_ns() - begun_ns);
    }
}

static void run_part(unsigned count)
{
    client.goal = count;
    client.begun = 0;
    client.done = 0;
    if (settings.has_thread) {
        run_through_thread();
        return;
    }
    for (unsigned i = 0; i < settings.outstanding && client.begun < client.goal; i++)
        begin(&client.asked[i], tl_clock_now_ns());
    while (client.done < client.goal && !client.side.is_closed)
        (void)tl_reactor_run_once(client.side.reactor, TL_TIME_NEVER);
    if (client.side.is_closed) die("connection", &client.side.reason);
}

static int by_number(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

static double quantile_us(double part)
{
    size_t index = (size_t)(part * (double)(settings.count - 1));
    return (double)client.times_ns[index] / 1e3;
}

static void report(double seconds, struct cpu cpu, const struct tl_engine_stats *before,
                   const struct tl_engine_stats *after)
{
    qsort(client.times_ns, settings.count, sizeof(*client.times_ns), by_number);
    printf("{\"size\": %" PRIu64 ", \"outstanding\": %u, \"count\": %u, \"keys\": \"%s\", \"bounce\": %s, "
           "\"thread\": %s, \"p50_us\": %.3f, \"p10_us\": %.3f, \"p90_us\": %.3f, \"p99_us\": %.3f, "
           "\"tensors_per_sec\": %.1f, \"bytes_per_sec\": %.1f, \"receiver_user_sec\": %.4f, \"receiver_system_sec\": "
           "%.4f, \"seconds\": %.4f, "
           "\"messages\": %.4f, \"copied_bytes\": %" PRIu64
           ", \"zero_copy\": %u, \"bounced\": %u, \"mapped\": %u, \"device\": \"%s\"}\n",
           settings.size_bytes, settings.outstanding, settings.count,
           settings.keys == TL_KEYS_WINDOW ? "window" : "region", settings.is_bounced ? "true" : "false",
           settings.has_thread ? "true" : "false", quantile_us(0.5), quantile_us(0.1), quantile_us(0.9),
           quantile_us(0.99), settings.count / seconds, settings.count / seconds * (double)settings.size_bytes,
           cpu.user_sec, cpu.system_sec, seconds,
           (double)(after->messages_sent - before->messages_sent) / settings.count,
           after->bytes_bounced - before->bytes_bounced, client.paths[TL_PATH_ZERO_COPY], client.paths[TL_PATH_BOUNCE],
           client.paths[TL_PATH_MAPPED], client.side.provider->name);
}

static void receive(int fd)
{
    struct side *side = &client.side;
    side_open(side, CLIENT_INCARNATION, SERVER_INCARNATION, true);
    put_address(side, fd);
    connect_with_next(side, fd);
    while (!side->is_up && !side->is_closed)
        (void)tl_reactor_run_once(side->reactor, TL_TIME_NEVER);
    if (side->is_closed) die("connection", &side->reason);
    client.asked = calloc(settings.outstanding, sizeof(*client.asked));
    unsigned most = settings.count > settings.warm_up ? settings.count : settings.warm_up;
    client.times_ns = calloc(most + 1, sizeof(*client.times_ns));
    TL_CHECK(client.asked != NULL && client.times_ns != NULL);
    for (unsigned i = 0; i < settings.outstanding; i++) {
        tl_fetch_init(&client.asked[i].fetch, &fetch_ops);
        client.asked[i].fetch.key = "weights";
        client.asked[i].closure.run = begin_posted;
        if (settings.is_users_memory) client.asked[i].destination = make_users_tensor();
    }
    sem_init(&client.over, 0, 0);
    if (settings.has_thread) TL_CHECK(pthread_create(&client.thread, NULL, drive, NULL) == 0);
    run_part(settings.warm_up);
    memset(client.paths, 0, sizeof(client.paths));
    struct tl_engine_stats before, after;
    tl_engine_get_stats(side->engine, &before);
    struct cpu before_cpu = cpu_used();
    int64_t begun_ns = tl_clock_now_ns();
    run_part(settings.count);
    double seconds = (double)(tl_clock_now_ns() - begun_ns) / 1e9;
    struct cpu cpu = cpu_used();
    cpu.user_sec -= before_cpu.user_sec;
    cpu.system_sec -= before_cpu.system_sec;
    tl_engine_get_stats(side->engine, &after);
    report(seconds, cpu, &before, &after);
    if (settings.has_thread) {
        atomic_store(&client.phase, 1);
        tl_reactor_wake(side->reactor);
        pthread_join(client.thread, NULL);
    }
    for (unsigned i = 0; i < settings.outstanding; i++) {
        tl_fetch_fini(&client.asked[i].fetch);
        tl_tensor_put(client.asked[i].destination);
    }
    tl_conn_drain(side->conn);
    side_close(side);
    free(client.asked);
    free(client.times_ns);
}

/* -------------------------------------------------------------------------------------------------------- main -- */

static void read_options(int argc, char **argv)
{
    static const struct option options[] = {{"size", required_argument, NULL, 's'},
                                            {"outstanding", required_argument, NULL, 'o'},
                                            {"count", required_argument, NULL, 'n'},
                                            {"warm-up", required_argument, NULL, 'w'},
                                            {"keys", required_argument, NULL, 'k'},
                                            {"allocate", no_argument, NULL, 'a'},
                                            {"bounce", no_argument, NULL, 'b'},
                                            {"thread", no_argument, NULL, 't'},
                                            {"read", no_argument, NULL, 'R'},
                                            {"provider", required_argument, NULL, 'r'},
                                            {"user-memory", no_argument, NULL, 'u'},
                                            {"spin-us", required_argument, NULL, 'p'},
                                            {"map", no_argument, NULL, 'm'},
                                            {"apart", no_argument, NULL, 'd'},
                                            {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            settings.size_bytes = strtoull(optarg, NULL, 10);
            break;
        case 'o':
            settings.outstanding = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 'n':
            settings.count = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 'w':
            settings.warm_up = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 'k':
            settings.keys = strcmp(optarg, "region") == 0 ? TL_KEYS_REGION : TL_KEYS_WINDOW;
            break;
        case 'a':
            settings.is_allocating = true;
            break;
        case 'b':
            settings.is_bounced = true;
            break;
        case 'R':
            settings.is_reading = true;
            break;
        case 'r':
            settings.is_local = strcmp(optarg, "local") == 0;
            break;
        case 'u':
            settings.is_users_memory = true;
            break;
        case 'm':
            settings.is_mapped = true;
            break;
        case 'd':
            settings.is_apart = true;
            break;
        case 't':
            settings.has_thread = true;
            break;
        case 'p':
            settings.spin_ns = strtoll(optarg, NULL, 10) * 1000;
            break;
        default:
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    int fds[2];
    TL_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    pid_t child = fork();
    if (settings.is_apart) bench_stay_on_processor(child == 0);
    if (child == 0) {
        close(fds[0]);
        exit(serve(fds[1]));
    }
    close(fds[1]);
    receive(fds[0]);
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
