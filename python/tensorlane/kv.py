# SPDX-License-Identifier: Apache-2.0
"""A cache of blocks in the host memory of one process, the owner, which several engines share.

    python -m tensorlane.kv --address 10.0.0.1:4700 --limit 64GiB --ttl 3600       # the owner

    with tensorlane.kv.Client("10.0.0.1:4700") as cache:
        cache.set(["a", "b"], [block_a, block_b])
        found = cache.get(["a", "b"], [into_a, into_b])                            # [True, True]

LMCacheClient is what LMCache loads, HiCache (tensorlane.sglang) what SGLang does. docs/kv.md is the page, and says how
it works: blocks are always received by the side that has room for them, so that they are copied once. All of this is
alpha, as are the engines' interfaces.

No call waits for ever: a block that does not come in time is one that is not there.
"""
import argparse
import asyncio
import collections
import concurrent.futures
import hashlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import uuid

from . import _engine, empty
from .errors import DeadlineExceeded, Error, NotFound, ResourceExhausted, Unavailable

_logger = logging.getLogger("tensorlane.kv")
# What a get has found stays until its client says that it has it, and for so long at most. So long a client may take to
# say that what was received of it has not changed meanwhile.
LEASE_SEC = 10
# A client says so often that it is there, until the owner answers.
HELLO_SEC = 0.5
# While calls run, a client looks so often whether the owner can be reached.
LOOK_SEC = 0.25
# After an owner has failed, nothing is asked of it for so long.
REST_SEC = 2
MAX_KEY_BYTES = 256
MAX_CLIENTS = 256


def _block(key):
    """The key under which a block is published."""
    encoded = key.encode()
    return "kv/block/" + (key if 0 < len(encoded) <= MAX_KEY_BYTES and "\0" not in key else
                          hashlib.sha256(encoded).hexdigest())


def _up(slot, index):
    """The key under which a client shows a block that the owner is to receive."""
    return f"kv/up/{slot}/{index}"


def _host_towards(address):
    """The address of this machine from which packets to another one go. None is sent."""
    host, port = address.rsplit(":", 1)
    family, kind, protocol, _, name = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(name)
        return probe.getsockname()[0]


# ------------------------------------------------------------------------------------------------------------- owner --

class _Block:
    __slots__ = "tensor", "serial", "leases", "has_ended"

    def __init__(self, tensor, serial):
        self.tensor = tensor
        self.serial = serial
        self.leases = 0
        self.has_ended = False  # it goes with its last lease


