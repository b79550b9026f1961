#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Names that resolve to what they should not: health and the log say which address of which family was meant.

The names and addresses are those of a network that only this test sees: the test runs itself again in namespaces of its
own. It is skipped where it cannot make them.
"""
import json
import os
import subprocess
import sys
import time

import cli_support

INSIDE = "TENSORLANE_TEST_HAS_NAMES"
HOSTS = """127.0.0.1 localhost
10.77.0.7 gpu-7
10.77.0.8 gpu-8
10.77.0.8 gpu-7-moved
fd77::6 gpu-6
10.77.0.7 gpu-both
fd77::6 gpu-both
127.0.1.1 gpu-own
"""


class Names(cli_support.Case):
    def setUp(self):
        super().setUp()
        hosts = self.folder / "hosts"
        hosts.write_text(HOSTS)
        subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
        self.addCleanup(subprocess.run, ["umount", "--lazy", "/etc/hosts"], check=False)

    def ask(self, path, code=4):
        begin = time.monotonic()
        shown = self.assert_run(code, "health", "--config", path, "--json", "-connect-timeout", "60s").stdout
        cli_support.assert_soon(self, begin)
        return json.loads(shown)["workers"]

    def serve(self, name, job="ps", **cluster):
        path = self.write_json({"cluster": cluster, "protocol": "grpc"}, name)
        worker = self.spawn("serve", "--config", path, "--job", job)
        worker.await_line("worker ready")
        return path, worker

    def test_a_name_without_a_listener(self):
        path = self.write_json({"cluster": {"ps": ["gpu-7:4000"], "worker": ["gpu-both:4000"]}})
        one, both = self.ask(path)
        self.assertEqual((one["stage"], both["stage"]), ("tcp", "tcp"))
        self.assertEqual(one["reason"], "gpu-7:4000 (IPv4 10.77.0.7) refused the connection; is the worker started?")
        for tried in ("(IPv4 10.77.0.7, ", "(IPv6 fd77::6, ", "IPv4 10.77.0.7) ", "IPv6 fd77::6) "):
            both["reason"] = both["reason"].replace(tried, "")
        self.assertEqual(both["reason"], "gpu-both:4000 refused the connection; is the worker started?")

    def test_a_name_of_the_other_family(self):
        """The worker listens on IPv4 and its name is one of IPv6."""
        path = self.write_json({"cluster": {"ps": ["gpu-6:4000"]}, "protocol": "grpc", "listen": "0.0.0.0:4000"})
        self.spawn("serve", "--config", path, "--job", "ps").await_line("worker ready")
        finding = self.ask(path)[0]
        self.assertEqual(finding["stage"], "tcp")
        self.assertIn("gpu-6:4000 (IPv6 fd77::6) refused the connection", finding["reason"])
        self.assertIn("does it listen on IPv6", finding["reason"])

    def test_a_name_of_another_worker(self):
        _, worker = self.serve("served.json", ps=["gpu-8:4000"])
        path = self.write_json({"cluster": {"worker": ["gpu-7-moved:4000"]}}, "asked.json")
        finding = self.ask(path)[0]
        self.assertEqual(finding["stage"], "identity")
        self.assertRegex(finding["reason"], r"^the worker that answers at IPv4 10\.77\.0\.8 is /job:ps/task:0 on host "
                                            rf"\S+, process {worker.process.pid}$")
        self.assertIn("gpu-7-moved:4000 means IPv4 10.77.0.8 here: correct DNS or /etc/hosts", finding["remedy"])

    def test_a_foreign_server_behind_a_name(self):
        listener = subprocess.Popen([sys.executable, "-m", "http.server", "--bind", "10.77.0.7", "4001"],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(listener.wait)
        self.addCleanup(listener.kill)
        path = self.write_json({"cluster": {"ps": ["gpu-7:4001"]}})
        cli_support.wait_until(lambda: self.ask(path)[0]["stage"] == "grpc", "the foreign server")
        self.assertIn("gpu-7:4001 (IPv4 10.77.0.7) accepts connections", self.ask(path)[0]["reason"])

    def test_the_own_name_on_loopback(self):
        path, worker = self.serve("own.json", ps=["gpu-own:4000"], worker=["gpu-8:4001"])
        warning = worker.find("this worker listens where other machines cannot reach it")
        self.assertIn("level=warn", warning)
        self.assertIn("listens=127.0.1.1:4000", warning)
        finding = self.ask(path)[0]
        self.assertEqual((finding["healthy"], finding["listens"]), (True, ["127.0.1.1:4000"]))
        self.assertEqual(finding["reason"], "it listens at 127.0.1.1:4000, where other machines cannot reach it")
        self.assertIn("correct /etc/hosts on its machine, so that the host of gpu-own:4000 is not a loopback address",
                      finding["remedy"])

    def test_the_own_name_on_loopback_of_another_machine(self):
        path = self.write_json({"cluster": {"ps": ["gpu-own:4000"]}})
        finding = self.ask(path)[0]
        self.assertIn("gpu-own:4000 (IPv4 127.0.1.1) refused", finding["reason"])
        self.assertIn("correct its name in /etc/hosts", finding["remedy"])

    def test_loopback_that_is_meant(self):
        for cluster, more in (({"ps": ["gpu-own:4000"], "worker": ["gpu-own:4001"]}, {}),
                              ({"ps": ["gpu-own:4000"], "worker": ["gpu-8:4001"]}, {"listen": "127.0.1.1:4000"})):
            path = self.write_json({"cluster": cluster, "protocol": "grpc", "jobs": {"ps": more}})
            worker = self.spawn("serve", "--config", path, "--job", "ps")
            worker.await_line("worker ready")
            self.assertNotIn("other machines", worker.output)
            self.assertEqual(self.ask(path)[0]["reason"], "")
            worker.stop()


def main():
    if not os.environ.get(INSIDE):
        command = ["unshare", "-Urnm", "--kill-child", "-f"]
        if subprocess.run([*command, "true"], check=False, capture_output=True).returncode != 0:
            print("unshare cannot make namespaces of users, mounts and networks here")
            sys.exit(cli_support.SKIPPED)
        os.execvpe("unshare", [*command, sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})
    for arguments in (("link", "set", "lo", "up"), ("address", "add", "10.77.0.7/32", "dev", "lo"),
                      ("address", "add", "10.77.0.8/32", "dev", "lo"),
                      ("address", "add", "fd77::6/128", "dev", "lo", "nodad")):
        if subprocess.run(["ip", *arguments], check=False).returncode != 0:
            print(f"ip {' '.join(arguments)} failed")
            sys.exit(cli_support.SKIPPED)
    cli_support.main()


if __name__ == "__main__":
    main()
