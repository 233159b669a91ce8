# SPDX-License-Identifier: Apache-2.0
"""A plain process group for PyTorch's symmetric memory, which asks a group's C++ half for its store.

Groups of ours have none: the constructor that takes a store makes no group whose methods Python can override.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

LIMIT = timedelta(seconds=60)
"""How long ranks wait for each other in a rendezvous, where the store can be told."""


class SymmetricGroup:
    """The ranks of a group under a name of their own; `plain` is what `GpuCommunicator` takes."""

    def __init__(self, name: str, rank: int, size: int, store: Any, wrapped: Sequence[tuple[Any, Any, Any]]) -> None:
        """`name` must be the same on all ranks, and new; `wrapped` are (device, type, backend) of the group's own."""
        import torch.distributed._symmetric_memory as symmetric

        module: Any = symmetric
        own: Any = store
        with contextlib.suppress(Exception):
            own = store.clone()
            own.set_timeout(LIMIT)
        self.name = name
        kind: Any = dist.ProcessGroup
        self.plain: Any = kind(c10d.PrefixStore("symmetric", own), rank, size)
        for device, type_, backend in wrapped:
            self.plain._register_backend(device, type_, backend)
        self.plain._set_default_backend(wrapped[0][1])
        self.plain._set_group_name(name)
        registry: Any = c10d
        registry._register_process_group(name, self.plain)
        # Older versions of PyTorch want to be told of a group's store, and ask their own list of groups for it.
        known = getattr(module, "_group_name_to_store", None)
        if known is not None:
            known[name] = c10d.PrefixStore("symmetric", own)
            module._SymmetricMemory.set_group_info(name, rank, size, known[name])

    def close(self) -> None:
        """Forget the name."""
        registry: Any = c10d
        with contextlib.suppress(Exception):
            registry._unregister_process_group(self.name)
