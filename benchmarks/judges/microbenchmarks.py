# SPDX-License-Identifier: Apache-2.0
"""The shapes of SYNDICATE's figures 16 to 18 from a cost model: which execution plan wins at which size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from stretto.cluster import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.planner.costs.channels import Binding, bindings_for
from stretto.planner.costs.concurrent import ConcurrentProgram, together
from stretto.planner.costs.costs import CostModel, Motion, SimulatedCosts, launch_us
from stretto.planner.costs.measured import LayeredCosts, MeasuredCosts
from stretto.simulator import simulate
from stretto.units import KB, MB, format_bytes, format_us

SIZES = tuple(int(16 * KB * 4**step) for step in range(9))
"""Sizes from 16 KB to about 1 GB."""
PAIR_SIZES = (2 * MB, 4 * MB, 8 * MB, 16 * MB)
PAIR_ALL_REDUCE = 256 * MB
"""An all-reduce of hundreds of MB, as in DLRM, beside all-to-alls of some GB (8 MB per rank are 1 GB on 128 ranks)."""
WAYS = (1, 2, 4)
PAIR_WAYS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Times of several plans over sizes, and the plans that win in the paper's figure."""

    name: str
    sizes: tuple[int, ...]
    times_us: Mapping[str, tuple[float, ...]]
    expected: tuple[str, ...]
    """The plans that should win, from the smallest sizes to the largest."""
    note: str = ""

    @property
    def winners(self) -> tuple[str, ...]:
        """The fastest plan at each size."""
        return tuple(
            min(self.times_us, key=lambda plan, at=at: self.times_us[plan][at])  # type: ignore[misc]
            for at in range(len(self.sizes))
        )

    @property
    def holds(self) -> bool:
        """Whether exactly the expected plans win, in that order."""
        return tuple(dict.fromkeys(self.winners)) == self.expected and self._runs == len(self.expected)

    @property
    def says(self) -> str:
        """One line of text: which plan wins from which size on."""
        parts = [
            f"{plan} from {format_bytes(self.sizes[at])}"
            for at, plan in enumerate(self.winners)
            if at == 0 or plan != self.winners[at - 1]
        ]
        return f"{self.name}: {', '.join(parts)}; {'as' if self.holds else 'not as'} in the paper"

    @property
    def _runs(self) -> int:
        return 1 + sum(a != b for a, b in pairwise(self.winners))

    def rows(self) -> list[list[str]]:
        """A table: a header, and for each size the time of every plan."""
        table = [["bytes", *self.times_us]]
        for at, size in enumerate(self.sizes):
            table.append([format_bytes(size), *(format_us(times[at]) for times in self.times_us.values())])
        return table


def figures(cluster: Cluster, costs: CostModel | None = None) -> tuple[Figure, ...]:
    """All three figures on a cluster, with simulated costs unless others are given."""
    model = costs if costs is not None else SimulatedCosts(cluster)
    return all_reduce_plans(model), all_to_all_plans(model), overlapped_pair(model)


def all_reduce_plans(costs: CostModel, sizes: Sequence[int] = SIZES) -> Figure:
    """Figure 16: the tree wins small all-reduces, the ring large ones."""
    binding = _bindings(costs)[0]
    motion = _motion(costs, "all_reduce", binding)
    named = costs.algorithms(motion, sizes[0])
    plans = {"tree": [name for name in named if "tree" in name], "ring": [name for name in named if name == "ring"]}
    return Figure(
        name=f"all-reduce on {binding.name}",
        sizes=tuple(sizes),
        times_us={plan: tuple(_fastest(costs, motion, size, names) for size in sizes) for plan, names in plans.items()},
        expected=("tree", "ring"),
    )


def all_to_all_plans(costs: CostModel, sizes: Sequence[int] | None = None, ways: Sequence[int] = WAYS) -> Figure:
    """Figure 17: an all-to-all splined once, twice and four times, with windows one after the other.

    Args:
        costs: the cost model.
        sizes: sizes in bytes; None takes 128 KB to 512 MB.
        ways: numbers of windows.

    Returns:
        The figure.

    Raises:
        Infeasible: the channels cannot carry the all-to-all.
    """
    sizes = tuple(128 * KB * 2**step for step in range(13)) if sizes is None else tuple(sizes)
    binding = _bindings(costs)[0]
    return Figure(
        name=f"all-to-all on {binding.name}",
        sizes=sizes,
        times_us={f"{way}-way": tuple(_splined(costs, binding, size, way) for size in sizes) for way in ways},
        expected=tuple(f"{way}-way" for way in ways),
    )


