# SPDX-License-Identifier: Apache-2.0
"""A worker in Python that is written from the .proto files alone: the receiving side of Exchange.

Happy path: open says hello and takes the answer; request asks for tensors; take reads frames until they are complete,
and adds the bytes of each chunk, which stand one after the other in Frame.data; close ends the stream. After break_off
another worker of the same incarnation asks for the rest with the same number. A violation of the protocol raises an
AssertionError; a call that ends raises what grpc raises.
"""
import queue

from cli_support import PATIENCE
from tensorlane.v1 import transfer_pb2, transfer_pb2_grpc

PROTOCOL_VERSION = 1


class Arriving:
    """One request and what has come for it."""

    def __init__(self, key, data=b""):
        self.key, self.data = key, bytearray(data)
        self.first = None  # The chunk with the meta-data.
        self.checksum = None
        self.failure = None

    @property
    def publication(self):
        return self.first.publication if self.first else 0

    @property
    def is_over(self):
        return self.failure is not None or (self.first is not None and
                                            len(self.data) == self.first.meta_data.size_bytes)

    def add(self, chunk, data):
        if chunk.HasField("meta_data"):
            assert self.first is None, f"{self.key}: meta-data twice"
            self.first = chunk
            if chunk.offset == 0:
                self.data.clear()
        assert self.first is not None, f"{self.key}: no meta-data in the first chunk"
        assert chunk.offset == len(self.data), f"{self.key}: offset {chunk.offset}, {len(self.data)} bytes are there"
        assert len(data) == chunk.len_bytes, f"{self.key}: {len(data)} of {chunk.len_bytes} bytes in the frame"
        self.data += data
        assert len(self.data) <= self.first.meta_data.size_bytes, f"{self.key}: more bytes than announced"
        assert not chunk.has_checksum or self.is_over, f"{self.key}: the checksum comes before the last bytes"
        if chunk.has_checksum:
            self.checksum = chunk.checksum


class ForeignWorker:
    def __init__(self, channel, incarnation, name=""):
        self.incarnation, self.name = incarnation, name
        self.requests = {}  # The open requests, by number.
        self.frames = queue.SimpleQueue()
        self.is_goodbye = False
        self.call = transfer_pb2_grpc.TransferStub(channel).Exchange(iter(self.frames.get, None), timeout=PATIENCE)

    def send(self, **fields):
        self.frames.put(transfer_pb2.Frame(**fields))

    def open(self, **changes):
        """Says hello; returns the answer."""
        hello = {"protocol_version": PROTOCOL_VERSION, "name": self.name, "incarnation": self.incarnation,
                 "software_version": "0 (Python)", **changes}
        self.send(hello=transfer_pb2.Hello(**hello))
        frame = next(self.call)
        assert frame.HasField("hello"), f"the first frame has no hello: {frame}"
        return frame.hello

    def request(self, keys, step=0, first_number=1, resume=None, wants_checksum=True):
        """Asks for tensors in one frame. The argument resume is the Arriving of a broken stream, which the request
        continues."""
        wanted = []
        for number, key in enumerate(keys, first_number):
            self.requests[number] = Arriving(key, resume.data if resume else b"")
            wanted.append(transfer_pb2.Request(
                number=number, key=key, step=step, wants_checksum=wants_checksum,
                publication=resume.publication if resume else 0, resume_offset=len(resume.data) if resume else 0))
        self.send(requests=wanted)
        return list(self.requests.values())[-len(wanted):]

    def cancel(self, number):
        self.requests.pop(number)
        self.send(cancels=[number])

    def read(self):
        """Reads one frame; skips what comes for cancelled requests."""
        frame = next(self.call)
        assert not frame.HasField("hello"), "a second hello"
        self.is_goodbye |= frame.goodbye
        for failure in frame.failures:
            if failure.number in self.requests:
                self.requests[failure.number].failure = failure.status
        offset = 0
        for chunk in frame.chunks:
            if chunk.number in self.requests:
                self.requests[chunk.number].add(chunk, frame.data[offset:offset + chunk.len_bytes])
            offset += chunk.len_bytes
        assert offset == len(frame.data), f"chunks of {offset} bytes in a frame with {len(frame.data)}"
        return frame

    def take(self, acknowledges=True):
        """Reads until everything that was asked for is there; acknowledges one-shot tensors."""
        while not all(arriving.is_over for arriving in self.requests.values()):
            self.read()
        alone = [number for number, arriving in self.requests.items() if arriving.first and arriving.first.is_one_shot]
        if alone and acknowledges:
            self.send(received=alone)
        arrived, self.requests = self.requests, {}
        return list(arrived.values())

    def break_off(self):
        self.call.cancel()
        self.frames.put(None)

    def close(self):
        """Ends the stream from our side; returns the status with which the server ends it."""
        self.frames.put(None)
        for frame in self.call:
            assert not frame.chunks, f"chunks at the end: {frame.chunks}"
        return self.call.code()
