# SPDX-License-Identifier: Apache-2.0
"""Our Python package as its users use it: one owner and one receiver of host memory.

    tensorlane_peer.py own DIVISOR             publishes tensors, and a state dict with the names and shapes of VGG16
                                               whose large dimensions are divided by DIVISOR; prints
                                               "ready ADDRESS BYTES NAME...", those of the state dict
    tensorlane_peer.py receive ADDRESS PROTOCOL PROGRESS DIVISOR
                                               prints "ready tensorlane VERSION", then answers commands

Commands, each of which does its work COUNT times and is answered with the seconds that this took:

    path BYTES COUNT     receives until a tensor has not come over gRPC alone, or none will
    pull BYTES COUNT     one receive of so many bytes after another into one array
    copy BYTES COUNT     copies of so many bytes of this process into that array, with NumPy
    many BYTES COUNT     1,000 tensors of so many bytes with one call, each into an array of its own
    whole, rows, columns, rows_box, columns_box 0 COUNT
                         the matrix of 4,096 rows, or a quarter of it, into an array of its shape or (box) into its
                         place in an array as large as the whole
    state 0 COUNT        the state dict into a module of torch, or where there is no torch into arrays by name

The arrays exist before, were written, are wrapped once and used again and again. What was received is compared after
the time. Both end when their standard input does. The package is found by PYTHONPATH.
"""
import functools
import sys
import time

import numpy
import tensorlane

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 64 * KIB, MIB, 64 * MIB)
SMALL_BYTES, SMALL_COUNT = 4 * KIB, 1000
ROWS = COLUMNS = 4096
# What a command receives of the matrix; None: all of it.
PARTS = {"whole": None, "rows": ((1024, 0), (1024, COLUMNS)), "columns": ((0, 1024), (ROWS, 1024))}
PATH_SEC = 60
UNWRITTEN = 255
# Layer -> the shape of its weight; its bias has the first dimension.
CONVOLUTIONS = {0: (64, 3), 2: (64, 64), 5: (128, 64), 7: (128, 128), 10: (256, 128), 12: (256, 256), 14: (256, 256),
                17: (512, 256), 19: (512, 512), 21: (512, 512), 24: (512, 512), 26: (512, 512), 28: (512, 512)}
CLASSIFIERS = {0: (4096, 25088), 3: (4096, 4096), 6: (1000, 4096)}


# ----------------------------------------------------------------------------------------------------------- tensors --

