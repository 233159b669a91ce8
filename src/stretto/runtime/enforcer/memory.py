# SPDX-License-Identifier: Apache-2.0
"""The memory of a motif on its way: straight from the op's own tensors where it lies in one piece, else staged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...process_state import ProcessPart
from .binding import IN, OUT, MotifBinding, Pieces

View = tuple[torch.Tensor, int, int]
"""A flat tensor, and the positions of the first element and behind the last one."""
Row = tuple[int, int, int, int, int]
"""A region, the position of its first piece, the length of a piece, the distance between pieces, their number."""
Regions = Sequence[torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """A binding with its pieces as rows, so that regular ones are copied at once."""

    binding: MotifBinding
    gives: tuple[Row, ...]
    takes: tuple[Row, ...]
    given: int
    taken: int
    place: tuple[int, int, int, int, int] | None
    """Set where the motif works in place on one piece of memory: the region, the begin and end of what is read in the
    region, and the begin and end of what is written."""

    @classmethod
    def of(cls, binding: MotifBinding) -> RowLayout:
        """The layout of a binding. It is made once and used in every iteration."""
        given, taken = _size(binding.gives), _size(binding.takes)
        outer = binding.gives if given >= taken else binding.takes
        place = None
        if binding.in_place and binding.gives and binding.takes and len(outer) == 1 and outer[0][0] >= 0:
            region, lo, hi = outer[0]
            inner = (lo + binding.at, lo + binding.at + min(given, taken))
            place = (region, lo, hi, *inner) if given >= taken else (region, *inner, lo, hi)
        return cls(
            binding=binding,
            gives=_rows(binding.gives),
            takes=_rows(binding.takes),
            given=given,
            taken=taken,
            place=place,
        )


class Pool(ProcessPart):
    """Staging memory that is used again: so many bytes at most are kept, those of sizes that were used last."""

    def __init__(self, max_bytes: int = 1 << 28) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self.kept_bytes = 0

    def after_fork(self) -> None:
        """Make a new lock in a forked child, since a thread of the parent may have held the old one."""
        self._lock = threading.Lock()

    def take(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """A tensor of `size` elements that are not set."""
        with self._lock:
            free = self._free.get((dtype, size))
            if free:
                self.kept_bytes -= free[-1].nbytes
                return free.pop()
        return torch.empty(size, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Keep a tensor that is not used any more for the next `take` of its size."""
        key = (tensor.dtype, tensor.numel())
        with self._lock:
            self._free[key] = [*self._free.pop(key, []), tensor]
            self.kept_bytes += tensor.nbytes
            while self.kept_bytes > self._max_bytes:
                oldest = next(iter(self._free))
                self.kept_bytes -= sum(free.nbytes for free in self._free.pop(oldest))


class StagedBuffers:
    """Where a program reads and writes; `back` brings the `result`, if any, to the op's own memory.

    Attributes:
        source: What the motif reads: (flat tensor, first element, behind the last). None where this rank gives nothing,
            as it is not the root of a broadcast or scatter.
        target: What it writes. None where this rank gets nothing, as it is not the root of a reduction or gather.
        layout: The pieces of the op's memory that these stand for.
        scratch: Memory that goes back into the pool at the end.
        result: The buffer whose content `back` copies to the op's memory; None where it is written there at once.
    """

    __slots__ = ("layout", "result", "scratch", "source", "target")

    def __init__(
        self, source: View | None, target: View | None, layout: RowLayout, scratch: Sequence[torch.Tensor] = (),
        result: View | None = None,
    ) -> None:  # fmt: skip
        self.source, self.target, self.layout, self.scratch, self.result = source, target, layout, scratch, result

    def back(self, regions: Regions, pool: Pool) -> None:
        """Copy the result to the op's memory and give the scratch memory back, once the program has ended."""
        if self.result is not None:
            buffer, at, _ = self.result
            for row in self.layout.takes:
                length = row[2] * row[4]
                if row[0] >= 0:
                    _strided(regions, row).copy_(buffer[at : at + length].view(row[4], row[2]))
                at += length
        for tensor in self.scratch:
            pool.give(tensor)


