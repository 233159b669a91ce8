# SPDX-License-Identifier: Apache-2.0
"""Spanning trees that together use the full rate of a network: `Forest`, and how it is packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..errors import Infeasible
from .forest_balance import balanced
from .forest_casts import without_switches
from .forest_optimum import Graph, exact_trees, near_trees, optimum

DONE, STARVED, UNBALANCED, TOO_HIGH = range(4)
NO_LIMIT = 1 << 30
MAX_PAIRS = 1 << 16
"""The largest number of roots times ranks: 256 ranks take half a minute."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Forest:
    """`k` spanning out-trees from every root, packed into the links' rates.

    Bundle b stands for ``amount[b]`` equal trees from device ``root[b]``; its edges are
    ``ptr[b]:ptr[b+1]``, parents first; edge e leads from ``src[e]`` to ``dst[e]`` (``depth[e]`` edges below the
    root) over the links ``routes[route[e]]``. Edges with the same ``cast[e] >= 0`` are one multicast: they share the
    links that their routes begin with in common. With `reverse` all links are reversed, for trees that gather.
    Each tree may send ``throughput / k`` GB/s at the same time as all others; no packing reaches more than `optimum`.
    """

    cluster: Cluster
    reverse: bool
    roots: tuple[int, ...]
    k: int
    optimum: Fraction
    """The GB/s per root that no algorithm exceeds, by a cut (or, with unequal switches, by their balance).

    Without `multicast` the bound holds for algorithms that do not multicast either.
    """
    throughput: Fraction
    """The GB/s per root that these trees reach together."""
    root: NDArray[np.int32]
    amount: NDArray[np.int64]
    ptr: NDArray[np.int64]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    depth: NDArray[np.int32]
    route: NDArray[np.int32]
    routes: tuple[tuple[int, ...], ...]
    cast: NDArray[np.int32]
    multicast: bool = False
    """Whether switches were allowed to copy."""

    @property
    def algorithm_gb_per_s(self) -> Fraction:
        """The rate of all roots together: bytes of the whole result per time."""
        return self.throughput * len(self.roots)

    @property
    def exact(self) -> bool:
        """Whether the trees reach the optimum."""
        return self.throughput == self.optimum

    @cached_property
    def heights(self) -> NDArray[np.int32]:
        """The height of each bundle's trees."""
        if not len(self.src):
            return np.zeros(len(self.root), np.int32)
        deepest: NDArray[np.int32] = np.maximum.reduceat(self.depth, self.ptr[:-1]) + 1
        return deepest

    @cached_property
    def below(self) -> NDArray[np.int32]:
        """The height of the subtree below each edge."""
        below = np.zeros(len(self.src), np.int32)
        height = np.zeros(self.cluster.num_nodes, np.int32)
        for first, last in pairwise(self.ptr.tolist()):
            edges = range(last - 1, first - 1, -1)
            for e in edges:
                height[self.src[e]] = height[self.dst[e]] = 0
            for e in edges:
                below[e] = height[self.dst[e]]
                height[self.src[e]] = max(height[self.src[e]], below[e] + 1)
        return below

    @property
    def height(self) -> int:
        """The height of the highest tree."""
        return int(self.heights.max(initial=0))

    @property
    def mean_height(self) -> float:
        """The mean height of all trees."""
        return float(np.average(self.heights, weights=self.amount)) if len(self.root) else 0.0

    def load(self) -> NDArray[np.int64]:
        """The number of trees that use each link of the cluster; a multicast counts once where it travels once."""
        used = np.zeros(self.cluster.num_links, np.int64)
        trees = np.repeat(self.amount, np.diff(self.ptr))
        alone = self.cast < 0
        per_route = np.bincount(self.route[alone], trees[alone], len(self.routes)).astype(np.int64)
        for route, count in zip(self.routes, per_route.tolist(), strict=True):
            np.add.at(used, list(route), count)
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for e in np.flatnonzero(~alone).tolist():
            route = self.routes[self.route[e]]
            for hop, link in enumerate(route):
                strand = int(self.cast[e]), route[: hop + 1]
                if strand not in seen:
                    seen.add(strand)
                    used[link] += trees[e]
        return used

    def __repr__(self) -> str:
        share = "optimal" if self.exact else f"{float(self.throughput / self.optimum):.4%} of the optimum"
        how = ", multicast" if np.any(self.cast >= 0) else ""
        height = f"height {self.height} (mean {self.mean_height:.1f})"
        return (
            f"<Forest on {self.cluster.name}: {self.k} trees from each of {len(self.roots)} roots, "
            f"{float(self.algorithm_gb_per_s):.4g} GB/s ({share}{how}), {height}>"
        )


