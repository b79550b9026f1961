#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane health` of clusters in which nothing is wrong: it raises no alarm, whatever their shape, their protocols,
their addresses and what they are doing."""
import contextlib
import json
import signal
import socket
import threading
import time
import unittest

import cli_support
from cli_support import ask_until_in_time, environment, free_ports, run, was_probed_late, write_safetensors

# Health waits longer where many workers share two processors with other tests.
PATIENT = ("-connect-timeout", "60s", "-rpc-timeout", "60s")
# What a worker says of a peer that it has tried for too long.
GIVEN_UP = "the time was over before it was probed"


class Forwarder:
    """Ports that forward to others, as those of ssh -L and of containers do."""

    def __init__(self, case):
        self.sockets = []
        case.addCleanup(self._close)

    def forward(self, port):
        """Returns another port that leads to this one."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()
        return listener.getsockname()[1]

    def _accept(self, listener, port):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", port))
            except OSError:
                client.close()
                continue
            self.sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source, sink):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 18):
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _close(self):
        for end in self.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class SoundCase(cli_support.Case):
    def addresses(self, count, host="127.0.0.1"):
        return [f"{host}:{port}" for port in free_ports(count)]

    def file(self, name, cluster, **settings):
        return self.write_json({"cluster": cluster, **settings}, f"{name}.json")

    def spawn_worker(self, path, task, *arguments, **options):
        job, index = task.split(":")
        return self.spawn("serve", "--config", path, "--job", job, "--task", index, *arguments, **options)

    def start(self, files, *arguments):
        """Starts workers at the same time: files maps "ps:0" to the configuration of that worker."""
        workers = {task: self.spawn_worker(path, task, *arguments) for task, path in files.items()}
        for worker in workers.values():
            worker.await_line("worker ready")
        return workers

    def start_all(self, path):
        cluster = json.loads(path.read_text())["cluster"]
        return self.start({f"{job}:{index}": path for job, tasks in cluster.items() for index in range(len(tasks))})

    def find_sound(self, path, notes=None, was_late=was_probed_late):
        """Health finds nothing but notes on these workers, and every worker has tried the peers that it knows. Returns
        the rows."""
        result = ask_until_in_time(lambda: run("health", "--config", path, "--json", *PATIENT), was_late)
        shown = json.loads(result.stdout)
        for row in shown["workers"]:
            note = (notes or {}).get(row["name"], "")
            self.assertEqual((row["healthy"], row["reason"], row.get("troubles")), (True, note, []), result.stdout)
            self.assertEqual(row["remedy"] == "", note == "", result.stdout)
            if len(shown["workers"]) > 1:
                tried = {probe["peer"] for probe in row["probes"]}
                self.assertEqual(tried, {peer["name"] for peer in row["peers"]} - {row["name"]}, result.stdout)
                self.assertEqual([probe for probe in row["probes"] if not probe["ok"]], [], result.stdout)
        self.assertEqual((result.returncode, shown["healthy"], shown["note"], result.stderr), (0, True, "", ""))
        return shown["workers"]

    def assert_sound(self, path, notes=None):
        """The same, and no probe was given up."""
        rows = self.find_sound(path, notes, lambda result: was_probed_late(result) or GIVEN_UP in result.stdout)
        for row in rows:
            self.assertEqual({probe["reason"] for probe in row.get("probes", [])} - {""}, set(), rows)

    def assert_sound_table(self, path):
        """What an operator reads has no line besides the rows and their number."""
        output = self.assert_probed(0, "health", "--config", path, *PATIENT).stdout.splitlines()
        count = sum(len(tasks) for tasks in json.loads(path.read_text())["cluster"].values())
        self.assertEqual(output[-1], f"{count} of {count} workers are healthy")
        self.assertEqual(len(output), 1 + count + 1, output)


