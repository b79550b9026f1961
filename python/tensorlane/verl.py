# SPDX-License-Identifier: Apache-2.0
"""A checkpoint engine for verl, whose interface is alpha, and so is this module.

    actor_rollout_ref.rollout.checkpoint_engine.backend=tensorlane
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tensorlane.verl

The first trainer copies the weights into buckets, and publishes each with the global step as its version as soon as it
is full. Rollout workers receive bucket after bucket, all of them at the same time, and load one while the next one
comes. The buckets stay published until the next update, so that a worker that is late, or begins again, gets them.
docs/verl.md is the page.
"""
import asyncio
import json
import logging
import sys
import typing
import uuid
from collections.abc import AsyncIterator

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from . import _engine, empty
from .errors import DeadlineExceeded, FailedPrecondition, NotFound

__all__ = ["TensorlaneCheckpointEngine"]

_logger = logging.getLogger("verl.tensorlane")
_logger.setLevel(logging.INFO)
_endpoint = _engine.Endpoint(lambda: ray.util.get_node_ip_address().strip("[]"), _logger)


def _key(generation, index, what):
    return f"verl/{generation}/{index}/{what}"


def _end_key(engine):
    """Under it the first trainer publishes, with the last generation that it has withdrawn as the step."""
    return f"verl/{engine}/ended"


class _HostBucket:
    """Memory of the library's for a bucket, which is used again: new pages take longer than the copy."""

    def __init__(self, size):
        memory = empty((size,), "U8")
        self.tensor = torch.from_dlpack(memory)
        self._memory = memoryview(memory)
        self._published = None

    def part(self, used):
        self._published = self._memory[:used]
        return self._published

    @property
    def is_free(self):
        """Whether only this and the call refer to what was published."""
        return sys.getrefcount(self._published) <= 2


class _DeviceBucket:
    """Memory of torch's allocator, which uses it again itself."""

    def __init__(self, size, device):
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)

    def part(self, used):
        torch.cuda.synchronize(self.tensor.device)
        return self.tensor[:used]


