# SPDX-License-Identifier: Apache-2.0
"""Schedules as real `Program`s: every message of every device, verified, and simulated link by link.

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
from ..collectives import COLLECTIVES
from ..errors import InvalidInput
from ..programs.ir import Program
from ..simulator import Timeline
from .messages import Ints, before_in_window, beginnings
from .model import AG, RS
from .schedule import DimSchedule

UNITS = 256
MAX_MOVES = 1 << 24
"""The most pieces that all devices send together; for more, use `dimensions.simulate`, where one device stands for
all."""


def quantized(schedule: DimSchedule, *, units: int = UNITS) -> DimSchedule:
    """The schedule with shares rounded to multiples of ``1 / units`` (even multiples where a ring needs two halves)."""
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
    """The number of pieces that all devices send together in the schedule's program; memory and time grow with it."""
    count = math.prod(dim.size for dim in schedule.dims)
    payload = replace(schedule, dims=tuple(replace(dim, header_bytes=0.0) for dim in schedule.dims)).stages.wire_bytes
    return round(float(payload.sum()) / schedule.nbytes * units * count**2)


def program(schedule: DimSchedule, *, units: int = UNITS, in_place: bool = False, window: int | None = None) -> Program:
    """Make the schedule's messages between all devices.

    Device ``c0 + d0 (c1 + d1 (c2 + ...))`` has coordinates c. Stages begin in the schedule's `order`, or else in the
    order in which they do with any number of them in flight.

    Args:
        schedule: The schedule; its dimensions do not reduce in the network.
        units: Shares are rounded to multiples of ``1 / units``; at least one unit per chunk (two where there are
            rings).
        in_place: Whether input and output share memory.
        window: The most stages of a dimension in progress at a time, >= 1; None for any number. A stage then begins on
            a device when the stage so many turns before it has only its last round left to send there.

    Returns:
        The program, not verified yet.

    Raises:
        InvalidInput: Switches reduce, `units` does not fit, or there would be more than `MAX_MOVES` pieces.
    """
    if any(dim.in_network for dim in schedule.dims):
        raise InvalidInput("dims: a Program cannot say yet that switches reduce; without in_network it can")
    schedule = quantized(schedule, units=units)
    sizes = [dim.size for dim in schedule.dims]
    count = math.prod(sizes)
    if (made := moves(schedule, units=units)) > MAX_MOVES:
        raise InvalidInput(f"units: {units} pieces of each of {count} devices are {made} moves, over {MAX_MOVES}")
    messages = _Messages(schedule, units)
    rows = beginnings(schedule)
    for position, row in enumerate(rows.tolist()):
        messages.add(position, row)
    pieces = units * count if schedule.collective == "all_reduce" else units
    collective = COLLECTIVES[schedule.collective](count, chunks=pieces, in_place=in_place)
    plain = messages.steps.program(f"dims {schedule.name} {'x'.join(map(str, sizes))}", collective)
    return _waiting(plain, *messages.turns(plain, before_in_window(schedule.stages.dim[rows], window)))


def half(schedule: DimSchedule, kind: str) -> DimSchedule:
    """The reduce-scatter or the all-gather of an all-reduce."""
    chunks = (
        replace(chunk, all_gather=()) if kind == RS else replace(chunk, reduce_scatter=()) for chunk in schedule.chunks
    )
    return replace(schedule, collective=kind, chunks=tuple(chunks))


def mirrored_schedule(schedule: DimSchedule) -> DimSchedule:
    """The opposite half with time running backwards."""
    chunks = tuple(
        replace(chunk, reduce_scatter=chunk.all_gather[::-1], all_gather=chunk.reduce_scatter[::-1])
        for chunk in schedule.chunks
    )
    return replace(schedule, collective=AG if schedule.collective == RS else RS, chunks=chunks)


def backwards(found: Program, run: Timeline) -> Program:
    """The opposite half: every message in the other direction, the last first, on one lane to keep that order."""
    kind = AG if found.collective.kind == RS else RS
    collective = COLLECTIVES[kind](found.collective.num_ranks, chunks=found.collective.chunks)
    step = np.empty(found.num_transfers, np.int64)
    step[np.argsort(-run.end_us, kind="stable")] = np.arange(found.num_transfers)
    turned = Program.from_steps(
        found.name, collective, src=found.dst, dst=found.src, chunk=found.chunk, chunk_ptr=found.chunk_ptr, step=step,
        reduce=kind == RS, lane=0,
    )  # fmt: skip
    return _waiting(turned, step[found.after], step[_waiters(found)])


