# SPDX-License-Identifier: Apache-2.0
"""What others take for the same tensors as some rows: gRPC C++ with a call for each tensor, TensorFlow with a fetch of
as many variables, UCX with a message or, in the virtual machine, a put for each, NIXL with one transfer of as many
descriptors, and in the virtual machine a bare write of perftest. tag_bw of UCX sends one buffer into one buffer, again
and again; ucx_peer has one for each tensor on both sides, as we have."""
import contextlib
import dataclasses
import pathlib
import subprocess

import pypi
from dataplane import common
from processes import Failure, Process, free_ports
from rows import ADDRESS

SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "peers"
UCX_PORT = 18625
UCX_ENVIRONMENT = {"UCX_TLS": "self,posix,cma", "UCX_WARN_UNUSED_ENV_VARS": "n"}
UCX_COUNT = 100_000
NIXL_GAP = 64
CTR_SMALL = "ctr-small published, library memory"
ASIDE = {"tensorflow": "TensorFlow", "nixl": "NIXL"}  # from PyPI


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """command: of the peer's program, without its count. transport, title: our row beside it. targets: progress -> how
    many times less groups shall take than the peer; 0.7 admits 1 / 0.7 times its time."""
    peer: str
    name: str
    command: str
    transport: str
    title: str
    workload: str
    tensors: int
    targets: dict = dataclasses.field(hash=False)


def both(target):
    return {"thread": target, "caller": target}


PEER_ROWS = (
    PeerRow("gRPC C++, an asynchronous call each", "grpc", "each_typed 0", "grpc", CTR_SMALL, "ctr-small", 2000,
            both(40)),
    PeerRow("TensorFlow, one fetch", "tensorflow", "fetch_each 0", "grpc", CTR_SMALL, "ctr-small", 2000, both(20)),
    PeerRow("gRPC C++, an asynchronous call each", "grpc", "burst_typed 4096", "grpc", "1,000 x 4 KiB at once", "4096",
            1000, {"thread": 12, "caller": 18}),
    PeerRow("UCX of Debian, tag_bw", "ucx", "", "local", "1,000 x 4 KiB at once", "4096", 1, {"caller": 0.7}),
    PeerRow("UCX of Debian, a buffer for each", "ucx_peer", "at_once 4096 1000", "local", "1,000 x 4 KiB at once",
            "4096", 1000, {"caller": 0.7}),
    PeerRow("NIXL, one transfer", "nixl", "read_many 4096", "local", "1,000 x 4 KiB at once", "4096", 1000,
            {"caller": 8}),
    PeerRow("UCX of Debian, put_bw, zcopy", "ucx_put", "", "verbs", "256 B, groups of 1,000", "256", 1, both(4)),
    PeerRow("ib_write_lat", "write_lat", "", "verbs", "8 B at a time, group: subscribed", "8", 1, {"caller": 1 / 1.6}),
)


class Peers:
    """samples: key of a row -> seconds for a tensor, one for each round. skipped: name of a peer -> why."""

    def __init__(self, rows, transports, options, program, say):
        titles = {row.title for row in rows}
        self.rows = [row for row in PEER_ROWS if row.title in titles and row.transport in transports]
        self.build, self.folder, self.program = options.build, options.folder, program
        self.sample_sec = options.sample_sec
        self.pythons, self.samples, self.skipped = {}, {}, {}
        if not (options.build / "bin" / "bench" / "ucx_peer").exists():
            self.skipped["ucx_peer"] = "built without libucx-dev"
        installed = options.build.parent / "bench"  # where other benchmarks have them too
        for name in dict.fromkeys(row.name for row in self.rows if row.name in ASIDE):
            try:
                if options.without_pypi:
                    raise pypi.Missing("--without-pypi")
                installed.mkdir(exist_ok=True)
                self.pythons[name] = pypi.install(name, installed, say)
            except (pypi.Missing, OSError) as error:
                self.skipped[name] = str(error)

    def sizes(self, workload):
        """A file with the bytes of each tensor of a workload."""
        path = self.folder / f"{workload}.sizes"
        path.write_bytes(subprocess.run([self.program, "sizes", workload], check=True, capture_output=True).stdout)
        return path

    def start_grpc(self, row, stack):
        folder = self.build / "bin" / "bench"
        server = stack.enter_context(Process("grpc server", [folder / "grpc_server"], self.folder / "logs"))
        return [folder / "grpc_client", *server.wait_ready(), self.sizes(row.workload)]

    def start_tensorflow(self, row, stack):
        command = [self.pythons["tensorflow"], SCRIPTS / "tensorflow_peer.py"]
        ports = free_ports(2)
        server = stack.enter_context(Process("tensorflow server", [*command, "serve", *ports], self.folder / "logs"))
        server.wait_ready()
        return [*command, "fetch", *ports, self.sizes(row.workload)]

    def start_ucx_peer(self, _row, stack):
        meeting = self.folder / "ucx-meeting"
        meeting.unlink(missing_ok=True)
        command = [self.build / "bin" / "bench" / "ucx_peer"]
        server = stack.enter_context(Process("ucx owner", [*command, "serve", meeting], self.folder / "logs",
                                             UCX_ENVIRONMENT))
        server.wait_ready()
        return [*command, "pull", meeting]

    def start_nixl(self, row, stack):
        meeting = self.folder / "nixl-meeting"
        meeting.unlink(missing_ok=True)
        command = [self.pythons["nixl"], SCRIPTS / "nixl_peer.py"]
        owner = [*command, "own", meeting, (4096 + NIXL_GAP) * row.tensors]
        stack.enter_context(Process("nixl owner", owner, self.folder / "logs")).wait_ready()
        return [*command, "read", meeting]

    def take_program(self, row):
        """Seconds for a tensor with a program that answers commands."""
        with contextlib.ExitStack() as stack:
            command = getattr(self, f"start_{row.name}")(row, stack)
            environment = UCX_ENVIRONMENT if row.name == "ucx_peer" else None
            client = stack.enter_context(Process(f"{row.name} client", command, self.folder / "logs", environment))
            client.wait_ready()
            client.ask(f"{row.command} 2")
            once = client.ask(f"{row.command} 1")
            count = max(1, round(self.sample_sec / once))
            return client.ask(f"{row.command} {count}") / count / row.tensors

    @staticmethod
    def take_ucx():
        command = ["ucx_perftest", "-p", UCX_PORT, "-f", "-t", "tag_bw", "-s", 4096, "-n", UCX_COUNT]
        numbers = common.last_numbers(common.pair(*map(str, command), address=ADDRESS, env=UCX_ENVIRONMENT))
        return numbers[3] / 1e6

    @staticmethod
    def take_ucx_put():
        return 1 / common.ucx_put_per_sec("zcopy", 256, 20000)

    @staticmethod
    def take_write_lat():
        return common.perftest("ib_write_lat", 8, 1000)[4] / 1e6

    def run_once(self, order):
        for row in order(self.rows):
            if row.name in self.skipped:
                continue
            try:
                take = getattr(self, f"take_{row.name}", None)
                seconds = take() if take is not None else self.take_program(row)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                raise Failure(f"{row.peer}: {error}") from error
            self.samples.setdefault(f"{row.name} {row.title}", []).append(seconds)
