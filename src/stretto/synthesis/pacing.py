# SPDX-License-Identifier: Apache-2.0
"""Keeping to a plan's times: a rank waits for arrivals that the plan has before a send."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program
from ..programs.ir import take_rows
from ..simulator import Timeline

Floats = NDArray[np.float64]


def paced(
    program: Program, start_us: ArrayLike, arrive_us: ArrayLike, *, sends: bool = False, peers: bool = False
) -> Program:
    """Let each transfer also wait for the last transfer that its rank should have received (or delivered) before it.

    A link serves whichever transfer asks first, so data that a rank holds early would overtake data that the plan sends
    first. A rank knows by itself what it has received, so no other rank has to tell it the time.

    Args:
        program: The program; its transfers are in order of planned start.
        start_us: The planned start of each transfer.
        arrive_us: The planned arrival of each transfer.
        sends: Whether to wait for deliveries, too; these waits are lost when the program is lowered.
        peers: Whether to wait for the last transfer from each rank, since one may be ahead of another.

    Returns:
        The program with more dependencies.
    """
    start_us, arrive_us = np.asarray(start_us, np.float64), np.asarray(arrive_us, np.float64)
    count = program.num_transfers
    end = float(arrive_us.max(initial=0.0))
    span = 2 * end + 1
    src = program.src.astype(np.int64)
    waiter = [np.repeat(np.arange(count), np.diff(program.after_ptr))]
    waited = [program.after.astype(np.int64)]
    dst = program.dst.astype(np.int64)
    clocks = [(dst, src == peer) for peer in np.unique(src)] if peers else [(dst, np.ones(count, np.bool_))]
    for rank, some in clocks + [(src, np.ones(count, np.bool_))] * sends:
        arrival = np.lexsort((arrive_us, rank))
        arrival = arrival[some[arrival]]
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
    """Join two programs, the second planned to begin when the first ends; real waits are finer than that.

    Args:
        name: The name of the result.
        collective: The collective that both together carry out.
        halves: The two programs.
        timelines: The timeline of each.
        cluster: The cluster that both are routed on.

    Returns:
        The joined program, paced by the timelines.
    """
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
