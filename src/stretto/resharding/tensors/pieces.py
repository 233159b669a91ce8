# SPDX-License-Identifier: Apache-2.0
"""The pieces that a server's tensors are made of: the layout in which each must arrive, and how they are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import InvalidInput
from ...weights.mapping import SCALED, MappedTensor
from .describe import around, like, local_of, placed_tensor

Dict = Mapping[str, torch.Tensor]
SMALLEST = 1e-12
"""The least scale, for blocks that are all zero."""


def pieces_of(made: Sequence[MappedTensor], target: Dict) -> dict[str, torch.Tensor]:
    """Empty tensors for all pieces that this rank needs, by the trainers' names.

    Args:
        made: what the server's tensors are made of.
        target: the server's tensors.

    Returns:
        DTensors in the server's layouts, or plain tensors for whole ones.

    Raises:
        InvalidInput: shapes or layouts do not agree, or one name would be needed in two ways.
    """
    found: dict[str, torch.Tensor] = {}
    for one in made:
        for name, piece in _pieces(one, target[one.to]).items():
            before = found.setdefault(name, piece)
            said = [_described(name, t) for t in (before, piece)]
            if said[0] != said[1]:
                raise InvalidInput(f"{name!r}: is needed as {said[0]} and, for {one.to!r}, as {said[1]}")
    ghosts = {name: like_meta(piece) for name, piece in found.items()}
    for name, tensor in assembled(made, target, ghosts).items():
        want, have = tuple(local_of(target[name]).shape), tuple(local_of(tensor).shape)
        if want != have or tensor.dtype != target[name].dtype:
            raise InvalidInput(
                f"{name!r}: its pieces make {have} {tensor.dtype}, the server has {want} {target[name].dtype}"
            )
    return found


def assembled(made: Sequence[MappedTensor], target: Dict, pieces: Dict) -> dict[str, torch.Tensor]:
    """The server's tensors, made of pieces that have arrived.

    Args:
        made: what the server's tensors are made of.
        target: the server's tensors, for shapes, dtypes and layouts.
        pieces: the pieces by the trainers' names.

    Returns:
        New tensors by the server's names.
    """
    found: dict[str, torch.Tensor] = {}
    for one in made:
        rule, to = one.rule, target[one.to]
        locals_ = [local_of(pieces[name]) for name in one.sources if name in pieces]
        if rule.transpose:
            locals_ = [piece.transpose(-2, -1) for piece in locals_]
        joined = (
            torch.stack(locals_) if rule.stack else torch.cat(locals_, rule.concat or 0) if locals_[1:] else locals_[0]
        )
        if rule.rows is not None:
            joined = _padded(joined, to)
        if rule.scale:
            joined, scales = _quantized(joined, to.dtype, rule.block)
            found[one.scale] = like(target[one.scale], scales)
        found[one.to] = like(to, joined.contiguous() if joined is not locals_[0] else joined.clone())
    return found


def like_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind and layout without memory."""
    return like(tensor, torch.empty_like(local_of(tensor), device="meta"))


def _pieces(one: MappedTensor, to: torch.Tensor) -> dict[str, torch.Tensor]:
    rule, shape = one.rule, list(to.shape)
    if rule.scale and str(to.dtype).removeprefix("torch.") not in SCALED:
        raise InvalidInput(f"{one.to!r}: is {to.dtype}; scales are for {', '.join(SCALED)}")
    dtype = torch.bfloat16 if rule.scale else to.dtype
    cuts = _cuts(one.to, to)
    if rule.scale:
        _check_blocks(one, to, cuts)
    if rule.stack:
        return _stacked(one, to, cuts, dtype)
    shapes = [shape] * len(one.sources)
    if rule.concat is not None:
        shapes = _split(one, shape, cuts)
    if rule.rows is not None:
        if not rule.rows <= shape[0]:
            raise InvalidInput(f"{one.to!r}: rows: {rule.rows} do not fit into {shape[0]}")
        shapes = [[rule.rows, *shape[1:]]]
        # Rows are cut elsewhere than those of the padded tensor, so every rank takes all of them.
        cuts = {axis: dim for axis, dim in cuts.items() if dim != 0}
    last = len(shape) - 1
    turned = {last: last - 1, last - 1: last} if rule.transpose else {}
    if rule.transpose:
        shapes = [[*s[:-2], s[-1], s[-2]] for s in shapes]
    placed = {axis: turned.get(dim, dim) for axis, dim in cuts.items()}
    return {name: _empty(to, s, placed, dtype) for name, s in zip(one.sources, shapes, strict=True)}


