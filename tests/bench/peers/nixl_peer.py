# SPDX-License-Identifier: Apache-2.0
"""The NIXL peer: one owner and one reader of host memory, over NIXL's UCX back-end.

    nixl_peer.py own FILE SIZE...   prints "ready"; registers a buffer of each size and writes into the file how to
                                    reach them
    nixl_peer.py read FILE          prints "ready NIXL VERSION", then answers "read BYTES COUNT" with the seconds that
                                    reading the buffer COUNT times, one after another, into one buffer took, and
                                    "read_many BYTES COUNT" with those of COUNT transfers, each of which reads the
                                    owner's last buffer with descriptors for so many bytes each, GAP bytes apart,
                                    because neighbours would be read as one; "make BYTES COUNT" and
                                    "make_many BYTES COUNT" make descriptors and transfer anew each time

Otherwise the descriptors of both sides and the transfer are prepared before the time starts. Memory is registered
before. What was read is compared after the time. The reader drives its transfers itself; the owner has NIXL's progress
thread. Both end when their standard input does.
"""
import importlib.metadata
import os
import pathlib
import pickle
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config
from nixl_cu12._bindings import NIXL_IN_PROG as IN_PROGRESS
from nixl_cu12._bindings import NIXL_SUCCESS as DONE

WARM_UP_COUNT = 3
GAP = 64


def create_agent(name, has_thread):
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))


def content(size_bytes):
    return numpy.resize(numpy.arange(251, dtype=numpy.uint8), size_bytes)


def own(path, sizes):
    agent = create_agent("owner", True)
    buffers = {size: content(size) for size in sizes}
    for buffer in buffers.values():
        agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
    places = {size: buffer.ctypes.data for size, buffer in buffers.items()}
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(pickle.dumps((agent.get_agent_metadata(), places)))
    unfinished.rename(path)
    print("ready", flush=True)
    sys.stdin.read()


class Reader:
    def __init__(self, path):
        self.agent = create_agent("reader", False)
        metadata, self.places = pickle.loads(path.read_bytes())
        self.owner = self.agent.add_remote_agent(metadata)
        self.owner = self.owner.decode() if isinstance(self.owner, bytes) else self.owner
        self.buffers, self.pieces, self.handles, self.starts = {}, {}, {}, {}

    def prepare(self, size, piece):
        """A transfer with descriptors for so many bytes each of the owner's buffer of this size."""
        buffer = numpy.full(size, 255, dtype=numpy.uint8)
        agent, starts = self.agent, range(0, size, piece + GAP)
        self.starts[size] = list(starts)
        agent.register_memory([(buffer.ctypes.data, size, 0, "")], "DRAM")
        ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(buffer.ctypes.data + i, piece, 0) for i in starts], "DRAM")
        theirs = agent.prep_xfer_dlist(self.owner, [(self.places[size] + i, piece, 0) for i in starts], "DRAM")
        places = list(range(len(starts)))
        self.buffers[size], self.pieces[size] = buffer, piece
        self.handles[size] = agent.make_prepped_xfer("READ", ours, places, theirs, places)

    def read(self, size, count):
        handle, post, look = self.handles[size]._handle, self.agent.agent.postXferReq, self.agent.agent.getXferStatus
        for _ in range(count):
            state = post(handle, b"")
            while state == IN_PROGRESS:
                state = look(handle)
            if state != DONE:
                sys.exit(f"NIXL: a transfer ended as {state}")

    def make(self, size, count):
        """As read, with the calls of the documentation for a transfer that is made once."""
        agent, piece, starts = self.agent, self.pieces[size], self.starts[size]
        ours, theirs = self.buffers[size].ctypes.data, self.places[size]
        for _ in range(count):
            into = agent.get_xfer_descs([(ours + i, piece, 0) for i in starts], "DRAM")
            source = agent.get_xfer_descs([(theirs + i, piece, 0) for i in starts], "DRAM")
            handle = agent.initialize_xfer("READ", into, source, self.owner)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                sys.exit(f"NIXL: a transfer ended as {state}")

    def without_gaps(self, buffer, size):
        piece = self.pieces[size]
        return buffer if piece == size else buffer.reshape(-1, piece + GAP)[:, :piece]

    def measure(self, size, piece, count, is_made):
        run = self.make if is_made else self.read
        if size not in self.buffers:
            self.prepare(size, piece)
            run(size, WARM_UP_COUNT)
        self.buffers[size].fill(255)
        start = time.monotonic()
        run(size, count)
        passed = time.monotonic() - start
        if not numpy.array_equal(self.without_gaps(self.buffers[size], size), self.without_gaps(content(size), size)):
            sys.exit("NIXL: the bytes that were read are not those of the owner")
        return passed


def main():
    role, path = sys.argv[1], pathlib.Path(sys.argv[2])
    if role == "own":
        own(path, [int(size) for size in sys.argv[3:]])
    else:
        reader = Reader(path)
        print("ready NIXL", importlib.metadata.version("nixl-cu12"), flush=True)
        for line in sys.stdin:
            command, piece, count = line.split()
            size = list(reader.places)[-1] if command.endswith("_many") else int(piece)
            print(f"{reader.measure(size, int(piece), int(count), command.startswith('make')):.9f}", flush=True)
    os._exit(0)


main()
