# SPDX-License-Identifier: Apache-2.0
"""What a program computes, as values: an input, a copy of a value on another rank, or a sum on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..collectives import Collective
from ..errors import Infeasible
from .ir import Program
from .lower_order import event_order
from .lowered import COPY, INPUT, NOP, OUTPUT, READS_SRC, RECEIVES, REDUCE, SENDS, WRITES_DST, Lowered
from .streams import BufferMap, InstructionStreams

MAX_SOURCES = 32
"""The most values that one addition adds up."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One chunk's content on one rank: an input (no sources), a copy (one) or a sum (several sources)."""

    rank: int
    chunk: int
    parts: int
    """A bit mask of the parts that it holds."""
    sources: tuple[int, ...] = ()
    """Values by number; all lower than its own."""
    position: int = -1
    """The place of an input in the rank's input buffer; -1 for other values."""


Results = dict[tuple[int, int], int]
"""(rank, position in the output buffer) -> the value that belongs there."""


def values_of(program: Program | Lowered) -> tuple[list[Value], Results]:
    """Run a program once on symbols: its values in an order in which they can be computed, and what its outputs hold.

    Raises `VerificationError` where the program is wrong, and `Infeasible` where it cannot be ordered.
    """
    program.verify()
    return _of_program(program) if isinstance(program, Program) else _of_streams(program)


class _Book:
    """Values as they come up. A value that is already on a rank is not brought there again."""

    def __init__(self, collective: Collective) -> None:
        self.values: list[Value] = []
        self.brought: dict[tuple[int, int], int] = {}
        c = collective
        self.inputs: dict[tuple[int, int], int] = {}
        for rank in range(c.num_ranks):
            for position, at in enumerate(range(int(c.in_ptr[rank]), int(c.in_ptr[rank + 1]))):
                self.inputs[rank, position] = self.add(
                    Value(rank=rank, chunk=int(c.in_chunk[at]), parts=1 << int(c.in_part[at]), position=position)
                )

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def copy(self, value: int, rank: int) -> int:
        of = self.values[value]
        if of.rank == rank:
            return value
        if (value, rank) not in self.brought:
            self.brought[value, rank] = self.add(Value(rank=rank, chunk=of.chunk, parts=of.parts, sources=(value,)))
        return self.brought[value, rank]

    def sum(self, a: int, b: int, rank: int) -> int:
        parts = self.values[a].parts | self.values[b].parts
        return self.add(Value(rank=rank, chunk=self.values[a].chunk, parts=parts, sources=(a, b)))


def _of_program(p: Program) -> tuple[list[Value], Results]:
    c, count = p.collective, p.num_transfers
    position = event_order(p, 2)
    if position is None:
        raise Infeasible(f"{p.name}: its messages cannot be ordered with FIFOs of depth 2")
    book = _Book(c)
    held = {(rank, int(c.inputs(rank)[at])): value for (rank, at), value in book.inputs.items()}
    sent: dict[int, list[int]] = {}
    src, dst, reduce = p.src.tolist(), p.dst.tolist(), p.reduce.tolist()
    chunks = [p.chunk[a:b].tolist() for a, b in zip(p.chunk_ptr[:-1].tolist(), p.chunk_ptr[1:].tolist(), strict=True)]
    for event in np.argsort(position).tolist():
        if event < count:
            sent[event] = [held[src[event], chunk] for chunk in chunks[event]]
            continue
        t = event - count
        for chunk, value in zip(chunks[t], sent.pop(t), strict=True):
            key = dst[t], chunk
            held[key] = book.sum(held[key], value, dst[t]) if reduce[t] else book.copy(value, dst[t])
    ends = {(r, at): held[r, chunk] for r in range(c.num_ranks) for at, chunk in enumerate(c.outputs(r).tolist())}
    return book.values, ends


