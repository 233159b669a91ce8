# SPDX-License-Identifier: Apache-2.0
"""The verifier: every postcondition holds exactly once, no race, no deadlock with bounded FIFOs.

Programs and lowered programs are both turned into events on memory locations and checked by the same
native kernel (`native/check.cpp`), which executes them symbolically along the happens-before order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..collectives import ALL_PARTS, Collective
from ..collectives.distinct import distinct
from ..errors import VerificationError
from .ir import Program, slot_numbers
from .lowered import BUFFERS, INPUT, NOP, OUTPUT, READS_SRC, REDUCE, WRITES_DST, Lowered
from .streams import BufferMap, InstructionStreams, group_ends, row_numbers, rows_from_edges

UNDEFINED, TWICE, MIXED, RACE_READ, RACE_WRITE, MISSING, WRONG = range(7)


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """The result of a successful proof: the program's name, the FIFO depth that it needs, and warnings."""

    subject: str
    fifo_depth: int
    """The least FIFO depth (1 or 2) at which the program cannot deadlock."""
    warnings: tuple[str, ...] = ()


def verify(program: Program) -> VerificationReport:
    """Prove a program right, or raise `VerificationError` naming rank, chunk and transfer.

    >>> from stretto import AllGather
    >>> wrong = Program.from_steps("w", AllGather(3), src=[0, 1], dst=[1, 2], chunk=[0, 2], step=[0, 1])
    >>> wrong.verify()
    Traceback (most recent call last):
    stretto.errors.VerificationError: w: transfer 1 (1>2 c2) reads chunk 2 on rank 1 before it arrives (and 5 more)
    """
    p = program
    count = p.num_transfers
    rows = np.diff(p.chunk_ptr)
    items = [np.repeat(ends, rows) for ends in (p.src, p.dst)]
    c = p.collective
    number, keys = slot_numbers(
        c.num_ranks,
        c.num_chunks,
        [
            (items[0], p.chunk),
            (items[1], p.chunk),
            (row_numbers(c.in_ptr), c.in_chunk),
            (row_numbers(c.out_ptr), c.out_chunk),
        ],
    )
    src_slot, dst_slot, in_slot, out_slot = keys
    # Event 2t is the start of transfer t (it reads and sends), event 2t+1 its finish (it receives and writes).
    item_ptr = np.zeros(2 * count + 1, np.int64)
    np.cumsum(np.repeat(rows, 2), out=item_ptr[1:])
    at_start = np.repeat(item_ptr[0:-1:2] - p.chunk_ptr[:-1], rows) + np.arange(len(p.chunk))
    at_finish = at_start + np.repeat(rows, rows)
    rd = np.full(2 * len(p.chunk), -1, np.int32)
    wr = rd.copy()
    rd[at_start] = src_slot
    wr[at_finish] = dst_slot
    rd[at_finish] = np.where(np.repeat(p.reduce, rows), dst_slot, -1)
    pop, push = _start_and_finish(count)
    pred_ptr, pred = _transfer_predecessors(p.after_ptr, p.after, p.gate_ptr, p.gate, p.gate_reads)
    connection = (p.src.astype(np.int64) * c.num_ranks + p.dst) * p.num_lanes + p.lane
    order = np.argsort(connection, kind="stable").astype(np.int32)
    if p.multicasts:
        turn = np.flatnonzero(connection[order[1:]] == connection[order[:-1]])
        pred_ptr, pred = _start_together(p.cast, pred_ptr, pred, (order[turn], order[turn + 1]))
    joint = len(pred_ptr) - 1 - 2 * count
    none = np.full(joint, -1, np.int32)
    item_ptr = np.append(item_ptr, np.full(joint, item_ptr[-1]))

    def event(e: int) -> str:
        if e >= 2 * count:
            return f"cast {np.unique(p.cast[p.cast >= 0])[e - 2 * count]}"
        return f"transfer {e // 2} ({describe(p, e // 2)})"

    def location(loc: int) -> tuple[int, str]:
        slot = int(loc if number is None else number[loc])
        return slot // c.num_chunks, f"chunk {slot % c.num_chunks}"

    return _run(
        p.name,
        c,
        event,
        location,
        num_locations=c.num_ranks * c.num_chunks if number is None else len(number),
        reductions_commute=True,
        thread=np.full(2 * count + joint, -1, np.int32),
        pop=np.append(pop, none),
        push=np.append(push, none),
        item_ptr=item_ptr,
        rd=rd,
        rd2=np.full(len(rd), -1, np.int32),
        wr=wr,
        pred_ptr=pred_ptr,
        pred=pred,
        conn_ptr=group_ends(connection[order]),
        conn=order,
        init_loc=in_slot,
        post_loc=out_slot,
    )


