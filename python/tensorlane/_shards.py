# SPDX-License-Identifier: Apache-2.0
"""DTensors: which part of the whole tensor this process has, from its mesh and placements. torch is not imported."""
from .errors import Unimplemented


def is_sharded(value):
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def local_part(name, value):
    """Returns the local tensor of a DTensor, and the Box of the whole that it is; None: it is the whole."""
    from . import Box

    start, size = [0] * len(value.shape), list(value.shape)
    place = value.device_mesh.get_coordinate()  # None: this process has nothing of it
    for mesh_dim, placement in enumerate(value.placements):
        kind = type(placement).__name__
        if kind == "Shard" and place is not None:
            dim = placement.dim % len(size)
            offset, size[dim] = _chunk(size[dim], value.device_mesh.size(mesh_dim), place[mesh_dim])
            start[dim] += offset
        elif kind not in ("Shard", "Replicate"):
            raise Unimplemented(f"{name} is a DTensor with the placement {placement}, not Shard or Replicate")
    local = value.to_local()
    if place is None:
        return local, Box((0,) * len(size), (0,) * len(size))
    if tuple(local.shape) != tuple(size):
        raise Unimplemented(f"{name} is a DTensor of which there should be {size} here, not {list(local.shape)}")
    return local, None if size == list(value.shape) else Box(tuple(start), tuple(size))


def _chunk(size, count, place):
    """Returns (offset, size) of a piece of what torch.chunk makes: all are as large, but for the last ones."""
    largest = -(-size // count)
    offset = min(place * largest, size)
    return offset, min(largest, size - offset)