def overlapped_pair(
    costs: CostModel, sizes: Sequence[int] = PAIR_SIZES, all_reduce_bytes: float = PAIR_ALL_REDUCE
) -> Figure:
    """Figure 18: an all-reduce and an all-to-all on one set of channels, or each on its own.

    Which way wins depends on the two sizes, because the second set of channels is slower: the note gives the size of
    the all-to-all from which it takes longer there than both take one after the other on the first set. Motifs on two
    sets slow each other by the factor that was measured for pairs on these channels, if there are such measurements.

    Args:
        costs: the cost model.
        sizes: sizes of the all-to-all, in bytes per rank.
        all_reduce_bytes: size of the all-reduce in bytes.

    Returns:
        The figure.

    Raises:
        InvalidInput: the cluster has no two disjoint sets of channels that join all devices.
    """
    first = _bindings(costs)[0]
    second = next((b for b in _bindings(costs) if not set(b.channels) & set(first.channels)), None)
    if second is None:
        raise InvalidInput(f"cluster {costs.cluster.name}: no two sets of channels are disjoint and join all devices")
    reduce_us = {b.name: _fastest(costs, _motion(costs, "all_reduce", b), all_reduce_bytes) for b in (first, second)}
    exchange_us = {
        one.name: tuple(min(_splined(costs, one, size, way) for way in PAIR_WAYS) for size in sizes)
        for one in (first, second)
    }
    a, b = first.name, second.name
    border = _border(costs, first, second, reduce_us[a], max(sizes))
    ours = f"all-reduce on {a}, all-to-all on {b}"
    slower = measured_slowdown(costs, first.channels, second.channels)
    return Figure(
        name=f"all-reduce of {format_bytes(all_reduce_bytes)} beside an all-to-all",
        sizes=tuple(sizes),
        times_us={
            f"both on {a}, one by one": tuple(reduce_us[a] + us for us in exchange_us[a]),
            f"both on {a}, at once": tuple(_at_once(costs, first, all_reduce_bytes, size) for size in sizes),
            ours: tuple(slower * max(reduce_us[a], us) for us in exchange_us[b]),
            f"all-reduce on {b}, all-to-all on {a}": tuple(slower * max(reduce_us[b], us) for us in exchange_us[a]),
        },
        expected=(ours,),
        note=f"from {format_bytes(border)} per rank on, one by one on {a} is faster" if border else "",
    )


def measured_slowdown(costs: CostModel, one: Sequence[str], two: Sequence[str]) -> float:
    """The factor by which motifs on two sets of channels were measured to slow each other.

    Args:
        costs: the cost model.
        one: one set of channels.
        two: the other set.

    Returns:
        The median of the measured factors, at least 1; 1 without measurements.
    """
    pairs = costs.overlaps if isinstance(costs, MeasuredCosts | LayeredCosts) else ()
    ends = {(frozenset(one), frozenset(two)), (frozenset(two), frozenset(one))}
    slow = [
        pair.slowdown
        for pair in pairs
        if pair.together.beside is not None
        and (frozenset(pair.alone.channels), frozenset(pair.together.beside.channels)) in ends
    ]
    return max(1.0, median(slow)) if slow else 1.0


def _bindings(costs: CostModel) -> tuple[Binding, ...]:
    return bindings_for(costs.cluster, _everyone(costs))


def _everyone(costs: CostModel) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(costs.cluster.num_devices)),)


def _motion(costs: CostModel, kind: str, binding: Binding, window: tuple[int, int] | None = None) -> Motion:
    return Motion(kind=kind, groups=_everyone(costs), channels=binding.channels, window=window)


def _fastest(costs: CostModel, motion: Motion, nbytes: float, names: Sequence[str] | None = None) -> float:
    """The time of the best algorithm as one motif."""
    binding = next(b for b in _bindings(costs) if b.channels == motion.channels)
    times = []
    for name in costs.algorithms(motion, nbytes) if names is None else names:
        try:
            times.append(_issued_us(costs, binding, motion, nbytes, name))
        except Infeasible:
            continue
    if not times:
        raise Infeasible(f"{motion.kind} on {binding.name}: no algorithm can move it")
    return min(times)


def _issued_us(costs: CostModel, binding: Binding, motion: Motion, nbytes: float, algorithm: str) -> float:
    cost = costs.cost(motion, nbytes, algorithm)
    return launch_us(binding, cost) + cost.us


def _splined(costs: CostModel, binding: Binding, nbytes: float, ways: int) -> float:
    """The time of windows of 1/ways of the destinations each, one after the other, sent directly."""
    count = costs.cluster.num_devices
    edges = [count * at // ways for at in range(ways + 1)]
    total = 0.0
    for low, high in pairwise(edges):
        motion = _motion(costs, "all_to_all", binding, None if ways == 1 else (low, high - low))
        total += _issued_us(costs, binding, motion, nbytes * (high - low) / count, "direct")
    return total


def _border(costs: CostModel, first: Binding, second: Binding, reduce_us: float, least: float) -> float:
    """The size of the all-to-all from which on the second set is too slow; 0 if there is none
    within 64 times `least`.
    """

    def slower(size: float) -> bool:
        exchange = {b.name: min(_splined(costs, b, size, way) for way in PAIR_WAYS) for b in (first, second)}
        return exchange[second.name] > reduce_us + exchange[first.name]

    low, high = float(least), 64.0 * least
    if slower(low) or not slower(high):
        return 0.0 if not slower(low) else low
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if slower(middle) else (middle, high)
    return float(round(high, -5))


def _at_once(costs: CostModel, binding: Binding, reduce_bytes: float, exchange_bytes: float) -> float:
    """The simulated time of both on the same links at the same time, contending for them."""
    simulated = costs if isinstance(costs, SimulatedCosts) else SimulatedCosts(costs.cluster)
    parts = [
        ConcurrentProgram(program=simulated.program(_motion(costs, kind, binding), nbytes, name), nbytes=nbytes)
        for kind, name, nbytes in (("all_reduce", "ring", reduce_bytes), ("all_to_all", "direct", exchange_bytes))
    ]
    program, nbytes = together(parts, costs.cluster)
    return launch_us(binding) + simulate(program, costs.cluster, nbytes=nbytes, channels=binding.channels).total_us
