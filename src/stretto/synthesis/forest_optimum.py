# SPDX-License-Identifier: Apache-2.0
"""The exact rate at which roots can supply every rank, and the smallest number of trees that reaches it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.model import DEVICE
from ..errors import Infeasible

MAX_NODES = 4096
MAX_UNITS = 1 << 52
"""The limit of the sum of all capacities: below it they are exact as doubles."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The links that trees may use, with whole-number rates: ``rate[e] * unit`` GB/s.

    ``weight[v]`` is how much node v supplies to each of `terminals`, relative to other nodes. Nodes that `copies`
    marks may multicast.
    """

    cluster: Cluster
    link: NDArray[np.int64]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    rate: NDArray[np.int64]
    unit: Fraction
    terminals: NDArray[np.int32]
    weight: NDArray[np.int64]
    copies: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        terminals: Sequence[int],
        roots: Sequence[int],
        *,
        reverse: bool = False,
        multicast: bool = False,
    ) -> Graph:
        """All links between ranks, switches and NICs; other devices only relay where the cluster's devices forward.

        Args:
            cluster: The cluster.
            terminals: The devices that trees must reach.
            roots: The devices that trees start at, each with weight 1.
            reverse: Whether all links are reversed, for trees that gather.
            multicast: Whether switches that multicast may copy.

        Returns:
            The graph.

        Raises:
            Infeasible: The cluster has too many nodes.
        """
        if cluster.num_nodes > MAX_NODES:
            raise Infeasible(f"forest: {cluster.num_nodes} nodes are too many; at most {MAX_NODES}")
        usable = (cluster.node_kind != DEVICE) | cluster.devices_forward
        usable[list(terminals)] = True
        link = np.flatnonzero(usable[cluster.link_src] & usable[cluster.link_dst])
        rates = [_fraction(x) for x in cluster.link_gb_per_s[link].tolist()]
        unit = Fraction(math.gcd(*(r.numerator for r in rates)), math.lcm(*(r.denominator for r in rates)))
        if rates and max(rates) / unit > 1 << 30:
            unit = max(rates) / (1 << 30)
        weight = np.zeros(cluster.num_nodes, np.int64)
        weight[list(roots)] = 1
        ends = cluster.link_src[link], cluster.link_dst[link]
        return cls(
            cluster=cluster,
            link=link,
            src=ends[reverse],
            dst=ends[not reverse],
            rate=np.array([int(r / unit) for r in rates], np.int64),
            unit=unit,
            terminals=np.array(terminals, np.int32),
            weight=weight,
            copies=cluster.node_multicast & multicast,
        )

    @property
    def total(self) -> int:
        """The weight of all roots."""
        return int(self.weight.sum())

    @cached_property
    def passive(self) -> NDArray[np.bool_]:
        """The nodes that send no more than they receive: neither terminals nor allowed to copy."""
        inner = ~self.copies
        inner[self.terminals] = False
        return inner

    @cached_property
    def balanced(self) -> bool:
        """Whether every passive node sends as fast as it receives."""
        into, out = (np.bincount(ends, self.rate, self.cluster.num_nodes) for ends in (self.dst, self.src))
        return bool(np.all((into == out)[self.passive]))

    def spanning(self, nodes: NDArray[np.int64]) -> Graph:
        """The same graph with these switches among the terminals, in which no other node copies."""
        terminals = np.append(self.terminals, nodes).astype(np.int32)
        return replace(self, terminals=terminals, copies=np.zeros_like(self.copies))

    def fans_out(self, switch: int) -> bool:
        """Whether one link out of a switch leads, over nodes that cannot copy, to several nodes that want a copy.

        A multicast from the switch would have to part too late, or to pass the link more than once.
        """
        for link in np.flatnonzero(self.src == switch).tolist():
            ends, seen = set(), {switch}
            found = [int(self.dst[link])]
            while found:
                node = found.pop()
                if node in seen:
                    continue
                seen.add(node)
                if self.passive[node]:
                    found += self.dst[self.src == node].tolist()
                else:
                    ends.add(node)
            if len(ends) > 1:
                return True
        return False

    def suppliable(self, inverse: Fraction) -> NDArray[np.int64]:
        """The switches that may copy and that all roots together reach at a rate of ``1 / inverse`` each."""
        candidates = np.flatnonzero(self.copies)
        asked = replace(self, terminals=candidates.astype(np.int32))
        found, at = [], 0
        while at < len(candidates):
            short = asked.short(self.rate * inverse.numerator, inverse.denominator, at)
            stop = len(candidates) if short is None else short[0]
            found.append(candidates[at:stop])
            at = stop + 1
        return np.concatenate([np.zeros(0, np.int64), *found])

    def with_rate(self, rate: NDArray[np.int64], unit: Fraction) -> Graph:
        """The same graph with other rates, in whole units of `unit` GB/s."""
        return replace(self, rate=rate, unit=unit)

    def short(self, capacity: NDArray[np.int64], trees: int, start: int = 0) -> tuple[int, NDArray[np.bool_]] | None:
        """The first terminal that capacities cannot supply, and the side of the cut that it is on.

        Args:
            capacity: The number of trees that each link can carry.
            trees: The number of trees per unit of weight that must reach each terminal.
            start: The number of the terminal to begin with.

        Returns:
            The number of the terminal and the nodes on its side of the minimum cut; None where all can be supplied.
        """
        flow = _native.MaxFlow(self.cluster.num_nodes, self.src, self.dst)
        flow.set_capacity(capacity.astype(np.float64), 1.0)
        roots = np.flatnonzero(self.weight).astype(np.int32)
        supply = (self.weight[roots] * trees).astype(np.float64)
        need = np.array([float(supply.sum())])
        for at in range(start, len(self.terminals)):
            if flow.run(roots, supply, self.terminals[at : at + 1], need) < need[0]:
                return at, flow.sink_side().astype(np.bool_)
        return None

    def capacity(self, scale: Fraction) -> NDArray[np.int64]:
        """The rates times a factor, rounded down."""
        distinct, at = np.unique(self.rate, return_inverse=True)
        values = [int(r) * scale.numerator // scale.denominator for r in distinct.tolist()]
        if max(values, default=0) * len(self.rate) > MAX_UNITS:
            raise Infeasible("forest: the rates of the links have no common measure; round them")
        return np.array(values, np.int64)[at]

    def into(self, side: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The links that lead into a set of nodes."""
        return ~side[self.src] & side[self.dst]


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimum:
    """The optimum: no algorithm supplies more than ``1 / inverse`` units of rate per unit of weight.

    The cut into `side` proves it.
    """

    inverse: Fraction
    side: NDArray[np.bool_]


