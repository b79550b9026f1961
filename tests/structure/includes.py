#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Which file may include which: the table of docs/design.md, enforced.

Project headers are included by their path from the root. The rules are first tried on lines that break them.
"""
import fnmatch
import re

import source

# For each folder, the project folders that it may include besides itself and <tensorlane/...>.
FOLDERS = {
    "base": [],
    "tensor": ["base"],
    "config": ["base"],
    "security": ["base"],
    "cmake": ["control"],
    "control": ["base", "tensor", "security", "proto"],
    "dataplane": ["base", "tensor"],
    "server": ["base", "tensor", "config", "security", "control", "dataplane"],
    "include": [],
    "python": [],
    "examples": [],
    "tests": ["base", "tensor", "config", "security", "control", "dataplane", "server", "proto", "fakes", "fuzz"],
}

# For each subfolder, the parts of its own top-level folder that it may include besides itself. "dataplane" and "server"
# stand for the files that lie directly in these folders.
SUBFOLDERS = {
    "dataplane": ["dataplane/memory"],
    "dataplane/engine": ["dataplane", "dataplane/memory"],
    "dataplane/memory": ["dataplane"],
    "dataplane/local": ["dataplane", "dataplane/memory"],
    "dataplane/verbs": ["dataplane"],
    "server/progress": [],
    "server/rendezvous": [],
    "server/peers": ["server", "server/transports"],
    "server/transports": ["server", "server/peers", "server/progress", "server/transfers"],
    "server/transfers": ["server", "server/peers", "server/progress", "server/transports"],
}

# For each header from elsewhere, the only files that may include it.
FOREIGN = {
    "grpc/*": ["control/*", "cmake/grpc_current/*", "tests/*"],
    "absl/*": ["cmake/grpc_current/*"],
    "grpc++/*": ["tests/bench/*"],
    "grpcpp/*": ["tests/bench/*"],
    "openssl/*": ["security/*", "tests/*"],
    "protobuf-c/*": ["control/*", "tests/*"],
    "google/protobuf*": ["tests/bench/*"],
    "infiniband/*": ["dataplane/verbs/*", "tests/rdma_vm/*"],
    "rdma/*": ["dataplane/verbs/*"],
    "cuda*": ["tests/fakes/cuda/*"],
    "Python.h": ["python/python.h"],
    "jansson.h": ["config/*", "tensor/safetensors*", "server/cli/json*", "tests/*"],
}

# The same for headers of ours that show what one of those libraries declares.
OWN = {
    "tensor/cuda*": ["tensor/cuda*", "tests/*"],
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def folder_of(header):
    """Returns the project folder that an included path belongs to, or None for a header from elsewhere."""
    if header.endswith(".pb-c.h") or header == "proto_descriptors.h":
        return "proto"
    first = header.split("/")[0]
    return first if "/" in header and first in [*FOLDERS, "fakes", "fuzz"] else None


def subfolder_of(path):
    """Returns the subfolder of a file, or its top-level folder when it is in none."""
    return path.rsplit("/", 1)[0]


def is_among(path, patterns):
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def judge(path, quote, header):
    """Returns why `path` may not include `header`, or None."""
    own = path.split("/")[0]
    target = folder_of(header)
    if quote == "<" and header.startswith("tensorlane/"):
        return None
    for pattern, allowed in OWN.items():
        if fnmatch.fnmatch(header, pattern) and not is_among(path, allowed):
            return f"{pattern} belongs only in {', '.join(allowed)}"
    if target is not None:
        if own in ("include", "examples"):
            return "only <tensorlane/...> and the system's headers belong here"
        part, other = subfolder_of(path), subfolder_of(header)
        if target == own and part != other and part in SUBFOLDERS and other not in SUBFOLDERS[part]:
            return f"{part} may not include {other}"
        return None if target == own or target in FOLDERS[own] else f"{own} may not include {target}"
    if quote == '"' and not path.startswith("tests/bench/"):
        return "project headers are included by their path from the root"
    for pattern, allowed in FOREIGN.items():
        if fnmatch.fnmatch(header, pattern) and not is_among(path, allowed):
            return f"<{pattern}> belongs only in {', '.join(allowed)}"
    return None


FORBIDDEN = [
    ("base/text.c", '"', "tensor/tensor.h"), ("tensor/tensor.c", '"', "config/config.h"),
    ("config/config.c", '"', "tensor/tensor.h"), ("control/stream.c", '"', "server/rendezvous/rendezvous.h"),
    ("control/stream.c", '"', "dataplane/engine/engine.h"), ("dataplane/engine/engine.c", '"', "control/control.h"),
    ("dataplane/engine/engine.c", '"', "tensorlane/v1/transfer.pb-c.h"), ("server/worker.c", "<", "grpc/grpc.h"),
    ("server/worker.c", '"', "tensorlane/v1/transfer.pb-c.h"), ("server/worker.c", '"', "proto_descriptors.h"),
    ("server/worker.c", "<", "protobuf-c/protobuf-c.h"), ("dataplane/engine/engine.c", "<", "infiniband/verbs.h"),
    ("server/worker.c", "<", "jansson.h"), ("base/log.c", '"', "text.h"),
    ("include/tensorlane/worker.h", '"', "base/log.h"),
    ("examples/pull.c", '"', "server/rendezvous/rendezvous.h"), ("control/stream.c", "<", "grpcpp/grpcpp.h"),
    ("server/worker.c", "<", "cuda_runtime.h"), ("tensor/cuda_device.c", "<", "cuda_runtime_api.h"),
    ("tensor/tensor.c", '"', "tensor/cuda_load.h"), ("control/wire.c", '"', "tensor/cuda_interface.h"),
    ("dataplane/local/local.c", '"', "dataplane/engine/engine.h"),
    ("dataplane/verbs/verbs_pair.c", '"', "dataplane/memory/memory.h"),
    ("dataplane/reactor.h", '"', "dataplane/engine/engine.h"),
    ("server/rendezvous/rendezvous.c", '"', "server/worker_internal.h"),
    ("security/tls_context.c", '"', "config/config.h"), ("control/tls.c", "<", "openssl/ssl.h"),
    ("config/config.c", '"', "security/certificate_name.h"), ("python/worker.c", '"', "server/worker_internal.h"),
    ("python/worker.c", "<", "Python.h"),
]
ALLOWED = [
    ("base/text.c", '"', "base/text.h"), ("control/stream.c", "<", "grpc/grpc.h"), ("base/error.c", "<", "string.h"),
    ("control/stream.c", '"', "tensorlane/v1/transfer.pb-c.h"), ("server/worker.c", '"', "control/control.h"),
    ("dataplane/engine/conn.c", '"', "dataplane/provider.h"), ("server/peers/peer.c", '"', "server/worker_internal.h"),
    ("dataplane/verbs/verbs_queue.c", "<", "infiniband/verbs.h"), ("server/cli/json.c", "<", "jansson.h"),
    ("tensor/cuda_copy.c", '"', "tensor/cuda_internal.h"), ("server/worker.c", '"', "tensor/device.h"),
    ("security/tls_context.c", "<", "openssl/ssl.h"), ("control/tls.c", '"', "security/tls_context.h"),
    ("tests/unit/list_test.c", '"', "fakes/clock.h"), ("examples/pull.c", "<", "tensorlane/tensorlane.h"),
]


def main():
    problems = [f"rule does not catch: {case}" for case in FORBIDDEN if judge(*case) is None]
    problems += [f"rule refuses: {case}: {judge(*case)}" for case in ALLOWED if judge(*case) is not None]
    checked = 0
    for path in source.files(".c", ".h", ".cc"):
        if path.parts[0] not in FOLDERS:
            problems.append(f"{path}: no rule for its folder")
            continue
        text = source.read(path)
        for match in INCLUDE.finditer(text):
            checked += 1
            reason = judge(str(path), match[1], match[2])
            if reason:
                line = text.count("\n", 0, match.start(1)) + 1
                problems.append(f"{path}:{line}: {match[2]}: {reason}")
    source.finish(problems, checked)


if __name__ == "__main__":
    main()
