# SPDX-License-Identifier: Apache-2.0
"""The pieces that a server's tensors are made of: the layout in which each must arrive, and how they are joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec
import numpy as np
import torch

from ...errors import InvalidInput
from ...weights.mapping import SCALED, MappedTensor
from .describe import AnyTensor, PlacedTensor, TensorPart, cuts_of, dtype_of, like, local_of, placed_tensor

Dict = Mapping[str, AnyTensor]
SMALLEST = 1e-12
"""The least scale, for blocks that are all zero."""


def pieces_of(made: Sequence[MappedTensor], target: Dict, rank: int) -> dict[str, TensorPart]:
    """Empty tensors for all pieces that this rank needs, by the trainers' names.

    Args:
        made: what the server's tensors are made of.
        target: the server's tensors.
        rank: this rank.

    Returns:
        Parts in the server's layouts; what is needed in two layouts is whole.

    Raises:
        InvalidInput: shapes or layouts do not agree.
    """
    ways: dict[str, PlacedTensor] = {}
    needed: set[str] = set()
    for one in made:
        needed.update(_needed(one, target[one.to], rank))
        # All pieces, also those that only other ranks need: these must come to the same layouts.
        for name, piece in _pieces(one, target[one.to], rank).items():
            before = ways.setdefault(name, piece)
            if before == piece:
                continue
            if (before.shape, before.dtype) != (piece.shape, piece.dtype):
                raise InvalidInput(f"{name!r}: is needed as {before} and, for {one.to!r}, as {piece}")
            ways[name] = _whole(piece, rank)
        if one.scale:
            _check_scales(one, target, rank)
    where = {name: way for name, way in ways.items() if name in needed}
    found = {
        name: TensorPart(local=torch.empty(_size(at, rank), dtype=dtype_of(at.dtype), device=at.device), where=at)
        for name, at in where.items()
    }
    ghosts = {name: torch.empty_like(piece.local, device="meta") for name, piece in found.items()}
    for name, tensor in assembled(made, target, ghosts, where, rank):
        want, have = tuple(local_of(target[name]).shape), tuple(local_of(tensor).shape)
        if want != have or tensor.dtype != target[name].dtype:
            raise InvalidInput(
                f"{name!r}: its pieces make {have} {tensor.dtype}, the server has {want} {target[name].dtype}"
            )
    return found


def assembled(
    made: Sequence[MappedTensor], target: Dict, pieces: Mapping[str, torch.Tensor], where: Mapping[str, PlacedTensor],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The server's tensors, made of pieces that have arrived.

    Args:
        made: what the server's tensors are made of.
        target: the server's tensors, for shapes, dtypes and layouts.
        pieces: the local parts of the pieces, by the trainers' names.
        where: the layouts in which the pieces have arrived.
        rank: this rank.

    Yields:
        New tensors with the server's names.
    """
    for one in made:
        rule, to = one.rule, target[one.to]
        wanted = _pieces(one, to, rank)
        locals_ = [_taken(pieces[name], where[name], wanted[name], rank) for name in _needed(one, to, rank)]
        if rule.transpose:
            locals_ = [piece.transpose(-2, -1) for piece in locals_]
        count = len(rule.sources)
        groups = [locals_[at : at + count] for at in range(0, len(locals_), count)]
        wholes = [torch.cat(group, rule.concat or 0) if group[1:] else group[0] for group in groups]
        joined = (torch.stack(wholes) if wholes else _no_tensors(one, to, rank)) if rule.stack else wholes[0]
        if rule.rows is not None:
            joined = _padded(joined, to, rank)
        if rule.scale:
            joined, scales = _quantized(joined, to.dtype, rule.block)
            yield one.scale, like(target[one.scale], scales)
        yield one.to, like(to, joined.clone(memory_format=torch.contiguous_format))


def _taken(piece: torch.Tensor, have: PlacedTensor, want: PlacedTensor, rank: int) -> torch.Tensor:
    """The part of a piece that one use needs; it is another than what has arrived where uses differ."""
    if have == want:
        return piece
    return piece[tuple(slice(*ends) for ends in want.tile(rank))] if piece.ndim else piece


def _whole(where: PlacedTensor, rank: int) -> PlacedTensor:
    return msgspec.structs.replace(where, mesh_shape=(1,), ranks=(rank,), placements=("R",))


def _size(where: PlacedTensor, rank: int) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in where.tile(rank)) if where.shape else ()


def _needed(one: MappedTensor, to: AnyTensor, rank: int) -> tuple[str, ...]:
    """The pieces that this rank needs: of a stack that is cut by tensor, its own."""
    if not one.rule.stack:
        return one.sources
    begin, end = placed_tensor(one.to, to, rank).tile(rank)[0]
    count = len(one.rule.sources)
    return one.sources[begin * count : end * count]


def _pieces(one: MappedTensor, to: AnyTensor, rank: int) -> dict[str, PlacedTensor]:
    """The layouts of the pieces, by the trainers' names."""
    rule, at = one.rule, placed_tensor(one.to, to, rank)
    shape = list(at.shape)
    if rule.scale and at.dtype not in SCALED:
        raise InvalidInput(f"{one.to!r}: is {at.dtype}; scales are for {', '.join(SCALED)}")
    at = msgspec.structs.replace(at, dtype="bfloat16" if rule.scale else at.dtype)
    cuts = cuts_of(at.placements, len(at.shape))
    if rule.scale:
        _check_blocks(one, at)
    if rule.stack:
        return _stacked(one, at, cuts, rank)
    shapes, fused = [shape] * len(one.sources), None
    if rule.concat is not None:
        shapes, fused = _split(one, shape), rule.concat
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
    even = None if fused is None else turned.get(fused, fused)
    return {name: _piece(one, at, s, placed, even) for name, s in zip(one.sources, shapes, strict=True)}