class Blocks:
    """What the owner has: the oldest blocks go when there is no room, and those whose time is over."""

    def __init__(self, worker, limit, ttl):
        self._worker = worker
        self._limit = limit
        self._ttl = ttl
        self._blocks = collections.OrderedDict()  # key -> _Block; used last at the end
        self._leases = collections.OrderedDict()  # (client, number of its request) -> (until, [(key, serial)])
        self._received = collections.OrderedDict()  # the same -> (until, [(key, tensor)])
        self._ends = collections.deque()  # (time, key, serial), in this order
        self._serial = 0
        self._spare = collections.defaultdict(list)  # memory of blocks that went, by size
        self._spare_bytes = 0
        self.used_bytes = 0
        self.counts = collections.Counter()

    def find(self, keys, lease=None):
        """Says of each key whether it is there. lease: those that are will be received, until release(lease)."""
        found, leased = [], []
        for key in keys:
            block = self._blocks.get(key)
            found.append(block is not None and not block.has_ended)
            if found[-1]:
                self._blocks.move_to_end(key)
                leased.append((key, block.serial))
        if lease and leased:
            self.release(lease)
            for key, _ in leased:
                self._blocks[key].leases += 1
            self._leases[lease] = time.monotonic() + LEASE_SEC, leased
        self.counts["found"] += sum(found)
        self.counts["missed"] += len(found) - sum(found)
        return found

    def release(self, lease):
        for key, serial in self._leases.pop(lease, (0, []))[1]:
            block = self._blocks.get(key)
            if block is not None and block.serial == serial:
                block.leases -= 1
                if block.has_ended and not block.leases:
                    self._drop(key)

    def reserve(self, size):
        """Makes room for a block. False: there is none, even without all that may go."""
        while self.used_bytes + size > self._limit:
            oldest = next((key for key, block in self._blocks.items() if not block.leases), None)
            if oldest is None or size > self._limit:
                self.counts["refused"] += 1
                return False
            self._drop(oldest)
            self.counts["evicted"] += 1
        self.used_bytes += size
        return True

    def memory(self, size):
        """Returns a tensor for a block for which there is a reservation: new memory costs more than filling it."""
        spare = self._spare[size]
        for index in range(len(spare)):
            # Only the list and the call refer to it: what was being received of it has come to its end.
            if sys.getrefcount(spare[index]) <= 2:
                self._spare_bytes -= size
                return spare.pop(index)
        while self._spare_bytes and self.used_bytes + self._spare_bytes > self._limit:
            other = next(tensors for tensors in self._spare.values() if tensors)
            self._spare_bytes -= other.pop().nbytes
        return empty((size,), "U8")

    def hold(self, claim, blocks):
        """Has what was received into memory with a reservation, unseen until keep(claim)."""
        self._give_back(claim)
        self._received[claim] = time.monotonic() + LEASE_SEC, blocks

    def keep(self, claim):
        for key, tensor in self._received.pop(claim, (0, []))[1]:
            try:
                self.add(key, tensor)
            except Error as error:
                _logger.warning("a block is not kept: %s", error)

    def add(self, key, tensor):
        """Publishes a block for which there is a reservation."""
        self._drop(key)
        try:
            # While the library reads the memory, it refers to the view, and the view to the tensor.
            self._worker.publish(_block(key), memoryview(tensor))
        except BaseException:
            self.used_bytes -= tensor.nbytes
            raise
        self._serial += 1
        self._blocks[key] = _Block(tensor, self._serial)
        if self._ttl:
            self._ends.append((time.monotonic() + self._ttl, key, self._serial))
        self.counts["stored"] += 1

    def remove(self, key):
        """Ends a block, which is not found any more; leases of it go on. Returns whether it was there."""
        block = self._blocks.get(key)
        if block is None or block.has_ended:
            return False
        block.has_ended = True
        if not block.leases:
            self._drop(key)
        return True

    def describe(self):
        return {"blocks": len(self._blocks), "used_bytes": self.used_bytes, "spare_bytes": self._spare_bytes,
                "limit_bytes": self._limit, **self.counts}

    def end_old(self):
        now = time.monotonic()
        while self._leases and next(iter(self._leases.values()))[0] <= now:
            self.release(next(iter(self._leases)))
        while self._received and next(iter(self._received.values()))[0] <= now:
            self._give_back(next(iter(self._received)))
        while self._ends and self._ends[0][0] <= now:
            _, key, serial = self._ends.popleft()
            if key in self._blocks and self._blocks[key].serial == serial:
                self.counts["expired"] += self.remove(key)

    def _drop(self, key):
        """What is being received of the block comes to its end."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        try:
            self._worker.withdraw(_block(key))
        except NotFound:  # a peer has removed it
            pass
        self._spare_memory(block.tensor)

    def _give_back(self, claim):
        for _, tensor in self._received.pop(claim, (0, []))[1]:
            self._spare_memory(tensor)

    def _spare_memory(self, tensor):
        self.used_bytes -= tensor.nbytes
        self._spare[tensor.nbytes].append(tensor)
        self._spare_bytes += tensor.nbytes


class Owner:
    """The process that has the blocks. It serves as long as run() does."""

    def __init__(self, address, limit, ttl=0, config=None, timeout=10):
        self._endpoint = _engine.Endpoint(None, _logger, address, config)
        self.worker = self._endpoint.worker
        self.blocks = Blocks(self.worker, limit, ttl)
        self._timeout = timeout
        self._clients = {}

    @property
    def address(self):
        return self.worker.address

    async def run(self):
        """Serves until it is cancelled."""
        hellos = asyncio.ensure_future(self._hear())
        try:
            while True:
                await asyncio.sleep(1)
                self.blocks.end_old()
                for name, (peer, task) in list(self._clients.items()):
                    try:
                        self._endpoint.check(peer)
                    except Error as error:
                        _logger.info("%s", error)
                        task.cancel()
                    if task.done():
                        self._endpoint.use(peer, -1)
                        del self._clients[name]
                if hellos.done():
                    hellos.result()
        finally:
            for task in [hellos, *(task for _, task in self._clients.values())]:
                task.cancel()

    async def _hear(self):
        """Takes in clients that say that they are there."""
        while True:
            try:
                async for hello in self.worker.subscribe(self.worker.name, "kv/hello"):
                    self._take_in(bytes(hello))
            except Error as error:
                _logger.warning("hellos do not come: %s", error)
            await asyncio.sleep(1)

    def _take_in(self, hello):
        try:
            client = json.loads(hello)
            name, address = client["id"], client["address"]
            if name in self._clients:
                return
            if len(self._clients) >= MAX_CLIENTS:
                raise ResourceExhausted(f"there are {MAX_CLIENTS} clients")
            peer = self._endpoint.peer(address, client["incarnation"])
            self._endpoint.use(peer, 1)
            self._clients[name] = peer, asyncio.ensure_future(self._serve(name, peer))
            _logger.info("a client at %s", address)
        except Exception as error:
            _logger.warning("no client is taken in: %r", error)

    async def _serve(self, name, peer):
        running = set()
        try:
            async with self.worker.subscribe(peer.number, f"kv/request/{name}", count=8) as requests:
                async for value in requests:
                    task = asyncio.ensure_future(self._answer(name, peer, value.step, bytes(value)))
                    del value
                    running.add(task)
                    task.add_done_callback(running.discard)
        except Error as error:
            _logger.info("the client at %s: %s", peer.address, error)

    async def _answer(self, name, peer, number, text):
        keys = []
        try:
            request = json.loads(text)
            for done in request.get("done", ()):
                self.blocks.release((name, done))
            keys = request["keys"] if isinstance(request["keys"], list) else []
            for key in keys:
                key.encode()  # what cannot be encoded is no key
            answer = await self._do(name, peer, number, request, keys)
        except Exception as error:
            _logger.info("request %d of %s: %r", number, peer.address, error)
            answer = [False] * len(keys)
        try:
            if answer is not None:
                await self.worker.send(f"kv/reply/{name}", json.dumps(answer).encode(), number, timeout=self._timeout)
        except Error as error:
            _logger.info("the answer to request %d of %s: %s", number, peer.address, error)

    async def _do(self, name, peer, number, request, keys):
        what = request["do"]
        if what == "set":
            return await self._set((name, number), peer, keys, request["sizes"], int(request["slot"]))
        if what == "keep":
            return self.blocks.keep((name, request["of"]))
        if what == "describe":
            return self.blocks.describe()
        if what == "remove":
            return [self.blocks.remove(key) for key in keys]
        return self.blocks.find(keys, (name, number) if what == "get" else None)

    async def _set(self, claim, peer, keys, sizes, slot):
        """Receives the blocks for which there is room, which are there when the client says that it has not given up
        meanwhile: then it may have changed their memory, or shown others under the same names."""
        if len(sizes) != len(keys) or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("the sizes are not one for each key")
        taken = [self.blocks.reserve(size) for size in sizes]
        chosen = [index for index, is_taken in enumerate(taken) if is_taken]
        try:
            into = [self.blocks.memory(sizes[index]) for index in chosen]
            if chosen:
                got = await self.worker.recv_many(peer.number, [_up(slot, index) for index in chosen], claim[1],
                                                  into=into, timeout=self._timeout)
                self._endpoint.note(peer, got)
        except BaseException:
            self.blocks.used_bytes -= sum(sizes[index] for index in chosen)
            raise
        self.blocks.hold(claim, [(keys[index], tensor) for index, tensor in zip(chosen, into)])
        return taken


# ------------------------------------------------------------------------------------------------------------ client --

class Client:
    """A cache at an owner. Any thread may use it; its work is done in a thread of its own.

    address: of the owner. timeout: seconds for each call, after which blocks count as not there. host: the address of
    this machine at which the owner receives what is set; None: that from which the owner is reached.
    """

    def __init__(self, address, timeout=5, host=None):
        self._owner = address
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._host = host
        self._endpoint = _engine.Endpoint(lambda: self._host, _logger)
        self._number = 0
        self._gets_done = []
        self._slots = set()
        self._meeting = None
        self._last_failure = None
        self._rests_until = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tensorlane-kv", daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Calls that run are cancelled first: they raise CancelledError, and leave the caller's memory alone."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self._endpoint.is_open:
            self._endpoint.worker.close(0)
        self._loop.close()

    async def _end_calls(self):
        calls = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def set(self, keys, blocks):
        """Stores blocks. Returns of each whether the owner has it."""
        return self.submit(self.set_async, keys, blocks).result()

    def get(self, keys, into):
        """Receives blocks into memory of their size. Returns of each whether it was there and came."""
        return self.submit(self.get_async, keys, into).result()

    def exists(self, keys):
        return self.submit(self.exists_async, keys).result()

    def remove(self, keys):
        """Ends blocks. Returns of each whether it was there."""
        return self.submit(self.remove_async, keys).result()

    def describe(self):
        """Returns what the owner has and has counted; {} if it does not answer."""
        return self.submit(self._describe).result() or {}

    def submit(self, call, *arguments):
        """Begins a call of the form NAME_async. Returns a future of the module concurrent."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed")
            return asyncio.run_coroutine_threadsafe(call(*arguments), self._loop)

    async def set_async(self, keys, blocks):
        blocks = [memoryview(block).cast("B") for block in blocks]
        return await self._guarded(keys, self._set(keys, blocks))

    async def get_async(self, keys, into):
        return await self._guarded(keys, self._get(keys, [memoryview(one).cast("B") for one in into]))

    async def exists_async(self, keys):
        return await self._guarded(keys, self._ask({"do": "exists", "keys": keys}))

    async def remove_async(self, keys):
        return await self._guarded(keys, self._ask({"do": "remove", "keys": keys}))

    async def _describe(self):
        return await self._guarded([], self._ask({"do": "describe", "keys": []}))

    async def _guarded(self, keys, call):
        """What cannot be done is said once for each reason, and counts as not there."""
        if time.monotonic() < self._rests_until:
            call.close()
            return [False] * len(keys)
        try:
            result = await self._watched(call)
            self._last_failure = None
            return result
        except (Error, OSError) as error:
            text = re.sub(r"[\da-f]+", "N", str(error))
            if text != self._last_failure:
                _logger.warning("the cache at %s is not used: %s", self._owner, error)
            self._last_failure = text
            if isinstance(error, (TimeoutError, Unavailable)) or not self._has_met():
                self._rests_until = time.monotonic() + REST_SEC
                if self._has_met():
                    self._meeting = None  # the next one there may be another process
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
                return
            except TimeoutError:  # another client has said hello in the same moment
                if time.monotonic() >= end:
                    raise

    def _has_met(self):
        meeting = self._meeting
        return meeting is not None and meeting.done() and not meeting.cancelled() and meeting.exception() is None

    async def _known(self):
        if self._meeting is None or self._meeting.done() and not self._has_met():
            self._meeting = asyncio.ensure_future(self._meet())
        await asyncio.shield(self._meeting)

    async def _say(self, request, number):
        request["done"], self._gets_done = self._gets_done, []
        await self._endpoint.worker.send(f"kv/request/{self._name}", json.dumps(request).encode(), number,
                                         timeout=self._timeout)

    async def _ask(self, request, number=None):
        await self._known()
        worker, peer = self._endpoint.worker, self._peer()
        if number is None:
            number = self._take_number()
        reply = asyncio.ensure_future(worker.recv(peer.number, f"kv/reply/{self._name}", number, timeout=self._timeout))
        try:
            await self._say(request, number)
            return json.loads(bytes(await reply))
        finally:
            reply.cancel()

    def _take_number(self):
        self._number += 1
        return self._number

    async def _set(self, keys, blocks):
        await self._known()
        worker, number = self._endpoint.worker, self._take_number()
        # Few names, because each side of a connection remembers those that it has met.
        slot = min(set(range(len(self._slots) + 1)) - self._slots)
        self._slots.add(slot)
        names = [_up(slot, index) for index in range(len(keys))]
        try:
            for name, block in zip(names, blocks):
                worker.publish(name, block, number)
            sizes = [block.nbytes for block in blocks]
            taken = await self._ask({"do": "set", "keys": keys, "sizes": sizes, "slot": slot}, number)
            if any(taken):
                await self._say({"do": "keep", "keys": [], "of": number}, self._take_number())
            return taken
        finally:
            self._slots.discard(slot)
            for name in names:
                try:
                    worker.withdraw(name)
                except NotFound:  # it was not published, or a peer has removed it
                    pass

    async def _get(self, keys, into):
        await self._known()
        number = self._take_number()
        found = await self._ask({"do": "get", "keys": keys}, number)
        there = [index for index, is_there in enumerate(found) if is_there]
        if there:
            peer = self._peer()
            got = await self._endpoint.receive_all(peer, [_block(keys[index]) for index in there],
                                                   [into[index] for index in there], self._timeout)
            self._endpoint.note(peer, got)
        self._gets_done.append(number)  # the next request says it
        return found


