#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Modules of torch whose parameters are DTensors, on meshes of processes that gloo connects: each process pulls the
slices of the model that it has, and no other byte."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import python_support
from python_support import PACKAGES, WorkersCase

try:
    import torch
except ImportError as missing:
    print(f"a package of PyPI is not there: {missing}")
    sys.exit(77)

PROLOGUE = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import tensorlane

def model_of(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(101, 32), torch.nn.Linear(32, 64, dtype=torch.bfloat16),
                                torch.nn.Linear(32, 101, bias=False))
    model[2].weight = model[0].weight  # tied
    return model

def pull(module):
    # Returns the bytes that came, but for the index, and how many there should be.
    with tensorlane.Worker({"log": {"level": "error"}}, address="127.0.0.1:0") as worker:
        peer = worker.add_peer(os.environ["OWNER"])
        index_bytes = worker.recv_wait(peer, "model").nbytes
        before = worker.counters()["bytes_received"]
        _, step = worker.pull_state_dict_wait(peer, into=module)
        assert step == 7, step
        came = worker.counters()["bytes_received"] - before - index_bytes
    locals = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]
    return came, sum(p.numel() * p.element_size() for p in locals)

def check(module):
    for (name, param), expected in zip(module.named_parameters(), model_of(7).parameters()):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        assert torch.equal(whole, expected), name

rank, count = int(os.environ["RANK"]), int(os.environ["COUNT"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=count)
module = model_of(0)
"""
EPILOGUE = """
came, wanted = pull(module)
check(module)
print(came, wanted)
dist.destroy_process_group()
"""


class Shards(WorkersCase):
    def setUp(self):
        super().setUp()
        scope = {}
        exec(PROLOGUE.split("def pull")[0], scope)  # pylint: disable=exec-used
        self.model = scope["model_of"](7)
        self.owner.publish_state_dict(self.model, step=7)
        self.whole_bytes = sum(one.numel() * one.element_size() for one in self.model.parameters())

    def run_ranks(self, count, script):
        """Returns (bytes that came, bytes that a process has) for each."""
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for rank in range(count):
                environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "RANK": str(rank), "COUNT": str(count),
                               "MEETING": str(pathlib.Path(folder, "meeting")), "OWNER": self.owner.address,
                               "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen([sys.executable, "-c", PROLOGUE + script + EPILOGUE], text=True,
                                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment))
            try:
                ends = [(*process.communicate(timeout=python_support.PATIENCE), process.returncode)
                        for process in processes]
            finally:
                for process in processes:
                    process.kill()
        for out, err, code in ends:
            self.assertEqual(code, 0, out + err)
        return [tuple(map(int, out.split())) for out, _, _ in ends]

    def assert_own_slices(self, results, most):
        for came, wanted in results:
            self.assertEqual(came, wanted)
            self.assertLess(came, most * self.whole_bytes)

    def test_rows_and_columns(self):
        """Rows of the one, columns of the other; four processes have 26, 26, 26 and 23 of 101 rows."""
        self.assert_own_slices(self.run_ranks(4, """
mesh = init_device_mesh("cpu", (4,))
tied = torch.nn.Parameter(distribute_tensor(module[0].weight.detach(), mesh, [Shard(0)]))
module[0].weight = module[2].weight = tied
module[1].weight = torch.nn.Parameter(distribute_tensor(module[1].weight.detach(), mesh, [Shard(1)]))
module[1].bias = torch.nn.Parameter(distribute_tensor(module[1].bias.detach(), mesh, [Shard(0)]))
"""), 0.27)

    def test_a_mesh_of_two_dimensions(self):
        """Replicas in the one, shards in the other; the bias is not sharded at all."""
        self.assert_own_slices(self.run_ranks(4, """
mesh = init_device_mesh("cpu", (2, 2))
tied = torch.nn.Parameter(distribute_tensor(module[0].weight.detach(), mesh, [Replicate(), Shard(1)]))
module[0].weight = module[2].weight = tied
module[1].weight = torch.nn.Parameter(distribute_tensor(module[1].weight.detach(), mesh, [Shard(0), Shard(1)]))
"""), 0.6)

    def test_fully_sharded(self):
        """What fully_shard makes of a module is pulled as it is."""
        self.assert_own_slices(self.run_ranks(2, """
from torch.distributed.fsdp import fully_shard
module = fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
"""), 0.52)


if __name__ == "__main__":
    unittest.main(verbosity=2)
