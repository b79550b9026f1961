#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a parameter server hands a VGG16 checkpoint of 553 MB to every worker that asks for it.

Writes the checkpoint into a temporary folder, starts both workers, pulls all tensors twice over the fastest transport
there is and, unless CONFIG forbids that, twice over gRPC, compares each with the checkpoint, shows the health of the
cluster and all rates, and stops the workers. However it ends, also by Ctrl-C, it stops the workers and removes the
folder.
"""
import argparse
import contextlib
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD", ROOT / "build/release"))
TENSORLANE = os.environ.get("TENSORLANE", str(BUILD / "bin/tensorlane"))
MAKE_VGG16 = BUILD / "examples/make_vgg16"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NEEDED_BYTES = 1_200_000_000
READY_SECONDS = 15
TLS = """"security": {"tls": {"ca": "certs/ca.pem", "certificate": "certs/{name}.pem", "key": "certs/{name}.key"},
  "allow": [{"who": ["any"], "what": ["read", "list", "peers"]}]}"""


@contextlib.contextmanager
def signals_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupted(number, _frame):
    ignore_signals()  # Later ones must not interrupt the end.
    sys.exit(128 + number)


def shown(*arguments, end="\n"):
    """Shows a command as a user would type it."""
    print(f"\n$ tensorlane {' '.join(map(str, arguments))}", end=end)


def without_folder(made):
    """What make_vgg16 says after the file's name: 32 tensors, ... parameters, ... bytes."""
    return made.rpartition(": ")[2].strip()


