# SPDX-License-Identifier: Apache-2.0
"""A proof of fused steps by another way than they were made: a run on symbols in orders that are meant to break them.

The ranks run launch behind launch, each of several rounds, in random and in one-sided orders. Every piece of memory
knows who touched it and when; vector clocks, which only signals, packets and meetings of threads move, say whether two
accesses are ordered. So a race, a slot that is used again too early, a deadlock and a wrong result all show.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from stretto.errors import VerificationError
from stretto.programs.fused import Fused
from stretto.programs.fused_steps import IN, OUT, PACKET, SLOT, FusedItem, FusedStep, MemoryPlace

ROUNDS = 2
Clock = list[int]
Cell = tuple[int, ...]
Waiting = Iterator[Callable[[], bool]]


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """What a cell holds: parts of a chunk in one launch, and whether an average was taken."""

    launch: int
    chunk: int
    parts: frozenset[int]
    finished: bool = False


@dataclass(kw_only=True)
class CellState:
    """A cell's content, the accesses to it, and for packets their round and what their reader learns."""

    content: Symbol | None = None
    written: tuple[int, int] = (-1, 0)
    by: tuple[int, ...] = ()
    read: dict[int, int] = field(default_factory=dict)
    epoch: int = -1
    clock: tuple[int, ...] = ()


def check_fused(*launches: Fused, seed: int = 0, orders: int = 4) -> None:
    """Prove that programs, run one behind the other and again, are right and free of races and deadlocks.

    Args:
        *launches: Fused programs of the same ranks, in the order in which they are launched.
        seed: The seed of the random orders.
        orders: How many orders are tried; the first ones run one rank as far as it gets.

    Raises:
        VerificationError: A result is wrong, accesses are not ordered, or ranks wait for each other for ever.
    """
    n = launches[0].collective.num_ranks
    for order in range(orders):
        rng = random.Random(f"{seed} {order}")
        favorites = [] if order >= 2 else list(range(n)) if order == 0 else list(reversed(range(n)))
        _Run(launches * 2).go(rng, favorites)


