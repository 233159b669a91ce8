# SPDX-License-Identifier: Apache-2.0
"""A lowered program as a runtime runs it: slices, windows, and what every instruction costs its threadblock.

Every instruction becomes up to three events of the network simulator. It is *ready* when the one before it in its
threadblock is done, what it waits for is done and its message has arrived, and after its price; then its *work* on the
bytes and its *message* run side by side. The next instruction of the threadblock waits for the work, and for the
message too where the runtime's blocks move the bytes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..errors import InvalidInput
from ..programs import Program, SymmetricProgram
from ..programs.lower import lower
from ..programs.lowered import BUFFERS, OPS, WRITES_DST, Lowered
from ..programs.streams import Edges, InstructionStreams, rows_from_edges
from ..units import format_bytes
from .fused_timeline import simulate_fused
from .messages import MessageGraph
from .network import Rows, Times, routes_of, simulate_transfers
from .runtimes import Protocol, Runtime, runtime_of
from .timeline import Timeline

LEAST_SLICE_BYTES = 4096
WORKS = {
    "s": ("put",), "r": ("receive",), "rcs": ("receive", "put"), "rrs": ("reduce", "put"), "rrc": ("reduce",),
    "rrcs": ("reduce", "put"), "cpy": ("copy",), "re": ("reduce",),
}  # fmt: skip
"""What each kind of instruction does with its bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedRun:
    """The messages and the instructions of a lowered program, all slices included, and their times.

    Instructions have times only where the runtime has prices; else there are none. The critical path is of
    instructions where they have times, else of messages.
    """

    streams: Lowered
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    nbytes: NDArray[np.float64]
    message_start_us: NDArray[np.float64]
    message_end_us: NDArray[np.float64]
    critical: NDArray[np.int32]
    link_busy_us: NDArray[np.float64]
    link_bytes: NDArray[np.float64]
    link_load: NDArray[np.float64]
    start_us: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    end_us: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def total_us(self) -> float:
        """When the last rank is done."""
        return float(max(self.message_end_us.max(initial=0.0), self.end_us.max(initial=0.0)))


