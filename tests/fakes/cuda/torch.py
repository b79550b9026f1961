# SPDX-License-Identifier: Apache-2.0
"""As much of PyTorch as tests/gpu/torch_check.py uses, over the double of libcuda. A tensor has words of 32 bits."""
import contextlib
import ctypes
import types

_cuda = ctypes.CDLL("libcuda.so.1")
_KERNELS = b".version 6.0\n.visible .entry copy_late("
_BYTES = 4
__version__ = "0.0 (a double)"
version = types.SimpleNamespace(cuda="13.0")
int32 = "int32"
_current = [0]
_delay_ns = [0]


def _call(name, *arguments):
    if getattr(_cuda, name)(*arguments) != 0:
        raise RuntimeError(name)


def _start():
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)


class _Tensor:
    def __init__(self, words, is_cuda):
        self.count, self.is_cuda = len(words), is_cuda
        self.device = types.SimpleNamespace(index=0 if is_cuda else None)
        self.memory = (ctypes.c_int32 * self.count)(*words)
        if is_cuda:
            self.address = ctypes.c_uint64()
            _call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(_BYTES * self.count))
            _call("cuMemcpyHtoD_v2", self.address, self.memory, ctypes.c_size_t(_BYTES * self.count))

    def numel(self):
        return self.count

    def element_size(self):
        return _BYTES

    def data_ptr(self):
        return self.address.value if self.is_cuda else ctypes.addressof(self.memory)

    def cpu(self):
        if self.is_cuda:
            _call("cuMemcpyDtoH_v2", self.memory, self.address, ctypes.c_size_t(_BYTES * self.count))
        return self

    def copy_(self, other):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        values = [self.address, ctypes.c_uint64(self.count), ctypes.c_uint64(_delay_ns[0]), other.address]
        parameters = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
        _delay_ns[0] = 0
        _call("cuModuleLoadData", ctypes.byref(module), _KERNELS)
        _call("cuModuleGetFunction", ctypes.byref(function), module, b"copy_late")
        _call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(_current[0]), parameters, None)


class _Stream:
    def __init__(self):
        stream = ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(stream), 1)
        self.cuda_stream = stream.value

    def query(self):
        return _cuda.cuStreamQuery(ctypes.c_void_p(self.cuda_stream)) == 0


@contextlib.contextmanager
def _use(stream):
    _current[0] = stream.cuda_stream
    yield
    _current[0] = 0


def _sleep(cycles):
    _delay_ns[0] = cycles


def zeros(count, dtype, device):
    assert dtype == int32
    return _Tensor([0] * count, device == "cuda")


def arange(count, dtype, device):
    assert dtype == int32
    return _Tensor(range(count), device == "cuda")


def equal(one, other):
    return bytes(one.memory) == bytes(other.memory)


cuda = types.SimpleNamespace(is_available=lambda: True, Stream=_Stream, stream=_use, _sleep=_sleep,
                             synchronize=lambda: None,
                             current_stream=lambda: types.SimpleNamespace(cuda_stream=_current[0]))
_start()
