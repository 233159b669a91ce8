# SPDX-License-Identifier: Apache-2.0
"""Lowered programs for the simulator: their messages as transfers, with what each waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import InvalidInput
from ..programs.lowered import (
    BUFFERS,
    OPS,
    RECV_REDUCE_COPY,
    RECV_REDUCE_COPY_SEND,
    RECV_REDUCE_SEND,
    WRITES_DST,
    Lowered,
)
from ..programs.streams import InstructionStreams

REDUCING = (RECV_REDUCE_SEND, RECV_REDUCE_COPY, RECV_REDUCE_COPY_SEND)


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageGraph:
    """The messages of a lowered program as transfers that depend on one another.

    A message starts when all instructions before its send (in its threadblock, or waited for) have received their
    messages; it is received when all instructions before its receive have. Local copies and reductions take no time.
    """

    name: str
    collective: Collective
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    lane: NDArray[np.int32]
    reduce: NDArray[np.bool_]
    count: NDArray[np.int32]
    after_ptr: NDArray[np.int64]
    after: NDArray[np.int32]
    gate_ptr: NDArray[np.int64]
    gate: NDArray[np.int32]
    gate_reads: NDArray[np.bool_]
    labels: tuple[str, ...]
    """For each message the receiving instruction and the place that it writes, such as ``r o[3]``."""

    @classmethod
    def of(cls, x: Lowered) -> MessageGraph:
        """The messages of a lowered program, which must have been verified."""
        streams = InstructionStreams.of(x)
        # Threadblocks run side by side: of several messages that are ready, the one of the earlier step goes first.
        order = np.argsort(streams.step[streams.senders], kind="stable")
        senders, receivers = streams.senders[order], streams.receivers[order]
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        pop = np.where(streams.pop >= 0, number[streams.pop], -1)
        waits = _received_before(streams, pop)
        # The message of a fused instruction waits for the message that the same instruction receives.
        own = pop[senders].tolist()
        after_ptr, after = _table(
            [frozenset({m}) if m >= 0 else waits[e] for m, e in zip(own, senders.tolist(), strict=True)]
        )
        gate_ptr, gate = _table([waits[e] for e in receivers.tolist()])
        at = receivers
        stores = [
            f"{OPS[op]} {BUFFERS[buf]}[{off}]" if WRITES_DST[op] else OPS[op]
            for op, buf, off in zip(x.op[at].tolist(), x.dst_buf[at].tolist(), x.dst_off[at].tolist(), strict=True)
        ]
        return cls(
            name=x.name,
            collective=x.collective,
            src=streams.rank[senders],
            dst=streams.rank[at],
            lane=x.tb_channel[streams.tb[at]],
            reduce=np.isin(x.op[at], REDUCING),
            count=x.count[at],
            after_ptr=after_ptr,
            after=after,
            gate_ptr=gate_ptr,
            gate=gate,
            gate_reads=np.zeros(len(gate), np.bool_),
            labels=tuple(stores),
        )

    def transfer_bytes(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes of each message when the collective moves `nbytes`; chunks must be of one size."""
        share = self.collective.chunk_share
        if share.max() > share.min() * (1 + 1e-9):
            raise InvalidInput(f"{self.name}: chunks of a lowered program must be of one size to be timed")
        return self.count.astype(np.float64) * (float(share[0]) * nbytes)


def _received_before(streams: InstructionStreams, pop: NDArray[np.int64]) -> list[frozenset[int]]:
    """For each instruction, the messages that must have been received before it runs (only the last of each chain)."""
    count = len(pop)
    before: list[list[int]] = [[] for _ in range(count)]
    waiting = np.zeros(count, np.int64)
    followers: list[list[int]] = [[] for _ in range(count)]
    for first, second in streams.local_edges():
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            before[b].append(a)
            followers[a].append(b)
            waiting[b] += 1
    result: list[frozenset[int]] = [frozenset()] * count
    ready = np.flatnonzero(waiting == 0).tolist()
    while ready:
        e = ready.pop()
        found: set[int] = set()
        for a in before[e]:
            got = int(pop[a])
            found |= {got} if got >= 0 else result[a]
        result[e] = frozenset(found)
        for b in followers[e]:
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    return result


def _table(rows: list[frozenset[int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    ptr = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return ptr, np.array([m for row in rows for m in sorted(row)], np.int32)
