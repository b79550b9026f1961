// SPDX-License-Identifier: Apache-2.0
/*
 * Status codes and errors.
 *
 * Every call that can fail returns enum tl_status and, where the caller passes a struct tl_error, fills it with
 * the same code and one sentence that names the object, the value and the remedy. The codes are gRPC's, by number
 * and by meaning.
 */
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

/* Bytes of an error message including its terminating NUL. Messages are UTF-8; a longer one is refused where it
 * enters the system (tl_worker_abort_step) or cut at a character boundary where it is composed. */
#define TL_ERROR_MESSAGE_BYTES 1024

/* An error: the code and one sentence for a person. Plain memory, nothing to free. */
struct tl_error {
    enum tl_status code;
    char message[TL_ERROR_MESSAGE_BYTES];
};

/* Returns the name of a code as gRPC spells it ("NOT_FOUND"); "UNKNOWN" for a number that is no code. Static, never
 * NULL. */
TL_API const char *tl_status_name(enum tl_status status);

#ifdef __cplusplus
}
#endif

#endif
