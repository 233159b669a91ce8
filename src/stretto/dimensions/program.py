"""A schedule as a real `Program`: every message of every device, verified, and simulated link by link.

The order in which stages begin is kept by the connections: round r of a stage uses lane r of each pair of devices, a
connection carries its messages in program order, and the program lists stages in the order in which they begin. Stages
therefore overlap round by round, and no device can take them in another order than its partner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..algorithms.base import Steps
from ..algorithms.hierarchical import Round, phases, scheme_of_each, sums
from ..cluster import Cluster
from ..collectives import COLLECTIVES
from ..errors import InvalidInput
from ..programs.ir import Program
from ..simulator import Timeline
from ..simulator import simulate as simulate_links
from .model import AG, RS
from .schedule import DimSchedule
from .simulation import MAX_IN_FLIGHT, simulate

UNITS = 256
MAX_MOVES = 1 << 24
"""Pieces that all devices send together: beyond, the one-representative model is what to use."""


def quantized(schedule: DimSchedule, *, units: int = UNITS) -> DimSchedule:
    """The same with shares that are multiples of ``1 / units`` (even ones, where a ring needs two halves)."""
    least = 2 if any(dim.kind == "ring" and dim.size > 2 for dim in schedule.dims) else 1
    parts = units // least
    if parts * least != units or parts < len(schedule.chunks):
        raise InvalidInput(f"units: must be a multiple of {least} and >= {least * len(schedule.chunks)}, not {units}")
    wanted = np.array([chunk.share * parts for chunk in schedule.chunks])
    counts = np.maximum(1, np.floor(wanted).astype(np.int64))
    while (left := parts - int(counts.sum())) != 0:
        step = 1 if left > 0 else -1
        behind = np.where((counts > 1) | (step > 0), step * (wanted - counts), -np.inf)
        counts[int(np.argmax(behind))] += step
    chunks = [
        replace(chunk, share=int(count) * least / units) for chunk, count in zip(schedule.chunks, counts, strict=True)
    ]
    return replace(schedule, chunks=tuple(chunks))


def moves(schedule: DimSchedule, *, units: int = UNITS) -> int:
    """How many pieces all devices send together in the schedule's program: what memory and time it takes."""
    count = math.prod(dim.size for dim in schedule.dims)
    payload = replace(schedule, dims=tuple(replace(dim, header_bytes=0.0) for dim in schedule.dims)).stages.wire_bytes
    return round(float(payload.sum()) / schedule.nbytes * units * count**2)


def program(schedule: DimSchedule, *, units: int = UNITS, in_place: bool = False) -> Program:
    """The schedule's messages between all devices; device ``c0 + d0 (c1 + d1 (c2 + ...))`` has coordinates c.

    Shares are rounded to multiples of ``1 / units``. Stages begin in the schedule's `order`, or else in the order in
    which they do with any number of them in flight.
    """
    if any(dim.in_network for dim in schedule.dims):
        raise InvalidInput("dims: a Program cannot say yet that switches reduce; without in_network it can")
    schedule = quantized(schedule, units=units)
    sizes = [dim.size for dim in schedule.dims]
    count = math.prod(sizes)
    if (made := moves(schedule, units=units)) > MAX_MOVES:
        raise InvalidInput(f"units: {units} pieces of each of {count} devices are {made} moves, over {MAX_MOVES}")
    messages = _Messages(schedule, units)
    rows = _beginnings(schedule)
    for position, row in enumerate(rows.tolist()):
        messages.add(position, row)
    pieces = units * count if schedule.collective == "all_reduce" else units
    collective = COLLECTIVES[schedule.collective](count, chunks=pieces, in_place=in_place)
    return messages.steps.program(f"dims {schedule.name} {'x'.join(map(str, sizes))}", collective)


def best_program(schedule: DimSchedule, cluster: Cluster, *, units: int = UNITS) -> tuple[Program, Timeline]:
    """The program, and its run on the links of a cluster, with the order that does best there.

    A link serves messages in the order in which they ask and knows no priorities; so the orders in which stages begin
    with different numbers of them in flight are tried. So are, for an all-gather, the best reduce-scatter with time
    running backwards (and the other way round), and for an all-reduce the best of both one after the other.
    """
    schedule = quantized(replace(schedule, order=()), units=units)
    if schedule.collective == "all_reduce":
        halves = [_either(_half(schedule, kind), cluster, units)[0] for kind in (RS, AG)]
        joined = _joined(halves[0], halves[1], units)
        return min(
            _forwards(schedule, cluster, units), (joined, simulate_links(joined, cluster, nbytes=schedule.nbytes)),
            key=_time,
        )  # fmt: skip
    return _either(schedule, cluster, units)


def _time(found: tuple[Program, Timeline]) -> float:
    return found[1].total_us


def _forwards(schedule: DimSchedule, cluster: Cluster, units: int) -> tuple[Program, Timeline]:
    tried = {simulate(schedule, in_flight=k).enforced() for k in (1, 2, 3, 4, 8, 16, MAX_IN_FLIGHT)}
    programs = [program(each, units=units) for each in sorted(tried, key=lambda each: each.digest)]
    return min(((each, simulate_links(each, cluster, nbytes=schedule.nbytes)) for each in programs), key=_time)


def _either(schedule: DimSchedule, cluster: Cluster, units: int) -> tuple[Program, Timeline]:
    other = _mirrored_schedule(schedule)
    backwards = _backwards(*_forwards(other, cluster, units))
    run = simulate_links(backwards, cluster, nbytes=schedule.nbytes)
    return min(_forwards(schedule, cluster, units), (backwards, run), key=_time)


