# SPDX-License-Identifier: Apache-2.0
"""tensorlane moves named tensors between workers, straight from the memory of one tensor into that of another.

    with tensorlane.Worker("cluster.json", job="worker", task=0) as worker:
        worker.publish("weights", array, step=7)
        got = worker.recv_wait("ps:0", "weights", step=7)

help(tensorlane.Worker) has the manual, and docs/python.md begins with tasks.
"""
import asyncio
import atexit
import collections
import itertools
import json
import os
import threading
import time
import types
import typing
import warnings
import weakref

from . import _fork, _state_dict, _tensorlane
from ._tensorlane import Tensor, __version__, copy, empty, wrap
from .errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition, Internal,
                     InvalidArgument, NotFound, OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated,
                     Unavailable, Unimplemented, Unknown)

__all__ = [
    "Aborted", "AlreadyExists", "BlockingSubscription", "Box", "Cancelled", "DataLoss", "DeadlineExceeded", "Error",
    "FailedPrecondition", "Health", "Internal", "InvalidArgument", "ListedTensor", "NotFound", "OutOfRange", "PeerInfo",
    "PermissionDenied", "Put", "ResourceExhausted", "Subscription", "Tensor", "Unauthenticated", "Unavailable",
    "Unimplemented", "Unknown", "Worker", "__version__", "copy", "empty", "wrap",
]


class PeerInfo(typing.NamedTuple):
    id: int
    name: str
    address: str
    state: str
    incarnation: int
    restart_count: int
    transport: str
    reason: str


class ListedTensor(typing.NamedTuple):
    key: str
    step: int
    dtype: str
    shape: tuple
    nbytes: int
    annotations: dict
    is_dead: bool


class Box(typing.NamedTuple):
    start: typing.Sequence[int]
    size: typing.Sequence[int]
    into_start: typing.Optional[typing.Sequence[int]] = None


class Put(typing.NamedTuple):
    path: str
    path_reason: str
    nbytes: int
    duration: float


class Health(typing.NamedTuple):
    is_healthy: bool
    reasons: tuple


class _Stream:
    """What a subscription has received and nothing has read. Its queue refers to it as long as the subscription is
    open, but not to the Subscription, so that one that nothing reads any more is cancelled."""

    def __init__(self):
        self.results = collections.deque()
        self.is_over = False
        self.waiter = None

    def take_from(self, arrived):
        """What waits is woken first, as it runs later. No signal is handled within the statement that moves a result,
        which is in C: neither is it lost, nor is it delivered twice."""
        self.wake()
        self.results.extend(itertools.islice(iter(arrived.popleft, None), 1))

    def wake(self):
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class _Subscription:
    """What both kinds of subscriptions have in common."""

    _is_closed = True  # until it is made

    def __init__(self, worker, op):
        self._worker = worker
        self._op = op  # cancelled when nothing refers to it any more
        self._is_closed = False

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            self._op.cancel()
            self._forget()

    def __del__(self):
        self.close()


class Subscription(_Subscription):
    def __init__(self, worker, op, stream):
        self._stream = stream
        super().__init__(worker, op)

    def _forget(self):
        self._stream.results.clear()
        self._stream.wake()

    def __aiter__(self):
        return self

    async def __anext__(self):
        stream = self._stream
        if stream.waiter is not None:
            raise RuntimeError("another task waits for this subscription")
        while not stream.results and not stream.is_over and not self._is_closed:
            stream.waiter = asyncio.get_running_loop().create_future()
            try:
                await stream.waiter
            finally:
                stream.waiter = None
        if self._is_closed or not stream.results:
            raise StopAsyncIteration
        _, value, error, stream.is_over = stream.results[0]
        del stream.results[0]
        if error is not None:
            raise error
        return value

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()


