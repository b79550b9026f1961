#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A parameter server: workers receive the weights, compute gradients and send them; the server adds them up.

The tasks are those of a cluster, of one file or, as here, of one dict. Gradients are sent, so that each is received
once; a send completes when the server has it. The model is a line that is fitted to points.

    PYTHONPATH=build/release/lib/python examples/python/parameter_server.py
"""
import asyncio
import multiprocessing
import socket
import sys

import numpy

import tensorlane

STEPS, WORKERS, RATE = 300, 2, 0.5


def serve(cluster):
    weights = numpy.zeros(2)
    with tensorlane.Worker(cluster, job="ps") as server:
        for step in range(1, STEPS + 1):
            server.publish("weights", weights.copy(), step)
            gradients = [server.recv_wait(f"worker:{task}", "gradient", step) for task in range(WORKERS)]
            weights -= RATE * sum(numpy.asarray(gradient) for gradient in gradients) / WORKERS
        server.publish("weights", weights, STEPS + 1)
        for task in range(WORKERS):
            server.recv_wait(f"worker:{task}", "goodbye")


async def work(cluster, task):
    x = numpy.random.default_rng(task).random(100)
    y = 3 * x + 1
    async with tensorlane.Worker(cluster, job="worker", task=task) as worker:
        for step in range(1, STEPS + 1):
            slope, offset = numpy.asarray(await worker.recv("ps:0", "weights", step))
            error = slope * x + offset - y
            await worker.send("gradient", numpy.array([(error * x).mean(), error.mean()]), step)
        slope, offset = numpy.asarray(await worker.recv("ps:0", "weights", STEPS + 1))
        sys.stdout.write(f"worker {task}: y = {slope:.1f} x + {offset:.1f}\n")  # in one piece, as the other worker
        await worker.send("goodbye", b"")


def run_worker(cluster, task):
    asyncio.run(work(cluster, task))


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def main():
    tasks = {"ps": [free_address()], "worker": [free_address() for _ in range(WORKERS)]}
    cluster = {"cluster": tasks, "log": {"level": "error"}}
    context = multiprocessing.get_context("spawn")  # a forked process could not use a worker
    processes = [context.Process(target=serve, args=(cluster,), daemon=True)]
    processes += [context.Process(target=run_worker, args=(cluster, task), daemon=True) for task in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
