# SPDX-License-Identifier: Apache-2.0
"""The writer of MSCCL++ execution plans: FIFO messages become one-sided puts with signals and credits.

Every connection gets a channel of its own: on it the sender signals "the data is there", and the receiver "you
may write again". A message goes through a ring of slots in the receiver's scratch, or with `zero_copy`
straight to its place. Dependencies inside a rank become counting semaphores, one for each pair of its
threadblocks. `docs/mscclpp.md` says what the format asks for and why the plans look the way they do.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...collectives import Collective
from ...errors import InvalidInput, unknown
from .. import lowered as lo
from ..lowered import Lowered
from .mscclpp_streams import BufferSpan, Connection, MscclppStreams, PlanInstruction
from .named import name_of, refuse_helpers
from .sizes import size_range

NAMES = {
    "all_gather": "allgather",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce_scatter": "reducescatter",
}
MAX_OPS = 64
"""The most operations that the executor takes in one threadblock; a longer stream continues in a further one."""
MAX_CHANNELS_PER_OP = 8
MAX_SEMAPHORES_PER_OP = 16
MAX_THREADBLOCKS = 80
"""The most threadblocks of a rank: they spin while they wait, so all must be resident, one per SM (80 on a V100)."""
NO_LIMIT = 2**64 - 1
"""The `max_message_size` of a plan that is for all sizes."""
MAX_LABEL = 64
"""The most characters of a program's name that the name of its plan holds."""

log = logging.getLogger(__name__)


def dumps(
    lowered: Lowered,
    *,
    hosts: Sequence[int] | None = None,
    fifo_depth: int = 2,
    zero_copy: bool = False,
    max_threadblocks: int = MAX_THREADBLOCKS,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
) -> str:
    """The JSON execution plan of instruction streams, which are verified first.

    Args:
        lowered: The instruction streams.
        hosts: ``hosts[r]`` is the host of rank r: memory channels inside a host, port channels between hosts. Without
            it all ranks are taken to share one host.
        fifo_depth: How many messages of a connection are under way at a time.
        zero_copy: Let peers write into each other's user buffers wherever that is provably safe; the executor then
            needs those buffers at the same offset inside their allocation on every rank.
        max_threadblocks: How many threadblocks a rank may have.
        min_bytes: The smallest call that the plan is for; by default that of the streams.
        max_bytes: The largest call, 0 for no limit; by default that of the streams.

    Returns:
        The text of the plan. Its name holds the program's name, the collective, the number of ranks and of instances,
        and a hash of everything else in the plan, because MSCCL++ keeps what it has set up for a plan under its name.

    Raises:
        InvalidInput: The format or the executor cannot hold the program, or an argument is out of range.
        VerificationError: The streams do not do what their collective asks.
    """
    name = check_collective(lowered.collective)
    ranks = lowered.collective.num_ranks
    if hosts is not None and len(hosts) != ranks:
        raise InvalidInput(f"hosts: must give the host of each of the {ranks} ranks, not {len(hosts)} of them")
    for key, value in (("fifo_depth", fifo_depth), ("max_threadblocks", max_threadblocks)):
        if value < 1:
            raise InvalidInput(f"{key}: must be >= 1, not {value}")
    low, high = size_range(lowered, min_bytes, max_bytes)
    if lowered.protocol != "Simple":
        log.info("%s: written for protocol Simple, not %s", lowered.name, lowered.protocol)
    lowered.verify()
    streams = MscclppStreams(lowered, hosts)
    scratch = streams.plan_connections(fifo_depth, zero_copy)
    gpus = []
    for rank in range(ranks):
        blocks, semaphores = _emit(streams, rank)
        if len(blocks) > max_threadblocks:
            raise InvalidInput(
                f"rank {rank}: {len(blocks)} threadblocks are more than max_threadblocks {max_threadblocks} "
                f"({len(streams.blocks[rank])} streams, cut into pieces of at most {MAX_OPS} operations)"
            )
        gpus.append(_render(streams, rank, blocks, semaphores, scratch[rank]))
    plan: dict[str, Any] = {
        "collective": name,
        "protocol": "Simple",
        "inplace": lowered.collective.in_place,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": low,
        "max_message_size": high or NO_LIMIT,
    }
    if lowered.collective.root >= 0:
        plan["root"] = lowered.collective.root
    return json.dumps({"name": _plan_name(lowered, plan), **plan}, indent=1) + "\n"


