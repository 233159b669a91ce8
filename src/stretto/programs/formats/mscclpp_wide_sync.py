# SPDX-License-Identifier: Apache-2.0
"""Which wide steps of a stream have to wait for which signals of other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..wide import PACKET, Cell, WideProgram, WideStep

Place = tuple[int, str, int]


def chunks_of(cell: Cell, count: int) -> Iterator[Place]:
    """The single chunks of a place."""
    return ((cell[0], cell[1], cell[2] + k) for k in range(count))


class StreamSync:
    """The signals between the ranks of one stream: as few as keep the order of steps that touch the same place.

    Steps of a rank are numbered from 1; number 0 is its launch, before which nobody touches its memory. A rank ends
    only when all steps of others on its memory are done, so that its user, and its next launch, may overwrite it.
    """

    def __init__(self, steps: Sequence[WideStep], ranks: int, *, packets: bool = False) -> None:
        self.ranks = ranks
        self._mine: list[list[WideStep]] = [[] for _ in range(ranks)]
        self._waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        """For each step (rank, number; number 0: the end) the signals that it waits for, as (peer, its number)."""
        self._signals: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._late: dict[int, list[int]] = defaultdict(list)
        self._known = [[0 if q == r else -1 for q in range(ranks)] for r in range(ranks)]
        self._after: list[list[list[int]]] = [[known.copy()] for known in self._known]
        uses: dict[Cell, int] = defaultdict(int)
        for step in steps:
            for cell in (*step.sources, *step.targets):
                uses[cell] += 1
        self.touched_once = frozenset(cell for cell, count in uses.items() if count == 1)
        if not packets:
            self._follow_places(steps)
            return
        for step in steps:  # A step that reads packets waits for them, and no step for anything else.
            self._mine[step.rank].append(step)

    def _follow_places(self, steps: Sequence[WideStep]) -> None:
        wrote: dict[Place, tuple[int, int]] = {}
        read: dict[Place, dict[int, int]] = defaultdict(dict)
        last: dict[tuple[int, int], int] = {}
        for step in steps:
            r = step.rank
            self._mine[r].append(step)
            at = len(self._mine[r])
            need: dict[int, int] = {}
            for cell, writes in [(c, False) for c in step.sources] + [(c, True) for c in step.targets]:
                if cell[0] != r:
                    need.setdefault(cell[0], 0)
                    last[r, cell[0]] = at
                for place in chunks_of(cell, step.count):
                    before = [wrote[place]] if place in wrote else []
                    before += list(read[place].items()) if writes else []
                    for q, number in before:
                        need[q] = max(need.get(q, 0), number)
            for q, number in sorted(need.items()):
                self._wait_for(r, at, q, number)
            self._know(r, at)
            for cell in step.sources:
                for place in chunks_of(cell, step.count):
                    read[place][r] = at
            for cell in step.targets:
                for place in chunks_of(cell, step.count):
                    wrote[place] = (r, at)
                    read[place].clear()
        for (q, r), number in sorted(last.items()):
            if self._known[r][q] < number:
                self._late[q].append(r)
                self._waits[r, 0].append((q, number))

    def _wait_for(self, rank: int, at: int, peer: int, number: int) -> None:
        if peer == rank or self._known[rank][peer] >= number:
            return
        self._signals[peer, number].append(rank)
        self._waits[rank, at].append((peer, number))
        for q, known in enumerate(self._after[peer][number]):
            self._known[rank][q] = max(self._known[rank][q], known)

    def _know(self, rank: int, at: int) -> None:
        self._known[rank][rank] = at
        self._after[rank].append(self._known[rank].copy())

    def signals(self, rank: int, number: int) -> list[int]:
        """The ranks that wait for a step of a rank (0: for its launch)."""
        return _rotated(rank, self._signals[rank, number], self.ranks)

    def schedule(self, rank: int) -> Iterator[tuple[WideStep, list[tuple[int, int]], list[int]]]:
        """The steps of a rank with the signals that each waits for, and the ranks to signal afterwards."""
        for k, step in enumerate(self._mine[rank]):
            yield step, self._waits[rank, k + 1], self.signals(rank, k + 1)

    def first_waits(self, rank: int) -> list[int]:
        """The ranks for whose launch a rank waits."""
        return _rotated(rank, [q for q in range(self.ranks) if rank in self._signals[q, 0]], self.ranks)

    def last_signals(self, rank: int) -> list[int]:
        """The ranks that wait at their end until this rank is done with their memory."""
        return _rotated(rank, self._late[rank], self.ranks)

    def last_waits(self, rank: int) -> list[int]:
        """The ranks whose last signal this rank waits for at its end."""
        return _rotated(rank, [q for q, _ in self._waits[rank, 0]], self.ranks)


def _rotated(rank: int, others: Sequence[int], ranks: int) -> list[int]:
    return sorted(others, key=lambda q: (q - rank) % ranks)


def unheard_packets(wide: WideProgram) -> list[tuple[int, int]]:
    """The pairs (writer, reader) of ranks where the writer can end before it knows that the reader has launched.

    A launch ends with its last threadblock, so that a rank knows at its end what any of its streams has heard.
    """
    ranks = wide.program.collective.num_ranks
    known: dict[tuple[int, int], set[int]] = defaultdict(set)
    sent: dict[Cell, frozenset[int]] = {}
    filled: set[tuple[int, int]] = set()
    for step in wide.steps:
        mine = known[step.rank, wide.stream[step.piece]]
        for cell in step.sources:
            mine |= sent.get(cell, frozenset())
        for cell in step.targets:
            if cell[1] == PACKET:
                sent[cell] = frozenset({*mine, step.rank})
                filled.add((step.rank, cell[0]))
    heard = {(rank, peer) for (rank, _), those in known.items() for peer in those}
    heard |= {(rank, rank) for rank in range(ranks)}
    return sorted(filled - heard)
