# SPDX-License-Identifier: Apache-2.0
"""`VariableRegion`: the part of a variable that one rank (or every rank) updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...errors import InvalidInput
from ..representation import VariablePart

EVERYONE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class VariableRegion:
    """A block of a variable, or the elements `flat[0]` to `flat[1]` of that block; the rank `owner` runs the optimizer
    on
    it.

    Regions are compared by identity, because they are looked up in every step.
    """

    variable: str
    part: VariablePart
    owner: int = EVERYONE
    flat: tuple[int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This region of a tensor with the variable's shape: a view if the memory layout allows one, else a copy."""
        block = block_of(tensor, self.part)
        return block if self.flat is None else block.reshape(-1)[self.flat[0] : self.flat[1]]

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values into this region of a tensor with the variable's shape."""
        found = self.of(tensor)
        if shares_memory(found, tensor) or self.flat is None:
            found.copy_(values)
            return
        block = block_of(tensor, self.part)
        flat = block.reshape(-1)
        flat[self.flat[0] : self.flat[1]] = values
        block.copy_(flat.view(block.shape))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def replicated(regions: list[VariableRegion]) -> bool:
    """Whether every rank updates the whole variable."""
    return all(region.owner == EVERYONE for region in regions)


def check_memory(parameters: Mapping[str, torch.Tensor], regions: Mapping[str, list[VariableRegion]]) -> None:
    """Refuse variables that share memory if not every rank updates both.

    Args:
        parameters: the parameters by name.
        regions: for each of them the regions that are updated by themselves.

    Raises:
        InvalidInput: two parameters share memory, so that one rank's update would overwrite another's.
    """
    sharing: list[str] = []
    last, reached = "", 0
    for device, begin, end, name in sorted((str(p.device), *_span(p), name) for name, p in parameters.items()):
        if device != last or begin >= reached:
            sharing, last, reached = [], device, 0
        sharing.append(name)
        reached = max(reached, end)
        if len(sharing) > 1 and not replicated([region for one in sharing for region in regions.get(one, [])]):
            raise InvalidInput(
                f"{name}.kind: its memory overlaps with that of {sharing[0]}: all-reduce both, so that every rank "
                "updates both"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first element, and the address behind its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def block_of(tensor: torch.Tensor, part: VariablePart) -> torch.Tensor:
    """The block of a tensor that a part denotes."""
    if tuple(tensor.shape) == part.shape:
        return tensor
    return tensor[tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))]


def rows_of(gradient: torch.Tensor, part: VariablePart) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a sparse gradient that lie in a part: their numbers within the part, and their values."""
    gradient = gradient.coalesce()
    if gradient.sparse_dim() != 1:
        raise InvalidInput(f"sparse gradients must be sparse in rows, not in {gradient.sparse_dim()} axes")
    numbers, values = gradient.indices()[0], gradient.values()
    inside = (numbers >= part.start[0]) & (numbers < part.start[0] + part.shape[0])
    columns = tuple(slice(s, s + n) for s, n in zip(part.start[1:], part.shape[1:], strict=True))
    return numbers[inside] - part.start[0], values[inside][(slice(None), *columns)]


def sparse_of(numbers: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A sparse gradient from rows; rows with equal numbers are summed.

    Args:
        numbers: the number of each row.
        values: the rows.
        shape: shape of the whole gradient.

    Returns:
        A coalesced sparse tensor.
    """
    return torch.sparse_coo_tensor(numbers[None], values, shape, check_invariants=False).coalesce()
