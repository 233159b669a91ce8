# SPDX-License-Identifier: Apache-2.0
"""Partitions of the devices: bounds from the rates into all groups of a partition together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ... import _native
from .cuts import CLOSER
from .net import ArcNetwork


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A partition of the devices; `into` counts for each arc the groups whose narrowest entry it belongs to."""

    group: NDArray[np.int64]
    num_groups: int
    into: NDArray[np.int64]
    rate: float


def narrowest_partition(net: ArcNetwork, vertex: NDArray[np.int64]) -> Partition | None:
    """The partition P of the vertices that maximises ``(|P| - 1) / sum of the rates into its groups``.

    ``vertex[d]`` is the vertex that device d belongs to; None with fewer than two vertices. The rate into a
    set of vertices is a minimum cut (a switch may be on either side), hence submodular. For a given ratio
    the best partition is a Dilworth truncation of (rate - 1/ratio): a greedy pass over the vertices finds it
    with one minimum cut each. Newton's method on the ratio ends after a few passes.
    """
    count = int(vertex.max(initial=-1)) + 1
    if count < 2:
        return None
    cuts = _Entries(net, vertex, count)
    block = np.arange(count)
    best = cuts.partition(block)
    while True:
        block = cuts.truncation(best.rate / (best.num_groups - 1))
        if block.max() == 0:
            return best
        better = cuts.partition(block)
        if (better.num_groups - 1) / better.rate <= CLOSER * (best.num_groups - 1) / best.rate:
            return best
        best = better


class _Entries:
    """Minimum cuts into sets of vertices, where every vertex is a contracted set of devices."""

    def __init__(self, net: ArcNetwork, vertex: NDArray[np.int64], count: int) -> None:
        self.net, self.vertex, self.count = net, vertex, count
        node = np.concatenate([vertex, count + np.arange(net.num_nodes - net.num_devices)]).astype(np.int32)
        self.src, self.dst = node[net.src], node[net.dst]
        self.arcs = np.flatnonzero((net.link >= 0) & (self.src != self.dst))
        self.flow = _native.MaxFlow(int(node.max()) + 1, self.src[self.arcs], self.dst[self.arcs])
        rates = net.rate[self.arcs]
        self.flow.set_capacity(rates, max(float(rates.sum()), 1e-300) * 2.0**-58)

    def partition(self, block: NDArray[np.int64]) -> Partition:
        """A partition of the vertices, with the narrowest entry into each of its blocks."""
        into = np.zeros(len(self.net.src), np.int64)
        order = np.argsort(block, kind="stable").astype(np.int32)
        ends = np.cumsum(np.bincount(block))
        for first, last in zip(np.append(0, ends[:-1]), ends, strict=True):
            inside, outside = order[first:last], np.concatenate([order[:first], order[last:]])
            self.flow.run(outside, np.full(len(outside), np.inf), inside, np.full(len(inside), np.inf))
            side = self.flow.sink_side().astype(np.bool_)
            into[self.arcs] += (~side[self.src] & side[self.dst])[self.arcs]
        rate = float(into[self.arcs] @ self.net.rate[self.arcs])
        return Partition(group=block[self.vertex], num_groups=len(ends), into=into, rate=rate)

    def truncation(self, price: float) -> NDArray[np.int64]:
        """The block of each vertex in a partition that minimises the sum of (rate into a block - price)."""
        weight = np.zeros(self.count)
        block = np.arange(self.count)
        everyone = np.arange(self.count, dtype=np.int32)
        for v in range(self.count):
            # Find the set of v and earlier vertices with the least (rate - price - weight of the others); later
            # vertices stay outside.
            supply = np.maximum(-weight, 0)
            supply[v + 1 :] = np.inf
            demand = np.maximum(weight, 0)
            reward = float(demand.sum())
            demand[v] = np.inf
            weight[v] = self.flow.run(everyone, supply, everyone, demand) - reward - price
            side = self.flow.sink_side()[: self.count].astype(np.bool_)
            block[np.isin(block, np.unique(block[: v + 1][side[: v + 1]]))] = v
        return np.unique(block, return_inverse=True)[1]