class Protocols(SoundCase):
    def check(self, name, **settings):
        ps, *workers = self.addresses(3)
        path = self.file(name, {"ps": [ps], "worker": workers}, **settings)
        self.start_all(path)
        self.assert_sound(path)
        self.assert_sound_table(path)

    def test_grpc(self):
        self.check("grpc", protocol="grpc")

    def test_local(self):
        self.check("local", protocol="grpc+local", connect="eager")

    def test_auto_and_lazy(self):
        self.check("lazy", connect="lazy")

    def test_auto_and_eager(self):
        self.check("eager", connect="eager")

    def test_mixed(self):
        """One speaks gRPC only, one shared memory, and one chooses."""
        self.check("mixed", connect="eager", jobs={
            "ps": {"protocol": "grpc"}, "worker": {"tasks": {"0": {"protocol": "grpc+local"}}}})

    def test_only_some_are_eager(self):
        self.check("some", jobs={"worker": {"connect": "eager"}})


class Addresses(SoundCase):
    def test_ipv6_only(self):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            self.skipTest(f"no IPv6: {error}")
        ps, worker = self.addresses(2, "[::1]")
        path = self.file("ipv6", {"ps": [ps], "worker": [worker]}, connect="eager")
        self.start_all(path)
        self.assert_sound(path)

    def test_names(self):
        """localhost is an address of IPv4, and one of IPv6 where there is IPv6; this machine has a name, too."""
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except socket.gaierror as error:
            self.skipTest(f"the name of this machine, {name}, has no address: {error}")
        ps, worker = self.addresses(2, "localhost")
        chief, = self.addresses(1, name)
        path = self.file("names", {"ps": [ps], "worker": [worker], "chief": [chief]})
        self.start_all(path)
        self.assert_sound(path)

    def test_forwarded_ports(self):
        """Each worker is dialled at another port than it listens at, one of them by name. A worker that starts later is
        dialled in vain until then."""
        forwarder = Forwarder(self)
        ports = free_ports(2)
        ps, worker = (f"{host}:{forwarder.forward(port)}" for host, port in zip(("127.0.0.1", "localhost"), ports))
        path = self.file("forwarded", {"ps": [ps], "worker": [worker]}, connect="eager")
        workers = [self.spawn_worker(path, task, "--listen", f"127.0.0.1:{port}")
                   for task, port in zip(("ps:0", "worker:0"), ports)]
        for process in workers:
            process.await_line("worker ready")
        self.assert_sound(path)

    def test_the_operators_addresses_are_others(self):
        forwarder = Forwarder(self)
        ports = free_ports(2)
        inside, outside = ({"ps": [f"127.0.0.1:{ps}"], "worker": [f"localhost:{worker}"]}
                           for ps, worker in (ports, map(forwarder.forward, ports)))
        self.start_all(self.file("inside", inside))
        self.assert_sound(self.file("outside", outside))

    def test_a_wildcard_is_listened_at(self):
        ps, worker = self.addresses(2)
        listens = {job: {"listen": "0.0.0.0:" + address.rsplit(":", 1)[1]}
                   for job, address in (("ps", ps), ("worker", worker))}
        path = self.file("wildcard", {"ps": [ps], "worker": [worker]}, jobs=listens)
        self.start_all(path)
        self.assert_sound(path)


