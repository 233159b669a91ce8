"""Keeping to a plan: what a rank receives tells it the time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program
from ..programs.ir import take_rows
from ..simulator import Timeline

Floats = NDArray[np.float64]


def paced(program: Program, start_us: ArrayLike, arrive_us: ArrayLike, *, sends: bool = False) -> Program:
    """The program in which each transfer also waits for what its rank should last have received (and delivered).

    A link serves whoever asks first, so what a rank holds early would overtake what the plan sends first. Transfers
    must be in order of planned start. A rank knows by itself what it waits for: nobody else has to tell it the time.
    What it received is known to a lowered program too; what it delivered (`sends`) is not.
    """
    start_us, arrive_us = np.asarray(start_us, np.float64), np.asarray(arrive_us, np.float64)
    count = program.num_transfers
    end = float(arrive_us.max(initial=0.0))
    span = 2 * end + 1
    src = program.src.astype(np.int64)
    waiter = [np.repeat(np.arange(count), np.diff(program.after_ptr))]
    waited = [program.after.astype(np.int64)]
    for rank in (program.dst.astype(np.int64), src)[: 1 + sends]:
        arrival = np.lexsort((arrive_us, rank))
        times = rank[arrival] * span + arrive_us[arrival]
        latest = np.searchsorted(times, src * span + start_us + 1e-9 * end, "right") - 1
        clock = arrival[np.maximum(latest, 0)]
        held = np.flatnonzero((latest >= 0) & (rank[clock] == src) & (clock < np.arange(count)))
        waiter.append(held)
        waited.append(clock[held])
    pairs = np.unique(np.concatenate(waiter) * count + np.concatenate(waited))
    after_ptr = np.searchsorted(pairs // count, np.arange(count + 1)).astype(np.int64)
    return program.replace(after_ptr=after_ptr, after=(pairs % count).astype(np.int32))


def one_then_other(
    name: str, collective: Collective, halves: tuple[Program, Program], timelines: tuple[Timeline, Timeline],
    cluster: Cluster,
) -> Program:  # fmt: skip
    """Two programs as one, the second planned to begin when the first ends (what really waits is finer)."""
    first, second = halves
    keys = ("src", "dst", "reduce", "lane", "chunk")
    whole = {key: np.concatenate([getattr(p, key) for p in halves]) for key in keys}
    start, arrive = (
        np.concatenate([getattr(timelines[0], key), getattr(timelines[1], key) + timelines[0].total_us])
        for key in ("start_us", "end_us")
    )
    route = np.concatenate([first.route, np.where(second.route >= 0, second.route + len(first.routes), -1)])
    ptr = np.concatenate([first.chunk_ptr, first.chunk_ptr[-1] + second.chunk_ptr[1:]])
    order = np.lexsort((np.arange(len(start)), start))
    ptr, chunk = take_rows(ptr, whole.pop("chunk"), order)
    joined = Program.from_steps(
        name, collective, **{key: column[order] for key, column in whole.items()}, chunk=chunk, chunk_ptr=ptr,
        step=np.arange(len(order)), route=route[order], routes=first.routes + second.routes,
        routes_digest=cluster.digest if first.routes or second.routes else "",
    )  # fmt: skip
    return paced(joined, start[order], arrive[order], sends=True)
