# SPDX-License-Identifier: Apache-2.0
"""Pairs of trees for all-reduces of any size: small latency and high rate, weighed by a linear program.

A pair of trees whose alphas from the farthest rank to the root and on to the farthest rank are L moves
``rate x (T - L)`` bytes in a time T. So the best pairs for a size are those that move most in the least T that suffices
(a flow over time whose paths are pairs of trees). Trees come from what rate alone asks for, and from shortest paths and
cheapest trees at prices that mix the alphas of links with the worth of their rate.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..solvers.linear import LinearProgram
from .tree_pair_packing import TreePair, TreePairPacking, cheapest_pairs

ROUNDS = 6
MIXES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""How much a unit of latency counts beside the worth of a link, in trees that are offered to the linear program."""
LEAST_HOP = 1e-9
"""What a hop costs at least, as a share of the dearest."""
SAME = 1e-4
"""The share of the time by which another round must be better for the search to go on."""
MIN_SHARE = 1e-4
"""Pairs with less than this share of the bytes are left out."""
CALM_SLACK = 0.001
"""The share of the time that is given up for pairs that leave links time to spare."""
CALM_LEVELS = ((0.8, 0.1, 1.0), (0.9, 0.07, 4.0), (0.97, 0.03, 20.0))
"""From which share of a link's rate on how much more of it costs what, where pairs should leave time to spare."""


def quickest_pairs(
    cluster: Cluster,
    ranks: tuple[int, ...],
    nbytes: float,
    packing: TreePairPacking,
    *,
    weight: float = 1.0,
    calm: bool = False,
    until: float = float("inf"),
) -> tuple[float, list[TreePair]]:
    """The pairs of trees that move `nbytes` soonest when all of them are pipelined finely.

    Messages that pass switches meet there and wait for each other, the more so the busier links are. Of all pairs that
    are about as quick, the calm ones keep as few links as possible busy all the time.

    Args:
        cluster: The cluster.
        ranks: The device of each rank.
        nbytes: The size in bytes.
        packing: Pairs of the best rate, which are always among those that are weighed.
        weight: What a microsecond of a pair's latency counts: less than 1 where links work ahead meanwhile (`justify`).
        calm: Whether links should have time to spare where that costs next to nothing.
        until: When to stop looking for more trees (`time.monotonic`).

    Returns:
        The time in microseconds, and the pairs. The rates of the pairs are in proportion to the bytes that each moves,
        and together those at which pieces enter the network.
    """
    pool = _Pool(cluster, ranks, nbytes, weight)
    for pair in packing.pairs:
        pool.add(pair)
    pool.offer(1e-3 / cluster.link_gb_per_s)
    took, worth = pool.solve()
    for _ in range(ROUNDS):
        if time.monotonic() > until:
            break
        pool.offer(worth)
        before = took
        took, worth = pool.solve()
        if took > before * (1 - SAME):
            break
    if calm:
        took *= 1 + CALM_SLACK
        pool.calm(took)
    return took, pool.chosen(took)


