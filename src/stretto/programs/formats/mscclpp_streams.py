# SPDX-License-Identifier: Apache-2.0
"""The analysis of instruction streams that precedes writing them as one-sided puts.

For each connection it decides whether messages go straight to their place on the receiver or through slots of its
scratch, and when the sender may write again; and it proves that no rank waits for ever. `mscclpp_json` writes the
result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...errors import InvalidInput
from .. import lowered as lo
from ..lowered import Lowered


@dataclass(frozen=True, slots=True)
class BufferSpan:
    """Consecutive chunks of one of a rank's buffers."""

    buffer: str
    at: int
    count: int

    def overlaps(self, other: BufferSpan) -> bool:
        """Whether both spans have a chunk in common.

        >>> BufferSpan("o", 0, 2).overlaps(BufferSpan("o", 1, 1)), BufferSpan("o", 0, 2).overlaps(BufferSpan("i", 1, 1))
        (True, False)
        """
        apart = self.at >= other.at + other.count or other.at >= self.at + self.count
        return self.buffer == other.buffer and not apart


NOWHERE = BufferSpan("s", 0, 0)


@dataclass(eq=False, slots=True)
class PlanInstruction:
    """One instruction; its places have the canonical names of the rank's memory."""

    rank: int
    block: int
    at: int
    op: int
    count: int
    src: BufferSpan = NOWHERE
    dst: BufferSpan = NOWHERE
    dep: tuple[int, int] | None = None
    incoming: tuple[Connection, int] | None = None
    outgoing: tuple[Connection, int] | None = None
    acquires: bool = False
    """Whether the step has to wait for its dependency (False where that is surely done already)."""
    releases: list[int] = field(default_factory=list)
    """The threadblocks of the rank that wait for this step."""
    before: list[int] = field(default_factory=list)
    """The number of steps of each threadblock of the rank that are surely done when this step starts."""
    bounce: bool = False
    """Whether the sent data must first be copied to a slot, because the port reads it after the step has ended."""

    def __str__(self) -> str:
        return f"rank {self.rank} threadblock {self.block} step {self.at}"

    @property
    def sent(self) -> BufferSpan:
        """The place of the sent data once the step is done (`rrs` stores it nowhere)."""
        return self.dst if lo.WRITES_DST[self.op] else self.src

    def accesses(self) -> Iterator[tuple[BufferSpan, bool]]:
        """The places that the step accesses, and whether it writes them."""
        if lo.READS_SRC[self.op]:
            yield self.src, False
        if lo.WRITES_DST[self.op]:
            yield self.dst, True


@dataclass(eq=False, slots=True)
class Connection:
    """The messages from one rank to another on one channel, and how they travel.

    The receiver signals at certain *points* of its stream that the sender may go on: point 2q is after step
    q-1, point 2q+1 is when step q has waited for its dependency. Message j waits for the signal of
    ``points[j]`` (-1: for none); points never go back, so messages with the same one share a signal.
    """

    src: int
    dst: int
    channel: int
    port: bool
    sends: list[PlanInstruction] = field(default_factory=list)
    receives: list[PlanInstruction] = field(default_factory=list)
    free: list[int | None] = field(default_factory=list)
    """The point from which the place of each message may be written; None where the message goes through a slot."""
    points: list[int] = field(default_factory=list)
    slot_of: list[int] = field(default_factory=list)
    """The slot that each message goes through; -1 where it goes straight to its place."""
    slot_size: int = 0
    in_base: int = 0
    out_base: int = 0

    @property
    def kind(self) -> str:
        """The type of the plan's channel: "memory" or "port"."""
        return "port" if self.port else "memory"

    @property
    def slots(self) -> int:
        """The number of slots of this connection."""
        return max(self.slot_of) + 1

    @property
    def acknowledged(self) -> bool:
        """Whether the sender must wait at the end until the last message was used.

        Slots must be empty before a next launch fills them, and a port may still be reading user memory.
        """
        return self.port or self.slots > 0

    def plan(self, fifo_depth: int) -> None:
        """Give each message its slot, if it needs one, and the point it waits for."""
        self.points, self.slot_of = [], []
        through_slots: list[PlanInstruction] = []
        for receive, free in zip(self.receives, self.free, strict=True):
            point = -1
            if free is not None:
                self.slot_of.append(-1)
                point = free
            else:
                self.slot_of.append(len(through_slots) % fifo_depth)
                through_slots.append(receive)
                if len(through_slots) > fifo_depth:
                    point = 2 * through_slots[-1 - fifo_depth].at + 2
            self.points.append(max(point, self.points[-1] if self.points else -1))
        self.slot_size = max((r.count for r in through_slots), default=0)

    def waits_before(self, j: int) -> bool:
        """Whether message j may only be sent after one more signal of the receiver."""
        return self.points[j] > (self.points[j - 1] if j else -1)

    def signals(self) -> list[int]:
        """The points of its stream at which the receiver signals."""
        last = 2 * self.receives[-1].at + 2
        return sorted({p for p in self.points if p >= 0}) + [last] * self.acknowledged

    def target(self, j: int) -> BufferSpan:
        """The place at the receiver that message j is put to."""
        return self.receives[j].dst if self.slot_of[j] < 0 else self._slot(self.in_base, j)

    def bounce_slot(self, j: int) -> BufferSpan:
        """The place at the sender where a copy of message j waits for the port."""
        return self._slot(self.out_base, j)

    def _slot(self, base: int, j: int) -> BufferSpan:
        return BufferSpan("s", base + self.slot_of[j] * self.slot_size, self.sends[j].count)


