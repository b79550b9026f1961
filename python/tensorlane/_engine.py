# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins for engines have in common: one worker in each process, peers by address, receives that another
thread may cancel, and a line in the engine's log for each change of path.

No call waits for ever: each has a deadline, and one whose peer is gone ends after PATIENCE_SEC, naming the peer.
"""
import asyncio
import collections
import os
import threading
import time

from . import Worker
from .errors import Error, NotFound, Unavailable

# A peer that cannot be reached for so long is gone. Engines start another process then, at another address.
PATIENCE_SEC = 5
# Peers that are kept; the one that was used longest ago is removed when there are more.
MAX_PEERS = 256
# Values of at least so many bytes may take another path than smaller ones.
LARGE_BYTES = 1 << 16
# What was said of a peer is remembered for so many ways.
MAX_WAYS = 16
SLOW_PATHS = ("grpc", "serialized", "gpu-proxy")
SETTINGS = "TENSORLANE_SETTINGS"


async def until_done(future):
    """Waits for the end of a future, also when this is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue


class Peer:
    def __init__(self, number, address):
        self.number = number
        self.address = address
        self.users = 0
        self.down_since = None
        self.paths = {}


class Endpoint:
    """The worker of this process, which opens at its first use, and the peers that it knows.

    host: a function that returns the name or address at which others dial this process. address: HOST:PORT in its
    place. config: settings; None: those of the file that the variable TENSORLANE_SETTINGS names.
    """

    def __init__(self, host, logger, address=None, config=None):
        self._host = host
        self._address = address
        self._config = config
        self._logger = logger
        self._lock = threading.RLock()  # a Receive may be collected while this thread has it
        self._worker = None
        self._peers = collections.OrderedDict()

    @property
    def worker(self):
        with self._lock:
            if self._worker is None:
                config = self._config or os.environ.get(SETTINGS) or {"log": {"level": "warn"}}
                self._worker = Worker(config, address=self._any_port() if self._address is None else self._address)
                self._logger.info("tensorlane listens at %s", self._worker.address)
            return self._worker

    @property
    def is_open(self):
        return self._worker is not None

    def _any_port(self):
        host = self._host()
        return f"[{host}]:0" if ":" in host else f"{host}:0"

    def peer(self, address, incarnation=0):
        """Returns the peer at an address, known from now on. incarnation: the process that is meant; 0: any."""
        worker = self.worker
        with self._lock:
            peer = self._peers.get((address, incarnation))
            if peer is None:
                peer = Peer(worker.add_peer(address, incarnation=incarnation), address)
                self._peers[address, incarnation] = peer
            self._peers.move_to_end((address, incarnation))
            unused = [key for key, old in self._peers.items() if old.users == 0 and old is not peer]
            for key in unused[:max(0, len(self._peers) - MAX_PEERS)]:
                worker.remove_peer(self._peers.pop(key).number)
        return peer

    def receive(self, peer, keys, into, timeout, step=0):
        """Begins to receive keys of a peer. Returns a Receive."""
        return Receive(self, peer, keys, into, timeout, step)

    def info(self, peer):
        """Returns the PeerInfo of a peer."""
        for info in self.worker.peers():
            if info.id == peer.number:
                return info
        raise NotFound(f"{peer.address} is no peer any more", peer=peer.address)

    def check(self, peer, patience=PATIENCE_SEC, info=None):
        """Raises Unavailable if the peer is gone: it could not be reached in calls over so many seconds. info: the
        PeerInfo of the peer, for callers that have just listed all peers; None: they have not."""
        info = info or self.info(peer)
        if info.state != "down":
            peer.down_since = None
            return
        peer.down_since = peer.down_since or time.monotonic()
        if time.monotonic() - peer.down_since >= patience:
            raise Unavailable(f"{peer.address} is gone: {info.reason}", peer=peer.address)

    async def receive_async(self, peer, key, into, timeout, step=0):
        """Receives one key in the running event loop. Raises what recv raises, and Unavailable if the peer is gone."""
        self.use(peer, 1)
        task = asyncio.ensure_future(self.worker.recv(peer.number, key, step, into=into, timeout=timeout))
        try:
            while not (await asyncio.wait([task], timeout=1))[0]:
                self.check(peer)
            got = task.result()
        finally:
            task.cancel()
            del task  # Its exception refers to this frame, and so to `into`.
            self.use(peer, -1)
        self.note(peer, [got])
        return got

    async def receive_all(self, peer, keys, into, timeout, step=0):
        """Receives keys in the running event loop. It returns, also when it is cancelled, when nothing writes to `into`
        any more. Raises what recv_many raises."""
        loop, queue = self.worker._queue()
        future = loop.create_future()
        op = self.worker._recv_many(queue, future, peer.number, keys, step, into, timeout, 0, None, False, None)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            op.cancel()
            await until_done(future)
            future.exception()
            raise
        finally:
            del future  # Its exception refers to this frame, and so to `into`.

    async def map(self, peer, key, timeout):
        """Maps what a peer has published. Returns a view of it; None: it cannot be mapped."""
        try:
            got = await self.worker.recv(peer.number, key, mapped=True, timeout=timeout)
        except Error as error:
            self._logger.info("tensorlane: %s of %s is not mapped: %s", key, peer.address, error)
            return None
        self.note(peer, [got])
        return memoryview(got) if got.path == "mapped" else None

    def note(self, peer, tensors):
        """Says how tensors came from a peer, each way and reason once, and again when it has become fast or slow. Of
        the fast ways the library chooses one for each value anew."""
        for tensor in tensors:
            is_large, is_fast = tensor.nbytes >= LARGE_BYTES, tensor.path not in SLOW_PATHS
            way = tensor.path, tensor.path_reason
            was_fast, said = peer.paths.get(is_large, (None, ()))
            if tensor.path == "none" or was_fast == is_fast and way in said:
                continue
            peer.paths[is_large] = is_fast, (*said[-MAX_WAYS:], way)
            self._logger.info("tensorlane: %s values from %s come by %s%s", "large" if is_large else "small",
                              peer.address, tensor.path, f" ({tensor.path_reason})" if tensor.path_reason else "")

    def use(self, peer, count):
        with self._lock:
            peer.users += count


