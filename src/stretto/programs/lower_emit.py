# SPDX-License-Identifier: Apache-2.0
"""Instructions from places and an order: messages, local copies, and the waits between threadblocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .ir import Program
from .lower_blocks import Blocks
from .lower_memory import PlaceAssignment
from .lower_order import Edges, fifo_edges, linear_order
from .lowered import (
    COPY,
    RECV,
    RECV_COPY_SEND,
    RECV_REDUCE_COPY,
    RECV_REDUCE_COPY_SEND,
    RECV_REDUCE_SEND,
    SEND,
)

MAX_COUNT = 71
"""The most chunks one instruction may move (the MSCCL runtimes' limit)."""
RANK = 1 << 43


@dataclass(kw_only=True, slots=True)
class Instruction:
    """One instruction before it has a step number. Places are those of `PlaceAssignment`; -1: none."""

    block: int
    op: int
    src: int
    dst: int
    src_rank: int
    dst_rank: int
    count: int
    position: int
    reads: int = -1
    writes: int = -1
    sends: int = -1
    receives: int = -1
    """The transfers of the program that the instruction sends and receives; -1 for none."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    """The instructions to wait for, as (threadblock, index of the instruction in it)."""


@dataclass(frozen=True, kw_only=True)
class MessageRuns:
    """Runs of rows whose places are contiguous at both ranks; each run is one send and one receive."""

    transfer: NDArray[np.int64]
    row: NDArray[np.int64]
    count: NDArray[np.int64]
    forwarded_as: NDArray[np.int64]
    """The message that the same instruction sends on, or -1."""


def split_messages(program: Program, blocks: Blocks, memory: PlaceAssignment) -> MessageRuns:
    """Cut every transfer where its places are not neighbours; a fused chain is cut alike all along.

    Args:
        program: The program.
        blocks: The threadblocks, with the fused pairs.
        memory: The places of every row.

    Returns:
        The messages, in the order of transfers; none has more than `MAX_COUNT` chunks.
    """
    rows = len(program.chunk)
    owner = np.repeat(np.arange(program.num_transfers), np.diff(program.chunk_ptr))
    within = np.arange(rows) - program.chunk_ptr[owner]
    cut = within == 0
    for places in (memory.read, memory.operand, memory.write):
        jump = np.concatenate([[True], np.diff(places) != 1]) if rows else np.zeros(0, np.bool_)
        cut |= jump & (places >= 0)
    head = _chain_heads(blocks.fused_send)
    shared = program.chunk_ptr[head[owner]] + within
    at_head = np.zeros(rows, np.bool_)
    np.logical_or.at(at_head, shared, cut)
    begin = np.flatnonzero(at_head)
    run = np.arange(rows) - begin[np.cumsum(at_head) - 1] if rows else within
    at_head |= run % MAX_COUNT == 0
    start = np.flatnonzero(at_head[shared])
    transfer = owner[start]
    first = np.searchsorted(transfer, np.arange(program.num_transfers))
    send = blocks.fused_send[transfer]
    return MessageRuns(
        transfer=transfer,
        row=start,
        count=np.diff(np.append(start, rows)),
        forwarded_as=np.where(send >= 0, first[send] + np.arange(len(start)) - first[transfer], -1),
    )


def _chain_heads(fused: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first transfer of each fused chain."""
    head = np.arange(len(fused))
    sender = np.full(len(fused), -1, np.int64)
    joined = np.flatnonzero(fused >= 0)
    sender[fused[joined]] = joined
    back = np.where(sender >= 0, sender, head)
    while True:  # pointer doubling: chains are acyclic, since a fused send comes after its receive
        further = back[back]
        if np.array_equal(further, back):
            return back
        back = further


def message_order(
    program: Program,
    blocks: Blocks,
    memory: PlaceAssignment,
    messages: MessageRuns,
    position: NDArray[np.int64],
    depth: int,
) -> NDArray[np.int64] | None:
    """Order the sends and receives anew after transfers have been cut into messages.

    Memory orders them: reads and writes of a place keep the order that they have in `position`.

    Args:
        program: The program.
        blocks: The threadblocks, with the connection of each transfer.
        memory: The places of every row.
        messages: The messages, from `split_messages`.
        position: The position of each event of the program, from `event_order`.
        depth: The FIFO depth, 1 or 2.

    Returns:
        The positions of sends (m) and receives (num_messages + m), or None where they wait in a circle.
    """
    num = len(messages.transfer)
    each = np.arange(num, dtype=np.int64)
    node = np.concatenate([each, num + each])
    fused = np.flatnonzero(messages.forwarded_as >= 0)
    node[messages.forwarded_as[fused]] = num + fused
    send, receive = node[:num], node[num:]
    time = np.concatenate([position[messages.transfer], position[program.num_transfers + messages.transfer]])
    ordered = _touches(program, memory, messages)
    sequence = [ordered[i] for i in np.argsort(time, kind="stable").tolist()]
    heads, tails = [], []
    for tail, before in hazards(sequence):
        heads.extend(before)
        tails.extend([tail] * len(before))
    apart = send != receive
    edges: list[Edges] = [
        (send[apart], receive[apart]),
        (np.array(heads, np.int64), np.array(tails, np.int64)),
        *fifo_edges(blocks.connection[messages.transfer], send, receive, depth),
    ]
    edges = [(a[a != b], b[a != b]) for a, b in edges]
    rank = np.concatenate([program.src[messages.transfer], program.dst[messages.transfer]])
    order = linear_order(edges, rank, eager=num)
    return None if order is None else order[node]


Touch = tuple[int, int, int, int]
"""One access to memory: (node, first place read or -1, first place written or -1, how many places)."""


def _touches(program: Program, memory: PlaceAssignment, messages: MessageRuns) -> list[Touch]:
    """The memory accesses of each send (m) and receive (num_messages + m); places of different ranks differ."""
    num, t = len(messages.transfer), messages.transfer
    here, there = program.dst[t].astype(np.int64) * RANK, program.src[t].astype(np.int64) * RANK
    fused = np.zeros(num, np.bool_)
    fused[messages.forwarded_as[messages.forwarded_as >= 0]] = True

    def placed(places: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
        value = places[messages.row]
        return np.where(value >= 0, value + rank, -1)

    none = np.full(num, -1)
    reads = np.concatenate([np.where(fused, -1, placed(memory.read, there)), placed(memory.operand, here)])
    writes = np.concatenate([none, placed(memory.write, here)])
    count = np.concatenate([messages.count, messages.count])
    return list(zip(range(2 * num), reads.tolist(), writes.tolist(), count.tolist(), strict=True))


def hazards(sequence: Iterable[Touch]) -> Iterable[tuple[int, list[int]]]:
    """For each node the nodes that it must follow: a read follows the last writer, a write also the readers since."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node, read, write, count in sequence:
        before: list[int] = []
        if read >= 0:
            for place in range(read, read + count):
                if place in writer:
                    before.append(writer[place])
                if place in readers:
                    readers[place].append(node)
                else:
                    readers[place] = [node]
        if write >= 0:
            for place in range(write, write + count):
                since = [r for r in readers.pop(place, ()) if r != node]
                if since:
                    before += since
                elif place in writer:
                    before.append(writer[place])
                writer[place] = node
        if before:
            yield node, before


def instructions(
    program: Program, blocks: Blocks, memory: PlaceAssignment, messages: MessageRuns, position: NDArray[np.int64]
) -> list[Instruction]:
    """Make the sends, receives and their fused forms.

    Args:
        program: The program.
        blocks: The threadblocks, with the fused pairs.
        memory: The places of every row.
        messages: The messages, from `split_messages`.
        position: The positions of sends and receives, from `message_order` (or from `event_order` if nothing was cut).

    Returns:
        The instructions, in the order of messages.
    """
    t, num = messages.transfer, len(messages.transfer)
    read, operand, write = (p[messages.row].tolist() for p in (memory.read, memory.operand, memory.write))
    send_block = blocks.send_block[blocks.connection[t]].tolist()
    recv_block = blocks.recv_block[blocks.connection[t]].tolist()
    src, dst, reduces = program.src[t].tolist(), program.dst[t].tolist(), program.reduce[t].tolist()
    transfer = t.tolist()
    count, forwarded, at = messages.count.tolist(), messages.forwarded_as.tolist(), position.tolist()
    fused = set(forwarded)
    result: list[Instruction] = []
    for m in range(num):
        here, there, base = dst[m], src[m], dst[m] * RANK
        if m not in fused:
            result.append(
                Instruction(
                    block=send_block[m],
                    op=SEND,
                    src=read[m],
                    dst=write[m] if write[m] >= 0 else operand[m],
                    src_rank=there,
                    dst_rank=here,
                    count=count[m],
                    position=2 * at[m],
                    reads=there * RANK + read[m],
                    sends=transfer[m],
                )
            )
        on = forwarded[m]
        step = Instruction(
            block=recv_block[m],
            op=RECV,
            src=operand[m],
            dst=write[m],
            src_rank=here,
            dst_rank=here,
            count=count[m],
            position=2 * at[num + m],
            sends=-1 if on < 0 else transfer[on],
            receives=transfer[m],
        )
        if reduces[m]:
            step.op = RECV_REDUCE_COPY if on < 0 else RECV_REDUCE_COPY_SEND
            step.reads = base + operand[m]
        else:
            step.op = RECV if on < 0 else RECV_COPY_SEND
            # The source of a plain receive is only informative; where the sender never stored it, there is none.
            step.src, step.src_rank = (read[m], there) if read[m] >= 0 else (write[m], here)
        if write[m] >= 0:
            step.writes = base + write[m]
        else:
            step.op = RECV_REDUCE_SEND
            step.dst, step.dst_rank = (write[on] if write[on] >= 0 else operand[on]), dst[on]
        result.append(step)
    return result


def wait_for_each_other(program: Program, steps: list[Instruction], num_blocks: int) -> list[list[Instruction]]:
    """Sort instructions into streams, with the fewest waits: none inside a stream and none that another implies.

    Args:
        program: The program.
        steps: The instructions in linear order; their `waits` are filled in.
        num_blocks: How many threadblocks there are.

    Returns:
        The instructions of each threadblock.
    """
    streams: list[list[Instruction]] = [[] for _ in range(num_blocks)]
    index: list[int] = []
    for step in steps:
        index.append(len(streams[step.block]))
        streams[step.block].append(step)
    touches = ((k, s.reads, s.writes, s.count) for k, s in enumerate(steps))
    needed = dict(hazards(touches))
    _add_pacing(program, steps, needed)
    # known[k][b] is how many instructions of threadblock b are surely done once step k is.
    known: list[dict[int, int]] = []
    latest: list[dict[int, int]] = [{} for _ in streams]
    for k, step in enumerate(steps):
        clock = latest[step.block]
        before = needed.get(k, ())
        for p in sorted({p for p in before if steps[p].block != step.block}, reverse=True):
            other = steps[p].block
            if clock.get(other, 0) > index[p]:
                continue
            step.waits.append((other, index[p]))
            merged = dict(clock)
            for block, done in known[p].items():
                if merged.get(block, 0) < done:
                    merged[block] = done
            merged[other] = max(merged.get(other, 0), index[p] + 1)
            clock = merged
        latest[step.block] = clock
        known.append(clock)
    return streams


def _add_pacing(program: Program, steps: list[Instruction], needed: dict[int, list[int]]) -> None:
    """Let a send also wait for arrivals that the program orders before it, even if it sends other data."""
    received = {step.receives: k for k, step in enumerate(steps) if step.receives >= 0}
    after, ptr = program.after.tolist(), program.after_ptr.tolist()
    src, dst = program.src.tolist(), program.dst.tolist()
    for k, step in enumerate(steps):
        if step.sends < 0:
            continue
        for d in after[ptr[step.sends] : ptr[step.sends + 1]]:
            # A rank can wait for its own arrivals only. Cutting transfers may have moved an arrival behind the send.
            if dst[d] == src[step.sends] and received[d] < k:
                needed.setdefault(k, []).append(received[d])


def add_copies(
    steps: list[Instruction], copies: list[tuple[int, int, int]], block_rank: list[int]
) -> tuple[list[Instruction], list[int]]:
    """Insert local copies where a threadblock would wait for a message anyway.

    The least loaded threadblock of the rank does a copy, directly before a receive; a rank without threadblocks gets
    one.

    Args:
        steps: The instructions.
        copies: Copies (rank, from place, to place), in order.
        block_rank: The rank of each threadblock.

    Returns:
        All instructions in linear order, and the rank of each threadblock, new ones included.
    """
    if not copies:
        return sorted(steps, key=lambda s: s.position), block_rank
    ranks = list(block_rank)
    by_block: dict[int, list[Instruction]] = {}
    load: dict[int, int] = {}
    touched: dict[int, int] = {}
    written: dict[int, int] = {}
    for step in sorted(steps, key=lambda s: s.position):
        by_block.setdefault(step.block, []).append(step)
        load[step.block] = load.get(step.block, 0) + step.count
        for i in range(step.count):
            if step.reads >= 0:
                touched[step.reads + i] = step.position
            if step.writes >= 0:
                touched[step.writes + i] = written[step.writes + i] = step.position
    own: dict[int, list[int]] = {}
    for block, rank in enumerate(ranks):
        own.setdefault(rank, []).append(block)
    end = max((s.position for s in steps), default=0) + 2
    result = list(steps)
    for rank, source, target, count in _copy_runs(copies):
        if rank not in own:
            own[rank] = [len(ranks)]
            ranks.append(rank)
        block = min(own[rank], key=lambda b: (load.get(b, 0), b))
        load[block] = load.get(block, 0) + count
        base = rank * RANK
        cells = range(count)
        earliest = max(
            max(written.get(base + source + i, -1) for i in cells),
            max(touched.get(base + target + i, -1) for i in cells),
        )
        waiting = (s.position for s in by_block.get(block, ()) if s.position > earliest and s.op != SEND)
        position = max(next(waiting, end) - 1, earliest)
        for i in cells:
            touched[base + source + i] = max(touched.get(base + source + i, -1), position)
            touched[base + target + i] = written[base + target + i] = position
        result.append(
            Instruction(
                block=block,
                op=COPY,
                src=source,
                dst=target,
                src_rank=rank,
                dst_rank=rank,
                count=count,
                position=position,
                reads=base + source,
                writes=base + target,
            )
        )
    return sorted(result, key=lambda s: s.position), ranks


def _copy_runs(copies: list[tuple[int, int, int]]) -> Iterable[tuple[int, int, int, int]]:
    """Join copies of neighbouring places to neighbouring places: (rank, from, to, count)."""
    current: list[int] = []
    for rank, source, target in copies:
        if (
            current
            and current[3] < MAX_COUNT
            and [rank, source, target] == [current[0], current[1] + current[3], current[2] + current[3]]
        ):
            current[3] += 1
            continue
        if current:
            yield current[0], current[1], current[2], current[3]
        current = [rank, source, target, 1]
    if current:
        yield current[0], current[1], current[2], current[3]
