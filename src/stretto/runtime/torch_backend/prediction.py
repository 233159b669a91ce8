# SPDX-License-Identifier: Apache-2.0
"""How long the executor should take for a program: its slices, its windows and fair sharing, on a simulated network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...programs.lowered import Lowered
from ...simulator.messages import MessageGraph
from ...simulator.network import Times, routes_of, simulate_transfers
from ..executor.load import max_chunks

WINDOW = 4
"""Messages of one connection that the executor lets be under way."""
LEAST_SLICE_BYTES = 4096


def slices_of(lowered: Lowered, nbytes: float, message_bytes: int) -> int:
    """In how many slices the executor runs a program on so many bytes."""
    slice_bytes = max(message_bytes // max_chunks(lowered), LEAST_SLICE_BYTES)
    return max(1, int(np.ceil(float(lowered.collective.chunk_share.max()) * nbytes / slice_bytes)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """Every message of every slice: its ends, its bytes, its times."""

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    nbytes: NDArray[np.float64]
    times: Times

    @property
    def total_us(self) -> float:
        """When the last rank has everything."""
        return float(self.times.end_us.max(initial=0.0))


def predict(lowered: Lowered, cluster: Cluster, *, nbytes: float, message_bytes: int) -> Prediction:
    """Simulate a lowered program as the executor runs it: slice behind slice, connections sharing links fairly.

    Waiting for a processor is not in it, and neither are copies and reductions inside a rank.

    >>> from stretto.algorithms import algorithm
    >>> four = Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=1.0)
    >>> ring = algorithm("ring", "all_gather", 4).lower()
    >>> round(predict(ring, four, nbytes=4e6, message_bytes=1 << 18).total_us)
    3012
    """
    slices = slices_of(lowered, nbytes, message_bytes)
    moves = MessageGraph.of(repeated(lowered, slices))
    connection, route, ptr, links = routes_of(moves, cluster, nbytes=nbytes / slices)
    each = moves.transfer_bytes(nbytes / slices)
    times = simulate_transfers(
        cluster,
        routes=(ptr, links),
        route=route,
        connection=connection,
        nbytes=each,
        after=_with_window(moves, connection),
        reduce=moves.reduce,
        gate=(moves.gate_ptr, moves.gate),
        gate_reads=moves.gate_reads,
        contention="fair",
    )
    return Prediction(src=moves.src, dst=moves.dst, nbytes=each, times=times)


def repeated(x: Lowered, times: int) -> Lowered:
    """Every threadblock does all of its instructions for one slice, then all for the next."""
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


def _with_window(moves: MessageGraph, connection: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """What each message waits for, and that the one `WINDOW` before it on its connection has been taken."""
    count = len(connection)
    by_connection = np.argsort(connection, kind="stable")
    same = connection[by_connection]
    earlier = np.full(count, -1, np.int64)
    if count > WINDOW:
        held = same[WINDOW:] == same[:-WINDOW]
        earlier[by_connection[WINDOW:][held]] = by_connection[:-WINDOW][held]
    extra = (earlier >= 0).astype(np.int64)
    ptr = moves.after_ptr + np.concatenate([[0], np.cumsum(extra)])
    after = np.empty(int(ptr[-1]), np.int32)
    last = np.zeros(len(after), np.bool_)
    last[ptr[1:][extra > 0] - 1] = True
    after[last] = earlier[earlier >= 0]
    after[~last] = moves.after
    return ptr, after
