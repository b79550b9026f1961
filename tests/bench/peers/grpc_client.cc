// SPDX-License-Identifier: Apache-2.0
/*
 * The receiving side of the gRPC C++ peer: grpc_client SYNC TUNED ASYNC [SIZES]
 *
 * Reads commands from standard input, one per line, and answers each with one line, the seconds it took:
 *
 *     MODE BYTES COUNT
 *
 * unary_typed, unary_raw         COUNT blocking calls, one after the other
 * unary_tuned                    unary_raw to the server that is tuned for large messages
 * unary_async_server             unary_raw to the completion-queue server
 * stream, stream_tuned           COUNT tensors asked for one after the other on one open stream of 1 MiB chunks
 * burst_typed, burst_raw         COUNT times 1,000 asynchronous calls outstanding at once
 * window_typed, window_raw       the same number of calls, a new one whenever one completes
 * each_typed, each_raw           COUNT times an asynchronous call for each line of the file SIZES, which has bytes, all
 *                                at once; BYTES means nothing
 *
 * Raw bytes are copied into one destination, as a receiver of tensors must; protobuf messages are left where the
 * message has them. Anything that fails ends the process with a line on stderr.
 */
#include "bench.grpc.pb.h"
#include "common.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/client_unary_call.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace
{

using bench::Reply;
using bench::Request;
using bench::Typed;
using grpc::ByteBuffer;

std::vector<char> destination(bench::max_tensor_bytes);

[[noreturn]] void die(const char *what, const grpc::Status &status)
{
    fprintf(stderr, "grpc_client: %s: %s\n", what, status.error_message().c_str());
    exit(EXIT_FAILURE);
}

/* Copies the slices of a message into the destination; returns how many bytes they are. */
size_t copy_out(const ByteBuffer &buffer, size_t offset_bytes)
{
    static std::vector<grpc::Slice> slices;
    slices.clear();
    if (!buffer.Dump(&slices).ok() || offset_bytes + buffer.Length() > destination.size())
        die("copy", grpc::Status(grpc::StatusCode::INTERNAL, "a message that does not fit"));
    size_t len_bytes = 0;
    for (const auto &slice : slices) {
        memcpy(destination.data() + offset_bytes + len_bytes, slice.begin(), slice.size());
        len_bytes += slice.size();
    }
    return len_bytes;
}

void check_size(size_t received_bytes, size_t size_bytes)
{
    if (received_bytes != size_bytes) die("receive", grpc::Status(grpc::StatusCode::INTERNAL, "wrong number of bytes"));
}

/* A connection of its own for every kind of use. */
std::shared_ptr<grpc::Channel> connect(const char *port, bool is_tuned)
{
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    if (is_tuned) bench::tune([&](const char *key, int value) { arguments.SetInt(key, value); });
    auto channel =
        grpc::CreateCustomChannel(std::string("127.0.0.1:") + port, bench::channel_credentials(), arguments);
    if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10)))
        die(port, grpc::Status(grpc::StatusCode::UNAVAILABLE, "no connection"));
    return channel;
}

// ------------------------------------------------------------------------------------------------------ blocking --

class unary_typed
{
  public:
    explicit unary_typed(const std::shared_ptr<grpc::Channel> &channel) : stub(Typed::NewStub(channel))
    {
    }

    void operator()(size_t size_bytes, int count)
    {
        for (int i = 0; i < count; i++) {
            grpc::ClientContext context;
            Request request;
            Reply reply;
            request.set_size_bytes(size_bytes);
            grpc::Status status = stub->Get(&context, request, &reply);
            if (!status.ok()) die("unary call", status);
            check_size(reply.data().size(), size_bytes);
        }
    }

  private:
    std::unique_ptr<Typed::Stub> stub;
};

class unary_raw
{
  public:
    explicit unary_raw(std::shared_ptr<grpc::Channel> used)
        : channel(std::move(used)), method(bench::raw_get_method, grpc::internal::RpcMethod::NORMAL_RPC, channel)
    {
    }

    void operator()(size_t size_bytes, int count)
    {
        for (int i = 0; i < count; i++) {
            grpc::ClientContext context;
            ByteBuffer request = bench::encode_size(size_bytes), reply;
            grpc::Status status = grpc::internal::BlockingUnaryCall<ByteBuffer, ByteBuffer>(channel.get(), method,
                                                                                            &context, request, &reply);
            if (!status.ok()) die("raw unary call", status);
            check_size(copy_out(reply, 0), size_bytes);
        }
    }

