# SPDX-License-Identifier: Apache-2.0
"""Where every value lives and which rank's step writes it; and an order of the steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..collectives import Collective
from .fused_values import Results, Value

IN, OUT, SLOT, PACKET = range(4)
"""Spaces of memory: the user's input and output (by position), slots and packet slots (by number)."""


class MemoryPlace(NamedTuple):
    """Where one chunk lies."""

    rank: int
    space: int
    at: int


class FusedItem(NamedTuple):
    """One chunk's work: the sum of the sources goes to all targets."""

    chunk: int
    sources: tuple[MemoryPlace, ...]
    targets: tuple[MemoryPlace, ...]


@dataclass(frozen=True, kw_only=True)
class FusedStep:
    """Items of one shape (as many sources, as many targets) that do not wait for each other."""

    level: int
    items: tuple[FusedItem, ...]
    waits: tuple[tuple[int, int], ...] = ()
    """(peer, the number of its signal in this round)"""
    signals: tuple[int, ...] = ()
    """The peers that are told once the step is done."""
    sync: bool = False
    """Whether the threads of the block must meet before it."""
    finish: bool = False
    """Whether the sum is complete, so that an average divides here."""


@dataclass(kw_only=True)
class ValueSteps:
    """The step of each value, before steps are merged and ordered."""

    rank: list[int] = field(default_factory=list)
    items: list[FusedItem] = field(default_factory=list)
    finish: list[bool] = field(default_factory=list)
    flow: list[set[int]] = field(default_factory=list)
    """The steps whose data a step needs."""
    behind: list[set[int]] = field(default_factory=list)
    """The steps that must have read what a step overwrites."""
    slots: int = 0
    packets: int = 0


class _Builder:
    def __init__(
        self, c: Collective, values: Sequence[Value], results: Results, protocol: str, symmetric: bool,
        in_place: bool, staged: bool,
    ) -> None:  # fmt: skip
        self.c, self.values = c, values
        self.remote_space = PACKET if protocol == "ll" else SLOT
        self.symmetric, self.in_place, self.staged = symmetric, in_place, staged
        self.outs: dict[int, list[MemoryPlace]] = defaultdict(list)
        for (rank, position), held in sorted(results.items()):
            self.outs[held].append(MemoryPlace(rank, OUT, position))
        self.children: dict[int, list[int]] = defaultdict(list)
        self.local_use = [False] * len(values)
        for v, value in enumerate(values):
            if len(value.sources) == 1:
                self.children[value.sources[0]].append(v)
            else:
                for s in value.sources:
                    self.local_use[s] = True
        self.next: dict[tuple[int, int], int] = defaultdict(int)
        self.inputs = {self.cell(MemoryPlace(v.rank, IN, v.position)) for v in values if v.position >= 0}
        self.wanted = {(int(k), sum(1 << p for p in c.parts_of(at))) for at, k in enumerate(c.out_chunk.tolist())}

    def cell(self, place: MemoryPlace) -> MemoryPlace:
        """The one name of a piece of memory: in place, an input is a place of the output."""
        if self.in_place and place.space == IN:
            return MemoryPlace(place.rank, OUT, place.at + int(self.c.place[place.rank]))
        return place

    def slot(self, rank: int, space: int) -> MemoryPlace:
        self.next[rank, space] += 1
        return MemoryPlace(rank, space, self.next[rank, space] - 1)

    def late(self, v: int) -> list[MemoryPlace]:
        """The outputs that are written by a step of their own, at the end, since inputs may still be read there."""
        return [out for out in self.outs[v] if out in self.inputs] if self.staged else []

    def homes(self) -> list[list[MemoryPlace]]:
        """Where each value is kept on its own rank: written by its maker, and read by whoever needs it."""
        homes: list[list[MemoryPlace]] = []
        for v, value in enumerate(self.values):
            late = self.late(v)
            outs = [out for out in self.outs[v] if out not in late]
            if not value.sources:
                home = [MemoryPlace(value.rank, IN, value.position)]
                if any(self.cell(home[0]) != out for out in late):
                    home.append(self.slot(value.rank, SLOT))
            elif len(value.sources) == 1:
                direct = self.symmetric and bool(outs)
                home = [outs[0] if direct else self.slot(value.rank, self.remote_space)]
            else:
                home = list(outs)
                if late or (self.local_use[v] and not outs):
                    home.append(self.slot(value.rank, SLOT))
            homes.append(home)
        return homes


