#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes: its commands run here, as in a pod, and its parts fit together.

The command and the probe of the container are run with the pod's variables; the folders that are mounted there are in a
temporary folder here, and the port is one that is free. The interop tests compare the manifest with published schemas.
"""
import os
import pathlib
import subprocess
import sys

import cli_support
from cli_support import PROGRAM, SOURCE, environment, free_ports, run, wait_until

try:
    import yaml
except ImportError:
    print("there is no yaml (Debian: python3-yaml)")
    sys.exit(cli_support.SKIPPED)

MANIFEST = SOURCE / "deploy/kubernetes/tensorlane.yaml"


class Kubernetes(cli_support.Case):
    def setUp(self):
        super().setUp()
        documents = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
        self.config_map, self.service, self.workload = documents
        self.pod = self.workload["spec"]["template"]["spec"]
        self.container, = self.pod["containers"]

    def test_parts_fit_together(self):
        labels = self.workload["spec"]["template"]["metadata"]["labels"]
        for selector in (self.service["spec"]["selector"], self.workload["spec"]["selector"]["matchLabels"]):
            self.assertLessEqual(selector.items(), labels.items())
        self.assertEqual(self.service["spec"]["clusterIP"], "None")
        self.assertTrue(self.service["spec"]["publishNotReadyAddresses"])
        self.assertEqual(self.workload["spec"]["serviceName"], self.service["metadata"]["name"])
        self.assertIn(f"--tasks ps={self.workload['spec']['replicas']} ", self.container["args"][0])
        self.assertIn(f"--service {self.service['metadata']['name']} ", self.container["args"][0])
        self.assertEqual(self.container["ports"][0]["containerPort"], self.service["spec"]["ports"][0]["port"])
        volumes = {volume["name"] for volume in self.pod["volumes"]}
        self.assertEqual({mount["name"] for mount in self.container["volumeMounts"]}, volumes)
        self.assertEqual([volume["configMap"]["name"] for volume in self.pod["volumes"] if "configMap" in volume],
                         [self.config_map["metadata"]["name"]])
        self.assertEqual(self.container["securityContext"]["capabilities"], {"drop": ["ALL"], "add": ["IPC_LOCK"]})

    def make_certificates(self):
        """As the commands at the head of the manifest do."""
        config = run("config", "from-kubernetes", "--tasks", "ps=2", "--hosts", "lane-{job}-{index}.lane")
        self.assertIn("tensorlane config from-kubernetes --tasks ps=2 --hosts 'lane-{job}-{index}.lane'",
                      MANIFEST.read_text(encoding="utf-8"))
        certs = self.folder / "certs"
        self.assert_run(0, "cert", "init", "-o", certs)
        self.assert_run(0, "cert", "issue", "--config", "-", "-o", certs, input=config.stdout)
        (certs / "ca.key").unlink()

    def test_commands_of_a_pod(self):
        self.make_certificates()
        port, = free_ports(1)
        folders = {"settings": "settings", "certs": "certs", "run": "run"}
        for mount in self.container["volumeMounts"]:
            folders[mount["name"]] = (mount["mountPath"], self.folder / mount["name"])
            folders[mount["name"]][1].mkdir(exist_ok=True)
        for name, text in self.config_map["data"].items():
            (self.folder / "settings" / name).write_text(text, encoding="utf-8")

        def here(command):
            for path, folder in folders.values():
                command = command.replace(path, str(folder))
            self.assertNotIn("/etc/", command.replace(str(self.folder), ""))
            return command.replace("127.0.0.1:4000", f"127.0.0.1:{port}").replace(
                "from-kubernetes", f"from-kubernetes --port {port}")

        env = environment(HOSTNAME="lane-ps-1", POD_IP="10.0.0.1",
                          PATH=f"{pathlib.Path(PROGRAM).parent}:{os.environ['PATH']}")
        probe = self.container["startupProbe"]["exec"]["command"]
        self.assertEqual(probe, self.container["livenessProbe"]["exec"]["command"])
        self.assertEqual(probe, self.container["readinessProbe"]["exec"]["command"])

        def ask():
            command = here(probe[2]).replace(" -addr", " -connect-timeout 60s -rpc-timeout 60s -addr")
            return subprocess.run([*probe[:2], command], env=env, capture_output=True, text=True, check=False)

        self.assertEqual(ask().returncode, 2)
        with open(self.folder / "log", "w+", encoding="utf-8") as log:
            worker = subprocess.Popen([*self.container["command"], here(self.container["args"][0])], env=env,
                                      stdout=log, stderr=log)
            self.addCleanup(worker.wait)
            self.addCleanup(worker.kill)
            read = lambda: (self.folder / "log").read_text(encoding="utf-8")
            wait_until(lambda: '"worker ready"' in read() or worker.poll() is not None, "the worker is ready", read)
            self.assertIn('"name":"/job:ps/task:1"', read().replace('": "', '":"'))
            result = ask()
            self.assertEqual((result.returncode, result.stdout), (0, "status: SERVING\n"), result.stderr)
            worker.terminate()
            self.assertEqual(worker.wait(60), 0, read())


if __name__ == "__main__":
    cli_support.main()
