# SPDX-License-Identifier: Apache-2.0
"""A cache of blocks in the host memory of one process, the owner, which several engines share.

    python -m tensorlane.kv --address 10.0.0.1:4700 --limit 64GiB --ttl 3600       # the owner

    with tensorlane.kv.Client("10.0.0.1:4700") as cache:
        cache.set(["a", "b"], [block_a, block_b])
        found = cache.get(["a", "b"], [into_a, into_b])                            # [True, True]

LMCacheClient is what LMCache loads, HiCache (tensorlane.sglang) what SGLang does. docs/kv.md is the page, and says how
it works: owner and clients of one machine map each other's memory, and copy what they read from there, most of it
without asking; between machines blocks are received by the side that has room for them. All of this is alpha, as are
the engines' interfaces.

No call waits for ever: a block that does not come in time is one that is not there.
"""
import argparse
import asyncio
import bisect
import collections
import concurrent.futures
import contextlib
import itertools
import json
import logging
import numbers
import os
import re
import signal
import socket
import sys
import threading
import time
import typing
import uuid
import warnings
from collections.abc import Callable, Coroutine, Sequence

from . import _engine, _fork, _tensorlane, empty
from .errors import DeadlineExceeded, Error, FailedPrecondition, NotFound, ResourceExhausted, Unavailable

__all__ = ["Client", "LMCacheClient", "Owner", "main"]

_logger = logging.getLogger("tensorlane.kv")
# What has the buffer protocol.
Buffer = typing.Any
_Result = typing.TypeVar("_Result")
# What a get has found stays until its client says that it has it, and for so long at most. So long a client may take to
# say that what was received of it has not changed meanwhile.
LEASE_SEC = 10
# A client says so often that it is there, until the owner answers.
HELLO_SEC = 0.5
# While calls run, a client looks so often whether the owner can be reached.
LOOK_SEC = 0.25
# After an owner has failed, nothing is asked of it for so long.
REST_SEC = 2
MAP_SEC = 2
# A client that closes tells its owner, which would take it for lost otherwise, and waits for that so long at most.
CLOSE_SEC = 1
FORKED = ("this process was forked from one that had a worker or client; fork before the first worker or client is "
          "made, or start processes with the method \"spawn\"")
MAX_CLIENTS = 256
# Memory of a client in which the owner finds what it sets. It is used as far as sets need it.
STAGE_BYTES = 32 << 20
PAGE_BYTES = 4096
# The index of an owner has one entry for so many bytes of its limit, and not fewer than the least number.
INDEXED_BYTES = 16 << 10
MIN_ENTRIES = 1024
ENTRY_BYTES = 40  # as python/block_index.c has it
# A client says so often, at most, which blocks it has found in the index.
USED_SEC = 0.1
# Python's other threads run between copies of so many bytes.
COPY_BYTES = 1 << 20


def _count_of_one():
    lone = object()
    return sys.getrefcount(lone)


# What sys.getrefcount says of an object that one local name alone refers to: interpreters differ.
_COUNT_OF_ONE = _count_of_one()


def _up(slot, index):
    """The key under which a client shows a block that the owner is to receive."""
    return f"kv/up/{slot}/{index}"


def _down(client, slot, index):
    """The key under which the owner shows a block that a client is to receive."""
    return f"kv/down/{client}/{slot}/{index}"