class _Pool:
    """The pairs that are offered, and how much of the bytes each is given."""

    def __init__(self, cluster: Cluster, ranks: tuple[int, ...], nbytes: float, weight: float) -> None:
        self.cluster, self.ranks, self.nbytes, self.weight = cluster, ranks, nbytes, weight
        self.rate = cluster.link_gb_per_s * 1e3
        self.pairs: dict[tuple[object, ...], TreePair] = {}
        self.load: list[NDArray[np.float64]] = []
        self.latency: list[float] = []
        self.flow = np.zeros(0)
        self.took = np.inf

    def add(self, pair: TreePair) -> None:
        key = (pair.root, pair.gather_route, pair.spread_route)
        if key in self.pairs:
            return
        self.pairs[key] = pair
        self.load.append(pair.load(len(self.rate)))
        self.latency.append(self.weight * pair.latency_us(self.cluster.link_alpha_us))

    def offer(self, worth: NDArray[np.float64]) -> None:
        """Add trees at the prices ``worth + mix x alpha``: the cheapest, and those of shortest paths."""
        alpha = self.cluster.link_alpha_us
        scale = float(worth.sum()) / max(float(alpha.sum()), 1e-12)
        for mix in MIXES:
            _, pairs = cheapest_pairs(self.cluster, self.ranks, worth + (mix * scale + 1e-9) * alpha)
            for pair in (*pairs, *shortest_pairs(pairs, worth + (mix * scale + 1e-9) * alpha)):
                self.add(pair)

    def solve(self) -> tuple[float, NDArray[np.float64]]:
        """The least time for all bytes over the pairs at hand, and the worth of each link's rate at that time."""
        latency = np.array(self.latency)
        took = self.took if np.isfinite(self.took) else self._alone(latency)
        for _ in range(20):
            program = LinearProgram(maximize=True)
            for value in self.rate.tolist():
                program.row((), (), upper=value)
            for late, load in zip(latency.tolist(), self.load, strict=True):
                used = np.flatnonzero(load)
                program.column(cost=took - late, index=used, value=load[used])
            found = program.solve()
            flow = np.maximum(found.values, 0.0)
            sooner = (self.nbytes + float(flow @ latency)) / float(flow.sum())
            if sooner < took:
                self.flow = flow
            if sooner > took * (1 - 1e-6):
                break
            took = sooner
        self.took = took
        return took, np.maximum(found.duals, 0.0)

    def calm(self, took: float) -> None:
        """Divide the bytes among the pairs so that they are moved in time and few links are nearly always busy."""
        latency, program = np.array(self.latency), LinearProgram()
        for late in latency.tolist():
            program.column(upper=np.inf if late < took else 0.0)
        program.row(np.arange(len(latency)), np.maximum(took - latency, 0.0), lower=self.nbytes)
        loads = np.stack(self.load)
        for link, rate in enumerate(self.rate.tolist()):
            busy = [program.column(upper=more, cost=cost) for _, more, cost in CALM_LEVELS]
            used = np.flatnonzero(loads[:, link])
            index, value = [*used.tolist(), *busy], [*loads[used, link].tolist(), *[-rate] * len(busy)]
            program.row(index, value, upper=rate * CALM_LEVELS[0][0])
        found = program.solve()
        if found.status == "optimal":
            self.flow = np.maximum(found.values[: len(latency)], 0.0)

    def _alone(self, latency: NDArray[np.float64]) -> float:
        """A time that suffices: the best single pair, and a little more."""
        fastest = [float((self.rate[load > 0] / load[load > 0]).min()) for load in self.load]
        return float((latency + self.nbytes / np.array(fastest)).min()) * (1 + 1e-6)

    def chosen(self, took: float) -> list[TreePair]:
        """The pairs with a share of the bytes."""
        count = len(self.flow)
        latency = np.array(self.latency[:count])
        moved = self.flow * np.maximum(took - latency, 0.0)
        kept = np.flatnonzero(moved > MIN_SHARE * moved.sum())
        enters = took - float(latency[kept].min())
        pairs = list(self.pairs.values())
        return [replace(pairs[k], gb_per_s=float(moved[k]) / enters / 1e3) for k in kept.tolist()]


def shortest_pairs(pairs: list[TreePair], price: NDArray[np.float64]) -> list[TreePair]:
    """For every root the pair of trees of shortest paths, over the hops that cheapest trees of all roots take.

    Args:
        pairs: The cheapest pair of every root.
        price: The price of each link.

    Returns:
        One pair for each root that the hops reach.
    """
    n = len(pairs)
    route: dict[tuple[int, int], tuple[int, ...]] = {}
    for pair in pairs:
        for v in range(n):
            if v != pair.root:
                route[v, pair.gather[v]] = pair.gather_route[v]
                route[pair.spread[v], v] = pair.spread_route[v]
    cost = np.full((n, n), np.inf)
    for (a, b), links in route.items():
        cost[a, b] = price[list(links)].sum()
    # Hops that cost nothing, or less than what rounding loses, would let shortest ways go in circles.
    cost += (LEAST_HOP * float(cost[np.isfinite(cost)].max(initial=0.0))) or 1.0
    far = cost.copy()
    np.fill_diagonal(far, 0.0)
    for k in range(n):
        far = np.minimum(far, far[:, k : k + 1] + far[k])
    if not np.isfinite(far).all():
        return []
    found = []
    for root in range(n):
        # The hop by which v's shortest way from (to) the root ends (begins).
        spread = np.argmin(far[root][:, None] + cost, axis=0).tolist()
        gather = np.argmin(cost + far[:, root][None, :], axis=1).tolist()
        spread[root] = gather[root] = -1
        found.append(
            TreePair(
                root=root,
                gather=tuple(gather),
                spread=tuple(spread),
                gather_route=tuple(() if v == root else route[v, gather[v]] for v in range(n)),
                spread_route=tuple(() if v == root else route[spread[v], v] for v in range(n)),
            )
        )
    return found
