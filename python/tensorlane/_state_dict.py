# SPDX-License-Identifier: Apache-2.0
"""State dicts: all tensors of a model, by name, with one step.

Each tensor is published under "PREFIX/NAME", and last of all an index under PREFIX: names, and for each the key, dtype
and shape. So a peer that has received an index finds all tensors of its step or of later ones. A tensor of a later step
says that the owner has published again meanwhile; then all is received again. Names that share memory (tied weights)
have one key.
"""
import json

from ._tensorlane import copy, wrap
from .errors import FailedPrecondition, InvalidArgument, Unimplemented

# With progress to be shown, so many bytes are asked for at once.
GROUP_BYTES = 64 << 20


def _tensors_of(state):
    """Returns the tensors of a module or mapping by name, those of torch without their gradients."""
    items = state.state_dict() if hasattr(state, "state_dict") else state
    tensors = {}
    for name, value in items.items():
        if hasattr(value, "placements"):
            raise Unimplemented(f"{name} is a DTensor, of which this process has a part only")
        tensors[name] = value.detach() if hasattr(value, "detach") else value
    return tensors


def _memory_of(tensor):
    """What two names have in common that share all of their memory."""
    return tensor.__dlpack_device__(), tensor._address, tensor.dtype, tensor.shape


def prepare(state, prefix, copies):
    """Returns [(key, tensor)] to publish, the index last."""
    keys, index, items = {}, {}, []
    for name, value in _tensors_of(state).items():
        tensor = wrap(value)
        memory = _memory_of(tensor) if tensor.nbytes else name
        if memory not in keys:
            keys[memory] = f"{prefix}/{name}"
            items.append((keys[memory], copy(tensor) if copies else tensor))
        index[name] = {"key": keys[memory], "dtype": tensor.dtype, "shape": tensor.shape}
    return [*items, (prefix, json.dumps(index).encode())]


def _check(index, into):
    """Raises an error that names what does not fit, before a byte is received."""
    missing, unexpected = sorted(index.keys() - into.keys()), sorted(into.keys() - index.keys())
    if missing or unexpected:
        raise InvalidArgument(f"the names differ: the peer has also {missing}, and lacks {unexpected}")
    wrong = [f"{name} is {of['dtype']} {tuple(of['shape'])}, not {into[name].dtype} {into[name].shape}"
             for name, of in index.items() if (of["dtype"], tuple(of["shape"])) != (into[name].dtype, into[name].shape)]
    if wrong:
        raise FailedPrecondition("at the peer " + "; ".join(wrong))
    shared = [f"{name} and {other}" for name, other in _overlaps(into) if index[name]["key"] != index[other]["key"]]
    if shared:
        raise FailedPrecondition("names that share memory are apart at the peer: " + "; ".join(shared))


def _overlaps(tensors):
    """Yields pairs of names that share memory, for each name one with which it does."""
    spans = sorted((tensor.__dlpack_device__(), tensor._address, tensor.nbytes, name)
                   for name, tensor in tensors.items() if tensor.nbytes)
    last_device, last_end, last_name = None, 0, None  # of all that came before, what reaches farthest
    for device, address, size, name in spans:
        if device == last_device and address < last_end:
            yield last_name, name
        if device != last_device or address + size > last_end:
            last_device, last_end, last_name = device, address + size, name


def _groups(sizes, group_bytes):
    """Divides keys into groups of at least so many bytes."""
    group, total = [], 0
    for key, size in sizes.items():
        group.append(key)
        total += size
        if total >= group_bytes:
            yield group
            group, total = [], 0
    if group:
        yield group


def pull(peer, into, step, prefix, timeout, progress):
    """Yields (call, arguments, options) for what is to be received, and is sent the result. Returns (tensors, step)."""
    tensors = None if into is None else {name: wrap(value) for name, value in _tensors_of(into).items()}
    while True:
        got = yield "recv", (peer, prefix, step), {"timeout": timeout}
        index = json.loads(bytes(got))
        if tensors is not None:
            _check(index, tensors)
        arrived = yield from _pull_step(peer, index, tensors, got.step, timeout, progress)
        if arrived is None:  # a later step came in between
            step = got.step + 1
            continue
        return {name: arrived[of["key"]] for name, of in index.items()}, got.step


def _pull_step(peer, index, into, step, timeout, progress):
    """Returns the tensors by key, None if one is of a later step. Names of one key are filled by the first of them."""
    of_key = {}
    for name, of in index.items():
        of_key.setdefault(of["key"], []).append(name)
    sizes = {key: into[names[0]].nbytes if into is not None else 0 for key, names in of_key.items()}
    total, done, arrived = sum(sizes.values()), 0, {}
    for group in _groups(sizes, GROUP_BYTES if progress else float("inf")):
        destinations = None if into is None else [into[of_key[key][0]] for key in group]
        results = yield "recv_many", (peer, group, step), {"into": destinations, "timeout": timeout}
        if any(result.step != step for result in results):
            return None
        arrived.update(zip(group, results))
        done += sum(result.nbytes for result in results)
        if progress:
            progress(done, max(total, done))
    for key, names in of_key.items() if into is not None else ():
        for name in names[1:]:
            _fill(into[name], arrived[key])
    return arrived


def _fill(destination, source):
    """The same memory needs nothing; a module whose weights are not tied gets a copy for each."""
    if _memory_of(destination) != _memory_of(source):
        copy(source, destination)