def optimum(graph: Graph) -> Optimum:
    """The tightest of all cuts around a terminal, found exactly by Newton's method on whole numbers."""
    best, side = Fraction(0), np.zeros(graph.cluster.num_nodes, np.bool_)
    for v in graph.terminals.tolist():
        into = int(graph.rate[graph.dst == v].sum())
        outside = graph.total - int(graph.weight[v])
        if outside and not into:
            raise Infeasible(f"forest: no link leads to {graph.cluster.node_names[v]}")
        if outside and Fraction(outside, into) > best:
            best = Fraction(outside, into)
            side = np.arange(graph.cluster.num_nodes) == v
    start = 0
    while best:
        found = graph.short(graph.rate * best.numerator, best.denominator, start)
        if found is None:
            break
        start, side = found
        into = int(graph.rate[graph.into(side)].sum())
        if not into:
            name = graph.cluster.node_names[int(graph.terminals[start])]
            raise Infeasible(f"forest: {name} cannot be reached from all ranks")
        best = Fraction(int(graph.weight[~side].sum()), into)
    return Optimum(inverse=best, side=side)


def exact_trees(graph: Graph, best: Optimum, most: int) -> tuple[int, NDArray[np.int64]] | None:
    """The smallest number of trees per unit of weight that reaches the optimum.

    Every link of the tightest cut must be used up, so the number is a multiple of what makes these whole.

    Args:
        graph: The graph.
        best: Its optimum.
        most: The largest number to consider.

    Returns:
        The number of trees and the trees that each link can carry; None where the number is larger than `most`.
    """
    tight = np.unique(graph.rate[graph.into(best.side)])
    least = math.lcm(*((best.inverse * int(r)).denominator for r in tight))
    for trees in range(least, most + 1, least):
        capacity = graph.capacity(best.inverse * trees)
        if graph.short(capacity, trees) is None:
            return trees, capacity
    return None


def near_trees(graph: Graph, best: Optimum, most: int) -> tuple[int, NDArray[np.int64], Fraction]:
    """The number of trees per unit of weight that comes closest to the optimum.

    Args:
        graph: The graph.
        best: Its optimum.
        most: The largest number to consider, >= 1.

    Returns:
        The number of trees, the trees that each link can carry, and the inverse of the rate that is reached.
    """
    cuts = [graph.into(best.side)]
    weights = [int(graph.weight[~best.side].sum())]
    reached: tuple[Fraction, int] | None = None
    for trees in range(1, most + 1):
        inverse = best.inverse * trees
        while True:
            for cut, weight in zip(cuts, weights, strict=True):
                inverse = _least_scale(graph.rate[cut], inverse, weight * trees)
            if reached is not None and inverse / trees >= reached[0]:
                break
            found = graph.short(graph.capacity(inverse), trees)
            if found is None:
                reached = inverse / trees, trees
                break
            cuts.append(graph.into(found[1]))
            weights.append(int(graph.weight[~found[1]].sum()))
    assert reached is not None, "one tree always fits if links are fast enough"
    return reached[1], graph.capacity(reached[0] * reached[1]), reached[0]


def _least_scale(rate: NDArray[np.int64], scale: Fraction, need: int) -> Fraction:
    """The least factor, at least `scale`, with which the whole parts of these rates add up to `need`."""
    # Links whose rate balancing has set to 0 never add anything.
    distinct, count = (x.tolist() for x in np.unique(rate[rate > 0], return_counts=True))
    while sum(n * int(r * scale) for r, n in zip(distinct, count, strict=True)) < need:
        scale = min(Fraction(int(r * scale) + 1, r) for r in distinct)
    return scale


def _fraction(value: float) -> Fraction:
    """The simple fraction that a rate stands for: 21.73913043478261 is 500/23."""
    simple = Fraction(value).limit_denominator(100_000)
    return simple if abs(float(simple) - value) <= 1e-12 * value else Fraction(value).limit_denominator(1 << 30)
