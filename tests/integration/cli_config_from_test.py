#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""tensorlane config from-slurm, from-kubernetes and from-hostfile: the cluster of a job from its environment alone."""
import json
import os

import cli_support
from cli_support import environment


def job_environment(**variables):
    """An environment without what a launcher around these tests may have set."""
    clean = {name: None for name in os.environ if name.startswith(("SLURM_", "LWS_", "POD_", "JOB_"))}
    return environment(**{**clean, "HOSTNAME": None, **variables})


class From(cli_support.Case):
    action = None

    def config(self, *arguments, **variables):
        result = self.assert_run(0, "config", self.action, *arguments, env=job_environment(**variables))
        self.assert_run(0, "config", "check", "-", input=result.stdout)
        return json.loads(result.stdout)

    def refuse(self, pattern, *arguments, code=1, **variables):
        result = self.assert_error(code, pattern, "config", self.action, *arguments, env=job_environment(**variables))
        self.assertEqual(result.stdout, "")


class Slurm(From):
    action = "from-slurm"

    def cluster(self, *arguments, **variables):
        return self.config(*arguments, **variables)["cluster"]

    def test_a_job(self):
        job = {"SLURM_JOB_NODELIST": "n[01-02],gpu-7", "SLURM_TASKS_PER_NODE": "2(x2),1"}
        self.assertEqual(self.config(**job),
                         {"cluster": {"worker": ["n01:4000", "n01:4001", "n02:4000", "n02:4001", "gpu-7:4000"]}})
        self.assertEqual(self.cluster("--tasks", "ps=1", "--tasks", "worker", "--port", "700", **job),
                         {"ps": ["n01:700"], "worker": ["n01:701", "n02:700", "n02:701", "gpu-7:700"]})
        self.assertEqual(self.cluster("--tasks=worker", "--tasks=eval=1", "--per-host=1", **job),
                         {"worker": ["n01:4000", "n02:4000"], "eval": ["gpu-7:4000"]})

    def test_order_of_tasks_is_that_of_slurm(self):
        job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "3,2"}
        orders = {("block:cyclic", None): "a0 a1 a2 b0 b1", ("cyclic", None): "a0 b0 a1 b1 a2",
                  ("plane", "2"): "a0 a1 b0 b1 a2"}
        for (distribution, size), order in orders.items():
            tasks = self.cluster(SLURM_DISTRIBUTION=distribution, SLURM_DIST_PLANESIZE=size, **job)["worker"]
            self.assertEqual(tasks, [f"{task[0]}:400{task[1]}" for task in order.split()])
        self.refuse("says no size", SLURM_DISTRIBUTION="plane", **job)
        for wrong in ("2x", "0", "-1"):
            self.refuse("says no size", SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE=wrong, **job)
        for arguments in ([], ["--per-host=1"]):
            self.refuse('"arbitrary" does not say .* from-hostfile with the file of SLURM_HOSTFILE\n$', *arguments,
                        SLURM_DISTRIBUTION="arbitrary", **job)

    def test_a_step_has_its_own_tasks_and_the_batch_script_is_no_step(self):
        job = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_STEP_NODELIST": "b",
               "SLURM_STEP_TASKS_PER_NODE": "2"}
        self.assertEqual(self.cluster(SLURM_STEP_ID="0", **job), {"worker": ["b:4000", "b:4001"]})
        self.assertEqual(self.cluster(SLURM_STEPID="0", **job), {"worker": ["b:4000", "b:4001"]})
        for special in ("4294967290", "4294967291"):
            self.assertEqual(self.cluster(SLURM_STEP_ID=special, **job), {"worker": ["a:4000", "b:4000", "c:4000"]})

    def test_a_heterogeneous_job(self):
        job = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "1",
               "SLURM_JOB_NODELIST_HET_GROUP_0": "a", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
               "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)"}
        self.assertEqual(self.cluster("--tasks=ps", "--tasks=worker", **job),
                         {"ps": ["a:4000"], "worker": ["b1:4000", "b2:4000"]})
        self.assertEqual(self.cluster("--tasks=ps=2", "--tasks=worker", **job),
                         {"ps": ["a:4000", "b1:4000"], "worker": ["b2:4000"]})
        self.assertEqual(self.cluster(**job), {"worker": ["a:4000", "b1:4000", "b2:4000"]})
        step = {**job, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "b[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
        self.assertEqual(self.cluster(SLURM_NTASKS="2", **step), {"worker": ["b1:4000", "b2:4000"]})
        self.assertEqual(self.cluster(**step), {"worker": ["b1:4000", "b2:4000"]})
        self.assertEqual(self.cluster("--per-host=2", SLURM_NTASKS="2", **step),
                         {"worker": ["b1:4000", "b1:4001", "b2:4000", "b2:4001"]})
        self.assertEqual(self.cluster(SLURM_NTASKS="3", **step), {"worker": ["a:4000", "b1:4000", "b2:4000"]})
        self.refuse("the step has 4 tasks.* srun --het-group", SLURM_NTASKS="4", **step)
        self.refuse("SLURM_JOB_NODELIST_HET_GROUP_1 is not set", **{**job, "SLURM_JOB_NODELIST_HET_GROUP_1": None})
        self.assertEqual(self.cluster(**{**job, "SLURM_HET_SIZE": "1"}), {"worker": ["a:4000"]})
        for wrong in ("2x", "x", "-2", " 2", "0", "99999999999999999999"):
            self.refuse(f'SLURM_HET_SIZE is "{wrong}" and must be a number', **{**job, "SLURM_HET_SIZE": wrong})

    def test_what_is_missing(self):
        self.refuse("SLURM_JOB_NODELIST is not set.*: run this in sbatch, salloc or srun")
        self.refuse("SLURM_JOB_NODELIST is not set", SLURM_JOB_NODELIST="")
        self.refuse("SLURM_TASKS_PER_NODE is not set: .*--per-host", SLURM_JOB_NODELIST="a")
        self.refuse('SLURM_JOB_NODELIST: "a\\[1": a bracket is not closed', "--per-host=1", SLURM_JOB_NODELIST="a[1")
        self.refuse("SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE: .* fewer", SLURM_JOB_NODELIST="a,b",
                    SLURM_TASKS_PER_NODE="1")

    def test_numbers_of_tasks(self):
        job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2(x2)"}
        self.refuse("names 3 tasks, and there are 4", "--tasks=ps=3", **job)
        self.refuse("how many tasks have ps and worker", "--tasks=ps", "--tasks=worker", **job)
        self.refuse("no task is left for worker: there are 4", "--tasks=ps=4", "--tasks=worker", **job)
        self.refuse("names the job ps twice", "--tasks=ps=1", "--tasks=ps", **job)
        for wrong in ("", "=1", "a b", "ps=", "ps=0", "ps=-1", "ps=1x", "ps=x2", "ps=2x0", "ps=65537", "ps=999x999",
                      "p" * 129):
            self.refuse("must be JOB or JOB=N", "--tasks", wrong, **job)
        self.refuse("a has more than 1 tasks, .* from port 65535 on", "--port=65535", **job)
        self.refuse("--port: must be", "--port=0", code=2, **job)

    def test_settings_are_kept_and_their_paths_are_absolute(self):
        there = self.folder / "there"
        there.mkdir()
        tls = {"ca": "ca.pem", "certificate": "/etc/{name}.pem", "key": "{name}.key", "crl": "", "min_version": "1.3"}
        settings = {"cluster": {"old": ["x:1"]}, "checksum": True, "security": {"tls": tls},
                    "local": {"socket_folder": "sockets"},
                    "jobs": {"worker": {"publish": ["m.npy", "/n.npy"], "local": {"socket_folder": ""}}}}
        path = self.write_json(settings, "there/settings.json")
        job = {"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "1"}
        self.assertEqual(self.config("--settings", path, **job), {
            "cluster": {"worker": ["a:4000"]}, "checksum": True,
            "security": {"tls": {**tls, "ca": f"{there}/ca.pem", "key": f"{there}/{{name}}.key"}},
            "local": {"socket_folder": f"{there}/sockets"},
            "jobs": {"worker": {"publish": [f"{there}/m.npy", "/n.npy"], "local": {"socket_folder": ""}}}})
        self.refuse("chekcsum", "--settings", self.write_json({"chekcsum": True}), **job)
        self.refuse("no JSON object|not a JSON object", "--settings", self.write_json([]), **job)
        self.refuse("nowhere.json: No such file", "--settings", self.folder / "nowhere.json", **job)

    def test_certificates(self):
        certs = self.folder / "certs"
        certs.mkdir()
        job = {"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "1"}
        tls = {"ca": f"{certs}/ca.pem", "certificate": f"{certs}/{{name}}.pem", "key": f"{certs}/{{name}}.key"}
        self.assertEqual(self.config("--tls", certs, **job)["security"], {"tls": tls})
        (certs / "ca.crl").touch()
        settings = self.write_json({"security": {"encrypt": "require", "tls": {"ca": "x"}}})
        self.assertEqual(self.config("--tls", certs, "--settings", settings, **job)["security"],
                         {"encrypt": "require", "tls": {**tls, "crl": f"{certs}/ca.crl"}})


class Kubernetes(From):
    action = "from-kubernetes"

    def test_a_stateful_set_or_an_indexed_job(self):
        self.assertEqual(self.config("--tasks=worker=2", "--service=lane", HOSTNAME="model-1"), {
            "cluster": {"worker": ["model-0.lane:4000", "model-1.lane:4000"]}, "listen": "0.0.0.0:4000"})
        self.assertEqual(self.config("--tasks=worker=1", "--service=lane", HOSTNAME="model-1",
                                     POD_IP="fd00::1")["listen"], "[::]:4000")
        settings = self.write_json({"listen": "127.0.0.1:9"})
        self.assertEqual(self.config("--tasks=worker=1", "--service=lane", "--settings", settings,
                                     HOSTNAME="model-1")["listen"], "127.0.0.1:9")

    def test_several_jobs_are_called_alike(self):
        wanted = {"ps": ["t-ps-0.lane:9"], "worker": ["t-worker-0.lane:9", "t-worker-1.lane:9"]}
        for pod in ("t-ps-0", "t-worker-1"):
            self.assertEqual(self.config("--tasks=ps=1", "--tasks=worker=2", "--service=lane", "--port=9",
                                         HOSTNAME=pod)["cluster"], wanted)
        self.assertEqual(self.config("--tasks=ps=1", "--tasks=worker=2", "--hosts=t-{job}-{index}.lane",
                                     "--port=9")["cluster"], wanted)

    def test_names_of_jobs_that_end_alike(self):
        for pod, before in (("server-0", ""), ("t-param-server-0", "t-")):
            self.assertEqual(self.config("--tasks=param-server=1", "--tasks=server=1", "--service=lane",
                                         HOSTNAME=pod)["cluster"],
                             {"param-server": [f"{before}param-server-0.lane:4000"],
                              "server": [f"{before}server-0.lane:4000"]})
        self.refuse("HOSTNAME=xps-0 does not end with", "--service=lane", "--tasks=ps=1", "--tasks=worker=1",
                    HOSTNAME="xps-0")

    def test_a_job_set(self):
        self.assertEqual(self.config("--tasks=worker=2x2", "--service=js", HOSTNAME="js-worker-1-0")["cluster"],
                         {"worker": [f"js-worker-{i}-{j}.js:4000" for i in range(2) for j in range(2)]})

    def test_a_leader_worker_set(self):
        group = {"LWS_LEADER_ADDRESS": "lws-3.lws.prod", "LWS_GROUP_SIZE": "3", "HOSTNAME": "lws-3-1"}
        workers = ["lws-3-1.lws.prod:4000", "lws-3-2.lws.prod:4000"]
        self.assertEqual(self.config("--tasks=ps=1", "--tasks=worker", **group)["cluster"],
                         {"ps": ["lws-3.lws.prod:4000"], "worker": workers})
        self.assertEqual(self.config(**group)["cluster"], {"worker": ["lws-3.lws.prod:4000", *workers]})
        for size in (None, "3x"):
            self.refuse("LWS_GROUP_SIZE is no number", **{**group, "LWS_GROUP_SIZE": size})

    def test_what_is_missing(self):
        self.refuse("which pods\\? --service", "--tasks=worker=2")
        self.refuse("how many tasks has worker\\? .*--tasks worker=N", "--service=lane", HOSTNAME="m-0")
        self.refuse("HOSTNAME is not set", "--service=lane", "--tasks=worker=1")
        for name, tasks in (("model", ["--tasks=worker=1"]), ("-1", ["--tasks=worker=1"]),
                            ("m-1", ["--tasks=worker=2x1"]), ("m-1", ["--tasks=ps=1", "--tasks=worker=1"])):
            self.refuse(f"HOSTNAME={name} does not end with", "--service=lane", *tasks, HOSTNAME=name)
        self.refuse("two tasks would be in the pod a", "--hosts=a", "--tasks=worker=2")
        self.refuse("in braces", "--hosts=a-{pod}", "--tasks=worker=2")
        self.refuse("--service or --hosts", "--hosts=a", "--service=b", code=2)
        self.refuse("--per-host is not for", "--hosts=a", "--tasks=worker=1", "--per-host=1", code=2)


class Hostfile(From):
    action = "from-hostfile"

    def test_files(self):
        path = self.folder / "hosts"
        path.write_text("a slots=2\nb:1  # one\n[fd00::1]\n")
        self.assertEqual(self.config(path, "--tasks=ps=1", "--tasks=worker"),
                         {"cluster": {"ps": ["a:4000"], "worker": ["a:4001", "b:4000", "[fd00::1]:4000"]}})
        path.write_text("n1\nn1\nn2\n")
        self.assertEqual(self.config(path)["cluster"], {"worker": ["n1:4000", "n1:4001", "n2:4000"]})
        self.assertEqual(self.config(path, "--per-host=1")["cluster"], {"worker": ["n1:4000", "n2:4000"]})

    def test_standard_input(self):
        result = self.assert_run(0, "config", "from-hostfile", "-", input="a\n")
        self.assertEqual(json.loads(result.stdout), {"cluster": {"worker": ["a:4000"]}})

    def test_what_is_wrong(self):
        path = self.folder / "hosts"
        self.refuse("which file\\?", code=2)
        self.refuse("hosts: No such file", path)
        for text, pattern in (("", "is empty"), ("# none\n", "names no host"), ("a\0b", "is no text"),
                              ("a b", "hosts: line 1: \"b\""),
                              ("a\n\nho_st/x", "hosts: line 3: address \"ho_st/x\" has a host that is no name"),
                              ("a\n300.1.1.1", "hosts: line 2: address \"300.1.1.1\" has a host that is no IPv4"),
                              ("a\nb\nA", "hosts: line 3: \"A\" is the host a in another spelling")):
            path.write_text(text)
            self.refuse(pattern, path)
        self.refuse("Is a directory", self.folder)
        self.refuse("unexpected argument y", path, "y", code=2)
        self.refuse("--service is for from-kubernetes", path, "--service=lane", code=2)
        self.refuse("--hosts is for from-kubernetes", path, "--hosts=a", code=2)


if __name__ == "__main__":
    cli_support.main()
