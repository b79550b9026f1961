# SPDX-License-Identifier: Apache-2.0
"""The Mooncake peer: one owner and one reader of host memory, over Mooncake's transfer engine.

    mooncake_peer.py own FILE SIZE...   prints "ready"; registers a buffer of each size and writes into the file how to
                                        reach them
    mooncake_peer.py read FILE          prints "ready Mooncake VERSION", then answers "read BYTES COUNT" with the
                                        seconds that reading the buffer COUNT times, one after another, into one buffer
                                        took, and "read_many BYTES COUNT" with those of COUNT calls, each of which reads
                                        the last buffer in pieces of so many bytes

Without an RDMA device the engine moves bytes over TCP. What was read is compared after the time. Both end when their
standard input does.
"""
import ctypes
import importlib.metadata
import os
import pathlib
import pickle
import sys
import time

from mooncake.engine import TransferEngine

WARM_UP_COUNT = 3
PATTERN = bytes(range(251))


def create_engine():
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("Mooncake: the transfer engine cannot be initialized")
    return engine


def content(size_bytes):
    return (PATTERN * (size_bytes // len(PATTERN) + 1))[:size_bytes]


def create_buffer(engine, data):
    buffer = ctypes.create_string_buffer(data, len(data))
    if engine.register_memory(ctypes.addressof(buffer), len(data)) != 0:
        sys.exit("Mooncake: memory cannot be registered")
    return buffer


def own(path, sizes):
    engine = create_engine()
    buffers = {size: create_buffer(engine, content(size)) for size in sizes}
    places = {size: ctypes.addressof(buffer) for size, buffer in buffers.items()}
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(pickle.dumps((f"127.0.0.1:{engine.get_rpc_port()}", places)))
    unfinished.rename(path)
    print("ready", flush=True)
    sys.stdin.read()


class Reader:
    def __init__(self, path):
        self.engine = create_engine()
        self.owner, self.places = pickle.loads(path.read_bytes())
        self.buffers = {}

    def read(self, size, count):
        engine, owner, place = self.engine, self.owner, self.places[size]
        buffer = ctypes.addressof(self.buffers[size])
        for _ in range(count):
            if engine.transfer_sync_read(owner, buffer, place, size) != 0:
                sys.exit("Mooncake: a read failed")

    def read_many(self, size, piece, count):
        engine, owner, starts = self.engine, self.owner, range(0, size, piece)
        into, source = ctypes.addressof(self.buffers[size]), self.places[size]
        for _ in range(count):
            if engine.batch_transfer_sync_read(owner, [into + i for i in starts], [source + i for i in starts],
                                               [piece] * len(starts)) != 0:
                sys.exit("Mooncake: a read failed")

    def measure(self, size, piece, count):
        def run(times):
            self.read(size, times) if piece == size else self.read_many(size, piece, times)
        if size not in self.buffers:
            self.buffers[size] = create_buffer(self.engine, b"\xff" * size)
            run(WARM_UP_COUNT)
        ctypes.memset(self.buffers[size], 255, size)
        start = time.monotonic()
        run(count)
        passed = time.monotonic() - start
        if self.buffers[size].raw != content(size):
            sys.exit("Mooncake: the bytes that were read are not those of the owner")
        return passed


def main():
    role, path = sys.argv[1], pathlib.Path(sys.argv[2])
    if role == "own":
        own(path, [int(size) for size in sys.argv[3:]])
    else:
        reader = Reader(path)
        print("ready Mooncake", importlib.metadata.version("mooncake-transfer-engine-non-cuda"), flush=True)
        for line in sys.stdin:
            command, piece, count = line.split()
            size = list(reader.places)[-1] if command == "read_many" else int(piece)
            print(f"{reader.measure(size, int(piece), int(count)):.9f}", flush=True)
    os._exit(0)


main()
