# SPDX-License-Identifier: Apache-2.0
"""The programs that are measured, as child processes.

A program prints a line that starts with "ready" and then answers every line of its standard input with one line of
numbers, the first of which are the seconds that it took; it ends when its standard input does. Whatever goes wrong -
it dies, it does not answer in time - is a Failure that carries what it wrote to stderr: a benchmark that went wrong has
no number.
"""
import os
import pathlib
import random
import selectors
import signal
import socket
import subprocess
import time

TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
READY_SEC = 90
ANSWER_SEC = 120
END_SEC = 15


class Failure(Exception):
    """A program did not do what it should."""


class Process:
    """A child process; used in a with statement, which ends it whatever happens."""

    def __init__(self, name, command, log_folder, environment=None):
        self.name = name
        log_folder.mkdir(parents=True, exist_ok=True)
        self.log_path = pathlib.Path(log_folder, name.replace(" ", "-") + ".log")
        with open(self.log_path, "wb") as log:
            self.child = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=log, env={**os.environ, **(environment or {})})
        self.buffer = b""

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.end()

    @property
    def pid(self):
        return self.child.pid

    def fail(self, what):
        log = self.log_path.read_text(errors="replace").strip().splitlines()
        raise Failure(f"{self.name}: {what}" + "".join(f"\n    {line}" for line in log[-8:]))

    def read_line(self, timeout_sec):
        """The next line of its standard output."""
        deadline = time.monotonic() + timeout_sec
        output = self.child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not selector.select(max(0, deadline - time.monotonic())):
                    self.fail(f"no answer within {timeout_sec} s")
                data = os.read(output, 65536)
                if not data:
                    self.fail(f"ended with {self.child.wait()}")
                self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.decode().strip()

    def wait_ready(self):
        """The words that follow "ready"."""
        while True:
            words = self.read_line(READY_SEC).split()
            if words and words[0] == "ready":
                return words[1:]

    def wait_logged(self, text):
        """The first line of its stderr that has the text."""
        deadline = time.monotonic() + READY_SEC
        while time.monotonic() < deadline:
            for line in self.log_path.read_text(errors="replace").splitlines():
                if text in line:
                    return line
            if self.child.poll() is not None:
                self.fail(f"ended with {self.child.returncode}")
            time.sleep(0.01)
        return self.fail(f"did not write {text!r} within {READY_SEC} s")

    def ask(self, command):
        """Sends a command; returns the seconds it took."""
        return self.ask_all(command)[0]

    def ask_all(self, command):
        """Sends a command; returns all numbers of the answer."""
        try:
            self.child.stdin.write(command.encode() + b"\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            self.fail(f"ended with {self.child.wait()}")
        return [float(word) for word in self.read_line(ANSWER_SEC).split()]

    def pause(self):
        """All of its threads stand still until resume()."""
        self.child.send_signal(signal.SIGSTOP)

    def resume(self):
        self.child.send_signal(signal.SIGCONT)

    def end(self):
        """Closes its standard input, and is less polite when that does not end it."""
        self.resume()
        for less_polite in (self.child.stdin.close, self.child.terminate, self.child.kill):
            try:
                less_polite()
            except BrokenPipeError:
                pass
            try:
                self.child.wait(END_SEC)
                break
            except subprocess.TimeoutExpired:
                continue
        self.child.stdout.close()

    def stop(self):
        """For programs that do not read their standard input: SIGTERM, which they must answer with exit code 0."""
        self.child.send_signal(signal.SIGTERM)
        try:
            if self.child.wait(END_SEC) != 0:
                self.fail(f"ended with {self.child.returncode} after SIGTERM")
        except subprocess.TimeoutExpired:
            self.fail(f"did not end within {END_SEC} s of SIGTERM")


def status_field(pid, name):
    """A number of /proc/PID/status: VmHWM and its kin in bytes, Threads as it is."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            words = value.split()
            return int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    raise Failure(f"/proc/{pid}/status has no {name}")


def proportional_bytes(pid):
    """Memory with shared pages divided among those who share them."""
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise Failure(f"/proc/{pid}/smaps_rollup has no Pss")


def cpu_seconds(pid):
    """What all threads of a process have used, in user and kernel mode."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SEC


def children_of(pid):
    return [int(word) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()]


def free_ports(count):
    """Ports of the loopback interface without a listener, outside of the range that the kernel gives to outgoing
    connections, of which a large cluster makes many while it starts."""
    low, high = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in range(10000, 65536) if not low <= port <= high]
    random.shuffle(candidates)
    ports = []
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise Failure(f"fewer than {count} free ports outside of {low}..{high}")
