# SPDX-License-Identifier: Apache-2.0
"""A tensor transport for Ray's direct transport, which is alpha in Ray, and so is this module.

    import tensorlane.ray
    tensorlane.ray.register()

    @ray.remote(enable_tensor_transport=True)
    class Trainer:
        @ray.method(tensor_transport="TENSORLANE")
        def weights(self):
            return self.model

Ray asks the process that has made an object for meta-data: it publishes the tensors and says where it is. Whoever needs
them receives them from there, and when no reference to the object is left, they are withdrawn. docs/ray.md is the page.
"""
import logging
import threading
import typing
import weakref
from dataclasses import dataclass, field

import ray
from ray._private import ray_constants
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (CommunicatorMetadata, FetchRequest, TensorTransportManager,
                                                           TensorTransportMetadata)

from . import _engine
from .errors import Error, NotFound

__all__ = ["NAME", "register"]

NAME = "TENSORLANE"
OPEN_SEC = 60

# Ray shows what its own loggers say.
_logger = logging.getLogger("ray.tensorlane")


def register(data_type: typing.Optional[type] = None, name: str = NAME) -> None:
    """Registers the transport with Ray, in the process that creates the actors, and before it does.

    data_type: torch.Tensor or numpy.ndarray; None: the first if torch is installed, else the second. Ray moves one type
    with a transport; for both, register twice, with two names. Raises ValueError: the name is registered already.
    """
    if data_type is None:
        data_type = _default_type()
    transport = TorchTransport if data_type.__module__.split(".")[0] == "torch" else NumpyTransport
    register_tensor_transport(name, transport.devices, transport, data_type)


def _default_type():
    try:
        import torch
        return torch.Tensor
    except ImportError:
        import numpy
        return numpy.ndarray


@dataclass
class Metadata(TensorTransportMetadata):
    """Where the tensors are published: address and incarnation of the process, and the version of the publication."""
    address: str = ""
    incarnation: int = 0


@dataclass
class Fetch(FetchRequest):
    receive: object = None
    made: list = field(default_factory=list)


# Dialled at the address that Ray itself uses for this node.
_endpoint = _engine.Endpoint(lambda: ray._private.worker.global_worker.node_ip_address, _logger)


def _can_open(_):
    try:
        return bool(_endpoint.worker.address)
    except Error:
        _logger.exception("tensorlane cannot open a worker in this actor")
        return False


def _key(obj_id, index):
    return f"ray/{obj_id}/{index}"


class _Transport(TensorTransportManager):
    def __init__(self):
        self._able = set()
        self._running = weakref.WeakKeyDictionary()  # a fetch that Ray drops is cancelled when nothing refers to it
        self._lock = threading.Lock()

    def tensor_transport_backend(self):
        return NAME

    @staticmethod
    def is_one_sided():
        return True

    @staticmethod
    def can_abort_transport():
        return True

    def actor_has_tensor_transport(self, actor):
        # Ray asks at each call, and the answer of an actor stays true.
        if actor._actor_id in self._able:
            return True
        able = actor.__ray_call__.options(concurrency_group="_ray_system").remote(_can_open)
        if ray.get(able, timeout=OPEN_SEC):
            self._able.add(actor._actor_id)
        return actor._actor_id in self._able

    def extract_tensor_transport_metadata(self, obj_id, rdt_object):
        if not rdt_object:
            return Metadata(tensor_meta=[])
        devices = {self._device(tensor) for tensor in rdt_object}
        if len(devices) > 1:
            raise ValueError(f"the tensors of one object are on {' and '.join(sorted(devices))}; put them on one")
        if not devices <= set(self.devices):
            raise ValueError(f"the tensors are on {devices.pop()}; put them on {' or '.join(self.devices)}")
        self._synchronize(rdt_object)
        worker = _endpoint.worker
        try:
            for index, tensor in enumerate(rdt_object):
                worker.publish(_key(obj_id, index), self._published(tensor))
        except BaseException:  # Ray does not collect what has no meta-data
            self._withdraw(obj_id, len(rdt_object))
            raise
        return Metadata(tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
                        tensor_device=devices.pop(), address=worker.address, incarnation=worker.incarnation)

    def get_communicator_metadata(self, src_actor, dst_actor, backend=None):
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, obj_id, tensor_transport_metadata, communicator_metadata, target_buffers=None):
        return self.wait_fetch_complete(
            self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers))

    def fetch_multiple_tensors(self, obj_id, tensor_transport_metadata, communicator_metadata, target_buffers=None):
        meta = tensor_transport_metadata
        if not meta.tensor_meta:
            return Fetch(obj_id, [])
        peer = _endpoint.peer(meta.address, meta.incarnation)
        made = target_buffers or self._buffers(meta)
        receive = _endpoint.receive(peer, [_key(obj_id, index) for index in range(len(meta.tensor_meta))], made,
                                    ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS)
        with self._lock:
            self._running[receive] = obj_id
        return Fetch(obj_id, [], receive, made)

    def wait_fetch_complete(self, fetch_request, timeout=-1):
        receive = fetch_request.receive
        if receive is None:
            return fetch_request.tensors
        came = receive.wait(None if timeout < 0 else timeout)
        return [into if into is not None else self._made_of(tensor)
                for into, tensor in zip(fetch_request.made, came)]

    def send_multiple_tensors(self, tensors, tensor_transport_metadata, communicator_metadata):
        raise NotImplementedError("receivers ask for the tensors")

    def garbage_collect(self, obj_id, tensor_transport_meta, tensors):
        self._withdraw(obj_id, len(tensor_transport_meta.tensor_meta))

    @staticmethod
    def _withdraw(obj_id, count):
        for index in range(count):
            try:
                _endpoint.worker.withdraw(_key(obj_id, index))
            except NotFound:  # it is freed for the second time, or was not published
                pass

    def abort_transport(self, obj_id, communicator_metadata):
        with self._lock:
            receives = [receive for receive, of in self._running.items() if of == obj_id]
        for receive in receives:
            receive.cancel()


class NumpyTransport(_Transport):
    devices = ["cpu"]

    @staticmethod
    def _device(_):
        return "cpu"

    @staticmethod
    def _synchronize(_):
        pass

    @staticmethod
    def _published(array):
        import numpy
        return numpy.ascontiguousarray(array) if array.ndim else array

    @staticmethod
    def _buffers(meta):
        return [None] * len(meta.tensor_meta)

    @staticmethod
    def _made_of(tensor):
        import numpy
        return numpy.asarray(tensor)


class TorchTransport(_Transport):
    devices = ["cuda", "cpu"]

    @staticmethod
    def _device(tensor):
        return tensor.device.type

    @staticmethod
    def _synchronize(tensors):
        """The kernels that write the tensors end before anything reads them."""
        if tensors[0].device.type == "cuda":
            import torch
            for device in {tensor.device for tensor in tensors}:
                torch.cuda.synchronize(device)

    @staticmethod
    def _published(tensor):
        return tensor.detach().contiguous()

    @staticmethod
    def _buffers(meta):
        """On a GPU in memory of torch's own allocator. On the host in the library's, which has pages already when it is
        used again; new pages take longer than the copy."""
        if meta.tensor_device == "cpu":
            return [None] * len(meta.tensor_meta)
        import torch
        return [torch.empty(shape, dtype=dtype, device=meta.tensor_device) for shape, dtype in meta.tensor_meta]

    @staticmethod
    def _made_of(tensor):
        import torch
        return torch.from_dlpack(tensor)
