# SPDX-License-Identifier: Apache-2.0
"""`Staged`: a program cut where its messages leave a host, so that each stage stays inside hosts or goes between them.

GPUs of one host run a stage inside it as one kernel, which must not wait for a network. So a program of several hosts
runs in stages: those inside, in which every host has a program of its own ranks, and those between hosts, which are one
program of all ranks. Every stage is a verified program of a collective of its own; what a rank has after one is kept,
and the next one says which of it it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives import ALL_PARTS, Collective
from ..errors import Infeasible, InvalidInput, VerificationError
from .ir import Program, take_rows
from .lower_order import event_order

INPUT = -1
MAX_STAGES = 64
Ints = NDArray[np.int64]
Slot = tuple[int, int]
"""(rank, chunk)"""
Made = dict[Slot, frozenset[int]]
"""What a leg leaves in the slots that it writes: which of its inputs' masks of parts were added."""


class Source(NamedTuple):
    """Where a value lies on its rank: in the output of a stage, or (`INPUT`) in the input of the whole."""

    stage: int
    position: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Leg:
    """One program of a stage, with where each of its inputs lies."""

    program: Program
    ranks: tuple[int, ...]
    """Which rank of the whole each rank of the program is."""
    reads: tuple[tuple[Source, ...], ...]
    """For each of its ranks: what is in its input, by position."""

    @cached_property
    def units(self) -> int:
        """The chunks of the largest buffer of any rank: as many chunks as `count` is said to have."""
        c = self.program.collective
        return max(int(np.diff(ptr).max(initial=0)) for ptr in (c.in_ptr, c.out_ptr))

    def sizes(self, rank: int) -> tuple[int, int]:
        """The chunks of the input and of the output of one of its ranks."""
        c = self.program.collective
        return len(c.inputs(rank)), len(c.outputs(rank))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What happens between two crossings of host boundaries: a leg for each host that has something to do, or one."""

    network: bool
    legs: tuple[Leg, ...]

    def leg_of(self, rank: int) -> tuple[Leg, int] | None:
        """The leg that a rank takes part in, and its rank there."""
        return next(((leg, leg.ranks.index(rank)) for leg in self.legs if rank in leg.ranks), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A program in stages; `results` says where each rank finds what belongs in its output, by position."""

    name: str
    collective: Collective
    hosts: tuple[int, ...]
    stages: tuple[Stage, ...]
    results: tuple[tuple[Source, ...], ...]

    @property
    def network_stages(self) -> int:
        """How often it goes between hosts."""
        return sum(stage.network for stage in self.stages)

    def verify(self) -> None:
        """Prove that the stages, one behind the other, do what the collective asks; raises `VerificationError`.

        Every leg is proved by itself. Then what its outputs are made of is put together from what its inputs were:
        each part of the result must be there once.
        """
        c = self.collective
        held: dict[tuple[int, Source], tuple[int, int]] = {}
        for rank in range(c.num_ranks):
            for at in range(int(c.in_ptr[rank]), int(c.in_ptr[rank + 1])):
                source = Source(INPUT, at - int(c.in_ptr[rank]))
                held[rank, source] = int(c.in_chunk[at]), 1 << int(c.in_part[at])
        for number, stage in enumerate(self.stages):
            for leg in stage.legs:
                self._follow(number, stage, leg, held)
        for rank, found in enumerate(self.results):
            first = int(c.out_ptr[rank])
            for at, source in enumerate(found):
                want = int(c.out_chunk[first + at]), sum(1 << part for part in c.parts_of(first + at))
                if held.get((rank, source)) != want:
                    raise VerificationError(f"{self.name}: rank {rank} o[{at}] is not what stage {source.stage} left")
            if len(found) != int(c.out_ptr[rank + 1]) - first:
                raise VerificationError(f"{self.name}: rank {rank} has {len(found)} results")

    def _follow(self, number: int, stage: Stage, leg: Leg, held: dict[tuple[int, Source], tuple[int, int]]) -> None:
        """What the outputs of a leg are made of."""
        leg.program.verify()
        c, near = leg.program.collective, {self.hosts[rank] for rank in leg.ranks}
        ends = leg.program.src, leg.program.dst
        crosses = [self.hosts[leg.ranks[a]] != self.hosts[leg.ranks[b]] for a, b in zip(*ends, strict=True)]
        if not all(crosses) if stage.network else len(near) > 1:
            raise VerificationError(f"{self.name}: stage {number} has messages that belong in another one")
        tokens: dict[Slot, tuple[int, int]] = {}
        for local, rank in enumerate(leg.ranks):
            for at, source in enumerate(leg.reads[local]):
                entry = int(c.in_ptr[local]) + at
                key = int(c.in_chunk[entry]), int(c.in_part[entry])
                if (rank, source) not in held or tokens.setdefault(key, held[rank, source]) != held[rank, source]:
                    raise VerificationError(f"{self.name}: stage {number} takes what rank {rank} does not have")
        for local, rank in enumerate(leg.ranks):
            for at, chunk in enumerate(c.outputs(local).tolist()):
                made = [tokens[chunk, part] for part in c.parts_of(int(c.out_ptr[local]) + at)]
                mask = sum(parts for _, parts in made)
                if len({of for of, _ in made}) > 1 or mask.bit_count() != sum(m.bit_count() for _, m in made):
                    raise VerificationError(f"{self.name}: stage {number} adds a part twice on rank {rank}")
                held[rank, Source(number, at)] = made[0][0], mask


