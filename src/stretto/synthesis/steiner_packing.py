# SPDX-License-Identifier: Apache-2.0
"""Trees through devices outside a group: for every shard of a collective, trees whose rates the links carry together.

A *shard* is data that travels alike: it is gathered along a tree to a root, or spread along a tree from one, or both.
The linear program maximises the rate of the slowest shard over columns that are found as they are needed. At given
prices of links the cheapest column of a shard is made of Steiner trees (`native/steiner.cpp`): trees that reach the
devices that want the data and pass others where that is cheaper. What all links are worth over what the cheapest
columns cost is a rate that no trees exceed, as long as there are few enough ends for the cheapest trees to be known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.model import DEVICE
from ..collectives import Collective
from ..errors import Infeasible
from ..solvers.linear import LinearProgram

CLOSE = 2e-3
"""The share of the best rate by which a packing may miss it."""
SMOOTHING = 0.5
"""The weight of the best prices so far when the next prices are mixed, since the dual prices alone jump about."""
MIN_SHARE = 1e-5
"""Columns with less than this share of their shard's rate are left out."""

LATE = 5e-4
"""The share of the rate that a shard gives for trees without the latency of the quickest ones."""

Floats = NDArray[np.float64]
Hop = tuple[int, int, tuple[int, ...]]
"""A send from one rank to another over these links."""
Pairs = tuple[tuple[int, int], ...]
"""Sends from rank to rank."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Data that travels alike: from all of `sources` (which are added up) to all of `wanters`, by way of a root.

    Where there is one source it is the root, where there is one wanter that is; else any rank may be.
    """

    sources: tuple[int, ...]
    wanters: tuple[int, ...]
    first: int
    """The first chunk of the data in the collective, where every shard has one chunk."""