def _plan_name(lowered: Lowered, plan: dict[str, Any]) -> str:
    """A name that no other plan has: two plans of one name run as the first of them in MSCCL++.

    The hash is of the plan's whole content, so it is the same in every process.
    """
    content = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    ranks, copies = lowered.collective.num_ranks, lowered.instances
    return f"{lowered.name[:MAX_LABEL]}-{plan['collective']}-{ranks}ranks-{copies}x-{digest}"


def check_collective(collective: Collective) -> str:
    """The name of a collective in the format; raises `InvalidInput` where the format cannot hold it."""
    c = collective
    refuse_helpers(c, "MSCCL++")
    if c.kind not in NAMES:
        raise unknown("collective for MSCCL++", c.kind, NAMES)
    if np.ptp(c.chunk_share) > 1e-12:
        raise InvalidInput("chunk_share: MSCCL++ cuts buffers into equal chunks, and these differ in size")
    if name_of(c) is None:
        raise InvalidInput(f"collective: its buffers are not laid out as MSCCL++ lays out {NAMES[c.kind]}")
    return NAMES[c.kind]


@dataclass(slots=True)
class _Op:
    name: str
    kind: str = ""
    channels: list[Connection] = field(default_factory=list)
    semaphores: list[int] = field(default_factory=list)
    src: list[BufferSpan] = field(default_factory=list)
    dst: list[BufferSpan] = field(default_factory=list)
    remote: tuple[Connection, BufferSpan] | None = None
    """A destination at the peer, in addition to those of `dst`."""


class _Block:
    """The operations of one threadblock, with a `nop` (all its threads meet) only where one is needed.

    Threads run ahead of each other. Data is the work of all of them; the k-th channel or semaphore of an
    operation is the work of thread k.
    """

    def __init__(self, ops: list[_Op] | None = None) -> None:
        self.ops = ops or []
        # Since the threads last met: how many threads have waited, which spans were accessed and whether they were
        # written, and which thread used each counter of a channel or semaphore (two threads must not use one at once).
        self._waiters = 0
        self._touched: list[tuple[BufferSpan, bool]] = []
        self._users: dict[tuple[str, Connection | int], int] = {}

    def wait(self, channel: Connection) -> None:
        """Add a wait for the peer's next signal."""
        thread = self._lead(_Op("wait", kind=channel.kind, channels=[channel]), ("wait", channel))
        self._waiters = max(self._waiters, thread + 1)

    def acquire(self, semaphore: int) -> None:
        """Add a wait for the next release of a semaphore by another threadblock."""
        thread = self._lead(_Op("sem_acquire", semaphores=[semaphore]), ("acquire", semaphore))
        self._waiters = max(self._waiters, thread + 1)

    def signal(self, channels: list[Connection]) -> None:
        """Add a signal to peers that all operations so far are done."""
        for channel in channels:
            self._tell(_Op("signal", kind=channel.kind, channels=[channel]), ("send", channel))

    def release(self, semaphore: int) -> None:
        """Add a release that tells another threadblock that all operations so far are done."""
        self._tell(_Op("sem_release", semaphores=[semaphore]), ("release", semaphore))

    def copy(self, src: BufferSpan, dst: BufferSpan) -> None:
        """Add a local copy from `src` to `dst`."""
        self._move(_Op("copy", src=[src], dst=[dst]))

    def reduce(
        self, src: list[BufferSpan], dst: BufferSpan, remote: tuple[Connection, BufferSpan] | None = None
    ) -> None:
        """Add a reduction: `dst` becomes the sum of `src`, which is also put to the peer where one is given."""
        kind = remote[0].kind if remote else ""
        self._move(_Op("res" if remote else "re", kind=kind, src=src, dst=[dst], remote=remote))

    def put(self, channel: Connection, src: BufferSpan, target: BufferSpan) -> None:
        """Add a put to the peer that this block's threads carry out."""
        self._move(_Op("put", kind=channel.kind, src=[src], remote=(channel, target)))

    def put_by_port(self, channel: Connection, src: BufferSpan, target: BufferSpan) -> None:
        """Add a put and a signal that the port carries out; the port reads the source some time later."""
        unfinished = any(written and span.overlaps(src) for span, written in self._touched)
        self._meet(self._waiters > 1 or unfinished)
        op = _Op("pws", kind=channel.kind, channels=[channel], src=[src], remote=(channel, target))
        self._lead(op, ("send", channel), alone=True)

    def cut(self, semaphore: int) -> list[_Block]:
        """Cut the block into pieces short enough for the executor; semaphores from `semaphore` on order them."""
        pieces: list[_Block] = []
        rest = self.ops
        meet = _Op("nop")
        while len(rest) > MAX_OPS:
            head, rest = rest[: MAX_OPS - 2], rest[MAX_OPS - 2 :]
            head = head[:-1] if head[-1].name == "nop" else head
            rest = rest[1:] if rest[0].name == "nop" else rest
            hand_over = [semaphore + len(pieces)]
            pieces.append(_Block([*head, meet, _Op("sem_release", semaphores=hand_over)]))
            rest = [_Op("sem_acquire", semaphores=hand_over), meet, *rest]
        return [*pieces, _Block(rest)] if rest else pieces

    def _move(self, op: _Op) -> None:
        """Add an operation that all threads take part in."""
        access = [(s, False) for s in op.src] + [(d, True) for d in op.dst]
        clash = any(a.overlaps(b) and (x or y) for a, x in access for b, y in self._touched)
        self._meet(self._waiters > 0 or clash)
        self.ops.append(op)
        self._touched += access

    def _tell(self, op: _Op, counter: tuple[str, Connection | int]) -> None:
        """Add an operation that tells others that everything before it is done."""
        self._meet(self._waiters > 1 or bool(self._touched))
        self._lead(op, counter, alone=self._waiters > 0)

    def _meet(self, needed: bool) -> None:
        if needed:
            self.ops.append(_Op("nop"))
            self._waiters, self._touched, self._users = 0, [], {}

    def _lead(self, op: _Op, counter: tuple[str, Connection | int], *, alone: bool = False) -> int:
        """Add an operation on one counter, merged into the last operation if both are of the same sort.

        Returns the thread that does it.
        """
        last = self.ops[-1] if self.ops else op
        channels, semaphores = [*last.channels, *op.channels], [*last.semaphores, *op.semaphores]
        fits = len(channels) <= MAX_CHANNELS_PER_OP and len(semaphores) <= MAX_SEMAPHORES_PER_OP
        thread = max(len(channels), len(semaphores)) - 1
        same = last is not op and (last.name, last.kind) == (op.name, op.kind)
        if same and fits and not alone and counter not in self._users:
            last.channels, last.semaphores = channels, semaphores
        else:
            thread = 0
            self._meet(self._users.get(counter, 0) != 0)
            self.ops.append(op)
        self._users[counter] = thread
        return thread


