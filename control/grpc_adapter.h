// SPDX-License-Identifier: Apache-2.0
/* What the library uses of gRPC 1.51 and the current core lacks. */
#ifndef CONTROL_GRPC_ADAPTER_H
#define CONTROL_GRPC_ADAPTER_H

#include <grpc/grpc.h>
#include <grpc/support/log.h>

#ifdef TENSORLANE_GRPC_CURRENT
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *file;
    int line;
    gpr_log_severity severity;
    const char *message;
} gpr_log_func_args;

/* Gives each line of gRPC's log to the function, from any thread; NULL: to stderr. Lines below errors are left out
 * unless GRPC_VERBOSITY says otherwise. */
void gpr_set_log_function(void (*function)(gpr_log_func_args *args));

/* Gives the server a connection, as grpc_server_add_channel_from_fd does, under the name that grpc_call_get_peer
 * returns for its calls. Ownership: the descriptor becomes gRPC's. Thread: any. */
void tl_grpc_add_connection(grpc_server *server, int fd, const char *name);

#ifdef __cplusplus
}
#endif
#endif

#endif
