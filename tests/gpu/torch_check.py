# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch on a GPU: copied to the host, and published and received by two workers, in the order of PyTorch's
streams. Results and exit status are those of gpu_check. The library is in the folder lib beside this file."""
import ctypes
import pathlib
import socket
import sys

LIBRARIES = pathlib.Path(__file__).resolve().parent / "lib"
SKIPPED = 77
CUDA = 1  # TL_DEVICE_CUDA
I32 = 7  # TL_I32
TIMEOUT_NS = 120 * 10 ** 9
COUNT = 1 << 20
# Cycles for which the GPU is kept busy: some tenths of a second, then seconds.
SLEEPS = (500_000_000, 4_000_000_000)

Pointer = ctypes.c_void_p


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 1024)]


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("index", ctypes.c_int32)]


class View(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("dtype", ctypes.c_int), ("rank", ctypes.c_uint), ("dims", Pointer),
                ("strides", Pointer), ("device", Device), ("data", Pointer), ("offset_bytes", ctypes.c_uint64),
                ("capacity_bytes", ctypes.c_uint64), ("read_only", ctypes.c_bool), ("release", Pointer),
                ("release_context", Pointer), ("stream", ctypes.c_ssize_t)]


class WorkerOptions(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("config_path", ctypes.c_char_p), ("config_json", ctypes.c_char_p),
                ("job", ctypes.c_char_p), ("task", ctypes.c_uint32), ("is_client", ctypes.c_bool),
                ("progress", ctypes.c_int)]


class ReceiveOptions(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("destination", Pointer), ("wants_checksum", ctypes.c_bool),
                ("may_map", ctypes.c_bool), ("unused", ctypes.c_uint32), ("device", Device)]


class Completion(ctypes.Structure):
    _fields_ = [("size_bytes", ctypes.c_size_t), ("op", ctypes.c_uint64), ("kind", ctypes.c_int),
                ("user_data", Pointer), ("status", Error), ("tensor", Pointer), ("step", ctypes.c_uint64),
                ("path", ctypes.c_int), ("path_reason", ctypes.c_char_p), ("bytes", ctypes.c_uint64),
                ("duration_ns", ctypes.c_int64), ("is_verified", ctypes.c_bool), ("reserved", ctypes.c_uint64 * 8)]


def load():
    """Loads the library, and before it what it needs, in the order that works. PyTorch has brought libstdc++ itself."""
    brought = ("libstdc++.so.6", "libgcc_s.so.1")
    waiting, loaded = [path for path in LIBRARIES.iterdir() if path.name not in brought], {}
    while waiting:
        before, problem = len(waiting), None
        for path in list(waiting):
            try:
                loaded[path.name] = ctypes.CDLL(str(path))
                waiting.remove(path)
            except OSError as error:
                problem = error
        if len(waiting) == before:
            raise problem
    library = loaded["libtensorlane.so.1"]
    library.tl_path_name.restype = ctypes.c_char_p
    return library


class Library:
    def __init__(self):
        self.calls = load()
        self.has_failed = False

    def must(self, name, *arguments):
        error = Error()
        if getattr(self.calls, name)(*arguments, ctypes.byref(error)) != 0:
            raise RuntimeError(f"{name}: {error.message.decode()}")

    def report(self, name, is_right, text):
        self.has_failed = self.has_failed or not is_right
        print(f"{'ok' if is_right else 'FAIL':6} PyTorch {name}: {text}", flush=True)

    def wrap(self, tensor, stream=0):
        """A tensor of PyTorch, as one of ours around the same memory."""
        dims = (ctypes.c_uint64 * 1)(tensor.numel())
        size = tensor.numel() * tensor.element_size()
        device = Device(CUDA, tensor.device.index or 0) if tensor.is_cuda else Device()
        view = View(size_bytes=ctypes.sizeof(View), dtype=I32, rank=1, dims=ctypes.addressof(dims), device=device,
                    data=tensor.data_ptr(), capacity_bytes=size, stream=stream)
        result = Pointer()
        self.must("tl_tensor_wrap", ctypes.byref(view), ctypes.byref(result))
        return result

    def open(self, json, task):
        options = WorkerOptions(size_bytes=ctypes.sizeof(WorkerOptions), config_json=json, job=b"node", task=task)
        worker = Pointer()
        self.must("tl_worker_open", ctypes.byref(options), ctypes.byref(worker))
        return worker

    def receive(self, worker, destination):
        peer, completion = ctypes.c_uint64(), Completion()
        options = ReceiveOptions(size_bytes=ctypes.sizeof(ReceiveOptions), destination=destination)
        self.must("tl_worker_find_peer", worker, b"/job:node/task:0", ctypes.byref(peer))
        self.must("tl_recv_wait", worker, peer, b"of torch", ctypes.c_uint64(0), ctypes.byref(options),
                  ctypes.c_int64(TIMEOUT_NS), ctypes.byref(completion))
        self.calls.tl_tensor_put(Pointer(completion.tensor))
        return self.calls.tl_path_name(completion.path).decode()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def write_late(torch, value, cycles):
    """A tensor that is written in a stream of its own, some time from now."""
    tensor, stream = torch.zeros(COUNT, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # pylint: disable=protected-access
        tensor.copy_(value)
    return tensor, stream


def check_copy(library, torch, value):
    for cycles in SLEEPS:
        tensor, stream = write_late(torch, value, cycles)
        was_running = not stream.query()
        on_host = torch.zeros(COUNT, dtype=torch.int32, device="cpu")
        ours, theirs = library.wrap(tensor, stream.cuda_stream), library.wrap(on_host)
        library.must("tl_tensor_copy", theirs, ours)
        library.calls.tl_tensor_put(ours)
        library.calls.tl_tensor_put(theirs)
        is_right = torch.equal(on_host, value.cpu())
        if was_running or not is_right:
            break
    library.report("tl_tensor_copy", is_right and was_running, "what its stream still wrote came first")


def check_workers(library, torch, value, protocol):
    ports = free_ports(2)
    json = (f'{{"cluster": {{"node": ["127.0.0.1:{ports[0]}", "127.0.0.1:{ports[1]}"]}}, "protocol": "{protocol}", '
            '"log": {"level": "warn"}}').encode()
    workers = [library.open(json, task) for task in range(2)]
    tensor, stream = write_late(torch, value, SLEEPS[0])
    ours = library.wrap(tensor, stream.cuda_stream)
    library.must("tl_publish", workers[0], b"of torch", ctypes.c_uint64(0), ours)
    library.calls.tl_tensor_put(ours)
    for device in ("cuda", "cpu"):
        result = torch.zeros(COUNT, dtype=torch.int32, device=device)
        theirs = library.wrap(result, torch.cuda.current_stream().cuda_stream if device == "cuda" else 0)
        path = library.receive(workers[1], theirs)
        library.calls.tl_tensor_put(theirs)
        library.report(f"{protocol} cuda -> {device}", torch.equal(result.cpu(), value.cpu()), f"path {path}")
    for worker in workers:
        library.calls.tl_worker_close(worker, ctypes.c_int64(-1))


def main():
    try:
        import torch
    except ImportError as error:
        print(f"{sys.executable} has no PyTorch ({error})")
        return SKIPPED
    if not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU")
        return SKIPPED
    library = Library()
    value = torch.arange(COUNT, dtype=torch.int32, device="cuda")
    library.report("version", True, f"{torch.__version__}, CUDA {torch.version.cuda}")
    check_copy(library, torch, value)
    for protocol in ("grpc", "auto"):
        check_workers(library, torch, value, protocol)
    return 1 if library.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
