#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Turns a descriptor set into C source, for server reflection.

    embed_descriptors.py SET FOLDER

Reads the FileDescriptorSet that protoc wrote to SET and writes FOLDER/proto_descriptors.c and .h: one array with the
serialized FileDescriptorProto of every file, under the name by which other files import it.
"""
import pathlib
import sys

from google.protobuf import descriptor_pb2

HEADER = """\
// SPDX-License-Identifier: Apache-2.0
/* Generated. Every .proto file of the project, serialized as google.protobuf.FileDescriptorProto. */
#ifndef PROTO_DESCRIPTORS_H
#define PROTO_DESCRIPTORS_H

#include <stddef.h>

struct tl_proto_file {
    const char *name; /* as imported: "tensorlane/v1/transfer.proto" */
    const unsigned char *bytes; /* [len_bytes] */
    size_t len_bytes;
};

extern const struct tl_proto_file tl_proto_files[]; /* [tl_proto_file_count] */
extern const size_t tl_proto_file_count;

#endif
"""


def c_bytes(name, data):
    lines = [f"static const unsigned char {name}[] = {{"]
    for start in range(0, len(data), 16):
        lines.append("    " + " ".join(f"0x{byte:02x}," for byte in data[start:start + 16]))
    return "\n".join(lines + ["};", ""])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    files = descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(sys.argv[1]).read_bytes()).file
    parts = ["// SPDX-License-Identifier: Apache-2.0", "/* Generated. */", '#include "proto_descriptors.h"', ""]
    rows = []
    for index, file in enumerate(files):
        parts.append(c_bytes(f"file_{index}", file.SerializeToString(deterministic=True)))
        rows.append(f'    {{"{file.name}", file_{index}, sizeof(file_{index})}},')
    parts += ["const struct tl_proto_file tl_proto_files[] = {", *rows, "};", ""]
    parts += ["const size_t tl_proto_file_count = sizeof(tl_proto_files) / sizeof(tl_proto_files[0]);", ""]
    folder = pathlib.Path(sys.argv[2])
    (folder / "proto_descriptors.c").write_text("\n".join(parts), encoding="utf-8")
    (folder / "proto_descriptors.h").write_text(HEADER, encoding="utf-8")


if __name__ == "__main__":
    main()
