// SPDX-License-Identifier: Apache-2.0
/*
 * The serving side of the gRPC C++ peer: grpc_server
 *
 * Three servers in one process, on ports that the kernel chooses and that are printed as one line:
 *
 *     ready SYNC TUNED ASYNC
 *
 * SYNC and TUNED are synchronous servers (one thread per running call) with the typical protobuf call, the same call
 * with raw bytes, and a stream of 1 MiB chunks; TUNED has channel arguments for large messages. ASYNC is a
 * completion-queue server with both calls. Whatever is raw answers with slices of one buffer that is never copied.
 * The process ends when its standard input does.
 */
#include "bench.grpc.pb.h"
#include "common.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace
{

using bench::Raw;
using bench::Reply;
using bench::Request;
using bench::Typed;
using grpc::ByteBuffer;

std::vector<char> source(bench::max_tensor_bytes);

ByteBuffer bytes_of_source(size_t offset_bytes, size_t len_bytes)
{
    grpc::Slice slice(source.data() + offset_bytes, len_bytes, grpc::Slice::STATIC_SLICE);
    return ByteBuffer(&slice, 1);
}

// ------------------------------------------------------------------------------------------------------- answers --

void answer(const Request &request, Reply *ret_reply)
{
    size_t size_bytes = request.size_bytes() <= source.size() ? request.size_bytes() : 0;
    ret_reply->set_data(source.data(), size_bytes);
}

void answer(const ByteBuffer &request, ByteBuffer *ret_reply)
{
    *ret_reply = bytes_of_source(0, bench::decode_size(request));
}

// --------------------------------------------------------------------------------------------------- synchronous --

class typed_service final : public Typed::Service
{
    grpc::Status Get(grpc::ServerContext *, const Request *request, Reply *ret_reply) override
    {
        answer(*request, ret_reply);
        return grpc::Status::OK;
    }
};

/* gRPC generates synchronous services for protobuf messages only; these are the same handlers over raw bytes. */
class raw_service final : public grpc::Service
{
  public:
    using raw_stream = grpc::ServerReaderWriter<ByteBuffer, ByteBuffer>;

    raw_service()
    {
        AddMethod(new grpc::internal::RpcServiceMethod(
            bench::raw_get_method, grpc::internal::RpcMethod::NORMAL_RPC,
            new grpc::internal::RpcMethodHandler<raw_service, ByteBuffer, ByteBuffer>(
                [](raw_service *, grpc::ServerContext *, const ByteBuffer *request, ByteBuffer *ret_reply) {
                    answer(*request, ret_reply);
                    return grpc::Status::OK;
                },
                this)));
        AddMethod(new grpc::internal::RpcServiceMethod(
            bench::raw_stream_method, grpc::internal::RpcMethod::BIDI_STREAMING,
            new grpc::internal::BidiStreamingHandler<raw_service, ByteBuffer, ByteBuffer>(
                [](raw_service *, grpc::ServerContext *, raw_stream *stream) { return run_stream(stream); }, this)));
    }

  private:
    static grpc::Status run_stream(raw_stream *stream)
    {
        for (ByteBuffer request; stream->Read(&request);) {
            size_t size_bytes = bench::decode_size(request);
            for (size_t offset = 0; offset < size_bytes; offset += bench::chunk_bytes) {
                size_t len_bytes = std::min(bench::chunk_bytes, size_bytes - offset);
                if (!stream->Write(bytes_of_source(offset, len_bytes))) return grpc::Status::OK;
            }
        }
        return grpc::Status::OK;
    }
};

// -------------------------------------------------------------------------------------------------- asynchronous --

using raw_async_service = Raw::WithRawMethod_Get<Raw::Service>;

/* What waits on the completion queue. */
struct waiter {
    virtual ~waiter() = default;
    virtual void proceed(bool is_ok) = 0;
};

/* One place for a call: waits for one, answers it, and is used again. */
template <typename Service, typename Question, typename Answer> struct call_place final : waiter {
    call_place(Service *service, grpc::ServerCompletionQueue *queue) : service(service), queue(queue)
    {
        await_call();
    }

    void proceed(bool is_ok) override
    {
        if (!is_ok && !has_call) return; // the server is shutting down
        has_call = !has_call;
        if (!has_call) return await_call();
        Answer reply;
        answer(question, &reply);
        writer->Finish(reply, grpc::Status::OK, this);
    }

    void await_call()
    {
        writer.reset();
        context = std::make_unique<grpc::ServerContext>();
        writer = std::make_unique<grpc::ServerAsyncResponseWriter<Answer>>(context.get());
        service->RequestGet(context.get(), &question, writer.get(), queue, queue, this);
    }

    Service *service;
    grpc::ServerCompletionQueue *queue;
    Question question;
    std::unique_ptr<grpc::ServerContext> context;
    std::unique_ptr<grpc::ServerAsyncResponseWriter<Answer>> writer;
    bool has_call = false;
};

void run_queue(grpc::ServerCompletionQueue *queue)
{
    void *tag;
    for (bool is_ok; queue->Next(&tag, &is_ok);)
        static_cast<waiter *>(tag)->proceed(is_ok);
}

// -------------------------------------------------------------------------------------------------------- servers --

struct synchronous_server {
    explicit synchronous_server(bool is_tuned)
    {
        grpc::ServerBuilder builder;
        if (is_tuned) bench::tune([&](const char *key, int value) { builder.AddChannelArgument(key, value); });
        builder.AddListeningPort("127.0.0.1:0", bench::server_credentials(), &port);
        builder.RegisterService(&typed);
        builder.RegisterService(&raw);
        server = builder.BuildAndStart();
    }

    typed_service typed;
    raw_service raw;
    int port = 0;
    std::unique_ptr<grpc::Server> server;
};

struct asynchronous_server {
    asynchronous_server()
    {
        grpc::ServerBuilder builder;
        builder.AddListeningPort("127.0.0.1:0", bench::server_credentials(), &port);
        builder.RegisterService(&typed);
        builder.RegisterService(&raw);
        queue = builder.AddCompletionQueue();
        server = builder.BuildAndStart();
        for (int i = 0; i < bench::outstanding_count; i++) {
            places.push_back(std::make_unique<call_place<Typed::AsyncService, Request, Reply>>(&typed, queue.get()));
            places.push_back(
                std::make_unique<call_place<raw_async_service, ByteBuffer, ByteBuffer>>(&raw, queue.get()));
        }
        thread = std::thread(run_queue, queue.get());
    }

    ~asynchronous_server()
    {
        server->Shutdown();
        queue->Shutdown();
        thread.join();
    }

    Typed::AsyncService typed;
    raw_async_service raw;
    int port = 0;
    std::unique_ptr<grpc::ServerCompletionQueue> queue;
    std::unique_ptr<grpc::Server> server;
    std::vector<std::unique_ptr<waiter>> places;
    std::thread thread;
};

} // namespace

int main()
{
    for (size_t i = 0; i < source.size(); i++)
        source[i] = static_cast<char>(i * 31 + i / 4096);
    synchronous_server plain(false), tuned(true);
    asynchronous_server queued;
    if (!plain.port || !tuned.port || !queued.port) {
        fprintf(stderr, "grpc_server: cannot listen on the loopback interface\n");
        return EXIT_FAILURE;
    }
    printf("ready %d %d %d\n", plain.port, tuned.port, queued.port);
    fflush(stdout);
    while (getchar() != EOF) {
    }
    plain.server->Shutdown();
    tuned.server->Shutdown();
    return EXIT_SUCCESS;
}