@dataclass(frozen=True, kw_only=True)
class ShardTree:
    """One way for the data of a shard: hops that gather it to a root, then hops that spread it, in working order."""

    shard: int
    gather: tuple[Hop, ...]
    spread: tuple[Hop, ...]
    gb_per_s: float = 0.0

    def load(self, num_links: int) -> Floats:
        """How often each link carries a byte of the shard that moves along this tree."""
        used = [link for _, _, route in (*self.gather, *self.spread) for link in route]
        return np.bincount(np.array(used, np.int64), minlength=num_links).astype(np.float64)

    def latency_us(self, alpha_us: Floats) -> float:
        """The alphas on the longest way from a source to a wanter."""
        at: dict[int, float] = {}
        for src, dst, route in (*self.gather, *self.spread):
            arrives = at.get(src, 0.0) + float(alpha_us[list(route)].sum())
            at[dst] = max(at.get(dst, 0.0), arrives)
        return max(at.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class ShardPacking:
    """Trees for all shards at rates that the links can carry together; each shard has `gb_per_s` in all."""

    trees: tuple[ShardTree, ...]
    gb_per_s: float
    limit_gb_per_s: float


def shards_of(collective: Collective) -> list[Shard]:
    """The shards of a collective, of equal size; `Infeasible` where it does not fall into such shards."""
    c = collective.without_helpers()
    if np.ptp(c.chunk_share) > 1e-12 or c.part_sets:
        raise Infeasible("steiner: serves collectives of equal shards only")
    holders: list[list[int]] = [[] for _ in range(c.num_chunks)]
    wanters: list[list[int]] = [[] for _ in range(c.num_chunks)]
    for rank in range(c.num_ranks):
        for chunk in c.inputs(rank).tolist():
            holders[chunk].append(rank)
        for chunk in c.outputs(rank).tolist():
            wanters[chunk].append(rank)
    return [
        Shard(sources=tuple(a), wanters=tuple(b), first=chunk)
        for chunk, (a, b) in enumerate(zip(holders, wanters, strict=True))
        if set(b) - set(a) or len(a) > 1
    ]


class TreeFinder:
    """The cheapest trees of shards at given prices; ranks are numbered as in `devices`."""

    def __init__(self, cluster: Cluster, devices: Sequence[int], shards: Sequence[Shard]) -> None:
        passes = cluster.node_kind != DEVICE
        if cluster.devices_forward:
            passes = np.ones(cluster.num_nodes, np.bool_)
        self.count, self.shards, self._alpha_us = len(devices), shards, cluster.link_alpha_us
        self._native = _native.SteinerTrees(
            cluster.num_nodes, cluster.link_src, cluster.link_dst, passes, np.array(devices, np.int32)
        )
        self._alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for at, shard in enumerate(shards):
            outward, inward = len(shard.sources) == 1, len(shard.wanters) == 1
            # Shards that only differ in their root share the work.
            key = ((), shard.wanters) if outward else (shard.sources, () if inward else shard.wanters)
            self._alike.setdefault(key, []).append(at)

    def cheapest(self, price: Floats) -> list[ShardTree]:
        """The cheapest tree of each shard at these prices of links; none where a shard cannot reach its wanters."""
        self._native.set_price(price, self._alpha_us)
        ptr, links = self._native.hops()
        self._ptr, self._links = ptr, links
        found: list[ShardTree | None] = [None] * len(self.shards)
        for (sources, wanters), members in self._alike.items():
            if not sources:
                roots = [self.shards[at].sources[0] for at in members]
                trees = self._trees(wanters, roots, False)
                for at, (_, hops) in zip(members, trees, strict=True):
                    found[at] = ShardTree(shard=at, gather=(), spread=hops)
            elif not wanters:
                roots = [self.shards[at].wanters[0] for at in members]
                for at, (_, hops) in zip(members, self._trees(sources, roots, True), strict=True):
                    found[at] = ShardTree(shard=at, gather=hops, spread=())
            else:
                everybody = list(range(self.count))
                both = zip(self._trees(sources, everybody, True), self._trees(wanters, everybody, False), strict=True)
                (_, up), (_, down) = min(both, key=lambda pair: pair[0][0] + pair[1][0])
                for at in members:
                    found[at] = ShardTree(shard=at, gather=up, spread=down)
        return [tree for tree in found if tree is not None and (tree.gather or tree.spread)]

    def routed(self, trees: Iterable[tuple[int, Pairs, Pairs]], price: Floats) -> list[ShardTree]:
        """Trees of given sends (of a shard: what is gathered, what is spread) over the cheapest routes at these prices.

        Trees with a send that has no route are left out.
        """
        self._native.set_price(price, self._alpha_us)
        self._ptr, self._links = self._native.hops()
        found = []
        for shard, *halves in trees:
            gather, spread = (tuple((a, b, self._route(a, b)) for a, b in half) for half in halves)
            if all(route for _, _, route in (*gather, *spread)):
                found.append(ShardTree(shard=shard, gather=gather, spread=spread))
        return found

    def _trees(
        self, ends: Sequence[int], roots: Sequence[int], inward: bool
    ) -> Iterator[tuple[float, tuple[Hop, ...]]]:
        cost, ptr, src, dst = self._native.trees(np.array(ends, np.int32), np.array(roots, np.int32), inward)
        rows, a, b = ptr.tolist(), src.tolist(), dst.tolist()
        for at, total in enumerate(cost.tolist()):
            span = range(rows[at], rows[at + 1])
            yield total, tuple((a[k], b[k], self._route(a[k], b[k])) for k in span)

    def _route(self, a: int, b: int) -> tuple[int, ...]:
        at = a * self.count + b
        return tuple(self._links[self._ptr[at] : self._ptr[at + 1]].tolist())


class _Master:
    """The linear program over the trees found so far: the largest rate that every shard can have.

    Of equal rates it prefers trees of less latency: `late` is what a microsecond of it costs.
    """

    def __init__(self, rate: Floats, shards: int, alpha_us: Floats, late: float) -> None:
        self._model = LinearProgram(maximize=True)
        for value in rate.tolist():
            self._model.row((), (), upper=value)
        for _ in range(shards):
            self._model.row((), (), lower=0.0)
        self._model.column(cost=1.0, index=len(rate) + np.arange(shards), value=np.full(shards, -1.0))
        self._links, self._alpha_us, self._late = len(rate), alpha_us, late
        self.trees: list[ShardTree] = []
        self._known: set[tuple[object, ...]] = set()

    def add(self, tree: ShardTree, load: Floats) -> bool:
        """Add a tree as a column of the program; False where the program has the tree already."""
        key = (tree.shard, tree.gather, tree.spread)
        if key in self._known:
            return False
        self._known.add(key)
        self.trees.append(tree)
        used = np.flatnonzero(load)
        self._model.column(
            cost=-self._late * tree.latency_us(self._alpha_us),
            index=[*used.tolist(), self._links + tree.shard],
            value=[*load[used].tolist(), 1.0],
        )
        return True

    def solve(self) -> tuple[float, Floats, Floats]:
        """The rate of each shard, the rate of each tree, and the price of each link."""
        found = self._model.solve()
        return float(found.values[0]), found.values[1:], np.maximum(found.duals[: self._links], 0.0)


def pack_shards(
    cluster: Cluster,
    devices: Sequence[int],
    shards: Sequence[Shard],
    *,
    start: Sequence[ShardTree] = (),
    until: float = float("inf"),
    close: float = CLOSE,
) -> ShardPacking:
    """Trees for all shards at the largest common rate.

    Args:
        cluster: The cluster.
        devices: The device of each rank, first those of the group, then those that may help.
        shards: The shards, of equal size.
        start: Trees that are known to begin with.
        until: When to stop (`time.monotonic`), with the best packing found by then.
        close: The share of the best rate by which the packing may miss it.

    Returns:
        The packing.

    Raises:
        Infeasible: Some rank does not reach another one.
    """
    rate = cluster.link_gb_per_s
    finder = TreeFinder(cluster, devices, shards)
    quickest = max(tree.latency_us(cluster.link_alpha_us) for tree in finder.cheapest(cluster.link_alpha_us))
    master = _Master(rate, len(shards), cluster.link_alpha_us, LATE / len(shards) / max(quickest, 1e-9))
    # Where trees cost the same, those with less latency: the alphas count far less than any difference in price.
    tie = (cluster.link_alpha_us / max(float(cluster.link_alpha_us.sum()), 1e-9) + 1 / len(rate)) * 1e-7 / rate.max()
    price = center = 1.0 / rate / len(rate)
    for tree in start:
        master.add(tree, tree.load(len(rate)))
    limit, at_dual = np.inf, False
    while True:
        trees = finder.cheapest(price + tie)
        if len(trees) < len(shards):
            raise Infeasible(f"steiner: some rank of {cluster.name} does not reach another one")
        loads = [tree.load(len(rate)) for tree in trees]
        least = sum(float(load @ price) for load in loads)
        here = float(rate @ price) / least if least > 0 else np.inf
        if here < limit:
            limit, center = here, price / least
        new = sum([master.add(tree, load) for tree, load in zip(trees, loads, strict=True)])
        if not new and at_dual:
            break
        reached, rates, dual = master.solve()
        if reached >= limit * (1 - close) or time.monotonic() > until:
            break
        # Mixed prices give better limits. Only at the dual prices does finding no new tree prove that none is missing.
        at_dual = not new
        price = dual if at_dual else SMOOTHING * center + (1 - SMOOTHING) * dual
    kept = np.flatnonzero(rates > MIN_SHARE * reached)
    chosen = tuple(replace(master.trees[k], gb_per_s=float(rates[k])) for k in kept)
    return ShardPacking(trees=chosen, gb_per_s=reached, limit_gb_per_s=float(limit))
