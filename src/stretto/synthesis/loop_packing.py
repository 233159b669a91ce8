# SPDX-License-Identifier: Apache-2.0
"""Trees for plans that loop: how much goes along which, so that links have little more to do than they must.

A GPU that reads or writes a peer's memory does not choose the route, so a pair of ranks is one edge here. The linear
program has a column for each tree and a row for each link; columns are found as they are needed, at the prices of links
that its dual gives. A second program with whole numbers makes shares of equal size of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..errors import Infeasible
from ..simulator.network import routes_between
from ..solvers.linear import LinearProgram, ProgramArrays
from .forest_trees import Forest

MOST_LOW = 9
"""The most ranks for which the cheapest tree of some height is found, by trying; with more, no height is asked for."""
NODES = 100
"""The most nodes of the search for whole shares."""
WHOLE_GAP = 0.005
"""The gap at which that search ends."""
NEW = 1e-9
"""How much cheaper a tree has to be than those that are known, in parts of what a byte costs."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Parents = tuple[int, ...]
"""The parent of every rank in a tree, -1 for the root."""


class TreeLinks:
    """The time that trees of equal shares need on every link between some devices."""

    def __init__(self, cluster: Cluster, devices: tuple[int, ...], *, reverse: bool) -> None:
        self.pairs = [(a, b) for a in devices for b in devices if a != b]
        near, far = (np.array([pair[side] for pair in self.pairs], np.int32) for side in (0, 1))
        src, dst = (far, near) if reverse else (near, far)
        _, route, ptr, links = routes_between(src, dst, np.ones(len(self.pairs)), cluster)
        self.routes = [tuple(links[ptr[r] : ptr[r + 1]].tolist()) for r in route.tolist()]
        used = sorted({link for each in self.routes for link in each})
        number = {link: at for at, link in enumerate(used)}
        self.per_share: Floats = np.zeros((len(self.pairs), len(used)))
        self.shared = np.zeros(len(used), np.bool_)
        """Whether a link is a part of longer routes."""
        for at, each in enumerate(self.routes):
            for link in each:
                self.per_share[at, number[link]] += 1 / float(cluster.link_gb_per_s[link])
                self.shared[number[link]] |= len(each) > 1


@dataclass(frozen=True, kw_only=True)
class TreePacking:
    """The best rates of trees: a share of every root's data for each tree, and what no trees beat."""

    roots: tuple[int, ...]
    trees: tuple[Parents, ...]
    share: Floats
    ns_per_byte: float
    """The time of the fullest link for one byte of every root; for trees used both ways, of both together."""