class BlockingSubscription(_Subscription):
    def __init__(self, worker, op, results, queue, timeout, peer, key):
        self._peer = peer
        self._key = key
        self._results = results
        self._queue = queue
        self._timeout = float("inf") if timeout is None else timeout
        self._is_over = False
        self._lock = threading.Lock()
        super().__init__(worker, op)

    def _forget(self):
        with self._lock:
            self._results.clear()

    def __iter__(self):
        return self

    def __next__(self):
        deadline = time.monotonic() + self._timeout
        while not self._is_closed:
            with self._lock:
                if self._results:
                    _, value, error, self._is_over = self._results[0]
                    del self._results[0]
                    break
            if self._is_over:
                raise StopIteration
            if time.monotonic() < deadline:
                self._queue.wait(self._results)
                continue
            self._queue.drain(self._results)  # With a timeout of 0, nothing else takes what has come.
            if not self._results:
                raise DeadlineExceeded(f"no value of {self._key} came within {self._timeout} s", self._peer, self._key)
        else:
            raise StopIteration
        if error is not None:
            raise error
        return value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Inbox:
    """What completes in an event loop, and hands it over when the queue's descriptor is readable. A signal may raise an
    exception in each statement, so that results stay in `arrived` until they have been handed over."""

    def __init__(self, loop, queue):
        self.loop = loop
        self.queue = queue
        self.arrived = collections.deque()  # (token, value, error, is_over) for each
        _fork.inboxes.add(self)

    def drain(self):
        try:
            self.queue.drain(self.arrived)
            while self.arrived:
                self.hand_over(*self.arrived[0][:3])
        except BaseException:
            self.loop.call_soon(self.drain)
            raise

    def hand_over(self, token, value, error):
        if isinstance(token, _Stream):
            token.take_from(self.arrived)
            return
        if token is not None and not token.done():
            if error is not None:
                token.set_exception(error)
            else:
                token.set_result(value)
        self.arrived.popleft()

    def close(self):
        try:
            self.drain()
        finally:
            self.loop.remove_reader(self.queue.fileno())


_open_workers = weakref.WeakSet()


@atexit.register
def _close_all():
    """What is still open when the interpreter ends is closed while it still can be."""
    for worker in list(_open_workers):
        worker.close()
    _tensorlane._stop()


