#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane up: it starts all workers of this machine, shows their logs, and they end together."""
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import subprocess

import cli_support
from cli_support import HEALTH, environment, free_ports, wait_until, write_safetensors
from tls_support import TlsCase


def children_of(pid):
    """Returns the process ids of the children, oldest first."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
        return [int(child) for child in children.read().split()]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Up(TlsCase):
    def up(self, cluster, *arguments, **options):
        launcher = self.spawn("up", "--config", cluster.path, *arguments, **options)
        launcher.await_line("all ready")
        return launcher

    def test_all_are_ready(self):
        write_safetensors(self.folder / "model.safetensors", {"a": ("F32", (1,), b"abcd")})
        cluster = self.cluster(ps=1, worker=2, extra={"jobs": {"ps": {"publish": ["model.safetensors"]}}})
        launcher = self.up(cluster)
        self.assertRegex(launcher.output, f"{cluster.path}: 3 of 3 workers run here, all ready after ")
        for name in ("/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"):
            self.assertRegex(launcher.output, rf"(?m)^{name} \| ts=.* msg=\"worker ready\" name={name} ")
        self.assert_probed(0, *HEALTH, "--config", cluster.path)
        self.assertIn("1 tensor,", self.assert_run(0, "ls", "--config", cluster.path, "--from", "ps:0").stdout)
        self.assertEqual(launcher.stop(), 0)

    def test_with_certificates(self):
        """All workers of a secured cluster start, connect and stop; a tool without a certificate is refused."""
        cluster = self.secured(ps=1, worker=2, extra={"connect": "eager"})
        launcher = self.up(cluster)
        self.assertNotIn("authenticates nobody", launcher.output)
        self.assert_probed(0, *HEALTH, "--config", cluster.path)
        shown = self.assert_probed(0, *HEALTH, "--pairs", "--config", cluster.path).stdout
        self.assertIn("3 of 3 workers are healthy", shown)
        self.assert_error(1, "security.tls", "ls", "--address", cluster.address())
        self.assertEqual(launcher.stop(), 0)
        self.assertEqual(launcher.output.count("worker stopped"), 3, launcher.output)

    def test_a_task_without_a_certificate(self):
        cluster = self.secured(ps=1, worker=1)
        (self.certs / "worker-0.key").unlink()
        launcher = self.spawn("up", "--config", cluster.path)
        self.assertEqual(launcher.wait(), 1)
        self.assertRegex(launcher.output, r"/job:worker/task:0 \| tensorlane serve: .*worker-0\.key")

    def test_json(self):
        """Every line of stderr is an object that names the task; stdout says when all workers are ready."""
        cluster = self.cluster(ps=1, worker=2, extra={"jobs": {"ps": {"log": {"format": "key-value"}}}})
        with open(self.folder / "log", "w+", encoding="utf-8") as log:
            launcher = subprocess.Popen([cli_support.PROGRAM, "up", "--config", cluster.path, "--log-format", "json"],
                                        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
            self.addCleanup(launcher.stdout.close)
            self.addCleanup(launcher.wait)
            self.addCleanup(launcher.kill)
            self.assertIn(b"all ready", launcher.stdout.readline())
            launcher.send_signal(signal.SIGTERM)
            self.assertEqual(launcher.wait(cli_support.PATIENCE), 0)
            log.seek(0)
            lines = [json.loads(line) for line in log]
        names = {"/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"}
        for message in ("worker ready", "worker stopped"):
            found = [line for line in lines if line["msg"] == message]
            self.assertEqual({line["task"] for line in found}, names)
            self.assertTrue(all(line["task"] == line["name"] for line in found))
        self.assertEqual({next(iter(line)) for line in lines}, {"task"})

    def test_json_of_one_task(self):
        cluster = self.cluster(ps=1, worker=1, extra={"jobs": {"ps": {"log": {"format": "json"}}}})
        launcher = self.up(cluster)
        self.assertEqual(launcher.stop(), 0)
        lines = [json.loads(line) for line in launcher.lines if line.startswith('{"task":"/job:ps/task:0"')]
        self.assertIn(("worker ready", "/job:ps/task:0"), [(line["msg"], line.get("name")) for line in lines])
        self.assertRegex(launcher.output, r"(?m)^/job:worker/task:0 \| ts=.* msg=\"worker ready\"")

    def test_json_when_a_worker_says_something_else(self):
        cluster = self.cluster(ps=1)
        with socket.create_server(("127.0.0.1", cluster.port())):
            launcher = self.spawn("up", "--config", cluster.path, "--log-format", "json")
            self.assertEqual(launcher.wait(), 1)
        said = json.loads(launcher.find("another process uses the address"))
        self.assertEqual(said["task"], "/job:ps/task:0")
        self.assertRegex(said["msg"], "^tensorlane serve: ")

    def test_the_log_has_no_reader(self):
        """The pipe holds one page only; neither the workers nor their end wait for it."""
        cluster = self.cluster(ps=1, worker=2)
        read_end, write_end = os.pipe()
        self.addCleanup(os.close, read_end)
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write_end, b"." * 4096)
        launcher = subprocess.Popen([cli_support.PROGRAM, "up", "--config", cluster.path, "--log-level", "debug"],
                                    env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=write_end)
        os.close(write_end)
        self.addCleanup(launcher.stdout.close)
        self.addCleanup(launcher.wait)
        self.addCleanup(launcher.kill)
        self.assertIn(b"all ready", launcher.stdout.readline())
        self.assert_probed(0, *HEALTH, "--config", cluster.path)
        launcher.send_signal(signal.SIGTERM)
        self.assertEqual(launcher.wait(cli_support.PATIENCE), 0)

    def test_more_workers_than_a_socket_queues(self):
        cluster = self.cluster(worker=24)
        launcher = self.up(cluster)
        self.assertRegex(launcher.output, ": 24 of 24 workers run here")
        self.assertEqual(launcher.stop(), 0)
        self.assertEqual(launcher.output.count("worker stopped"), 24)
        self.assertNotIn("level=warn", launcher.output)

    def test_all_end_together(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            cluster = self.cluster(ps=1, worker=2)
            launcher = self.up(cluster)
            children = children_of(launcher.pid)
            self.assertEqual(len(children), 3)
            names = [pathlib.Path(f"/proc/{child}/comm").read_text(encoding="ascii") for child in children]
            self.assertEqual(names, ["tensorlane\n"] * 3)
            self.assertEqual(launcher.stop(number), 0)
            self.assertEqual([child for child in children if is_running(child)], [])
            self.assertEqual(launcher.output.count("worker stopped"), 3, launcher.output)

    def test_ctrl_c_reaches_only_the_launcher(self):
        launcher = self.up(self.cluster(ps=1, worker=1))
        for child in children_of(launcher.pid):
            self.assertNotEqual(os.getpgid(child), os.getpgid(launcher.pid))

    def test_one_that_is_killed_ends_all(self):
        launcher = self.up(self.cluster(ps=1, worker=1))
        children = children_of(launcher.pid)
        os.kill(children[1], signal.SIGKILL)
        self.assertEqual(launcher.wait(), 1)
        self.assertIn("tensorlane up: /job:worker/task:0 ended with signal 9 (Killed); stopping all", launcher.lines)
        self.assertFalse(is_running(children[0]))

    def test_one_that_ends_unasked_ends_all(self):
        launcher = self.up(self.cluster(ps=1, worker=1))
        os.kill(children_of(launcher.pid)[0], signal.SIGTERM)
        self.assertEqual(launcher.wait(), 1)
        self.assertIn("/job:ps/task:0 ended with exit status 0; stopping all", launcher.output)

    def test_one_that_does_not_start(self):
        cluster = self.cluster(ps=1, worker=1)
        with socket.create_server(("127.0.0.1", cluster.port("worker"))):
            launcher = self.spawn("up", "--config", cluster.path)
            self.assertEqual(launcher.wait(), 1)
        self.assertIn("/job:worker/task:0 ended with exit status 1", launcher.output)
        self.assertRegex(launcher.output, r"/job:worker/task:0 \| tensorlane serve: .*another process uses the address")

    def test_one_that_hangs_is_killed(self):
        cluster = self.cluster(ps=1, worker=1, extra={"timeouts": {"drain": "100ms"}})
        launcher = self.up(cluster)
        child = children_of(launcher.pid)[0]
        os.kill(child, signal.SIGSTOP)
        self.assertEqual(launcher.stop(), 1)
        self.assertIn("workers that did not stop in time were killed", launcher.output)
        self.assertFalse(is_running(child))

    def test_not_ready_in_time(self):
        cluster = self.cluster(ps=1)
        launcher = self.spawn("up", "--config", cluster.path, "--timeout", "1ns")
        self.assertEqual(launcher.wait(), 1)
        self.assertIn("/job:ps/task:0 is not ready in time; stopping all", launcher.output)

    def test_the_launcher_is_killed(self):
        launcher = self.up(self.cluster(ps=1, worker=1))
        children = children_of(launcher.pid)
        launcher.send(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, children)), "the children have ended")

    def test_only_some(self):
        cluster = self.cluster(ps=1, worker=2)
        for only, expected in ((["worker"], 2), (["worker:1"], 1), (["/job:ps/task:0", "worker:0"], 2)):
            arguments = [part for name in only for part in ("--only", name)]
            launcher = self.up(cluster, *arguments)
            self.assertRegex(launcher.output, f": {expected} of 3 workers run here")
            self.assertEqual(launcher.stop(), 0)

    def test_only_those_that_are_not_there(self):
        config = self.cluster(ps=1, worker=2).path
        self.assert_error(1, "has no job 'wroker'; there is 'worker'", "up", "--config", config, "--only", "wroker")
        self.assert_error(1, "worker", "up", "--config", config, "--only", "worker:9")

    def test_only_tasks_of_this_machine(self):
        port = free_ports(1)[0]
        path = self.write_json({"cluster": {"ps": [f"127.0.0.1:{port}", "192.0.2.7:4000"]}})
        launcher = self.spawn("up", "--config", path)
        launcher.await_line("1 of 2 workers run here")
        self.assertEqual(launcher.stop(), 0)
        self.assert_error(1, "no host of the named tasks is this machine", "up", "--config", path, "--only", "ps:1")
        path = self.write_json({"cluster": {"ps": ["192.0.2.7:4000"]}})
        self.assert_error(1, "no host of its tasks is this machine", "up", "--config", path)

    def test_hosts_by_name_and_version_6(self):
        names = ["localhost"] + (["[::1]"] if self.has_version_6() else [])
        ports = free_ports(len(names))
        tasks = [f"{name}:{port}" for name, port in zip(names, ports)]
        launcher = self.spawn("up", "--config", self.write_json({"cluster": {"ps": tasks}}))
        launcher.await_line(f"{len(names)} of {len(names)} workers run here")
        self.assertEqual(launcher.stop(), 0)

    def has_version_6(self):
        try:
            with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
                probe.bind(("::1", 0))
            return True
        except OSError:
            return False

    def test_bad_configuration(self):
        self.assert_error(1, "nowhere.json", "up", "--config", self.folder / "nowhere.json")
        bad = self.folder / "bad.json"
        bad.write_text("{}")
        self.assert_error(1, "bad.json:1:1", "up", "--config", bad)
        os.mkfifo(self.folder / "pipe")
        for once in ("-", self.folder / "pipe"):
            self.assert_error(2, f"--config {once}: every worker reads the file by itself", "up", "--config", once)

    def test_from_tf_config(self):
        port = free_ports(1)[0]
        launcher = self.spawn("up", env=environment(TF_CONFIG=json.dumps({"cluster": {"ps": [f"127.0.0.1:{port}"]}})))
        launcher.await_line("TF_CONFIG: 1 of 1 workers run here")
        self.assertEqual(launcher.stop(), 0)

    def test_flags_for_the_workers_that_are_wrong(self):
        """Nothing is started."""
        cluster = self.cluster(ps=1)
        for flag, value in (("--log-level", "debugg"), ("--log-format", "xml")):
            result = self.assert_error(2, f"{flag} {value}: there are ", "up", "--config", cluster.path, flag, value)
            self.assertNotIn("ps:0", result.stderr)

    def test_flags_reach_the_workers(self):
        launcher = self.up(self.cluster(ps=1), "--log-format", "json", "--log-level", "error")
        self.assertRegex(launcher.output, r'(?m)^\{"task":"/job:ps/task:0","ts":.*"msg":"worker ready"')
        self.assertEqual(launcher.stop(), 0)
        self.assertNotIn("worker stopped", launcher.output)

    def test_it_is_itself_a_service(self):
        path = str(self.folder / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(cli_support.PATIENCE)
            launcher = self.up(self.cluster(ps=1, worker=1), env=environment(NOTIFY_SOCKET=path))
            self.assertEqual(manager.recv(4096), b"READY=1")
            launcher.send(signal.SIGTERM)
            # The drain time-out of 10 s, 3 s until workers are killed, and 10 s.
            self.assertEqual(manager.recv(4096), b"STOPPING=1\nEXTEND_TIMEOUT_USEC=23000000\n")
            self.assertEqual(launcher.wait(), 0)

    def test_prefixes_are_coloured_on_a_terminal(self):
        config = self.cluster(ps=1).path
        code, output = cli_support.run_in_terminal("up", "--config", config, "--timeout", "1ns")
        self.assertEqual(code, 1, output)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            path = self.write_json({"cluster": {"ps": [f"127.0.0.1:{taken.getsockname()[1]}"]}})
            code, output = cli_support.run_in_terminal("up", "--config", path)
            self.assertEqual(code, 1)
            self.assertTrue(re.search("\x1b\\[36m/job:ps/task:0 \\|\x1b\\[0m tensorlane serve: ", output), output)
            output = cli_support.run_in_terminal("up", "--config", path, env=environment(NO_COLOR="1"))[1]
            self.assertNotIn("\x1b", output)


if __name__ == "__main__":
    cli_support.main()