def _emit(streams: MscclppStreams, rank: int) -> tuple[list[_Block], int]:
    """The threadblocks of one rank, and the number of semaphores that they use."""
    semaphores: dict[tuple[int, int], int] = {}
    for steps in streams.blocks[rank]:
        for step in steps:
            for waiter in step.releases:
                semaphores.setdefault((step.block, waiter), len(semaphores))
    announce: dict[tuple[int, int], list[Connection]] = defaultdict(list)
    for c in streams.connections.values():
        for point in c.signals() if c.dst == rank else ():
            announce[c.receives[0].block, point].append(c)
    pieces: list[_Block] = []
    count = len(semaphores)
    for b, steps in enumerate(streams.blocks[rank]):
        block = _Block()
        block.signal(announce[b, 0])
        for step in steps:
            if step.acquires and step.dep:
                block.acquire(semaphores[step.dep[0], b])
            block.signal(announce[b, 2 * step.at + 1])
            _translate(step, block)
            block.signal(announce[b, 2 * step.at + 2])
            for waiter in step.releases:
                block.release(semaphores[b, waiter])
        for c in dict.fromkeys(s.outgoing[0] for s in steps if s.outgoing):
            if c.acknowledged:
                block.wait(c)
        cut = block.cut(count)
        count += max(len(cut) - 1, 0)
        pieces += cut
    return pieces or [_Block([_Op("nop")])], count