class LMCacheClient:
    """The client that LMCache's native plug-in (type native_plugin) loads, with its five calls."""

    def __init__(self, address, timeout=5, host=None):
        self._client = Client(address, timeout, host)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done = collections.deque()
        self._number = 0

    def event_fd(self):
        return self._event

    def submit_batch_get(self, keys, buffers):
        return self._submit(self._client.get_async, list(keys), list(buffers))

    def submit_batch_set(self, keys, buffers):
        return self._submit(self._client.set_async, list(keys), list(buffers))

    def submit_batch_exists(self, keys):
        return self._submit(self._client.exists_async, list(keys))

    def submit_batch_delete(self, keys):
        return self._submit(self._client.remove_async, list(keys))

    def drain_completions(self):
        """Returns (number, whether all is well, error, result of each key) of what has ended."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self):
        self._client.close()
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def _submit(self, call, keys, *arguments):
        self._number += 1
        number = self._number
        future = self._client.submit(call, keys, *arguments)
        future.add_done_callback(lambda future: self._complete(number, call, future))
        return number

    def _complete(self, number, call, future):
        try:
            results = future.result()
            is_store = call == self._client.set_async
            error = "the owner does not have all blocks" if is_store and not all(results) else ""
            self._done.append((number, not error, error, results))
        except (Exception, concurrent.futures.CancelledError) as error:
            self._done.append((number, False, str(error), None))
        if self._event >= 0:
            os.eventfd_write(self._event, 1)


# ----------------------------------------------------------------------------------------------------------- program --

def _size(text):
    units = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    match = re.fullmatch(r"(\d+) ?([KMGT]iB|B|)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 64GiB")
    return int(match[1]) * units[match[2]]


def main():
    parser = argparse.ArgumentParser(prog="python -m tensorlane.kv", description="Owns a cache of blocks.")
    parser.add_argument("--address", required=True, help="HOST:PORT, where engines reach it; port 0 is any")
    parser.add_argument("--limit", required=True, type=_size, help="bytes of all blocks, such as 64GiB")
    parser.add_argument("--ttl", type=float, default=0, help="seconds until a block ends (0: never)")
    parser.add_argument("--settings", help="a file with settings of the worker (docs/config.md)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    owner = Owner(arguments.address, arguments.limit, arguments.ttl, arguments.settings)
    print(f"ready at {owner.address}", flush=True)
    try:
        asyncio.run(owner.run())
    except KeyboardInterrupt:
        pass
    finally:
        owner.worker.close()


if __name__ == "__main__":
    main()