def verify_lowered(lowered: Lowered) -> VerificationReport:
    """Prove instruction streams right, or raise `VerificationError` naming rank, threadblock and step."""
    x, c = lowered, lowered.collective
    streams, memory = InstructionStreams.of(x), BufferMap.of(x)
    count = np.where(x.op == NOP, 0, x.count)
    item_ptr = np.concatenate([[0], np.cumsum(count)])

    def places(uses: NDArray[np.bool_], buf: NDArray[np.int8], off: NDArray[np.int32]) -> NDArray[np.int32]:
        first = np.where(uses, memory.locate(streams.rank, buf, off), 0)
        bad = np.flatnonzero(uses & ~memory.inside(streams.rank, buf, off, count))
        if len(bad):
            e = int(bad[0])
            raise VerificationError(
                f"{x.name}: {streams.event(e)} uses {BUFFERS[buf[e]]}[{off[e]}..{int(off[e]) + int(count[e]) - 1}], "
                f"which rank {streams.rank[e]} does not have"
            )
        spread = np.repeat(first - item_ptr[:-1], count) + np.arange(item_ptr[-1])
        return np.where(np.repeat(uses, count), spread, -1).astype(np.int32)

    rd = places(READS_SRC[x.op], x.src_buf, x.src_off)
    wr = places(WRITES_DST[x.op], x.dst_buf, x.dst_off)
    rd2 = np.where(np.repeat(x.op == REDUCE, count), wr, -1).astype(np.int32)
    # An instruction promises no order of its chunks, so a write that overlaps its own reads must be the same range.
    shift = np.where((rd >= 0) & (wr >= 0), np.abs(rd - wr), 0)
    bad = np.flatnonzero((shift > 0) & (shift < np.repeat(count, count)))
    if len(bad):
        e = int(np.searchsorted(item_ptr, bad[0], side="right")) - 1
        raise VerificationError(f"{x.name}: {streams.event(e)} reads from where it writes, but not in step")
    received = np.flatnonzero(streams.pop >= 0)
    pred_ptr, pred = rows_from_edges(
        x.num_instructions, [*streams.local_edges(), (streams.senders[streams.pop[received]], received)]
    )
    in_rank, out_rank = row_numbers(c.in_ptr), row_numbers(c.out_ptr)
    in_at = np.arange(len(in_rank)) - c.in_ptr[in_rank]
    out_at = np.arange(len(out_rank)) - c.out_ptr[out_rank]
    return _run(
        x.name,
        c,
        streams.event,
        memory.describe,
        num_locations=memory.size,
        reductions_commute=False,
        thread=streams.tb.astype(np.int32),
        pop=streams.pop,
        push=streams.push,
        item_ptr=item_ptr,
        rd=rd,
        rd2=rd2,
        wr=wr,
        pred_ptr=pred_ptr,
        pred=pred,
        conn_ptr=streams.connection_ptr,
        conn=np.arange(len(streams.senders), dtype=np.int32),
        init_loc=memory.locate(in_rank, np.full(len(in_rank), INPUT, np.int8), in_at).astype(np.int32),
        post_loc=memory.locate(out_rank, np.full(len(out_rank), OUTPUT, np.int8), out_at).astype(np.int32),
    )


