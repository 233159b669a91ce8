# SPDX-License-Identifier: Apache-2.0
"""Provisioning: which dimensions have too much or too little bandwidth, and how to spend a budget (section 6.3).

In the baseline dimension L sends ``(1 - 1/P_L) / (P_1 ... P_{L-1} BW_L)`` for each byte. A pair K < L is just enough
when both send equally long (the paper's rule leaves out the factors ``1 - 1/P``), over-provisioned when L is done
sooner (only a scheduler that changes orders uses the rest), under-provisioned when L is done later (no order gives L
less).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InvalidInput
from ..solvers.milp import Milp, solve
from .balance import MAX_BALANCED, best_us
from .model import Dim, check_dims, ideal_us, order_loads

CLOSE = 0.02
"""Times that differ by less than this part count as equal."""
JUST_ENOUGH, OVER, UNDER = "just enough", "over-provisioned", "under-provisioned"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The provisioning of the outer of two dimensions in relation to the inner one."""

    inner: int
    outer: int
    ratio: float
    """The time that the outer dimension sends in the baseline, divided by that of the inner dimension."""

    @property
    def verdict(self) -> str:
        """The provisioning in the paper's words: just enough, over-provisioned or under-provisioned."""
        if abs(self.ratio - 1) <= CLOSE:
            return JUST_ENOUGH
        return OVER if self.ratio < 1 else UNDER


@dataclass(frozen=True, kw_only=True)
class Increment:
    """The speedups of large all-reduces from `gb_per_s` more bandwidth in one dimension."""

    dim: int
    gb_per_s: float
    baseline_speedup: float
    best_speedup: float
    ideal_speedup: float

    @property
    def pays(self) -> bool:
        """Whether the best schedule gains at least nine tenths of what the ideal gains."""
        return self.best_speedup - 1 >= 0.9 * (self.ideal_speedup - 1)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """An assessment of a network's bandwidth; utilisations are those of a large all-reduce, without latency."""

    dims: tuple[Dim, ...]
    pairs: tuple[Pair, ...]
    baseline_utilization: float
    best_utilization: float
    """The most that any orders of chunks can use."""
    increments: tuple[Increment, ...]
    usable: tuple[tuple[float, float], ...]
    """For each dimension, the least and the largest part of the total bandwidth that can be used fully there."""


@dataclass(frozen=True, kw_only=True)
class BandwidthSplit:
    """A total bandwidth per device spread over the dimensions."""

    gb_per_s: tuple[float, ...]
    baseline_utilization: float
    best_utilization: float


def advise(dims: Sequence[Dim], *, increment: float = 0.1) -> Advice:
    """Assess a network; each increment adds `increment` times its total bandwidth to one dimension.

    >>> dims = [Dim(kind="switch", size=4, gb_per_s=g, step_us=0) for g in (100, 50)]
    >>> advice = advise(dims)
    >>> advice.pairs[0].verdict, round(advice.baseline_utilization, 3), round(advice.best_utilization, 3)
    ('over-provisioned', 0.833, 1.0)
    """
    dims = _checked(dims)
    if not 0 < increment <= 10:
        raise InvalidInput(f"increment: must be above 0 and at most 10, not {increment:g}")
    sending = order_loads(dims, range(len(dims)), 1e9)
    pairs = tuple(
        Pair(inner=k, outer=m, ratio=sending[m] / sending[k]) for k, m in itertools.combinations(range(len(dims)), 2)
    )
    more = increment * sum(dim.gb_per_s for dim in dims)
    grown = [
        tuple(replace(dim, gb_per_s=dim.gb_per_s + more * (at == chosen)) for at, dim in enumerate(dims))
        for chosen in range(len(dims))
    ]
    before = _times(dims)
    increments = tuple(
        Increment(
            dim=at, gb_per_s=more, baseline_speedup=before[0] / after[0], best_speedup=before[1] / after[1],
            ideal_speedup=before[2] / after[2],
        )
        for at, after in enumerate(map(_times, grown))
    )  # fmt: skip
    return Advice(
        dims=dims, pairs=pairs, baseline_utilization=before[2] / before[0], best_utilization=before[2] / before[1],
        increments=increments, usable=tuple(_usable(dims)),
    )  # fmt: skip


