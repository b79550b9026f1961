# SPDX-License-Identifier: Apache-2.0
"""A storage for SGLang's hierarchical cache, at the owner of tensorlane.kv. Alpha, as SGLang's interface is.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "tensorlane",
        "module_path": "tensorlane.sglang", "class_name": "HiCache", "address": "10.0.0.1:4700"}'

docs/kv.md is the page.
"""
import typing
from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from . import kv

__all__ = ["HiCache"]


def _bytes_of(tensor):
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


class HiCache(HiCacheStorage):
    """SGLang stores pages, and asks for the longest run of them that is there. What cannot be had is not there.

    storage_config: of SGLang; its extra_config has the address of the owner, and may have timeout and host (kv.Client).
    Raises KeyError: there is no address, and what kv.Client raises. The calls raise what those of kv.Client raise.
    Pages are contiguous tensors in host memory; arguments that SGLang passes and that are not named here are not used.
    """

    def __init__(self, storage_config: typing.Any, _: object = None) -> None:
        extra = storage_config.extra_config or {}
        self._client = kv.Client(extra["address"], extra.get("timeout", 5), extra.get("host"))
        config = storage_config
        # Ranks store different parts of a page under one key, unless each has all of it.
        parts = [config.model_name or "", f"{config.pp_rank}/{config.pp_size}",
                 f"{config.attn_cp_rank}/{config.attn_cp_size}", f"{config.dcp_rank}/{config.dcp_size}"]
        if not config.is_mla_model:
            parts.append(f"{config.tp_rank}/{config.tp_size}")
        self._prefix = "sglang/" + "/".join(parts) + "/"

    def _keys(self, keys):
        return [self._prefix + key for key in keys]

    def get(self, key: str, target_location: typing.Optional[torch.Tensor] = None,
            target_sizes: object = None) -> typing.Optional[torch.Tensor]:
        """Receives a page into target_location, and returns that; None: it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Sequence[str], target_locations: typing.Optional[Sequence[torch.Tensor]] = None,
                  target_sizes: object = None) -> list[typing.Optional[torch.Tensor]]:
        """As get, for many pages."""
        found = self._client.get(self._keys(keys), [_bytes_of(target) for target in target_locations])
        return [target if is_there else None for target, is_there in zip(target_locations, found)]

    def set(self, key: str, value: typing.Optional[torch.Tensor] = None, target_location: object = None,
            target_sizes: object = None) -> bool:
        """Stores a page, the value. Returns whether the owner has it."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: Sequence[str], values: typing.Optional[Sequence[torch.Tensor]] = None,
                  target_locations: object = None, target_sizes: object = None) -> bool:
        """Stores pages. Returns whether the owner has all of them."""
        # They live until the call is over.
        pages = [value.contiguous() for value in values]
        return all(self._client.set(self._keys(keys), [_bytes_of(page) for page in pages]))

    def exists(self, key: str) -> bool:
        """Returns whether a page is there."""
        return self._client.exists(self._keys([key]))[0]

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Returns how many of the first pages are there, up to the first one that is not."""
        found = self._client.exists(self._keys(keys))
        return found.index(False) if False in found else len(found)

    def close(self) -> None:
        """As kv.Client.close."""
        self._client.close()
