// SPDX-License-Identifier: Apache-2.0
/*
 * What stands in the project's .proto files, for server reflection: a reader of serialized FileDescriptorProto messages
 * (google/protobuf/descriptor.proto) that knows no more of them than names.
 */
#ifndef CONTROL_PROTO_SYMBOLS_H
#define CONTROL_PROTO_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>

#include "proto_descriptors.h"

/* A piece of text in a descriptor; not NUL-terminated. */
struct tl_proto_text {
    const char *text;
    size_t len_bytes;
};

/* The file with this name; NULL when there is none. */
const struct tl_proto_file *tl_proto_file_find(const char *name);

/* The file that defines the symbol, a full name without leading dot: of a service, method, message, field, oneof, enum
 * or enum value. NULL when there is none. */
const struct tl_proto_file *tl_proto_file_of_symbol(const char *symbol);

/* The same for messages alone. */
const struct tl_proto_file *tl_proto_file_of_message(const char *name);

/* Calls visit for every file that the file imports. */
void tl_proto_file_imports(const struct tl_proto_file *file,
                           void (*visit)(void *context, const struct tl_proto_file *import), void *context);

/* Calls visit for every service in the file. */
void tl_proto_file_services(const struct tl_proto_file *file,
                            void (*visit)(void *context, struct tl_proto_text package, struct tl_proto_text service),
                            void *context);

#endif
