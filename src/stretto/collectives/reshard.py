# SPDX-License-Identifier: Apache-2.0
"""The collective of a resharding: pieces of tensors, the ranks that hold each and the ranks that want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .conditions import ALL_PARTS, MAX_ENTRIES, Collective


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of a resharding: `nbytes` that each of ``parts[p]`` holds alike, wanted by each of `wanted`.

    With several parts the piece is a pending sum: the ranks of ``parts[p]`` hold the p-th summand, and the ranks of
    `wanted` get the sum. Ranks are positions in the collective. The piece is cut into `chunks`, at multiples of
    `align` bytes.
    """

    nbytes: int
    parts: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]
    chunks: int = 1
    align: int = 1

    def cuts(self) -> NDArray[np.int64]:
        """The byte offsets at which the chunks begin, and the end; chunks differ in size by at most one `align`."""
        steps = np.arange(self.chunks + 1, dtype=np.int64)
        return steps * (self.nbytes // self.align) // self.chunks * self.align


def Reshard(ranks: Sequence[int], pieces: Sequence[Piece]) -> Collective:
    """Every rank that wants a piece ends with it; buffers hold their pieces in the order of `pieces`.

    `nbytes` of the collective is the largest of all buffers (`largest_buffer`); its chunks are whole multiples of
    their piece's `align`.

    >>> Reshard((0, 1, 2), [Piece(nbytes=8, parts=((0, 1),), wanted=(2,), chunks=2)])
    <Collective reshard over 3 ranks, 2 chunks, out of place>
    """
    devices = tuple(int(r) for r in ranks)
    count = len(devices)
    if not pieces:
        raise InvalidInput("pieces: at least one piece must be moved")
    sizes: list[NDArray[np.int64]] = []
    inputs: list[list[tuple[int, int, int]]] = [[] for _ in devices]
    outputs: list[list[tuple[int, int]]] = [[] for _ in devices]
    first = entries = 0
    for at, piece in enumerate(pieces):
        _check(piece, at, count)
        last = first + piece.chunks
        entries += piece.chunks * (sum(len(p) for p in piece.parts) + len(piece.wanted))
        if entries > MAX_ENTRIES:
            raise InvalidInput(f"pieces: the buffers hold over {MAX_ENTRIES} chunks")
        sizes.append(np.diff(piece.cuts()))
        for number, holders in enumerate(piece.parts):
            for rank in holders:
                inputs[rank].append((first, last, number))
        for rank in piece.wanted:
            outputs[rank].append((first, last))
        first = last
    in_ptr = np.cumsum([0, *(sum(b - a for a, b, _ in row) for row in inputs)]).astype(np.int64)
    out_ptr = np.cumsum([0, *(sum(b - a for a, b in row) for row in outputs)]).astype(np.int64)
    return Collective(
        kind="reshard",
        ranks=devices,
        num_chunks=first,
        chunks=1,
        in_ptr=in_ptr,
        in_chunk=_ranges([(a, b) for row in inputs for a, b, _ in row]),
        in_part=np.repeat(
            np.array([part for row in inputs for *_, part in row], np.int32),
            np.array([b - a for row in inputs for a, b, _ in row], np.int64),
        ),
        out_ptr=out_ptr,
        out_chunk=_ranges([run for row in outputs for run in row]),
        out_set=np.full(int(out_ptr[-1]), ALL_PARTS, np.int32),
        chunk_share=np.concatenate(sizes) / largest_buffer(count, pieces),
        place=np.zeros(count, np.int64),
    )


def largest_buffer(num_ranks: int, pieces: Sequence[Piece]) -> int:
    """The bytes of the largest input or output buffer of any rank: the `nbytes` to simulate the collective with."""
    held, wanted = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for piece in pieces:
        for holders in piece.parts:
            held[list(holders)] += piece.nbytes
        wanted[list(piece.wanted)] += piece.nbytes
    return int(max(held.max(), wanted.max()))


def _ranges(runs: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in runs] or [np.zeros(0, np.int32)])


def _check(piece: Piece, at: int, count: int) -> None:
    if piece.align < 1 or piece.nbytes < 1 or piece.nbytes % piece.align:
        raise InvalidInput(f"pieces[{at}].nbytes: must be a multiple of {piece.align} > 0, not {piece.nbytes}")
    if not 1 <= piece.chunks <= piece.nbytes // piece.align:
        most = piece.nbytes // piece.align
        raise InvalidInput(f"pieces[{at}].chunks: must be 1..{most}, not {piece.chunks}")
    if not piece.parts or not all(piece.parts) or not piece.wanted:
        raise InvalidInput(f"pieces[{at}]: needs somebody who holds it, and somebody who wants it")
    named = [rank for holders in piece.parts for rank in holders]
    for key, those in (("parts", named), ("wanted", list(piece.wanted))):
        if len(set(those)) != len(those) or min(those) < 0 or max(those) >= count:
            raise InvalidInput(f"pieces[{at}].{key}: must be distinct ranks 0..{count - 1}")