def just_enough(dims: Sequence[Dim], gb_per_s: float) -> BandwidthSplit:
    """The split of a total bandwidth that every scheduler uses fully, even the baseline.

    >>> dims = [Dim(kind="switch", size=size, gb_per_s=1, step_us=0) for size in (16, 8, 8)]
    >>> [round(rate, 2) for rate in just_enough(dims, 300).gb_per_s]
    [281.52, 16.42, 2.05]
    """
    dims = _checked(dims)
    sent = _bytes(dims, range(len(dims)))
    return _split(dims, sent / sent.sum() * _total(gb_per_s))


def nearest(dims: Sequence[Dim], gb_per_s: float) -> BandwidthSplit:
    """The split of a total bandwidth nearest to today's proportions among those that some schedule uses fully."""
    dims = _checked(dims)
    total = _total(gb_per_s)
    today = np.array([dim.gb_per_s for dim in dims])
    today = today / today.sum()
    sent = np.array([_bytes(dims, order) for order in itertools.permutations(range(len(dims)))])
    shares = sent / sent.sum(axis=1, keepdims=True)
    model = Milp()
    ways = [model.column(upper=1.0) for _ in shares]
    model.row(dict.fromkeys(ways, 1.0), lower=1.0, upper=1.0)
    for at in range(len(dims)):
        away = model.column(cost=1.0, upper=2.0)
        terms = {way: float(shares[way, at]) for way in ways}
        model.row({**terms, away: -1.0}, upper=float(today[at]))
        model.row({**terms, away: 1.0}, lower=float(today[at]))
    found = solve(model, limit_s=10.0)
    assert found.values is not None
    return _split(dims, found.values[: len(ways)] @ shares * total)


def _split(dims: tuple[Dim, ...], rates: Sequence[float]) -> BandwidthSplit:
    given = tuple(float(rate) for rate in rates)
    there = tuple(replace(dim, gb_per_s=rate) for dim, rate in zip(dims, given, strict=True))
    baseline, best, ideal = _times(there)
    return BandwidthSplit(
        gb_per_s=given, baseline_utilization=ideal / baseline, best_utilization=min(1.0, ideal / best)
    )


def _times(dims: tuple[Dim, ...]) -> tuple[float, float, float]:
    """The times of a large all-reduce in the baseline, at best, and ideally."""
    nbytes = 1e9
    baseline = 2 * max(order_loads(dims, range(len(dims)), nbytes))
    return baseline, best_us(dims, "all_reduce", nbytes), ideal_us(dims, "all_reduce", nbytes)


def _usable(dims: tuple[Dim, ...]) -> list[tuple[float, float]]:
    shares = [_bytes(dims, order) for order in itertools.permutations(range(len(dims)))]
    table = np.array([row / row.sum() for row in shares])
    return [(float(low), float(high)) for low, high in zip(table.min(axis=0), table.max(axis=0), strict=True)]


def _bytes(dims: tuple[Dim, ...], order: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    loads = order_loads(dims, order, 1e9)
    return np.array([load * dim.bytes_per_us for load, dim in zip(loads, dims, strict=True)])


def _checked(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    if len(dims) > MAX_BALANCED:
        raise InvalidInput(f"dims: at most {MAX_BALANCED}, not {len(dims)}")
    return tuple(replace(dim, header_bytes=0.0) for dim in check_dims(dims))


def _total(gb_per_s: float) -> float:
    if not 0 < gb_per_s < math.inf:
        raise InvalidInput(f"budget: must be > 0, not {gb_per_s:g}")
    return gb_per_s