class Receive:
    """A receive under way. Any thread may cancel it; one waits for it."""

    def __init__(self, endpoint, peer, keys, into, timeout, step):
        self._endpoint = endpoint
        self._peer = peer
        self._queue = endpoint.worker._create_queue()
        self._results = []  # what has come and was not taken yet, because a signal raised an exception in between
        self._result = None
        self._is_using = False
        endpoint.use(peer, 1)
        # One group completes as a whole, also when one of its members fails. It does not refer to this object, so that
        # one which nothing waits for any more is cancelled.
        try:
            self._op = endpoint.worker._recv_many(self._queue, True, peer.number, keys, step, into, timeout, 0, None,
                                                  False, None)
        except BaseException:
            endpoint.use(peer, -1)
            raise
        self._is_using = True
        self._is_cancelled = False

    def wait(self, timeout=None):
        """Returns the tensors. Raises what recv_many raises, TimeoutError after the timeout (None: only that of the
        receive counts), and Unavailable if the peer is gone."""
        deadline = None if timeout is None else time.monotonic() + timeout
        look = time.monotonic() + 1
        while self._result is None:
            if not self._results:
                if timeout == 0:
                    self._queue.drain(self._results)
                else:
                    self._queue.wait(self._results)
            self._take()
            now = time.monotonic()
            if self._result is not None:
                break
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"nothing came from {self._peer.address} within {timeout} s")
            if now >= look and not self._is_cancelled:
                look = now + 1
                try:
                    self._endpoint.check(self._peer)
                except Error:
                    self.cancel()
                    raise
        value, error = self._result
        if error is not None:
            raise error
        self._endpoint.note(self._peer, value)
        return value

    def cancel(self):
        self._is_cancelled = True
        self._op.cancel()

    def _take(self):
        for _, value, error, _ in self._results:
            self._result = value, error
            self._end()

    def _end(self):
        if self._is_using:
            self._is_using = False
            self._endpoint.use(self._peer, -1)

    def __del__(self):
        if getattr(self, "_is_using", False):
            if not self._endpoint.worker.closed:
                self.cancel()
            self._end()