def fifo_depth(
    after_ptr: NDArray[np.int64],
    after: NDArray[np.int32],
    gate_ptr: NDArray[np.int64],
    gate: NDArray[np.int32],
    gate_reads: NDArray[np.bool_],
    connection: NDArray[np.int64],
) -> int:
    """The least FIFO depth (1 or 2) at which transfers with these dependencies cannot deadlock, or 0.

    Args:
        after_ptr: Transfer t starts after ``after[after_ptr[t]:after_ptr[t+1]]`` have finished.
        after: See `after_ptr`.
        gate_ptr: Transfer t finishes once ``gate[gate_ptr[t]:gate_ptr[t+1]]`` are done with its destination.
        gate: See `gate_ptr`.
        gate_reads: For each entry of `gate`, whether it is done once it has started (read) rather than finished.
        connection: The FIFO connection of each transfer.

    Returns:
        1, 2, or 0 for a deadlock at any depth.
    """
    count = len(after_ptr) - 1
    pred_ptr, pred = _transfer_predecessors(after_ptr, after, gate_ptr, gate, gate_reads)
    pop, push = _start_and_finish(count)
    order = np.argsort(connection, kind="stable").astype(np.int32)
    nothing = np.zeros(0, np.int32)
    *_, depth, _, _ = _native.check_events(
        num_locations=0,
        num_parts=1,
        reductions_commute=True,
        thread=np.full(2 * count, -1, np.int32),
        pop=pop,
        push=push,
        item_ptr=np.zeros(2 * count + 1, np.int64),
        rd=nothing,
        rd2=nothing,
        wr=nothing,
        pred_ptr=pred_ptr,
        pred=pred,
        conn_ptr=group_ends(connection[order]),
        conn=order,
        init_loc=nothing,
        init_chunk=nothing,
        init_part=nothing,
        post_loc=nothing,
        post_chunk=nothing,
        post_set=nothing,
        set_ptr=np.zeros(1, np.int64),
        set_part=nothing,
    )
    return depth


def describe(program: Program, transfer: int) -> str:
    """A transfer in a few characters, as in the text form (``1>2 +c3,c4``)."""
    chunks = program.chunks_of(transfer)
    more = ",..." if len(chunks) > 3 else ""
    sign = "+" if program.reduce[transfer] else ""
    listed = ",".join(f"c{c}" for c in chunks[:3])
    return f"{program.src[transfer]}>{program.dst[transfer]} {sign}{listed}{more}"