class Worker(_tensorlane.Worker):
    def __init__(self, config=None, *, job=None, task=0, client=False, address=None, progress="thread"):
        if progress not in ("thread", "caller"):
            raise ValueError(f"progress is \"thread\" or \"caller\", not {progress!r}")
        is_text = isinstance(config, dict)
        path = None if config is None or is_text else os.fspath(config)
        self._inboxes = {}
        self._state_keys = {}
        self._progress = progress
        self._open(path, json.dumps(config) if is_text else None, job, task, client, address,
                   progress == "caller")
        _open_workers.add(self)

    # ------------------------------------------------------------------------------------------------- life cycle --

    def close(self, timeout=None):
        if not self._close(timeout):  # another thread closes it, and ends what is awaited
            return
        _open_workers.discard(self)
        inboxes, self._inboxes = self._inboxes, {}
        for loop, inbox in inboxes.items():
            if loop is _running_loop():
                inbox.close()
                continue
            try:
                loop.call_soon_threadsafe(inbox.close)
            except RuntimeError:  # the loop is closed, and with it what it has waited for
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __del__(self):
        if not self.closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self)
            self.close()

    # ------------------------------------------------------------------------------------------------- event loops --

    def _queue(self):
        """Returns the running loop and what completes in it."""
        if self._progress == "caller":
            raise FailedPrecondition("nothing drives this worker while an event loop waits: it was opened with "
                                     "progress=\"caller\", for calls of the form NAME_wait")
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.get(loop)
        if inbox is None:
            for other in list(self._inboxes):
                if other.is_closed():
                    self._inboxes.pop(other, None)
            inbox = _Inbox(loop, self._create_queue())
            loop.add_reader(inbox.queue.fileno(), inbox.drain)
            self._inboxes[loop] = inbox
        return loop, inbox.queue

    async def _request(self, begin, *arguments):
        loop, queue = self._queue()
        future = loop.create_future()
        op = begin(queue, future, *arguments)
        try:
            return await future
        except asyncio.CancelledError:
            op.cancel()
            raise
        finally:
            del future  # Its exception refers to this frame, and so to the memory in the arguments.

    async def recv(self, peer, key, step=0, *, into=None, timeout=None, checksum=False, mapped=False, part=None):
        return await self._request(self._recv, peer, key, step, into, timeout, checksum, mapped, part)

    async def recv_many(self, peer, keys, step=0, *, into=None, timeout=None, min_count=0, group_timeout=None,
                        checksum=False, parts=None):
        return await self._request(self._recv_many, peer, keys, step, into, timeout, min_count, group_timeout, checksum,
                                   parts)

    async def send(self, key, tensor, step=0, *, timeout=None):
        return await self._request(self._send, key, tensor, step, timeout)

    def subscribe(self, peer, key, from_step=0, *, count=2, into=None, checksum=False):
        _, queue = self._queue()
        stream = _Stream()
        return Subscription(self, self._subscribe(queue, stream, peer, key, from_step, count, into, checksum), stream)

    def subscribe_wait(self, peer, key, from_step=0, *, count=2, into=None, timeout=None, checksum=False):
        queue, results = self._create_queue(), []
        op = self._subscribe(queue, True, peer, key, from_step, count, into, checksum)
        return BlockingSubscription(self, op, results, queue, timeout, peer, key)

    # --------------------------------------------------------------------------------------------------- at a peer --

    async def put(self, peer, key, tensor, step=0, *, may_go_back=False, timeout=None):
        return Put(*await self._request(self._put, peer, key, tensor, step, may_go_back, timeout))

    def put_wait(self, peer, key, tensor, step=0, *, may_go_back=False, timeout=None):
        return Put(*self._put(None, None, peer, key, tensor, step, may_go_back, timeout))

    async def list(self, peer, pattern="*", *, timeout=None):
        return [ListedTensor(*found) for found in await self._request(self._list, peer, pattern, timeout)]

    def list_wait(self, peer, pattern="*", *, timeout=None):
        return [ListedTensor(*found) for found in self._list(None, None, peer, pattern, timeout)]

    async def stat(self, peer, key, *, timeout=None):
        found, = await self._request(self._stat, peer, key, timeout)
        return ListedTensor(*found)

    def stat_wait(self, peer, key, *, timeout=None):
        found, = self._stat(None, None, peer, key, timeout)
        return ListedTensor(*found)

    async def remove(self, peer, pattern, *, timeout=None):
        return await self._request(self._remove, peer, pattern, timeout)

    def remove_wait(self, peer, pattern, *, timeout=None):
        return self._remove(None, None, peer, pattern, timeout)

    # ------------------------------------------------------------------------------------------------- state dicts --

    def publish_state_dict(self, state, step=0, *, prefix="model", copies=False):
        items = _state_dict.prepare(state, prefix, copies)
        for other in self._state_keys.keys() - {prefix}:
            for key in self._state_keys[other].intersection(key for key, _ in items):
                raise AlreadyExists(f"{key} is part of the state dict under {other}; use another prefix", key=key)
        published = self._state_keys.setdefault(prefix, set())
        for key, tensor in items:
            self.publish(key, tensor, step)
            published.add(key)
        gone = published - {key for key, _ in items}
        self._withdraw_all(gone)
        published -= gone

    def withdraw_state_dict(self, prefix="model"):
        keys = self._state_keys.get(prefix, set()) - {prefix}
        count = self._withdraw_all([prefix, *keys])  # the index first: it names no tensor that has gone
        self._state_keys.pop(prefix, None)
        if count == 0:
            raise NotFound(f"no state dict is published under {prefix}", key=prefix)

    def _withdraw_all(self, keys):
        """Returns how many of them were published."""
        count = 0
        for key in keys:
            try:
                self.withdraw(key)
            except NotFound:
                continue
            count += 1
        return count

    async def pull_state_dict(self, peer, step=0, *, into=None, prefix="model", timeout=None, progress=None):
        calls = _state_dict.Calls(_state_dict.pull(peer, into, step, prefix, timeout, progress))
        for name, arguments, options in calls:
            try:
                calls.result = await getattr(self, name)(*arguments, **options)
            except Error as error:
                calls.error = error
        return calls.returned

    def pull_state_dict_wait(self, peer, step=0, *, into=None, prefix="model", timeout=None, progress=None):
        calls = _state_dict.Calls(_state_dict.pull(peer, into, step, prefix, timeout, progress))
        for name, arguments, options in calls:
            try:
                calls.result = getattr(self, f"{name}_wait")(*arguments, **options)
            except Error as error:
                calls.error = error
        return calls.returned

    # ------------------------------------------------------------------------------------------------------- peers --

    def peers(self):
        return [PeerInfo(*peer) for peer in self._peers()]

    def health(self):
        if self.closed:
            return Health(False, ("the worker is closed",))
        reasons = tuple(f"{peer.name}: {peer.reason or peer.state}" for peer in self.peers() if peer.state == "down")
        return Health(not reasons, reasons)


def _document():
    """Copies docstrings from the stubs to what is written in Python. What is written in C has them already."""
    for name, text in _tensorlane._docstrings():
        described = globals()[name.partition(".")[0]]
        for part in name.split(".")[1:]:
            described = getattr(described, part)
        if isinstance(described, (type, types.FunctionType, type(PeerInfo.id))) and described is not Tensor:
            described.__doc__ = text


_document()


def _running_loop():
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
