// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORLANE_LOG_H
#define TENSORLANE_LOG_H
#include <stddef.h>
#include <tensorlane/status.h>
#ifdef __cplusplus
extern "C" {
#endif
enum tl_log_level {
    TL_LOG_LEVEL_CONFIGURED = 0,
    TL_LOG_ERROR = 1,
    TL_LOG_WARN = 2,
    TL_LOG_INFO = 3,
    TL_LOG_DEBUG = 4,
};
enum tl_log_format {
    TL_LOG_FORMAT_CONFIGURED = 0,
    TL_LOG_KEY_VALUE = 1,
    TL_LOG_JSON = 2,
};
typedef void (*tl_log_fn)(enum tl_log_level level, const char *line, size_t len_bytes, void *context);
struct tl_log_options {
    size_t size_bytes;
    enum tl_log_level level;
    enum tl_log_format format;
    tl_log_fn write;
    void *context;
};
TL_API enum tl_status tl_log_set(const struct tl_log_options *options, struct tl_error *ret_error) TL_MUST_USE;
#ifdef __cplusplus
}
#endif
#endif
