# SPDX-License-Identifier: Apache-2.0
"""Stretto's scheduler: a linear program decides how much data visits the dimensions in which order.

The dimension that a chunk visits first sees all its bytes, and the last one hardly any. A linear program over the
orders finds the shares with which all dimensions send equally long, and a vertex of it uses at most as many orders as
there are dimensions. Its optimal vertices, the turns of the chunks, the orders of their all-gathers and the queue
disciplines are tried in the simulator, and the best schedule is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from ..solvers.milp import Milp, solve
from ..units import check_seed
from .model import STEADY_CHUNKS, Dim, check_dims, order_loads
from .schedule import DimChunk, DimSchedule
from .schedulers import CHUNKS, baseline, check_request, themis, way
from .simulation import IN_FLIGHT, DimRun, simulate

MAX_BALANCED = 6
"""The most dimensions whose orders fit into one linear program."""
VERTICES = 40
PATIENCE = 8
"""The number of vertices in a row without improvement after which the search ends."""
GOOD_ENOUGH = 0.999
POOR = 0.95
"""The share of the bandwidth below which latency dominates, so that fewer chunks are tried, too."""

Order = tuple[int, ...]


def stretto(
    dims: Sequence[Dim],
    collective: str,
    nbytes: float,
    *,
    chunks: int = CHUNKS,
    in_flight: int = IN_FLIGHT,
    sharing: str = "ordered",
    seed: int = 0,
) -> DimSchedule:
    """The best schedule found, which is never slower than the baseline and Themis in the same model.

    Args:
        dims: The dimensions, 1..6.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: The most chunks, 1..65536.
        in_flight: The most stages that share a dimension, as in `simulate`.
        sharing: "ordered" or "equal", as in `simulate`.
        seed: The seed of the search.

    Returns:
        The schedule, called "stretto".

    Raises:
        InvalidInput: An argument is out of range.
    """
    check_seed(seed)
    dims = _balanceable(dims)
    check_request(collective, chunks)

    def run(schedule: DimSchedule) -> DimRun:
        return simulate(schedule, in_flight=in_flight, sharing=sharing)

    best = min(
        (
            run(baseline(dims, collective, nbytes, chunks=chunks)),
            run(themis(dims, collective, nbytes, chunks=chunks, discipline="fifo")),
            run(themis(dims, collective, nbytes, chunks=chunks, discipline="scf")),
        ),
        key=lambda each: each.total_us,
    )
    fewest = STEADY_CHUNKS if collective == "all_reduce" and any(dim.in_network for dim in dims) else 1
    for count in (chunks, chunks // 4, chunks // 16):
        if count < fewest:
            break
        in_vain = 0
        for tried in balanced_schedules(dims, collective, nbytes, count, seed):
            found = min(map(run, tried), key=lambda each: each.total_us)
            in_vain = 0 if found.total_us < best.total_us * (1 - 1e-4) else in_vain + 1
            best = min(best, found, key=lambda each: each.total_us)
            if best.utilization >= GOOD_ENOUGH or in_vain >= PATIENCE:
                break
        if best.utilization >= POOR:
            break
    return replace(best.schedule, name="stretto")


def resolve(
    schedule: DimSchedule, gb_per_s: Sequence[float], *, in_flight: int = IN_FLIGHT, sharing: str = "ordered"
) -> DimSchedule:
    """Schedule the same collective anew for the bandwidth that was measured in each dimension.

    Args:
        schedule: The schedule in use.
        gb_per_s: The measured rate of a device in each dimension.
        in_flight: The most stages that share a dimension, as in `simulate`.
        sharing: "ordered" or "equal", as in `simulate`.

    Returns:
        A new schedule with at most as many chunks.

    Raises:
        InvalidInput: There is not one rate per dimension, or a rate is out of range.
    """
    if len(gb_per_s) != len(schedule.dims):
        raise InvalidInput(f"gb_per_s: {len(gb_per_s)} rates for {len(schedule.dims)} dimensions")
    dims = [replace(dim, gb_per_s=rate) for dim, rate in zip(schedule.dims, gb_per_s, strict=True)]
    return stretto(
        dims, schedule.collective, schedule.nbytes, chunks=len(schedule.chunks), in_flight=in_flight, sharing=sharing
    )


def best_us(dims: Sequence[Dim], collective: str, nbytes: float) -> float:
    """The least time of the busiest dimension when data may visit the dimensions in any order; no schedule is faster.

    Args:
        dims: The dimensions, 1..6; their latencies and headers are left out.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.

    Returns:
        The time in microseconds.

    >>> thin = [Dim(kind="ring", size=4, gb_per_s=g, step_us=0) for g in (100, 5)]
    >>> round(best_us(thin, "all_reduce", 16e6), 6)  # the second ring has 16/4 (1 - 1/4) MB to send, twice
    1200.0
    """
    check_request(collective, 1)
    alone = collective != "all_reduce"
    bare = [replace(dim, header_bytes=0.0) for dim in _balanceable(dims)]
    _, loads = _orders(bare, nbytes, alone=alone)
    shares = _vertex(loads / loads.max(), [0.0] * len(dims), None)
    return float((shares @ loads).max()) * (1 if alone else 2)


def balanced_shares(
    dims: Sequence[Dim], nbytes: float, *, alone: bool = False, seed: int | None = None
) -> dict[Order, float]:
    """The share of the data for each order of the dimensions, so that the busiest dimension is done soonest.

    Args:
        dims: The dimensions.
        nbytes: The bytes on each device before the first stage.
        alone: Whether the collective is only a reduce-scatter or only an all-gather.
        seed: The seed of a random choice among the optimal vertices; the solver's own vertex when not given.

    Returns:
        The share of each order that is used; they add up to 1.
    """
    orders, loads = _orders(dims, nbytes, alone=alone)
    scale = max(float(loads.max()), *(dim.latency_us for dim in dims))
    values = _vertex(loads / scale, [dim.latency_us / scale for dim in dims], seed)
    return {order: float(x) for order, x in zip(orders, values, strict=True) if x > 1e-9}


def _balanceable(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    if len(dims) > MAX_BALANCED:
        raise InvalidInput(f"dims: at most {MAX_BALANCED} can be balanced, not {len(dims)}")
    return check_dims(dims)


def _orders(dims: Sequence[Dim], nbytes: float, *, alone: bool) -> tuple[list[Order], NDArray[np.float64]]:
    orders = list(itertools.permutations(range(len(dims))))
    return orders, np.array([order_loads(dims, order, nbytes, alone=alone) for order in orders])


def _vertex(loads: NDArray[np.float64], latency: Sequence[float], seed: int | None) -> NDArray[np.float64]:
    count, dims = loads.shape
    model = Milp()
    for _ in range(count):
        model.column(upper=1.0)
    total = model.column(cost=1.0)
    model.row(dict.fromkeys(range(count), 1.0), lower=1.0, upper=1.0)
    for d in range(dims):
        model.row({total: -1.0, **{o: float(loads[o, d]) for o in range(count)}}, upper=-latency[d])
    found = solve(model, limit_s=10.0)
    assert found.values is not None
    if seed is not None:
        rng = np.random.default_rng(seed)
        model.upper[total] = float(found.values[total]) * (1 + 1e-9)
        model.cost = [*rng.random((count,)).tolist(), 0.0]
        again = solve(model, limit_s=10.0)
        found = again if again.values is not None else found
    assert found.values is not None
    shares = np.maximum(found.values[:count], 0.0)
    return np.asarray(shares / shares.sum())


def balanced_schedules(
    dims: tuple[Dim, ...], collective: str, nbytes: float, chunks: int, seed: int
) -> Iterator[list[DimSchedule]]:
    """The schedules to try, as one list per vertex of the linear program.

    Args:
        dims: The dimensions, 1..6.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: How many chunks, 1..65536.
        seed: The seed of the choice among the optimal vertices.

    Returns:
        The lists, at most `VERTICES`.
    """
    seen: set[tuple[tuple[Order, int], ...]] = set()
    alone = collective != "all_reduce"
    in_vain = 0
    for attempt in range(VERTICES):
        chosen = None if attempt == 0 else seed * VERTICES + attempt
        shares = balanced_shares(dims, nbytes, alone=alone, seed=chosen)
        key = tuple((order, round(share * 1e6)) for order, share in shares.items())
        in_vain += 1
        if key in seen:
            if in_vain >= PATIENCE:
                return
            continue
        in_vain = 0
        seen.add(key)
        yield [
            DimSchedule(
                name="stretto", dims=dims, collective=collective, nbytes=nbytes, chunks=pieces, discipline=discipline
            )
            for pieces, discipline in _pieces(shares, collective, chunks)
        ]


def _pieces(shares: dict[Order, float], collective: str, chunks: int) -> Iterator[tuple[tuple[DimChunk, ...], str]]:
    blocks = _cut(shares, collective, chunks)
    # Each order's chunks are spread evenly over the whole: chunk i of n comes at (i + 1/2) / n.
    at = [((i + 0.5) / len(row), number, chunk) for number, row in enumerate(blocks) for i, chunk in enumerate(row)]
    spread = tuple(chunk for _, _, chunk in sorted(at, key=lambda entry: entry[:2]))
    yield spread, "johnson"
    yield spread, "fifo"
    yield tuple(itertools.chain(*blocks)), "johnson"
    if collective == "all_reduce":
        # Gather each chunk in the order of another chunk: the loads stay the same, and a chunk does not have to go
        # straight back to the dimension that it has just been through.
        half = len(spread) // 2
        for others in (spread[::-1], spread[half:] + spread[:half]):
            yield (
                tuple(replace(chunk, all_gather=other.all_gather) for chunk, other in zip(spread, others, strict=True)),
                "johnson",
            )


def _cut(shares: dict[Order, float], collective: str, chunks: int) -> list[list[DimChunk]]:
    """Cut the data into chunks, in number proportional to the shares (at least one of each order).

    The sizes of the chunks make up for the rounding of their numbers.
    """
    orders = sorted(shares, key=lambda order: -shares[order])[:chunks]
    total = sum(shares[order] for order in orders)
    counts = dict.fromkeys(orders, 1)
    for _ in range(chunks - len(orders)):
        counts[max(orders, key=lambda order: shares[order] / counts[order])] += 1
    return [[way(collective, order, shares[order] / total / counts[order])] * counts[order] for order in orders]