class Shapes(SoundCase):
    def test_one_worker(self):
        path = self.file("one", {"ps": self.addresses(1)})
        self.start_all(path)
        self.assert_sound(path)
        self.assert_sound_table(path)

    def test_all_kinds_of_tasks(self):
        """The evaluator of TensorFlow is in its own file only."""
        ps, worker, chief, evaluator = self.addresses(4)
        cluster = {"ps": [ps], "worker": [worker], "chief": [chief]}
        path = self.file("cluster", cluster)
        own = self.file("evaluator", {**cluster, "evaluator": [evaluator]})
        self.start({"ps:0": path, "worker:0": path, "chief:0": path, "evaluator:0": own})
        self.assert_sound(own)

    def test_a_parameter_server_that_only_answers(self):
        """Its file has no workers, before the first transfer and after it. It has a note, because this would be a fault
        if it should ask them."""
        ps, first, second = self.addresses(3)
        path = self.file("all", {"ps": [ps], "worker": [first, second]},
                         jobs={"worker": {"tasks": {"0": {"connect": "eager"}}}})
        self.start({"ps:0": self.file("ps", {"ps": [ps]}), "worker:0": path, "worker:1": path})
        self.assert_sound(path, {
            "/job:ps/task:0": "its cluster.json lacks worker, that of /job:worker/task:0 does not"})

    def test_each_worker_has_the_part_that_it_needs(self):
        ps, first, second = self.addresses(3)
        path = self.file("all", {"ps": [ps], "worker": [first, second]})
        self.start({"ps:0": path, "worker:0": self.file("first", {"ps": [ps], "worker": {"0": first}}),
                    "worker:1": self.file("second", {"ps": [ps], "worker": {"1": second}})})
        self.assert_sound(path)

    def test_tf_config(self):
        """Both ways to say the protocol; without one it is gRPC."""
        for protocol, given in (("grpc", {}), ("auto", {"rpc_layer": "auto"})):
            ps, worker = self.addresses(2)
            cluster = {"ps": [ps], "worker": [worker]}
            workers = [self.spawn("serve", env=environment(TF_CONFIG=json.dumps(
                {"cluster": cluster, "task": {"type": job, "index": 0}, **given}))) for job in cluster]
            for process in workers:
                process.await_line("worker ready")
            self.assert_sound(self.file(protocol, cluster, protocol=protocol))


class Life(SoundCase):
    def test_started_one_after_the_other_and_again(self):
        """A worker that was missed in vain is forgotten as soon as it is there."""
        ps, worker = self.addresses(2)
        path = self.file("late", {"ps": [ps], "worker": [worker]}, connect="eager")
        first = self.start({"ps:0": path})["ps:0"]
        first.await_line("peer cannot be reached")
        self.assert_run(4, "health", "--config", path, *PATIENT)
        second = self.start({"worker:0": path})["worker:0"]
        self.assert_sound(path)
        for number in (signal.SIGKILL, signal.SIGTERM):
            second.await_line("peer up")
            second.stop(number)
            second = self.start({"worker:0": path})["worker:0"]
            self.assert_sound(path)

    def test_a_large_pull(self):
        """While it stands still, because its receiver does, and while it goes on."""
        cluster = self.cluster(ps=1, worker=1, extra={**cli_support.OVER_GRPC, "connect": "eager"})
        size = 256 << 20
        model = write_safetensors(self.folder / "model.safetensors", {"x": ("U8", (size,), b"")}, {"x": size})
        cluster.start("ps", 0, "--publish", model)
        cluster.start("worker")
        gate = cli_support.Gate(self, cluster.port("ps"), 1 << 20)
        pull = self.spawn("pull", "--address", gate.address, "-o", self.folder / "out.safetensors")
        gate.await_held()
        self.assert_sound(cluster.path)
        gate.open()
        self.assert_sound(cluster.path)
        self.assertEqual(pull.wait(), 0, pull.output)


class Old(SoundCase):
    def test_workers_that_have_run_for_long(self):
        """After half a minute a pair that is not connected counts. Their links have been idle meanwhile."""
        cli_support.wait_until(lambda: time.monotonic() - EARLY.ready > 31, "half a minute")
        self.assert_sound(EARLY.path)
        self.assert_sound_table(EARLY.path)


class Early(SoundCase):
    """Workers that are started first and asked last."""

    def begin(self):
        self.setUp()
        ps, *workers = self.addresses(3)
        self.path = self.file("early", {"ps": [ps], "worker": workers}, jobs={"ps": {"connect": "eager"}},
                              timeouts={"keepalive": "1s"})
        self.start_all(self.path)
        self.ready = time.monotonic()


EARLY = Early()


def setUpModule():  # The name is that of unittest.
    EARLY.begin()
    unittest.addModuleCleanup(EARLY.doCleanups)


if __name__ == "__main__":
    cli_support.main()