def joined(first: Program, second: Program, units: int) -> Program:
    """Join two halves to an all-reduce; each piece goes on to the second half as soon as its own sums are ready.

    Args:
        first: The reduce-scatter.
        second: The all-gather.
        units: The pieces of each block in both.

    Returns:
        The all-reduce.
    """
    count = first.collective.num_ranks
    both = (first, second)
    block, piece = np.divmod(np.concatenate([each.chunk for each in both]), units)
    whole = Program.from_steps(
        first.name, COLLECTIVES["all_reduce"](count, chunks=units * count),
        src=np.concatenate([each.src for each in both]), dst=np.concatenate([each.dst for each in both]),
        chunk=block + piece * count,
        chunk_ptr=np.concatenate([first.chunk_ptr, first.chunk_ptr[-1] + second.chunk_ptr[1:]]),
        step=np.arange(first.num_transfers + second.num_transfers),
        reduce=np.repeat([True, False], [first.num_transfers, second.num_transfers]),
        lane=np.concatenate([each.lane for each in both]),
    )  # fmt: skip
    shift = first.num_transfers
    return _waiting(
        whole,
        np.concatenate([_waiters(first), _waiters(second) + shift]),
        np.concatenate([first.after, second.after.astype(np.int64) + shift]),
    )


def _waiters(program: Program) -> Ints:
    """The transfer that each entry of `after` belongs to."""
    return np.repeat(np.arange(program.num_transfers), np.diff(program.after_ptr))


def _waiting(program: Program, waiter: Ints, awaited: Ints) -> Program:
    """The program in which some transfers wait for others, too."""
    if not len(waiter):
        return program
    count = program.num_transfers
    old = _waiters(program) * count + program.after
    owner, after = np.divmod(np.union1d(old, waiter.astype(np.int64) * count + awaited), count)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=count))])
    return program.replace(after_ptr=ptr, after=after.astype(np.int32))


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
        self.tags: list[Ints] = []

    def add(self, position: int, row: int) -> None:
        """Add the messages of one stage, in all lines of devices along its dimension."""
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
            # Half of the pieces goes round in the other direction, so that both links of every device are used.
            half = len(pieces) // 2
            ways = [(rounds, pieces[:half]), (_mirrored(rounds, self.sizes[dim]), pieces[half:])]
        for side, (way, some) in enumerate(ways):
            self._add(way, some, dim, fixed, position * self.longest, reduce=reduce)
            lines = math.prod(self.sizes) // self.sizes[dim]
            for at, (src, _, _) in enumerate(way):
                tag = [position * self.longest + at, position, side, at, len(way)]
                self.tags.append(np.broadcast_to(tag, (len(src) * lines, len(tag))))

    def _add(
        self, rounds: Iterable[Round], pieces: NDArray[np.int64], dim: int, fixed: set[int], first: int, *, reduce: bool
    ) -> None:
        others = [d for d in range(len(self.sizes)) if d != dim]
        places = {d: np.arange(self.sizes[d]) * self.strides[d] for d in others}
        line = sums(places[d] for d in others)
        # A device handles the blocks whose coordinates equal its own in the dimensions of `fixed` (already reduced, or
        # not gathered yet); in other dimensions their coordinates take all values.
        agreeing = sums(places[d] * (d in fixed) for d in others)
        free = sums(places[d] for d in others if d not in fixed)
        for at, (src, dst, blocks) in enumerate(rounds):
            mine = (blocks[:, :, None] * self.strides[dim] + free).reshape(len(src), 1, -1)
            block = (agreeing[:, None] + mine)[:, :, :, None] * self.block + pieces * self.piece
            self.steps.add(
                src=src[:, None] * self.strides[dim] + line, dst=dst[:, None] * self.strides[dim] + line,
                step=first + at, chunk=block.reshape(len(src), len(line), -1), reduce=reduce, lane=at,
            )  # fmt: skip

    def turns(self, program: Program, ahead: Ints) -> tuple[Ints, Ints]:
        """The first messages of stages that wait for their turn, and for each the message that it waits for.

        That message is the last but one that the sender receives of the stage `ahead` in the same direction: what the
        sender has left to send of that stage is then asked for at the same moment, and goes first.
        """
        if not np.any(ahead >= 0):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        tags = np.concatenate(self.tags)
        position, way, at, rounds = tags[np.argsort(tags[:, 0], kind="stable"), 1:].T
        ready = np.full((len(ahead), 2, math.prod(self.sizes)), -1, np.int64)
        last_but_one = np.flatnonzero(at == rounds - 2)
        ready[position[last_but_one], way[last_but_one], program.dst[last_but_one]] = last_but_one
        first = np.flatnonzero((at == 0) & (ahead[position] >= 0))
        awaited = ready[ahead[position[first]], way[first], program.src[first]]
        return first[awaited >= 0], awaited[awaited >= 0]


def _mirrored(rounds: Iterable[Round], size: int) -> list[Round]:
    return [((-src) % size, (-dst) % size, (-blocks) % size) for src, dst, blocks in rounds]
