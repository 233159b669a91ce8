"""MSCCL++ execution plans out: FIFO messages become one-sided puts with signals and credits.

Every connection of the streams gets a channel pair of its own, used by the sender for "data is there" and by
the receiver for "you may write again". A message goes through a ring of slots in the receiver's scratch, or
with `zero_copy` straight to where it belongs, if nothing else can touch that place before it is announced
free. Dependencies inside a rank become counting semaphores, one for each pair of threadblocks.
`docs/mscclpp.md` says what the format asks for and why the plans look the way they do.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from ...errors import InvalidInput, unknown
from .. import lowered as lo
from ..lowered import Lowered

NAMES = {
    "all_gather": "allgather",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce_scatter": "reducescatter",
}
MAX_OPS = 64
"""Operations the executor runs in one threadblock; longer streams are continued in a further one."""
MAX_CHANNELS_PER_OP = 8
MAX_SEMAPHORES_PER_OP = 16
MAX_THREADBLOCKS = 80
"""Threadblocks spin until their turn, so all of a rank's must be resident: one per SM, 80 on the smallest GPU."""
MAX_SIZE = 2**64 - 1

log = logging.getLogger(__name__)


def dumps(
    lowered: Lowered,
    *,
    hosts: Sequence[int] | None = None,
    fifo_depth: int = 2,
    zero_copy: bool = False,
    max_threadblocks: int = MAX_THREADBLOCKS,
    min_message_size: int = 0,
    max_message_size: int = MAX_SIZE,
) -> str:
    """The JSON execution plan of instruction streams.

    ``hosts[r]`` is the host of rank r: memory channels inside a host, port channels between hosts (without
    it, memory channels everywhere). `fifo_depth` messages of a connection may be under way. With `zero_copy`
    peers write into each other's user buffers where that is provably safe; the executor then needs those
    buffers at the same offset of their allocation on every rank. Raises `InvalidInput` where the format or
    the executor cannot take the streams.
    """
    name = _check_collective(lowered.collective)
    ranks = lowered.collective.num_ranks
    if hosts is not None and len(hosts) != ranks:
        raise InvalidInput(f"hosts: must name the host of each of the {ranks} ranks, not {len(hosts)}")
    for key, value, low in (("fifo_depth", fifo_depth, 1), ("max_threadblocks", max_threadblocks, 1)):
        if value < low:
            raise InvalidInput(f"{key}: must be >= {low}, not {value}")
    if not 0 <= min_message_size <= max_message_size <= MAX_SIZE:
        raise InvalidInput(
            f"min_message_size, max_message_size: must be 0 <= min <= max < 2^64, "
            f"not {min_message_size} and {max_message_size}"
        )
    if lowered.protocol != "Simple":
        log.info("%s: protocol %s becomes Simple, the one plans are written for", lowered.name, lowered.protocol)
    streams = _Streams(lowered, hosts)
    streams.order()
    streams.plan_connections(fifo_depth, zero_copy)
    scratch = streams.place_slots()
    gpus = []
    for rank in range(ranks):
        blocks = streams.emit(rank)
        if len(blocks) > max_threadblocks:
            raise InvalidInput(
                f"rank {rank}: {len(blocks)} threadblocks are more than max_threadblocks {max_threadblocks} "
                f"({len(streams.blocks[rank])} streams, at most {MAX_OPS} operations each)"
            )
        gpus.append(_render(streams, rank, blocks, scratch[rank]))
    plan: dict[str, Any] = {
        "name": lowered.name,
        "collective": name,
        "protocol": "Simple",
        "inplace": lowered.collective.in_place,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": min_message_size,
        "max_message_size": max_message_size,
    }
    if lowered.collective.root >= 0:
        plan["root"] = lowered.collective.root
    return json.dumps(plan, indent=1) + "\n"