def _start_and_finish(count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The messages that events receive and send: event 2t sends message t, event 2t+1 receives it."""
    pop = np.full(2 * count, -1, np.int32)
    push = pop.copy()
    push[0::2] = pop[1::2] = np.arange(count)
    return pop, push


def _transfer_predecessors(
    after_ptr: NDArray[np.int64],
    after: NDArray[np.int32],
    gate_ptr: NDArray[np.int64],
    gate: NDArray[np.int32],
    gate_reads: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The events that each event waits for: a start waits for the finishes of `after`, a finish for its start and for
    the transfers of `gate` to be done with the destination."""
    count = len(after_ptr) - 1
    afters, gates = np.diff(after_ptr), np.diff(gate_ptr)
    sizes = np.empty(2 * count, np.int64)
    sizes[0::2], sizes[1::2] = afters, gates + 1
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    pred = np.empty(ptr[-1], np.int32)
    pred[np.repeat(ptr[0:-1:2] - after_ptr[:-1], afters) + np.arange(len(after))] = 2 * after + 1
    pred[ptr[1::2]] = 2 * np.arange(count)
    pred[np.repeat(ptr[1::2] + 1 - gate_ptr[:-1], gates) + np.arange(len(gate))] = np.where(
        gate_reads, 2 * gate, 2 * gate + 1
    )
    return ptr, pred


def _start_together(
    cast: NDArray[np.int32],
    pred_ptr: NDArray[np.int64],
    pred: NDArray[np.int32],
    turns: tuple[NDArray[np.int32], NDArray[np.int32]],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Add one event per multicast, numbered after all others, that happens once all its members have started.

    A member's start takes the room on its own connection; but nothing leaves, and nothing is read, before every
    member has room. So an event that waits for a member's start waits for the added event instead, and so does the
    next message on a member's connection (`turns` pairs neighbours on connections).
    """
    member = np.flatnonzero(cast >= 0)
    _, number = np.unique(cast[member], return_inverse=True)
    events = len(pred_ptr) - 1
    joint = np.arange(events, dtype=np.int64)
    joint[2 * member] = events + number
    return rows_from_edges(
        events + int(number.max()) + 1,
        [
            (joint[pred], row_numbers(pred_ptr)),
            (2 * member, events + number),
            (joint[2 * turns[0].astype(np.int64)], 2 * turns[1].astype(np.int64)),
        ],
    )


def _part_rows(c: Collective) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """The sets of parts that outputs are checked against: one row per chunk, then the collective's own sets."""
    pairs = distinct(c.in_chunk.astype(np.int64) * c.num_parts + c.in_part, c.num_chunks * c.num_parts)
    lengths = np.bincount(pairs // c.num_parts, minlength=c.num_chunks).tolist() + [len(s) for s in c.part_sets]
    ptr = np.cumsum([0, *lengths]).astype(np.int64)
    parts = np.concatenate([pairs % c.num_parts, *(sorted(s) for s in c.part_sets)]).astype(np.int32)
    row = np.where(c.out_set == ALL_PARTS, c.out_chunk, c.num_chunks + c.out_set)
    return row.astype(np.int32), ptr, parts


def _run(
    name: str,
    c: Collective,
    event: Callable[[int], str],
    location: Callable[[int], tuple[int, str]],
    **events: Any,
) -> VerificationReport:
    post_set, set_ptr, set_part = _part_rows(c)
    errors, num_errors, cycle, depth, redundant, redundant_event = _native.check_events(
        num_parts=c.num_parts,
        init_chunk=c.in_chunk,
        init_part=c.in_part,
        post_chunk=c.out_chunk,
        post_set=post_set,
        set_ptr=set_ptr,
        set_part=set_part,
        **_contiguous(events),
    )
    if errors:
        code, e, other, loc, chunk, part = errors[0]
        rank, place = location(loc)
        more = f" (and {num_errors - 1} more)" if num_errors > 1 else ""
        who = event(e) if e >= 0 else ""
        text = {
            UNDEFINED: lambda: f"{who} reads {place} on rank {rank} before it arrives",
            TWICE: lambda: f"{who} adds rank {part}'s part of chunk {chunk} on rank {rank} a second time",
            MIXED: lambda: f"{who} adds chunk {other} to {place} on rank {rank}, which holds chunk {chunk}",
            RACE_READ: lambda: f"{who} reads chunk {chunk} on rank {rank} while {event(other)} may still be writing it",
            RACE_WRITE: lambda: f"{who} overwrites {place} on rank {rank} while {event(other)} may still need it",
            MISSING: lambda: (
                f"rank {rank} ends without "
                + (f"rank {part}'s part of chunk {chunk}" if part >= 0 else f"chunk {chunk}")
            ),
            WRONG: lambda: (
                f"rank {rank} ends with chunk {other} where chunk {chunk} belongs"
                if other >= 0
                else f"rank {rank} ends with rank {part}'s part in chunk {chunk}, where it does not belong"
            ),
        }[code]()
        raise VerificationError(f"{name}: {text}{more}")
    if depth == 0:
        listed = "; ".join(event(e) for e in cycle[:6]) + ("; ..." if len(cycle) > 6 else "")
        raise VerificationError(f"{name}: deadlock: these wait for one another in a circle: {listed}")
    warnings = []
    if depth == 2:
        warnings.append("deadlocks with FIFO depth 1; needs 2")
    if redundant:
        warnings.append(f"{redundant} copies bring what is already there, the last one {event(redundant_event)}")
    return VerificationReport(subject=name, fifo_depth=depth, warnings=tuple(warnings))


def _contiguous(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {k: np.ascontiguousarray(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