def stage(layout: RowLayout, regions: Regions, dtype: torch.dtype, pool: Pool) -> StagedBuffers:
    """The views for a program; what does not lie in one piece is copied first.

    Args:
        layout: The rows that the motif reads and writes.
        regions: The memory of the op: input, output, scratch.
        dtype: The element type.
        pool: Where scratch memory comes from.

    Returns:
        Source and target, each in one piece.
    """
    if layout.place is not None:
        region, begin, end, at, until = layout.place
        tensor = regions[region]
        assert tensor is not None
        return StagedBuffers((tensor, begin, end), (tensor, at, until), layout)
    binding = layout.binding
    if binding.exchange is not None and binding.program is not None:
        # The pieces of an exchange are read and written where they are.
        given, taken = regions[IN], regions[OUT]
        assert given is not None
        assert taken is not None
        return StagedBuffers((given, 0, given.numel()), (taken, 0, taken.numel()), layout)
    if binding.in_place and binding.gives and binding.takes:
        return _one(layout, regions, dtype, pool)
    source, target = _direct(binding.gives, regions), _direct(binding.takes, regions)
    scratch: list[torch.Tensor] = []
    result: View | None = None
    if (target is None and layout.taken) or _overlap(source, target):
        scratch.append(pool.take(dtype, layout.taken))
        target = result = (scratch[-1], 0, layout.taken)
    if source is None and layout.given:
        scratch.append(pool.take(dtype, layout.given))
        source = (scratch[-1], 0, layout.given)
        _fill(scratch[-1], 0, layout.gives, regions)
    return StagedBuffers(source, target, layout, scratch, result)


def _one(layout: RowLayout, regions: Regions, dtype: torch.dtype, pool: Pool) -> StagedBuffers:
    """One buffer for both, the smaller one inside the larger, for what does not lie in one piece."""
    binding = layout.binding
    outer = layout.given >= layout.taken
    size = layout.given if outer else layout.taken
    buffer = pool.take(dtype, size)
    inner = (buffer, binding.at, binding.at + min(layout.given, layout.taken))
    whole = (buffer, 0, size)
    source, target = (whole, inner) if outer else (inner, whole)
    _fill(buffer, source[1], layout.gives, regions)
    return StagedBuffers(source, target, layout, [buffer], target)


def _fill(buffer: torch.Tensor, at: int, rows: Sequence[Row], regions: Regions) -> None:
    for row in rows:
        length = row[2] * row[4]
        if row[0] >= 0:
            buffer[at : at + length].view(row[4], row[2]).copy_(_strided(regions, row))
        at += length


def _strided(regions: Regions, row: Row) -> torch.Tensor:
    region, first, length, distance, count = row
    tensor = regions[region]
    assert tensor is not None
    return tensor.as_strided((count, length), (distance, 1), tensor.storage_offset() + first)


def _direct(pieces: Pieces, regions: Regions) -> View | None:
    if len(pieces) != 1 or pieces[0][0] < 0:
        return None
    region, lo, hi = pieces[0]
    tensor = regions[region]
    assert tensor is not None
    return tensor, lo, hi


def _overlap(source: View | None, target: View | None) -> bool:
    if source is None or target is None:
        return False
    (a, *one), (b, *other) = source, target
    size = a.element_size()
    begin, end = a.data_ptr() + one[0] * size, a.data_ptr() + one[1] * size
    return begin < b.data_ptr() + other[1] * size and b.data_ptr() + other[0] * size < end


def _size(pieces: Pieces) -> int:
    return sum(hi - lo for _, lo, hi in pieces)


def _rows(pieces: Pieces) -> tuple[Row, ...]:
    """Pieces of one length at one distance as one row.

    >>> _rows(((0, 0, 4), (0, 10, 14), (0, 20, 24), (1, 0, 4)))
    ((0, 0, 4, 10, 3), (1, 0, 4, 4, 1))
    """
    found: list[Row] = []
    for region, lo, hi in pieces:
        if found:
            r, first, length, distance, count = found[-1]
            step = lo - first - (count - 1) * distance if count > 1 else lo - first
            if r == region and length == hi - lo and step >= length and (count == 1 or step == distance):
                found[-1] = (r, first, length, step, count + 1)
                continue
        found.append((region, lo, hi - lo, hi - lo, 1))
    return tuple(found)