def _cuts(name: str, to: torch.Tensor) -> dict[int, int]:
    """The dimension that each mesh axis cuts."""
    if not isinstance(to, DTensor):
        return {}
    found = {}
    for axis, placement in enumerate(to.placements):
        if type(placement) is Shard:
            found[axis] = placement.dim % to.ndim
        elif not isinstance(placement, Replicate):
            raise InvalidInput(f"{name!r}: is placed as {placement}; only Shard and Replicate can be received")
    return found


def _split(one: MappedTensor, shape: Sequence[int], cuts: Mapping[int, int]) -> list[list[int]]:
    """The shapes of the pieces of a fused tensor."""
    dim, sizes = one.rule.concat or 0, one.rule.sizes
    if not 0 <= dim < len(shape) or shape[dim] % sum(sizes):
        raise InvalidInput(f"{one.to!r}: {list(shape)} is no multiple of the sizes {list(sizes)} in dimension {dim}")
    unit = shape[dim] // sum(sizes)
    return [[*shape[:dim], size * unit, *shape[dim + 1 :]] for size in sizes]


def _stacked(
    one: MappedTensor, to: torch.Tensor, cuts: Mapping[int, int], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a stack that this rank has, each whole, or cut as the stack is in its other dimensions."""
    shape = list(to.shape[1:])
    if one.rule.transpose:
        shape = [*shape[:-2], shape[-1], shape[-2]]
    if 0 not in cuts.values():
        last = len(shape) - 1
        turned = {last: last - 1, last - 1: last} if one.rule.transpose else {}
        placed = {axis: turned.get(dim - 1, dim - 1) for axis, dim in cuts.items()}
        return {name: _empty(to, shape, placed, dtype) for name in one.sources}
    if set(cuts.values()) != {0}:
        raise InvalidInput(f"{one.to!r}: a stack that is cut by tensor and inside of tensors cannot be received")
    assert isinstance(to, DTensor)
    begin, end = placed_tensor(one.to, to, torch.distributed.get_rank()).tile(torch.distributed.get_rank())[0]
    return {name: torch.empty(shape, dtype=dtype, device=local_of(to).device) for name in one.sources[begin:end]}


def _empty(to: torch.Tensor, shape: Sequence[int], cuts: Mapping[int, int], dtype: torch.dtype) -> torch.Tensor:
    device = local_of(to).device
    if not isinstance(to, DTensor):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    placements: list[Any] = [Shard(cuts[axis]) if axis in cuts else Replicate() for axis in range(to.device_mesh.ndim)]
    size = list(shape)
    for axis, dim in cuts.items():
        ways = to.device_mesh.size(axis)
        if size[dim] % ways:
            raise InvalidInput(f"a piece of {list(shape)}: dimension {dim} does not divide into {ways} shards")
        size[dim] //= ways
    return around(torch.empty(size, dtype=dtype, device=device), to.device_mesh, placements, tuple(shape))


def _padded(rows: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor that has more of them, the others zero."""
    rank = torch.distributed.get_rank()
    begin, end = placed_tensor("target", to, rank).tile(rank)[0]
    there = rows[min(begin, len(rows)) : min(end, len(rows))]
    return torch.cat([there, there.new_zeros((end - begin - len(there), *there.shape[1:]))])


def _quantized(value: torch.Tensor, dtype: torch.dtype, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in an 8-bit type, and the scale of each block: the largest value of a block becomes the type's own."""
    rows, columns = value.shape[-2:]
    more = (0, -columns % block, 0, -rows % block)
    wide = torch.nn.functional.pad(value.float(), more)
    grid = wide.reshape(*wide.shape[:-2], wide.shape[-2] // block, block, wide.shape[-1] // block, block)
    scales = (grid.abs().amax((-3, -1)) / torch.finfo(dtype).max).clamp(min=SMALLEST)
    small = (grid / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return small[..., :rows, :columns].to(dtype), scales


def _check_blocks(one: MappedTensor, to: torch.Tensor, cuts: Mapping[int, int]) -> None:
    """Refuse shards that cut through a block: each rank computes the scales of its own blocks."""
    size = list(to.shape)
    for axis, dim in cuts.items():
        size[dim] //= to.device_mesh.size(axis) if isinstance(to, DTensor) else 1
        if dim >= to.ndim - 2 and size[dim] % one.rule.block:
            raise InvalidInput(
                f"{one.to!r}: shards of {size[dim]} in dimension {dim} cut through blocks of {one.rule.block}"
            )


def _described(name: str, tensor: torch.Tensor) -> str:
    placements = ",".join(map(str, tensor.placements)) if isinstance(tensor, DTensor) else "plain"
    return f"{tuple(tensor.shape)} {tensor.dtype} {placements}"
