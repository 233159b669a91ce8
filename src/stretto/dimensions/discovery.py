# SPDX-License-Identifier: Apache-2.0
"""Dimensions that a cluster has without saying so: a grid of ranks whose lines are all alike.

Every way to number the devices as a grid, the first coordinate fastest, is tried. A grid is one of dimensions where

* in each dimension all lines are of one kind: every two devices have a link of their own (fully connected), only
  neighbors have (ring), or all meet in a switch, with rates and latencies that differ by no more than measuring does;
* no link serves two dimensions, so that they can be used at the same time as if each were alone;
* the dimensions together use every link that any two devices would use: a grid that leaves links idle is none.

The rate of a dimension is what a device gets while all devices use that dimension at once: an uplink that the four
ranks of a host share counts a quarter for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Dimension
from ..cluster.model import DEVICE
from ..errors import InvalidInput

MAX_DEVICES = 256
"""Larger clusters are not searched: every two devices are looked at for each grid."""
ALIKE = 1.1
"""Rates, and latencies, of one dimension that differ by no more are the same, measured."""
DIGITS = 4
Ints = NDArray[np.int64]


def discover(cluster: Cluster) -> tuple[Dimension, ...]:
    """The dimensions of a cluster, the innermost (whose neighbors are ranks next to each other) first.

    Args:
        cluster: Any cluster; what it says of its own dimensions is not looked at.

    Returns:
        Two dimensions or more, as many as there are; none where the cluster is no grid, has more than 256 devices, or
        some devices cannot reach others.

    >>> [(dim.kind, dim.size) for dim in discover(Cluster.preset("dgx2", nodes=2))]
    [('switch', 16), ('switch', 2)]
    >>> discover(Cluster.preset("ring", nodes=8))
    ()
    """
    count = cluster.num_devices
    if not 4 <= count <= MAX_DEVICES:
        return ()
    try:
        # A message must not take a longer way because its links were measured to be a little wider.
        routes = _Routes.of(replace(cluster, link_gb_per_s=_settled(cluster.link_gb_per_s)))
    except InvalidInput:
        return ()
    for sizes in sorted(_grids(count), key=len, reverse=True):
        found = _dimensions(routes, sizes) if len(sizes) > 1 else ()
        if found:
            return found
    return ()


def _grids(count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of numbers of two or more, in every order."""
    yield (count,)
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            yield from ((first, *rest) for rest in _grids(count // first))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Routes:
    """The routes between all pairs of devices."""

    cluster: Cluster
    ptr: Ints
    links: Ints
    rate: NDArray[np.float64]
    """The rate of each link."""
    hops: Ints
    """The number of links between the devices of each pair, row by row; 0 on the diagonal."""
    alpha_us: NDArray[np.float64]
    passes_devices: NDArray[np.bool_]

    @classmethod
    def of(cls, cluster: Cluster) -> _Routes:
        count = cluster.num_devices
        src, dst = (grid.ravel().astype(np.int32) for grid in np.indices((count, count)))
        ptr, links = cluster.route_table(src, dst, np.zeros(len(src), np.int64))
        hops = np.diff(ptr)
        owner = np.repeat(np.arange(len(src)), hops)
        inner = np.arange(len(links)) != ptr[owner + 1] - 1
        through = inner & (cluster.node_kind[cluster.link_dst[links]] == DEVICE)
        return cls(
            cluster=cluster, ptr=ptr.astype(np.int64), links=links.astype(np.int64), hops=hops,
            rate=np.minimum(cluster.link_gb_per_s, cluster.link_flow_gb_per_s),
            alpha_us=np.bincount(owner, cluster.link_alpha_us[links], minlength=len(src)).astype(np.float64),
            passes_devices=np.bincount(owner, through, minlength=len(src)) > 0,
        )  # fmt: skip

    def of_pairs(self, pairs: Ints) -> tuple[Ints, Ints]:
        """The links of some pairs, and for each link the position of its pair."""
        owner = np.repeat(np.arange(len(pairs)), self.hops[pairs])
        at = np.arange(len(owner)) - np.repeat(np.cumsum(self.hops[pairs]) - self.hops[pairs], self.hops[pairs])
        return self.links[self.ptr[pairs][owner] + at], owner

    def together_gb_per_s(self, pairs: Ints) -> NDArray[np.float64]:
        """What each pair gets while all of them send at once, on links that share alike."""
        links, owner = self.of_pairs(pairs)
        load = np.bincount(links, minlength=len(self.rate))
        found = np.full(len(pairs), math.inf)
        np.minimum.at(found, owner, self.rate[links] / load[links])
        return found


def _dimensions(routes: _Routes, sizes: Sequence[int]) -> tuple[Dimension, ...]:
    used: list[set[int]] = []
    found = []
    stride = 1
    for size in sizes:
        dim = _dimension(routes, size, stride)
        if dim is None:
            return ()
        found.append(dim)
        links, _ = routes.of_pairs(_neighbors(routes, size, stride, range(1, size)))
        used.append(set(links.tolist()))
        stride *= size
    apart = sum(map(len, used)) == len(set().union(*used))
    return tuple(found) if apart and set(routes.links.tolist()) == set().union(*used) else ()


def _neighbors(routes: _Routes, size: int, stride: int, distances: Sequence[int]) -> Ints:
    """The pairs of devices at some distances along a dimension, device by device, around the edge."""
    count = routes.cluster.num_devices
    device = np.arange(count)
    at = device // stride % size
    others = [device + ((at + by) % size - at) * stride for by in distances]
    return np.stack([device * count + other for other in others], axis=1).ravel()


def _dimension(routes: _Routes, size: int, stride: int) -> Dimension | None:
    """What all lines of a dimension are; None where they differ."""
    whole = _neighbors(routes, size, stride, range(1, size))
    far = routes.passes_devices[whole].reshape(-1, size - 1)
    ends = sorted({1, size - 1})
    if not far.any():
        kind, pairs = ("fully_connected", whole) if (routes.hops[whole] == 1).all() else ("switch", None)
    elif far[:, 1:-1].all() and not far[:, [0, -1]].any():
        kind, pairs = "ring", _neighbors(routes, size, stride, ends)
    else:
        return None
    near = _neighbors(routes, size, stride, ends)
    if pairs is None:
        rates = np.array([routes.together_gb_per_s(_neighbors(routes, size, stride, [by])) for by in ends]).ravel()
        total = _same(rates)
    else:
        each = routes.together_gb_per_s(pairs)
        one = _same(each)
        total = None if one is None else one * len(pairs) / routes.cluster.num_devices
    alpha = _same(routes.alpha_us[near])
    if total is None or alpha is None:
        return None
    return Dimension(kind=kind, size=size, gb_per_s=_rounded(total), alpha_us=_rounded(alpha))


def _same(values: NDArray[np.float64]) -> float | None:
    """The middle of values that are alike; None where they are not."""
    low, high = float(values.min()), float(values.max())
    return float(np.median(values)) if high <= ALIKE * low or high == low else None


def _settled(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rates that are alike become one, the middle one.

    >>> _settled(np.array([50.0, 49.0, 25.0, 51.0])).tolist()
    [50.0, 50.0, 25.0, 50.0]
    """
    made = rates.copy()
    order = np.argsort(rates)
    begin = 0
    for at in range(1, len(order) + 1):
        if at == len(order) or rates[order[at]] > ALIKE * rates[order[begin]]:
            made[order[begin:at]] = np.median(rates[order[begin:at]])
            begin = at
    return made


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