  private:
    std::shared_ptr<grpc::Channel> channel;
    grpc::internal::RpcMethod method;
};

class chunk_stream
{
  public:
    explicit chunk_stream(std::shared_ptr<grpc::Channel> used)
        : channel(std::move(used)),
          method(bench::raw_stream_method, grpc::internal::RpcMethod::BIDI_STREAMING, channel),
          stream(grpc::internal::ClientReaderWriterFactory<ByteBuffer, ByteBuffer>::Create(channel.get(), method,
                                                                                           &context))
    {
    }

    ~chunk_stream()
    {
        context.TryCancel();
        stream->Finish();
    }

    void operator()(size_t size_bytes, int count)
    {
        for (int i = 0; i < count; i++) {
            if (!stream->Write(bench::encode_size(size_bytes))) die("stream", stream->Finish());
            for (size_t received = 0; received < size_bytes;) {
                ByteBuffer chunk;
                if (!stream->Read(&chunk)) die("stream", stream->Finish());
                received += copy_out(chunk, received);
            }
        }
    }

  private:
    std::shared_ptr<grpc::Channel> channel;
    grpc::internal::RpcMethod method;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<ByteBuffer, ByteBuffer>> stream;
};

// -------------------------------------------------------------------------------------------------- asynchronous --

struct typed_caller {
    using answer_type = Reply;
    explicit typed_caller(const std::shared_ptr<grpc::Channel> &channel) : stub(Typed::NewStub(channel))
    {
    }

    auto start(grpc::ClientContext *context, size_t size_bytes, grpc::CompletionQueue *queue)
    {
        Request request;
        request.set_size_bytes(size_bytes);
        return stub->AsyncGet(context, request, queue);
    }

    static size_t take(const Reply &reply, size_t)
    {
        return reply.data().size();
    }

    std::unique_ptr<Typed::Stub> stub;
};

struct raw_caller {
    using answer_type = ByteBuffer;
    explicit raw_caller(const std::shared_ptr<grpc::Channel> &channel) : stub(channel)
    {
    }

    auto start(grpc::ClientContext *context, size_t size_bytes, grpc::CompletionQueue *queue)
    {
        auto call = stub.PrepareUnaryCall(context, bench::raw_get_method, bench::encode_size(size_bytes), queue);
        call->StartCall();
        return call;
    }

    static size_t take(const ByteBuffer &reply, size_t offset_bytes)
    {
        return copy_out(reply, offset_bytes);
    }

    grpc::GenericStub stub;
};

template <typename Caller> class many_calls
{
  public:
    /* sizes: of the answers to as many calls; empty: 1,000 calls have the size of the command. */
    many_calls(const std::shared_ptr<grpc::Channel> &channel, bool is_window, std::vector<size_t> sizes = {})
        : caller(channel), is_window(is_window), sizes(std::move(sizes))
    {
        size_t offset_bytes = 0;
        for (size_t size_bytes : this->sizes) {
            offsets.push_back(offset_bytes);
            offset_bytes += size_bytes;
        }
        if (offset_bytes > bench::max_tensor_bytes)
            die("sizes", grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "more than 64 MiB together"));
        outstanding_count = this->sizes.empty() ? bench::outstanding_count : static_cast<int>(this->sizes.size());
        calls.resize(static_cast<size_t>(outstanding_count));
    }

    ~many_calls()
    {
        queue.Shutdown();
    }

    void operator()(size_t size_bytes, int count)
    {
        int total = count * outstanding_count, started = 0, done = 0;
        while (done < total) {
            if (started == done || (is_window && started < outstanding_count))
                for (int i = 0; i < outstanding_count; i++, started++)
                    start(i, size_bytes);
            int place = finish_one(size_bytes);
            done++;
            if (is_window && started < total) start(place, size_bytes), started++;
        }
    }

  private:
    using answer_type = typename Caller::answer_type;

    struct one_call {
        std::unique_ptr<grpc::ClientContext> context;
        std::unique_ptr<grpc::ClientAsyncResponseReader<answer_type>> reader;
        answer_type answer;
        grpc::Status status;
    };

    size_t size_of(int place, size_t size_bytes) const
    {
        return sizes.empty() ? size_bytes : sizes[static_cast<size_t>(place)];
    }

    size_t offset_of(int place, size_t size_bytes) const
    {
        return sizes.empty() ? static_cast<size_t>(place) * size_bytes : offsets[static_cast<size_t>(place)];
    }

    void start(int place, size_t size_bytes)
    {
        one_call &call = calls[static_cast<size_t>(place)];
        call.reader.reset();
        call.context = std::make_unique<grpc::ClientContext>();
        call.reader = caller.start(call.context.get(), size_of(place, size_bytes), &queue);
        call.reader->Finish(&call.answer, &call.status, reinterpret_cast<void *>(static_cast<intptr_t>(place)));
    }

    int finish_one(size_t size_bytes)
    {
        void *tag;
        bool is_ok;
        if (!queue.Next(&tag, &is_ok)) die("completion queue", grpc::Status::CANCELLED);
        int place = static_cast<int>(reinterpret_cast<intptr_t>(tag));
        one_call &call = calls[static_cast<size_t>(place)];
        if (!call.status.ok()) die("asynchronous call", call.status);
        check_size(Caller::take(call.answer, offset_of(place, size_bytes)), size_of(place, size_bytes));
        return place;
    }

    Caller caller;
    bool is_window;
    std::vector<size_t> sizes, offsets;
    int outstanding_count;
    grpc::CompletionQueue queue;
    std::vector<one_call> calls;
};

