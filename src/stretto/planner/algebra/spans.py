# SPDX-License-Identifier: Apache-2.0
"""Sets of intervals of a buffer, which motifs carry. Memory grows with the number of intervals, not with their size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

Span = tuple[int, int]
Spans = tuple[Span, ...]


def joined(spans: Iterable[Span]) -> Spans:
    """The same set in its canonical form: sorted, neighbors merged, no empty interval.

    >>> joined([(8, 12), (0, 4), (4, 8), (20, 20)])
    ((0, 12),)
    """
    found: list[Span] = []
    for lo, hi in sorted(spans):
        if lo >= hi:
            continue
        if found and found[-1][1] == lo:
            found[-1] = (found[-1][0], hi)
        else:
            found.append((lo, hi))
    return tuple(found)


def overlap(spans: Spans) -> Span | None:
    """The first overlap of two intervals in a sorted list; None if there is none."""
    return next(((b[0], min(a[1], b[1])) for a, b in pairwise(spans) if b[0] < a[1]), None)


def measure(spans: Iterable[Span]) -> int:
    """The total length of a set of intervals."""
    return sum(hi - lo for lo, hi in spans)


def even_sizes(total: int, count: int) -> list[int]:
    """`total` in `count` whole sizes that differ by at most one, the larger ones first.

    >>> even_sizes(10, 4), even_sizes(2, 3)
    ([3, 3, 2, 2], [1, 1, 0])
    """
    size, larger = divmod(total, count)
    return [size + 1] * larger + [size] * (count - larger)


def cut(spans: Spans, count: int) -> tuple[Spans, ...]:
    """A set cut into `count` pieces of even size, in order; if there is too little, the last pieces are empty.

    >>> cut(((0, 10), (100, 102)), 3)
    (((0, 4),), ((4, 8),), ((8, 10), (100, 102)))
    """
    return cut_sizes(spans, even_sizes(measure(spans), count))


def cut_sizes(spans: Spans, sizes: Sequence[int]) -> tuple[Spans, ...]:
    """A set cut into pieces of the given sizes, in order."""
    if len(spans) == 1:
        ends = list(accumulate(sizes, initial=spans[0][0]))
        return tuple(((lo, hi),) if lo < hi else () for lo, hi in pairwise(ends))
    pieces: list[Spans] = []
    at, used = 0, 0
    for size in sizes:
        piece: list[Span] = []
        while size > 0:
            lo, hi = spans[at]
            taken = min(size, hi - lo - used)
            piece.append((lo + used, lo + used + taken))
            size -= taken
            used += taken
            if used == hi - lo:
                at, used = at + 1, 0
        pieces.append(tuple(piece))
    return tuple(pieces)