def pack_trees(
    cluster: Cluster,
    devices: Sequence[int],
    roots: Sequence[int],
    *,
    reverse: bool = False,
    max_k: int = 1 << 16,
    max_height: int | None = None,
    multiple: int = 1,
    multicast: bool = False,
) -> Forest:
    """Pack trees over `devices` from each of `roots`: the smallest k that reaches the optimum, times `multiple`.

    Args:
        cluster: The cluster.
        devices: The devices that every tree spans.
        roots: The devices that trees start at.
        reverse: Whether links are reversed, for trees that gather.
        max_k: The most trees per root, >= 1; where the exact k is larger, the k up to it that comes closest is used.
        max_height: The most edges between a root and a device; no limit when not given.
        multiple: A factor for k, >= 1.
        multicast: Whether the cluster's multicasting switches may copy, where that can be no slower.

    Returns:
        The forest.

    Raises:
        Infeasible: There are too many devices, a device cannot be reached, or no trees of that height were found (the
            search is greedy: there may be such trees all the same).

    >>> pack_trees(Cluster.preset("dgx_a100", nodes=2), range(16), range(16)).algorithm_gb_per_s
    Fraction(1040, 3)
    """
    if len(devices) * len(roots) > MAX_PAIRS:
        raise Infeasible(f"forest: {len(roots)} roots and {len(devices)} ranks are too many; at most {MAX_PAIRS} pairs")
    graph = Graph.of(cluster, devices, roots, reverse=reverse, multicast=multicast and not reverse)
    limit = NO_LIMIT if max_height is None else max_height
    best = optimum(graph)
    if not best.inverse:
        return _forest(graph, reverse, roots, 1, Fraction(0), Fraction(0), None)
    if not graph.copies.any():
        return _packed(graph, reverse, roots, max_k, limit, multiple)
    bound = graph.unit / best.inverse
    spanned = graph.suppliable(best.inverse)
    found = []
    refused: Infeasible | None = None
    plain = [w for w in spanned.tolist() if not graph.fans_out(w)]
    for nodes in dict.fromkeys((tuple(spanned.tolist()), tuple(plain), ())):
        try:
            found.append(_packed(graph.spanning(np.array(nodes, np.int64)), reverse, roots, max_k, limit, multiple))
        except Infeasible as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    chosen = max(found, key=lambda forest: (forest.throughput, -forest.mean_height))
    if chosen.throughput < bound and not graph.balanced:
        unit = graph.unit
        settled = Fraction(balanced(graph)[1]) * unit
        if settled < bound:
            bound = chosen.throughput if float(chosen.throughput / settled) > 1 - 1e-7 else settled
    return replace(chosen, optimum=bound, multicast=True)


def _packed(graph: Graph, reverse: bool, roots: Sequence[int], max_k: int, limit: int, multiple: int) -> Forest:
    """Pack trees over the terminals of a graph in which only terminals copy."""
    bound = graph.unit / optimum(graph).inverse
    packed = _pack(graph, max_k, limit, multiple)
    if packed[1][0] == UNBALANCED and not graph.balanced:
        unit = graph.unit
        graph, most = balanced(graph)
        settled = graph.unit / optimum(graph).inverse
        # The solver's optimum is a float; if the optimum of the exact rates is as good, that one is meant.
        bound = settled if float(settled / unit) > most * (1 - 1e-7) else Fraction(most) * unit
        packed = _pack(graph, max_k, limit, multiple)
    k, result, inverse = packed
    status, where = result[:2]
    name = graph.cluster.name
    if status == TOO_HIGH:
        raise Infeasible(f"max_height: no trees of height {limit} were found on {name}; allow more")
    if status != DONE:
        what = "cannot be supplied" if status == STARVED else "cannot be replaced by direct links"
        raise Infeasible(f"forest: {graph.cluster.node_names[where]} {what}")
    return _forest(graph, reverse, roots, k, bound, graph.unit / inverse, result)


