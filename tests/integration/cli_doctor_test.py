#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`tensorlane doctor` on loopback: a sound machine, limits that are too low, names that mislead, and peers that cannot
be reached."""
import contextlib
import os
import shutil
import signal
import socket
import struct
import threading

import cli_support
from doctor_support import DoctorCase
from tls_support import TlsCase

REQUIRE = {"protocol": "grpc+verbs", "rdma": "require"}


def was_probed_late(lines):
    """The same as cli_support.was_probed_late, of the lines of a report."""
    return any("not healthy, stage probe" in line["value"] and "refused" not in line["cause"]
               for what, line in lines.items() if what.startswith("worker "))


class Doctor(DoctorCase):
    def test_a_sound_machine(self):
        served = self.cluster(ps=1, worker=1)
        pids = {job: served.start(job).pid for job in ("ps", "worker")}
        for arguments in ([], ["--config", served.path]):
            lines = cli_support.ask_until_in_time(lambda arguments=arguments: self.doctor(*arguments), was_probed_late)
            self.assertEqual({what: line for what, line in lines.items() if line["verdict"] == "fault"}, {})
            for what in ("tensorlane", "kernel", "locked memory", "open files", "RDMA modules", "huge pages",
                         "NUMA nodes", "kernel log"):
                self.assertIn(what, lines)
        for job in ("ps", "worker"):
            task = f"/job:{job}/task:0"
            self.assertRegex(lines[f"worker {task}"]["value"], f"^healthy, stage .*, version {self.version()}$")
            self.assertEqual(lines[f"socket of {task}"]["verdict"], "ok")
            self.assertIn(f", process {pids[job]} (tensorlane)", lines[f"socket of {task}"]["value"])
            self.assertEqual(lines[f"clock of {task}"]["verdict"], "ok")
            self.assertRegex(lines[f"TCP to {task}"]["value"], "large packets both ways, segments of [0-9]+ bytes$")
        self.assertEqual(lines["host 127.0.0.1"]["value"], "127.0.0.1 (IPv4)")

    def version(self):
        return self.assert_run(0, "version").stdout.split()[1]

    def test_text(self):
        result = self.assert_run(0, "doctor")
        first, titles, *_, last = result.stdout.splitlines()
        self.assertRegex(first, r"^tensorlane [0-9.]+ on .*, \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertRegex(titles, "^VERDICT +WHAT +VALUE$")
        self.assertRegex(last, r"^0 faults, \d+ notes, \d+ unknown, \d+ ok$")
        explained = [line for line in result.stdout.splitlines() if line.startswith("    ")]
        self.assertLessEqual(max(map(len, explained), default=0), 80)

    def test_refused(self):
        self.assert_error(2, "unexpected argument", "doctor", "x")
        self.assert_error(1, "cannot open", "doctor", "--config", self.folder / "missing.json")

    def test_limit_of_open_files(self):
        served = self.cluster(ps=1, worker=1)
        line = self.doctor("-c", served.path, under=("prlimit", "--nofile=70:70"), code=4)["open files"]
        self.assertEqual((line["verdict"], line["value"]), ("fault", "70"))
        self.assertIn("a worker with 1 peers needs some 80 descriptors", line["cause"])
        self.assertIn("LimitNOFILE=", line["remedy"])
        line = self.doctor("-c", served.path, under=("prlimit", "--nofile=1000:1000"))["open files"]
        self.assertEqual((line["verdict"], line["value"]), ("note", "1000"))
        self.assertIn("limits.connections", line["remedy"])

    def test_limit_of_locked_memory(self):
        limit = ["prlimit", "--memlock=65536:65536"]
        if os.geteuid() == 0:
            if not shutil.which("setpriv"):
                self.skipTest("there is no setpriv (util-linux)")
            limit += ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
        line = self.doctor(under=limit)["locked memory"]
        self.assertEqual(line["verdict"], "note")
        self.assertEqual(line["value"], "65.5 KB")
        served = self.cluster(ps=1, worker=1, extra=REQUIRE)
        line = self.doctor("-c", served.path, under=limit, code=4)["locked memory"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("the limit is 65.5 KB", line["cause"])
        self.assertIn("LimitMEMLOCK=infinity", line["remedy"])

    def test_no_card_is_a_fault_where_it_is_required(self):
        if os.path.isdir("/sys/class/infiniband"):
            self.skipTest("this machine has RDMA devices")
        required = self.cluster(ps=1, worker=1, extra=REQUIRE)
        line = self.doctor("-c", required.path, code=4)["RDMA modules"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("the kernel knows no RDMA device", line["cause"])
        preferred = self.cluster("preferred.json", ps=1, worker=1, extra={**REQUIRE, "rdma": "prefer"})
        self.assertEqual(self.doctor("-c", preferred.path)["RDMA modules"]["verdict"], "ok")

    def test_an_operators_machine(self):
        """Limits are those of workers, and no task is here."""
        config = self.write_json({"cluster": {"ps": [f"192.0.2.7:{port}" for port in range(4000, 4064)]}, **REQUIRE})
        lines = self.doctor("-c", config, under=("prlimit", "--nofile=1000:1000"))
        self.assertEqual((lines["open files"]["verdict"], lines["locked memory"]["verdict"]), ("ok", "ok"))

    def test_a_worker_that_does_not_run(self):
        served = self.cluster(ps=1, worker=1)
        served.start("ps")
        lines = self.doctor("-c", served.path, code=4)
        line = lines["worker /job:worker/task:0"]
        self.assertEqual((line["verdict"], line["value"]), ("fault", "not healthy, stage tcp"))
        self.assertIn("refused the connection", line["cause"])
        line = lines["TCP to /job:worker/task:0"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn(f"{served.address('worker')} (IPv4) refuses the connection", line["cause"])
        line = lines["socket of /job:worker/task:0"]
        self.assertEqual(line["verdict"], "note")
        self.assertIn("tensorlane serve --config", line["remedy"])
        self.assertEqual(lines["TCP to /job:ps/task:0"]["verdict"], "ok")

    def test_a_configuration_that_lacks_a_task(self):
        served = self.cluster(ps=1, worker=1)
        served.start("ps")
        fewer = self.write_json({"cluster": {"ps": [served.address("ps")]}}, "fewer.json")
        line = self.doctor("-c", fewer)["configuration"]
        self.assertEqual((line["verdict"], line["value"]), ("note", str(fewer)))
        self.assertIn(f"the workers have /job:worker/task:0, which {fewer} lacks", line["cause"])

    def test_a_stopped_worker(self):
        served = self.cluster(ps=1)
        worker = served.start("ps")
        worker.send(signal.SIGSTOP)
        self.addCleanup(worker.send, signal.SIGCONT)
        lines = self.doctor("-c", served.path, code=4)
        line = lines["socket of /job:ps/task:0"]
        self.assertEqual((line["verdict"], line["remedy"]), ("fault", f"let it go on: kill -CONT {worker.pid}"))
        line = lines["TCP to /job:ps/task:0"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("connected, no answer", line["value"])
        self.assertIn("answers to no packet of any size", line["cause"])

    def test_another_program(self):
        for greeting in (b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", None):
            self.assertIn("no HTTP/2", self.try_server(greeting)["value"])

    def test_large_packets_are_lost(self):
        for losing, direction in ((UNKNOWN, "to"), (HEADERS, "from")):
            line = self.try_server(SETTINGS, losing)
            self.assertEqual(line["verdict"], "fault")
            self.assertIn("small packets only", line["value"])
            self.assertRegex(line["cause"], f"^packets with 500 bytes of data pass {direction} 127.0.0.1:")
            self.assertIn("tcp_mtu_probing", line["remedy"])

    def try_server(self, greeting, losing=None):
        """Returns what is said of the way to a server that says this (None: it hangs up), and answers nothing after
        such a frame."""
        server = Server(greeting, losing)
        self.addCleanup(server.close)
        config = self.write_json({"cluster": {"ps": [server.address]}})
        return self.doctor("-c", config, code=4)["TCP to /job:ps/task:0"]


class Secured(TlsCase, DoctorCase):
    def test_workers_under_tls(self):
        cluster = self.secured(ps=1, worker=1)
        workers = [cluster.start(job) for job in ("ps", "worker")]
        lines = cli_support.ask_until_in_time(lambda: self.doctor("-c", cluster.path), was_probed_late)
        for name in ("/job:ps/task:0", "/job:worker/task:0"):
            self.assertEqual(lines[f"worker {name}"]["verdict"], "ok", lines)
            line = lines[f"TCP to {name}"]
            self.assertEqual(line["verdict"], "ok", line)
            self.assertIn("large packets both ways", line["value"])
        for worker in workers:
            self.assertIsNone(worker.find("handshake failed"), worker.output)

    def test_a_worker_that_has_no_tls(self):
        cluster = self.secured(ps=1)
        plain = self.write_json({"cluster": cluster.jobs}, "plain.json")
        worker = self.spawn("serve", "--config", plain, "--job", "ps", "--task", 0)
        worker.await_line("worker ready")
        line = self.doctor("-c", cluster.path, code=4)["TCP to /job:ps/task:0"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("connected, no TLS", line["value"])
        self.assertIn("no TLS connection", line["cause"])
        self.assertIn("security.tls", line["remedy"])

    def test_a_worker_that_makes_no_handshake(self):
        cluster = self.secured(ps=1)
        with socket.create_server(("127.0.0.1", cluster.port())):
            line = self.doctor("-c", cluster.path, code=4)["TCP to /job:ps/task:0"]
        self.assertIn("connected, no answer", line["value"])


DATA, HEADERS, PING, UNKNOWN = 0, 1, 6, 0xBB
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE_BYTES = 24


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


SETTINGS = frame(4, 0, 0)


class Server:
    """Speaks as much HTTP/2 as `doctor` does. After a frame of the kind that it loses, it answers nothing any more,
    unless the segments of the connection are small: so does a hop that drops large packets."""

    def __init__(self, greeting, losing):
        self.greeting, self.losing = greeting, losing
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self.listener.accept()[0],), daemon=True).start()

    def _serve(self, connection):
        is_small = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 500
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as stream:
            if self.greeting is None:
                return
            connection.sendall(self.greeting)
            stream.read(PREFACE_BYTES)
            is_lost = False
            while head := stream.read(9):
                payload = stream.read(int.from_bytes(head[:3], "big"))
                kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
                is_lost = is_lost or (kind == self.losing and not is_small)
                if is_lost:
                    continue
                if kind == PING and not flags & ACK:
                    connection.sendall(frame(PING, ACK, 0, payload))
                if flags & END_STREAM and kind == DATA:
                    connection.sendall(frame(DATA, 0, number, bytes(3000)) +
                                       frame(HEADERS, END_STREAM | END_HEADERS, number))


if __name__ == "__main__":
    cli_support.main()
