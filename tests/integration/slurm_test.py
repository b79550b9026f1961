# SPDX-License-Identifier: Apache-2.0
"""deploy/slurm.sh, with an srun that imitates an allocation on this machine.

First the cluster.json of an allocation, then the whole script with real workers on 127.0.0.1 and 127.0.0.2.
"""
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPT = pathlib.Path(os.environ["TENSORLANE_SOURCE"], "deploy/slurm.sh")
PROGRAM = os.environ["TENSORLANE"]

# One node stands for all: its `up` starts every task, because all their hosts are this machine.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def free_port_pair():
    """Returns a free port whose successor is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


class Slurm(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        path = self.folder / "srun"
        path.write_text(SRUN, encoding="ascii")
        path.chmod(0o755)

    def start_script(self, *arguments, nodes="n1,n2,n3", stdin=subprocess.DEVNULL, **settings):
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": nodes,
                       "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": str(1 + (nodes or "").count(",")),
                       "TENSORLANE_DIR": str(self.folder), "TENSORLANE_PROGRAM": PROGRAM, **settings}
        if nodes is None:
            del environment["SLURM_JOB_NODELIST"]
        script = subprocess.Popen(["bash", SCRIPT, *arguments], env=environment, stdin=stdin, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True)
        self.addCleanup(script.wait)
        self.addCleanup(script.terminate)
        return script

    def run_script(self, *arguments, input=None, **settings):
        script = self.start_script(*arguments, stdin=subprocess.PIPE, **settings)
        output, errors = script.communicate(input, timeout=300)
        return subprocess.CompletedProcess(script.args, script.returncode, output, errors)

    def cluster(self, **options):
        result = self.run_script("--print", **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def assert_refused(self, expected, **options):
        result = self.run_script("--print", **options)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(expected, result.stderr)

    def test_first_node_is_ps_and_the_others_are_workers(self):
        self.assertEqual(self.cluster(), {"cluster": {"ps": ["n1:4000"], "worker": ["n2:4000", "n3:4000"]}})

    def test_count_of_ps_and_port(self):
        self.assertEqual(self.cluster(TENSORLANE_PS="2", TENSORLANE_PORT="700"),
                         {"cluster": {"ps": ["n1:700", "n2:700"], "worker": ["n3:700"]}})
        self.assertEqual(self.cluster(nodes=",".join("abcdefghi"), TENSORLANE_PS="08")["cluster"]["worker"], ["i:4000"])

    def test_one_node_has_both(self):
        self.assertEqual(self.cluster(nodes="only"), {"cluster": {"ps": ["only:4000"], "worker": ["only:4001"]}})

    def test_when_all_nodes_have_ps_all_have_worker_too(self):
        self.assertEqual(self.cluster(nodes="a,b", TENSORLANE_PS="2"),
                         {"cluster": {"ps": ["a:4000", "b:4000"], "worker": ["a:4001", "b:4001"]}})

    def test_without_ps(self):
        self.assertEqual(self.cluster(nodes="a,b", TENSORLANE_PS="0"), {"cluster": {"worker": ["a:4000", "b:4000"]}})

    def test_settings_are_kept_and_their_cluster_is_not(self):
        path = self.folder / "settings.json"
        path.write_text('{"cluster": {"old": ["x:1"]}, "checksum": true}', encoding="utf-8")
        self.assertEqual(self.cluster(nodes="a,b", TENSORLANE_SETTINGS=str(path)),
                         {"cluster": {"ps": ["a:4000"], "worker": ["b:4000"]}, "checksum": True})

    def test_refusals(self):
        self.assert_refused("only 3 nodes", TENSORLANE_PS="4")
        self.assert_refused("no number", TENSORLANE_PS="-1")
        self.assert_refused("from port 65535 on", TENSORLANE_PORT="65535", TENSORLANE_PS="3")
        self.assert_refused("--port", TENSORLANE_PORT="no")
        self.assert_refused("is no name of a host", nodes='a","b')
        self.assert_refused("a bracket is not closed", nodes="n[1-2")
        self.assert_refused("SLURM_JOB_NODELIST is not set", nodes=None)

    def test_published_files_are_relative_to_the_settings(self):
        (self.folder / "there").mkdir()
        path = self.folder / "there/settings.json"
        path.write_text('{"cluster": {}, "jobs": {"ps": {"publish": ["m.safetensors", "/n.npy"]}}}', encoding="utf-8")
        self.assertEqual(self.cluster(nodes="a,b", TENSORLANE_SETTINGS=str(path))["jobs"],
                         {"ps": {"publish": [str(self.folder / "there/m.safetensors"), "/n.npy"]}})

    def test_socket_folders_are_relative_to_the_settings(self):
        (self.folder / "there").mkdir()
        path = self.folder / "there/settings.json"
        settings = {"local": {"socket_folder": "sockets"},
                    "jobs": {"ps": {"local": {"socket_folder": "/run/ps"}}, "worker": {"local": {"socket_folder": ""},
                             "tasks": {"0": {"local": {"socket_folder": "first"}}}}}}
        path.write_text(json.dumps({"cluster": {}, **settings}), encoding="utf-8")
        cluster = self.cluster(nodes="a,b", TENSORLANE_SETTINGS=str(path))
        self.assertEqual(cluster["local"], {"socket_folder": str(self.folder / "there/sockets")})
        settings["jobs"]["worker"]["tasks"]["0"]["local"]["socket_folder"] = str(self.folder / "there/first")
        self.assertEqual(cluster["jobs"], settings["jobs"])

    def test_certificates_are_relative_to_the_settings(self):
        (self.folder / "there").mkdir()
        path = self.folder / "there/settings.json"
        tls = {"ca": "ca.pem", "certificate": "/etc/{name}.pem", "key": "{name}.key", "crl": "", "min_version": "1.3"}
        path.write_text(json.dumps({"cluster": {}, "security": {"tls": tls}}), encoding="utf-8")
        self.assertEqual(self.cluster(nodes="a,b", TENSORLANE_SETTINGS=str(path))["security"]["tls"],
                         {**tls, "ca": str(self.folder / "there/ca.pem"), "key": str(self.folder / "there/{name}.key")})

    def test_settings_that_cannot_be_read(self):
        nowhere = self.folder / "nowhere.json"
        self.assert_refused(f"--settings {nowhere}: No such file", TENSORLANE_SETTINGS=str(nowhere))
        broken = self.folder / "broken.json"
        broken.write_text("{", encoding="utf-8")
        self.assert_refused(f"--settings {broken}: ", TENSORLANE_SETTINGS=str(broken))

    def test_help_and_what_is_wrong_with_the_command_line(self):
        result = self.run_script("--help")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.startswith("A cluster from a Slurm allocation: "), result.stdout)
        self.assertIn("TENSORLANE_WAIT", result.stdout)
        self.assertIn("unknown option --prnt", self.run_script("--prnt").stderr)
        result = self.run_script("true", TENSORLANE_WAIT="2m")
        self.assertEqual(result.returncode, 1)
        self.assertIn("TENSORLANE_WAIT=2m is no number of seconds", result.stderr)

    def test_settings_that_are_wrong_stop_before_anything_starts(self):
        path = self.folder / "settings.json"
        path.write_text('{"cluster": {}, "chekcsum": true}', encoding="utf-8")
        result = self.run_script("touch", self.folder / "started", nodes="127.0.0.1", TENSORLANE_SETTINGS=str(path))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("chekcsum", result.stdout + result.stderr)
        self.assertFalse((self.folder / "started").exists())

    def test_command_runs_beside_healthy_workers_and_its_status_is_the_jobs(self):
        port = free_port_pair()
        seen = self.folder / "seen.json"
        result = self.run_script("bash", "-c", f'"{PROGRAM}" health --config {{}} --json > {seen}; exit 7',
                                 nodes="127.0.0.1,127.0.0.2", TENSORLANE_PORT=str(port))
        self.assertEqual(result.returncode, 7, result.stderr)
        workers = json.loads(seen.read_text(encoding="utf-8"))["workers"]
        self.assertEqual(sorted(worker["name"] for worker in workers), ["/job:ps/task:0", "/job:worker/task:0"])
        self.assertTrue(all(worker["healthy"] for worker in workers))
        # The workers have stopped: their ports are free again.
        for address in (("127.0.0.1", port), ("127.0.0.2", port + 1)):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)

    def test_workers_with_certificates_that_were_made_before(self):
        certs = self.folder / "there/certs"
        certs.parent.mkdir()
        settings = certs.parent / "settings.json"
        tls = {"ca": "certs/ca.pem", "certificate": "certs/{name}.pem", "key": "certs/{name}.key"}
        settings.write_text(json.dumps({"cluster": {}, "security": {
            "tls": tls, "allow": [{"who": ["any"], "what": ["read", "peers"]}]}}), encoding="utf-8")
        for arguments in (["init"], ["issue", *(f"--name={name}" for name in ("ps:0", "worker:0", "client"))]):
            subprocess.run([PROGRAM, "cert", *arguments, "-o", certs], check=True, capture_output=True)
        seen = self.folder / "seen.json"
        result = self.run_script("bash", "-c", f'"{PROGRAM}" health --config {{}} --json > {seen}',
                                 nodes="127.0.0.1,127.0.0.2", TENSORLANE_PORT=str(free_port_pair()),
                                 TENSORLANE_SETTINGS=str(settings))
        self.assertEqual(result.returncode, 0, result.stderr)
        workers = json.loads(seen.read_text(encoding="utf-8"))["workers"]
        self.assertEqual([worker["healthy"] for worker in workers], [True, True])
        self.assertNotIn("authenticates nobody", result.stdout + result.stderr)

    def test_workers_that_cannot_start_end_the_job(self):
        with socket.socket() as taken:
            port = free_port_pair()
            taken.bind(("127.0.0.1", port))
            taken.listen()
            result = self.run_script("true", nodes="127.0.0.1", TENSORLANE_PORT=str(port))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("the workers have ended", result.stderr)

    def test_the_status_of_workers_that_cannot_start_is_the_jobs(self):
        (self.folder / "srun").write_text("#!/bin/bash\nexit 37\n", encoding="ascii")
        result = self.run_script("true", nodes="127.0.0.1", TENSORLANE_PORT=str(free_port_pair()))
        self.assertEqual(result.returncode, 37, result.stderr)
        self.assertIn("0 of 2 workers are healthy", result.stderr)

    def start_long_command(self, **settings):
        """Starts a command that lasts too long for this test; returns the script and the number of the command's
        process."""
        started = self.folder / "started"
        script = self.start_script("bash", "-c", f"echo $$ > {started}.tmp; mv {started}.tmp {started}; exec sleep 600",
                                   nodes="127.0.0.1", TENSORLANE_PORT=str(free_port_pair()), **settings)
        while not started.exists():
            self.assertIsNone(script.poll())
            time.sleep(0.05)
        command = int(started.read_text(encoding="ascii"))
        self.addCleanup(self.end, command)
        return script, command

    @staticmethod
    def end(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def assert_gone(self, pid):
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)

    def test_a_signal_stops_the_command_and_the_workers(self):
        script, command = self.start_long_command()
        script.terminate()
        script.communicate(timeout=30)
        self.assertEqual(script.returncode, 143)
        self.assert_gone(command)

    def test_workers_that_end_while_the_command_runs_end_the_job(self):
        (self.folder / "srun").write_text(SRUN.replace("exec", f"echo $$ > {self.folder}/pid; exec"), encoding="ascii")
        script, command = self.start_long_command()
        os.kill(int((self.folder / "pid").read_text(encoding="ascii")), signal.SIGKILL)
        _, errors = script.communicate(timeout=30)
        self.assertEqual(script.returncode, 128 + signal.SIGKILL, errors)
        self.assertIn("the workers have ended with status 137", errors)
        self.assertRegex(errors, "[01] of 2 workers are healthy")
        self.assert_gone(command)

    def test_the_command_has_the_input_and_any_path(self):
        folder = self.folder / "a&b"
        folder.mkdir()
        result = self.run_script("bash", "-c", "read line; echo \"$line {}\"", nodes="127.0.0.1", input="line\n",
                                 TENSORLANE_PORT=str(free_port_pair()), TENSORLANE_DIR=str(folder))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"line {folder}/tensorlane-42.json\n", result.stdout)


if __name__ == "__main__":
    if not PROGRAM:
        print("the program tensorlane is not built")
        sys.exit(77)
    unittest.main(verbosity=2)