def _of_streams(x: Lowered) -> tuple[list[Value], Results]:
    c, streams, memory = x.collective, InstructionStreams.of(x), BufferMap.of(x)
    book = _Book(c)
    held = {int(memory.base[rank, INPUT]) + at: value for (rank, at), value in book.inputs.items()}
    sent: dict[int, list[int]] = {}
    source = memory.locate(streams.rank, x.src_buf, x.src_off).tolist()
    target = memory.locate(streams.rank, x.dst_buf, x.dst_off).tolist()
    for k in streams.order():
        op, rank, cells = int(x.op[k]), int(streams.rank[k]), range(int(x.count[k]))
        if op == NOP:
            continue
        come = sent.pop(int(streams.pop[k])) if RECEIVES[op] else []
        mine = [held[source[k] + i] for i in cells] if READS_SRC[op] else []
        if op == REDUCE:
            come = [held[target[k] + i] for i in cells]
        if come and mine:
            values = [book.sum(a, b, rank) for a, b in zip(come, mine, strict=True)]
        else:
            values = mine if op == COPY or not come else [book.copy(value, rank) for value in come]
        if WRITES_DST[op]:
            held |= {target[k] + i: values[i] for i in cells}
        if SENDS[op]:
            sent[int(streams.push[k])] = values
    base = memory.base[:, OUTPUT].tolist()
    ends = {(r, at): held[base[r] + at] for r in range(c.num_ranks) for at in range(len(c.outputs(r)))}
    return book.values, ends


def flattened(values: list[Value], results: Results, pulled: Callable[[Value], bool]) -> tuple[list[Value], Results]:
    """Make one addition of several where nobody else needs the sums between, and bring what it adds to its rank.

    A sum adds its sources in the order of their lowest part, so that all ranks that add the same get the same bits.
    What nothing needs is left out.

    Args:
        values: The values.
        results: What the outputs hold.
        pulled: Whether a value of another rank can be read there, so that no copy is brought.

    Returns:
        The values, numbered anew, and the results.
    """
    needed = sorted(_needed(values, results))
    uses = Counter(source for v in needed for source in values[v].sources) + Counter(results.values())
    flat: dict[int, tuple[int, ...]] = {}
    for v in needed:
        if len(values[v].sources) > 1:
            flat[v] = _flat(values, v, flat, uses)
    done: list[Value] = []
    number: dict[int, int] = {}
    brought: dict[tuple[int, int], int] = {}

    def bring(value: int, rank: int) -> int:
        if (value, rank) not in brought:
            done.append(replace(done[value], rank=rank, sources=(value,), position=-1))
            brought[value, rank] = len(done) - 1
        return brought[value, rank]

    for v in needed:
        value = values[v]
        if len(value.sources) == 1:
            number[v] = bring(number[value.sources[0]], value.rank)
            continue
        sources = [number[s] for s in flat.get(v, ())]
        here = [s if done[s].rank == value.rank or pulled(done[s]) else bring(s, value.rank) for s in sources]
        done.append(replace(value, sources=tuple(here)))
        number[v] = len(done) - 1
    return _renumbered(done, {key: number[v] for key, v in results.items()})


def _needed(values: list[Value], results: Mapping[tuple[int, int], int]) -> set[int]:
    needed = set(results.values())
    waiting = list(needed)
    while waiting:
        fresh = [s for s in values[waiting.pop()].sources if s not in needed]
        needed.update(fresh)
        waiting += fresh
    return needed


def _flat(values: list[Value], v: int, flat: dict[int, tuple[int, ...]], uses: Counter[int]) -> tuple[int, ...]:
    """What a sum adds up when sums of its own rank that only it needs are made in the same go."""
    adds: list[int] = []
    room = MAX_SOURCES - len(values[v].sources)
    for s in values[v].sources:
        inner = flat.get(s, ())
        if len(inner) > 1 and uses[s] == 1 and values[s].rank == values[v].rank and len(inner) <= room:
            adds += inner
            room -= len(inner)
        else:  # A copy that only this sum needs may be read where it comes from.
            adds.append(values[s].sources[0] if len(values[s].sources) == 1 and uses[s] == 1 else s)
    return tuple(sorted(adds, key=lambda s: (values[s].parts & -values[s].parts, s)))


def _renumbered(values: list[Value], results: Results) -> tuple[list[Value], Results]:
    """Leave out what no result needs."""
    kept = sorted(_needed(values, results))
    number = {v: at for at, v in enumerate(kept)}
    fresh = [replace(values[v], sources=tuple(number[s] for s in values[v].sources)) for v in kept]
    return fresh, {key: number[v] for key, v in results.items()}
