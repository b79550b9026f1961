#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Weights for reinforcement learning: one trainer, four rollout workers, ten steps; one rollout worker is killed and
started again in the middle.

In each step the trainer publishes its weights, each rollout worker receives those of that step into its own memory and
publishes what it has seen with them, and the trainer receives that from all. No file names the processes: the trainer's
address goes to a rollout worker when it is started, and its address comes back.

    PYTHONPATH=build/release/lib/python examples/python/rl_weight_sync.py
"""
import multiprocessing

import numpy

import tensorlane

STEPS, ROLLOUTS, KILLED_AT = 10, 4, 5
SHAPES = {"embedding": (1000, 64), "layer.weight": (64, 64), "layer.bias": (64,)}
SETTINGS = {"log": {"level": "error"}}


def rollout(trainer_address, addresses):
    """One rollout worker: receives the weights of each step that is not too old, and publishes a reward."""
    weights = {name: numpy.zeros(shape, numpy.float32) for name, shape in SHAPES.items()}
    with tensorlane.Worker(SETTINGS, address="127.0.0.1:0") as worker:
        trainer = worker.add_peer(trainer_address)
        addresses.send(worker.address)
        step = 0
        while step < STEPS:
            _, step = worker.pull_state_dict_wait(trainer, step + 1, into=weights)
            rewards = numpy.array([weights[name].mean() for name in SHAPES])
            worker.publish("rewards", rewards, step)
        addresses.recv()  # the trainer has the last ones


class Rollout:
    """A process with a rollout worker, as the trainer sees it."""

    def __init__(self, context, worker):
        self.connection, other = context.Pipe()
        self.process = context.Process(target=rollout, args=(worker.address, other), daemon=True)
        self.process.start()
        self.peer = worker.add_peer(self.connection.recv())


def train(worker, context):
    weights = {name: numpy.zeros(shape, numpy.float32) for name, shape in SHAPES.items()}
    rollouts = [Rollout(context, worker) for _ in range(ROLLOUTS)]
    for step in range(1, STEPS + 1):
        for array in weights.values():
            array += 1  # the optimizer
        worker.publish_state_dict(weights, step, copies=True)
        if step == KILLED_AT:
            rollouts[0].process.kill()
            worker.remove_peer(rollouts[0].peer)
            rollouts[0] = Rollout(context, worker)
            print("rollout worker 0 was killed and started again")
        rewards = [worker.recv_wait(one.peer, "rewards", step) for one in rollouts]
        means = {float(numpy.asarray(reward).mean()) for reward in rewards}
        print(f"step {step}: {len(rewards)} rollout workers have weights of {means}")
    for one in rollouts:
        one.connection.send("done")
        one.process.join()


def main():
    context = multiprocessing.get_context("spawn")  # a forked process could not use a worker
    with tensorlane.Worker(SETTINGS, address="127.0.0.1:0") as worker:
        train(worker, context)


if __name__ == "__main__":
    main()