def _view(buffer):
    """Returns the bytes of a buffer. One without bytes is not cast, because that fails for some shapes."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _is_key(key):
    try:
        key.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return True


def _copy(into, source):
    for begin in range(0, len(source), COPY_BYTES):
        into[begin:begin + COPY_BYTES] = source[begin:begin + COPY_BYTES]


class _Slots:
    """Numbers for calls under way: few, because each side of a connection remembers the keys that it has met."""

    def __init__(self):
        self._taken = set()

    def take(self):
        slot = min(set(range(len(self._taken) + 1)) - self._taken)
        self._taken.add(slot)
        return slot

    def give_back(self, slot):
        self._taken.discard(slot)


class Room:
    """Which parts of a piece of memory are free."""

    def __init__(self, size):
        self._sizes = {}  # of free parts, by their begin
        self._begins = {}  # the same, by their end
        self._parts = collections.defaultdict(dict)  # size -> begins of free parts, the last one given back at the end
        self._order = []  # the sizes of free parts, the smallest one first
        self._add(0, size)

    def take(self, size):
        """Returns where a part begins; None: none is large enough."""
        if size == 0:
            return 0
        place = bisect.bisect_left(self._order, size)
        if place == len(self._order):
            return None
        fitting = self._order[place]
        begin, _ = self._parts[fitting].popitem()
        self._forget(begin)
        self._add(begin + size, fitting - size)
        return begin

    def give_back(self, begin, size):
        before = self._begins.get(begin)
        if before is not None:
            size += self._remove(before)
            begin = before
        if begin + size in self._sizes:
            size += self._remove(begin + size)
        self._add(begin, size)

    def _add(self, begin, size):
        if size:
            self._sizes[begin] = size
            self._begins[begin + size] = begin
            if size not in self._parts:
                bisect.insort(self._order, size)
            self._parts[size][begin] = None

    def _remove(self, begin):
        del self._parts[self._sizes[begin]][begin]
        return self._forget(begin)

    def _forget(self, begin):
        """Removes a part that is not among the parts of its size any more. Returns the size."""
        size = self._sizes.pop(begin)
        del self._begins[begin + size]
        if not self._parts[size]:
            del self._parts[size]
            del self._order[bisect.bisect_left(self._order, size)]
        return size


def _host_towards(address):
    """The address of this machine from which packets to another one go. None is sent."""
    host, port = address.rsplit(":", 1)
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except UnicodeError:
        raise Unavailable(f"{host} is no name of a host") from None
    family, kind, protocol, _, name = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(name)
        return probe.getsockname()[0]


# ------------------------------------------------------------------------------------------------------------- owner --

class Block:
    """Memory of a block, which has a key when all of it has come. stamp: what no other block ever has."""
    __slots__ = "begin", "view", "leases", "key", "stamp"

    def __init__(self, begin, view):
        self.begin = begin
        self.view = view
        self.leases = 0
        self.key = None
        self.stamp = 0


class Blocks:
    """What the owner has: the oldest blocks go when there is no room, and those whose time is over.

    All of them lie in one piece of memory, which clients of this machine map. The kernel gives pages to it when they
    are first used.
    """

    def __init__(self, worker, limit, ttl):
        self._worker = worker
        self._limit = limit
        self._ttl = ttl
        tensor = empty((limit,), "U8", shared=True)
        self._memory = memoryview(tensor)
        worker.publish("kv/memory", tensor)
        index = empty((max(MIN_ENTRIES, limit // INDEXED_BYTES) * ENTRY_BYTES,), "U8", shared=True)
        self._index = memoryview(index)
        worker.publish("kv/index", index)
        self._stamp = 0
        self._room = Room(limit)
        self._ending = []  # (begin, view) of memory that something may still read or write, as long as it has the view
        self._blocks = collections.OrderedDict()  # key -> Block; used last at the end
        self._leases = collections.OrderedDict()  # (client, number of its request) -> (until, blocks, published keys)
        self._shown = {}  # published key -> lease
        self._received = collections.OrderedDict()  # the same -> (until, [(key, block)])
        self._ends = collections.OrderedDict()  # stamp of a block -> (time, key), in the order of both
        self.used_bytes = 0
        self.counts = collections.Counter()

    def find(self, keys, lease=None):
        """Returns the block of each key, or None. lease: those that are there will be read, until release(lease)."""
        found = [self._blocks.get(key) for key in keys]
        there = [block for block in found if block is not None]
        for block in there:
            self._blocks.move_to_end(block.key)
        if lease and there:
            self.release(lease)
            for block in there:
                block.leases += 1
            self._leases[lease] = time.monotonic() + LEASE_SEC, there, []
        self.counts["found"] += len(there)
        self.counts["missed"] += len(found) - len(there)
        return found

    def use(self, keys):
        """Clients have found blocks in the index. Some may be gone."""
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)
        self.counts["found"] += len(keys)

    def show(self, lease, key, block, step):
        """Publishes a block, until release(lease)."""
        self._worker.publish(key, block.view, step)
        self._shown[key] = lease  # in place of an earlier one, perhaps
        self._leases[lease][2].append(key)

    def release(self, lease):
        _, blocks, keys = self._leases.pop(lease, (0, [], []))
        for key in keys:
            if self._shown.get(key) == lease:
                del self._shown[key]
                try:
                    self._worker.withdraw(key)
                except NotFound:  # a peer has removed it
                    pass
        for block in blocks:
            block.leases -= 1
            if block.key is None and not block.leases:
                self.free(block)

    def reserve(self, size):
        """Returns memory for a block. None: there is no room, even without all that may go."""
        while (begin := self._room.take(size)) is None:
            if self._reclaim():
                continue
            oldest = next((block for block in self._blocks.values() if not block.leases), None)
            if oldest is None or size > self._limit:
                self.counts["refused"] += 1
                return None
            self._end(oldest)
            self.counts["evicted"] += 1
        self.used_bytes += size
        return Block(begin, self._memory[begin:begin + size])

    def free(self, block):
        self.used_bytes -= block.view.nbytes
        self._ending.append((block.begin, block.view))
        block.view = None
        self._reclaim()

    def hold(self, claim, blocks):
        """Has what was received into memory with a reservation, unseen until keep(claim). Earlier blocks of these keys
        are found by asking alone, which comes after the keeping."""
        self._give_back(claim)
        for key, _ in blocks:
            if key in self._blocks:
                _tensorlane._index_remove(self._index, key, self._blocks[key].stamp)
        self._received[claim] = time.monotonic() + LEASE_SEC, blocks

    def keep(self, claim):
        for key, block in self._received.pop(claim, (0, []))[1]:
            self.add(key, block)

    def add(self, key, block):
        self.remove(key)
        self._stamp += 1
        block.key, block.stamp = key, self._stamp
        self._blocks[key] = block
        _tensorlane._index_add(self._index, key, block.begin, block.view.nbytes, block.stamp)
        if self._ttl:
            self._ends[block.stamp] = time.monotonic() + self._ttl, key
        self.counts["stored"] += 1

    def remove(self, key):
        """Ends a block, which is not found any more; leases of it go on. Returns whether it was there."""
        block = self._blocks.get(key)
        if block is not None:
            self._end(block)
        return block is not None

    def describe(self):
        return {"blocks": len(self._blocks), "used_bytes": self.used_bytes, "limit_bytes": self._limit, **self.counts}

    def end_old(self):
        now = time.monotonic()
        while self._leases and next(iter(self._leases.values()))[0] <= now:
            self.release(next(iter(self._leases)))
        while self._received and next(iter(self._received.values()))[0] <= now:
            self._give_back(next(iter(self._received)))
        while self._ends and next(iter(self._ends.values()))[0] <= now:
            self.counts["expired"] += self.remove(next(iter(self._ends.values()))[1])

    def _end(self, block):
        _tensorlane._index_remove(self._index, block.key, block.stamp)
        del self._blocks[block.key]
        self._ends.pop(block.stamp, None)
        block.key = None
        if not block.leases:
            self.free(block)

    def _give_back(self, claim):
        for _, block in self._received.pop(claim, (0, []))[1]:
            self.free(block)

    def _reclaim(self):
        """Has the memory again that nothing refers to any more, but the list and the call. Returns whether it was any.
        """
        before = len(self._ending)
        still = []
        while self._ending:
            begin, view = self._ending.pop()
            if sys.getrefcount(view) > _COUNT_OF_ONE:
                still.append((begin, view))
            elif view.nbytes:
                self._room.give_back(begin, view.nbytes)
        self._ending = still
        return len(still) < before


class _Served:
    """A client, as its owner knows it."""

    def __init__(self, peer):
        self.peer = peer
        self.task = None
        self.stage = None  # what it sets, mapped; False: it cannot be


class Owner:
    """The process that has the blocks. It serves as long as run() does.

    address: "HOST:PORT" at which clients reach it; port 0 is any that is free. limit: bytes of all blocks. ttl: seconds
    until a block ends; 0: never. config: settings of its worker, as tensorlane.Worker takes them; None: those of the
    file that the variable TENSORLANE_SETTINGS names. timeout: seconds until a client that does not take an answer is
    given up. Raises what tensorlane.Worker and tensorlane.empty raise.
    """

    def __init__(self, address: str, limit: int, ttl: float = 0,
                 config: typing.Union[str, os.PathLike[str], dict[str, typing.Any], None] = None,
                 timeout: float = 10) -> None:
        self._endpoint = _engine.Endpoint(None, _logger, address, config)
        self.worker = self._endpoint.worker
        try:
            self.worker.publish("kv/page", empty((PAGE_BYTES,), "U8", shared=True))
            self.blocks = Blocks(self.worker, limit, ttl)
        except BaseException:
            self.worker.close(0)
            raise
        self._timeout = timeout
        self._clients = {}

    @property
    def address(self) -> str:
        """ "HOST:PORT" with the port that was found, which clients take."""
        return self.worker.address

    async def run(self) -> None:
        """Serves until it is cancelled."""
        hellos = asyncio.ensure_future(self._hear())
        try:
            while True:
                await asyncio.sleep(1)
                self.blocks.end_old()
                try:
                    infos = {info.id: info for info in self.worker.peers()}
                except (Error, MemoryError) as error:
                    _logger.warning("the clients are not looked at for a second: %r", error)
                    continue
                for name in list(self._clients):
                    self._look_at(name, infos)
                if hellos.done():
                    hellos.result()
        finally:
            for task in [hellos, *(client.task for client in self._clients.values())]:
                task.cancel()

    def _look_at(self, name, infos):
        """Lets go of a client that has gone."""
        client = self._clients[name]
        try:
            self._endpoint.check(client.peer, info=infos.get(client.peer.number))
        except Error as error:
            _logger.info("%s", error)
            client.task.cancel()
        if client.task.done():
            self._endpoint.use(client.peer, -1)
            del self._clients[name]
            client.task = client.stage = None  # The exception of the task refers to the client.

    async def _hear(self):
        """Takes in clients that say that they are there."""
        while True:
            try:
                async for hello in self.worker.subscribe(self.worker.name, "kv/hello"):
                    self._take_in(hello)
            except Error as error:
                _logger.warning("hellos do not come: %s", error)
            await asyncio.sleep(1)

    def _take_in(self, hello):
        try:
            said = json.loads(bytes(hello))
            name, address = said["id"], said["address"]
            if name in self._clients:
                return
            if len(self._clients) >= MAX_CLIENTS:
                raise ResourceExhausted(f"there are {MAX_CLIENTS} clients")
            client = _Served(self._endpoint.peer(address, said["incarnation"]))
            client.task = asyncio.ensure_future(self._serve(name, client))
            self._endpoint.use(client.peer, 1)
            self._clients[name] = client
            _logger.info("a client at %s", address)
        except Exception as error:
            _logger.warning("no client is taken in: %r", error)

    async def _serve(self, name, client):
        running = set()
        try:
            async with self.worker.subscribe(client.peer.number, f"kv/request/{name}", count=8) as requests:
                async for value in requests:
                    task = asyncio.ensure_future(self._answer(name, client, value.step, _bytes_of(value)))
                    del value
                    running.add(task)
                    task.add_done_callback(running.discard)
        except Error as error:
            _logger.info("the client at %s: %s", client.peer.address, error)

    async def _answer(self, name, client, number, text):
        keys, peer = [], client.peer
        try:
            request = json.loads(text)
            for done in request.get("done", ()):
                self.blocks.release((name, done))
            self.blocks.use(request.get("used", ()))
            keys = request["keys"] if isinstance(request["keys"], list) else []
            answer = await self._do(name, client, number, request, keys)
        except Exception as error:
            _logger.info("request %d of %s: %r", number, peer.address, error)
            answer = [False] * len(keys)
        try:
            if answer is not None:
                await self.worker.send(f"kv/reply/{name}", json.dumps(answer).encode(), number, timeout=self._timeout)
        except Error as error:
            _logger.info("the answer to request %d of %s: %s", number, peer.address, error)

    async def _do(self, name, client, number, request, keys):
        what = request["do"]
        if what == "set":
            return await self._set((name, number), client, keys, request)
        if what == "get":
            return self._get((name, number), keys, request)
        if what == "keep":
            return self.blocks.keep((name, request["of"]))
        if what == "used":
            return None
        if what == "describe":
            return self.blocks.describe()
        if what == "remove":
            return [self.blocks.remove(key) for key in keys]
        return [block is not None for block in self.blocks.find(keys)]

    def _get(self, lease, keys, request):
        """Says of each block where it lies in the memory, and its size. It stays there until the client has said that
        it is done; one that does not map the memory says the slot in which the blocks are to be shown."""
        found = self.blocks.find(keys, lease)
        if "slot" in request:
            for index, block in enumerate(found):
                if block is not None:
                    self.blocks.show(lease, _down(lease[0], int(request["slot"]), index), block, lease[1])
        return [block is not None and [block.begin, block.view.nbytes] for block in found]

    async def _set(self, claim, client, keys, request):
        """Takes the blocks for which there is room, which are there when the client says that it has not given up
        meanwhile: then it may have changed their memory, or shown others under the same names."""
        sizes, places, slot = request["sizes"], request.get("places"), int(request.get("slot", 0))
        for numbers in (sizes, sizes if places is None else places):
            if len(numbers) != len(keys) or not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("there is not one size and place for each key")
        if places is not None and not await self._has_stage(client):
            return "no place"
        taken = [self.blocks.reserve(size) if _is_key(key) else None for key, size in zip(keys, sizes)]
        chosen = [(index, block) for index, block in enumerate(taken) if block is not None]
        try:
            if places is not None:
                for index, block in chosen:
                    block.view[:] = client.stage[places[index]:places[index] + sizes[index]]
            elif chosen:
                got = await self.worker.recv_many(
                    client.peer.number, [_up(slot, index) for index, _ in chosen], claim[1],
                    into=[block.view for _, block in chosen], timeout=self._timeout)
                self._endpoint.note(client.peer, got)
        except BaseException:
            for _, block in chosen:
                self.blocks.free(block)
            raise
        self.blocks.hold(claim, [(keys[index], block) for index, block in chosen])
        return [block is not None for block in taken]

    async def _has_stage(self, client):
        if client.stage is None:
            client.stage = await self._endpoint.map(client.peer, "kv/stage", MAP_SEC) or False
        return client.stage is not False


def _bytes_of(value):
    """Strings and dead tensors have none, and are no request."""
    try:
        return bytes(value)
    except BufferError:
        return b""


# ------------------------------------------------------------------------------------------------------------ client --

def _run(loop):
    """What the thread of a client does. It does not refer to the client, so that one which is dropped is collected."""
    loop.run_forever()
    loop.close()


class Client:
    """A cache at an owner. Any thread may use it; its work is done in a thread of its own.

    The thread of the client also runs the callbacks of submit's futures. There, close and calls that block raise
    RuntimeError, as they would wait for themselves.

    A call that blocks is given up when a signal handler raises an exception, as that of Ctrl-C does. The exception
    comes when nothing uses the caller's memory any more, and of a set nothing is kept that the owner lacked by then.

    address: of the owner. timeout: seconds for each call, after which blocks count as not there. host: the address of
    this machine at which the owner receives what is set; None: that from which the owner is reached. logger: that of
    the engine which has the client. Nothing is connected before the first call. Raises ValueError: the address has not
    the form HOST:PORT, or timeout is below 0. TypeError: timeout is no number. FailedPrecondition: this process was
    forked from one that had opened a worker.
    """

    _is_closed = True  # until it is made

    def __init__(self, address: str, timeout: float = 5, host: typing.Optional[str] = None,
                 logger: logging.Logger = _logger) -> None:
        if not re.fullmatch(r".+:\d+", address):
            raise ValueError(f"the address of an owner has the form HOST:PORT, which {address!r} has not")
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
            raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
        if not timeout >= 0:
            raise ValueError(f"timeout is in seconds, at least 0, and not {timeout!r}")
        if _tensorlane._is_forked():
            raise FailedPrecondition(FORKED)
        self._owner = address
        self._logger = logger
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._host = host
        self._endpoint = _engine.Endpoint(lambda: self._host, logger)
        self._number = 0
        self._gets_done = []
        self._slots = _Slots()
        self._memory = None  # of the owner, where it can be mapped
        self._index = None  # the same
        self._incarnation = 0  # of the owner that this client has met
        self._used = {}  # keys of blocks that were found in the index, which the owner does not know yet
        self._saying = None
        self._stage = None
        self._stage_room = None
        self._meeting = None
        self._last_failure = None
        self._rests_until = 0
        self._lock = threading.RLock()  # a signal handler may use the client while this thread is in submit
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="tensorlane-kv", daemon=True)
        self._thread.start()
        self._is_closed = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Calls that run are cancelled first: they raise CancelledError, and leave the caller's memory alone. In a
        forked child nothing is closed: the client is the parent's."""
        if os.getpid() != self._process:
            return
        self._check_thread()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop)
        self._thread.join()
        self._memory = self._index = self._stage = None
        if self._endpoint.is_open:
            self._endpoint.worker.close(CLOSE_SEC)

    def __del__(self) -> None:
        # It may be collected in any thread, its own too, so that nothing waits for the thread here. When the
        # interpreter ends, the thread does not run any more, and the worker was closed before.
        if self._is_closed or os.getpid() != self._process or sys.is_finalizing():
            return
        warnings.warn(f"the client of the cache at {self._owner} was not closed", ResourceWarning, source=self)
        self._is_closed = True
        try:
            if self._endpoint.is_open:
                self._endpoint.worker.close(0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _end_calls(self):
        calls = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        asyncio.get_running_loop().stop()

    def set(self, keys: Sequence[str], blocks: Sequence[Buffer]) -> list[bool]:
        """Stores blocks, which have the buffer protocol and are contiguous. Returns of each whether the owner has it.
        Raises what submit raises, TypeError: a block is no such buffer, and ValueError: there is not one for each key.
        """
        return self._wait(self.set_async, keys, blocks)

    def get(self, keys: Sequence[str], into: Sequence[Buffer]) -> list[bool]:
        """Receives blocks into memory of their size, which can be written. Returns of each whether it was there and
        came; what the others have is undefined. Raises what set raises."""
        return self._wait(self.get_async, keys, into)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Returns of each block whether it is there. Raises what submit raises."""
        return self._wait(self.exists_async, keys)

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Ends blocks. Returns of each whether it was there. Raises what submit raises."""
        return self._wait(self.remove_async, keys)

    def describe(self) -> dict[str, int]:
        """Returns what the owner has and has counted; {} if it does not answer. Raises what submit raises."""
        return self._wait(self._describe) or {}

    def submit(self, call: Callable[..., Coroutine[typing.Any, typing.Any, _Result]],
               *arguments: typing.Any) -> "concurrent.futures.Future[_Result]":
        """Begins a call of the form NAME_async. Returns a future of the module concurrent, which is cancelled when the
        client is closed. What the owner does not do in time counts as not there and is no error. In a forked child it
        fails with FailedPrecondition.

        Raises RuntimeError: the client is closed. FailedPrecondition: it belongs to the process that this one was
        forked from.
        """
        if os.getpid() != self._process:
            raise FailedPrecondition(FORKED)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(call(*arguments), self._loop)
        _fork.calls[future] = FailedPrecondition(FORKED)
        return future

    def _check_thread(self):
        if threading.current_thread() is self._thread:
            raise RuntimeError("the thread of the client, which runs callbacks of its futures, cannot wait for the "
                               "client; do so in another thread")

    def _wait(self, call, *arguments):
        """Returns the result of a call of the form NAME_async. An exception that a signal handler raises meanwhile
        gives the call up, and leaves this function when nothing uses the caller's memory any more. A second one leaves
        it at once."""
        self._check_thread()
        begun = []

        async def run():
            begun.append(asyncio.current_task())
            return await call(*arguments)

        async def give_up():
            for task in begun:
                task.cancel()
                await _engine.until_done(task)

        coroutine = run()
        try:
            return self.submit(lambda: coroutine).result()
        except BaseException:
            try:
                # The loop begins them in this order, so that run has begun by then if it was submitted at all.
                self.submit(give_up).result()
            except (RuntimeError, FailedPrecondition, concurrent.futures.CancelledError):
                self._thread.join()  # The client is being closed, which gives up all calls.
            if not begun:
                coroutine.close()  # It was not submitted, and Python would warn that nothing awaited it.
            raise
        finally:
            begun.clear()  # The exception of the task refers to this frame, and so to the caller's memory.

    async def set_async(self, keys: Sequence[str], blocks: Sequence[Buffer]) -> list[bool]:
        """As set, for submit."""
        keys, blocks = list(keys), [_view(block) for block in blocks]
        if len(blocks) != len(keys):
            raise ValueError(f"there are {len(keys)} keys and {len(blocks)} blocks")
        return await self._guarded(keys, self._set(keys, blocks))

    async def get_async(self, keys: Sequence[str], into: Sequence[Buffer]) -> list[bool]:
        """As get, for submit."""
        into = [_view(one) for one in into]
        if len(into) != len(keys):
            raise ValueError(f"there are {len(keys)} keys and memory for {len(into)} blocks")
        if any(one.readonly for one in into):
            raise TypeError("there is memory for a block that cannot be written")
        return await self._guarded(keys, self._get(keys, into))

    async def exists_async(self, keys: Sequence[str]) -> list[bool]:
        """As exists, for submit."""
        return await self._guarded(keys, self._exists(keys))

    async def remove_async(self, keys: Sequence[str]) -> list[bool]:
        """As remove, for submit."""
        return await self._guarded(keys, self._ask({"do": "remove", "keys": list(keys)}))

    async def _describe(self):
        return await self._guarded([], self._ask({"do": "describe", "keys": []}))

    async def _guarded(self, keys, call):
        """What cannot be done is said once for each reason, and counts as not there."""
        if time.monotonic() < self._rests_until:
            call.close()
            return [False] * len(keys)
        meeting = self._meeting
        try:
            result = await self._watched(call)
            self._last_failure = None
            return result
        except (Error, OSError) as error:
            error.__traceback__ = None  # It refers to the caller's memory, and self._meeting may refer to the error.
            text = re.sub(r"[\da-f]+", "N", str(error))
            if text != self._last_failure:
                self._logger.warning("the cache at %s is not used: %s", self._owner, error)
            self._last_failure = text
            if meeting is not None and self._meeting is not meeting and self._has_met():
                return [False] * len(keys)  # another call has met the next owner meanwhile
            if isinstance(error, (TimeoutError, Unavailable)) or not self._has_met():
                self._rests_until = time.monotonic() + REST_SEC
                if self._has_met():
                    self._forget_owner()  # the next one there may be another process
            return [False] * len(keys)

    async def _watched(self, call):
        """Waits for a call as long as the owner can be reached, and the time-out at most."""
        task, end = asyncio.ensure_future(call), time.monotonic() + self._timeout
        try:
            while not (await asyncio.wait([task], timeout=LOOK_SEC))[0]:
                if self._endpoint.is_open:
                    self._endpoint.check(self._peer(), patience=2 * LOOK_SEC)
                if time.monotonic() >= end:
                    raise DeadlineExceeded(f"{self._owner} did not answer within {self._timeout} s")
            return task.result()
        finally:
            # Nothing writes to the caller's memory any more when this returns.
            task.cancel()
            await _engine.until_done(task)
            del task  # Its exception refers to this frame, and so to the caller's memory.

    def _peer(self):
        return self._endpoint.peer(self._owner)

    async def _meet(self):
        """Says that this client is there until the owner has begun to receive its requests."""
        end = time.monotonic() + self._timeout
        if self._host is None:
            self._host = await asyncio.get_running_loop().run_in_executor(None, _host_towards, self._owner)
        worker, peer = self._endpoint.worker, self._peer()
        hello = {"id": self._name, "address": worker.address, "incarnation": worker.incarnation}
        while True:
            # Also in place of what a stranger has put there with a later step.
            await worker.put(peer.number, "kv/hello", json.dumps(hello).encode(), may_go_back=True,
                             timeout=self._timeout)
            number = self._take_number()
            try:
                await worker.send(f"kv/request/{self._name}", b'{"do": "exists", "keys": []}', number,
                                  timeout=HELLO_SEC)
                await worker.recv(peer.number, f"kv/reply/{self._name}", number, timeout=self._timeout)
                await self._map()
                return
            except TimeoutError:  # another client has said hello in the same moment
                if time.monotonic() >= end:
                    raise

    async def _map(self):
        """Maps the owner's memory, and shows it some of our own, where that is possible."""
        worker, peer = self._endpoint.worker, self._peer()
        self._memory = self._index = None
        self._incarnation = self._endpoint.info(peer).incarnation
        # All of the owner's memory would be copied if it could not be mapped.
        if await self._endpoint.map(peer, "kv/page", MAP_SEC):
            self._memory = await self._endpoint.map(peer, "kv/memory", MAP_SEC)
        if self._memory is not None:
            self._index = await self._endpoint.map(peer, "kv/index", MAP_SEC)
        if self._endpoint.info(peer).incarnation != self._incarnation:
            self._memory = self._index = None  # they are of two processes, perhaps
            raise Unavailable(f"another process began at {self._owner} while its memory was mapped")
        if self._stage is None and self._memory is not None:
            tensor = empty((STAGE_BYTES,), "U8", shared=True)
            worker.publish("kv/stage", tensor)
            self._stage, self._stage_room = memoryview(tensor), Room(STAGE_BYTES)

    def _has_met(self):
        meeting = self._meeting
        return meeting is not None and meeting.done() and not meeting.cancelled() and meeting.exception() is None

    def _forget_owner(self):
        self._meeting = self._memory = self._index = None

    async def _known(self):
        if self._has_met() and self._endpoint.info(self._peer()).incarnation != self._incarnation:
            self._forget_owner()  # another process has its place
        if self._meeting is None or self._meeting.done() and not self._has_met():
            self._meeting = asyncio.ensure_future(self._meet())
            # The calls that wait for it may be given up before it fails.
            self._meeting.add_done_callback(lambda meeting: meeting.cancelled() or meeting.exception())
        await asyncio.shield(self._meeting)

    async def _say(self, request, number):
        request["done"], request["used"] = self._gets_done, list(self._used)
        text = json.dumps(request).encode()  # fails where a key is of a type that JSON does not have
        self._gets_done, self._used = [], {}
        await self._endpoint.worker.send(f"kv/request/{self._name}", text, number, timeout=self._timeout)

    async def _ask(self, request, number=None):
        await self._known()
        worker, peer = self._endpoint.worker, self._peer()
        if number is None:
            number = self._take_number()
        reply = asyncio.ensure_future(worker.recv(peer.number, f"kv/reply/{self._name}", number, timeout=self._timeout))
        try:
            await self._say(request, number)
            answer = json.loads(bytes(await reply))
            if request["do"] in ("get", "exists") and not (isinstance(answer, list) and
                                                           len(answer) == len(request["keys"])):
                raise Unavailable(f"{self._owner} does not answer as an owner of blocks")
            return answer
        finally:
            reply.cancel()

    def _take_number(self):
        self._number += 1
        return self._number

    async def _set(self, keys, blocks):
        await self._known()
        sizes = [block.nbytes for block in blocks]
        place = self._stage_room.take(sum(sizes)) if self._memory is not None else None
        taken = "no place"
        if place is not None:
            try:
                taken = await self._set_staged(keys, blocks, sizes, place)
            finally:
                if sum(sizes):
                    self._stage_room.give_back(place, sum(sizes))
        return await self._set_shown(keys, blocks, sizes) if taken == "no place" else taken

    async def _set_staged(self, keys, blocks, sizes, place):
        """Copies the blocks to memory that the owner maps."""
        places = []
        for block in blocks:
            places.append(place)
            _copy(self._stage[place:place + block.nbytes], block)
            place += block.nbytes
        return await self._ask_to_keep({"do": "set", "keys": keys, "sizes": sizes, "places": places})

    async def _set_shown(self, keys, blocks, sizes):
        """Shows the blocks to the owner, which receives them."""
        worker, number, slot = self._endpoint.worker, self._take_number(), self._slots.take()
        names = [_up(slot, index) for index in range(len(keys))]
        try:
            for name, block in zip(names, blocks):
                worker.publish(name, block, number)
            return await self._ask_to_keep({"do": "set", "keys": keys, "sizes": sizes, "slot": slot}, number)
        finally:
            self._slots.give_back(slot)
            for name in names:
                try:
                    worker.withdraw(name)
                except NotFound:  # it was not published, or a peer has removed it
                    pass

    async def _ask_to_keep(self, request, number=None):
        number = number or self._take_number()
        taken = await self._ask(request, number)
        if taken != "no place" and True in taken:
            await self._say({"do": "keep", "keys": [], "of": number}, self._take_number())
        return taken

    async def _get(self, keys, into):
        return await self._find(keys, into, self._ask_for)

    async def _exists(self, keys):
        return await self._find(keys, None, lambda keys, _: self._ask({"do": "exists", "keys": keys}))

    async def _find(self, keys, into, ask):
        """Looks into the owner's index, and asks for what is not there."""
        await self._known()
        found = self._read_index(list(keys), into)
        missing = [place for place, is_there in enumerate(found) if not is_there]
        if missing:
            answers = await ask([keys[place] for place in missing], into and [into[place] for place in missing])
            for place, is_there in zip(missing, answers):
                found[place] = is_there
        return found

    def _read_index(self, keys, into):
        """Copies the blocks that are in the owner's index. Returns of each whether it was there in this size."""
        if self._index is None or self._endpoint.info(self._peer()).state != "up":
            return [False] * len(keys)
        found = _tensorlane._index_read(self._index, self._memory,
                                        [key if isinstance(key, str) else None for key in keys], into)
        self._used.update(dict.fromkeys(itertools.compress(keys, found)))
        if self._used and (self._saying is None or self._saying.done()):
            self._saying = asyncio.ensure_future(self._say_used())
        return found

    async def _say_used(self):
        """Says at once what was found, so that it stays until it is got, and what is found meanwhile soon."""
        try:
            while self._used:
                await self._say({"do": "used", "keys": []}, self._take_number())
                await asyncio.sleep(USED_SEC)
        except Error:  # the owner is gone
            pass

    async def _ask_for(self, keys, into):
        number, slot = self._take_number(), self._slots.take()
        try:
            return await (self._get_mapped(keys, into, number, self._memory) if self._memory is not None else
                          self._get_shown(keys, into, number, slot))
        finally:
            self._slots.give_back(slot)
            self._gets_done.append(number)  # the next request says it

    async def _get_mapped(self, keys, into, number, memory):
        """Copies the blocks from the owner's memory."""
        asked = time.monotonic()
        found = [place and place[1] == one.nbytes and place for place, one in
                 zip(await self._ask({"do": "get", "keys": keys}, number), into)]
        if self._memory is not memory:
            raise Unavailable(f"{self._owner} was lost during the call")
        for place, one in zip(found, into):
            if place:
                _copy(one, memory[place[0]:place[0] + place[1]])
        # The owner leaves them there for so long, counted from when it was asked or later.
        if time.monotonic() - asked >= LEASE_SEC:
            raise DeadlineExceeded(f"what {self._owner} has was copied too late")
        return [bool(place) for place in found]

    async def _get_shown(self, keys, into, number, slot):
        """Receives the blocks, which the owner shows for this call."""
        places = await self._ask({"do": "get", "keys": keys, "slot": slot}, number)
        found = [bool(place) and place[1] == one.nbytes for place, one in zip(places, into)]
        there = [index for index, is_there in enumerate(found) if is_there]
        if there:
            peer = self._peer()
            got = await self._endpoint.receive_all(peer, [_down(self._name, slot, index) for index in there],
                                                   [into[index] for index in there], self._timeout, number)
            self._endpoint.note(peer, got)
        return found


def _lmcache_logger():
    """LMCache shows what loggers say that it has made itself."""
    if "lmcache" not in sys.modules:
        return _logger
    from lmcache.logging import init_logger
    return init_logger("lmcache.tensorlane")


class LMCacheClient:
    """The client that LMCache's native plug-in (type native_plugin) loads, with its calls. Its arguments are those of
    Client. Each submit_ call begins one of Client's and returns its number; drain_completions has what came of it.
    They raise what Client.submit raises."""

    _event = -1  # until it is made

    def __init__(self, address: str, timeout: float = 5, host: typing.Optional[str] = None) -> None:
        self._client = Client(address, timeout, host, _lmcache_logger())
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._event_lock = threading.Lock()
        self._process = os.getpid()
        self._done = collections.deque()
        self._number = 0

    def __del__(self) -> None:
        if self._event >= 0:
            os.close(self._event)

    def event_fd(self) -> int:
        """Returns a descriptor that can be read when something has ended; -1 after close."""
        return self._event

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> int:
        """Begins Client.get into the buffers."""
        return self._submit(self._client.get_async, list(keys), list(buffers))

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> int:
        """Begins Client.set of the buffers, which must not change until it has ended."""
        return self._submit(self._client.set_async, list(keys), list(buffers))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Begins Client.exists."""
        return self._submit(self._client.exists_async, list(keys))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Begins Client.remove."""
        return self._submit(self._client.remove_async, list(keys))

    def drain_completions(self) -> list[tuple[int, bool, str, typing.Optional[list[bool]]]]:
        """Returns (number, whether all is well, error, result of each key) of what has ended."""
        if os.getpid() != self._process:
            raise FailedPrecondition(FORKED)
        with self._event_lock:
            try:
                if self._event >= 0:
                    os.eventfd_read(self._event)
            except BlockingIOError:
                pass
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """As Client.close."""
        if os.getpid() != self._process:
            return
        self._client.close()
        with self._event_lock:
            event, self._event = self._event, -1
            if event >= 0:
                os.close(event)

    def _submit(self, call, keys, *arguments):
        self._number += 1
        number = self._number
        future = self._client.submit(call, keys, *arguments)
        future.add_done_callback(lambda future: self._complete(number, call, future))
        return number

    def _complete(self, number, call, future):
        if os.getpid() != self._process:
            return  # The descriptor is the parent's, and another thread of the parent may have had the lock.
        if future.cancelled() or future.exception() is not None:  # Raised here, it would refer to the future.
            self._done.append((number, False, "" if future.cancelled() else str(future.exception()), None))
        else:
            results = future.result()
            is_store = call == self._client.set_async
            error = "the owner does not have all blocks" if is_store and not all(results) else ""
            self._done.append((number, not error, error, results))
        with self._event_lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)


