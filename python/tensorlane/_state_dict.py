# SPDX-License-Identifier: Apache-2.0
"""State dicts: all tensors of a model, by name, with one step.

Each tensor is published under "PREFIX/NAME", and last of all an index under PREFIX: names, and for each the key, dtype
and shape. So a peer that has received an index finds all tensors of its step or of later ones. A tensor of a later step
says that the owner has published again meanwhile; then all is received again. Names that share memory (tied weights)
have one key.

A pull into a DTensor receives the part that this process has of it (_shards.py).
"""
import json
import typing

from . import _shards
from ._tensorlane import MAX_KEY_BYTES, Tensor, copy, wrap
from .errors import Error, FailedPrecondition, InvalidArgument, Unimplemented

# With progress to be shown, so many bytes are asked for at once.
GROUP_BYTES = 64 << 20


def _values_of(state):
    """Returns the tensors of a module or mapping by name, those of torch without their gradients."""
    items = state.state_dict() if hasattr(state, "state_dict") else state
    if not hasattr(items, "items"):
        raise TypeError(f"a state dict is a module or a mapping of names to tensors, not {type(items).__name__}")
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in items.items()}


def _memory_of(tensor):
    """What two names have in common that share all of their memory."""
    return tensor.__dlpack_device__(), tensor._address, tensor.dtype, tensor.shape


def _check_key(key):
    """Raises an error for one that cannot be published; nothing has been by then. Returns the key."""
    if not isinstance(key, str):
        raise TypeError(f"a prefix must be a str, not {key!r}")
    if not key:
        raise InvalidArgument("the prefix is empty")
    if len(key.encode()) > MAX_KEY_BYTES or "\0" in key:
        raise InvalidArgument(f"the key {key[:40]!r}... has a NUL or more than {MAX_KEY_BYTES} bytes")
    return key


def prepare(state, prefix, copies):
    """Returns [(key, tensor)] to publish, the index last."""
    _check_key(prefix)
    keys, index, items = {}, {}, []
    for name, value in _values_of(state).items():
        if not isinstance(name, str):
            raise TypeError(f"a name in a state dict must be a str, not {name!r}")
        if _shards.is_sharded(value):
            raise Unimplemented(f"{name} is a DTensor, of which this process has a part only")
        tensor = wrap(value)
        memory = _memory_of(tensor) if tensor.nbytes else name
        if memory not in keys:
            keys[memory] = _check_key(f"{prefix}/{name}")
            items.append((keys[memory], copy(tensor) if copies else tensor))
        index[name] = {"key": keys[memory], "dtype": tensor.dtype, "shape": tensor.shape}
    return [*items, (prefix, json.dumps(index).encode())]


# ---------------------------------------------------------------------------------------------------- destinations --

class _Destination(typing.NamedTuple):
    tensor: Tensor  # what this process has
    shape: tuple  # of the whole
    part: object  # which part of the whole that is, a Box; None: all


def _destinations_of(state):
    destinations = {}
    for name, value in _values_of(state).items():
        if _shards.is_sharded(value):
            local, part = _shards.local_part(name, value)
            destinations[name] = _Destination(wrap(local), tuple(value.shape), part)
        else:
            tensor = wrap(value)
            destinations[name] = _Destination(tensor, tensor.shape, None)
    return destinations


def _check(index, into, peer, prefix):
    """Raises an error that names what does not fit, before a byte is received."""
    missing, unexpected = sorted(index.keys() - into.keys()), sorted(into.keys() - index.keys())
    if missing or unexpected:
        raise InvalidArgument(f"the names differ: the peer has also {missing}, and lacks {unexpected}", peer, prefix)
    wrong = [f"{name} is {of['dtype']} {tuple(of['shape'])}, not {into[name].tensor.dtype} {into[name].shape}"
             for name, of in index.items()
             if (of["dtype"], tuple(of["shape"])) != (into[name].tensor.dtype, into[name].shape)]
    if wrong:
        raise FailedPrecondition("at the peer " + "; ".join(wrong), peer, prefix)
    shared = [f"{name} and {other}" for name, other in _overlaps(into)
              if (index[name]["key"], into[name].part) != (index[other]["key"], into[other].part)]
    if shared:
        raise FailedPrecondition("names that share memory are apart at the peer: " + "; ".join(shared), peer, prefix)