def slices_of(x: Lowered, nbytes: float, slice_bytes: int) -> int:
    """In how many slices a runtime runs streams on so many bytes, when a message may have `slice_bytes`.

    Args:
        x: The instruction streams.
        nbytes: The bytes that the collective moves.
        slice_bytes: The most bytes of a message; 0: no limit.

    Returns:
        The number of slices, >= 1.
    """
    if not slice_bytes:
        return 1
    most = max(slice_bytes // x.max_chunks, LEAST_SLICE_BYTES)
    return max(1, int(np.ceil(float(x.collective.chunk_share.max()) * nbytes / most)))


def run_priced(
    lowered: Lowered,
    cluster: Cluster,
    *,
    nbytes: float,
    runtime: Runtime,
    dtype: str | None = None,
    contention: str | None = None,
    alpha: str = "pipelined",
    channels: Iterable[str] | None = None,
    load_slots: int = 0,
) -> PricedRun:
    """Simulate a lowered program, which must have been verified, as a runtime runs it.

    Args:
        lowered: The instruction streams.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        runtime: The price list.
        dtype: The type of the elements, where the runtime's price of adding depends on it.
        contention: How messages share links; by default as the runtime says, else as the cluster needs.
        alpha: As in `simulate`.
        channels: The channels whose links may be used; all when not given.
        load_slots: As in `simulate`.

    Returns:
        The times.

    Raises:
        InvalidInput: A rank has more threadblocks than the runtime runs, or the runtime lacks the streams' protocol.
    """
    protocol = runtime.protocol(lowered.protocol)
    most = int(np.bincount(lowered.tb_rank, minlength=1).max(initial=0))
    if runtime.max_blocks and most > runtime.max_blocks:
        limit = f"the {runtime.max_blocks} that {runtime.name} runs"
        raise InvalidInput(f"{lowered.name}: {most} threadblocks of a rank are more than {limit}")
    slices = slices_of(lowered, nbytes, runtime.slice_bytes)
    streams = repeated(lowered, slices)
    moves = MessageGraph.of(streams)
    each = moves.transfer_bytes(nbytes / slices) * protocol.bytes_factor
    connection, route, ptr, links = routes_of(moves, cluster, channels, nbytes=nbytes / slices)
    modes: dict[str, Any] = {"contention": contention or runtime.contention, "alpha": alpha, "load_slots": load_slots}
    if runtime.is_free:
        times = simulate_transfers(
            cluster,
            routes=(ptr, links),
            route=route,
            connection=connection,
            nbytes=each,
            after=_with_window(moves, connection, runtime.window),
            reduce=moves.reduce,
            gate=(moves.gate_ptr, moves.gate),
            gate_reads=moves.gate_reads,
            **modes,
        )
        return PricedRun(
            streams=streams,
            src=moves.src,
            dst=moves.dst,
            nbytes=each,
            message_start_us=times.start_us,
            message_end_us=times.end_us,
            critical=times.critical_path,
            link_busy_us=times.link_busy_us,
            link_bytes=times.link_bytes,
            link_load=times.link_load,
        )
    events = _Events.of(streams, nbytes / slices, runtime, protocol, dtype)
    first = events.first_message
    # Events without links take the empty route behind the others, each on a connection of its own.
    times = simulate_transfers(
        cluster,
        routes=(np.append(ptr, ptr[-1]), links),
        route=np.concatenate([np.full(first, len(ptr) - 1), route]).astype(np.int32),
        connection=np.concatenate([np.arange(first) + len(each), connection]).astype(np.int32),
        nbytes=np.concatenate([np.zeros(first), each]),
        after=events.after,
        # Adding takes the time that the runtime says, else the time that the cluster says.
        reduce=np.append(np.zeros(first, np.bool_), moves.reduce & (not runtime.us_per_byte("reduce", dtype))),
        delay_us=events.delay_us,
        **modes,
    )
    return events.run(streams, moves, each, times)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Events:
    """The events of priced streams: instructions being ready, their work, their messages, in this order."""

    count: int
    first_message: int
    senders: NDArray[np.int32]
    """The instruction that sends each message; messages are numbered as in `MessageGraph`."""
    work: NDArray[np.int64]
    """The event that is each instruction's work; its own number where it has none."""
    after: Rows
    delay_us: NDArray[np.float64]
    holds_block: bool

    @classmethod
    def of(cls, x: Lowered, nbytes: float, runtime: Runtime, protocol: Protocol, dtype: str | None) -> _Events:
        streams = InstructionStreams.of(x)
        instructions, messages = x.num_instructions, len(streams.senders)
        share = float(x.collective.chunk_share[0]) * nbytes * protocol.bytes_factor
        per_byte = np.array([sum(runtime.us_per_byte(work, dtype) for work in WORKS.get(op, ())) for op in OPS])
        work_us = per_byte[x.op] * x.count * share
        works = np.flatnonzero(work_us > 0)
        first = instructions + len(works)
        work = np.arange(instructions, dtype=np.int64)
        work[works] = instructions + np.arange(len(works))
        # Of several messages that are ready at one moment, that of the earlier step goes first, as in `MessageGraph`.
        order = np.argsort(streams.step[streams.senders], kind="stable")
        message = np.empty(messages, np.int64)
        message[order] = first + np.arange(messages)
        price = np.array([runtime.instruction_us.get(op, 0.0) for op in OPS])[x.op]
        price = price + np.where(streams.waits_for >= 0, runtime.handover_us, 0.0)
        price = price + np.where(streams.pop >= 0, protocol.signal_us, 0.0)
        price = price + np.where((streams.step == 0), runtime.launch_us, 0.0)

        def done(those: NDArray[np.integer]) -> list[tuple[NDArray[np.integer], NDArray[np.bool_]]]:
            """The events that mean that instructions are done, each with those of them that it is for."""
            found = [(work[those], np.ones(len(those), np.bool_))]
            if runtime.holds_block:
                sends = streams.push[those] >= 0
                found.append((message[np.maximum(streams.push[those], 0)], sends))
            return found

        edges: list[Edges] = [(works, work[works]), (streams.senders, message)]
        for before, behind in streams.local_edges():
            edges += [(event[which], behind[which]) for event, which in done(before)]
        # A receiver goes on when the message is there and its sender has done its part.
        edges += [(message, streams.receivers), (work[streams.senders], streams.receivers)]
        if runtime.window:
            number = np.arange(messages)
            begin = np.repeat(streams.connection_ptr[:-1], np.diff(streams.connection_ptr))
            held = np.flatnonzero(number - begin >= runtime.window)
            edges += [
                (event[which], message[held][which]) for event, which in done(streams.receivers[held - runtime.window])
            ]
        delay = np.zeros(first + messages)
        delay[:instructions] = price
        delay[work[works]] = work_us[works]
        return cls(
            count=first + messages, first_message=first, senders=streams.senders[order], work=work,
            after=rows_from_edges(first + messages, edges), delay_us=delay, holds_block=runtime.holds_block,
        )  # fmt: skip

    def run(self, x: Lowered, moves: MessageGraph, nbytes: NDArray[np.float64], times: Times) -> PricedRun:
        """The times of messages and instructions from those of events."""
        instructions = x.num_instructions
        end = times.end_us[self.work].copy()
        if self.holds_block:
            np.maximum.at(end, self.senders, times.end_us[self.first_message :])
        owner = np.zeros(self.count, np.int32)
        owner[self.work] = np.arange(instructions)
        owner[:instructions] = np.arange(instructions)
        owner[self.first_message :] = self.senders
        path = owner[times.critical_path]
        keep = np.append(np.ones(min(len(path), 1), np.bool_), path[1:] != path[:-1])
        return PricedRun(
            streams=x, src=moves.src, dst=moves.dst, nbytes=nbytes,
            message_start_us=times.start_us[self.first_message :], message_end_us=times.end_us[self.first_message :],
            start_us=times.start_us[:instructions], end_us=end, critical=path[keep],
            link_busy_us=times.link_busy_us, link_bytes=times.link_bytes, link_load=times.link_load,
        )  # fmt: skip


def simulate_priced(
    program: Program | SymmetricProgram | Lowered,
    cluster: Cluster,
    nbytes: float,
    runtime: Runtime | str | Path,
    contention: str | None,
    alpha: str,
    channels: Iterable[str] | None,
    load_slots: int = 0,
) -> Timeline:
    """What `simulate` does where a runtime is given; the arguments are its own.

    Args:
        program: The program; one that is not lowered is lowered as `lower` does it by default.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        runtime: The runtime, its name or its file.
        contention: How messages share links; None: as the runtime says.
        alpha: "pipelined" or "blocking".
        channels: The channels that may be used; None: all.
        load_slots: As in `simulate`.

    Returns:
        The timeline: a span for each instruction, or for each message where instructions cost nothing; for a runtime
        that runs steps a span for each step.

    Raises:
        InvalidInput: The program is stored by its symmetry, or the runtime cannot run it.
    """
    if isinstance(program, SymmetricProgram):
        raise InvalidInput("runtime: a program that is stored by its symmetry must be expanded first")
    prices = runtime_of(runtime)
    if not prices.knows_streams:
        return simulate_fused(program, cluster, nbytes, prices, contention, alpha, channels, load_slots)
    lowered = program if isinstance(program, Lowered) else lower(program)
    lowered.verify()
    run = run_priced(
        lowered, cluster, nbytes=nbytes, runtime=prices, contention=contention, alpha=alpha, channels=channels,
        load_slots=load_slots,
    )  # fmt: skip
    facts = {
        "program": lowered.name,
        "cluster": cluster.name,
        "bytes": format_bytes(nbytes),
        "runtime": prices.name,
        "alpha": alpha,
    }
    if len(run.start_us):
        streams, stream, names, name = spans_of(run)
        rank = np.repeat(run.streams.tb_rank, np.diff(run.streams.tb_ptr)).astype(np.int32)
        share = float(lowered.collective.chunk_share[0]) * nbytes * lowered.num_instructions
        moved = np.asarray(run.streams.count * (share / max(run.streams.num_instructions, 1)), np.float64)
        start, end, critical = run.start_us, run.end_us, run.critical
    else:
        streams = tuple(f"to {peer}" for peer in range(lowered.collective.num_ranks))
        stream, rank, moved = run.dst, run.src, run.nbytes
        names, name = ("message",), np.zeros(len(run.src), np.int32)
        start, end, critical = run.message_start_us, run.message_end_us, run.critical
    return Timeline(
        total_us=run.total_us,
        rank=rank,
        stream=stream,
        name=name,
        start_us=start,
        end_us=end,
        nbytes=moved,
        streams=streams,
        names=names,
        link_names=tuple(cluster.link_name(i) for i in range(cluster.num_links)),
        link_busy_us=run.link_busy_us,
        link_bytes=run.link_bytes,
        link_load=run.link_load,
        critical_path=critical,
        facts=tuple(facts.items()),
    )


def spans_of(run: PricedRun) -> tuple[tuple[str, ...], NDArray[np.int32], tuple[str, ...], NDArray[np.int32]]:
    """The streams and names of a timeline's spans, one for each instruction: ``block 3`` and ``rrc o[2]``."""
    x = run.streams
    first = np.searchsorted(x.tb_rank, np.arange(x.collective.num_ranks + 1))
    block = np.repeat(np.arange(len(x.tb_rank)) - first[x.tb_rank], np.diff(x.tb_ptr))
    labels = [
        f"{OPS[op]} {BUFFERS[buf]}[{off}]" if WRITES_DST[op] else OPS[op]
        for op, buf, off in zip(x.op.tolist(), x.dst_buf.tolist(), x.dst_off.tolist(), strict=True)
    ]
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    streams = tuple(f"block {b}" for b in range(int(block.max(initial=-1)) + 1))
    return streams, block.astype(np.int32), tuple(number), np.array([number[label] for label in labels], np.int32)


def repeated(x: Lowered, times: int) -> Lowered:
    """Every threadblock does all of its instructions for one slice, then all for the next."""
    if times == 1:
        return x
    length = np.diff(x.tb_ptr)
    order = np.concatenate(
        [np.tile(np.arange(begin, end), times) for begin, end in zip(x.tb_ptr[:-1], x.tb_ptr[1:], strict=True)]
        or [np.zeros(0, np.int64)]
    ).astype(np.int64)
    at = np.concatenate([np.repeat(np.arange(times), n) for n in length.tolist()] or [np.zeros(0, np.int64)])
    dep_tb, dep_step = x.dep_tb[order], x.dep_step[order]
    # A step is numbered inside its threadblock, whose streams have grown too.
    first = np.concatenate([[0], np.cumsum(np.bincount(x.tb_rank, minlength=x.collective.num_ranks))])
    rank = np.repeat(x.tb_rank, length * times)
    there = length[np.where(dep_tb >= 0, first[rank] + dep_tb, 0)]
    columns = {key: getattr(x, key)[order] for key in ("op", "src_buf", "src_off", "dst_buf", "dst_off", "count")}
    return replace(
        x,
        tb_ptr=(x.tb_ptr * times).astype(x.tb_ptr.dtype),
        dep_tb=dep_tb,
        dep_step=np.where(dep_tb >= 0, dep_step + at * there, dep_step).astype(x.dep_step.dtype),
        **columns,
    )


def _with_window(moves: MessageGraph, connection: NDArray[np.int32], window: int) -> Rows:
    """What each message waits for, and that the one `window` before it on its connection has been taken."""
    if not window:
        return moves.after_ptr, moves.after
    count = len(connection)
    by_connection = np.argsort(connection, kind="stable")
    same = connection[by_connection]
    earlier = np.full(count, -1, np.int64)
    if count > window:
        held = same[window:] == same[:-window]
        earlier[by_connection[window:][held]] = by_connection[:-window][held]
    extra = (earlier >= 0).astype(np.int64)
    ptr = moves.after_ptr + np.concatenate([[0], np.cumsum(extra)])
    after = np.empty(int(ptr[-1]), np.int32)
    last = np.zeros(len(after), np.bool_)
    last[ptr[1:][extra > 0] - 1] = True
    after[last] = earlier[earlier >= 0]
    after[~last] = moves.after
    return ptr, after
