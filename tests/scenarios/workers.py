# SPDX-License-Identifier: Apache-2.0
"""Workers for scenarios: the public API through the shared library, and `serve`.

    with Worker(config, "worker", 0) as here, Server(config, "ps", 0) as ps:
        got = here.receive(here.peer("/job:ps/task:0"), "weights")

What fails raises; a completion that failed does not: its status and message are there to be looked at.
"""
import contextlib
import ctypes
import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import tempfile
import time

import devices
from devices import HOST

BUILD = pathlib.Path(os.environ.get("TENSORLANE_BUILD") or pathlib.Path(__file__).parents[2] / "build/release")
PROGRAM = BUILD / "bin/tensorlane"
SECOND = 10**9
PATIENCE_SEC = 180
U8 = 2
# Small tensors in unregistered memory are copied through registered memory.
OVER_VERBS = ("zero-copy", "bounce", "inline")
# Before a command: it may lock less memory than a data plane over verbs needs.
NO_LOCKED_MEMORY = ("setpriv", "--bounding-set", "-ipc_lock", "bash", "-c", 'ulimit -l 64; exec "$@"', "-")
PATHS = ("none", "self", "grpc", "serialized", "zero-copy", "bounce", "mapped", "gpu-direct", "gpu-proxy", "gpu-ipc",
         "inline")
STATUSES = ("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
            "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
            "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED")


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 1024)]


class Options(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("config_path", ctypes.c_char_p), ("config_json", ctypes.c_char_p),
                ("job", ctypes.c_char_p), ("task", ctypes.c_uint32), ("is_client", ctypes.c_bool),
                ("progress", ctypes.c_int)]


class Completion(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("op", ctypes.c_uint64), ("kind", ctypes.c_int),
                ("user_data", ctypes.c_void_p), ("error", Error), ("tensor", ctypes.c_void_p),
                ("step", ctypes.c_uint64), ("path_number", ctypes.c_int), ("path_reason", ctypes.c_char_p),
                ("bytes", ctypes.c_uint64), ("duration_ns", ctypes.c_int64), ("is_verified", ctypes.c_bool),
                ("item", ctypes.c_uint64), ("ok_count", ctypes.c_uint64), ("dead_count", ctypes.c_uint64),
                ("failed_count", ctypes.c_uint64), ("reserved", ctypes.c_uint64 * 4)]


class Receiving(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("destination", ctypes.c_void_p), ("wants_checksum", ctypes.c_bool),
                ("may_map", ctypes.c_bool), ("unused", ctypes.c_uint32), ("device", devices.Device),
                ("part", ctypes.c_void_p)]


