// SPDX-License-Identifier: Apache-2.0
/*
 * Which gRPC core is in use, and its log lines, as lines of ours: what it calls an error is a warning here, because it
 * says so of every peer that misbehaves; everything else is for debugging.
 *
 * The address is that of the peer, where the text contains it. gRPC 1.51 gives a log function the text, its severity
 * and its place in the source, and nothing of the connection. So a line without an address in its text names no peer:
 * above all those of the parser of headers ("Error parsing metadata: ..."), and those that concern no connection.
 */
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "control/control.h"
#include "control/grpc_adapter.h"
#include "control/grpc_text.h"

static void write_line(gpr_log_func_args *args)
{
    enum tl_log_level level = args->severity == GPR_LOG_SEVERITY_ERROR ? TL_LOG_WARN : TL_LOG_DEBUG;
    const char *slash = strrchr(args->file, '/');
    char address[128];
    TL_LOG(level, "grpc", TL_STR("address", tl_grpc_text_address(args->message, address, sizeof(address))),
           TL_STR("text", args->message), TL_STR("file", slash != NULL ? slash + 1 : args->file),
           TL_I64("line", args->line));
}

const char *tl_control_grpc_core(char buffer[TL_CONTROL_GRPC_CORE_BYTES])
{
#ifdef TENSORLANE_GRPC_CURRENT
    static const char origin[] = "built in from gRPC " TENSORLANE_GRPC_CURRENT;
#else
    static const char origin[] = "of the system";
#endif
    snprintf(buffer, TL_CONTROL_GRPC_CORE_BYTES, "gRPC core %s %s", grpc_version_string(), origin);
    return buffer;
}

void tl_control_route_grpc_log(bool is_ours)
{
    gpr_set_log_function(is_ours ? write_line : NULL);
}
