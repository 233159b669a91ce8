# SPDX-License-Identifier: Apache-2.0
"""A few trees from every root that load all links alike: one after the other is made anew where links have room."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..simulator.network import routes_between
from .forest_trees import Forest

POWER = 16.0
"""Links count by this power of their load: the fullest for nearly all."""
SWEEPS = 40
HEIGHT = 3
"""The most edges between a root and a rank: deeper trees fill their links later."""
HOP = 0.02
"""What an edge further from the root costs in addition, as a share of a mean edge."""
JITTER = 0.05
"""The share by which costs of edges are drawn larger, so that alike ones take turns."""

Edge = tuple[int, int]


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
        self.per_share: NDArray[np.float64] = np.zeros((len(self.pairs), len(used)))
        for at, each in enumerate(self.routes):
            for link in each:
                self.per_share[at, number[link]] += 1 / float(cluster.link_gb_per_s[link])


def packed_forest(
    cluster: Cluster, devices: tuple[int, ...], k: int, *, reverse: bool = False, seed: int = 0
) -> tuple[Forest, float]:
    """Pack trees from every device into the links so that the fullest link has little more than the others.

    Args:
        cluster: The cluster.
        devices: The devices, each of which is a root.
        k: The trees of every root, each with the same share.
        reverse: Whether data goes against the direction of the trees.
        seed: Which trees are found, among alike ones.

    Returns:
        The trees, and the nanoseconds that the fullest link takes for one byte of every root.
    """
    loads = TreeLinks(cluster, devices, reverse=reverse)
    packing = _Packing(loads, devices, k, seed)
    full = packing.improve()
    number = {pair: at for at, pair in enumerate(loads.pairs)}
    trees = [packing.trees[root, at] for root in devices for at in range(k)]
    edges = [edge for tree in trees for edge, _ in tree]
    routes = sorted(set(loads.routes))
    rate = Fraction(1 / full).limit_denominator(10**6)
    forest = Forest(
        cluster=cluster, reverse=reverse, roots=devices, k=k, optimum=rate, throughput=rate,
        root=np.repeat(np.array(devices, np.int32), k), amount=np.ones(len(trees), np.int64),
        ptr=np.cumsum([0, *(len(tree) for tree in trees)]).astype(np.int64),
        src=np.array([a for a, _ in edges], np.int32), dst=np.array([b for _, b in edges], np.int32),
        depth=np.array([depth for tree in trees for _, depth in tree], np.int32),
        route=np.array([routes.index(loads.routes[number[edge]]) for edge in edges], np.int32),
        routes=tuple(routes), cast=np.full(len(edges), -1, np.int32),
    )  # fmt: skip
    return forest, full


class _Packing:
    """Trees, and the load that they put on links."""

    def __init__(self, loads: TreeLinks, devices: tuple[int, ...], k: int, seed: int) -> None:
        self._devices, self._per_share = devices, loads.per_share / k
        self._number = {pair: at for at, pair in enumerate(loads.pairs)}
        self._random = random.Random(seed)
        self._load = np.zeros(loads.per_share.shape[1])
        self.trees: dict[tuple[int, int], list[tuple[Edge, int]]] = {}
        for at in range(k):
            for root in devices:
                self._place((root, at), self._tree(root))

    def improve(self) -> float:
        """Make every tree anew as long as that helps, and return the load of the fullest link."""
        keys = sorted(self.trees)
        for _ in range(SWEEPS):
            self._random.shuffle(keys)
            helped = False
            for key in keys:
                before, old = self._badness(), self.trees[key]
                self._lift(key)
                self._place(key, self._tree(key[0]))
                if self._badness() < before * (1 - 1e-9):
                    helped = True
                else:
                    self._lift(key)
                    self._place(key, old)
            if not helped:
                break
        return float(self._load.max())

    def _badness(self) -> float:
        top = float(self._load.max())
        norm: float = ((self._load / top) ** POWER).sum()
        return float(top * norm ** (1 / POWER))

    def _edges(self, key: tuple[int, int]) -> list[int]:
        return [self._number[edge] for edge, _ in self.trees[key]]

    def _place(self, key: tuple[int, int], tree: list[tuple[Edge, int]]) -> None:
        self.trees[key] = tree
        self._load += self._per_share[self._edges(key)].sum(axis=0)

    def _lift(self, key: tuple[int, int]) -> None:
        self._load -= self._per_share[self._edges(key)].sum(axis=0)

    def _tree(self, root: int) -> list[tuple[Edge, int]]:
        """A tree over edges whose links have most room, grown from its root."""
        least = float(self._per_share.max())
        weight = ((self._load + least / 2) / max(float(self._load.max()), least)) ** (POWER - 1)
        cost = self._per_share @ weight
        cost = cost / cost.mean()
        depth, found = {root: 0}, list[tuple[Edge, int]]()
        while len(depth) < len(self._devices):
            _, a, b = min(
                (float(cost[self._number[a, b]]) * (1 + JITTER * self._random.random()) + HOP * depth[a], a, b)
                for a in depth
                if depth[a] < HEIGHT
                for b in self._devices
                if b not in depth
            )
            found.append(((a, b), depth[a]))
            depth[b] = depth[a] + 1
        return found