class ByteRange(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class Part(ctypes.Structure):
    """A box, or ranges of bytes (offset, length)."""
    _fields_ = [("size_bytes", ctypes.c_size_t), ("rank", ctypes.c_uint), ("start", ctypes.c_void_p),
                ("size", ctypes.c_void_p), ("ranges", ctypes.c_void_p), ("range_count", ctypes.c_size_t),
                ("destination_start", ctypes.c_void_p)]

    def __init__(self, start=None, size=None, ranges=(), destination_start=None):
        super().__init__(size_bytes=ctypes.sizeof(Part), rank=len(size or ()), range_count=len(ranges))
        self.arrays = [(ctypes.c_uint64 * len(numbers))(*numbers) if numbers else None
                       for numbers in (start, size, destination_start)]
        self.arrays.append((ByteRange * len(ranges))(*(ByteRange(*one) for one in ranges)) if ranges else None)
        self.start, self.size, self.destination_start, self.ranges = (
            array and ctypes.addressof(array) for array in self.arrays)


class ReceivingItem(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("step", ctypes.c_uint64), ("destination", ctypes.c_void_p),
                ("priority", ctypes.c_uint32), ("user_data", ctypes.c_void_p)]


class ReceivingMany(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("item_bytes", ctypes.c_size_t), ("min_count", ctypes.c_size_t),
                ("group_timeout_ns", ctypes.c_int64), ("rest", ctypes.c_int), ("wants_checksum", ctypes.c_bool),
                ("may_map", ctypes.c_bool), ("device", devices.Device)]


class Subscribing(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("from_step", ctypes.c_uint64), ("destinations", ctypes.c_void_p),
                ("count", ctypes.c_size_t), ("wants_checksum", ctypes.c_bool)]


class String(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("len_bytes", ctypes.c_uint64)]


def load():
    library = ctypes.CDLL(str(BUILD / "lib/libtensorlane.so"))
    pointer, number, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
    for name, result, arguments in (
            ("tl_worker_close", None, (pointer, ctypes.c_int64)),
            ("tl_cq_destroy", None, (pointer,)),
            ("tl_cq_wait", ctypes.c_size_t, (pointer, pointer, ctypes.c_size_t, ctypes.c_int64)),
            ("tl_worker_progress", ctypes.c_int, (pointer, ctypes.c_int64)),
            ("tl_worker_find_peer", ctypes.c_int, (pointer, text, pointer, pointer)),
            ("tl_worker_wait_for_peers", ctypes.c_int, (pointer, pointer, ctypes.c_size_t, ctypes.c_size_t,
                                                        ctypes.c_int64, pointer)),
            ("tl_send", ctypes.c_int, (pointer, text, number, pointer, ctypes.c_int64, pointer, pointer, pointer,
                                       pointer)),
            ("tl_recv", ctypes.c_int, (pointer, number, text, number, pointer, ctypes.c_int64, pointer, pointer,
                                       pointer, pointer)),
            ("tl_recv_many", ctypes.c_int, (pointer, number, pointer, ctypes.c_size_t, pointer, ctypes.c_int64,
                                            pointer, pointer, pointer, pointer)),
            ("tl_subscribe", ctypes.c_int, (pointer, number, text, pointer, pointer, pointer, pointer, pointer)),
            ("tl_publish", ctypes.c_int, (pointer, text, number, pointer, pointer)),
            ("tl_put", ctypes.c_int, (pointer, number, text, number, pointer, pointer, ctypes.c_int64, pointer,
                                      pointer, pointer, pointer)),
            ("tl_cancel", ctypes.c_int, (pointer, number)),
            ("tl_worker_abort_step", ctypes.c_int, (pointer, number, ctypes.c_int, text, pointer)),
            ("tl_worker_end_step", ctypes.c_int, (pointer, number, pointer, pointer)),
            ("tl_tensor_create_on", ctypes.c_int, (devices.Device, ctypes.c_int, ctypes.c_uint, pointer, pointer,
                                                   pointer)),
            ("tl_tensor_copy", ctypes.c_int, (pointer, pointer, pointer)),
            ("tl_tensor_device", devices.Device, (pointer,)),
            ("tl_tensor_create_dead", ctypes.c_int, (pointer, pointer)),
            ("tl_tensor_create_strings", ctypes.c_int, (ctypes.c_uint, pointer, pointer, pointer, pointer)),
            ("tl_tensor_string", ctypes.c_int, (pointer, number, pointer, pointer)),
            ("tl_tensor_put", None, (pointer,)),
            ("tl_tensor_data", pointer, (pointer,)),
            ("tl_tensor_dims", ctypes.POINTER(number), (pointer,)),
            ("tl_tensor_rank", ctypes.c_uint, (pointer,)),
            ("tl_tensor_is_dead", ctypes.c_bool, (pointer,)),
            ("tl_tensor_size_bytes", number, (pointer,))):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = load()


class Failed(Exception):
    """A failed call of the library; status is the name of its code."""
    def __init__(self, error):
        self.status = STATUSES[error.code]
        super().__init__(f"{self.status}: {error.message.decode()}")


def call(name, *arguments):
    """Calls a function of the library whose last argument is the error."""
    error = Error()
    if getattr(LIBRARY, name)(*arguments, ctypes.byref(error)) != 0:
        raise Failed(error)


class Tensor:
    """A tensor of bytes, of strings, or a dead one; it holds one reference. Only bytes lie on a device."""
    def __init__(self, content=b"", dims=None, handle=None, device=HOST):
        self.handle = ctypes.c_void_p(handle)
        if handle is not None:
            return
        if content is None:
            call("tl_tensor_create_dead", ctypes.byref(self.handle))
        elif isinstance(content, bytes):
            dims = (len(content),) if dims is None else dims
            call("tl_tensor_create_on", device, U8, len(dims), (ctypes.c_uint64 * len(dims))(*dims),
                 ctypes.byref(self.handle))
            self.fill(content)
        else:
            copies = [ctypes.create_string_buffer(text, len(text)) for text in content]
            call("tl_tensor_create_strings", 1, (ctypes.c_uint64 * 1)(len(content)),
                 (String * len(content))(*(String(ctypes.addressof(text), len(text)) for text in copies)),
                 ctypes.byref(self.handle))

    def __del__(self):
        if self.handle:
            LIBRARY.tl_tensor_put(self.handle)

    def fill(self, content):
        if self.device.kind:
            source = Tensor(content, self.dims)
            call("tl_tensor_copy", self.handle, source.handle)
        else:
            ctypes.memmove(self.address, content, len(content))

    @property
    def bytes(self):
        if self.device.kind:
            copy = Tensor(bytes(self.size_bytes), self.dims)
            call("tl_tensor_copy", copy.handle, self.handle)
            return copy.bytes
        return ctypes.string_at(self.address, self.size_bytes)

    @property
    def size_bytes(self):
        return LIBRARY.tl_tensor_size_bytes(self.handle)

    @property
    def device(self):
        return LIBRARY.tl_tensor_device(self.handle)

    @property
    def address(self):
        return LIBRARY.tl_tensor_data(self.handle)

    @property
    def place(self):
        """Where this process may touch the bytes, as a kernel of the program may do on a GPU."""
        return devices.view(self.address) if self.device.kind else self.address

    @property
    def first(self):
        """The first byte."""
        return ctypes.c_uint8.from_address(self.place).value

    @property
    def last(self):
        """The last byte."""
        return ctypes.c_uint8.from_address(self.place + self.size_bytes - 1).value

    @property
    def dims(self):
        return tuple(LIBRARY.tl_tensor_dims(self.handle)[:LIBRARY.tl_tensor_rank(self.handle)])

    @property
    def is_dead(self):
        return LIBRARY.tl_tensor_is_dead(self.handle)

    def strings(self):
        found = []
        for index in range(self.dims[0]):
            one = String()
            call("tl_tensor_string", self.handle, index, ctypes.byref(one))
            found.append(ctypes.string_at(one.data, one.len_bytes) if one.data else b"")
        return found


class Done:
    """One completion."""
    def __init__(self, completion):
        self.op = completion.op
        self.status = STATUSES[completion.error.code]
        self.message = completion.error.message.decode()
        self.tensor = Tensor(handle=completion.tensor) if completion.tensor else None
        self.step = completion.step
        self.path = PATHS[completion.path_number]
        self.reason = completion.path_reason.decode()
        self.is_verified = completion.is_verified
        self.ok_count, self.dead_count = completion.ok_count, completion.dead_count
        self.failed_count = completion.failed_count

    def __repr__(self):
        return f"{self.status} {self.message!r} {self.path} {self.reason!r}"


class Worker:
    """A worker in this process; its log goes to standard error. With is_driven it has no thread, and waiting advances
    it. Its tensors lie on the device: those that it makes, and new ones that it receives."""
    def __init__(self, config, job, task=0, is_driven=False, device=HOST):
        self.device = device
        self.handle, self.queue = ctypes.c_void_p(), ctypes.c_void_p()
        options = Options(size_bytes=ctypes.sizeof(Options), config_json=json.dumps(config).encode(), job=job.encode(),
                          task=task, progress=is_driven)
        call("tl_worker_open", ctypes.byref(options), ctypes.byref(self.handle))
        call("tl_cq_create", ctypes.byref(self.queue))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        LIBRARY.tl_worker_close(self.handle, 0)
        LIBRARY.tl_cq_destroy(self.queue)

    def peer(self, name):
        found = ctypes.c_uint64()
        call("tl_worker_find_peer", self.handle, name.encode(), ctypes.byref(found))
        return found.value

    def wait_for_peers(self):
        call("tl_worker_wait_for_peers", self.handle, None, 0, 0, PATIENCE_SEC * SECOND)

    def make(self, content, dims=None):
        return Tensor(content, dims, device=self.device)

    def send(self, key, tensor, step=0, timeout_sec=PATIENCE_SEC):
        op = ctypes.c_uint64()
        call("tl_send", self.handle, key.encode(), step, tensor.handle, timeout_sec * SECOND, self.queue, None,
             ctypes.byref(op))
        return op.value

    def put(self, peer, key, tensor, step=0):
        """Begins to put a tensor at a peer."""
        op = ctypes.c_uint64()
        call("tl_put", self.handle, peer, key.encode(), step, tensor.handle, None, PATIENCE_SEC * SECOND, self.queue,
             None, ctypes.byref(op))
        return op.value

    def ask(self, peer, key, step=0, destination=None, timeout_sec=PATIENCE_SEC, is_verified=True, part=None):
        """Begins to receive; wait returns the completion."""
        op = ctypes.c_uint64()
        options = Receiving(size_bytes=ctypes.sizeof(Receiving), wants_checksum=is_verified, device=self.device)
        if destination:
            options.destination, options.device = destination.handle, destination.device
        if part:
            options.part = ctypes.addressof(part)
        call("tl_recv", self.handle, peer, key.encode(), step, ctypes.byref(options), int(timeout_sec * SECOND),
             self.queue, None, ctypes.byref(op))
        return op.value

    def ask_many(self, peer, items, min_count=0, group_timeout_sec=0, leaves_rest=False):
        """Begins to receive items (key, step) in a group; their operations follow that of the group."""
        op = ctypes.c_uint64()
        asked = (ReceivingItem * len(items))(*(ReceivingItem(key=key.encode(), step=step) for key, step in items))
        options = ReceivingMany(size_bytes=ctypes.sizeof(ReceivingMany), item_bytes=ctypes.sizeof(ReceivingItem),
                                min_count=min_count, group_timeout_ns=group_timeout_sec * SECOND, rest=leaves_rest,
                                wants_checksum=True, device=self.device)
        call("tl_recv_many", self.handle, peer, asked, len(items), ctypes.byref(options), PATIENCE_SEC * SECOND,
             self.queue, None, ctypes.byref(op))
        return op.value

    def subscribe(self, peer, key, from_step=0, count=2, is_verified=True):
        """Values come in memory of the host; next returns them one by one."""
        op = ctypes.c_uint64()
        options = Subscribing(size_bytes=ctypes.sizeof(Subscribing), from_step=from_step, count=count,
                              wants_checksum=is_verified)
        call("tl_subscribe", self.handle, peer, key.encode(), ctypes.byref(options), self.queue, None, ctypes.byref(op))
        return op.value

    def next(self):
        """Waits for the next completion."""
        found = Completion()
        assert LIBRARY.tl_cq_wait(self.queue, ctypes.byref(found), 1, 2 * PATIENCE_SEC * SECOND) == 1
        return Done(found)

    def progress(self, timeout_sec):
        """Advances a worker that has no thread."""
        LIBRARY.tl_worker_progress(self.handle, int(timeout_sec * SECOND))

    def publish(self, key, tensor, step=0):
        call("tl_publish", self.handle, key.encode(), step, tensor.handle)

    def abort_step(self, step, status, message):
        call("tl_worker_abort_step", self.handle, step, STATUSES.index(status), message.encode())

    def end_step(self, step):
        """Ends the step; returns how many tensors were dropped."""
        count = ctypes.c_uint64()
        call("tl_worker_end_step", self.handle, step, ctypes.byref(count))
        return count.value

    def cancel(self, op):
        """Returns whether the operation was still open."""
        return LIBRARY.tl_cancel(self.handle, op) == 0

    def wait(self, count, timeout_sec=2 * PATIENCE_SEC):
        """Waits for the next completions, which it returns by operation."""
        found, end = {}, time.monotonic() + timeout_sec
        many = (Completion * 64)()
        while len(found) < count:
            got = LIBRARY.tl_cq_wait(self.queue, many, min(64, count - len(found)), SECOND)
            for completion in many[:got]:
                done = Done(completion)
                assert done.op not in found, "completed twice"
                found[done.op] = done
            if time.monotonic() > end:
                raise AssertionError(f"{count - len(found)} of {count} operations do not complete")
        return found

    def poll(self):
        """Returns the completions that are there, by operation."""
        many = (Completion * 64)()
        return {completion.op: Done(completion) for completion in many[:LIBRARY.tl_cq_wait(self.queue, many, 64, 0)]}

    def is_quiet(self, timeout_sec):
        """Returns whether nothing completes for so long."""
        return LIBRARY.tl_cq_wait(self.queue, ctypes.byref(Completion()), 1, int(timeout_sec * SECOND)) == 0

    def receive(self, peer, key, step=0, destination=None, timeout_sec=PATIENCE_SEC, is_verified=True):
        op = self.ask(peer, key, step, destination, timeout_sec, is_verified)
        return self.wait(1)[op]


class Server:
    """`tensorlane serve` as a process of its own."""
    def __init__(self, config, job, task=0, publish=(), wrap=()):
        self.folder = tempfile.TemporaryDirectory()
        self.config = pathlib.Path(self.folder.name, "config.json")
        self.config.write_text(json.dumps(config), "utf-8")
        self.command = [*wrap, PROGRAM, "serve", "--config", self.config, "--job", job, "--task", str(task),
                        *(argument for path in publish for argument in ("--publish", path))]
        self.log = pathlib.Path(self.folder.name, "log")
        self.start()

    def start(self, is_awaited=True):
        with open(self.log, "ab") as log:
            before = log.tell()
            self.process = subprocess.Popen(self.command, stderr=log, stdin=subprocess.DEVNULL)
        if is_awaited:
            self.await_log("worker ready", before)

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            status = self.stop()
            assert status == 0 or failed, f"the server ended with {status}:\n{self.text()}"
        self.folder.cleanup()

    def text(self, begin=0):
        return self.log.read_bytes()[begin:].decode()

    def await_log(self, what, begin=0):
        end = time.monotonic() + PATIENCE_SEC
        while what not in self.text(begin):
            if time.monotonic() > end or ("worker ready" in what and self.process.poll() is not None):
                raise AssertionError(f"never logged: {what}\n{self.text()}")
            time.sleep(0.05)

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            # A thread that is running stops a moment later.
            wait_until(lambda: all(text.rpartition(")")[2].split()[0] == "T" for text in self.threads()), "it stops")

    def threads(self):
        """Returns the kernel's line about each thread of the process."""
        return [path.read_text() for path in pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/stat")]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Ends the process as a user does; returns its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_SEC)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@contextlib.contextmanager
def logged():
    """Yields a function that returns what this process has written to standard error since."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")
        finally:
            os.dup2(before, 2)
            os.close(before)
            os.write(2, os.pread(file.fileno(), 1 << 20, 0))


def run(*command):
    """Runs a command that must succeed; returns its output."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_SEC).stdout


def resources():
    """Returns the numbers of queue pairs, memory regions and completion queues that all processes have."""
    shown = json.loads(run("rdma", "-j", "res", "show"))
    return {key: sum(device[key] for device in shown) for key in ("qp", "mr", "cq", "pd")}


def pull(config, task, output, *arguments):
    """Runs `tensorlane pull --json`; returns the object that it prints, whether it succeeds or not."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        result = subprocess.run([PROGRAM, "pull", "--config", file.name, "--from", task, "-o", output, "--json",
                                 *arguments], stdout=subprocess.PIPE, text=True, check=False, timeout=2 * PATIENCE_SEC)
    return json.loads(result.stdout)


def push(config, task, *files):
    """Publishes the files on a running worker."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        run(PROGRAM, "push", "-c", file.name, "--to", task, *files)


def make_checkpoint(path, divisor):
    run(BUILD / "examples/make_vgg16", "--divide", str(divisor), path)
    return path


def read_checkpoint(path):
    """Returns the bytes of the tensors by name."""
    content = pathlib.Path(path).read_bytes()
    length, = struct.unpack("<Q", content[:8])
    return {name: content[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]]
            for name, entry in json.loads(content[8:8 + length]).items() if name != "__metadata__"}


def write_checkpoint(path, tensors):
    """Writes a file of the tensors, whose bytes are given by name."""
    header, place = {}, 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [place, place + len(content)]}
        place += len(content)
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


RESERVED = []


def free_ports(count):
    """Returns free ports below the range that the kernel gives to clients.

    Until this process ends, other tests find them in use. A worker can listen there all the same: its socket and the
    reserving one allow the reuse of addresses, and the latter does not listen.
    """
    ports = []
    while len(ports) < count:
        candidate = socket.socket()
        try:
            candidate.bind(("", random.randrange(10000, 32000)))
        except OSError:
            candidate.close()
            continue
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        RESERVED.append(candidate)
        ports.append(candidate.getsockname()[1])
    return ports


def wait_until(condition, what, timeout_sec=PATIENCE_SEC, pause_sec=0.05):
    end = time.monotonic() + timeout_sec
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what() if callable(what) else what}")
        time.sleep(pause_sec)