def cut(program: Program, hosts: Sequence[int]) -> Staged:
    """Cut a program at the boundaries of hosts.

    Args:
        program: A program; it is verified first.
        hosts: The host of each of its ranks.

    Returns:
        The stages, proved to do the same.

    Raises:
        InvalidInput: There are not as many hosts as ranks.
        Infeasible: Messages inside hosts and between them wait for each other in a circle, or take too many turns.
        VerificationError: The program is wrong.

    >>> from stretto.algorithms import algorithm
    >>> staged = cut(algorithm("hierarchical", "all_reduce", 8, dims=(4, 2)), [0, 0, 0, 0, 1, 1, 1, 1])
    >>> [stage.network for stage in staged.stages]
    [False, True, False]
    """
    program.verify()
    if len(hosts) != program.collective.num_ranks:
        raise InvalidInput(f"hosts: must be {program.collective.num_ranks}, one for each rank, not {len(hosts)}")
    names = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    numbered = np.array([names[name] for name in hosts], np.int64)
    stage = _stage_of_each(program, numbered)
    order = event_order(program, 2)
    if order is None:
        raise Infeasible(f"{program.name}: its messages cannot be ordered with FIFOs of depth 2")
    staged = _Cutter(program, numbered, stage, order).run()
    staged.verify()
    return staged


def _stage_of_each(p: Program, hosts: Ints) -> Ints:
    """The stage of each transfer, counted so that odd ones go between hosts; as few as can be."""
    far = hosts[p.src] != hosts[p.dst]
    each = np.arange(p.num_transfers)
    before = np.concatenate([p.after, p.gate]).astype(np.int64)
    behind = np.concatenate([np.repeat(each, np.diff(p.after_ptr)), np.repeat(each, np.diff(p.gate_ptr))])
    turn = (far[before] != far[behind]).astype(np.int64)
    early = _longest(far.astype(np.int64), before, behind, turn, p.name)
    last = int(early.max(initial=0))
    # Merge from the end in the same way: a step that no other waits for can go with the last of its kind.
    room = (last - far) % 2
    late = last - _longest(room.astype(np.int64), behind, before, turn, p.name)
    return early if len(np.unique(early)) <= len(np.unique(late)) else late


def _longest(level: Ints, before: Ints, behind: Ints, turn: Ints, name: str) -> Ints:
    while True:
        raised = level.copy()
        np.maximum.at(raised, behind, level[before] + turn)
        if np.array_equal(raised, level):
            return level
        if raised.max() > MAX_STAGES:
            raise Infeasible(f"{name}: messages inside hosts and between them take over {MAX_STAGES} turns")
        level = raised


