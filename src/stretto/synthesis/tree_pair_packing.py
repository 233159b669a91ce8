# SPDX-License-Identifier: Apache-2.0
"""Pairs of trees for all-reduce: reduce along one to a root, spread along the other from it, at the best total rate.

The linear program has one column for each pair of trees (a root, a tree to it, a tree from it) and one row for each
link: the rates of all pairs together use no link more than it has. Columns are found as they are needed. At the prices
of links that the program's dual gives, the cheapest trees of every root are arborescences (Chu-Liu and Edmonds); where
no pair costs less than one, no pair could raise the rate. At any prices, what all links are worth over what the
cheapest pair costs is a rate that no pairs exceed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.model import DEVICE
from ..errors import Infeasible
from ..solvers.linear import LinearProgram

CLOSE = 5e-4
"""The share of the best rate by which a packing may miss it."""
SMOOTHING = 0.5
"""The weight of the best prices so far in the next ones: the dual's own jump about."""
MIN_SHARE = 1e-6
"""Pairs with less than this share of the rate are left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreePair:
    """A root with a tree that reduces to it and one that spreads from it, and the rate of what goes along both.

    `gather[v]` and `spread[v]` are the parents of rank v in the two trees, -1 for the root; `gather_route[v]` are the
    links from v to its parent, `spread_route[v]` those from its parent to v.
    """

    root: int
    gather: tuple[int, ...]
    spread: tuple[int, ...]
    gather_route: tuple[tuple[int, ...], ...]
    spread_route: tuple[tuple[int, ...], ...]
    gb_per_s: float = 0.0

    def load(self, num_links: int) -> NDArray[np.float64]:
        """How often each link carries a byte that goes along the pair."""
        used = [link for routes in (self.gather_route, self.spread_route) for route in routes for link in route]
        return np.bincount(np.array(used, np.int64), minlength=num_links).astype(np.float64)

    def latency_us(self, alpha_us: NDArray[np.float64]) -> float:
        """The alphas from the farthest rank to the root and on to the farthest rank."""

        def farthest(parent: tuple[int, ...], routes: tuple[tuple[int, ...], ...]) -> float:
            hop = [float(alpha_us[list(route)].sum()) for route in routes]
            most = 0.0
            for rank in range(len(parent)):
                late = 0.0
                while parent[rank] >= 0:
                    late, rank = late + hop[rank], parent[rank]
                most = max(most, late)
            return most

        return farthest(self.gather, self.gather_route) + farthest(self.spread, self.spread_route)


@dataclass(frozen=True, kw_only=True, eq=False)
class TreePairPacking:
    """Pairs of trees whose rates the links can carry together; `limit_gb_per_s` is a rate that no pairs exceed."""

    pairs: tuple[TreePair, ...]
    gb_per_s: float
    limit_gb_per_s: float


def cheapest_pairs(
    cluster: Cluster, ranks: tuple[int, ...], price: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[TreePair]]:
    """For every root the pair of trees that costs least.

    Args:
        cluster: The cluster.
        ranks: The device of each rank.
        price: What a byte on each link costs, >= 0.

    Returns:
        What each rank's pair costs, and the pairs; none where the ranks do not reach each other.
    """
    passes = cluster.node_kind != DEVICE
    if cluster.devices_forward:
        passes = np.ones(cluster.num_nodes, np.bool_)
    total, spread, gather, ptr, link = _native.cheapest_trees(
        cluster.num_nodes, cluster.link_src, cluster.link_dst, price, passes, np.array(ranks, np.int32)
    )
    n = len(ranks)
    if not np.isfinite(total).all():
        return total, []

    def route(a: int, b: int) -> tuple[int, ...]:
        at = a * n + b
        return tuple(link[ptr[at] : ptr[at + 1]].tolist())

    found = []
    for root in range(n):
        down, up = spread[root * n : (root + 1) * n].tolist(), gather[root * n : (root + 1) * n].tolist()
        found.append(
            TreePair(
                root=root,
                gather=tuple(up),
                spread=tuple(down),
                gather_route=tuple(() if v == root else route(v, up[v]) for v in range(n)),
                spread_route=tuple(() if v == root else route(down[v], v) for v in range(n)),
            )
        )
    return total, found


class _Master:
    """The linear program over the pairs found so far."""

    def __init__(self, rate: NDArray[np.float64]) -> None:
        self._model = LinearProgram(maximize=True)
        for value in rate.tolist():
            self._model.row((), (), upper=value)
        self.pairs: list[TreePair] = []
        self._known: set[tuple[object, ...]] = set()

    def add(self, pair: TreePair, load: NDArray[np.float64]) -> None:
        key = (pair.root, pair.gather_route, pair.spread_route)
        if key in self._known:
            return
        self._known.add(key)
        self.pairs.append(pair)
        used = np.flatnonzero(load)
        self._model.column(cost=1.0, index=used, value=load[used])

    def solve(self) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """The total rate, the rate of each pair, and the price of each link."""
        found = self._model.solve()
        return float(found.values.sum()), found.values, np.maximum(found.duals, 0.0)


def pack_tree_pairs(
    cluster: Cluster, ranks: tuple[int, ...], *, until: float = float("inf"), close: float = CLOSE
) -> TreePairPacking:
    """Pairs of trees whose total rate is as large as links allow.

    Args:
        cluster: The cluster.
        ranks: The device of each rank, at least two.
        until: When to stop (`time.monotonic`), with the best packing found by then.
        close: The share of the best rate by which the packing may miss it.

    Returns:
        The packing.

    Raises:
        Infeasible: Some rank does not reach another one.

    >>> star = Cluster.preset("dgx_a100")
    >>> packing = pack_tree_pairs(star, tuple(range(8)))
    >>> round(packing.gb_per_s / packing.limit_gb_per_s, 3)
    1.0
    """
    rate = cluster.link_gb_per_s
    master = _Master(rate)
    # Where trees cost the same, those with less latency: the alphas count far less than any difference in price.
    tie = cluster.link_alpha_us / max(float(cluster.link_alpha_us.sum()), 1e-9) * 1e-7 / float(rate.max())
    price = center = 1.0 / rate / len(rate)
    limit = np.inf
    while True:
        _, pairs = cheapest_pairs(cluster, ranks, price + tie)
        if not pairs:
            raise Infeasible(f"tree pairs: some rank of {cluster.name} does not reach another one")
        loads = [pair.load(len(rate)) for pair in pairs]
        least = min(float(load @ price) for load in loads)
        here = float(rate @ price) / least
        if here < limit:
            limit, center = here, price / least
        for pair, load in zip(pairs, loads, strict=True):
            master.add(pair, load)
        reached, rates, dual = master.solve()
        if reached >= limit * (1 - close) or time.monotonic() > until:
            break
        mixed = SMOOTHING * center + (1 - SMOOTHING) * dual
        # Prices that were asked before would only give pairs that are known.
        price = dual if np.array_equal(mixed, price) else mixed
    kept = np.flatnonzero(rates > MIN_SHARE * reached)
    chosen = tuple(_with_rate(master.pairs[k], float(rates[k])) for k in kept)
    return TreePairPacking(pairs=chosen, gb_per_s=float(rates[kept].sum()), limit_gb_per_s=float(limit))


def _with_rate(pair: TreePair, gb_per_s: float) -> TreePair:
    return TreePair(**(vars(pair) | {"gb_per_s": gb_per_s}))
