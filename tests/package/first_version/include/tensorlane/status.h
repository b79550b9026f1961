// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORLANE_STATUS_H
#define TENSORLANE_STATUS_H
#ifdef __cplusplus
extern "C" {
#endif
#define TL_API __attribute__((visibility("default")))
#define TL_MUST_USE __attribute__((warn_unused_result))
enum tl_status {
    TL_OK = 0,
    TL_CANCELLED = 1,
    TL_UNKNOWN = 2,
    TL_INVALID_ARGUMENT = 3,
    TL_DEADLINE_EXCEEDED = 4,
    TL_NOT_FOUND = 5,
    TL_ALREADY_EXISTS = 6,
    TL_PERMISSION_DENIED = 7,
    TL_RESOURCE_EXHAUSTED = 8,
    TL_FAILED_PRECONDITION = 9,
    TL_ABORTED = 10,
    TL_OUT_OF_RANGE = 11,
    TL_UNIMPLEMENTED = 12,
    TL_INTERNAL = 13,
    TL_UNAVAILABLE = 14,
    TL_DATA_LOSS = 15,
    TL_UNAUTHENTICATED = 16,
};
#define TL_ERROR_MESSAGE_BYTES 1024
struct tl_error {
    enum tl_status code;
    char message[TL_ERROR_MESSAGE_BYTES];
};
TL_API const char *tl_status_name(enum tl_status status);
#ifdef __cplusplus
}
#endif
#endif
