# SPDX-License-Identifier: Apache-2.0
"""The model with single messages: one device stands for all, and each dimension is a link that carries its messages.

A stage is several rounds, and a later round is sent only when the round before has arrived. Where many stages of a
dimension are in progress, the first rounds of all of them are on the link before the second round of any: all end
late, about together, and the next dimension has nothing to do meanwhile. A *window* prevents this: a stage begins when
the stage that came so many turns before it in the same dimension is ready to send its last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Link, Node
from ..errors import InvalidInput
from ..simulator.network import simulate_transfers
from .model import AG, Dim
from .schedule import DimSchedule
from .simulation import MAX_IN_FLIGHT, simulate

Ints = NDArray[np.int64]


def round_shares(dim: Dim, *, reduce: bool) -> tuple[float, ...]:
    """The part of a stage's bytes that each of its rounds sends.

    >>> round_shares(Dim(kind="switch", size=8, gb_per_s=1, step_us=0), reduce=True)
    (0.5714285714285714, 0.2857142857142857, 0.14285714285714285)
    """
    count = dim.steps
    if dim.kind != "switch" or count == 1:
        return (1 / count,) * count
    halves = tuple(2.0 ** (count - 1 - at) / (2**count - 1) for at in range(count))
    return halves if reduce else halves[::-1]


def beginnings(schedule: DimSchedule) -> Ints:
    """All stages in the order in which they begin."""
    run = simulate(schedule, in_flight=MAX_IN_FLIGHT)
    return np.lexsort((np.arange(len(run.start_us)), run.end_us, run.start_us))


def before_in_window(dim: NDArray[np.integer], window: int | None) -> Ints:
    """For each stage in order of beginning, the stage that its window makes it wait for, or -1.

    Args:
        dim: The dimension of each stage, in the order in which stages begin.
        window: The most stages of a dimension in progress at a time, >= 1; None for any number.

    Returns:
        The place of the stage `window` turns before in the same dimension.

    Raises:
        InvalidInput: The window is smaller than 1.
    """
    if window is not None and window < 1:
        raise InvalidInput(f"window: must be >= 1 or None, not {window}")
    found = np.full(len(dim), -1, np.int64)
    for d in np.unique(dim) if window is not None else ():
        mine = np.flatnonzero(dim == d)
        found[mine[window:]] = mine[: max(len(mine) - (window or 0), 0)]
    return found


def message_us(schedule: DimSchedule, *, window: int | None = None) -> float:
    """The time of a schedule when each message is counted, as on links.

    Stages begin in the schedule's `order`, or else in the order in which they do with any number of them in flight.

    Args:
        schedule: The schedule; its dimensions do not reduce in the network.
        window: The most stages of a dimension in progress at a time, >= 1; None for any number.

    Returns:
        The time in microseconds.

    Raises:
        InvalidInput: Switches reduce, or the window is smaller than 1.

    >>> from .schedulers import baseline
    >>> dims = [Dim(kind="ring", size=4, gb_per_s=g, step_us=1) for g in (100, 50)]
    >>> [round(message_us(baseline(dims, "all_reduce", 16e6, chunks=8), window=w)) for w in (None, 1, 2)]
    [250, 273, 241]
    """
    if any(dim.in_network for dim in schedule.dims):
        raise InvalidInput("dims: messages of switches that reduce are not modelled")
    table, dims, rows = schedule.stages, schedule.dims, beginnings(schedule)
    stage = (np.arange(len(table.dim)) - table.chunk_ptr[table.chunk])[rows]
    reduce = stage < (0 if schedule.collective == AG else len(dims))
    dim = table.dim[rows].astype(np.int64)
    shares = _share_table(dims)
    count = np.array([each.steps for each in dims])[dim]
    last = np.cumsum(count) - 1
    first = last - count + 1
    place = np.empty(len(rows), np.int64)
    place[rows] = np.arange(len(rows))

    owner = np.repeat(np.arange(len(rows)), count)
    at = np.arange(len(owner)) - first[owner]
    # A message waits for the round before it, or for the last round of its chunk's stage before.
    stage_before = np.where(stage > 0, last[place[np.maximum(rows - 1, 0)]], -1)
    waits = np.where(at > 0, np.arange(len(owner)) - 1, stage_before[owner])
    ahead = before_in_window(dim, window)
    turn = np.where((ahead >= 0) & (count > 1), last[ahead] - 1, -1)[owner]
    both = np.stack([waits, np.where(at == 0, turn, -1)], axis=1)
    switch = np.array([each.kind == "switch" for each in dims])[dim]
    lane = (dim * shares.shape[2]) * 2 + reduce * switch
    times = simulate_transfers(
        _one_device(dims), routes=(np.arange(len(dims) + 1), np.arange(len(dims), dtype=np.int32)),
        route=dim[owner].astype(np.int32), connection=(lane[owner] + 2 * at).astype(np.int32),
        nbytes=table.wire_bytes[rows][owner] * shares[dim[owner], reduce[owner].astype(np.int64), at],
        after=(np.concatenate([[0], np.cumsum((both >= 0).sum(axis=1))]), both[both >= 0].astype(np.int32)),
    )  # fmt: skip
    return float(times.end_us.max())


@lru_cache(maxsize=64)
def _share_table(dims: tuple[Dim, ...]) -> NDArray[np.float64]:
    found = np.zeros((len(dims), 2, max(dim.steps for dim in dims)))
    for at, dim in enumerate(dims):
        for reduce in (False, True):
            found[at, int(reduce), : dim.steps] = round_shares(dim, reduce=reduce)
    return found


@lru_cache(maxsize=64)
def _one_device(dims: Sequence[Dim]) -> Cluster:
    """A link for each dimension."""
    nodes = [Node(name=f"{end}{at}") for at in range(len(dims)) for end in ("out", "in")]
    links = [
        Link(src=2 * at, dst=2 * at + 1, alpha_us=dim.step_us, gb_per_s=dim.gb_per_s) for at, dim in enumerate(dims)
    ]
    return Cluster.build("one device", nodes=nodes, links=links)
