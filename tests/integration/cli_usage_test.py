#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The command line itself: help, wrong usage, output that cannot be written, configurations."""
import functools
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess

import cli_support
from cli_support import environment, run, run_in_terminal

# Each command has a file of its own.
COMMANDS = sorted(path.stem.removeprefix("command_") for path in
                  (cli_support.SOURCE / "server/cli").glob("command_*.c"))


class Usage(cli_support.Case):
    def test_help_lists_every_command(self):
        for arguments in (["help"], ["--help"], ["-h"]):
            result = self.assert_run(0, *arguments)
            for command in [*COMMANDS, "version"]:
                self.assertIn(f"\n  {command} ", result.stdout)
            self.assertEqual(result.stderr, "")

    def test_every_command_has_help(self):
        for command in COMMANDS:
            for arguments in ([command, "--help"], ["help", command], [command, "-h"]):
                result = self.assert_run(0, *arguments)
                self.assertIn(f"usage: tensorlane {command} ", result.stdout)
                self.assertEqual(result.stderr, "")
        self.assertIn("version", self.assert_run(0, "help", "version").stdout)

    def test_every_flag_of_the_help_is_in_the_manual(self):
        manual = (cli_support.SOURCE / "docs/cli.md").read_text()
        for command in COMMANDS:
            for line in self.assert_run(0, command, "--help").stdout.splitlines():
                flag = next((word for word in line[:28].split() if word.startswith("-") and len(word) > 3), None)
                if flag and line.startswith("  ") and flag.lstrip("-") != "help":
                    self.assertIn(f"-{flag.lstrip('-')}", manual, f"{command} {flag}")

    def test_version(self):
        pinned = (cli_support.SOURCE / "cmake/grpc_current/pin.cmake").read_text()
        pinned = pinned.split("GRPC_CURRENT_VERSION ")[1].split(")")[0]
        origin = f"built in from gRPC {pinned}" if os.environ["TENSORLANE_GRPC_CURRENT"] else "of the system"
        expected = rf"tensorlane {self.header_version()} \(gRPC core \d+\.\d+\.\d+ {origin}\)\n"
        for arguments in (["version"], ["--version"], ["-V"]):
            self.assertRegex(self.assert_run(0, *arguments).stdout, f"^{expected}$")
        self.assert_error(2, "unexpected argument", "version", "x")

    def header_version(self):
        text = (cli_support.SOURCE / "include/tensorlane/version.h").read_text()
        return text.split('#define TL_VERSION "')[1].split('"')[0]

    def test_signals_of_the_first_process_of_a_container(self):
        """The kernel drops those that it does not handle."""
        unshare = ["unshare", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        try:
            if subprocess.run([*unshare, "true"], check=False, stderr=subprocess.DEVNULL).returncode != 0:
                self.skipTest("unshare cannot make a namespace of processes here")
        except FileNotFoundError:
            self.skipTest("there is no unshare (util-linux)")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(cli_support.PATIENCE)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                command = [*unshare, cli_support.PROGRAM, "ls", "--address", address, "--timeout", "1h"]
                with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                    silent.accept()[0].close()
                    child, = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                    os.kill(int(child), number)
                    try:
                        self.assertEqual(process.wait(cli_support.PATIENCE), 128 + number)
                    except subprocess.TimeoutExpired:
                        os.kill(int(child), signal.SIGKILL)
                        raise

    def test_no_command(self):
        result = self.assert_run(2)
        self.assertEqual(result.stdout, "")
        self.assertIn("usage: tensorlane COMMAND", result.stderr)

    def test_unknown_command(self):
        self.assert_error(2, "srve: no such command; did you mean serve\\?", "srve")
        self.assert_error(2, "xyzzy: no such command; tensorlane help lists them", "xyzzy")
        self.assert_error(2, "did you mean health", "help", "helth")

    def test_wrong_flags(self):
        self.assert_error(2, "unknown flag --outpt; did you mean --output", "pull", "--outpt", "x")
        self.assert_error(2, "unknown flag -z", "pull", "-z")
        self.assert_error(2, "unknown flag --zzzzzzzz", "ls", "--zzzzzzzz=1")
        self.assert_error(2, "--output lacks its PATH", "pull", "--output")
        self.assert_error(2, "-o lacks its PATH", "pull", "-o")
        self.assert_error(2, "--timeout 5: not a duration", "ls", "--timeout", "5")
        self.assert_error(2, "--timeout 0s: not a duration above zero", "ls", "--timeout", "0s")
        self.assert_error(2, "--step -1: not a whole number", "push", "--step", "-1")
        self.assert_error(2, "--step 18446744073709551616: not", "push", "--step", "18446744073709551616")
        self.assert_error(2, "--task 4294967296: not", "serve", "--task", "4294967296")
        self.assert_error(2, "--json=maybe: neither true nor false", "ls", "--json=maybe")

    def test_what_is_missing(self):
        self.assert_error(2, "where to\\? -o PATH", "pull", "--address", "127.0.0.1:1")
        self.assert_error(2, "which worker\\?", "ls")
        self.assert_error(2, "which worker\\? .*--to TASK", "push", "x.npy")
        self.assert_error(2, "which files\\?", "push")
        self.assert_error(2, "which tensors\\?", "rm")
        self.assert_error(2, "which cluster\\?", "up")
        self.assert_error(2, "check, show, from-env, from-slurm, .*or from-hostfile\\?", "config")
        self.assert_error(2, "which file\\?", "config", "check")
        self.assert_error(1, "whose health\\?", "health")

    def test_what_does_not_fit_together(self):
        config = self.cluster(ps=1).path
        self.assert_error(2, "--address stands alone", "ls", "--address", "a:1", "--config", config)
        self.assert_error(2, "--address: ", "ls", "--address", "::1:4000")
        self.assert_error(2, "port 0", "ls", "--address", "localhost:0")
        self.assert_error(2, "belong together", "ls", "--address", "localhost:1", "--tls-ca-cert", "ca.pem")
        self.assert_error(2, "belong to --address", "ls", "--config", config, "--tls-ca-cert", "ca.pem")
        self.assert_error(1, "cannot open ca.pem", "ls", "--address", "localhost:1", "--tls-ca-cert", "ca.pem",
                          "--tls-client-cert", "client.pem", "--tls-client-key", "client.key")
        self.assert_error(2, "unexpected argument", "serve", "x")
        self.assert_error(2, "unexpected argument", "up", "x", "--config", config)
        self.assert_error(2, "must be one", "up", "--config", "-")
        self.assert_error(2, "--listen: ", "serve", "--config", config, "--listen", "nowhere")
        self.assert_error(2, "cannot go into a pipe", "pull", "--config", config, "-o", "-")
        self.assert_error(2, "there are safetensors and npy", "pull", "--config", config, "-o", "x", "--format", "pt")
        self.assert_error(2, "a folder; name a file", "pull", "--config", config, "-o", self.folder)
        self.assert_error(2, "a folder; name a file", "pull", "--config", config, "-o", "x/", "--format=safetensors")

    def test_a_task_is_named_when_there_are_several(self):
        config = self.cluster(ps=1, worker=2).path
        self.assert_error(2, "3 tasks; say which one, for example --from /job:ps/task:0", "ls", "--config", config)
        self.assert_error(1, "ps", "ls", "--config", config, "--from", "/job:pss/task:0")

    def test_hostile_arguments_do_not_reach_the_terminal(self):
        result = self.assert_run(2, "\x1b[31mred\x07\u202e")
        self.assertIn("\\x1B[31mred\\x07\\u{202E}", result.stderr)
        self.assertNotIn("\x1b", result.stderr)

    def test_standard_output_is_full(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            for arguments in (["help"], ["version"], ["pull", "--help"], ["health", "-version"]):
                result = self.assert_run(1, *arguments, stdout=full)
                self.assertIn("cannot write to standard output", result.stderr)

    def test_standard_output_is_full_after_a_failure(self):
        """What the command prints all the same is lost, and the reason is still known."""
        config = self.write_json({"cluster": {"ps": [f"127.0.0.1:{port}" for port in cli_support.free_ports(40)]}})
        lost = "cannot write to standard output: No space left on device"
        with open("/dev/full", "w", encoding="ascii") as full:
            result = self.assert_run(1, "push", "missing", "--address", "127.0.0.1:1", "--json", stdout=full)
            self.assertRegex(result.stderr, f"^tensorlane push: .*missing.*\ntensorlane push: {lost}\n$")
            result = self.assert_run(1, "health", "--config", config, "--json", stdout=full)
            self.assertEqual(result.stderr, f"tensorlane health: {lost}\n")

    def test_standard_output_has_no_reader(self):
        read_end, write_end = os.pipe()
        os.close(read_end)
        try:
            self.assert_run(1, "help", stdout=write_end)
        finally:
            os.close(write_end)

    def test_standard_output_is_closed(self):
        result = subprocess.run(["/bin/sh", "-c", "exec \"$0\" help >&-", cli_support.PROGRAM], env=environment(),
                                stderr=subprocess.PIPE, check=False, timeout=cli_support.PATIENCE)
        self.assertEqual(result.returncode, 1)

    def test_standard_input_is_closed(self):
        for arguments in ("config check -", "serve --config - --job ps"):
            result = subprocess.run(["/bin/sh", "-c", f'exec "$0" {arguments} <&-', cli_support.PROGRAM],
                                    env=environment(), stderr=subprocess.PIPE, check=False, text=True,
                                    timeout=cli_support.PATIENCE)
            self.assertEqual(result.returncode, 1)
            self.assertIn("Bad file descriptor", result.stderr)

    def test_a_file_that_may_not_grow(self):
        with open(self.folder / "out", "w", encoding="ascii") as out:
            result = self.assert_run(1, "help", stdout=out, preexec_fn=functools.partial(
                resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0)))
        self.assertEqual(result.stderr, "tensorlane help: cannot write to standard output: File too large\n")

    def test_flags_stand_anywhere(self):
        env = environment(POSIXLY_CORRECT="1")
        self.assert_run(0, "cert", "init", "-o", self.folder / "certs", env=env)
        self.assertTrue((self.folder / "certs/ca.pem").exists())


class Config(cli_support.Case):
    def test_check(self):
        config = self.cluster(ps=2, worker=1).path
        self.assertEqual(self.assert_run(0, "config", "check", config).stdout, f"{config}: ok (3 tasks)\n")
        self.assertEqual(self.assert_run(0, "config", "check", "-", input=config.read_text()).stdout,
                         "standard input: ok (3 tasks)\n")

    def test_check_says_that_grpc_has_no_rdma(self):
        config = self.cluster(ps=2, extra={"protocol": "grpc", "jobs": {"ps": {"tasks": {"1": {"rdma": "require"}}}}})
        self.assertEqual(self.assert_run(0, "config", "check", config.path).stdout,
                         f"{config.path}: ok (2 tasks); rdma is \"require\", which has no effect with protocol "
                         "\"grpc\"\n")
        shown = json.loads(self.assert_run(0, "config", "show", "-c", config.path, "-j", "ps", "-t", 1,
                                           "--json").stdout)
        self.assertEqual(shown["settings"]["rdma"]["value"], "require")
        config.start("ps", 1).await_line('level=warn msg="rdma is \\"require\\", which has no effect with protocol')
        self.assertIsNone(config.start("ps", 0).find("rdma"))

    def test_rdma_may_be_required(self):
        config = self.cluster(ps=1, extra={"protocol": "grpc+verbs", "rdma": "require"})
        self.assertEqual(self.assert_run(0, "config", "check", config.path).stdout, f"{config.path}: ok (1 task)\n")

    def test_variables_of_tensorflow(self):
        config = self.cluster(ps=1, extra={"verbs": {"timeout": 9}})
        show = ["config", "show", "-c", config.path, "-j", "ps"]
        variables = environment(RDMA_TIMEOUT="20", RDMA_QP_SL="3", RDMA_QP_MTUU="1")
        shown = self.assert_run(0, *show, "--json", env=variables)
        settings = json.loads(shown.stdout)["settings"]
        self.assertEqual(settings["verbs.service_level"], {"value": 3, "origin": "environment (RDMA_QP_SL)"})
        self.assertEqual(settings["verbs.timeout"]["value"], 9)
        self.assertIn("(verbs.timeout)", settings["verbs.timeout"]["origin"])
        self.assertEqual(shown.stderr, 'tensorlane config: warning: environment variable "RDMA_QP_MTUU" has no '
                                       'effect; did you mean "RDMA_QP_MTU"?\n')
        self.assert_error(1, "environment variable RDMA_SL: 8 is out of range; it may be 0 to 7, as "
                             "verbs.service_level", *show, env=environment(RDMA_SL="8"))

    def test_check_names_the_place(self):
        bad = self.folder / "bad.json"
        bad.write_text('{"cluster": {"ps": ["a:1"]},\n "protokol": "grpc"}')
        self.assert_error(1, 'bad.json:2:2: .*protokol.*protocol', "config", "check", bad)
        self.assert_error(1, "nowhere.json", "config", "check", self.folder / "nowhere.json")

    def test_check_reports_all_errors_of_a_file(self):
        bad = self.folder / "bad.json"
        bad.write_text('{"cluster": {"ps": ["a:1", "a"]},\n "protokol": "grpc",\n "jobs": {"ps": {"checksum": 1}}}')
        result = self.assert_run(1, "config", "check", bad)
        self.assertEqual(result.stdout, "")
        places = [line.split(": ")[1:3] for line in result.stderr.splitlines()]
        self.assertEqual(places, [[f"{bad}:1:28", "cluster.ps[1]"], [f"{bad}:2:2", "protokol"],
                                  [f"{bad}:3:30", "jobs.ps.checksum"]])

    def test_check_goes_on_after_a_bad_file(self):
        bad = self.folder / "bad.json"
        bad.write_text("{")
        good = self.cluster(ps=1).path
        result = self.assert_run(1, "config", "check", bad, good)
        self.assertEqual(result.stdout, f"{good}: ok (1 task)\n")

    def test_check_finds_tasks_that_listen_at_one_place(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000", "127.0.0.1:4001", "10.9.8.7:4000"]},
                                "jobs": {"ps": {"listen": "0.0.0.0:4000"}}})
        result = self.assert_error(0, "config: warning: .*/job:ps/task:0 and /job:ps/task:1 are on one host and both "
                                      "listen on port 4000", "config", "check", path)
        self.assertEqual(result.stdout, f"{path}: ok (3 tasks)\n")
        for listen in ("127.0.0.1:4001", "[::]:4001"):
            path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000", "127.0.0.1:4001"]},
                                    "jobs": {"ps": {"tasks": {"0": {"listen": listen}}}}})
            self.assert_error(0, "ps/task:0 and /job:ps/task:1 .* listen on port 4001", "config", "check", path)
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000", "127.0.0.1:4001"]},
                                "jobs": {"ps": {"tasks": {"0": {"listen": "10.9.8.7:4001"}}}}})
        self.assertEqual(self.assert_run(0, "config", "check", path).stderr, "")

    def test_check_finds_published_files_that_are_missing(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000"], "worker": ["10.9.8.7:4001"]},
                                "jobs": {"ps": {"publish": ["a.safetensors", "b.npy"]},
                                         "worker": {"publish": ["there.safetensors"]}}})
        (self.folder / "b.npy").write_bytes(b"")
        result = self.assert_error(1, "/job:ps/task:0, which is to run on this machine, cannot publish "
                                      ".*a.safetensors: No such file", "config", "check", path)
        self.assertEqual(result.stdout, "")
        (self.folder / "a.safetensors").write_bytes(b"")
        self.assert_run(0, "config", "check", path)

    def test_check_finds_files_of_security_that_are_missing(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000"], "worker": ["10.9.8.7:4001"]},
                                "security": {"tls": {"ca": "ca.pem", "certificate": "{name}.pem", "key": "{name}.key",
                                                     "crl": "crl.pem"}}})
        files = {"ca": "ca.pem", "certificate": "ps-0.pem", "key": "ps-0.key", "crl": "crl.pem"}
        result = self.assert_run(1, "config", "check", path)
        self.assertEqual(result.stderr.splitlines(), [
            f"tensorlane config: {path}: /job:ps/task:0, which is to run on this machine, cannot read security.tls."
            f"{setting} {self.folder / name}: No such file or directory" for setting, name in files.items()])
        self.assertEqual(result.stdout, "")
        for name in files.values():
            (self.folder / name).write_bytes(b"")
        self.assert_run(0, "config", "check", path)
        shown = self.assert_run(0, "config", "show", "-c", path, "-j", "worker", "--json")
        settings = json.loads(shown.stdout)["settings"]
        self.assertEqual(settings["security.tls.key"]["value"], str(self.folder / "worker-0.key"))

    def test_check_warns_of_published_files_that_only_others_may_read(self):
        path = self.write_json({"cluster": {"ps": ["127.0.0.1:4000"]}, "publish": ["a.safetensors"]})
        (self.folder / "a.safetensors").touch(mode=0)
        # Without these capabilities root, too, may read only what the permissions allow.
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        result = subprocess.run([*prefix, cli_support.PROGRAM, "config", "check", path], capture_output=True, text=True,
                                env=environment(), timeout=60, check=False)
        self.assertEqual((result.returncode, result.stdout), (0, f"{path}: ok (1 task)\n"), result.stderr)
        self.assertRegex(result.stderr, "config: warning: .*cannot publish .*a.safetensors .*: Permission denied\n$")

    def test_show(self):
        config = self.cluster(ps=1, extra={"jobs": {"ps": {"limits": {"chunk": "2MiB"}}}}).path
        result = self.assert_run(0, "config", "show", "--config", config, "--job", "ps", "--task", 0)
        self.assertRegex(result.stdout, r"limits\.chunk +\"2MiB\" +.*cluster\.json:1 ")
        self.assertRegex(result.stdout, r"protocol +\"auto\" +default")

    def test_show_json(self):
        config = self.cluster(ps=1, extra={"checksum": True})
        shown = json.loads(self.assert_run(0, "config", "show", "-c", config.path, "-j", "ps", "--json").stdout)
        self.assertEqual(shown["name"], "/job:ps/task:0")
        self.assertEqual(shown["address"], config.address())
        self.assertIs(shown["settings"]["checksum"]["value"], True)
        self.assertIn("cluster.json:1", shown["settings"]["checksum"]["origin"])
        self.assertEqual(shown["settings"]["limits.waiting"]["origin"], "default")

    def test_show_a_task_without_an_address(self):
        env = environment(TF_CONFIG=json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator"}}))
        self.assertRegex(self.assert_run(0, "config", "show", env=env).stdout, "^/job:evaluator/task:0\n")
        self.assertEqual(json.loads(self.assert_run(0, "config", "show", "--json", env=env).stdout)["address"], "")

    def test_show_without_a_task(self):
        config = self.cluster(ps=1).path
        self.assert_error(1, "which task\\?", "config", "show", "--config", config)
        self.assert_error(1, "ps", "config", "show", "--config", config, "--job", "pss")
        self.assert_error(2, "which configuration\\?", "config", "show", "--job", "ps")
        self.assert_error(2, "unexpected argument", "config", "show", "x")

    def test_from_env(self):
        tf_config = json.dumps({"cluster": {"ps": ["a:1"], "worker": ["b:2", "c:3"]},
                                "task": {"type": "worker", "index": 1}, "environment": "cloud"})
        env = environment(TF_CONFIG=tf_config)
        text = self.assert_run(0, "config", "from-env", env=env).stdout
        self.assertEqual(json.loads(text)["cluster"]["ps"], ["a:1"])
        self.assertEqual(self.assert_run(0, "config", "check", "-", input=text).stdout,
                         "standard input: ok (3 tasks)\n")
        shown = json.loads(self.assert_run(0, "config", "show", "--json", env=env).stdout)
        self.assertEqual(shown["name"], "/job:worker/task:1")

    def test_from_env_without_or_with_a_bad_one(self):
        self.assert_error(1, "no TF_CONFIG", "config", "from-env")
        self.assert_error(1, "TF_CONFIG", "config", "from-env", env=environment(TF_CONFIG="{"))
        # An empty variable counts as unset.
        empty = environment(TF_CONFIG="")
        self.assert_error(1, "no TF_CONFIG", "config", "from-env", env=empty)
        for command in (["serve"], ["ls"], ["devices", "--job", "ps"], ["config", "show", "--job", "ps"], ["up"]):
            without, with_empty = run(*command), run(*command, env=empty)
            self.assertEqual((without.returncode, without.stderr), (with_empty.returncode, with_empty.stderr))

    def test_unknown_action(self):
        self.assert_error(2, "did you mean check\\?", "config", "chek", "x")
        self.assert_error(2, "there are check, show, from-env, from-slurm", "config", "qqqqqq")

    def test_tables_fit_the_terminal(self):
        config = self.cluster(ps=1, extra={"publish": ["a" * 40 + f"{i}" for i in range(5)]}).path
        code, output = run_in_terminal("config", "show", "-c", config, "-j", "ps", columns=70)
        self.assertEqual(code, 0)
        rows = output.replace("\x1b[1m", "").replace("\x1b[0m", "").split("\r\n")
        self.assertLessEqual(max(map(len, rows[1:])), 70, output)

    def test_colours_only_on_a_terminal_that_wants_them(self):
        config = self.cluster(ps=1).path
        arguments = ("config", "show", "-c", config, "-j", "ps")
        self.assertIn("\x1b[1m", run_in_terminal(*arguments)[1])
        self.assertNotIn("\x1b", run_in_terminal(*arguments, env=environment(NO_COLOR="1"))[1])
        self.assertNotIn("\x1b", run_in_terminal(*arguments, env=environment(TERM="dumb"))[1])
        self.assertNotIn("\x1b", run(*arguments).stdout)


if __name__ == "__main__":
    cli_support.main()
