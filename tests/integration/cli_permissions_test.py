#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""security.allow at running workers: each caller may do what its certificate's name is allowed, and nothing else."""
import json

import cli_support
from cli_support import OVER_GRPC, run, some_tensors, write_safetensors

ANN = "spiffe://example.org/client/ann"
BEN = "spiffe://example.org/client/ben"
FILES = {"ca": "certs/ca.pem", "certificate": "certs/{name}.pem", "key": "certs/{name}.key"}


class Permissions(cli_support.Case):
    def start(self, allow=None, extra=OVER_GRPC, **settings):
        """Starts ps:0, which publishes a model itself, with these rules and other settings of security."""
        security = {"tls": FILES, **settings, **({} if allow is None else {"allow": allow})}
        self.config = self.cluster(ps=1, worker=1, extra={**extra, "security": security})
        certs = self.folder / "certs"
        self.assert_run(0, "cert", "init", "-o", certs)
        self.assert_run(0, "cert", "issue", "--config", self.config.path, "-o", certs)
        self.assert_run(0, "cert", "issue", "--name", "ann", "-o", certs)
        model = write_safetensors(self.folder / "model.safetensors", some_tensors())
        self.other = write_safetensors(self.folder / "other.safetensors", some_tensors(2))
        return self.config.start("ps", 0, "--publish", model)

    def as_caller(self, name):
        """Returns a configuration whose tools use the certificate of this name."""
        value = json.loads(self.config.path.read_text(encoding="utf-8"))
        value["security"]["tls"] = {key: file.replace("{name}", name) for key, file in FILES.items()}
        value["security"].pop("allow", None)
        return self.write_json(value, f"{name}.json")

    def at_ps(self, command, caller, *arguments, flag="--from"):
        return [command, *arguments, "--config", self.as_caller(caller), flag, "/job:ps/task:0"]

    def at_address(self, caller):
        certs = self.folder / "certs"
        return ["--address", self.config.address("ps", 0), "--tls-ca-cert", certs / "ca.pem",
                "--tls-client-cert", certs / f"{caller}.pem", "--tls-client-key", certs / f"{caller}.key"]

    def assert_refused(self, caller, name, what, *command):
        self.assert_error(1, f"{name} may not {what} at /job:ps/task:0: security.allow gives ", *command)

    def test_strangers_may_ask_for_health_alone(self):
        worker = self.start()
        self.assert_refused("ann", ANN, "list", *self.at_ps("ls", "ann"))
        self.assert_refused("ann", ANN, "list", *self.at_ps("pull", "ann", "-o", self.folder / "x.safetensors"))
        self.assert_refused("ann", ANN, "push", *self.at_ps("push", "ann", self.other, flag="--to"))
        self.assert_refused("ann", ANN, "withdraw", *self.at_ps("rm", "ann", "*"))
        self.assertEqual(worker.output.count("a caller was refused"), 1)
        shown = run("health", "--config", self.as_caller("ann")).stdout
        self.assertRegex(shown, r"(?m)^/job:ps/task:0 +\S+ +yes +serving$")
        self.assertRegex(shown.replace("\n", " "), rf"it serves; more is not looked at:\s+{ANN}\s+may not see peers")

    def test_members_read_list_and_push_and_do_not_withdraw(self):
        self.start()
        out = self.folder / "out.safetensors"
        self.assert_run(0, *self.at_ps("ls", "worker-0"))
        self.assert_run(0, *self.at_ps("pull", "worker-0", "-o", out))
        self.assert_run(0, *self.at_ps("push", "worker-0", self.other, "--prefix", "more/", flag="--to"))
        self.assert_refused("worker-0", "/job:worker/task:0", "withdraw", *self.at_ps("rm", "worker-0", "*"))

    def test_what_the_worker_publishes_itself_is_replaced_by_those_who_may_publish(self):
        self.start([{"who": ["member"], "what": ["push"]}, {"who": [ANN], "what": ["push", "publish"]}])
        replace = ["--step", "9", self.other]
        pushed = [*replace, "--prefix", "more/"]
        for _ in range(2):
            self.assert_run(0, *self.at_ps("push", "worker-0", *pushed, flag="--to"))
        self.assert_refused("worker-0", "/job:worker/task:0", "publish",
                            *self.at_ps("push", "worker-0", *replace, flag="--to"))
        self.assert_run(0, *self.at_ps("push", "ann", *replace, flag="--to"))
        self.assert_run(0, *self.at_ps("push", "worker-0", *replace, flag="--to"))

    def test_each_command_needs_only_what_it_does(self):
        self.start([{"who": [ANN], "what": ["push"]}, {"who": ["job:worker"], "what": ["list", "read"]},
                    {"who": [BEN], "what": ["withdraw"]}])
        self.assert_run(0, "cert", "issue", "--name", "ben", "-o", self.folder / "certs")
        pushed = [self.other, "--prefix", "more/"]
        self.assert_run(0, *self.at_ps("push", "ann", *pushed, flag="--to"))
        pushed_again = self.assert_run(0, "push", "--json", *pushed, *self.at_address("ann")).stdout
        self.assertNotIn("error", json.loads(pushed_again))
        for where in (lambda command, *rest: self.at_ps(command, "worker-0", *rest),
                      lambda command, *rest: [command, *rest, *self.at_address("worker-0")]):
            out = self.folder / "out.safetensors"
            self.assertIn("more/", self.assert_run(0, *where("ls")).stdout)
            self.assert_run(0, *where("pull", "-o", out))
            self.assertEqual(len(cli_support.read_safetensors(out)), len(some_tensors()) + len(some_tensors(2)))
        self.assert_refused("worker-0", "/job:worker/task:0", "withdraw", *self.at_ps("rm", "worker-0", "*"))
        self.assert_run(0, *self.at_ps("rm", "ben", "more/*"))

    def test_each_rule_counts_alone(self):
        self.start([{"who": ["any"], "what": ["peers"]}, {"who": ["job:worker"], "what": ["list"]}])
        self.assert_run(0, *self.at_ps("ls", "worker-0"))
        self.assert_refused("ann", ANN, "list", *self.at_ps("ls", "ann"))
        self.assert_refused("worker-0", "/job:worker/task:0", "read",
                            *self.at_ps("pull", "worker-0", "-o", self.folder / "x.safetensors"))
        self.assertFalse((self.folder / "x.safetensors").exists())

    def test_health_says_why_nothing_travels_over_rdma(self):
        self.start(extra={}, encrypt="require")
        shown = self.assert_run(4, "health", "--config", self.as_caller("worker-0"), "--json")
        workers = {worker["name"]: worker for worker in json.loads(shown.stdout)["workers"]}
        verbs = [transport for transport in workers["/job:ps/task:0"]["transports"] if transport["name"] == "verbs"]
        self.assertEqual([(transport["available"], transport["reason"]) for transport in verbs],
                         [(False, 'security.encrypt is "require", and nothing encrypts what RDMA carries')])

    def test_a_plain_worker_says_that_it_authenticates_nobody(self):
        cluster = self.cluster(ps=1, extra=OVER_GRPC)
        worker = cluster.start()
        worker.await_line("this worker authenticates nobody")
        self.assertNotIn("level=warn", worker.output)
        secured = self.start()
        self.assertNotIn("authenticates nobody", secured.output)


if __name__ == "__main__":
    cli_support.main()