@functools.cache
def content(size_bytes):
    """As tl_bench expects it: no two pages are alike."""
    pages = numpy.arange((size_bytes + 4095) // 4096).astype(numpy.uint8)[:, None]
    in_page = (numpy.arange(4096) * 31).astype(numpy.uint8)
    return (pages + in_page).reshape(-1)[:size_bytes]


@functools.cache
def matrix():
    return numpy.arange(ROWS * COLUMNS, dtype=numpy.float32).reshape(ROWS, COLUMNS)


def model_shapes(divisor):
    """Name -> shape, in the order of torchvision's VGG16."""
    def scaled(size):
        return size // divisor if size > 3 else size
    shapes = {}
    for folder, layers, kernel in (("features", CONVOLUTIONS, (3, 3)), ("classifier", CLASSIFIERS, ())):
        for layer, shape in layers.items():
            shape = tuple(map(scaled, shape))
            shapes[f"{folder}.{layer}.weight"], shapes[f"{folder}.{layer}.bias"] = shape + kernel, shape[:1]
    return shapes


def model_content(index, shape):
    return numpy.full(shape, index + 1, numpy.float32)


def own(divisor):
    with tensorlane.Worker({"log": {"level": "warn"}}, job="ps", address="127.0.0.1:0") as worker:
        for size in SIZES:
            worker.publish(f"tensor/{size}", content(size))
        for i in range(SMALL_COUNT):
            worker.publish(f"small/{i}", content(SMALL_BYTES))
        worker.publish("matrix", matrix())
        model = {name: model_content(i, shape) for i, (name, shape) in enumerate(model_shapes(int(divisor)).items())}
        worker.publish_state_dict(model)
        print("ready", worker.address, sum(array.nbytes for array in model.values()), *model, flush=True)
        sys.stdin.read()


# --------------------------------------------------------------------------------------------------------- receiving --

def create_module(divisor):
    """A module of torch, and arrays that share its memory, by name; without torch these alone."""
    shapes = model_shapes(divisor)
    try:
        import torch
    except ImportError:
        arrays = {name: numpy.full(shape, UNWRITTEN, numpy.float32) for name, shape in shapes.items()}
        return arrays, arrays
    layers = {folder: [torch.nn.Identity() for _ in range(count)]
              for folder, count in (("features", 29), ("classifier", 7))}
    for name, shape in shapes.items():
        folder, layer, kind = name.split(".")
        if kind == "weight":
            create = torch.nn.Conv2d if folder == "features" else torch.nn.Linear
            layers[folder][int(layer)] = create(shape[1], shape[0], *([3] if folder == "features" else []))
    module = torch.nn.Module()
    for folder, parts in layers.items():
        setattr(module, folder, torch.nn.Sequential(*parts))
    return module, {name: value.detach().numpy() for name, value in module.state_dict().items()}


class Receiver:
    def __init__(self, address, protocol, progress, divisor):
        config = {"protocol": protocol, "log": {"level": "warn"}}
        self.worker = tensorlane.Worker(config, address="127.0.0.1:0", progress=progress)
        self.peer = self.worker.add_peer(address)
        self.divisor = int(divisor)
        self.arrays = {}
        self.module = None
        self.recv = self.worker.recv_wait

    def array(self, name, shape, dtype=numpy.uint8):
        """Returns the array of this name, and what is wrapped around it, once."""
        if name not in self.arrays:
            array = numpy.empty(shape, dtype)
            self.arrays[name] = array, tensorlane.wrap(array)
        return self.arrays[name]

    def check(self, received, wanted):
        if not numpy.array_equal(received, wanted):
            sys.exit("the elements that were received are not those of the owner")

    def path(self, size, count):
        begin = time.monotonic()
        while self.recv(self.peer, f"tensor/{size}").path == "grpc" and time.monotonic() - begin < PATH_SEC:
            pass
        return time.monotonic() - begin

    def pull(self, size, count):
        array, into = self.array(f"tensor {size}", size)
        array.fill(UNWRITTEN)
        recv, peer, key = self.recv, self.peer, f"tensor/{size}"
        begin = time.monotonic()
        for _ in range(count):
            recv(peer, key, into=into)
        passed = time.monotonic() - begin
        self.check(array, content(size))
        return passed

    def copy(self, size, count):
        array, _ = self.array(f"tensor {size}", size)
        source = content(size)
        array.fill(UNWRITTEN)
        begin = time.monotonic()
        for _ in range(count):
            numpy.copyto(array, source)
        passed = time.monotonic() - begin
        self.check(array, source)
        return passed

    def many(self, _, count):
        places = [self.array(f"small {i}", SMALL_BYTES) for i in range(SMALL_COUNT)]
        keys, into = [f"small/{i}" for i in range(SMALL_COUNT)], [wrapped for _, wrapped in places]
        for array, _ in places:
            array.fill(UNWRITTEN)
        begin = time.monotonic()
        for _ in range(count):
            self.worker.recv_many_wait(self.peer, keys, into=into)
        passed = time.monotonic() - begin
        for i, (array, _) in enumerate(places):
            self.check(array, content(SMALL_BYTES))
        return passed

    def part(self, name, count):
        box, _, is_placed = name.partition("_")
        start, size = PARTS[box] or ((0, 0), (ROWS, COLUMNS))
        source = matrix()[tuple(slice(first, first + length) for first, length in zip(start, size))]
        part = tensorlane.Box(start, size, start if is_placed else None) if PARTS[box] else None
        array, into = self.array(name, (ROWS, COLUMNS) if is_placed else size, numpy.float32)
        array.fill(-1)
        begin = time.monotonic()
        for _ in range(count):
            self.recv(self.peer, "matrix", into=into, part=part)
        passed = time.monotonic() - begin
        if is_placed:
            self.check(numpy.count_nonzero(array != -1), source.size)
            array = array[tuple(slice(first, first + length) for first, length in zip(start, size))]
        self.check(array, source)
        return passed

    def state(self, _, count):
        if self.module is None:
            self.module, self.model = create_module(self.divisor)
        for array in self.model.values():
            array.fill(UNWRITTEN)
        begin = time.monotonic()
        for _ in range(count):
            self.worker.pull_state_dict_wait(self.peer, into=self.module)
        passed = time.monotonic() - begin
        for index, array in enumerate(self.model.values()):
            self.check(array, model_content(index, array.shape))
        return passed


def main():
    if sys.argv[1] == "own":
        own(*sys.argv[2:])
        return
    receiver = Receiver(*sys.argv[2:])
    with receiver.worker:
        print("ready tensorlane", tensorlane.__version__, flush=True)
        for line in sys.stdin:
            command, size, count = line.split()
            if command.partition("_")[0] in PARTS:
                passed = receiver.part(command, int(count))
            else:
                passed = getattr(receiver, command)(int(size), int(count))
            print(f"{passed:.9f}", flush=True)


main()