# ----------------------------------------------------------------------------------------------------------- program --

def _size(text):
    units = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    match = re.fullmatch(r"(\d+) ?([KMGT]iB|B|)", text)
    size = match and int(match[1]) * units[match[2]]
    if size is None or size >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 64GiB")
    return size


def _seconds(text):
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, such as 3600")


def _say_ready(parser, address):
    try:
        print(f"ready at {address}", flush=True)
    except OSError as error:
        # The interpreter would try again at its end what could not be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(1, f"{parser.prog}: cannot write to standard output: {error}\n")


async def _serve_until_told(owner):
    """Serves until SIGTERM or Ctrl-C."""
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()

    def end(*_):
        with contextlib.suppress(RuntimeError):  # The loop is closed already, and the worker closes.
            loop.call_soon_threadsafe(serving.cancel)

    # An exception that the handler raised would end whichever task runs.
    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(asyncio.CancelledError):
        await owner.run()


def main() -> None:
    """The program of an owner: python -m tensorlane.kv --help."""
    parser = argparse.ArgumentParser(prog="python -m tensorlane.kv", description="Owns a cache of blocks.")
    parser.add_argument("--address", required=True, help="HOST:PORT, where engines reach it; port 0 is any")
    parser.add_argument("--limit", required=True, type=_size, help="bytes of all blocks, such as 64GiB")
    parser.add_argument("--ttl", type=_seconds, default=0, help="seconds until a block ends (0: never)")
    parser.add_argument("--settings", help="a file with settings of the worker (docs/config.md)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # It ends as by Ctrl-C.
    try:
        owner = Owner(arguments.address, arguments.limit, arguments.ttl, arguments.settings)
    except (Error, OSError, MemoryError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(0)
    try:
        _say_ready(parser, owner.address)
        asyncio.run(_serve_until_told(owner))
    except KeyboardInterrupt:
        pass
    finally:
        owner.worker.close()


if __name__ == "__main__":
    main()
