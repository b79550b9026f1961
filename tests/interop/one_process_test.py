#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The wheel in one process with packages that have libraries of their own, a gRPC among them: NIXL, grpcio, TensorFlow,
torch and Mooncake are imported before ours and after it, and used."""
import importlib.util
import os
import re
import subprocess
import sys
import unittest

import wheel_support

USES = """
import os
os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")

def nixl():
    from nixl_cu12._api import nixl_agent, nixl_agent_config
    import numpy
    agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("one", "two")]
    arrays = [numpy.full(1000, value, numpy.uint8) for value in (7, 0)]
    lists = [[(array.ctypes.data, array.nbytes, 0, "")] for array in arrays]
    registered = [agent.register_memory(one, "DRAM") for agent, one in zip(agents, lists)]
    name = agents[1].add_remote_agent(agents[0].get_agent_metadata())
    ends = [agents[1].get_xfer_descs([(*one[0][:3],)], "DRAM") for one in lists]
    handle = agents[1].initialize_xfer("READ", ends[1], ends[0], name)
    state = agents[1].transfer(handle)
    while state == "PROC":
        state = agents[1].check_xfer_state(handle)
    assert state == "DONE" and (arrays[1] == 7).all(), state
    agents[1].release_xfer_handle(handle)
    for agent, one in zip(agents, registered):
        agent.deregister_memory(one)

def grpc():
    import grpc
    from concurrent import futures
    class Echo(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert channel.unary_unary("/echo/Echo")(b"12", timeout=60) == b"12"
    server.stop(None).wait()

def tensorflow():
    import tensorflow
    server = tensorflow.distribute.Server.create_local_server()
    assert float(tensorflow.reduce_sum(tensorflow.ones((3, 4)))) == 12
    assert tensorflow.experimental.dlpack.to_dlpack(tensorflow.ones(3)) is not None

def torch():
    import torch
    assert torch.ones(1000).sum() == 1000

def mooncake():
    import mooncake.engine
    assert mooncake.engine.TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0

def ours():
    import tensorlane
    for protocol in ("grpc", "auto"):
        settings = {"log": {"level": "error"}, "protocol": protocol}
        with tensorlane.Worker(settings, address="127.0.0.1:0") as owner, \\
                tensorlane.Worker(settings, address="127.0.0.1:0") as asker:
            owner.publish("key", bytes(100_000))
            assert bytes(asker.recv_wait(asker.add_peer(owner.address), "key")) == bytes(100_000)
"""
CALLS_SEC = 240
MODULES = {"nixl": "nixl_cu12", "grpc": "grpc", "tensorflow": "tensorflow", "torch": "torch", "mooncake": "mooncake"}


class OneProcess(unittest.TestCase):
    """All are used before ours and after it, whichever is imported first. Among themselves they have an order in which
    they work without ours: NIXL cannot be loaded after TensorFlow."""

    @classmethod
    def setUpClass(cls):
        cls.folder = wheel_support.install(cls)

    def run_calls(self, calls):
        script = USES + "\n".join(f'{call}()\nprint("used {call}", flush=True)' for call in calls)
        if "nixl" in calls:  # NIXL 1.5.1 ends with SIGSEGV when its process does, without ours as well
            script += "\nos._exit(0)"
        environment = {**os.environ, "PYTHONPATH": self.folder}
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment,
                                timeout=CALLS_SEC, check=False)
        used = re.findall(r"^used (\w+)$", result.stdout, re.MULTILINE)
        self.assertEqual((result.returncode, used), (0, list(calls)), result.stdout[-2000:] + result.stderr[-2000:])

    def test_all(self):
        there = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
        if len(there) < len(MODULES):
            print("not installed:", ", ".join(sorted(MODULES.keys() - set(there))))
        self.assertTrue(there)
        for calls in ((*there, "ours", *there), ("ours", *there, "ours")):
            with self.subTest(calls[0]):
                self.run_calls(calls)


if __name__ == "__main__":
    unittest.main(verbosity=2)