class _Cutter:
    """Runs a program once on symbols, stage by stage."""

    def __init__(self, program: Program, hosts: Ints, stage: Ints, order: Ints) -> None:
        self.p, self.hosts, self.stage, self.order = program, hosts, stage, order
        c = program.collective
        self.source: dict[Slot, Source] = {}
        self.parts: dict[Slot, int] = {}
        for rank in range(c.num_ranks):
            for at in range(int(c.in_ptr[rank]), int(c.in_ptr[rank + 1])):
                slot = rank, int(c.in_chunk[at])
                self.source[slot] = Source(INPUT, at - int(c.in_ptr[rank]))
                self.parts[slot] = 1 << int(c.in_part[at])
        self.wanted = {(rank, int(chunk)) for rank in range(c.num_ranks) for chunk in c.outputs(rank)}
        self.chunks = [program.chunks_of(t).tolist() for t in range(program.num_transfers)]
        self.numbers = np.unique(stage).tolist()
        self.read_in = [self._read_by(number) for number in self.numbers]

    def _read_by(self, number: int) -> set[Slot]:
        found: set[Slot] = set()
        for t in np.flatnonzero(self.stage == number).tolist():
            found |= {(int(self.p.src[t]), chunk) for chunk in self.chunks[t]}
            if self.p.reduce[t]:
                found |= {(int(self.p.dst[t]), chunk) for chunk in self.chunks[t]}
        return found

    def run(self) -> Staged:
        p, c = self.p, self.p.collective
        stages: list[Stage] = []
        for number, name in enumerate(self.numbers):
            taken = np.flatnonzero(self.stage == name)
            network = bool(name % 2)
            later = set(self.wanted).union(*self.read_in[number + 1 :])
            host = self.hosts[p.src[taken]]
            groups = [taken] if network else [taken[host == one] for one in np.unique(host)]
            last = number + 1 == len(self.numbers) and not network
            legs = [self._leg(number, group, network=network, later=later, last=last) for group in groups]
            for leg, outputs, made in legs:
                self._keep(number, leg.ranks, outputs, made)
            stages.append(Stage(network=network, legs=tuple(leg for leg, _, _ in legs)))
        results = tuple(
            tuple(self.source[rank, chunk] for chunk in c.outputs(rank).tolist()) for rank in range(c.num_ranks)
        )
        hosts = tuple(int(host) for host in self.hosts)
        return Staged(name=p.name, collective=c, hosts=hosts, stages=tuple(stages), results=results)

    def _leg(
        self, number: int, taken: NDArray[np.intp], *, network: bool, later: set[Slot], last: bool
    ) -> tuple[Leg, list[list[int]], Made]:
        """The program of some transfers, the chunks of its outputs, and what it leaves in the slots that it writes."""
        c = self.p.collective
        reads, made = self._simulate(taken)
        host = self.hosts[self.p.src[taken[0]]]
        ranks = tuple(r for r in range(c.num_ranks) if network or self.hosts[r] == host)
        writers = {rank for rank, _ in made}
        inputs: list[list[int]] = []
        outputs: list[list[int]] = []
        for rank in ranks:
            ends = c.outputs(rank).tolist()
            given = {chunk for r, chunk in reads if r == rank}
            if last and rank in writers:
                # The last kernel also puts what was there before where it belongs.
                given |= {chunk for chunk in ends if (rank, chunk) not in made}
                outputs.append(ends)
            else:
                outputs.append(sorted(chunk for r, chunk in made if r == rank and (r, chunk) in later))
            inputs.append([chunk for _, chunk in sorted((self.source[rank, chunk], chunk) for chunk in given)])
        used = sorted({chunk for row in (*inputs, *outputs) for chunk in row})
        collective = self._collective(ranks, inputs, outputs, used, made)
        leg = Leg(
            program=self._program(f"{self.p.name}/{number}", collective, taken, ranks, used),
            ranks=ranks,
            reads=tuple(
                tuple(self.source[rank, chunk] for chunk in row) for rank, row in zip(ranks, inputs, strict=True)
            ),
        )
        return leg, outputs, made

    def _simulate(self, taken: NDArray[np.intp]) -> tuple[set[Slot], Made]:
        """Which slots are read before they are written, and what is written."""
        p, count = self.p, self.p.num_transfers
        events = sorted((int(self.order[e]), int(e)) for t in taken.tolist() for e in (t, count + t))
        reads: set[Slot] = set()
        made: Made = {}
        sent: dict[int, list[frozenset[int]]] = {}

        def value(slot: Slot) -> frozenset[int]:
            if slot in made:
                return made[slot]
            reads.add(slot)
            return frozenset([self.parts[slot]])

        for _, event in events:
            t = event % count
            if event < count:
                sent[t] = [value((int(p.src[t]), chunk)) for chunk in self.chunks[t]]
                continue
            for chunk, parts in zip(self.chunks[t], sent.pop(t), strict=True):
                slot = int(p.dst[t]), chunk
                made[slot] = value(slot) | parts if p.reduce[t] else parts
        return reads, made

    def _collective(
        self, ranks: tuple[int, ...], inputs: list[list[int]], outputs: list[list[int]], used: list[int], made: Made
    ) -> Collective:
        """What a leg has to do, in which a part is whatever its inputs hold of a chunk."""
        name = {chunk: at for at, chunk in enumerate(used)}
        given = [(rank, chunk) for rank, row in zip(ranks, inputs, strict=True) for chunk in row]
        taken = [(rank, chunk) for rank, row in zip(ranks, outputs, strict=True) for chunk in row]
        masks: dict[int, list[int]] = {chunk: [] for chunk in used}
        for rank, chunk in given:
            if self.parts[rank, chunk] not in masks[chunk]:
                masks[chunk].append(self.parts[rank, chunk])
        for found in masks.values():
            # Sums are taken in the order of the lowest part, on whichever rank.
            found.sort(key=lambda mask: (mask & -mask, mask))
        sets: dict[tuple[int, ...], int] = {}
        out_set: list[int] = []
        for slot in taken:
            known = masks[slot[1]]
            whole = made[slot] if slot in made else frozenset([self.parts[slot]])
            parts = tuple(sorted(known.index(mask) for mask in whole))
            out_set.append(ALL_PARTS if len(parts) == len(known) else sets.setdefault(parts, len(sets)))
        units = max(len(row) for row in (*inputs, *outputs))
        return Collective(
            kind=f"{self.p.collective.kind}_stage", ranks=tuple(range(len(ranks))), num_chunks=len(used), chunks=1,
            in_ptr=_pointers(inputs), in_chunk=np.array([name[chunk] for _, chunk in given], np.int32),
            in_part=np.array([masks[slot[1]].index(self.parts[slot]) for slot in given], np.int32),
            out_ptr=_pointers(outputs), out_chunk=np.array([name[chunk] for _, chunk in taken], np.int32),
            out_set=np.array(out_set, np.int32), chunk_share=np.full(len(used), 1 / units),
            place=np.zeros(len(ranks), np.int64), part_sets=tuple(sets),
        )  # fmt: skip

    def _program(
        self, name: str, collective: Collective, taken: NDArray[np.intp], ranks: tuple[int, ...], used: list[int]
    ) -> Program:
        p = self.p
        number = np.full(p.num_transfers, -1, np.int64)
        number[taken] = np.arange(len(taken))
        chunk_name = np.full(p.collective.num_chunks, -1, np.int32)
        chunk_name[used] = np.arange(len(used))
        rank_name = np.full(p.collective.num_ranks, -1, np.int32)
        rank_name[list(ranks)] = np.arange(len(ranks))
        chunk_ptr, chunk = take_rows(p.chunk_ptr, p.chunk, taken)
        tables: dict[str, Any] = {}
        for key in ("after", "gate"):
            ptr, entries = take_rows(getattr(p, f"{key}_ptr"), getattr(p, key), taken)
            # What belongs to an earlier stage is over.
            kept = number[entries] >= 0
            tables[f"{key}_ptr"] = np.concatenate([[0], np.cumsum(kept)])[ptr]
            tables[key] = number[entries][kept].astype(np.int32)
        return Program(
            name=name, collective=collective, src=rank_name[p.src[taken]], dst=rank_name[p.dst[taken]],
            reduce=p.reduce[taken], chunk_ptr=chunk_ptr, chunk=chunk_name[chunk], lane=p.lane[taken],
            route=np.full(len(taken), -1, np.int32), **tables,
        )  # fmt: skip

    def _keep(self, number: int, ranks: tuple[int, ...], outputs: list[list[int]], made: Made) -> None:
        """What was written is now in the outputs of a leg, or nobody needs it."""
        for slot, masks in made.items():
            self.parts[slot] = sum(masks)
            self.source.pop(slot, None)
        for rank, row in zip(ranks, outputs, strict=True):
            for at, chunk in enumerate(row):
                self.source[rank, chunk] = Source(number, at)


def _pointers(rows: list[list[int]]) -> Ints:
    return np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
