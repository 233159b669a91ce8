# SPDX-License-Identifier: Apache-2.0
"""Views of a `SymmetricProgram` as plain programs: all its transfers, or those that touch one rank's chunks."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, Reduce, ReduceScatter, Scatter
from .ir import Program, row_index

if TYPE_CHECKING:
    from .symmetry import SymmetricProgram

Ints = NDArray[np.int64]


def translate(rank: ArrayLike, by: ArrayLike, sizes: tuple[int, ...], *, sign: int = 1, local: int = 1) -> Ints:
    """``rank + sign * by`` on the torus, coordinate by coordinate; `rank` and `by` broadcast.

    Args:
        rank: Ranks, >= 0.
        by: Translations, as points of the torus.
        sizes: The sides of the torus, the fastest varying first.
        sign: 1, or -1 to translate back.
        local: The number of ranks at each point of the torus; ranks are numbered point by point.

    Returns:
        The translated ranks.

    >>> int(translate(5, 3, (4, 2))), int(translate(0, 1, (4, 2), sign=-1))
    (4, 3)
    """
    a, b = np.asarray(rank, np.int64), np.asarray(by, np.int64)
    if local > 1:
        return a % local + local * translate(a // local, b, sizes, sign=sign)
    if len(sizes) == 1:
        moved: Ints = np.asarray((a + sign * b) % sizes[0])
        return moved
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.int64)
    stride = 1
    for size in sizes:
        result = result + (a // stride % size + sign * (b // stride % size)) % size * stride
        stride *= size
    return result


def chunk_numbers(p: SymmetricProgram, home: ArrayLike, piece: ArrayLike) -> Ints:
    """The numbers of chunks in the whole program's collective.

    Args:
        p: The program.
        home: The ranks at which chunks begin.
        piece: Which of their home's chunks they are; broadcasts with `home`.

    Returns:
        The numbers.
    """
    homes, pieces = np.asarray(home, np.int64), np.asarray(piece, np.int64)
    if p.kind == "all_to_all":
        pieces = _seen_from(p.sizes, p.local, p.pieces, homes, pieces, sign=1)
    return homes * p.pieces + pieces


def chunk_places(kind: str, sizes: tuple[int, ...], local: int, pieces: int, number: Ints) -> tuple[Ints, Ints]:
    """The home and the piece of chunks, as `chunk_numbers` has numbered them.

    Args:
        kind: The collective.
        sizes: The torus of groups.
        local: Ranks of a group.
        pieces: Pieces that a rank begins with.
        number: The numbers of the chunks.

    Returns:
        Homes and pieces.
    """
    home, piece = np.divmod(number, max(pieces, 1))
    if kind == "all_to_all":
        piece = _seen_from(sizes, local, pieces, home, piece, sign=-1)
    return home, piece


def _seen_from(sizes: tuple[int, ...], local: int, pieces: int, home: Ints, piece: Ints, *, sign: int) -> Ints:
    """The pieces of an all-to-all with their takers counted from point 0 (sign 1), or from the home's group (-1)."""
    cut = max(pieces // (local * prod(sizes)), 1)
    taker, part = np.divmod(piece, cut)
    return translate(taker, home // local, sizes, sign=sign, local=local) * cut + part


def expanded(p: SymmetricProgram) -> Program:
    """The plain program with the transfers of all ranks, those of one orbit next to each other."""
    copies, local, orbits = p.copies, p.local, len(p.dst)
    group = np.arange(copies)
    # In each dependency, the transfer of group g waits for the transfer of group g + shift.
    to = p.dst.astype(np.int64) // local
    after_shift = translate(0, to[p.after], p.sizes, sign=-1)
    gate_shift = np.repeat(to, np.diff(p.gate_ptr))
    written = translate(gate_shift, to[p.gate], p.sizes, sign=-1)
    gate_shift = np.where(p.gate_reads, gate_shift, written)
    after_ptr, after = _spread(p, p.after_ptr, p.after, after_shift)
    gate_ptr, gate = _spread(p, p.gate_ptr, p.gate, gate_shift)
    sizes = np.repeat(np.diff(p.chunk_ptr), copies)
    chunk_ptr = np.concatenate([[0], np.cumsum(sizes)])
    # Entry i of orbit t, for all groups: the rows of one orbit lie one after the other.
    owner = np.repeat(np.arange(orbits), np.diff(p.chunk_ptr))
    at = np.arange(len(p.home)) - p.chunk_ptr[owner]
    chunk = np.empty(chunk_ptr[-1], np.int32)
    chunk[chunk_ptr[owner[:, None] * copies + group] + at[:, None]] = chunk_numbers(
        p, translate(p.home[:, None], group, p.sizes, local=local), p.piece[:, None]
    )
    return Program(
        name=p.name,
        collective=_in_chunks(p),
        src=(p.src[:, None] + local * group).ravel().astype(np.int32),
        dst=translate(p.dst[:, None], group, p.sizes, local=local).ravel().astype(np.int32),
        reduce=np.repeat(p.reduce, copies),
        chunk_ptr=chunk_ptr,
        chunk=chunk,
        after_ptr=after_ptr,
        after=after,
        gate_ptr=gate_ptr,
        gate=gate,
        lane=np.repeat(p.lane, copies),
        route=np.full(orbits * copies, -1, np.int32),
    )


def _in_chunks(p: SymmetricProgram) -> Collective:
    if p.kind == "all_reduce":
        return AllReduce(p.num_ranks, chunks=p.num_ranks * p.pieces)
    if p.kind == "all_to_all":
        return AllToAll(p.num_ranks, chunks=p.pieces // p.num_ranks)
    return (AllGather if p.kind == "all_gather" else ReduceScatter)(p.num_ranks, chunks=p.pieces)


def _spread(p: SymmetricProgram, ptr: Ints, orbit: NDArray[np.int32], shift: Ints) -> tuple[Ints, NDArray[np.int32]]:
    """Turn dependencies between orbits into dependencies between transfers, numbered as in `expanded`."""
    copies = p.copies
    members = orbit[:, None].astype(np.int64) * copies + translate(shift[:, None], np.arange(copies), p.sizes)
    lengths = np.diff(ptr)
    new_ptr = np.concatenate([[0], np.cumsum(np.repeat(lengths, copies))])
    flat = np.empty(new_ptr[-1], np.int32)
    waiting = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(orbit)) - ptr[waiting]
    flat[new_ptr[waiting[:, None] * copies + np.arange(copies)] + at[:, None]] = members
    return new_ptr, flat


def seen_by(p: SymmetricProgram, rank: int) -> Program:
    """The transfers that touch the chunks of a rank 0..local-1, as a program in which each moves one chunk."""
    ranks, pieces, local = p.num_ranks, p.pieces, p.local
    mine = np.flatnonzero(p.home % local == rank)
    orbit = np.repeat(np.arange(len(p.dst)), np.diff(p.chunk_ptr))[mine]
    home, piece = p.home[mine], p.piece[mine]
    src = translate(p.src[orbit], home // local, p.sizes, sign=-1, local=local)
    dst = translate(p.dst[orbit], home // local, p.sizes, sign=-1, local=local)
    key = (orbit * pieces + piece) * ranks + src  # unique: an orbit moves each piece from a rank once
    order = np.argsort(key, kind="stable")
    ordered = key[order]

    def find(orbits: Ints, pieces_of: NDArray[np.int32], sources: Ints) -> Ints:
        wanted = (orbits * pieces + pieces_of) * ranks + sources
        at = np.minimum(np.searchsorted(ordered, wanted), max(len(mine) - 1, 0))
        found: Ints = np.where(ordered[at] == wanted, order[at], -1) if len(mine) else at
        return found

    def table(entry: Ints, other: Ints) -> tuple[Ints, NDArray[np.int32]]:
        # A dependency that another chunk of the same message caused is dropped: it does not concern this chunk.
        entry, other = entry[other >= 0], other[other >= 0]
        return np.searchsorted(entry, np.arange(len(mine) + 1)), other.astype(np.int32)

    def sender(at: Ints, other: Ints) -> Ints:
        """The sender of the member of an orbit that delivers to rank `at`."""
        group = translate(at // local, p.dst[other].astype(np.int64) // local, p.sizes, sign=-1)
        return p.src[other] + local * group

    entry, index = row_index(p.after_ptr, orbit)
    other = p.after[index].astype(np.int64)
    after_ptr, after = table(entry, find(other, piece[entry], sender(src[entry], other)))
    entry, index = row_index(p.gate_ptr, orbit)
    other = p.gate[index].astype(np.int64)
    where = np.where(p.gate_reads[index], dst[entry], sender(dst[entry], other))
    gate_ptr, gate = table(entry, find(other, piece[entry], where))
    return Program(
        name=p.name,
        collective=_of_one_rank(p, rank),
        src=src.astype(np.int32),
        dst=dst.astype(np.int32),
        reduce=p.reduce[orbit],
        chunk_ptr=np.arange(len(mine) + 1),
        chunk=piece,
        after_ptr=after_ptr,
        after=after,
        gate_ptr=gate_ptr,
        gate=gate,
        lane=p.lane[orbit],
        route=np.full(len(mine), -1, np.int32),
    )


def _of_one_rank(p: SymmetricProgram, rank: int) -> Collective:
    if p.kind == "all_reduce":
        return AllReduce(p.num_ranks, chunks=p.pieces)
    if p.kind == "all_to_all":
        return Scatter(p.num_ranks, root=rank, chunks=p.pieces // p.num_ranks)
    return (Broadcast if p.kind == "all_gather" else Reduce)(p.num_ranks, root=rank, chunks=p.pieces)
