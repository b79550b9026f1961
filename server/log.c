// SPDX-License-Identifier: Apache-2.0
/* The program takes the log over, gRPC's included. */
#include <tensorlane/log.h>

#include "base/error.h"
#include "base/log.h"
#include "base/struct_version.h"
#include "control/control.h"

enum tl_status tl_log_set(const struct tl_log_options *caller_options, struct tl_error *ret_error)
{
    struct tl_log_options options = {.size_bytes = sizeof(options)};
    enum tl_status status = TL_OK;
    if (caller_options != NULL)
        status = tl_struct_read(&options, sizeof(options), TL_LOG_OPTIONS_FIRST_BYTES, caller_options, "tl_log_options",
                                ret_error);
    if (status != TL_OK) return status;
    if ((unsigned)options.level > TL_LOG_DEBUG)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "level %d is no enum tl_log_level", (int)options.level);
    if ((unsigned)options.format > TL_LOG_JSON)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "format %d is no enum tl_log_format", (int)options.format);
    tl_log_take_over(&options);
    tl_control_route_grpc_log(options.write != NULL);
    return TL_OK;
}
