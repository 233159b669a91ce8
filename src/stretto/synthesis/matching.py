# SPDX-License-Identifier: Apache-2.0
"""Comparison of collectives: whether two ask for the same thing and only cut it into chunks differently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..collectives import ALL_PARTS, Collective
from ..programs.formats.named import name_of
from .problem import SynthesisProblem

CLOSE = 1e-9
"""The distance (as a share of nbytes) below which two borders in a buffer are one: shares are sums of floats."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def same_task(a: Collective, b: Collective) -> bool:
    """Whether both move the same bytes of the same buffers to the same places.

    Every buffer is cut at the borders of both collectives. Where a chunk of one overlaps a chunk of the other, the two
    must overlap at the same offset and with the same parts in every buffer, and the overlaps of a chunk must add up to
    the whole chunk.

    >>> from stretto import AllGather, AllReduce
    >>> same_task(AllGather(4), AllGather(4, chunks=3)), same_task(AllReduce(4), AllReduce(4, chunks=6))
    (True, True)
    >>> same_task(AllGather(4), AllGather([0, 1, 2, 4])), same_task(AllGather(4), AllGather(4, in_place=True))
    (False, False)
    """
    if (a.kind, a.ranks, a.in_place, a.root) != (b.kind, b.ranks, b.in_place, b.root):
        return False
    names = name_of(a), name_of(b)
    if names[0] is not None and names[1] is not None and replace(names[0], chunks=1) == replace(names[1], chunks=1):
        return True
    met = [_meet(a, b, rank, output) for output in (False, True) for rank in range(a.num_ranks)]
    rows = [row for row in met if row is not None]
    if len(rows) < len(met):
        return False
    pair, shift, length = (np.concatenate([row[k] for row in rows]) for k in range(3))
    order = np.lexsort((shift, pair))
    pair, shift, length = pair[order], shift[order], length[order]
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    last = np.append(first[1:], len(pair)) - 1
    if np.any(shift[last] - shift[first] > CLOSE):
        return False
    return all(
        _adds_up(c, chunk, length[first]) for c, chunk in zip((a, b), np.divmod(pair[first], b.num_chunks), strict=True)
    )


def serves(collective: Collective, problem: SynthesisProblem) -> bool:
    """Whether a program's collective is the one of the problem, with no other helpers than may help."""
    helpers = set(collective.ranks) - set(collective.members)
    return helpers <= set(problem.helpers) and same_task(collective.without_helpers(), problem.collective)


def _meet(a: Collective, b: Collective, rank: int, output: bool) -> tuple[Ints, Floats, Floats] | None:
    """The pieces of one buffer, cut at the borders of both collectives: the two chunks of each piece, the distance of
    their beginnings, and the piece's length; None where the buffers differ."""
    borders = [_borders(c, rank, output) for c in (a, b)]
    if abs(borders[0][-1] - borders[1][-1]) > CLOSE:
        return None
    cuts = np.sort(np.concatenate(borders))
    real = np.diff(cuts) > CLOSE
    middle, length = ((cuts[1:] + cuts[:-1]) / 2)[real], np.diff(cuts)[real]
    chunks, begins, parts = [], [], []
    for c, border in zip((a, b), borders, strict=True):
        entry = np.minimum(np.searchsorted(border, middle, side="right") - 1, max(len(border) - 2, 0))
        ptr, chunk, part = (c.out_ptr, c.out_chunk, c.out_set) if output else (c.in_ptr, c.in_chunk, c.in_part)
        at = int(ptr[rank]) + entry
        chunks.append(chunk[at].astype(np.int64))
        begins.append(border[entry])
        parts.append(_sets(c)[part[at]] if output else part[at])
    if not np.array_equal(parts[0], parts[1]):
        return None
    return chunks[0] * b.num_chunks + chunks[1], begins[1] - begins[0], length


def _borders(c: Collective, rank: int, output: bool) -> Floats:
    chunks = c.outputs(rank) if output else c.inputs(rank)
    return np.concatenate([[0.0], np.cumsum(c.chunk_share[chunks])])


def _sets(c: Collective) -> Ints:
    """A number for each set of parts that depends only on its content; the last number stands for all parts."""
    return np.array([*(hash(parts) for parts in c.part_sets), ALL_PARTS], np.int64)


def _adds_up(c: Collective, chunk: Ints, length: Floats) -> bool:
    total = np.bincount(chunk, length, minlength=c.num_chunks)
    pieces = np.bincount(chunk, minlength=c.num_chunks)
    return bool(np.all(np.abs(total - c.chunk_share)[pieces > 0] <= CLOSE * pieces[pieces > 0]))
