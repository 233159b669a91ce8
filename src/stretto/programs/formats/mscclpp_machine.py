# SPDX-License-Identifier: Apache-2.0
"""A machine that runs MSCCL++ operations: many threads, one-sided writes, and a race detector.

The machine stands in for the GPUs and has the freedom that they have. The threads of a threadblock run ahead of each
other and meet only at a `nop` or `barrier`; a data operation is split over all threads, a channel operation is done
by one thread; a port reads and writes some time after it was asked to; ranks launch the plan again as soon as they
have finished, with new data. Each seed is another interleaving. Vector clocks follow what synchronisation orders, so
two accesses that are not ordered are found even if the result happens to be right.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidInput, VerificationError

MAX_THREADS = 9500
"""The most threads: those of 16 ranks that run 64 threadblocks each, whose operations use 8 channels."""
MAX_CELLS = 1 << 24

Clock = NDArray[np.int32]
Data = NDArray[np.float64]


PACKETS = {
    "ppkt": ("l+", "k+"),
    "rppkt": ("k", "k+"),
    "cpkt": ("l", "k"),
    "upkt": ("k", "l"),
    "repkt": ("lk+", "l"),
    "respkt": ("lk+", "lk+"),
    "recpkt": ("lk+", "lk"),
    "recspkt": ("lk+", "lkk+"),
}
"""Which sources and destinations of these operations are packets (k), whose readers wait for the data's own flag."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive chunks in the memory of all ranks, or one slice of them."""

    at: int
    count: int
    part: int = 0
    parts: int = 1
    """The slice: number `part` of `parts` that are as equal as can be, as threadblock groups cut their work."""
    turn: int = 0
    turns: int = 1
    """The turns of a loop that divide the slice, of which this is number `turn`; all but the last are equally long."""
    packet: bool = False
    """Whether each element is a packet, which takes twice the room."""
    scratch: bool = False
    """Whether it lies in scratch, whose halves take turns where it is double."""

    def span(self, elements: int) -> tuple[int, int]:
        """The first and the last but one element, counted from the first chunk's first.

        >>> Rows(at=0, count=2, part=1, parts=2).span(3), Rows(at=0, count=1, turn=1, turns=2).span(5)
        ((3, 6), (3, 5))
        """
        total = self.count * elements
        begin, end = (k * (total // self.parts) + min(k, total % self.parts) for k in (self.part, self.part + 1))
        unit = -(-(end - begin) // self.turns)
        return min(begin + self.turn * unit, end), min(begin + (self.turn + 1) * unit, end)


@dataclass(frozen=True, kw_only=True)
class ResolvedOp:
    """An operation with every number resolved: rows of memory, ends of channels, semaphores."""

    name: str
    src: tuple[Rows, ...] = ()
    dst: tuple[Rows, ...] = ()
    ends: tuple[int, ...] = ()
    semaphores: tuple[int, ...] = ()
    barrier: int = -1
    blocks: int = 0
    """The number of threadblocks that meet at the barrier."""
    op: int = 0
    """The index of the operation in its threadblock of the plan, for messages."""


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a channel from `rank` to rank `to`; `peer` is the other end (-1: there is none)."""

    rank: int
    to: int
    peer: int
    port: bool


@dataclass(frozen=True, kw_only=True)
class Image:
    """A plan with every number resolved, ready for the machine to run."""

    blocks: tuple[tuple[int, int, tuple[ResolvedOp, ...]], ...]
    """The threadblocks as (rank, number on the rank, actions)."""
    ends: tuple[End, ...]
    semaphores: tuple[int, ...]
    """The initial value of each semaphore."""
    rows: int
    buffers: tuple[dict[str, Rows], ...]
    """The rows of the buffers i, o and s of each rank; in place, i and o overlap."""
    double: int = 0
    """How many rows behind the first half the second half of scratch lies; 0 where scratch is not double."""

    @property
    def widths(self) -> list[int]:
        """The number of threads of each threadblock: one per channel of an action, and one that waits for none."""
        return [max([2, *(1 + max(len(a.ends), len(a.semaphores)) for a in b[2])]) for b in self.blocks]

    @property
    def widest(self) -> int:
        """The number of elements that gives each thread of the widest threadblock work in every slice and turn."""
        least = max([1, *(r.parts * r.turns for b in self.blocks for a in b[2] for r in (*a.src, *a.dst))])
        return max(*self.widths, 2 * least) if least > 1 else max(self.widths)


@dataclass(eq=False, slots=True)
class _Lane:
    """One thread of a threadblock."""

    tid: int
    number: int
    block: _Block
    clock: Clock
    pc: int = 0
    ticket: int = -1


@dataclass(eq=False, slots=True)
class _Block:
    rank: int
    name: str
    actions: tuple[ResolvedOp, ...]
    lanes: list[_Lane] = field(default_factory=list)
    met: int = 0
    """The threads that have reached the nop, the barrier or the end."""


@dataclass(eq=False, slots=True)
class _Port:
    """A port: it serves the puts and signals of one channel end in order, with any delay."""

    tid: int
    end: int
    clock: Clock
    queue: deque[tuple[ResolvedOp | None, int, Clock]] = field(default_factory=deque)
    pushed: int = 0
    served: int = 0


class Machine:
    """A machine that runs an image on data in the interleaving of one seed; its `run` is called once."""

    def __init__(self, image: Image, *, elements: int, seed: int) -> None:
        lanes = image.widths
        ports = [e for e, end in enumerate(image.ends) if end.port]
        ranks = len(image.buffers)
        threads, cells = ranks + sum(lanes) + len(ports), image.rows * elements
        if threads > MAX_THREADS or cells > MAX_CELLS:
            raise InvalidInput(
                f"plan: too large to run here, with {threads} threads and {cells} elements; "
                f"at most {MAX_THREADS} and {MAX_CELLS}"
            )
        self.image, self.elements = image, elements
        self._random = random.Random(seed)
        self._names = [f"the user of rank {r}" for r in range(ranks)]
        self._launched = [np.zeros(threads, np.int32) for _ in range(ranks)]
        self._blocks: list[list[_Block]] = [[] for _ in range(ranks)]
        for (rank, number, actions), width in zip(image.blocks, lanes, strict=True):
            block = _Block(rank, f"rank {rank} threadblock {number}", actions)
            self._blocks[rank].append(block)
            for lane in range(width):
                block.lanes.append(_Lane(len(self._names), lane, block, np.zeros(threads, np.int32)))
                self._names.append(block.name)
        self._ports: dict[int, _Port] = {}
        for e in ports:
            self._ports[e] = _Port(len(self._names), e, np.zeros(threads, np.int32))
            self._names.append(f"a port of rank {image.ends[e].rank}")
        self._ready: list[_Lane | _Port] = []
        self._asleep: dict[tuple[str, int], list[_Lane]] = defaultdict(list)
        self._inbound: list[list[tuple[Clock, Clock] | None]] = [[] for _ in image.ends]
        self._expected = [0] * len(image.ends)
        self._semaphores: list[deque[Clock | None]] = [deque([None] * value) for value in image.semaphores]
        self._barriers: dict[tuple[int, int], list[_Block]] = defaultdict(list)
        self._memory = np.full((image.rows, elements), np.nan)
        self._writer = np.full(cells, -1, np.int32)
        self._written = np.zeros(cells, np.int32)
        self._written_by_op = np.zeros(cells, np.int32)
        self._readers: dict[int, dict[int, tuple[int, int]]] = {}
        self._users: dict[tuple[str, int], tuple[int, int, int]] = {}
        self._packets: dict[int, tuple[int, Clock]] = {}
        """The launch whose packet each cell holds, and what its writer knew."""

    def run(self, inputs: Sequence[Sequence[Data]]) -> list[list[Data]]:
        """The outputs of each rank for each launch, given each launch's inputs; raises `VerificationError`.

        A rank begins its next launch as soon as its own threads are through, whatever its peers are doing.
        """
        for block in self.image.blocks:
            self._check_meetings(*block)
        ranks = len(self.image.buffers)
        self._inputs = inputs
        self._launches = [0] * ranks
        self._outputs = [[np.zeros((0, self.elements))] * ranks for _ in inputs]
        for rank in range(ranks):
            self._begin(rank)
        while self._ready:
            at = self._random.randrange(len(self._ready))
            agent = self._ready[at]
            for _ in range(self._random.choice((1, 1, 2, 5, 40))):
                if not (self._serve(agent) if isinstance(agent, _Port) else self._advance(agent)):
                    self._ready[at] = self._ready[-1]
                    self._ready.pop()
                    break
        self._check_end()
        return self._outputs

    def _check_meetings(self, rank: int, number: int, actions: Sequence[ResolvedOp]) -> None:
        """Refuse two operations between which threads do not meet and of which one writes what the other touches.

        Any thread may handle any element, more of them than run here.
        """
        touched: list[tuple[int, int, bool, int]] = []
        for action in actions:
            if action.name in ("nop", "barrier"):
                touched = []
            # Ports move their data in their own time; whoever reads packets waits for each.
            if action.ends or action.name in ("nop", "barrier"):
                continue
            mine = []
            for rows, writes in (*((r, False) for r in action.src), *((r, True) for r in action.dst)):
                begin, end = rows.span(self.elements)
                if rows.packet or begin == end:
                    continue
                low, high = rows.at * self.elements + begin, rows.at * self.elements + end
                for first, last, wrote, op in touched:
                    if (writes or wrote) and low < last and first < high:
                        me, tid = f"rank {rank} threadblock {number}", -1
                        raise self._race(max(low, first), tid, action.op, tid, op, who=me)
                mine.append((low, high, writes, action.op))
            touched += mine

    def _begin(self, rank: int) -> None:
        """Take a rank's last results, overwrite its buffers with garbage, and launch the plan there with new data."""
        clock = self._launched[rank]
        for block in self._blocks[rank]:
            for lane in block.lanes:
                np.maximum(clock, lane.clock, out=clock)
        clock[rank] += 1
        buffers, launch = self.image.buffers[rank], self._launches[rank]
        if launch > 0:
            self._outputs[launch - 1][rank] = self._read(rank, clock, -1, buffers["o"]).reshape(-1, self.elements)
        for name in ("o", "i"):
            self._write(rank, clock, -1, buffers[name], np.nan)
        self._launches[rank] += 1
        if launch == len(self._inputs):
            return
        self._write(rank, clock, -1, buffers["i"], self._inputs[launch][rank].ravel())
        for block in self._blocks[rank]:
            block.met = 0
            for lane in block.lanes:
                lane.clock, lane.pc = clock.copy(), 0
                self._ready.append(lane)

    def _advance(self, lane: _Lane) -> bool:
        """Do one action of a thread; False if the thread now sleeps or has finished."""
        block = lane.block
        if lane.pc == len(block.actions):
            block.met += 1
            if all(b.met == len(b.lanes) and b.lanes[0].pc == len(b.actions) for b in self._blocks[block.rank]):
                self._begin(block.rank)
            return False
        action = block.actions[lane.pc]
        lane.clock[lane.tid] += 1
        if action.name in ("nop", "barrier"):
            return self._meet(lane, action)
        if action.name in ("wait", "rlxwait", "flush", "sem_acquire"):
            if not self._passes(lane, action):
                return False
        elif action.name in ("signal", "rlxsignal", "sem_release"):
            self._tell(lane, action)
        elif action.ends:
            if lane.number < len(action.ends):
                part = ResolvedOp(
                    name="put", src=(action.src[lane.number],), dst=(action.dst[lane.number],), op=action.op
                )
                self._use(lane, action, "signal on channel", action.ends[lane.number])
                self._ask(lane, action.ends[lane.number], part)
                if action.name == "pws":
                    self._ask(lane, action.ends[lane.number], None)
        else:
            # In the next operation another thread handles the same element: only a nop orders the two accesses
            # (`_check_meetings`).
            mine = slice((lane.number - lane.pc) % len(block.lanes), None, len(block.lanes))
            launch = self._launches[block.rank]
            if action.name in PACKETS and not self._arrived(lane, action, mine, launch):
                return False
            self._move(lane.tid, lane.clock, action, mine, launch)
        lane.pc += 1
        return True

    def _meet(self, lane: _Lane, action: ResolvedOp) -> bool:
        block = lane.block
        block.met += 1
        if block.met < len(block.lanes):
            return False
        group = [block]
        if action.name == "barrier":
            there = self._barriers[block.rank, action.barrier]
            there.append(block)
            if len(there) < action.blocks:
                return False
            group, there[:] = list(there), []
        lanes = [m for b in group for m in b.lanes]
        clock = np.maximum.reduce([m.clock for m in lanes])
        for b in group:
            b.met = 0
        for m in lanes:
            m.clock = clock.copy()
            m.pc += 1
            if m is not lane:
                self._ready.append(m)
        return True

    def _passes(self, lane: _Lane, action: ResolvedOp) -> bool:
        """Whether a thread gets through a wait; if not, the thread sleeps until a signal, put or release arrives."""
        if lane.number >= max(len(action.ends), len(action.semaphores)):
            return True
        if action.name == "sem_acquire":
            at = action.semaphores[lane.number]
            self._use(lane, action, "acquire semaphore", at)
            if not self._semaphores[at]:
                self._asleep["semaphore", at].append(lane)
                return False
            known = self._semaphores[at].popleft()
        elif action.name == "flush":
            at = action.ends[lane.number]
            port = self._ports[at]
            lane.ticket = port.pushed if lane.ticket < 0 else lane.ticket
            if port.served < lane.ticket:
                self._asleep["port", at].append(lane)
                return False
            known = port.clock
        else:
            at = action.ends[lane.number]
            self._use(lane, action, "wait on channel", at)
            if lane.ticket < 0:
                lane.ticket = self._expected[at]
                self._expected[at] += 1
            if lane.ticket >= len(self._inbound[at]):
                self._asleep["end", at].append(lane)
                return False
            news = self._inbound[at][lane.ticket]
            assert news is not None
            self._inbound[at][lane.ticket] = None
            known = news[action.name == "rlxwait"]
        lane.ticket = -1
        if known is not None:
            np.maximum(lane.clock, known, out=lane.clock)
        return True

    def _use(self, lane: _Lane, action: ResolvedOp, what: str, at: int) -> None:
        """Refuse two unordered threads that use one counter: an increment could be lost."""
        tid, time, op = self._users.get((what, at), (lane.tid, 0, 0))
        if time > lane.clock[tid]:
            first, second = f"{self._names[tid]} op {op}", f"{lane.block.name} op {action.op}"
            end = self.image.ends[at] if "channel" in what else None
            which = f"from rank {end.rank} to rank {end.to}" if end else str(at)
            raise VerificationError(f"race to {what} {which}: {first} and {second} are not ordered")
        self._users[what, at] = lane.tid, int(lane.clock[lane.tid]), action.op

    def _tell(self, lane: _Lane, action: ResolvedOp) -> None:
        if lane.number < len(action.semaphores):
            at = action.semaphores[lane.number]
            self._semaphores[at].append(lane.clock.copy())
            self._wake("semaphore", at)
        elif lane.number < len(action.ends):
            end = action.ends[lane.number]
            self._use(lane, action, "signal on channel", end)
            before = self._launched[lane.block.rank].copy()
            if end in self._ports:
                self._ask(lane, end, None)
            else:
                # A relaxed signal orders only accesses that were done before the launch.
                self._arrive(end, before if action.name == "rlxsignal" else lane.clock.copy(), before)

    def _ask(self, lane: _Lane, end: int, put: ResolvedOp | None) -> None:
        """Queue a put, or a signal where `put` is None, at the port of a channel end."""
        port = self._ports[end]
        port.queue.append((put, lane.block.rank, lane.clock.copy()))
        port.pushed += 1
        if len(port.queue) == 1:
            self._ready.append(port)

    def _serve(self, port: _Port) -> bool:
        """Serve the oldest request of a port; False if the port has no more requests."""
        put, rank, asked = port.queue.popleft()
        np.maximum(port.clock, asked, out=port.clock)
        port.clock[port.tid] += 1
        if put is None:
            self._arrive(port.end, port.clock.copy(), self._launched[rank].copy())
        else:
            self._move(port.tid, port.clock, put, slice(None), 0)
        port.served += 1
        self._wake("port", port.end)
        return bool(port.queue)

    def _arrive(self, end: int, known: Clock, before: Clock) -> None:
        peer = self.image.ends[end].peer
        if peer >= 0:
            self._inbound[peer].append((known, before))
            self._wake("end", peer)

    def _wake(self, what: str, at: int) -> None:
        self._ready += self._asleep.pop((what, at), [])

    def _arrived(self, lane: _Lane, action: ResolvedOp, mine: slice, launch: int) -> bool:
        """Whether all packets that a thread is to read are there; if not, it sleeps until one more has come."""
        for rows in action.src:
            for cell in self._cells(rows, mine, launch)[::2].tolist() if rows.packet else ():
                held, known = self._packets.get(cell, (0, lane.clock))
                if held != launch:
                    self._asleep["packet", cell].append(lane)
                    return False
                np.maximum(lane.clock, known, out=lane.clock)
        return True

    def _move(self, tid: int, clock: Clock, action: ResolvedOp, mine: slice, launch: int) -> None:
        """Read, add up and write: the sum of all sources goes to every destination, or each source to its own."""

        def read(rows: Rows) -> Data:
            return self._read(tid, clock, action.op, rows, mine, launch)

        def write(rows: Rows, data: Data) -> None:
            self._write(tid, clock, action.op, rows, data, mine, launch)

        if action.name in ("copy", "put", "get", "ppkt"):
            for src, dst in zip(action.src, action.dst, strict=True):
                write(dst, read(src))
            return
        total = sum(read(src) for src in action.src)
        for dst in action.dst:
            write(dst, np.asarray(total))

    def _read(self, tid: int, clock: Clock, op: int, rows: Rows, mine: slice = slice(None), launch: int = 0) -> Data:
        cells = self._cells(rows, mine, launch)
        self._check_writers(tid, clock, op, cells)
        seen = int(clock[tid]), op
        for cell in cells.tolist():
            self._readers.setdefault(cell, {})[tid] = seen
        return self._memory.reshape(-1)[cells[::2] if rows.packet else cells]

    def _write(
        self,
        tid: int,
        clock: Clock,
        op: int,
        rows: Rows,
        data: Data | float,
        mine: slice = slice(None),
        launch: int = 0,
    ) -> None:
        cells = self._cells(rows, mine, launch)
        self._check_writers(tid, clock, op, cells)
        for cell in cells.tolist():
            for other, (time, its_op) in self._readers.pop(cell, {}).items():
                if time > clock[other]:
                    raise self._race(cell, tid, op, other, its_op)
            self._packets.pop(cell, None)
        self._writer[cells], self._written[cells], self._written_by_op[cells] = tid, clock[tid], op
        if not rows.packet:
            self._memory.reshape(-1)[cells] = data
            return
        self._memory.reshape(-1)[cells[::2]] = data
        for cell in cells[::2].tolist():
            self._packets[cell] = launch, clock.copy()
            self._wake("packet", cell)

    def _cells(self, rows: Rows, mine: slice, launch: int) -> NDArray[np.intp]:
        """The cells of a thread's share; those of a packet are its data and its flag, one after the other."""
        begin, end = rows.span(self.elements)
        first = rows.at + (self.image.double if rows.scratch and launch % 2 else 0)
        share = np.arange(begin, end)[mine]
        if rows.packet:
            share = (2 * share[:, None] + np.arange(2)).ravel()
        return np.asarray(first * self.elements + share)

    def _check_writers(self, tid: int, clock: Clock, op: int, cells: NDArray[np.intp]) -> None:
        writer = self._writer[cells]
        unordered = np.argwhere((writer >= 0) & (self._written[cells] > clock[writer]))
        if len(unordered):
            cell = int(cells[tuple(unordered[0])])
            raise self._race(cell, tid, op, int(self._writer[cell]), int(self._written_by_op[cell]))

    def _race(
        self, cell: int, tid: int, op: int, other: int, its_op: int, *, who: str | None = None
    ) -> VerificationError:
        row = cell // self.elements
        rank, name, at = next(
            (rank, name, row - rows.at)
            for rank, buffers in enumerate(self.image.buffers)
            for name, rows in buffers.items()
            if rows.at <= row < rows.at + rows.count + (self.image.double if rows.scratch else 0)
        )
        first, second = (
            (who or self._names[t]) + (f" op {k}" if k >= 0 else "") for t, k in ((other, its_op), (tid, op))
        )
        return VerificationError(f"race on {name}[{at}] of rank {rank}: {first} and {second} are not ordered")

    def _check_end(self) -> None:
        for blocks in self._blocks:
            for block in blocks:
                for lane in block.lanes:
                    if lane.pc < len(block.actions):
                        action = block.actions[lane.pc]
                        raise VerificationError(
                            f"deadlock: {block.name} waits for ever at op {action.op} ({action.name})"
                        )
        for e, end in enumerate(self.image.ends):
            left = len(self._inbound[e]) - self._expected[e]
            if left:
                raise VerificationError(
                    f"a channel from rank {end.to} to rank {end.rank} is left with {left} unused signals: "
                    "the next launch would take them for its own"
                )
        for at, (queue, value) in enumerate(zip(self._semaphores, self.image.semaphores, strict=True)):
            if len(queue) != value:
                raise VerificationError(f"semaphore {at} ends at {len(queue)}, not at its initial value {value}")