Touching = dict[tuple[str, int], list[tuple[PlanInstruction, bool]]]


class MscclppStreams:
    """The verified instruction streams of all ranks, with the results of the analysis."""

    def __init__(self, lowered: Lowered, hosts: Sequence[int] | None) -> None:
        self.collective = lowered.collective
        self.scratch = [int(s) for s in lowered.scratch]
        self.blocks: list[list[list[PlanInstruction]]] = [[] for _ in range(self.collective.num_ranks)]
        self.connections: dict[tuple[int, int, int], Connection] = {}
        self._hosts = hosts
        for b in range(len(lowered.tb_rank)):
            self._read_block(lowered, b)
        for blocks in self.blocks:
            _order(blocks)

    def _read_block(self, lowered: Lowered, b: int) -> None:
        rank, channel = int(lowered.tb_rank[b]), int(lowered.tb_channel[b])
        mine: list[PlanInstruction] = []
        self.blocks[rank].append(mine)
        for k in range(int(lowered.tb_ptr[b]), int(lowered.tb_ptr[b + 1])):
            op = int(lowered.op[k])
            step = PlanInstruction(rank, len(self.blocks[rank]) - 1, len(mine), op, int(lowered.count[k]))
            mine.append(step)
            if lowered.dep_tb[k] >= 0:
                step.dep = int(lowered.dep_tb[k]), int(lowered.dep_step[k])
            if lo.READS_SRC[op]:
                step.src = self._span(step, int(lowered.src_buf[k]), int(lowered.src_off[k]))
            if lo.WRITES_DST[op]:
                step.dst = self._span(step, int(lowered.dst_buf[k]), int(lowered.dst_off[k]))
            if step.src != step.dst and step.src.overlaps(step.dst):
                raise InvalidInput(f"{step}: source and destination overlap but are not the same")
            if lo.RECEIVES[op]:
                c = self._connection(int(lowered.tb_recv[b]), rank, channel)
                step.incoming = c, len(c.receives)
                c.receives.append(step)
            if lo.SENDS[op]:
                c = self._connection(rank, int(lowered.tb_send[b]), channel)
                step.outgoing = c, len(c.sends)
                c.sends.append(step)

    def _connection(self, src: int, dst: int, channel: int) -> Connection:
        port = self._hosts is not None and self._hosts[src] != self._hosts[dst]
        return self.connections.setdefault((src, dst, channel), Connection(src, dst, channel, port))

    def _span(self, step: PlanInstruction, buffer: int, at: int) -> BufferSpan:
        """The span of a place; in place, under the one of its two names that all ranks address alike."""
        if self.collective.in_place and buffer != lo.SCRATCH:
            shift = int(self.collective.place[step.rank])
            if self.collective.kind == "all_gather":
                return BufferSpan("o", at + shift if buffer == lo.INPUT else at, step.count)
            return BufferSpan("i", at - shift if buffer == lo.OUTPUT else at, step.count)
        return BufferSpan(lo.BUFFERS[buffer], at, step.count)

    def steps(self) -> Iterator[PlanInstruction]:
        """All steps, rank by rank."""
        return (step for blocks in self.blocks for steps in blocks for step in steps)

    def plan_connections(self, fifo_depth: int, zero_copy: bool) -> list[int]:
        """Decide how each connection works, prove that no step waits for ever, and lay out the slots.

        Returns the scratch chunks each rank needs.
        """
        touching: list[Touching] = [defaultdict(list) for _ in self.blocks]
        if zero_copy:
            for step in self.steps():
                for span, writes in step.accesses():
                    for at in range(span.at, span.at + span.count):
                        touching[step.rank][span.buffer, at].append((step, writes))
        for c in self.connections.values():
            for send in c.sends if c.port else ():
                unstored = send.op == lo.RECV_REDUCE_SEND
                send.bounce = not zero_copy or unstored or _overwritten_later(send, touching[c.src])
            stream = self.blocks[c.dst][c.receives[0].block]
            c.free = [
                _free_point(r, stream, touching[c.dst]) if zero_copy and not s.bounce else None
                for s, r in zip(c.sends, c.receives, strict=True)
            ]
            c.plan(fifo_depth)
        while stuck := self._stuck():
            # Waiting for a place that is announced late can close a circle of waiting; slots avoid that.
            late = [
                c
                for c in self.connections.values()
                if any(f is not None and id(s) in stuck for f, s in zip(c.free, c.sends, strict=True))
            ]
            if not late:
                first = next(s for s in self.steps() if id(s) in stuck)
                raise InvalidInput(
                    f"fifo_depth: with {fifo_depth} the streams wait for each other for ever, at {first}"
                )
            for c in late:
                c.free = [None] * len(c.sends)
                c.plan(fifo_depth)
        return self._place_slots()

    def _place_slots(self) -> list[int]:
        size = self.scratch.copy()
        for _, c in sorted(self.connections.items()):
            c.in_base = size[c.dst]
            size[c.dst] += c.slots * c.slot_size
            if any(s.bounce for s in c.sends):
                c.out_base = size[c.src]
                size[c.src] += c.slots * c.slot_size
        return size

    def _stuck(self) -> set[int]:
        """The steps that lie on a circle of waiting, or between two."""
        edges = [(id(a), id(b)) for a, b in self._waits()]
        left = {id(s) for s in self.steps()}
        for forward in (True, False):
            count = dict.fromkeys(left, 0)
            follow: dict[int, list[int]] = defaultdict(list)
            for a, b in edges if forward else ((b, a) for a, b in edges):
                if a in left and b in left:
                    follow[a].append(b)
                    count[b] += 1
            free = [s for s in left if count[s] == 0]
            while free:
                s = free.pop()
                left.discard(s)
                for t in follow[s]:
                    count[t] -= 1
                    if count[t] == 0:
                        free.append(t)
        return left

    def _waits(self) -> Iterator[tuple[PlanInstruction, PlanInstruction]]:
        """Every pair (a, b) where step b waits until step a is done."""
        for blocks in self.blocks:
            for steps in blocks:
                yield from pairwise(steps)
                yield from ((blocks[s.dep[0]][s.dep[1]], s) for s in steps if s.acquires and s.dep)
        for c in self.connections.values():
            yield from zip(c.sends, c.receives, strict=True)
            blocks = self.blocks[c.dst]
            stream = blocks[c.receives[0].block]
            for send, point in zip(c.sends, c.points, strict=True):
                if point >= 2:
                    yield stream[point // 2 - 1], send
                gate = stream[point // 2] if point > 0 and point % 2 else None
                if gate and gate.acquires and gate.dep:
                    yield blocks[gate.dep[0]][gate.dep[1]], send


def _order(blocks: list[list[PlanInstruction]]) -> None:
    """Work out which steps are surely done when each step of a rank starts, and which dependencies that needs."""
    clock = [[0] * len(blocks) for _ in blocks]
    after: list[list[list[int]]] = [[] for _ in blocks]
    moved = True
    while moved:
        moved = False
        for b, steps in enumerate(blocks):
            while len(after[b]) < len(steps):
                step = steps[len(after[b])]
                if step.dep is not None:
                    tb, at = step.dep
                    if len(after[tb]) <= at:
                        break
                    if clock[b][tb] <= at:
                        step.acquires = True
                        blocks[tb][at].releases.append(b)
                        clock[b] = [max(x, y) for x, y in zip(clock[b], after[tb][at], strict=True)]
                step.before = clock[b].copy()
                clock[b][b] += 1
                after[b].append(clock[b].copy())
                moved = True


def _overwritten_later(send: PlanInstruction, touching: Touching) -> bool:
    """Whether a step that is not surely done before the send may write to the data that is sent."""
    return any(
        writes and other is not send and send.before[other.block] <= other.at
        for at in range(send.sent.at, send.sent.at + send.count)
        for other, writes in touching[send.sent.buffer, at]
    )


def _free_point(receive: PlanInstruction, stream: list[PlanInstruction], touching: Touching) -> int | None:
    """The point from which only the sender accesses the place of a message; None if there is none for certain."""
    if receive.op not in (lo.RECV, lo.RECV_COPY_SEND):
        return None
    need = [0] * len(receive.before)
    for at in range(receive.dst.at, receive.dst.at + receive.count):
        for other, _ in touching[receive.dst.buffer, at]:
            if other is receive or other.before[receive.block] > receive.at:
                continue
            if receive.before[other.block] <= other.at:
                return None
            need[other.block] = max(need[other.block], other.at + 1)
    return _earliest(need, stream, receive)


def _earliest(need: list[int], stream: list[PlanInstruction], receive: PlanInstruction) -> int:
    """The first point of the stream at which `need` steps of each threadblock are known to be done."""
    known = [0] * len(need)
    for q in range(receive.at + 1):
        known[receive.block] = q
        for point, clock in ((2 * q, known), (2 * q + 1, stream[q].before)):
            if all(k >= n for k, n in zip(clock, need, strict=True)):
                return point
        known = stream[q].before.copy()
    raise AssertionError("what a step needs is known when it starts")