@CheckpointEngineRegistry.register("tensorlane")
class TensorlaneCheckpointEngine(CheckpointEngine):
    """One process of an update of the weights: the first trainer, which sends them, or a rollout worker. verl calls it.

    Args:
        bucket_size: bytes of a bucket; a weight that is larger has a bucket of its own.
        device: where buckets are, "cpu", or "cuda" for memory of the GPU at both sides.
        rollout_dtype: weights are converted to it before they are sent; None: they stay as they are.
        timeout: seconds until the next bucket must have come.
        is_master: whether this process may be the one that sends; verl says it.
    """

    def __init__(self, bucket_size: int, device: str = "cpu",
                 rollout_dtype: typing.Union[str, torch.dtype, None] = None, timeout: float = 300,
                 is_master: bool = False, **_: object) -> None:
        self.bucket_size = bucket_size
        self.device = device
        self.rollout_dtype = getattr(torch, rollout_dtype) if isinstance(rollout_dtype, str) else rollout_dtype
        self.timeout = timeout
        self.rank = None
        self._generation = 0
        self._published = 0
        self._buckets = []  # that are published
        self._spares = []
        self._buffers = [None, None]  # into which buckets are received in turn
        self._sent = None
        self._source = None
        self._name = uuid.uuid4().hex

    def prepare(self) -> dict[str, typing.Any]:
        """Begins an update. Returns where this process is, for build_topology. Raises what tensorlane.Worker raises."""
        self._generation += 1
        worker = _endpoint.worker
        return {"address": worker.address, "incarnation": worker.incarnation, "engine": self._name,
                "generation": self._generation}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int,
                       metadata: list[dict[str, typing.Any]]
                       ) -> tuple[dict[str, list[typing.Any]], dict[str, list[typing.Any]]]:
        """The first trainer sends, and each rollout worker receives from it."""
        actors = {"rank": [0] + [-1] * (actor_wg_world_size - 1), "metadata": [metadata[0]] * actor_wg_world_size}
        rollouts = {"rank": list(range(1, rollout_world_size + 1)), "metadata": [metadata[0]] * rollout_world_size}
        return actors, rollouts

    def init_process_group(self, rank: int, metadata: dict[str, typing.Any]) -> None:
        """rank: 0 sends, -1 only takes part in gathering the weights, others receive. metadata: what prepare has
        returned at the first trainer."""
        self.rank = rank
        self._source = metadata

    def finalize(self) -> None:
        """What was sent stays published for workers that are late; the next update ends it."""

    # -------------------------------------------------------------------------------------------------------- send --

    @torch.no_grad()
    async def send_weights(self, weights: typing.Any, global_steps: typing.Optional[int] = None) -> None:
        """Publishes weights, which are an iterator of (name, tensor), awaitable or not, in buckets. They may change
        when it returns. Of the update before this one nothing is published any more. Raises what Worker.publish raises.
        """
        if self.rank != 0:
            async for _ in ensure_async_iterator(weights):  # all trainers take part in gathering them
                pass
            return
        self._withdraw()
        step, generation = global_steps or 0, self._source["generation"]
        bucket, parts, used = None, [], 0
        async for name, weight in ensure_async_iterator(weights):
            weight = weight.to(self.rollout_dtype or weight.dtype)
            # Elements lie at multiples of their size.
            offset = -(-used // 64) * 64
            if bucket is not None and offset + weight.nbytes > bucket.tensor.nbytes:
                self._publish(generation, step, bucket, parts, used, False)
                bucket, parts = None, []
                await asyncio.sleep(0)
            if bucket is None:
                bucket, offset = self._bucket(max(self.bucket_size, weight.nbytes)), 0
            bucket.tensor[offset:offset + weight.nbytes].copy_(weight.reshape(-1).view(torch.uint8))
            parts.append((name, list(weight.shape), str(weight.dtype).removeprefix("torch."), offset))
            used = offset + weight.nbytes
        self._publish(generation, step, bucket, parts, used, True)
        self._spares = []

    def _bucket(self, size):
        for bucket in self._spares:
            if bucket.tensor.nbytes == size and bucket.is_free:
                self._spares.remove(bucket)
                return bucket
        return _HostBucket(size) if self.device == "cpu" else _DeviceBucket(size, self.device)

    def _publish(self, generation, step, bucket, parts, used, is_last):
        worker, index = _endpoint.worker, self._published
        if bucket is not None:
            worker.publish(_key(generation, index, "bytes"), bucket.part(used), step)
            if self.device == "cpu":
                self._buckets.append(bucket)
        # It says that the bytes are there.
        worker.publish(_key(generation, index, "parts"), json.dumps([used, parts, is_last]).encode(), step)
        self._published += 1
        self._sent = generation

    def _withdraw(self):
        if self._sent is not None:
            _endpoint.worker.publish(_end_key(self._source["engine"]), b"", self._sent)
        for index in range(self._published):
            for what in ("parts", "bytes"):
                try:
                    _endpoint.worker.withdraw(_key(self._sent, index, what))
                except NotFound:  # an empty model has no bytes
                    pass
        self._published = 0
        # Those of the update before are used again when nothing reads them any more.
        self._spares, self._buckets = self._buckets, []

    # ----------------------------------------------------------------------------------------------------- receive --

    @torch.no_grad()
    async def receive_weights(self, global_steps: typing.Optional[int] = None
                              ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Gives (name, tensor) of each weight, of the same shapes as they were sent. A tensor lies in a bucket that is
        received into again: use it, or copy it, before the next one is asked for.

        Raises DeadlineExceeded: a bucket did not come within the timeout. FailedPrecondition: the trainer has begun the
        next update. Unavailable: the trainer is gone.
        """
        # Where an update does not come to its end something may still be written to its buffers.
        buffers, self._buffers = self._buffers, [None, None]
        ended = asyncio.ensure_future(self._until_ended())
        coming = asyncio.ensure_future(self._receive(0, global_steps or 0, buffers))
        try:
            for index in range(1 << 30):
                await asyncio.wait([coming, ended], return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    ended.result()
                    raise FailedPrecondition("the trainer has begun the next update, and what this one was to receive "
                                             "is withdrawn", peer=self._source["address"])
                bucket, parts, is_last = coming.result()
                if not is_last:
                    coming = asyncio.ensure_future(self._receive(index + 1, global_steps or 0, buffers))
                for name, shape, dtype, offset in parts:
                    dtype = getattr(torch, dtype)
                    count = torch.Size(shape).numel() * dtype.itemsize
                    yield name, bucket[offset:offset + count].view(dtype).view(shape)
                if is_last:
                    self._buffers = buffers
                    break
        finally:
            coming.cancel()
            ended.cancel()

    async def _until_ended(self):
        """Returns when the trainer has withdrawn this generation."""
        source = self._source
        peer = _endpoint.peer(source["address"], source["incarnation"])
        while True:
            try:
                await _endpoint.receive_async(peer, _end_key(source["engine"]), None, self.timeout,
                                              source["generation"])
                return
            except DeadlineExceeded:
                continue

    async def _receive(self, index, step, buffers):
        """Receives a bucket into one of two buffers, while the weights of the other one are loaded."""
        source = self._source
        peer = _endpoint.peer(source["address"], source["incarnation"])
        got = await _endpoint.receive_async(peer, _key(source["generation"], index, "parts"), None, self.timeout, step)
        used, parts, is_last = json.loads(bytes(got))
        if used == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device), parts, is_last
        place = index % 2
        if buffers[place] is None or buffers[place].nbytes < used:
            buffers[place] = torch.empty(max(used, self.bucket_size), dtype=torch.uint8, device=self.device)
        await _endpoint.receive_async(peer, _key(source["generation"], index, "bytes"), buffers[place][:used],
                                      self.timeout, step)
        return buffers[place], parts, is_last
