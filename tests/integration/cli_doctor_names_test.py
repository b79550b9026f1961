#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What `tensorlane doctor` says of names that mislead, with an /etc/hosts that only this test sees: the test runs
itself again in a mount namespace. It is skipped where it cannot make one."""
import socket
import subprocess

import cli_support
from doctor_support import DoctorCase

# Of the range for documents, so that no machine has it.
ELSEWHERE = "192.0.2.7"
NAME_SERVER = "127.0.0.77"


class Names(DoctorCase):
    def setUp(self):
        super().setUp()
        self.hosts = self.folder / "hosts"
        self.mount("", self.hosts, "/etc/hosts")

    def mount(self, content, path, place):
        path.write_text(content)
        subprocess.run(["mount", "--bind", path, place], check=True)
        self.addCleanup(subprocess.run, ["umount", "--lazy", place], check=False)

    def hosts_are(self, *lines):
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{line}\n" for line in lines))

    def config(self, **extra):
        self.port, other = cli_support.free_ports(2)
        return self.write_json({"cluster": {"ps": [f"gpu-0:{self.port}"], "worker": [f"gpu-1:{other}"]}, **extra})

    def test_the_own_name_is_loopback(self):
        self.hosts_are("127.0.1.1 gpu-0", f"{ELSEWHERE} gpu-1")
        line = self.doctor("--config", self.config(), code=4)["host gpu-0"]
        self.assertEqual(line["verdict"], "fault")
        self.assertEqual(line["value"], "127.0.1.1 (IPv4) (line 2 of /etc/hosts)")
        self.assertIn("gpu-0 resolves to 127.0.1.1 here", line["cause"])
        self.assertIn(f'set "listen" to "0.0.0.0:{self.port}"', line["remedy"])
        listen = {"jobs": {"ps": {"listen": "0.0.0.0:4000"}}}
        self.assertEqual(self.doctor("--config", self.config(**listen))["host gpu-0"]["verdict"], "note")

    def test_localhost_is_what_the_user_wrote(self):
        """A forwarded port, such as that of ssh -L."""
        self.hosts_are(f"{ELSEWHERE} gpu-1")
        with socket.create_server(("127.0.0.1", 0)) as forwarder:
            port = forwarder.getsockname()[1]
            config = self.write_json({"cluster": {"ps": [f"localhost:{port}"], "worker": [f"gpu-1:{port}"]}})
            lines = self.doctor("--config", config)
        for line in (lines["host localhost"], lines["socket of /job:ps/task:0"]):
            self.assertEqual(line["verdict"], "note", line)

    def test_names_of_one_machine_may_be_loopback(self):
        self.hosts_are("127.0.1.1 gpu-0 gpu-1")
        lines = self.doctor("--config", self.config())
        self.assertEqual([lines[f"host gpu-{n}"]["verdict"] for n in (0, 1)], ["ok", "ok"])

    def test_unknown_name(self):
        self.hosts_are("127.0.1.1 gpu-0")
        config = self.write_json({"cluster": {"ps": ["gpu-0:4000"], "worker": ["no-such-host.invalid:4000"]}})
        line = self.doctor("--config", config, code=4)["host no-such-host.invalid"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("cannot be resolved", line["cause"])

    def test_a_slow_name_spoils_no_other(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
            try:
                silent.bind((NAME_SERVER, 53))
            except PermissionError:
                self.skipTest("this user may not use port 53")
            self.mount(f"nameserver {NAME_SERVER}\noptions timeout:15 attempts:1\n", self.folder / "resolv.conf",
                       "/etc/resolv.conf")
            self.hosts_are(f"{ELSEWHERE} gpu-1")
            config = self.write_json({"cluster": {"ps": ["slow.example:4000"], "worker": ["gpu-1:4000"]}})
            lines = self.doctor("--config", config, code=4)
        self.assertIn("was not resolved in time", lines["host slow.example"]["cause"])
        self.assertEqual(lines["host gpu-1"]["verdict"], "ok")

    def test_the_worker_listens_on_loopback_only(self):
        self.hosts_are("127.0.1.1 gpu-0", f"{ELSEWHERE} gpu-1")
        config = self.config()
        self.spawn("serve", "--config", config, "--job", "ps").await_line("worker ready")
        line = self.doctor("--config", config, code=4)["socket of /job:ps/task:0"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn(f"port {self.port} of 127.0.1.1 (IPv4)", line["value"])
        self.assertIn("it listens on loopback only", line["cause"])

    def test_the_name_is_of_another_family(self):
        self.hosts_are("::1 gpu-0 gpu-1")
        config = self.config()
        port = self.port
        listening = self.write_json({"cluster": {"ps": [f"127.0.0.1:{port}"]}}, "listening.json")
        self.spawn("serve", "--config", listening, "--job", "ps").await_line("worker ready")
        line = self.doctor("--config", config, code=4)["socket of /job:ps/task:0"]
        self.assertEqual(line["verdict"], "fault")
        self.assertIn("gpu-0 resolves to ::1 (IPv6) here", line["cause"])
        self.assertIn(f'"[::]:{port}"', line["remedy"])


if __name__ == "__main__":
    # Without a network, addresses elsewhere are known at once to be out of reach.
    loopback = ["ip", "link", "set", "lo", "up"]
    probe = "mount --bind /etc/hosts /etc/hosts && " + " ".join(loopback)
    cli_support.enter_namespace(["sh", "-c", probe], "file", "--net")
    subprocess.run(loopback, check=True)
    cli_support.main()
