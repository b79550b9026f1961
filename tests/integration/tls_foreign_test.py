#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A worker under TLS as it appears to clients with certificates that have only Python's gRPC and the .proto files: what
security.allow gives a client's name, it may do, and nothing else."""
import cli_support
from cli_support import PATIENCE, some_tensors
from foreign_support import Code, ForeignCase, as_tensor
from foreign_worker import ForeignWorker
from tls_support import TlsCase

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1 import reflection_pb2, reflection_pb2_grpc
from tensorlane.v1 import transfer_pb2

NAME = "spiffe://example.org/client/"
SERVING = health_pb2.HealthCheckResponse.SERVING
ALLOW = [{"who": [NAME + "reader"], "what": ["read", "list"]}, {"who": [NAME + "writer"], "what": ["push", "withdraw"]},
         {"who": ["member"], "what": ["read"]}]


class Foreign(TlsCase, ForeignCase):
    def setUp(self):
        super().setUp()
        self.served = self.secured(allow=ALLOW, ps=1, worker=1)
        for name in ("reader", "writer", "stranger"):
            self.assert_run(0, "cert", "issue", "--name", name, "--folder", self.certs)
        model = cli_support.write_safetensors(self.folder / "model.safetensors", some_tensors())
        self.worker = self.served.start("ps", 0, "--publish", model)
        self.is_draining = False
        self.addCleanup(self.stop)

    def be(self, name):
        """Makes the calls that follow with the certificate of this name; None: with none."""
        read = lambda file: (self.certs / file).read_bytes()
        credentials = grpc.ssl_channel_credentials(read("ca.pem"), name and read(f"{name}.key"),
                                                   name and read(f"{name}.pem"))
        self.channel = self.use(grpc.secure_channel(self.served.address(), credentials))

    def services(self):
        """Returns what reflection says of the services."""
        question = reflection_pb2.ServerReflectionRequest(list_services="*")
        stub = reflection_pb2_grpc.ServerReflectionStub(self.channel)
        answer, = stub.ServerReflectionInfo(iter([question]), timeout=PATIENCE)
        return {service.name for service in answer.list_services_response.service}

    def described(self, symbol):
        """Returns how many files with their imports reflection names for a symbol."""
        question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
        stub = reflection_pb2_grpc.ServerReflectionStub(self.channel)
        answer, = stub.ServerReflectionInfo(iter([question]), timeout=PATIENCE)
        return len(answer.file_descriptor_response.file_descriptor_proto)

    def calls(self):
        """The calls of this project's services and of reflection, by the action that they need."""
        return {
            "read": lambda: self.collect(self.receive("scalar")),
            "list": self.list,
            "push": lambda: self.publish("pushed", b"123"),
            "withdraw": lambda: self.withdraw("pushed"),
            "peers": self.identify,
        }

    def assert_may(self, name, *actions):
        self.be(name)
        for action, call in self.calls().items():
            verb = "see peers" if action == "peers" else action
            with self.subTest(name, action=action):
                if action in actions:
                    call()
                else:
                    with self.refused(Code.PERMISSION_DENIED,
                                      f"^{NAME}{name} may not {verb} at /job:ps/task:0: security.allow gives "):
                        call()

    def test_a_client_without_a_certificate(self):
        self.be(None)
        for call in (lambda: self.check(""), *self.calls().values()):
            with self.refused(Code.UNAVAILABLE):
                call()
        self.worker.await_line("it has no certificate")

    def test_a_client_without_a_role(self):
        self.assert_may("stranger")
        self.assertEqual(self.check(""), SERVING)
        watch = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        self.assertEqual(next(watch).status, SERVING)
        watch.cancel()
        with self.refused(Code.PERMISSION_DENIED, f"{NAME}stranger may not list at /job:ps/task:0"):
            self.services()
        self.assertEqual(self.worker.output.count("a caller was refused"), 1)

    def test_clients_with_roles(self):
        self.assert_may("writer", "push", "withdraw")
        self.publish("pushed", b"123")
        self.assert_may("reader", "read", "list")
        tensors = some_tensors()
        for key, tensor in tensors.items():
            self.assertEqual(self.collect(self.receive(key, wants_checksum=True), True), (0, tensor))
        self.assertEqual({entry.key for entry in self.list()[0]}, {*tensors, "pushed"})

    def test_reflection(self):
        self.be("reader")
        services = self.services()
        self.assertIn("tensorlane.v1.Transfer", services)
        for service in services:
            self.assertGreater(self.described(service), 0)

    def foreign(self, **options):
        worker = ForeignWorker(self.channel, 7, **options)
        self.addCleanup(worker.break_off)
        return worker

    def test_a_link_of_a_member(self):
        self.be("worker-0")
        worker = self.foreign(name="/job:worker/task:0")
        worker.open()
        tensors = some_tensors()
        worker.request(list(tensors))
        for one in worker.take():
            self.assertIsNone(one.failure)
            self.assertEqual(as_tensor(one.first.meta_data, one.data), tensors[one.key])
        self.assertEqual(worker.close(), Code.OK)

    def test_a_link_under_the_name_of_another(self):
        self.be("reader")
        with self.refused(Code.FAILED_PRECONDITION,
                          f"says that it is /job:worker/task:0, and its certificate is for {NAME}reader"):
            self.foreign(name="/job:worker/task:0").open()

    def test_a_link_without_a_role(self):
        self.be("stranger")
        with self.refused(Code.PERMISSION_DENIED, f"{NAME}stranger may not read at /job:ps/task:0"):
            self.foreign().open()


if __name__ == "__main__":
    cli_support.main()