def _overlaps(destinations):
    """Yields pairs of names that share memory, for each name one with which it does."""
    spans = sorted((of.tensor.__dlpack_device__(), of.tensor._address, of.tensor.nbytes, name)
                   for name, of in destinations.items() if of.tensor.nbytes)
    last_device, last_end, last_name = None, 0, None  # of all that came before, what reaches farthest
    for device, address, size, name in spans:
        if device == last_device and address < last_end:
            yield last_name, name
        if device != last_device or address + size > last_end:
            last_device, last_end, last_name = device, address + size, name


# --------------------------------------------------------------------------------------------------------- pulling --

def _groups(sizes, group_bytes):
    """Divides what is to be received into groups of at least so many bytes."""
    group, total = [], 0
    for item, size in sizes.items():
        group.append(item)
        total += size
        if total >= group_bytes:
            yield group
            group, total = [], 0
    if group:
        yield group


class Calls:
    """Iterates over what a generator wants to be called. It is sent the result or error of each call, and what it has
    returned is there at the end."""

    def __init__(self, generator):
        self._generator = generator
        self.result = self.error = self.returned = None

    def __iter__(self):
        return self

    def __next__(self):
        error, self.error = self.error, None
        try:
            return self._generator.send(self.result) if error is None else self._generator.throw(error)
        except StopIteration as end:
            self.returned = end.value
            raise
        finally:
            del error  # When it is raised here, it refers to this frame.


def _is_superseded(peer, prefix, step, timeout):
    """Yields the call that says whether the peer has a later step than one of which something cannot be had."""
    try:
        return (yield "stat", (peer, prefix), {"timeout": timeout}).step > step
    except Error:
        return False


def _index_of(tensor, peer, prefix):
    try:
        index = json.loads(bytes(tensor))
        for of in index.values():
            key, _, _ = of["key"], of["dtype"], tuple(of["shape"])
            key.encode()
    except (BufferError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FailedPrecondition("what is published there is no state dict", peer, prefix) from error
    return index


def pull(peer, into, step, prefix, timeout, progress):
    """Yields (call, arguments, options) for what is to be received, and is sent the result. Returns (tensors, step)."""
    destinations = None if into is None else _destinations_of(into)
    while True:
        got = yield "recv", (peer, prefix, step), {"timeout": timeout}
        index = _index_of(got, peer, prefix)
        if destinations is not None:
            _check(index, destinations, peer, prefix)
        try:
            arrived = yield from _pull_step(peer, index, destinations, got.step, timeout, progress)
        except Error:
            if not (yield from _is_superseded(peer, prefix, got.step, timeout)):
                raise
            arrived = None
        if arrived is not None:
            return arrived, got.step
        step = got.step + 1  # a later step came in between


def _pull_step(peer, index, into, step, timeout, progress):
    """Returns the tensors by name, None if one is of a later step. What several names are, the same key and part, comes
    once and fills the first of them."""
    names_of = {}
    for name, of in index.items():
        names_of.setdefault((of["key"], into[name].part if into is not None else None), []).append(name)
    sizes = {item: into[names[0]].tensor.nbytes if into is not None else 0 for item, names in names_of.items()}
    arrived = {item: into[names[0]].tensor for item, names in names_of.items() if _is_nothing(item[1])}
    total, done = sum(sizes.values()), 0
    wanted = {item: size for item, size in sizes.items() if item not in arrived}
    for group in _groups(wanted, GROUP_BYTES if progress else float("inf")):
        options = {"into": None, "parts": None, "timeout": timeout}
        if into is not None:
            options["into"] = [into[names_of[item][0]].tensor for item in group]
            parts = [part for _, part in group]
            options["parts"] = parts if any(parts) else None
        results = yield "recv_many", (peer, [key for key, _ in group], step), options
        if any(result.step != step for result in results):
            return None
        arrived.update(zip(group, results))
        done += sum(result.nbytes for result in results)
        if progress:
            progress(done, max(total, done))
    for item, names in names_of.items() if into is not None else ():
        for name in names[1:]:
            _fill(into[name].tensor, arrived[item])
    by_name = {name: arrived[item] for item, names in names_of.items() for name in names}
    return {name: by_name[name] for name in index}


def _is_nothing(part):
    return part is not None and 0 in part.size


def _fill(destination, source):
    """The same memory needs nothing; a module whose weights are not tied gets a copy for each."""
    if _memory_of(destination) != _memory_of(source):
        copy(source, destination)
