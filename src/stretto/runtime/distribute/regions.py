"""`Region`: the part of a variable that one rank (or every rank) updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInput
from ...strategy.representation import Part

EVERYONE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """A block of a variable, or the elements `flat[0]` to `flat[1]` of that block; `owner` runs the optimizer on it.

    Each is one object, known by identity: they are looked up in every step.
    """

    variable: str
    part: Part
    owner: int = EVERYONE
    flat: tuple[int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This region of a tensor with the variable's shape: a view, where the memory allows one."""
        block = block_of(tensor, self.part)
        return block if self.flat is None else block.reshape(-1)[self.flat[0] : self.flat[1]]

    def held(self, parameter: torch.Tensor) -> torch.Tensor:
        """The same as memory of the parameter itself, for an optimizer to update."""
        data = parameter.detach()
        found = self.of(data)
        if found.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
            raise InvalidInput(f"{self.variable}.kind: sharded needs contiguous parts: cut the first axis only")
        return found


def replicated(regions: list[Region]) -> bool:
    """Whether every rank updates the whole variable."""
    return all(region.owner == EVERYONE for region in regions)


def block_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The block of a tensor that a part is."""
    if tuple(tensor.shape) == part.shape:
        return tensor
    return tensor[tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))]


def rows_of(gradient: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a sparse gradient that fall into a part: their numbers inside it, and their values."""
    gradient = gradient.coalesce()
    if gradient.sparse_dim() != 1:
        raise InvalidInput(f"sparse gradients must be sparse in rows, not in {gradient.sparse_dim()} axes")
    numbers, values = gradient.indices()[0], gradient.values()
    inside = (numbers >= part.start[0]) & (numbers < part.start[0] + part.shape[0])
    columns = tuple(slice(s, s + n) for s, n in zip(part.start[1:], part.shape[1:], strict=True))
    return numbers[inside] - part.start[0], values[inside][(slice(None), *columns)]


def sparse_of(numbers: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A sparse gradient from rows, those of equal numbers added up."""
    return torch.sparse_coo_tensor(numbers[None], values, shape, check_invariants=False).coalesce()