class _Rates:
    """The linear program: shares of trees that are found as they are needed."""

    def __init__(self, per_share: Sequence[Floats], ranks: int, height: int | None) -> None:
        self.per_share, self.ranks = per_share, ranks
        self._low = _levels(ranks, height) if height is not None and ranks <= MOST_LOW else None
        self.roots: list[int] = []
        self.trees: list[Parents] = []
        self._known: set[tuple[int, Parents]] = set()
        self._model = LinearProgram()
        self._links = [each.shape[1] for each in per_share]
        for _ in range(sum(self._links)):
            self._model.row((), (), upper=0.0)
        for _ in range(ranks):
            self._model.row((), (), lower=1.0)
        first = 0
        for count in self._links:
            self._model.column(cost=1.0, index=np.arange(first, first + count), value=np.full(count, -1.0))
            first += count

    def solve(self) -> TreePacking:
        """Add the cheapest trees until none is cheaper than those that are known."""
        price = np.concatenate([np.full(count, 1 / count) for count in self._links])
        while True:
            begun, cost, first = len(self.trees), np.zeros(self.per_share[0].shape[0]), 0
            for each, count in zip(self.per_share, self._links, strict=True):
                cost += each @ price[first : first + count]
                first += count
            for root, parents in enumerate(self._cheapest(cost)):
                self._add(root, parents)
            found = self._model.solve()
            if len(self.trees) == begun:
                break
            price = np.maximum(-found.duals[:first], 0.0)
        return TreePacking(
            roots=tuple(self.roots), trees=tuple(self.trees), share=found.values[len(self._links) :],
            ns_per_byte=found.objective,
        )  # fmt: skip

    def load(self, parents: Parents) -> Floats:
        """What a tree puts on every link, one way after the other."""
        edges = [a * (self.ranks - 1) + b - (b > a) for b, a in enumerate(parents) if a >= 0]
        return np.concatenate([each[edges].sum(axis=0) for each in self.per_share])

    def _add(self, root: int, parents: Parents) -> None:
        if (root, parents) in self._known:
            return
        self._known.add((root, parents))
        self.roots.append(root)
        self.trees.append(parents)
        load = self.load(parents)
        used = np.flatnonzero(load)
        self._model.column(index=[*used.tolist(), len(load) + root], value=[*load[used].tolist(), 1.0])

    def _cheapest(self, cost: Floats) -> list[Parents]:
        """The cheapest tree of every root."""
        n = self.ranks
        cost = cost + NEW * float(cost.mean() or 1.0)
        if self._low is None:
            pairs = np.array([(a, b) for a in range(n) for b in range(n) if a != b], np.int32)
            everybody = np.arange(n, dtype=np.int32)
            _, spread, *_ = _native.cheapest_trees(
                n, pairs[:, 0].copy(), pairs[:, 1].copy(), cost, np.zeros(n, np.bool_), everybody
            )
            return [
                tuple(-1 if v == root else int(p) for v, p in enumerate(spread[root * n : (root + 1) * n]))
                for root in range(n)
            ]
        table = np.full((n, n), np.inf)
        table[~np.eye(n, dtype=np.bool_)] = cost
        return [_cheapest_low(root, table, self._low) for root in range(n)]


def _levels(ranks: int, height: int) -> Ints:
    """Every way to put the other ranks on levels 1 to `height` below a root."""
    return np.array(list(product(range(1, height + 1), repeat=ranks - 1)), np.int64)


def _cheapest_low(root: int, cost: Floats, levels: Ints) -> Parents:
    """The cheapest tree whose ranks each hang below one of a lower level."""
    others = [v for v in range(len(cost)) if v != root]
    level = np.zeros((len(levels), len(cost)), np.int64)
    level[:, others] = levels
    total = np.zeros(len(levels))
    parent = np.full((len(levels), len(cost)), -1, np.int64)
    for v in others:
        mine = np.where(level < level[:, [v]], cost[:, v], np.inf)
        parent[:, v] = mine.argmin(axis=1)
        total += mine.min(axis=1)
    return tuple(parent[total.argmin()].tolist())


def packed_forests(
    cluster: Cluster,
    devices: tuple[int, ...],
    shares: int,
    *,
    ways: Sequence[bool] = (False,),
    height: int = 3,
    room: float = 1.0,
) -> tuple[tuple[Forest, ...], float]:
    """Pack trees from every device into the links so that the fullest link has little more than it must.

    Args:
        cluster: The cluster.
        devices: The devices, each of which is a root.
        shares: The equal shares of every root's data, >= 1; a tree has one or more.
        ways: In which directions data goes along the trees, one after the other: True to the root, False from it.
        height: The most edges between a root and a rank (with more than `MOST_LOW` ranks there is no limit).
        room: The part of its rate that a link may use which is a part of longer routes: those are hard to keep busy.

    Returns:
        A forest of the same trees for each way, and the nanoseconds that the fullest links take for one byte of every
        root, of all ways together.

    Raises:
        Infeasible: No shares were found.
    """
    sides = [TreeLinks(cluster, devices, reverse=reverse) for reverse in ways]
    rates = _Rates([side.per_share / np.where(side.shared, room, 1.0) for side in sides], len(devices), height)
    best = rates.solve()
    plain = _Rates([side.per_share for side in sides], len(devices), None)
    amount = _whole(best, np.array([rates.load(tree) for tree in best.trees]), rates._links, shares)
    load = amount @ np.array([plain.load(tree) for tree in best.trees]) / shares
    full, first = 0.0, 0
    for count in rates._links:
        full += float(load[first : first + count].max())
        first += count
    return tuple(
        _forest(cluster, devices, best, amount, shares, side, reverse)
        for side, reverse in zip(sides, ways, strict=True)
    ), full


