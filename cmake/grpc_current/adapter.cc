// SPDX-License-Identifier: Apache-2.0
/*
 * Makes the current core behave as the library expects of gRPC 1.51: a log function in C, of errors alone, and sockets
 * that are polled by the thread that waits for the completion queue. By default the current core leaves sockets to
 * threads of its own, so that each event costs a change of threads. The library names the connections that it adds.
 */
#include "control/grpc_adapter.h"

#include <atomic>
#include <cstdlib>
#include <string>
#include <utility>

#include <absl/log/globals.h>
#include <absl/log/internal/globals.h>
#include <absl/log/log_entry.h>
#include <absl/log/log_sink.h>
#include <absl/log/log_sink_registry.h>
#include <src/core/ext/transport/chttp2/transport/chttp2_transport.h>
#include <src/core/lib/event_engine/channel_args_endpoint_config.h>
#include <src/core/lib/experiments/config.h>
#include <src/core/lib/iomgr/endpoint.h>
#include <src/core/lib/iomgr/ev_posix.h>
#include <src/core/lib/iomgr/exec_ctx.h>
#include <src/core/lib/iomgr/tcp_client_posix.h>
#include <src/core/server/server.h>

namespace {

std::atomic<void (*)(gpr_log_func_args *)> log_function;

class FunctionSink : public absl::LogSink {
    void Send(const absl::LogEntry &entry) override
    {
        auto function = log_function.load();
        if (function == nullptr) return;
        const bool is_error = entry.log_severity() >= absl::LogSeverity::kError;
        const std::string file(entry.source_filename());
        const std::string message(entry.text_message());
        gpr_log_func_args args = {file.c_str(), entry.source_line(),
                                  is_error ? GPR_LOG_SEVERITY_ERROR : GPR_LOG_SEVERITY_INFO, message.c_str()};
        function(&args);
    }
};

/* Before main, while nothing has used gRPC yet. */
[[maybe_unused]] const bool is_prepared = [] {
    for (const char *experiment : {"event_engine_client", "event_engine_listener", "event_engine_callback_cq",
                                   "event_engine_for_all_other_endpoints"})
        grpc_core::ForceEnableExperiment(experiment, false);
    if (std::getenv("GRPC_VERBOSITY") == nullptr) absl::SetMinLogLevel(absl::LogSeverityAtLeast::kError);
    return true;
}();

} // namespace

void gpr_set_log_function(void (*function)(gpr_log_func_args *args))
{
    [[maybe_unused]] static const bool is_added = [] {
        absl::log_internal::SetInitialized(); /* before, all goes to stderr as well */
        absl::AddLogSink(new FunctionSink); /* never removed: other threads may be in it */
        return true;
    }();
    log_function = function;
    absl::SetStderrThreshold(function != nullptr ? absl::LogSeverityAtLeast::kInfinity
                                                 : absl::LogSeverityAtLeast::kInfo);
}

void tl_grpc_add_connection(grpc_server *server, int fd, const char *name)
{
    grpc_core::ExecCtx context;
    auto *core = grpc_core::Server::FromC(server);
    const auto args = core->channel_args().Set(GRPC_ARG_USE_V3_STACK, false);
    const grpc_event_engine::experimental::ChannelArgsEndpointConfig config(args);
    grpc_core::OrphanablePtr<grpc_endpoint> endpoint(
        grpc_tcp_create_from_fd(grpc_fd_create(fd, name, true), config, name));
    for (grpc_pollset *pollset : core->pollsets())
        grpc_endpoint_add_to_pollset(endpoint.get(), pollset);
    grpc_core::Transport *transport = grpc_create_chttp2_transport(args, std::move(endpoint), false);
    if (core->SetupTransport(transport, nullptr, args).ok())
        grpc_chttp2_transport_start_reading(transport, nullptr, nullptr, nullptr, nullptr);
    else
        transport->Orphan(); /* gRPC has logged why; this closes the connection */
}
