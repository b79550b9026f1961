// SPDX-License-Identifier: Apache-2.0
/* What the server and the client of the gRPC C++ peer share. */
#ifndef TESTS_BENCH_PEERS_COMMON_H
#define TESTS_BENCH_PEERS_COMMON_H

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

namespace bench
{

constexpr size_t max_tensor_bytes = size_t{64} << 20;
constexpr size_t chunk_bytes = size_t{1} << 20;
constexpr int outstanding_count = 1000;
constexpr const char raw_get_method[] = "/bench.Raw/Get";
constexpr const char raw_stream_method[] = "/bench.Raw/Stream";

/* A raw request is the 8 bytes of the size. */
inline grpc::ByteBuffer encode_size(uint64_t size_bytes)
{
    grpc::Slice slice(&size_bytes, sizeof(size_bytes));
    return grpc::ByteBuffer(&slice, 1);
}

inline uint64_t decode_size(const grpc::ByteBuffer &buffer)
{
    uint64_t size_bytes = 0;
    grpc::Slice slice;
    if (buffer.DumpToSingleSlice(&slice).ok() && slice.size() == sizeof(size_bytes))
        memcpy(&size_bytes, slice.begin(), sizeof(size_bytes));
    return size_bytes <= max_tensor_bytes ? size_bytes : 0;
}

/* What a user tunes who moves large messages. Over the loopback interface the window that gRPC probes for is worse than
 * none. Larger frames, reads and write buffers did not add to it, zero-copy sending made it slower. */
template <typename Arguments> void tune(Arguments set)
{
    set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
}

inline std::string read_file(const std::string &path)
{
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/* With TENSORLANE_BENCH_TLS, a folder with the files of `tensorlane cert`, both sides prove who they are. */
inline std::shared_ptr<grpc::ServerCredentials> server_credentials()
{
    const char *folder = getenv("TENSORLANE_BENCH_TLS");
    if (!folder) return grpc::InsecureServerCredentials();
    const std::string begin = std::string(folder) + "/";
    grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    options.pem_root_certs = read_file(begin + "ca.pem");
    options.pem_key_cert_pairs.push_back({read_file(begin + "ps-0.key"), read_file(begin + "ps-0.pem")});
    return grpc::SslServerCredentials(options);
}

inline std::shared_ptr<grpc::ChannelCredentials> channel_credentials()
{
    const char *folder = getenv("TENSORLANE_BENCH_TLS");
    if (!folder) return grpc::InsecureChannelCredentials();
    const std::string begin = std::string(folder) + "/";
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = read_file(begin + "ca.pem");
    options.pem_private_key = read_file(begin + "client.key");
    options.pem_cert_chain = read_file(begin + "client.pem");
    return grpc::SslCredentials(options);
}

} // namespace bench

#endif
