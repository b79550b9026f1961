# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line share: running the program, workers on free ports, tensor files, terminals."""
import contextlib
import json
import os
import pathlib
import pty
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

PROGRAM = os.environ.get("TENSORLANE", "")
BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD", "."))
SOURCE = pathlib.Path(os.environ.get("TENSORLANE_SOURCE", pathlib.Path(__file__).parents[2]))
SANITIZE = os.environ.get("TENSORLANE_SANITIZE", "")
SKIPPED = 77
# Set where the program runs in a mount namespace of its own.
HAS_MOUNTS = "TENSORLANE_TEST_HAS_MOUNTS"
# Seconds that anything may take before the test gives up; no test depends on how long it really takes.
PATIENCE = 180
# A health check that a slow machine has time for: by default it gives up after one second.
HEALTH = ("health", "-connect-timeout", "60s", "-rpc-timeout", "60s")

# Bytes of an element, by the name of its type in a safetensors header.
ELEMENT_BYTES = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


def environment(**changes):
    """Returns the environment of the tests without what would change the program's behaviour. None removes a
    variable."""
    result = {key: value for key, value in os.environ.items()
              if key not in ("TF_CONFIG", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "NO_COLOR")}
    result.update(TERM="xterm", http_proxy="http://127.0.0.1:9/", https_proxy="http://127.0.0.1:9/")
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = str(value)
    return result


def run(*arguments, env=None, **options):
    """Runs the program to its end; the result has returncode, stdout and stderr as text."""
    options.setdefault("timeout", PATIENCE)
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([PROGRAM, *map(str, arguments)], env=env or environment(), text=True, errors="replace",
                          check=False, **options)


