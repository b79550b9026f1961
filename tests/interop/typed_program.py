#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""wheel_test checks this program with mypy --strict, and does not run it. Where it ignores an error there is one."""
import typing

import tensorlane
from tensorlane import kv


def show(worker: tensorlane.Worker, address: str, memory: bytearray) -> float:
    peer = worker.add_peer(address)
    worker.publish("weights", b"abc", step=7)
    got = worker.recv_wait(peer, "weights", 7, into=memory, timeout=1.5, part=tensorlane.Box((0,), (2,)))
    shape: tuple[int, ...] = got.shape
    count = len(shape) + len(memoryview(got)) + len(got.as_bytes().dtype)
    for one in worker.recv_many_wait("ps:0", ["a", ("b", 3)], into=[memory, None], parts=[None, [(0, 8)]]):
        if isinstance(one, tensorlane.Tensor):
            count += one.step
        else:
            print(one.code, one.status, one.peer, one.key, one.results)
    for value in worker.subscribe_wait(peer, "weights", timeout=1):
        print(value.path, value.path_reason, value.is_dead)
    count += worker.put_wait(peer, "key", got).nbytes + worker.remove_wait(peer, "key") + worker.counters()["frames"]
    keys: list[str] = [listed.key for listed in worker.list_wait(peer)]
    tensors, step = worker.pull_state_dict_wait(peer, progress=lambda done, total: print(done, total))
    print(keys, worker.health().reasons, worker.peers()[0].name, tensors["layer"].device)
    return got.duration + count + step


async def follow(worker: tensorlane.Worker) -> int:
    gradients = await worker.recv_many("worker:0", ["row/0"], step=7)
    async for weights in worker.subscribe("ps:0", "weights"):
        return weights.step + len(gradients)
    return (await worker.stat("ps:0", "weights")).nbytes


def cache(address: str) -> dict[str, int]:
    with kv.Client(address, timeout=2) as client:
        found: list[bool] = client.get(["a"], [bytearray(4)])
        print(found, client.submit(client.exists_async, ["a"]).result()[0])
        return client.describe()


def fails(worker: tensorlane.Worker) -> typing.Optional[int]:
    worker.recv_wait("ps:0")  # type: ignore[call-arg]
    worker.publish("key", 7)  # type: ignore[arg-type]
    worker.recv_wait("ps:0", "key", 0, None)  # type: ignore[call-arg]
    name: int = worker.name  # type: ignore[assignment]
    print(name, worker.none, tensorlane.TensorLike)  # type: ignore[attr-defined]
    try:
        worker.wait_for_peers(timeout=1)
    except tensorlane.DeadlineExceeded as error:
        return error.code
    return None