def _half(schedule: DimSchedule, kind: str) -> DimSchedule:
    chunks = (
        replace(chunk, all_gather=()) if kind == RS else replace(chunk, reduce_scatter=()) for chunk in schedule.chunks
    )
    return replace(schedule, collective=kind, chunks=tuple(chunks))


def _mirrored_schedule(schedule: DimSchedule) -> DimSchedule:
    chunks = tuple(
        replace(chunk, reduce_scatter=chunk.all_gather[::-1], all_gather=chunk.reduce_scatter[::-1])
        for chunk in schedule.chunks
    )
    return replace(schedule, collective=AG if schedule.collective == RS else RS, chunks=chunks)


def _backwards(found: Program, run: Timeline) -> Program:
    """The opposite half: every message the other way, the last first; one lane, so that links keep that order."""
    kind = AG if found.collective.kind == RS else RS
    collective = COLLECTIVES[kind](found.collective.num_ranks, chunks=found.collective.chunks)
    step = np.empty(found.num_transfers, np.int64)
    step[np.argsort(-run.end_us, kind="stable")] = np.arange(found.num_transfers)
    return Program.from_steps(
        found.name, collective, src=found.dst, dst=found.src, chunk=found.chunk, chunk_ptr=found.chunk_ptr, step=step,
        reduce=kind == RS, lane=0,
    )  # fmt: skip


def _joined(first: Program, second: Program, units: int) -> Program:
    """An all-reduce from its halves; pieces follow their own dependencies from one to the other."""
    count = first.collective.num_ranks
    both = (first, second)
    block, piece = np.divmod(np.concatenate([each.chunk for each in both]), units)
    return Program.from_steps(
        first.name, COLLECTIVES["all_reduce"](count, chunks=units * count),
        src=np.concatenate([each.src for each in both]), dst=np.concatenate([each.dst for each in both]),
        chunk=block + piece * count,
        chunk_ptr=np.concatenate([first.chunk_ptr, first.chunk_ptr[-1] + second.chunk_ptr[1:]]),
        step=np.arange(first.num_transfers + second.num_transfers),
        reduce=np.repeat([True, False], [first.num_transfers, second.num_transfers]),
        lane=np.concatenate([each.lane for each in both]),
    )  # fmt: skip


def _beginnings(schedule: DimSchedule) -> NDArray[np.int64]:
    """All stages in the order in which they begin."""
    run = simulate(schedule, in_flight=MAX_IN_FLIGHT)
    return np.lexsort((np.arange(len(run.start_us)), run.end_us, run.start_us))


class _Messages:
    def __init__(self, schedule: DimSchedule, units: int) -> None:
        self.schedule = schedule
        self.steps = Steps()
        self.sizes = [dim.size for dim in schedule.dims]
        self.strides = [math.prod(self.sizes[:d]) for d in range(len(self.sizes))]
        found, self.longest, _ = phases(
            "all_reduce", self.sizes, scheme_of_each(self.sizes, [dim.algorithm for dim in schedule.dims])
        )
        self.rounds = {(dim, reduce): rounds for dim, rounds, reduce in found}
        ends = np.rint(np.cumsum([chunk.share * units for chunk in schedule.chunks])).astype(np.int64)
        self.pieces = np.split(np.arange(units), ends[:-1])
        whole = schedule.collective == "all_reduce"
        self.block, self.piece = (1, math.prod(self.sizes)) if whole else (units, 1)

    def add(self, position: int, row: int) -> None:
        """One stage in all lines of devices along its dimension."""
        table = self.schedule.stages
        number = int(table.chunk[row])
        chunk = self.schedule.chunks[number]
        stage = row - int(table.chunk_ptr[number])
        dim = int(table.dim[row])
        reduce = stage < len(chunk.reduce_scatter)
        if reduce:
            fixed = set(chunk.reduce_scatter[:stage])
        else:
            fixed = set(chunk.all_gather[stage - len(chunk.reduce_scatter) + 1 :])
        pieces = self.pieces[number]
        rounds = self.rounds[dim, reduce]
        ways: list[tuple[list[Round], NDArray[np.int64]]] = [(rounds, pieces)]
        if self.schedule.dims[dim].kind == "ring" and self.sizes[dim] > 2:
            # Half goes round the other way, so that both links of every device are used.
            half = len(pieces) // 2
            ways = [(rounds, pieces[:half]), (_mirrored(rounds, self.sizes[dim]), pieces[half:])]
        for way, some in ways:
            self._add(way, some, dim, fixed, position * self.longest, reduce=reduce)

    def _add(
        self, rounds: Iterable[Round], pieces: NDArray[np.int64], dim: int, fixed: set[int], first: int, *, reduce: bool
    ) -> None:
        others = [d for d in range(len(self.sizes)) if d != dim]
        places = {d: np.arange(self.sizes[d]) * self.strides[d] for d in others}
        line = sums(places[d] for d in others)
        # Blocks in play agree with the device in the dimensions that are reduced (or not gathered yet), else are any.
        agreeing = sums(places[d] * (d in fixed) for d in others)
        free = sums(places[d] for d in others if d not in fixed)
        for at, (src, dst, blocks) in enumerate(rounds):
            mine = (blocks[:, :, None] * self.strides[dim] + free).reshape(len(src), 1, -1)
            block = (agreeing[:, None] + mine)[:, :, :, None] * self.block + pieces * self.piece
            self.steps.add(
                src=src[:, None] * self.strides[dim] + line, dst=dst[:, None] * self.strides[dim] + line,
                step=first + at, chunk=block.reshape(len(src), len(line), -1), reduce=reduce, lane=at,
            )  # fmt: skip


def _mirrored(rounds: Iterable[Round], size: int) -> list[Round]:
    return [((-src) % size, (-dst) % size, (-blocks) % size) for src, dst, blocks in rounds]
