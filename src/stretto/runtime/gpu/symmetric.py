# SPDX-License-Identifier: Apache-2.0
"""PyTorch's symmetric memory: allocations that all ranks of a group can read and write."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput


class SymmetricMemory:
    """The symmetric allocations of one group, with the addresses at which this rank sees those of others."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._module: Any = symmetric
        self._group, self._device = group, device
        self._ranges: list[tuple[int, int, list[int], Any]] = []
        # A group that is not in PyTorch's list of groups has told of its store itself.
        with warnings.catch_warnings(), contextlib.suppress(KeyError):
            warnings.simplefilter("ignore")
            if hasattr(symmetric, "enable_symm_mem_for_group"):
                symmetric.enable_symm_mem_for_group(group.group_name)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate on all ranks; collective."""
        tensor: torch.Tensor = self._module.empty(count, dtype=dtype, device=self._device)
        self.register(tensor)
        return tensor

    def register(self, tensor: torch.Tensor) -> None:
        """Exchange the addresses of an allocation; collective."""
        handle = self._module.rendezvous(tensor, self._group.group_name)
        pointers = [int(pointer) for pointer in handle.buffer_ptrs]
        begin = pointers[self._group.rank()]
        end = max(begin + int(handle.buffer_size), tensor.data_ptr() + tensor.nbytes)
        self._ranges.append((begin, end, pointers, (handle, tensor)))

    def find(self, tensor: torch.Tensor) -> tuple[int, list[int]] | None:
        """The offset of a tensor in the allocation that holds it, and where that begins on each rank."""
        # PyTorch gives no address for a tensor without elements, so it is computed from the storage.
        at = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
        for begin, end, pointers, _ in self._ranges:
            if begin <= at and at + tensor.nbytes <= end:
                return at - begin, pointers
        return None

    def pointers(self, tensor: torch.Tensor) -> list[int]:
        """Where a tensor of this rank, and those at the same place on other ranks, are for this rank."""
        found = self.find(tensor)
        if found is None:
            raise InvalidInput("tensor: must lie in symmetric memory that the communicator made or registered")
        offset, pointers = found
        return [pointer + offset for pointer in pointers]

    def gather(self, text: str) -> list[str]:
        """One text of every rank; collective."""
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, text, group=self._group)
        return [str(each) for each in found]

    def barrier(self) -> None:
        """Wait for all ranks; collective."""
        self.gather("")

    def close(self) -> None:
        """Give the allocations back."""
        self._ranges.clear()
