# SPDX-License-Identifier: Apache-2.0
"""Collects transfers into one `Program`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ..collectives import Collective
from ..programs import Program


class Moves:
    """Transfers in program order, and their waits beside those of the data."""

    def __init__(self, rank: dict[int, int]) -> None:
        self.rank = rank
        self.src: list[int] = []
        self.dst: list[int] = []
        self.chunk: list[int] = []
        self.reduce: list[bool] = []
        self.lane: list[int] = []
        self.waits: list[tuple[int, int]] = []
        self._last: dict[int, list[int]] = defaultdict(list)

    def add(
        self, src: int, dst: int, chunk: int, *, reduce: bool = False, lane: int = 0, after: Iterable[int] = ()
    ) -> int:
        """Add one transfer.

        Args:
            src: the sending device.
            dst: the receiving device.
            chunk: number of the chunk.
            reduce: whether the chunk is added to the receiver's, instead of replacing it.
            lane: FIFO connection between the two devices.
            after: numbers of transfers that this one waits for beside those that its data need.

        Returns:
            The number of the transfer.
        """
        number = len(self.src)
        self.src.append(self.rank[src])
        self.dst.append(self.rank[dst])
        self.chunk.append(chunk)
        self.reduce.append(reduce)
        self.lane.append(lane)
        self.waits += [(number, other) for other in after]
        return number

    def in_turn(self, first: int, whose: Iterable[int]) -> None:
        """Make the transfers from number `first` on one job of these devices or hosts, which begins after their last
        job.
        """
        mine = list(whose)
        before = sorted({t for h in mine for t in self._last[h]})
        seen: dict[tuple[int, int], int] = {}
        arrived: set[tuple[int, int]] = set()
        for t in range(first, len(self.src)):
            pair = (self.src[t], self.dst[t])
            # Only the first transfer of a connection needs the wait, since the others queue behind it; and a rank that
            # passes on a chunk of this job has waited for the chunk already.
            if pair not in seen and (self.src[t], self.chunk[t]) not in arrived:
                self.waits += [(t, other) for other in before]
            seen[pair] = t
            arrived.add((self.dst[t], self.chunk[t]))
        ends = sorted(seen.values())
        for h in mine:
            self._last[h] = ends

    def program(self, name: str, collective: Collective) -> Program:
        """The transfers as a program; the waits that its data need are derived."""
        made = Program.from_steps(
            name, collective, src=self.src, dst=self.dst, chunk=self.chunk, reduce=np.array(self.reduce, np.bool_),
            lane=self.lane, step=np.arange(len(self.src)),
        )  # fmt: skip
        return waiting(made, self.waits)


def waiting(program: Program, waits: Sequence[tuple[int, int]]) -> Program:
    """The program with additional waits, given as pairs (transfer that waits, transfer that it waits for)."""
    if not waits:
        return program
    count = program.num_transfers
    have = np.repeat(np.arange(count, dtype=np.int64), np.diff(program.after_ptr)) * count + program.after
    more = np.array([a * count + b for a, b in waits], np.int64)
    pairs = np.unique(np.concatenate([have, more]))
    ptr = np.searchsorted(pairs // count, np.arange(count + 1)).astype(np.int64)
    return program.replace(after_ptr=ptr, after=(pairs % count).astype(np.int32))