def build_steps(
    collective: Collective,
    values: Sequence[Value],
    results: Results,
    *,
    protocol: str,
    symmetric: bool,
    in_place: bool,
    staged: bool,
) -> ValueSteps:
    """Give every value its places and make the step that writes them.

    A value is written where it is made: a sum goes in one step to the outputs of its rank and to every rank that it is
    sent to; what has come from another rank goes on in a step of its own.

    Args:
        collective: The collective.
        values: The values; see `flattened`.
        results: What the outputs hold.
        protocol: "simple" or "ll".
        symmetric: Whether other ranks may write outputs and read inputs.
        in_place: Whether input and output share memory.
        staged: Whether outputs that share memory with inputs are written at the end, by steps of their own.

    Returns:
        The steps, with what they wait for.
    """
    b = _Builder(collective, values, results, protocol, symmetric, in_place, staged)
    homes, made = b.homes(), ValueSteps()
    writer: dict[MemoryPlace, int] = {}

    def add(v: int, sources: Iterable[MemoryPlace], targets: list[MemoryPlace], finish: bool) -> None:
        value = values[v]
        n = collective.num_ranks
        targets.sort(key=lambda p: ((p.rank - value.rank) % n, p.space, p.at))
        made.rank.append(value.rank)
        made.items.append(FusedItem(value.chunk, tuple(sources), tuple(targets)))
        made.finish.append(finish)
        writer.update(dict.fromkeys(targets, len(made.rank) - 1))

    for v, value in enumerate(values):
        late = b.late(v)
        sent = [homes[child][0] for child in b.children[v]]
        if len(value.sources) > 1:
            finish = (value.chunk, value.parts) in b.wanted
            add(v, [homes[s][0] for s in value.sources], homes[v] + sent, finish)
        else:
            home, extra = homes[v][0], homes[v][1:]
            outs = [out for out in b.outs[v] if out not in late and b.cell(home) != out]
            if outs or sent or extra:
                add(v, [home], outs + sent + extra, False)
    for v in range(len(values)):
        late = [out for out in b.late(v) if b.cell(homes[v][0]) != out]
        if late:
            add(v, [homes[v][-1]], late, False)
    _dependencies(made, b, writer)
    made.slots = max((count for (_, space), count in b.next.items() if space == SLOT), default=0)
    made.packets = max((count for (_, space), count in b.next.items() if space == PACKET), default=0)
    return made


def _dependencies(made: ValueSteps, b: _Builder, writer: dict[MemoryPlace, int]) -> None:
    readers: dict[MemoryPlace, set[int]] = defaultdict(set)
    for at, item in enumerate(made.items):
        made.flow.append({writer[p] for p in item.sources if p in writer} - {at})
        for place in item.sources:
            if place.space == IN:
                readers[b.cell(place)].add(at)
    for at, item in enumerate(made.items):
        cells = (b.cell(place) for place in item.targets)
        made.behind.append(set().union(*(readers.get(cell, set()) for cell in cells)) - {at})


def order_steps(made: ValueSteps) -> list[int] | None:
    """The level of each step, above all that it waits for; None where steps wait for each other in a circle."""
    count = len(made.rank)
    followers: list[list[int]] = [[] for _ in range(count)]
    left, level = [0] * count, [0] * count
    for at in range(count):
        for before in made.flow[at] | made.behind[at]:
            followers[before].append(at)
            left[at] += 1
    ready = [at for at in range(count) if not left[at]]
    for at in ready:
        for after in followers[at]:
            level[after] = max(level[after], level[at] + 1)
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    return level if len(ready) == count else None