def enter_namespace(probe, what, *others):
    """Runs this program again in a mount namespace of its own, or skips it where the command `probe` fails in one.
    others: options of unshare for more namespaces."""
    if HAS_MOUNTS in os.environ:
        return
    unshare = ["unshare", "--mount", *others] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    try:
        result = subprocess.run([*unshare, *probe], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        print("there is no unshare (util-linux)")
        sys.exit(SKIPPED)
    if result.returncode != 0:
        print(f"no {what} can be mounted, not even in a namespace of its own: {result.stderr.strip()}")
        sys.exit(SKIPPED)
    os.environ[HAS_MOUNTS] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def wait_until(condition, what, show=lambda: ""):
    """Waits until the condition holds; fails the test when it never does, with what `show` returns then."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what}\n{show()}")
        time.sleep(0.01)


# Seconds within which a fault must be noticed and named. What goes wrong instead takes a minute or never ends.
SOON = 30


def assert_soon(case, begin):
    """Asserts that not too much time has passed since time.monotonic() was begin; sanitizers may take their time."""
    if not SANITIZE:
        case.assertLess(time.monotonic() - begin, SOON)


# Workers give each other one second for each step of a probe, which is over when one of them stands still for so long.
# Health is asked so many times at most until that has not happened. Meanwhile so many seconds pass that workers try
# their peers anew.
PROBE_ROUNDS, PROBE_PAUSE = 5, 3


def was_probed_late(result):
    """Whether health has found, in a run without --quick, that workers did not reach each other in time. That a
    connection was refused is no matter of time."""
    shown = result.stdout
    if shown.startswith("{"):
        faults = [(row["stage"], row["reason"]) for row in json.loads(shown)["workers"] if not row["healthy"]]
    else:
        faults = [(stage, shown) for stage in re.findall(r"(?m)^/job:\S+ +\S+ +no +(\S+)", shown)]
    return any(stage == "probe" and "refused" not in reason for stage, reason in faults)


def ask_until_in_time(ask, was_late):
    """Returns what `ask` returns: the first that was not late, or else the last."""
    for _ in range(PROBE_ROUNDS - 1):
        result = ask()
        if not was_late(result):
            return result
        time.sleep(PROBE_PAUSE)
    return ask()


def descriptors(pid):
    """Returns the numbers of the open descriptors of a process."""
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


RESERVED = []


def free_ports(count):
    """Returns free ports below the range that the kernel gives to clients.

    Until this process ends, other tests find them in use. A worker can listen there all the same: its socket and the
    reserving one allow the reuse of addresses, and the latter does not listen.
    """
    ports = []
    while len(ports) < count:
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind(("127.0.0.1", random.randrange(10000, 32000)))
        except OSError:
            candidate.close()
            continue
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        RESERVED.append(candidate)
        ports.append(candidate.getsockname()[1])
    return ports


class Process:
    """A program in the background whose output lines are collected while it runs."""

    def __init__(self, *arguments, env=None, before=(), **options):
        """before: a command that runs the program."""
        self.lines = []
        self.process = subprocess.Popen([*before, PROGRAM, *map(str, arguments)], env=env or environment(), text=True,
                                        errors="replace", stdin=options.pop("stdin", subprocess.DEVNULL),
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self):
        return self.process.pid

    @property
    def output(self):
        return "\n".join(self.lines)

    def find(self, text):
        """Returns the first line that contains the text, or None when there is none yet."""
        return next((line for line in list(self.lines) if text in line), None)

    def await_line(self, text):
        def is_there():
            if self.find(text):
                return True
            if self.process.poll() is not None and not self.reader.is_alive():
                raise AssertionError(f"ended with {self.process.returncode} before \"{text}\":\n{self.output}")
            return False
        wait_until(is_there, f"\"{text}\" in:", lambda: self.output)
        return self.find(text)

    def send(self, number):
        self.process.send_signal(number)

    def wait(self):
        code = self.process.wait(timeout=PATIENCE)
        self.reader.join(timeout=PATIENCE)
        return code

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.send(number)
        return self.wait()

    def end(self):
        """Ends the process during clean-up; never fails."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


# A gate can hold only what passes through it, so these tests keep tensors on gRPC.
OVER_GRPC = {"protocol": "grpc"}


class Case(unittest.TestCase):
    """A test with a folder of its own, whose background processes end with it."""
    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tensorlane-test."))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def spawn(self, *arguments, **options):
        process = Process(*arguments, **options)
        self.addCleanup(process.end)
        return process

    def write_json(self, value, name="cluster.json"):
        path = self.folder / name
        path.write_text(json.dumps(value))
        return path

    def cluster(self, name="cluster.json", extra=None, **jobs):
        """Writes a configuration: cluster(ps=1, worker=2) has three tasks on free ports."""
        ports = iter(free_ports(sum(jobs.values())))
        cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in jobs.items()}
        return Cluster(self, self.write_json({"cluster": cluster, **(extra or {})}, name), cluster)

    def assert_run(self, code, *arguments, **options):
        """Runs the program and checks its exit code."""
        return self.assert_code(code, run(*arguments, **options))

    def assert_probed(self, code, *arguments, **options):
        """As assert_run, for health of several workers: it runs again while they did not reach each other in time."""
        return self.assert_code(code, ask_until_in_time(lambda: run(*arguments, **options), was_probed_late))

    def assert_code(self, code, result):
        self.assertEqual(result.returncode, code,
                         f"tensorlane {' '.join(result.args[1:])}\n{result.stdout}\n{result.stderr}")
        return result

    def assert_error(self, code, pattern, *arguments, **options):
        """Runs the program, which must print exactly one line on stderr, and this line must match the pattern."""
        result = self.assert_run(code, *arguments, **options)
        self.assertRegex(result.stderr, pattern)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        return result

    def files(self):
        """Returns all paths in the folder, relative to it."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


class Cluster:
    def __init__(self, case, path, jobs):
        self.case, self.path, self.jobs = case, path, jobs

    def address(self, job="ps", task=0):
        return self.jobs[job][task]

    def port(self, job="ps", task=0):
        return int(self.address(job, task).rsplit(":", 1)[1])

    def start(self, job="ps", task=0, *arguments, **options):
        """Starts one worker and waits until it is ready."""
        process = self.case.spawn("serve", "--config", self.path, "--job", job, "--task", task, *arguments, **options)
        process.await_line("worker ready")
        return process

    def start_without_gap(self, settle):
        """Starts a worker whose descriptors have no gap in their numbers once settle(process) has returned. A thread
        that has a file open while others open theirs leaves one: the worker has a descriptor left then at a limit of as
        many as are open, and the spare ones beyond that limit make way for nothing."""
        for _ in range(20):
            process = self.start()
            settle(process)
            numbers = descriptors(process.pid)
            if numbers == set(range(len(numbers))):
                return process
            process.stop()
        raise AssertionError("each start left a gap")


class Gate:
    """A port that forwards to another one. Until it is opened it lets only so many bytes come back, so a transfer
    through it cannot end before. The argument source is the address that it connects from."""

    def __init__(self, case, port, limit_bytes, source="127.0.0.1"):
        self.port, self.left, self.source = port, limit_bytes, source
        self.lock = threading.Lock()
        self.held = threading.Event()
        self.opened = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets = [self.listener]
        threading.Thread(target=self._accept, daemon=True).start()
        case.addCleanup(self._close)

    def await_held(self):
        if not self.held.wait(PATIENCE):
            raise AssertionError("never happened: enough bytes for the gate")

    def open(self):
        self.opened.set()

    def _close(self):
        self.open()
        for connection in self.sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port), source_address=(self.source, 0))
            except ConnectionRefusedError:
                client.close()
                continue
            except OSError:
                return
            self.sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source, sink, is_counted):
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                if is_counted:
                    self._count(len(piece))
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, length):
        with self.lock:
            self.left -= length
            is_over = self.left < 0
        if is_over and not self.opened.is_set():
            self.held.set()
            self.opened.wait(PATIENCE)


# ----------------------------------------------------------------------------------------------------- tensor files --

def write_safetensors(path, tensors, sparse_bytes=None, metadata=None):
    """Writes a file of the tensors, which are (dtype, shape, bytes) by name. With sparse_bytes, the content is that
    many zeros for each name, and takes no disk space."""
    header, offset = {"__metadata__": metadata} if metadata is not None else {}, 0
    for name, (dtype, shape, data) in tensors.items():
        size = sparse_bytes[name] if sparse_bytes else len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if sparse_bytes:
            file.truncate(8 + len(text) + offset)
        else:
            for _, _, data in tensors.values():
                file.write(data)
    return path


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    result = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        result[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + begin:8 + length + end])
    return result


def read_metadata(path):
    """Returns what the file has under __metadata__, which must come first, or None when there is none."""
    data = pathlib.Path(path).read_bytes()
    header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    if "__metadata__" in header and next(iter(header)) != "__metadata__":
        raise AssertionError(f"__metadata__ is not the first: {list(header)}")
    return header.get("__metadata__")


def some_tensors(seed=1):
    """Returns a few tensors of several dtypes and shapes, among them a scalar and an empty one."""
    source = random.Random(seed)
    shapes = {"layer.0.weight": ("F32", (64, 33)), "layer.0.bias": ("F32", (64,)),
              "layer.1.weight": ("BF16", (7, 5, 3)), "scalar": ("F64", ()), "empty": ("F32", (0, 4)),
              "mask": ("U8", (1000,)), "große Zahl": ("I64", (2, 2))}
    result = {}
    for name, (dtype, shape) in shapes.items():
        count = 1
        for dim in shape:
            count *= dim
        result[name] = (dtype, shape, source.randbytes(count * ELEMENT_BYTES[dtype]))
    return result


# -------------------------------------------------------------------------------------------------------- terminals --

def run_in_terminal(*arguments, columns=100, env=None):
    """Runs the program with stdin, stdout and stderr on a terminal; returns its exit code and all that it wrote."""
    pid, fd = pty.fork()
    if pid == 0:
        import fcntl
        import termios
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.execve(PROGRAM, [PROGRAM, *map(str, arguments)], env or environment())
    output = b""
    end = time.monotonic() + PATIENCE
    with contextlib.closing(os.fdopen(fd, "rb", 0)) as terminal:
        while time.monotonic() < end:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                piece = terminal.read(65536)
            except OSError:  # Linux reports this error when no process has the other side open any more.
                break
            if not piece:
                break
            output += piece
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output.decode(errors="replace")


def main():
    """Runs the tests of the calling file; skips them when there is no program."""
    if not PROGRAM or not os.access(PROGRAM, os.X_OK):
        print("the program tensorlane was not built")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
