# SPDX-License-Identifier: Apache-2.0
"""What is compared with what, and how it is measured.

A group is a set of variants that do the same work: each is one mode of one program. After a warm-up that also finds out
how often a variant must repeat its work to run for long enough, the variants of a group run in turn, round after round,
in another order in every round, so that whatever else the machine does, and what the variant before has left in caches
and queues, falls on all of them. All programs are started anew after some rounds, because where a process finds its
memory can make it faster or slower for as long as it lives. A variant's number is the median of all its rounds. A row
compares one variant of ours with the fastest of the peer's; its ratio says how many times faster ours is.
"""
import dataclasses
import random
import statistics

from processes import cpu_seconds

KIB = 1 << 10
MIB = 1 << 20
OUTSTANDING_COUNT = 1000

WARM_UP_SEC = 0.3
MAX_REPEAT_COUNT = 100_000
ORDER = random.Random(1)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A mode of a program. tensors_per_repeat: of one repetition."""
    program: str
    mode: str
    tensors_per_repeat: int = 1

    @property
    def name(self):
        return f"{self.program} {self.mode}"


@dataclasses.dataclass(frozen=True)
class Row:
    """ours: a mode of our programs, each of which makes a row. target: the ratio wanted, None: only reported."""
    title: str
    ours: str
    peer_title: str
    peers: tuple
    target: float | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    title: str
    size_bytes: int
    variants: tuple
    rows: tuple


OURS = {"thread": "a thread of the library moves the data", "caller": "whoever waits moves the data"}
UNARY = ("grpc unary_typed", "grpc unary_raw", "grpc unary_tuned")
STREAM = ("grpc stream", "grpc stream_tuned")


def variants(*names, tensors_per_repeat=1):
    """"ours MODE" stands for the mode in each of our programs."""
    for name in names:
        program, mode = name.split()
        for one in OURS if program == "ours" else (program,):
            yield Variant(one, mode, tensors_per_repeat)


def large_group(title, size_bytes, rows):
    return Group(title, size_bytes, tuple(variants("ours pull", "ours one_shot", *STREAM, *UNARY,
                                                   "tensorflow fetch", "gloo recv")), rows)


GROUPS = (
    large_group("64 MiB", 64 * MIB, (
        Row("64 MiB published", "pull", "gRPC C++ stream", STREAM, 1.0),
        Row("64 MiB published", "pull", "gRPC C++ unary", ("grpc unary_typed",), 2.0),
        Row("64 MiB published", "pull", "gRPC C++ unary, its bytes not copied", ("grpc unary_raw",), 2.0),
        Row("64 MiB published", "pull", "gRPC C++ unary, tuned by hand too", ("grpc unary_tuned",), 2.0),
        Row("64 MiB published", "pull", "TensorFlow", ("tensorflow fetch",), 2.0),
        Row("64 MiB published", "pull", "PyTorch gloo", ("gloo recv",)),
        Row("64 MiB sent", "one_shot", "gRPC C++ stream", STREAM),
    )),
    large_group("1 MiB", 1 * MIB, (
        Row("1 MiB published", "pull", "gRPC C++, better of both", STREAM + UNARY, 1.0),
        Row("1 MiB published", "pull", "TensorFlow", ("tensorflow fetch",), 2.0),
        Row("1 MiB published", "pull", "PyTorch gloo", ("gloo recv",)),
        Row("1 MiB sent", "one_shot", "gRPC C++, better of both", STREAM + UNARY),
    )),
    Group("4 KiB", 4 * KIB,
          tuple(variants("ours pull", "ours one_shot", *UNARY, "grpc unary_async_server", *STREAM, "tensorflow fetch",
                         "gloo recv")), (
        Row("4 KiB one at a time", "pull", "gRPC C++ unary", UNARY + ("grpc unary_async_server",), 1.0),
        Row("4 KiB one at a time", "pull", "gRPC C++ open stream", STREAM),
        Row("4 KiB one at a time", "pull", "TensorFlow", ("tensorflow fetch",)),
        Row("4 KiB one at a time", "pull", "PyTorch gloo", ("gloo recv",)),
        Row("4 KiB sent, one at a time", "one_shot", "gRPC C++ unary", UNARY + ("grpc unary_async_server",)),
    )),
    Group("1,000 x 4 KiB", 4 * KIB,
          tuple(variants("ours pull", "grpc unary_typed", "grpc unary_raw")) +
          tuple(variants("ours burst", "ours window", "ours send_burst", "grpc burst_typed", "grpc burst_raw",
                         "grpc window_typed", "grpc window_raw", tensors_per_repeat=OUTSTANDING_COUNT)), (
        Row("1,000 x 4 KiB at once", "burst", "gRPC C++ async unary", ("grpc burst_typed", "grpc burst_raw"), 1.0),
        Row("1,000 x 4 KiB at once", "burst", "its own, one at a time", ("ours pull",), 3.0),
        Row("1,000 x 4 KiB at once", "burst", "gRPC C++ one at a time", ("grpc unary_typed", "grpc unary_raw"), 3.0),
        Row("1,000 x 4 KiB always", "window", "gRPC C++ async unary", ("grpc window_typed", "grpc window_raw")),
        Row("1,000 x 4 KiB sent at once", "send_burst", "gRPC C++ async unary", ("grpc burst_typed", "grpc burst_raw")),
    )),
)


# ------------------------------------------------------------------------------------------------------- measuring --

def calibrate(programs, group, variant, sample_sec):
    """How many repetitions take about sample_sec. Runs at least as long as it takes to warm up."""
    count, spent_sec = 1, 0.0
    while True:
        seconds = programs[variant.program].client.ask(f"{variant.mode} {group.size_bytes} {count}")
        spent_sec += seconds
        wanted = max(1, round(count * sample_sec / max(seconds, 1e-9)))
        if spent_sec >= min(WARM_UP_SEC, sample_sec) and seconds * 4 >= min(sample_sec, spent_sec):
            return min(wanted, MAX_REPEAT_COUNT)
        count = min(wanted, count * 8, MAX_REPEAT_COUNT)


class Samples:
    """Of one variant: its seconds per tensor in every round, and what all rounds took of the processors."""

    def __init__(self):
        self.seconds = []
        self.cpu_seconds = 0.0
        self.tensor_count = 0

    def as_dict(self):
        return {"seconds_per_tensor": self.seconds, "cpu_seconds_per_tensor": self.cpu_seconds / self.tensor_count,
                "tensor_count": self.tensor_count}


def measure(programs, group, round_count, sample_sec, samples, say):
    """Runs a group. programs: name -> Program; variants of programs that are not there are left out.
    samples: variant name -> Samples, to which those of these rounds are added."""
    running = [variant for variant in group.variants if variant.program in programs]
    say(f"{group.title}: warming up")
    counts = {variant: calibrate(programs, group, variant, sample_sec) for variant in running}
    for round_index in range(round_count):
        say(f"{group.title}: round {round_index + 1} of {round_count}")
        for variant in ORDER.sample(running, len(running)):
            program = programs[variant.program]
            taken = samples.setdefault(variant.name, Samples())
            tensor_count = counts[variant] * variant.tensors_per_repeat
            before = sum(map(cpu_seconds, program.pids))
            passed = program.client.ask(f"{variant.mode} {group.size_bytes} {counts[variant]}")
            taken.cpu_seconds += sum(map(cpu_seconds, program.pids)) - before
            taken.seconds.append(passed / tensor_count)
            taken.tensor_count += tensor_count


# ------------------------------------------------------------------------------------------------------- comparing --

def quartiles(values):
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def compare(row, group, samples):
    """The results of a row, one per program of ours; none when the peer was not measured."""
    for program in OURS:
        ours_name = f"{program} {row.ours}"
        peer_names = [f"{program} {name.split()[1]}" if name.startswith("ours ") else name for name in row.peers]
        peer_names = [name for name in peer_names if name in samples]
        if ours_name not in samples or not peer_names:
            continue
        medians = {name: statistics.median(samples[name].seconds) for name in [ours_name, *peer_names]}
        best = min(peer_names, key=medians.get)
        ratios = [peer / ours for ours, peer in zip(samples[ours_name].seconds, samples[best].seconds)]
        low, high = quartiles(ratios)
        ratio = medians[best] / medians[ours_name]
        yield {"measure": row.title, "progress": program, "size_bytes": group.size_bytes,
               "ours_seconds": medians[ours_name], "peer": row.peer_title, "peer_variant": best,
               "peer_seconds": medians[best], "ratio": ratio, "ratio_low": low, "ratio_high": high,
               "ours_cpu_seconds": samples[ours_name].cpu_seconds / samples[ours_name].tensor_count,
               "peer_cpu_seconds": samples[best].cpu_seconds / samples[best].tensor_count,
               "target": row.target, "is_met": None if row.target is None else ratio >= row.target}