def _translate(step: PlanInstruction, block: _Block) -> None:
    """Add the operations of one instruction: wait for its dependency, do its work, tell its dependents."""
    if step.incoming:
        block.wait(step.incoming[0])
    if step.outgoing and step.outgoing[0].waits_before(step.outgoing[1]):
        block.wait(step.outgoing[0])
    got = step.incoming[0].target(step.incoming[1]) if step.incoming else step.src
    adds = step.op in (lo.RECV_REDUCE_SEND, lo.RECV_REDUCE_COPY, lo.RECV_REDUCE_COPY_SEND)
    stores = bool(lo.WRITES_DST[step.op])
    parts = [step.src, got] if adds else [step.dst, step.src] if step.op == lo.REDUCE else [got]

    def make(place: BufferSpan) -> None:
        if len(parts) > 1:
            block.reduce(parts, place)
        elif got != place:
            block.copy(got, place)

    if not step.outgoing:
        if stores:
            make(step.dst)
        return
    channel, j = step.outgoing
    if channel.port:
        source = channel.bounce_slot(j) if step.bounce else step.sent
        make(source)
        if stores and step.dst not in (source, got):
            block.copy(source if adds else got, step.dst)
        block.put_by_port(channel, source, channel.target(j))
        return
    if adds:
        block.reduce(parts, step.dst if stores else got, (channel, channel.target(j)))
    else:
        if stores:
            make(step.dst)
        block.put(channel, got, channel.target(j))
    block.signal([channel])


def _render(streams: MscclppStreams, rank: int, blocks: list[_Block], semaphores: int, scratch: int) -> dict[str, Any]:
    c = streams.collective
    # Channels pair up by order: the k-th from a to b with the k-th from b to a, so both ends sort alike.
    touching = [x for _, x in sorted(streams.connections.items()) if rank in (x.src, x.dst)]
    channels = {kind: [x for x in touching if x.kind == kind] for kind in ("memory", "port")}
    remote: dict[tuple[int, str], set[str]] = defaultdict(set)
    for block in blocks:
        for op in block.ops:
            if op.remote:
                remote[op.remote[0].dst, op.remote[1].buffer].add(op.kind)
    return {
        "id": rank,
        "input_chunks": c.chunks if c.kind == "broadcast" else len(c.inputs(rank)),
        "output_chunks": len(c.outputs(rank)),
        "scratch_chunks": scratch,
        "threadblocks": [_render_block(i, block, channels, list(remote)) for i, block in enumerate(blocks)],
        "channels": [
            {"channel_type": kind, "connected_to": [x.src + x.dst - rank for x in found]}
            for kind, found in channels.items()
            if found
        ],
        "remote_buffers": [
            {"rank": peer, "type": buffer, "access_channel_types": sorted(kinds)}
            for (peer, buffer), kinds in remote.items()
        ],
        "semaphores": [{"init_value": 0}] * semaphores,
    }


def _render_block(
    index: int, block: _Block, channels: dict[str, list[Connection]], remote: list[tuple[int, str]]
) -> dict[str, Any]:
    ids: dict[str, list[int]] = {"memory": [], "port": []}
    buffers: dict[str, list[int]] = {"memory": [], "port": []}

    def local(known: list[int], number: int) -> int:
        if number not in known:
            known.append(number)
        return known.index(number)

    ops = []
    for op in block.ops:
        out: dict[str, Any] = {"name": op.name}
        if op.src:
            out["src_buff"] = [{"type": s.buffer, "index": s.at, "size": s.count} for s in op.src]
        if op.dst or op.remote:
            out["dst_buff"] = [{"type": s.buffer, "index": s.at, "size": s.count} for s in op.dst]
        if op.remote:
            peer, span = op.remote[0].dst, op.remote[1]
            number = local(buffers[op.kind], remote.index((peer, span.buffer)))
            out["dst_buff"].append({"buffer_id": number, "index": span.at, "size": span.count})
        if op.channels:
            out["channel_ids"] = [local(ids[op.kind], channels[op.kind].index(x)) for x in op.channels]
        if op.kind:
            out["channel_type"] = op.kind
        if op.semaphores:
            out["semaphore_ids"] = op.semaphores
        if op.name in ("re", "res"):
            out["reduce_op"] = "sum"
        ops.append(out)
    return {
        "id": index,
        "ops": ops,
        "channels": [{"channel_type": kind, "channel_ids": found} for kind, found in ids.items() if found],
        "remote_buffer_refs": [
            {"access_channel_type": kind, "remote_buffer_ids": found} for kind, found in buffers.items() if found
        ],
    }
