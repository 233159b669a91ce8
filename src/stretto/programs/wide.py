# SPDX-License-Identifier: Apache-2.0
"""Wide steps: a program as a sequence of steps that read several places, add them up, and write several places.

A GPU reads and writes its peers' memory, so a message needs no send and no receive: where seven messages are added
to one chunk, one step of the receiver reads all eight places, adds them and writes the sum to every rank that wants it.
`widen` makes such a sequence of a `Program`. Carried out one after the other the steps do what the program does; two
steps that touch the same place (and one of them writes) have to keep that order, all others may run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import InvalidInput
from .ir import Program
from .lower_memory import BUFFER, BufferLayout
from .lowered import BUFFERS
from .wide_order import Atom, atoms_of
from .wide_streams import PACKET, Cell, WideStep, divide, shared_pieces, split_packets

__all__ = ["PACKET", "Cell", "WideProgram", "WideStep", "widen"]

SCRATCH = "s"
LAST = 1 << 30
"""The level of copies to places that hold, until everything has been sent, what another rank wants."""


@dataclass(frozen=True, kw_only=True)
class WideProgram:
    """The steps of a program, in an order in which they may be carried out one after the other."""

    program: Program
    steps: tuple[WideStep, ...]
    stream: tuple[int, ...]
    """The stream of each piece: steps of different streams touch no place in common."""
    scratch: tuple[int, ...]
    """The plain scratch chunks of each rank."""
    slots: tuple[int, ...]
    """The packet slots of each rank, in chunks."""
    cut: tuple[int, ...] = ()
    """With halves: the level from which on the steps of each piece only copy."""

    def phases(self, stream: int) -> list[list[WideStep]]:
        """The steps of a stream: all of them, or with halves first those that add up, then those that copy."""
        mine = [step for step in self.steps if self.stream[step.piece] == stream]
        if not self.cut:
            return [mine]
        late = [step.level >= self.cut[step.piece] for step in mine]
        halves = [[step for step, copies in zip(mine, late, strict=True) if copies == half] for half in (False, True)]
        return [half for half in halves if half] or [[]]

    @property
    def streams(self) -> int:
        """The number of streams."""
        return max(self.stream, default=0) + 1


@dataclass
class _Memory:
    """Where the chunks of each rank lie, and how much scratch has been given out."""

    inputs: list[dict[int, Cell]]
    outputs: list[dict[int, Cell]]
    scratch: list[int]
    slots: list[int]
    in_place: bool

    @classmethod
    def of(cls, program: Program) -> _Memory:
        c = program.collective
        sides = []
        for ptr, chunk, place in zip(
            (c.in_ptr, c.out_ptr), (c.in_chunk, c.out_chunk), BufferLayout(collective=c).places(), strict=True
        ):
            found: list[dict[int, Cell]] = []
            for r in range(c.num_ranks):
                mine = slice(int(ptr[r]), int(ptr[r + 1]))
                pairs = zip(chunk[mine].tolist(), place[mine].tolist(), strict=True)
                found.append({q: (r, BUFFERS[at // BUFFER], at % BUFFER) for q, at in pairs})
            sides.append(found)
        ranks = c.num_ranks
        return cls(sides[0], sides[1], [0] * ranks, [0] * ranks, c.in_place)

    def scratch_cell(self, rank: int, count: int) -> Cell:
        at = self.scratch[rank]
        self.scratch[rank] += count
        return rank, SCRATCH, at

    def slot(self, rank: int, count: int) -> Cell:
        at = self.slots[rank]
        self.slots[rank] += count
        return rank, PACKET, at

    def follows(self, first: int, second: int) -> bool:
        """Whether the second chunk lies directly behind the first wherever either is in a buffer."""
        for table in (*self.inputs, *self.outputs):
            a, b = table.get(first), table.get(second)
            if (a is None) != (b is None) or (a and b and (a[1] != b[1] or a[2] + 1 != b[2])):
                return False
        return True

    def shared(self, rank: int, chunk: int) -> bool:
        """Whether the output place of a chunk is the input place of another."""
        mine = self.outputs[rank].get(chunk)
        return self.in_place and any(cell == mine and other != chunk for other, cell in self.inputs[rank].items())


def widen(
    program: Program,
    *,
    packets: bool = False,
    streams: int = 1,
    apart: bool = False,
    halves: bool = False,
    pull: bool = False,
    longest: int = 0,
) -> WideProgram:
    """Make wide steps of a program, which is verified first.

    Chunks that lie side by side and travel alike become one piece. A sum reads its sources where they are, unless two
    ranks would overwrite what the other still has to read: such messages go through scratch.

    Args:
        program: The program.
        packets: Let every message go through a slot of the receiver, in packets that carry flags.
        streams: Into how many streams without anything in common the pieces are divided, at most.
        apart: With packets, divide also what a rank sends from what it takes, and one peer's from another's: packets
            keep their order by themselves, so only steps that touch the same plain memory stay together.
        halves: Keep steps that add up apart from those that copy the result, so that each half can be a loop.
        pull: Let the receiver of a copy read it where it is, and the sender of a part of a sum put it into scratch of
            the receiver: every step then has one peer, and none waits for another's link.
        longest: The most chunks of a piece; 0: as many as travel alike.

    Returns:
        The steps.

    Raises:
        InvalidInput: The program has helpers, chunks of different size, or no stream is asked for; or `apart` is asked
            for without packets, or halves or `pull` with them.
    """
    c = program.collective
    if halves and packets:
        raise InvalidInput("halves: packets cannot be sent in a loop; choose protocol Simple")
    if pull and packets:
        raise InvalidInput("pull: packets are sent; choose protocol Simple")
    if streams < 1:
        raise InvalidInput(f"streams: must be >= 1, not {streams}")
    if apart and not packets:
        raise InvalidInput("apart: only packets keep their order by themselves; choose protocol LL")
    if c.helpers or np.ptp(c.chunk_share) > 1e-12:
        raise InvalidInput("program: wide steps need equal chunks, and no helpers")
    program.verify()
    memory = _Memory.of(program)
    atoms = atoms_of(program)
    pieces = _pieces(atoms, memory, longest)
    steps: list[WideStep] = []
    cuts: list[int] = []
    for number, (chunk, count) in enumerate(pieces):
        made = _Maker(number, chunk, count, memory, packets, pull, c.num_ranks).steps(atoms[chunk])
        cuts.append(max((a.write for a in atoms[chunk] if a.reduce), default=-1) + 1 if halves else LAST)
        for late in (False, True):
            steps += _merged([step for step in made if (step.level >= cuts[-1]) == late])
    # Within a level, sends come before the steps that wait for them.
    steps.sort(key=lambda step: (step.level, step.staged))
    if apart:
        steps, group = split_packets(steps)
    else:
        group = shared_pieces(pieces, memory.inputs, memory.outputs) if memory.in_place else list(range(len(pieces)))
    return WideProgram(
        program=program,
        steps=tuple(steps),
        stream=divide(steps, group, streams),
        scratch=tuple(memory.scratch),
        slots=tuple(memory.slots),
        cut=tuple(cuts) if halves else (),
    )


def _pieces(atoms: Sequence[Sequence[Atom]], memory: _Memory, longest: int = 0) -> list[tuple[int, int]]:
    """Runs of chunks that travel alike and lie side by side everywhere, as (first chunk, count)."""
    found: list[tuple[int, int]] = []
    for chunk, mine in enumerate(atoms):
        if found and mine == atoms[chunk - 1] and memory.follows(chunk - 1, chunk):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((chunk, 1))
    if not longest:
        return found
    return [(first + at, count) for first, run in found for at, count in _parts(run, -(-run // longest))]


def _parts(count: int, parts: int) -> list[tuple[int, int]]:
    """Where each of some parts begins, and its length: lengths differ by one at most."""
    ends = [count * (k + 1) // parts for k in range(parts)]
    return [(first, end - first) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def runs_of(program: Program) -> list[int]:
    """How many chunks each run has that travel alike and lie side by side: what `widen` makes pieces of."""
    return [count for _, count in _pieces(atoms_of(program), _Memory.of(program))]


@dataclass
class _Maker:
    """Makes the steps of one piece, level by level: all reads of a level come before its writes."""

    piece: int
    chunk: int
    count: int
    memory: _Memory
    packets: bool
    pull: bool
    ranks: int
    home: dict[int, Cell] = field(default_factory=dict)
    work: dict[int, Cell] = field(default_factory=dict)
    made: list[WideStep] = field(default_factory=list)

    def steps(self, atoms: Sequence[Atom]) -> list[WideStep]:
        m = self.memory
        for r in range(self.ranks):
            if self.chunk in m.inputs[r]:
                self.home[r] = m.inputs[r][self.chunk]
        written = {a.dst for a in atoms}
        for r in sorted(self.home.keys() - written):
            self._keep(r, 0)
        levels = sorted({level for a in atoms for level in (a.read, a.write)})
        slot: dict[int, Cell] = {}
        for level in levels:
            writing = [k for k, a in enumerate(atoms) if a.write == level]
            staged = self._staged(atoms, level)
            for k in staged:
                a = atoms[k]
                slot[k] = m.slot(a.dst, self.count) if self.packets else m.scratch_cell(a.dst, self.count)
                self._add(a.src, level, [self.home[a.src]], [slot[k]])
            before = self.home.copy()
            for k in self._ordered(atoms, [k for k in writing if k not in slot]):
                self._move(atoms[k], level, before[atoms[k].src])
            for k in writing:
                if k in slot:
                    self._take(atoms[k], level, slot[k])
        last = max(levels, default=0) + 1
        for r in sorted(written):
            self._keep(r, LAST if m.shared(r, self.chunk) else last)
        return self.made

    def _add(self, rank: int, level: int, sources: list[Cell], targets: list[Cell], *, staged: bool = False) -> None:
        self.made.append(WideStep(rank, self.piece, self.count, sources, targets, level, staged))

    def _keep(self, rank: int, level: int) -> None:
        """Copy a result to its place in the output, if it is not there."""
        place = self.memory.outputs[rank].get(self.chunk)
        if place is not None and place != self.home[rank]:
            self._add(rank, level, [self.home[rank]], [place])

    def _target(self, rank: int) -> Cell:
        """Where a rank keeps the piece once it has been written there."""
        if rank not in self.work:
            place = self.memory.outputs[rank].get(self.chunk)
            # In place, what is still to be sent may lie where the result has to go.
            late = place is None or self.memory.shared(rank, self.chunk)
            self.work[rank] = self.memory.scratch_cell(rank, self.count) if late or place is None else place
        return self.work[rank]

    def _move(self, a: Atom, level: int, source: Cell) -> None:
        """A sum reads its source where it is; a copy is put where it is wanted, or read by whoever wants it."""
        target = self._target(a.dst)
        if a.reduce:
            self._add(a.dst, level, [self.home[a.dst], source], [target])
        else:
            self._add(a.dst if self.pull else a.src, level, [source], [target])
        self.home[a.dst] = target

    def _take(self, a: Atom, level: int, slot: Cell) -> None:
        target = self._target(a.dst)
        self._add(a.dst, level, [self.home[a.dst], slot] if a.reduce else [slot], [target], staged=True)
        self.home[a.dst] = target

    def _staged(self, atoms: Sequence[Atom], level: int) -> list[int]:
        """The messages read at a level that go through slots."""
        reading = [k for k, a in enumerate(atoms) if a.read == level]
        if self.packets:
            return reading
        late = [k for k in reading if atoms[k].write != level or (self.pull and atoms[k].reduce)]
        stuck = set(reading) - set(late)
        for forward in (True, False):
            moved = True
            while moved:
                moved = False
                for k in sorted(stuck):
                    mine = self._before(atoms, k, stuck) if forward else self._behind(atoms, k, stuck)
                    if not mine:
                        stuck.discard(k)
                        moved = True
        return sorted({*late, *stuck})

    def _before(self, atoms: Sequence[Atom], k: int, among: Iterable[int]) -> bool:
        """Whether another message must come before this one: it reads what this one writes."""
        target = self._target(atoms[k].dst)
        return any(j != k and self.home[atoms[j].src] == target for j in among)

    def _behind(self, atoms: Sequence[Atom], k: int, among: Iterable[int]) -> bool:
        return any(j != k and self.home[atoms[k].src] == self._target(atoms[j].dst) for j in among)

    def _ordered(self, atoms: Sequence[Atom], those: list[int]) -> list[int]:
        """Messages of one level, those that read a place before those that write it."""
        left, order = list(those), []
        while left:
            free = [k for k in left if not self._before(atoms, k, left)]
            assert free, "messages on a circle go through slots"
            order += free
            left = [k for k in left if k not in free]
        return order


def _merged(steps: list[WideStep]) -> list[WideStep]:
    """Merge sums of one place, and copies of a result into the step that makes it, wherever order allows it."""
    kept: list[WideStep] = []
    for step in steps:
        for i in range(len(kept) - 1, -1, -1):
            if kept[i].rank == step.rank and _absorb(kept, i, step):
                break
        else:
            kept.append(step)
    return kept


def _absorb(kept: list[WideStep], i: int, step: WideStep) -> bool:
    """Try to make a later step a part of an earlier one of the same rank."""
    first, between = kept[i], kept[i + 1 :]
    copies = len(step.sources) == 1 and not step.staged and step.level < LAST
    if copies and (step.sources[0] in first.targets or (first.sources == step.sources and not first.staged)):
        clash = any(k.touches(step.targets) or k.writes(step.sources) for k in between)
        if not clash:
            first.targets += step.targets
        return not clash
    if len(step.sources) < 2 or len(first.sources) < 2 or step.staged != first.staged:
        return False
    own, others = step.sources[0], step.sources[1:]
    if first.targets != [own] or step.targets != [own]:
        return False
    if not any(k.touches([own]) or k.writes(others) for k in between):
        first.sources += others
        return True
    if not any(k.touches([own]) or k.writes(first.sources) for k in between):
        step.sources[:1] = first.sources
        del kept[i]
        kept.append(step)
        return True
    return False