class Demo:
    def __init__(self, config, divisor, has_tls):
        self.config, self.divisor, self.has_tls = config, divisor, has_tls
        self.folder = None
        self.children = []
        self.rates = []

    def run(self):
        try:
            with signals_blocked():
                self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tensorlane-demo."))
                for number in SIGNALS:
                    if signal.getsignal(number) != signal.SIG_IGN:
                        signal.signal(number, interrupted)
            self.show()
        finally:
            self.clean_up()

    def clean_up(self):
        ignore_signals()
        for child in self.children:
            if child.poll() is None:
                child.terminate()
        for child in self.children:
            child.wait()
        if self.folder:
            shutil.rmtree(self.folder)

    def start(self, *command, **options):
        # A signal between fork() and the list would leave a child behind.
        with signals_blocked() as before:
            child = subprocess.Popen(command, text=True, **options,
                                     preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))
            self.children.append(child)
        return child

    def output_of(self, *command):
        """Runs a command to its end, and shows and returns what it prints."""
        child = self.start(*command, stdout=subprocess.PIPE)
        said = []
        for line in child.stdout:
            print(line, end="")
            said.append(line)
        if child.wait():
            sys.exit(child.returncode if child.returncode > 0 else 1)
        return "".join(said)

    def tensorlane(self, *arguments):
        shown(*arguments)
        return self.output_of(TENSORLANE, *arguments)

    def serve(self, job, *arguments):
        """Starts task 0 of the job, whose log goes to a file, and waits until it is ready."""
        task = ("serve", "--config", self.config, "--job", job, "--task", "0")
        shown(*task, *arguments, end=" &\n")
        path = self.folder / f"{job}.log"
        with path.open("w", encoding="utf-8") as log:
            worker = self.start(TENSORLANE, *task, "--parent", str(os.getpid()), *arguments, stderr=log)
        end = time.monotonic() + READY_SECONDS
        while "worker ready" not in path.read_text():
            if worker.poll() is not None:
                sys.exit(f"{path.read_text()}demo: /job:{job}/task:0 did not start; when its address is in use, stop "
                         "what uses it or give another configuration: examples/demo.py CONFIG")
            if time.monotonic() > end:
                sys.exit(f"{path.read_text()}demo: /job:{job}/task:0 is not ready after {READY_SECONDS} s")
            time.sleep(0.1)
        print(path.read_text(), end="")
        return worker

    def pull(self, name, which, *arguments):
        """Pulls everything. The tensors are compared byte by byte afterwards, so they need no checksum, and the rate
        does not include the comparison."""
        copy = self.folder / "copy.safetensors"
        said = self.tensorlane("pull", "--config", self.config, "--from", "/job:ps/task:0", "-o", copy, "--no-checksum",
                               "--verify-against", self.folder / "vgg16.safetensors", *arguments)
        rate, paths = re.search(r"(?m)^pulled .* \((.*)\) from .*; paths: (.*)$", said).groups()
        self.rates.append(f"{name:<6} {which:<7} {rate}, {paths}")
        copy.unlink()

    def make_checkpoint(self):
        print("== a checkpoint: the tensors of VGG16, random values\n")
        options = ["--divide", str(self.divisor)] if self.divisor > 1 else []
        command = [*options, str(self.folder / "vgg16.safetensors")]
        print(f"$ make_vgg16 {' '.join(command)}")
        return without_folder(self.output_of(MAKE_VGG16, *command))

    def make_certificates(self):
        print("\n== an authority, and a certificate for each task and for the tools")
        text = self.config.read_text().replace("{", f"{{{TLS},\n", 1)
        self.config = self.folder / "cluster.json"
        self.config.write_text(text)
        print(text, end="")
        self.tensorlane("cert", "init", "--folder", self.folder / "certs")
        self.tensorlane("cert", "issue", "--config", self.config, "--folder", self.folder / "certs")

    def show(self):
        free = shutil.disk_usage(self.folder).free
        needed = NEEDED_BYTES // self.divisor**2
        if free < needed:
            sys.exit(f"demo: {self.folder} has {free // 10**6} MB free, {needed // 10**6} are needed; set TMPDIR")
        made = self.make_checkpoint()
        if self.has_tls:
            self.make_certificates()

        print("\n== two workers: a parameter server that publishes it, and another")
        workers = [self.serve("ps", "--publish", self.folder / "vgg16.safetensors"), self.serve("worker")]

        print("\n== the first pull, compared with the checkpoint tensor by tensor")
        self.pull("auto", "first", "--table")
        print("\n== the second pull")
        self.pull("auto", "second")
        config = self.config.read_text()
        if '"require"' not in config:
            print("\n== the same over gRPC")
            self.pull("grpc", "first", "--protocol", "grpc")
            self.pull("grpc", "second", "--protocol", "grpc")

        print("\n== the health of the cluster")
        self.tensorlane("health", "--config", self.config)

        print("\n== the rates: protocol, pull, rate, and on which paths how many tensors came")
        print("\n".join(self.rates))
        # Only soft-RoCE's devices name their parent.
        if "verbs" in config and glob.glob("/sys/class/infiniband/*/parent"):
            print("The RDMA card is emulated (soft-RoCE): the processor does its work, so these rates say nothing of a "
                  "real card.")

        print("\n== stopping the workers")
        for worker in workers:
            worker.terminate()
            if worker.wait():
                sys.exit(f"demo: a worker did not stop well: exit status {worker.returncode}")
        print(f"done: {made.rpartition(', ')[0]}, pulled {len(self.rates)} times and equal")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Environment: TENSORLANE, the program; TENSORLANE_BUILD, the build folder; TMPDIR, where 1.2 GB must be "
               "free.")
    parser.add_argument("--divide", type=int, choices=(1, 2, 4, 8), default=1, metavar="N",
                        help="make every dimension of the tensors 2, 4 or 8 times smaller")
    parser.add_argument("--tls", action="store_true",
                        help="make certificates first, and a configuration that uses them")
    parser.add_argument("config", nargs="?", type=pathlib.Path, metavar="CONFIG",
                        help="a cluster with /job:ps/task:0 and /job:worker/task:0 on this machine "
                             "(config/examples/demo.json)")
    options = parser.parse_args()
    if options.config is None:
        os.chdir(ROOT)
        options.config = pathlib.Path("config/examples/demo.json")
    if not (os.access(TENSORLANE, os.X_OK) and os.access(MAKE_VGG16, os.X_OK)):
        sys.exit(f"demo: nothing is built in {BUILD}; run ./dev build")
    if not os.access(options.config, os.R_OK):
        sys.exit(f"demo: cannot read {options.config}")
    sys.stdout.reconfigure(line_buffering=True)
    try:
        Demo(options.config, options.divide, options.tls).run()
    except BrokenPipeError:  # Who read this has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
