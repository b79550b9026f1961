# SPDX-License-Identifier: Apache-2.0
"""Measures the rows: in every round all programs are started anew, in another order, and the ways to receive a workload
run directly one after the other, in another order, so that whatever else the machine does falls on all of them. Each
way runs as long as the others, after half as long that does not count: what a process does first, with new memory and
cold caches, takes longer."""
import contextlib
import json
import random
import time

from processes import Failure, Process, free_ports
from rows import PROGRESS, VARIANTS, WORKER_COUNT

PATH_SEC = 60  # for a data connection, which takes far less
MAX_COUNT = 10_000
TRIES = 3
FIELDS = ("seconds", "tensors", "messages", "cpu", "over_grpc")


class Pair:
    """An owner and who receives from it."""

    def __init__(self, name, program, how, row_set, progress, config, folder, stack):
        self.owner = stack.enter_context(Process(f"{name} owner", [program, "serve", config, how, row_set], folder))
        pid, = self.owner.wait_ready()
        command = [program, "pull", config, how, row_set, progress, pid]
        self.client = stack.enter_context(Process(f"{name} receiver", command, folder))
        self.client.wait_ready()

    def take(self, command, count):
        try:
            return dict(zip(FIELDS, self.client.ask_all(f"{command} {count}")))
        except Failure:
            if self.owner.child.poll() is not None:  # the receiver's reason is only that its owner is gone
                self.owner.fail(f"ended with {self.owner.child.returncode}")
            raise

    def take_over_path(self, command, count):
        """Again, when tensors have come over gRPC because the data connection broke meanwhile."""
        for _ in range(TRIES):
            taken = self.take(command, count)
            if taken["over_grpc"] == 0:
                break
            self.await_path(command)
        return taken

    def await_path(self, command):
        """Until the tensors do not all come over gRPC, as they do before there is a data connection."""
        end = time.monotonic() + PATH_SEC
        while True:
            taken = self.take(command, 1)
            if taken["over_grpc"] == 0:
                return
            if time.monotonic() > end:
                self.client.fail(f"{taken['over_grpc']:.0f} tensors still come over gRPC after {PATH_SEC} s")


class Rounds:
    """programs: variant -> path. transports: name -> settings. samples: transport -> progress -> title of a row ->
    variant -> measure -> values, one for each round."""

    def __init__(self, programs, transports, rows, address, folder, sample_sec):
        self.programs, self.transports, self.rows = programs, transports, rows
        self.address, self.folder, self.sample_sec = address, folder, sample_sec
        self.order = random.Random(1)
        self.counts = {}  # how often a row repeats its work
        self.samples = {}

    def is_grpc(self, transport):
        return self.transports[transport]["protocol"] == "grpc"

    def shuffled(self, values):
        values = list(values)
        return self.order.sample(values, len(values))

    def write_config(self, name, settings):
        owner, *workers = (f"{self.address}:{port}" for port in free_ports(1 + WORKER_COUNT))
        path = self.folder / f"{name.replace(' ', '-')}.json"
        path.write_text(json.dumps({"cluster": {"ps": [owner], "worker": workers}, "log": {"level": "warn"},
                                    **settings}))
        return path

    def calibrate(self, key, pair, command):
        """How many repetitions take about as long as a sample is to take."""
        count = 1
        while key not in self.counts:
            seconds = pair.take(command, count)["seconds"]
            if seconds * 4 >= self.sample_sec or count >= MAX_COUNT:
                self.counts[key] = max(1, min(MAX_COUNT, round(count * self.sample_sec / seconds)))
            count *= 4
        return self.counts[key]

    def measure(self, transport, progress, row, pairs):
        variants = [variant for variant in row.variants if variant in pairs]
        samples = self.samples.setdefault(transport, {}).setdefault(progress, {}).setdefault(row.title, {})
        for variant in self.shuffled(variants):
            count = self.calibrate((transport, progress, row.title, variant), pairs[variant], row.command)
            pairs[variant].take(row.command, (count + 1) // 2)
            take = pairs[variant].take if self.is_grpc(transport) else pairs[variant].take_over_path
            taken = take(row.command, count)
            values = samples.setdefault(variant, {})
            for field in FIELDS:
                if field != "tensors":
                    values.setdefault(field, []).append(taken[field] / taken["tensors"])

    def measure_set(self, transport, progress, rows):
        """Rows of one set, with programs of their own."""
        settings = self.transports[transport]
        variants = [variant for variant in VARIANTS
                    if variant in self.programs and any(variant in row.variants for row in rows)]
        with contextlib.ExitStack() as stack:
            pairs = {}
            for variant in self.shuffled(variants):
                name = f"{transport} {progress} {rows[0].set} {variant}"
                pairs[variant] = Pair(name, self.programs[variant], VARIANTS[variant], rows[0].set, progress,
                                      self.write_config(name, settings), self.folder / "logs", stack)
                if not self.is_grpc(transport):
                    pairs[variant].await_path(rows[0].command)
            for row in self.shuffled(rows):
                self.measure(transport, progress, row, pairs)

    def run_once(self):
        work = [(transport, progress, row_set) for transport in self.transports for progress in PROGRESS
                for row_set in dict.fromkeys(row.set for row in self.rows)]
        for transport, progress, row_set in self.shuffled(work):
            try:
                self.measure_set(transport, progress, [row for row in self.rows if row.set == row_set])
            except Failure as error:
                raise Failure(f"{row_set} over {transport}, {progress}: {error}") from error