def _split(one: MappedTensor, shape: Sequence[int]) -> list[list[int]]:
    """The shapes of the pieces of a fused tensor."""
    dim, sizes = one.rule.concat or 0, one.rule.sizes
    if not 0 <= dim < len(shape) or shape[dim] % sum(sizes):
        raise InvalidInput(f"{one.to!r}: {list(shape)} is no multiple of the sizes {list(sizes)} in dimension {dim}")
    unit = shape[dim] // sum(sizes)
    return [[*shape[:dim], size * unit, *shape[dim + 1 :]] for size in sizes]


def _stacked(one: MappedTensor, at: PlacedTensor, cuts: Mapping[int, int], rank: int) -> dict[str, PlacedTensor]:
    """The tensors of a stack, and their pieces: where the stack is cut by tensor, each is on the ranks that have it."""
    rule, shape = one.rule, list(at.shape[1:])
    fused = rule.concat
    shapes = _split(one, shape) if fused is not None else [shape]
    last = len(shape) - 1
    turned = {last: last - 1, last - 1: last} if rule.transpose else {}
    if rule.transpose:
        shapes = [[*s[:-2], s[-1], s[-2]] for s in shapes]
    inside = {axis: turned.get(dim - 1, dim - 1) for axis, dim in cuts.items() if dim > 0}
    places = [at] * at.shape[0]
    if 0 in cuts.values() and not inside:
        places = [_whole(at, rank)] * at.shape[0]
    elif 0 in cuts.values():
        places, inside = _owners(at, cuts, inside)
    sizes = [size for _ in places for size in shapes]
    where = [place for place in places for _ in shapes]
    even = None if fused is None else turned.get(fused, fused)
    return {name: _piece(one, w, size, inside, even) for name, w, size in zip(one.sources, where, sizes, strict=True)}


def _owners(
    at: PlacedTensor, cuts: Mapping[int, int], inside: Mapping[int, int]
) -> tuple[list[PlacedTensor], dict[int, int]]:
    """For each tensor of a stack the part of the mesh that has it, and what its axes cut of one tensor."""
    grid = torch.tensor(at.ranks).view(at.mesh_shape)
    rest = [axis for axis in range(grid.ndim) if cuts.get(axis) != 0]
    owner = {e: rank for rank in reversed(at.ranks) for e in range(*at.tile(rank)[0])}
    found: dict[int, PlacedTensor] = {}
    for rank in set(owner.values()):
        place = (grid == rank).nonzero()[0].tolist()
        mine = grid[tuple(slice(None) if axis in rest else place[axis] for axis in range(grid.ndim))]
        found[rank] = msgspec.structs.replace(
            at, ranks=tuple(mine.flatten().tolist()), mesh_shape=tuple(mine.shape), placements=("R",) * mine.ndim
        )
    return [found[owner[e]] for e in range(at.shape[0])], {rest.index(axis): dim for axis, dim in inside.items()}


def _piece(
    one: MappedTensor, at: PlacedTensor, shape: Sequence[int], cuts: Mapping[int, int], even: int | None
) -> PlacedTensor:
    """The layout of a piece on the mesh of the tensor that it is a piece of; dimension `even` must divide."""
    placements = tuple(f"S({cuts[axis]})" if axis in cuts else "R" for axis in range(len(at.mesh_shape)))
    ways = prod(at.mesh_shape[axis] for axis, dim in cuts.items() if dim == even)
    if even is not None and shape[even] % ways:
        raise InvalidInput(f"{one.to!r}: a piece of {list(shape)}: dimension {even} does not divide into {ways} shards")
    return msgspec.structs.replace(at, shape=tuple(shape), placements=placements)


def _no_tensors(one: MappedTensor, to: AnyTensor, rank: int) -> torch.Tensor:
    """The part of a rank that has none of a stack's tensors."""
    size = _size(placed_tensor(one.to, to, rank), rank)
    return local_of(to).new_empty(size, dtype=torch.bfloat16 if one.rule.scale else to.dtype)


def _padded(rows: torch.Tensor, to: AnyTensor, rank: int) -> torch.Tensor:
    """This rank's rows of a tensor that has more of them, the others zero."""
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


def _check_blocks(one: MappedTensor, at: PlacedTensor) -> None:
    """Refuse shards that cut through a block: each rank computes the scales of its own blocks."""
    block = one.rule.block
    tiles = at.layout().tiles(at.shape)[:, -2:]
    sizes = tiles[..., 1] - tiles[..., 0]
    ends = np.asarray(at.shape[-2:])
    wrong = (sizes > 0) & ((tiles[..., 0] % block > 0) | ((tiles[..., 1] % block > 0) & (tiles[..., 1] < ends)))
    for where, dim in np.argwhere(wrong)[:1].tolist():
        raise InvalidInput(
            f"{one.to!r}: shards of {sizes[where, dim]} in dimension {dim + len(at.shape) - 2} "
            f"cut through blocks of {block}"
        )


def _check_scales(one: MappedTensor, target: Dict, rank: int) -> None:
    """Refuse scales that lie on a rank otherwise than the blocks of its weights."""
    at = placed_tensor(one.to, target[one.to], rank)
    scales = placed_tensor(one.scale, target[one.scale], rank)
    block = one.rule.block
    tile = at.tile(rank)
    *outer, rows, columns = tile
    want = (*outer, *((begin // block, -(-end // block)) for begin, end in (rows, columns)))
    have = scales.tile(rank) if rank in scales.ranks else ()
    if have != want and all(begin < end for begin, end in tile):
        raise InvalidInput(f"{one.scale!r}: rank {rank} has {have} of it, and weights for {want}")