using mode_function = std::function<void(size_t, int)>;

template <typename Mode, typename... Arguments> mode_function make_mode(Arguments &&...arguments)
{
    auto mode = std::make_shared<Mode>(std::forward<Arguments>(arguments)...);
    return [mode](size_t size_bytes, int count) { (*mode)(size_bytes, count); };
}

std::vector<size_t> read_sizes(const char *path)
{
    std::ifstream file(path);
    std::vector<size_t> sizes{std::istream_iterator<size_t>(file), {}};
    if (sizes.empty()) die(path, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "has no sizes"));
    return sizes;
}

std::map<std::string, mode_function> make_modes(char **ports)
{
    const char *plain = ports[0], *tuned = ports[1], *queued = ports[2];
    return {
        {"unary_typed", make_mode<unary_typed>(connect(plain, false))},
        {"unary_raw", make_mode<unary_raw>(connect(plain, false))},
        {"unary_tuned", make_mode<unary_raw>(connect(tuned, true))},
        {"unary_async_server", make_mode<unary_raw>(connect(queued, false))},
        {"stream", make_mode<chunk_stream>(connect(plain, false))},
        {"stream_tuned", make_mode<chunk_stream>(connect(tuned, true))},
        {"burst_typed", make_mode<many_calls<typed_caller>>(connect(queued, false), false)},
        {"burst_raw", make_mode<many_calls<raw_caller>>(connect(queued, false), false)},
        {"window_typed", make_mode<many_calls<typed_caller>>(connect(queued, false), true)},
        {"window_raw", make_mode<many_calls<raw_caller>>(connect(queued, false), true)},
    };
}

} // namespace

int main(int argc, char **argv)
{
    char name[64];
    size_t size_bytes;
    int count;
    if (argc != 4 && argc != 5) {
        fprintf(stderr, "usage: grpc_client SYNC TUNED ASYNC (the ports that grpc_server prints) [SIZES]\n");
        return EXIT_FAILURE;
    }
    auto modes = make_modes(argv + 1);
    if (argc == 5) {
        std::vector<size_t> sizes = read_sizes(argv[4]);
        modes["each_typed"] = make_mode<many_calls<typed_caller>>(connect(argv[3], false), false, sizes);
        modes["each_raw"] = make_mode<many_calls<raw_caller>>(connect(argv[3], false), false, sizes);
    }
    memset(destination.data(), 1, destination.size());
    printf("ready gRPC C++ %s\n", grpc::Version().c_str());
    fflush(stdout);
    while (scanf("%63s %zu %d", name, &size_bytes, &count) == 3) {
        auto mode = modes.find(name);
        if (mode == modes.end() || size_bytes > bench::max_tensor_bytes || count < 1)
            die(name, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no such command"));
        auto start = std::chrono::steady_clock::now();
        mode->second(size_bytes, count);
        std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        printf("%.9f\n", passed.count());
        fflush(stdout);
    }
    return EXIT_SUCCESS;
}