_Packed = tuple[
    int, int, NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32],
    NDArray[np.int32], NDArray[np.int64], NDArray[np.int32],
]  # fmt: skip


def _pack(graph: Graph, max_k: int, max_height: int, multiple: int) -> tuple[int, _Packed, Fraction]:
    best = optimum(graph)
    inverse = best.inverse
    found = exact_trees(graph, best, max_k)
    if found is None:
        k, capacity, inverse = near_trees(graph, best, min(max_k, 64))
    else:
        k, capacity = found
    if multiple > 1:
        k *= multiple
        capacity = graph.capacity(inverse * k)

    def packed() -> _Packed:
        return _native.pack_forest(
            graph.cluster.num_nodes,
            graph.src,
            graph.dst,
            capacity,
            graph.terminals,
            graph.weight * k,
            max_height,
            graph.cluster.num_devices,
        )

    result = packed()
    if result[0] == UNBALANCED and graph.balanced:
        # Rounding down has unbalanced a switch: take as many trees as make every rate whole.
        k *= math.lcm(*((inverse * k * r).denominator for r in np.unique(graph.rate).tolist()))
        capacity = graph.capacity(inverse * k)
        result = packed()
    return k, result, inverse


def _forest(
    graph: Graph,
    reverse: bool,
    roots: Sequence[int],
    k: int,
    bound: Fraction,
    reached: Fraction,
    result: _Packed | None,
) -> Forest:
    cluster = graph.cluster
    none = np.zeros(0, np.int32)
    columns: dict[str, NDArray[np.int32]]
    over_switches = False
    if result is None:
        root, amount, ptr = none, np.zeros(0, np.int64), np.zeros(1, np.int64)
        columns = dict.fromkeys(("src", "dst", "route", "cast"), none)
        routes: list[tuple[int, ...]] = []
    else:
        root, amount, ptr, src, dst, route, link_ptr, links = result[2:]
        links = graph.link[links].astype(np.int32)
        routes = [tuple(links[a:b].tolist()[:: -1 if reverse else 1]) for a, b in pairwise(link_ptr.tolist())]
        used, number = np.unique(route, return_inverse=True)
        routes = [routes[r] for r in used.tolist()]
        columns = {"src": src, "dst": dst, "route": number.astype(np.int32), "cast": np.full(len(src), -1, np.int32)}
        over_switches = bool(np.any(dst >= cluster.num_devices))
        if over_switches:
            ptr, columns, routes = without_switches(cluster, ptr, columns, routes)
    depth = np.zeros(len(columns["src"]), np.int32)
    at = np.zeros(cluster.num_nodes, np.int32)
    for bundle, (first, last) in enumerate(pairwise(ptr.tolist())):
        at[root[bundle]] = 0
        for e in range(first, last):
            depth[e] = at[columns["src"][e]]
            at[columns["dst"][e]] = depth[e] + 1
    made = Forest(
        cluster=cluster,
        reverse=reverse,
        roots=tuple(roots),
        k=k,
        optimum=bound,
        throughput=reached,
        root=root,
        amount=amount,
        ptr=ptr,
        src=columns["src"],
        dst=columns["dst"],
        depth=depth,
        route=columns["route"],
        routes=tuple(routes),
        cast=columns["cast"],
    )
    return replace(made, throughput=min(reached, _carried(graph, made))) if over_switches else made


def _carried(graph: Graph, forest: Forest) -> Fraction:
    """The rate that the trees really reach: less than was packed, if a multicast had to be sent more than once."""
    load = forest.load()[graph.link]
    fullest = max(Fraction(int(n), int(r)) for n, r in zip(load, graph.rate, strict=True) if n)
    return graph.unit * forest.k / fullest
