# SPDX-License-Identifier: Apache-2.0
"""What the tests with foreign clients share: a worker of this project, and calls of its services with Python's gRPC and
generated code.

Every test has a worker of its own, which must end with status 0 and without a report of a sanitizer. Importing this
file ends the program with SKIPPED where gRPC or the generated code is missing.
"""
import contextlib
import ctypes
import signal
import sys

import cli_support
from cli_support import PATIENCE, wait_until, write_safetensors

try:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from tensorlane.v1 import cluster_pb2, cluster_pb2_grpc, transfer_pb2, transfer_pb2_grpc
except ImportError as missing:
    print(f"python3-grpcio or the generated modules are not there: {missing}")
    sys.exit(cli_support.SKIPPED)

try:
    XXH3 = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    XXH3.restype = ctypes.c_uint64
    XXH3.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
except (OSError, AttributeError):
    XXH3 = None
    print("libxxhash.so.0 is not there: checksums are asked for, but not computed")

Code = grpc.StatusCode
ABSENT = "never/published"


def checksum(data):
    return XXH3(bytes(data), len(data))


def meta_data(dtype, shape, data):
    return transfer_pb2.MetaData(dtype=transfer_pb2.DType.Value(dtype), dims=shape, size_bytes=len(data))


def as_tensor(meta, data):
    """Returns a tensor in the form that read_safetensors gives."""
    return transfer_pb2.DType.Name(meta.dtype), tuple(meta.dims), bytes(data)


class ForeignCase(cli_support.Case):
    def start(self, tensors=None, env=None, **settings):
        """Starts /job:ps/task:0, which publishes the tensors, in a cluster whose /job:worker/task:0 never starts."""
        self.served = self.cluster(ps=1, worker=1, extra=settings)
        publish = ()
        if tensors is not None:
            publish = ("--publish", write_safetensors(self.folder / "model.safetensors", tensors))
        self.worker = self.served.start("ps", 0, *publish, env=env)
        self.is_draining = False
        self.addCleanup(self.stop)
        self.channel = self.connect()

    def connect(self, address=None, **options):
        return self.use(grpc.insecure_channel(address or self.served.address(),
                                              options=[("grpc.enable_http_proxy", 0)], **options))

    def use(self, channel):
        """Makes the calls that follow over this channel."""
        self.addCleanup(channel.close)
        self.transfer = transfer_pb2_grpc.TransferStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.identity = cluster_pb2_grpc.ClusterStub(channel)
        return channel

    def drain(self):
        self.is_draining = True
        self.worker.send(signal.SIGTERM)

    def stop(self):
        if not self.is_draining:
            self.drain()
        self.assertEqual(self.worker.wait(), 0, self.worker.output)
        self.assertNotIn("Sanitizer", self.worker.output)

    @contextlib.contextmanager
    def refused(self, code, pattern="."):
        with self.assertRaises(grpc.RpcError) as caught:
            yield
        self.assertEqual(caught.exception.code(), code, caught.exception)
        self.assertRegex(caught.exception.details(), pattern)

    def identify(self):
        return self.identity.Identify(cluster_pb2.IdentifyRequest(), timeout=PATIENCE)

    def counter(self, name):
        return {counter.name: counter.value for counter in self.identify().counters}[name]

    def await_waiting(self, count):
        wait_until(lambda: self.counter("waiting_receivers") == count, f"{count} receivers wait")

    def check(self, service, timeout=PATIENCE):
        return self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout).status

    def receive(self, key, step=0, wants_checksum=False, timeout=PATIENCE):
        return self.transfer.Receive(transfer_pb2.ReceiveRequest(key=key, step=step, wants_checksum=wants_checksum),
                                     timeout=timeout)

    def collect(self, pieces, wants_checksum=False):
        """Joins the pieces of a Receive; returns its step and its tensor."""
        pieces, data = list(pieces), b""
        for i, piece in enumerate(pieces):
            self.assertEqual(piece.HasField("meta_data"), i == 0)
            self.assertEqual(piece.offset, len(data))
            self.assertEqual(piece.has_checksum, wants_checksum and i == len(pieces) - 1)
            data += piece.data
        self.assertEqual(pieces[0].meta_data.size_bytes, len(data))
        if wants_checksum and XXH3:
            self.assertEqual(pieces[-1].checksum, checksum(data))
        return pieces[0].step, as_tensor(pieces[0].meta_data, data)

    def publish(self, key, data, step=0, dtype="U8", shape=None, piece=1 << 20, wrong=None):
        """Publishes bytes in several messages. The argument wrong has fields of the meta-data that replace the right
        ones."""
        described = meta_data(dtype, (len(data),) if shape is None else shape, data)
        for name, value in (wrong or {}).items():
            setattr(described, name, value)
        messages = [transfer_pb2.PublishRequest(key=key, step=step, meta_data=described)]
        messages += [transfer_pb2.PublishRequest(data=data[i:i + piece]) for i in range(0, len(data), piece)]
        return self.send_publish(messages)

    def send_publish(self, messages):
        return self.transfer.Publish(iter(messages), timeout=PATIENCE).publication

    def list(self, pattern=""):
        """Returns all entries, and the number of messages in which they came."""
        messages = list(self.transfer.List(transfer_pb2.ListRequest(pattern=pattern), timeout=PATIENCE))
        return [entry for message in messages for entry in message.entries], len(messages)

    def withdraw(self, pattern):
        return self.transfer.Withdraw(transfer_pb2.WithdrawRequest(pattern=pattern), timeout=PATIENCE).count