def _whole(best: TreePacking, loads: Floats, links: Sequence[int], shares: int) -> Ints:
    """How many shares go along each tree."""
    trees, rows = len(best.trees), loads.shape[1]
    start, index, value = [0], list[int](), list[float]()
    way = np.repeat(np.arange(len(links)), links)
    for link in range(rows):
        used = np.flatnonzero(loads[:, link])
        index += [*used.tolist(), trees + int(way[link])]
        value += [*(loads[used, link] / shares).tolist(), -1.0]
        start.append(len(index))
    ranks = max(best.roots) + 1
    for root in range(ranks):
        mine = [at for at, other in enumerate(best.roots) if other == root]
        index += mine
        value += [1.0] * len(mine)
        start.append(len(index))
    model = LinearProgram(mip_max_nodes=NODES, mip_rel_gap=WHOLE_GAP)
    model.load(
        ProgramArrays(
            cost=np.append(np.zeros(trees), np.ones(len(links))), lower=np.zeros(trees + len(links)),
            upper=np.append(np.full(trees, float(shares)), np.full(len(links), np.inf)),
            row_lower=np.append(np.full(rows, -np.inf), np.full(ranks, float(shares))),
            row_upper=np.append(np.zeros(rows), np.full(ranks, float(shares))),
            start=start, index=index, value=value, integer=[True] * trees + [False] * len(links),
        )
    )  # fmt: skip
    found = model.solve()
    if not found.has_values:
        raise Infeasible("loop_trees: no whole shares of the trees were found")
    return np.round(found.values[:trees]).astype(np.int64)


def _forest(
    cluster: Cluster, devices: tuple[int, ...], best: TreePacking, amount: Ints, shares: int, side: TreeLinks,
    reverse: bool,
) -> Forest:  # fmt: skip
    number = {pair: at for at, pair in enumerate(side.pairs)}
    routes = sorted(set(side.routes))
    edges: list[tuple[int, int, int]] = []
    ptr, kept = [0], [at for at in np.argsort(best.roots, kind="stable").tolist() if amount[at]]
    for at in kept:
        edges += _edges(best.roots[at], best.trees[at])
        ptr.append(len(edges))
    pairs = [(devices[a], devices[b]) for a, b, _ in edges]
    rate = Fraction(1 / best.ns_per_byte).limit_denominator(10**6)
    return Forest(
        cluster=cluster, reverse=reverse, roots=devices, k=shares, optimum=rate, throughput=rate,
        root=np.array([devices[best.roots[at]] for at in kept], np.int32), amount=amount[kept],
        ptr=np.array(ptr, np.int64), src=np.array([a for a, _ in pairs], np.int32),
        dst=np.array([b for _, b in pairs], np.int32), depth=np.array([depth for *_, depth in edges], np.int32),
        route=np.array([routes.index(side.routes[number[pair]]) for pair in pairs], np.int32),
        routes=tuple(routes), cast=np.full(len(edges), -1, np.int32),
    )  # fmt: skip


def _edges(root: int, parents: Parents) -> list[tuple[int, int, int]]:
    """The edges of a tree with their depth, parents first."""
    found: list[tuple[int, int, int]] = []
    level = [root]
    depth = 0
    while level:
        below = [(a, b, depth) for a in level for b, p in enumerate(parents) if p == a]
        found += below
        level, depth = [b for _, b, _ in below], depth + 1
    return found