def _check_collective(collective: Collective) -> str:
    c = collective
    if c.kind not in NAMES:
        raise unknown("collective for MSCCL++", c.kind, NAMES)
    if np.ptp(c.chunk_share) > 1e-12:
        raise InvalidInput("chunk_share: MSCCL++ cuts buffers into equal chunks; these differ in size")
    standard: dict[str, Callable[[], Collective]] = {
        "all_gather": lambda: AllGather(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "all_reduce": lambda: AllReduce(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "all_to_all": lambda: AllToAll(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "broadcast": lambda: Broadcast(c.ranks, root=c.root, chunks=c.chunks, in_place=c.in_place),
        "reduce_scatter": lambda: ReduceScatter(c.ranks, chunks=c.chunks, in_place=c.in_place),
    }
    if c != standard[c.kind]():
        raise InvalidInput(f"collective: its buffers are not laid out as MSCCL++ lays out {NAMES[c.kind]}")
    return NAMES[c.kind]


class Span(NamedTuple):
    """Consecutive chunks of one of a rank's buffers."""

    buffer: str
    at: int
    count: int

    def overlaps(self, other: Span) -> bool:
        """Whether both hold a chunk in common."""
        return self.buffer == other.buffer and self.at < other.at + other.count and other.at < self.at + self.count


@dataclass(eq=False, slots=True)
class _Step:
    """One instruction, its places in the canonical names of the rank's memory."""

    rank: int
    block: int
    at: int
    op: int
    src: Span
    dst: Span
    dep: tuple[int, int] | None
    incoming: tuple[_Connection, int] | None = None
    outgoing: tuple[_Connection, int] | None = None
    acquires: bool = False
    releases: list[int] = field(default_factory=list)
    """Threadblocks that wait for this step."""
    before: list[int] = field(default_factory=list)
    """How many steps of each threadblock of the rank are surely done when this one starts."""
    bounce: bool = False
    """A port reads the source later than the step ends, and something may overwrite it: send a copy."""

    def __str__(self) -> str:
        return f"rank {self.rank} threadblock {self.block} step {self.at}"

    def accesses(self) -> Iterator[tuple[Span, bool]]:
        """The places it touches, and whether it writes them."""
        if lo.READS_SRC[self.op]:
            yield self.src, False
        if lo.WRITES_DST[self.op]:
            yield self.dst, True


@dataclass(eq=False, slots=True)
class _Connection:
    """The messages from one rank to another on one channel."""

    src: int
    dst: int
    channel: int
    port: bool
    sends: list[_Step] = field(default_factory=list)
    receives: list[_Step] = field(default_factory=list)
    direct: bool = False
    ready: list[int] = field(default_factory=list)
    """If direct, where in its stream the receiver may announce the place of each message free: 2q after step
    q-1, 2q+1 after step q has waited for its dependency."""
    slots: int = 0
    slot_size: int = 0
    in_base: int = 0
    out_base: int = 0

    @property
    def kind(self) -> str:
        return "port" if self.port else "memory"

    @property
    def acknowledged(self) -> bool:
        """Whether the sender waits at the end until the last message was used."""
        return self.port or not self.direct

    def waits_before(self, j: int) -> bool:
        """Whether message j may only be sent after one more signal of the receiver."""
        if self.direct:
            return j == 0 or self.ready[j] > self.ready[j - 1]
        return j >= self.slots

    def credits_after(self, j: int) -> bool:
        """Whether the receiver signals once it has used message j."""
        last = len(self.sends) - 1
        return (j == last and self.acknowledged) or (not self.direct and j + self.slots <= last)

    def target(self, j: int) -> Span:
        """Where on the receiver message j is put."""
        return self.receives[j].dst if self.direct else self._slot(self.in_base, j)

    def bounce_slot(self, j: int) -> Span:
        """Where on the sender the copy of message j waits for its port."""
        return self._slot(self.out_base, j)

    def _slot(self, base: int, j: int) -> Span:
        return Span("s", base + j % self.slots * self.slot_size, _sent(self.sends[j]).count)


def _sent(step: _Step) -> Span:
    """The local place a message comes from (for a reduction that stores nothing, one as large)."""
    return step.src if lo.READS_SRC[step.op] else step.dst


class _Streams:
    """The instruction streams with what the translation works out about them."""

    def __init__(self, lowered: Lowered, hosts: Sequence[int] | None) -> None:
        self.collective = lowered.collective
        self.scratch = [int(s) for s in lowered.scratch]
        self.blocks: list[list[list[_Step]]] = [[] for _ in range(self.collective.num_ranks)]
        self.connections: dict[tuple[int, int, int], _Connection] = {}
        self._hosts = hosts
        self._owners: dict[tuple[int, int, int, bool], int] = {}
        for b in range(len(lowered.tb_rank)):
            self._read_block(lowered, b)
        for c in self.connections.values():
            if [_sent(s).count for s in c.sends] != [r.dst.count or r.src.count for r in c.receives]:
                raise InvalidInput(
                    f"connection {c.src} -> {c.dst} channel {c.channel}: {len(c.sends)} messages are sent and "
                    f"{len(c.receives)} received, or their sizes differ"
                )

    def _read_block(self, lowered: Lowered, b: int) -> None:
        rank, channel = int(lowered.tb_rank[b]), int(lowered.tb_channel[b])
        mine: list[_Step] = []
        self.blocks[rank].append(mine)
        block = len(self.blocks[rank]) - 1
        for k in range(int(lowered.tb_ptr[b]), int(lowered.tb_ptr[b + 1])):
            op, count = int(lowered.op[k]), int(lowered.count[k])
            where = f"rank {rank} threadblock {block} step {len(mine)}"
            empty = Span("s", 0, 0)
            src, dst = empty, empty
            if lo.READS_SRC[op]:
                src = self._span(where, rank, int(lowered.src_buf[k]), int(lowered.src_off[k]), count)
            if lo.WRITES_DST[op]:
                dst = self._span(where, rank, int(lowered.dst_buf[k]), int(lowered.dst_off[k]), count)
            if lo.READS_SRC[op] and lo.WRITES_DST[op] and src != dst and src.overlaps(dst):
                raise InvalidInput(f"{where}: source and destination overlap without being the same")
            dep = (int(lowered.dep_tb[k]), int(lowered.dep_step[k]))
            step = _Step(rank, block, len(mine), op, src, dst, dep if dep[0] >= 0 else None)
            mine.append(step)
            if lo.RECEIVES[op]:
                c = self._connection(where, "recv", int(lowered.tb_recv[b]), rank, channel, b)
                step.incoming = (c, len(c.receives))
                c.receives.append(step)
            if lo.SENDS[op]:
                c = self._connection(where, "send", rank, int(lowered.tb_send[b]), channel, b)
                step.outgoing = (c, len(c.sends))
                c.sends.append(step)

    def _connection(self, where: str, end: str, src: int, dst: int, channel: int, b: int) -> _Connection:
        if not (0 <= min(src, dst) and max(src, dst) < self.collective.num_ranks and src != dst):
            raise InvalidInput(f"{where}: the threadblock owns no connection to {end} on")
        if self._owners.setdefault((src, dst, channel, end == "send"), b) != b:
            raise InvalidInput(f"{where}: connection {src} -> {dst} channel {channel} has two threadblocks to {end}")
        port = self._hosts is not None and self._hosts[src] != self._hosts[dst]
        return self.connections.setdefault((src, dst, channel), _Connection(src, dst, channel, port))

    def _span(self, where: str, rank: int, buffer: int, at: int, count: int) -> Span:
        """A place, under one name where two mean the same memory: the one all ranks can address alike."""
        c = self.collective
        sizes = (len(c.inputs(rank)), len(c.outputs(rank)), self.scratch[rank])
        name = lo.BUFFERS[buffer]
        if count < 1 or at < 0 or at + count > sizes[buffer]:
            raise InvalidInput(f"{where}: {name}[{at}:{at + count}] does not exist; {name} has {sizes[buffer]} chunks")
        if c.in_place and buffer != lo.SCRATCH:
            place = int(c.place[rank])
            canonical = lo.OUTPUT if c.kind == "all_gather" else lo.INPUT
            if buffer != canonical:
                at += place if canonical == lo.OUTPUT else -place
            name = lo.BUFFERS[canonical]
        return Span(name, at, count)

    def order(self) -> None:
        """Find what each step knows to be done, and which dependencies are needed for that."""
        for rank, blocks in enumerate(self.blocks):
            done = [0] * len(blocks)
            clock = [[0] * len(blocks) for _ in blocks]
            after: dict[tuple[int, int], list[int]] = {}
            moved = True
            while moved:
                moved = False
                for b, steps in enumerate(blocks):
                    while done[b] < len(steps):
                        step = steps[done[b]]
                        if step.dep is not None:
                            tb, at = step.dep
                            if not (tb < len(blocks) and 0 <= at < len(blocks[tb])):
                                raise InvalidInput(f"{step}: depends on threadblock {tb} step {at}, which is not there")
                            if done[tb] <= at:
                                break
                            if clock[b][tb] <= at:
                                step.acquires = True
                                blocks[tb][at].releases.append(b)
                                clock[b] = [max(x, y) for x, y in zip(clock[b], after[tb, at], strict=True)]
                        step.before = clock[b].copy()
                        done[b] = clock[b][b] = step.at + 1
                        after[b, step.at] = clock[b].copy()
                        moved = True
            for b, steps in enumerate(blocks):
                if done[b] < len(steps):
                    raise InvalidInput(f"{steps[done[b]]}: its dependencies go round in a circle (rank {rank})")

    def plan_connections(self, fifo_depth: int, zero_copy: bool) -> None:
        """Decide for each connection: slots or direct, and prove that nobody waits for ever."""
        touching: list[dict[tuple[str, int], list[tuple[_Step, bool]]]] = [defaultdict(list) for _ in self.blocks]
        if zero_copy:
            for step in self.steps():
                for span, writes in step.accesses():
                    for at in range(span.at, span.at + span.count):
                        touching[step.rank][span.buffer, at].append((step, writes))
        for c in self.connections.values():
            c.slots = min(fifo_depth, len(c.sends))
            c.slot_size = max(_sent(s).count for s in c.sends)
            for send in c.sends if c.port else ():
                send.bounce = not zero_copy or not lo.WRITES_DST[send.op] and send.op != lo.SEND
                send.bounce = send.bounce or _overwritten_later(send, touching[c.src])
            c.ready = _ready_points(c, touching[c.dst]) if zero_copy else []
            c.direct = bool(c.ready) and not any(s.bounce for s in c.sends)
        while stuck := self._stuck():
            guilty = [c for c in self.connections.values() if c.direct and stuck & {id(s) for s in c.sends}]
            if not guilty:
                first = next(s for s in self.steps() if id(s) in stuck)
                raise InvalidInput(f"fifo_depth: the streams wait for each other for ever at {fifo_depth}, from {first}")
            for c in guilty:
                c.direct = False

    def steps(self) -> Iterator[_Step]:
        """All steps, rank by rank."""
        return (step for blocks in self.blocks for steps in blocks for step in steps)

    def _stuck(self) -> set[int]:
        """The steps that lie on a circle of waiting (or between two)."""
        edges = [(a, b) for a, b in self._waits()]
        left = {id(s) for s in self.steps()}
        for tail, head in ((0, 1), (1, 0)):
            count: dict[int, int] = dict.fromkeys(left, 0)
            follow: dict[int, list[int]] = defaultdict(list)
            for edge in edges:
                a, b = id(edge[tail]), id(edge[head])
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

    def _waits(self) -> Iterator[tuple[_Step, _Step]]:
        """Every pair (a, b) where step b waits for step a to end."""
        for blocks in self.blocks:
            for steps in blocks:
                yield from zip(steps, steps[1:], strict=False)
                yield from ((blocks[s.dep[0]][s.dep[1]], s) for s in steps if s.acquires and s.dep)
        for c in self.connections.values():
            yield from zip(c.sends, c.receives, strict=True)
            if not c.direct:
                yield from zip(c.receives, c.sends[c.slots :], strict=False)
                continue
            stream = self.blocks[c.dst][c.receives[0].block]
            for send, point in zip(c.sends, c.ready, strict=True):
                if point >= 2:
                    yield stream[point // 2 - 1], send
                gate = stream[point // 2] if point % 2 else None
                if gate is not None and gate.acquires and gate.dep:
                    yield self.blocks[c.dst][gate.dep[0]][gate.dep[1]], send

    def place_slots(self) -> list[int]:
        """Lay the slots out behind each rank's own scratch; the scratch chunks of each rank."""
        size = self.scratch.copy()
        for _, c in sorted(self.connections.items()):
            if not c.direct:
                c.in_base = size[c.dst]
                size[c.dst] += c.slots * c.slot_size
            if any(s.bounce for s in c.sends):
                c.out_base = size[c.src]
                size[c.src] += c.slots * c.slot_size
        return size

    def emit(self, rank: int) -> list[_Block]:
        """The threadblocks of one rank, none longer than the executor takes."""
        semaphores: dict[tuple[int, int], int] = {}
        for steps in self.blocks[rank]:
            for step in steps:
                for waiter in step.releases:
                    semaphores.setdefault((step.block, waiter), len(semaphores))
        announce: dict[tuple[int, int], list[_Connection]] = defaultdict(list)
        for c in self.connections.values():
            if c.direct and c.dst == rank:
                for point in sorted(set(c.ready)):
                    announce[c.receives[0].block, point].append(c)
        pieces: list[_Block] = []
        fresh = len(semaphores)
        for b, steps in enumerate(self.blocks[rank]):
            block = _Block()
            for step in steps:
                block.signal(*announce[b, 2 * step.at])
                if step.acquires and step.dep:
                    block.acquire(semaphores[step.dep[0], b])
                block.signal(*announce[b, 2 * step.at + 1])
                _translate(step, block)
                for waiter in step.releases:
                    block.release(semaphores[b, waiter])
            for c in {id(s.outgoing[0]): s.outgoing[0] for s in steps if s.outgoing}.values():
                if c.acknowledged:
                    block.wait(c)
            cut = block.cut(fresh)
            fresh += len(cut) - 1
            pieces += cut
        self.semaphores = fresh
        return pieces or [_Block()]


def _overwritten_later(send: _Step, touching: dict[tuple[str, int], list[tuple[_Step, bool]]]) -> bool:
    span = _sent(send)
    return any(
        writes and other is not send and send.before[other.block] <= other.at
        for at in range(span.at, span.at + span.count)
        for other, writes in touching[span.buffer, at]
    )


def _ready_points(c: _Connection, touching: dict[tuple[str, int], list[tuple[_Step, bool]]]) -> list[int]:
    """When the places of each message are free for the sender to write; [] if that is not certain."""
    points: list[int] = []
    for receive in c.receives:
        if receive.op not in (lo.RECV, lo.RECV_COPY_SEND):
            return []
        need: dict[int, int] = {}
        for at in range(receive.dst.at, receive.dst.at + receive.dst.count):
            for other, _ in touching[receive.dst.buffer, at]:
                if other is receive or other.before[receive.block] > receive.at:
                    continue
                if receive.before[other.block] <= other.at:
                    return []
                need[other.block] = max(need.get(other.block, 0), other.at + 1)
        points.append(max(_earliest(c, receive, need), points[-1] if points else 0))
    return points


def _earliest(c: _Connection, receive: _Step, need: dict[int, int]) -> int:
    """The first point of the receiver's stream at which the steps of `need` are done."""
    own = need.pop(receive.block, 0)
    stream = [s for r in c.receives for s in ()] or None
    del stream
    return own


class _Block:
    """The operations of one threadblock, with a `nop` (all threads meet) wherever one is needed."""