class _Run:
    def __init__(self, launches: Sequence[Fused]) -> None:
        self.launches = launches
        self.n = launches[0].collective.num_ranks
        self.cells: dict[Cell, CellState] = defaultdict(CellState)
        self.signals: dict[tuple[int, int], list[Clock]] = defaultdict(list)
        self.base = [[0] * self.n for _ in range(self.n)]
        self.clock = [[0] * self.n for _ in range(self.n)]
        self.learned: list[list[Clock]] = [[] for _ in range(self.n)]
        self.time = [0] * self.n
        self.where = ["before its first step"] * self.n

    def go(self, rng: random.Random, favorites: list[int]) -> None:
        """Run all ranks to their end."""
        ranks = {rank: self.rank(rank) for rank in range(self.n)}
        waits: dict[int, Callable[[], bool]] = {rank: (lambda: True) for rank in ranks}
        while ranks:
            able = [rank for rank in ranks if waits[rank]()]
            if not able:
                raise self.error("deadlock: " + "; ".join(f"rank {r} {self.where[r]}" for r in sorted(ranks)))
            first = [rank for rank in favorites if rank in able]
            rank = first[0] if first else rng.choice(able)
            try:
                waits[rank] = next(ranks[rank])
            except StopIteration:
                del ranks[rank]

    def error(self, text: str) -> VerificationError:
        return VerificationError(f"{', '.join(dict.fromkeys(f.name for f in self.launches))}: {text}")

    def rank(self, r: int) -> Waiting:
        """What one rank does; yields whenever another may run, with the condition on which it goes on."""
        epoch, pending = 0, False
        for launch, f in enumerate(self.launches):
            self.user(r, launch, f, ends=False)
            yield from self.barrier(r, f.ready[r], [q for q in range(self.n) if r in f.ready[q]], "ready")
            for turn in range(ROUNDS):
                if f.slots or f.packets:
                    if pending:
                        yield from self.hear(r, [(q, 0) for q in range(self.n) if q != r], "start of the round before")
                    pending = not f.hears_all
                    epoch += 1
                self.meet(r)
                self.tell(r, f.starts[r])
                for number, step in enumerate(f.steps[r]):
                    self.where[r] = f"at step {number} of {f.name}"
                    yield from self.hear(r, step.waits, f"step {number}")
                    if step.waits or step.sync:
                        self.meet(r)
                    yield from self.step(r, launch, f, step, turn, epoch)
                    if step.signals:
                        self.meet(r)
                        self.tell(r, step.signals)
                self.meet(r)
                for q in range(self.n):
                    told = sum(r in step.signals for step in f.steps[q]) + (r in f.starts[q])
                    self.base[r][q] += told
            yield from self.barrier(r, f.done[r], f.ready[r], "done")
            self.user(r, launch, f, ends=True)
            yield lambda: True

    def barrier(self, r: int, hear: Sequence[int], tell: Sequence[int], what: str) -> Waiting:
        self.meet(r)
        self.tell(r, tell)
        yield from self.hear(r, [(q, 1) for q in hear], what)
        for q in hear:
            self.base[r][q] += 1
        self.meet(r)

    def tell(self, r: int, peers: Sequence[int]) -> None:
        for q in peers:
            self.signals[r, q].append(list(self.clock[r]))

    def hear(self, r: int, waits: Sequence[tuple[int, int]], what: str) -> Waiting:
        for q, number in waits:
            need = self.base[r][q] + number
            self.where[r] = f"waits for signal {number} of rank {q} ({what})"
            if need:
                yield partial(self.has_come, q, r, need)
                self.learned[r].append(self.signals[q, r][need - 1])

    def has_come(self, q: int, r: int, need: int) -> bool:
        return len(self.signals[q, r]) >= need

    def has_packet(self, cell: Cell, epoch: int) -> bool:
        return self.cells[cell].epoch == epoch

    def meet(self, r: int) -> None:
        """The threads of a rank's block meet: all its steps so far are behind it, and so is what it heard."""
        mine = self.clock[r]
        for clock in self.learned[r]:
            mine[:] = map(max, mine, clock)
        self.learned[r].clear()
        mine[r] = self.time[r]

    def user(self, r: int, launch: int, f: Fused, *, ends: bool) -> None:
        """The job writes new inputs before a launch, and reads the outputs and takes all memory back behind it."""
        c = f.collective
        self.meet(r)
        self.time[r] += 1
        for turn in range(ROUNDS):
            for position in range(len(c.outputs(r))):
                state = self.touch(r, self.cell(f, MemoryPlace(r, OUT, position), turn, 0), True, self.clock[r], ())
                if ends:
                    at = int(c.out_ptr[r]) + position
                    self.judge(r, position, state.content, launch, int(c.out_chunk[at]), c.parts_of(at))
                state.content = None
            for position in range(len(c.inputs(r))):
                at = int(c.in_ptr[r]) + position
                state = self.touch(r, self.cell(f, MemoryPlace(r, IN, position), turn, 0), True, self.clock[r], ())
                parts = frozenset([int(c.in_part[at])])
                state.content = None if ends else Symbol(launch=launch, chunk=int(c.in_chunk[at]), parts=parts)
        self.meet(r)

    def judge(
        self, r: int, position: int, found: Symbol | None, launch: int, chunk: int, parts: tuple[int, ...]
    ) -> None:
        want = Symbol(launch=launch, chunk=chunk, parts=frozenset(parts), finished=len(parts) > 1)
        if found != want:
            raise self.error(f"rank {r} ends with {found} at output {position}, not {want}")

    def cell(self, f: Fused, place: MemoryPlace, turn: int, epoch: int) -> Cell:
        if place.space in (SLOT, PACKET):
            return (place.rank, place.space, place.at, epoch % 2)
        if f.in_place and place.space == IN:
            place = MemoryPlace(place.rank, OUT, place.at + int(f.collective.place[place.rank]))
        return (place.rank, place.space, place.at, turn)

    def touch(self, r: int, cell: Cell, writes: bool, clock: Clock, by: tuple[int, ...]) -> CellState:
        """Note an access; raises where one before it is not known to be over."""
        state = self.cells[cell]
        # A reader of packets sees by their flags that they have come.
        before = [state.written, *state.read.items()] if writes else [state.written] if cell[1] != PACKET else []
        for rank, time in before:
            same = rank == r and time == self.time[r] and state.by == by
            if rank >= 0 and not same and clock[rank] < time:
                kind = ("input", "output", "slot", "packet slot")[cell[1]]
                raise self.error(
                    f"race: rank {r} {self.where[r]} {'writes' if writes else 'reads'} {kind} {cell[2]} of rank "
                    f"{cell[0]}, where rank {rank} may still be at work"
                )
        if writes:
            state.written, state.by, state.read = (r, self.time[r]), by, {}
        else:
            state.read[r] = max(state.read.get(r, 0), self.time[r])
            state.by = by
        return state

    def step(self, r: int, launch: int, f: Fused, step: FusedStep, turn: int, epoch: int) -> Waiting:
        self.time[r] += 1
        for number, item in enumerate(step.items):
            yield from self.item(r, launch, f, item, step.finish, turn, epoch, (self.time[r], number))
            yield lambda: True

    def item(
        self, r: int, launch: int, f: Fused, item: FusedItem, finish: bool, turn: int, epoch: int, by: tuple[int, int]
    ) -> Waiting:
        clock, found = list(self.clock[r]), []
        for place in item.sources:
            cell = self.cell(f, place, turn, epoch)
            if place.space == PACKET:
                self.where[r] = f"waits for packet slot {place.at} in {f.name}"
                yield partial(self.has_packet, cell, epoch)
                clock = list(map(max, clock, self.cells[cell].clock))
            found.append(self.touch(r, cell, False, clock, by).content)
        parts = frozenset[int]().union(*(s.parts for s in found if s is not None))
        whole = [s for s in found if s is not None and s.launch == launch and s.chunk == item.chunk]
        if len(whole) != len(found) or len(parts) != sum(len(s.parts) for s in whole):
            raise self.error(f"rank {r} {self.where[r]} makes chunk {item.chunk} of {found}")
        done = finish or any(s.finished for s in whole)
        for place in item.targets:
            state = self.touch(r, self.cell(f, place, turn, epoch), True, clock, by)
            state.content = Symbol(launch=launch, chunk=item.chunk, parts=parts, finished=done)
            if place.space == PACKET:
                state.epoch, state.clock = epoch, tuple(clock)
        self.learned[r].append(clock)
