# SPDX-License-Identifier: Apache-2.0
"""The hops of a network up to translations: one device of each orbit stands for all.

Ranks are numbered ``local + L * t`` where t is a point of a torus; a translation moves t and leaves `local`. On a
torus of devices L is 1; on equal hosts in a circle L is the size of a host; without any symmetry the torus is a point.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..programs.symmetry_views import translate
from .hops import Hops

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Quotient:
    """The hops that leave the devices with t = 0; links that translations map to one another are one link.

    Hop h goes from `src` (a local number) to the device ``dst`` + L * ``by``. `rate` is in bytes per us; a link that
    several translations leave in place serves that many copies of a hop, each at its share of the rate.
    """

    local: int
    sizes: tuple[int, ...]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    by: Ints
    moves: Ints
    """The distinct translations that hops make, without the identity."""
    shift: NDArray[np.int32]
    """For each hop 0 (no translation), or 1 + the index of its translation in `moves`."""
    link_ptr: Ints
    link: NDArray[np.int32]
    alpha_us: NDArray[np.float64]
    rate: NDArray[np.float64]
    region: NDArray[np.int32]
    crosses: NDArray[np.bool_]

    @property
    def copies(self) -> int:
        """The number of devices that each local device stands for."""
        return prod(self.sizes)

    def ends(self) -> tuple[Ints, Ints]:
        """The ranks that each hop and its copies lead from and to; the copies of a hop are consecutive."""
        point = np.arange(self.copies)
        src = self.src[:, None] + self.local * point
        dst = self.dst[:, None] + self.local * translate(point, self.by[:, None], self.sizes)
        return src.ravel(), dst.ravel()

    def distances(self, nbytes: float) -> NDArray[np.float64]:
        """The time of the shortest path of hops from each local device to each rank, as a flat array, row by row."""
        count = self.local * self.copies
        starts = self.link_ptr[:-1]
        rate = np.minimum.reduceat(self.rate[self.link], starts)
        hop_us = np.add.reduceat(self.alpha_us[self.link], starts) + nbytes / rate
        far = np.full((count, count), np.inf)
        far[self.ends()] = np.repeat(hop_us, self.copies)
        np.fill_diagonal(far, 0.0)
        for via in range(count):
            np.minimum(far, far[:, via, None] + far[None, via], out=far)
        return np.ascontiguousarray(far[: self.local].ravel())

    def keep(self, hops: NDArray[np.bool_]) -> Quotient:
        """The quotient with only the hops that `hops` marks."""
        lengths = np.diff(self.link_ptr)
        fields = {key: getattr(self, key) for key in self.__dataclass_fields__}
        fields |= {key: fields[key][hops] for key in ("src", "dst", "by", "shift", "crosses")}
        fields["link"] = self.link[np.repeat(hops, lengths)]
        fields["link_ptr"] = np.concatenate([[0], np.cumsum(lengths[hops])])
        return Quotient(**fields)


def quotient(hops: Hops, ranks: tuple[int, ...], *, symmetric: bool = True) -> Quotient:
    """Divide the hops by the finest symmetry that the cluster suggests and the hops have.

    The symmetries tried are the cluster's dimensions, and a circle of equal hosts.

    Args:
        hops: The hops between the ranks' devices.
        ranks: The device of each rank.
        symmetric: Whether to look for a symmetry at all.

    Returns:
        The quotient; without a symmetry all devices are local.

    >>> from stretto import Cluster
    >>> q = quotient(Hops.of(Cluster.preset("torus", nodes=16)), tuple(range(16)))
    >>> q.local, q.sizes, len(q.src), q.copies
    (1, (4, 4), 4, 16)
    """
    rank_of = np.full(hops.cluster.num_devices, -1, np.int64)
    rank_of[list(ranks)] = np.arange(len(ranks))
    src, dst = rank_of[hops.src], rank_of[hops.dst]
    host = _regions(hops, ranks)
    found = None
    for local, sizes in _suggested(hops, ranks, host) if symmetric else []:
        orbit = _link_orbits(hops, src, dst, local, sizes)
        if orbit is not None:
            found = (local, sizes, orbit)
            break
    local, sizes, orbit = found or (len(ranks), (1,), np.arange(hops.cluster.num_links))
    here = src < local
    copies = prod(sizes)
    first, number, count = np.unique(orbit, return_inverse=True, return_counts=True)
    lengths = np.diff(hops.link_ptr)
    alone = np.bincount(host)[host] == 1
    by = dst[here] // local
    moves, shift = np.unique(np.append(by, 0), return_inverse=True)
    return Quotient(
        local=local,
        sizes=sizes,
        src=src[here].astype(np.int32),
        dst=(dst[here] % local).astype(np.int32),
        by=by,
        moves=moves[1:],
        shift=shift[:-1].astype(np.int32),
        link_ptr=np.concatenate([[0], np.cumsum(lengths[here])]),
        link=number[hops.link[np.repeat(here, lengths)]].astype(np.int32),
        alpha_us=hops.cluster.link_alpha_us[first],
        rate=hops.cluster.link_gb_per_s[first] * 1e3 * np.minimum(1.0, count / copies),
        region=host[:local].astype(np.int32),
        crosses=(host[src] != host[dst])[here] & ~alone.all(),
    )


def _regions(hops: Hops, ranks: tuple[int, ...]) -> Ints:
    """A number for each rank's host; a device without a host counts as a host of its own."""
    host = hops.cluster.node_host[list(ranks)].astype(np.int64)
    host = np.where(host >= 0, host, hops.cluster.num_nodes + np.arange(len(ranks)))
    return np.unique(host, return_inverse=True)[1].astype(np.int64)


def _suggested(hops: Hops, ranks: tuple[int, ...], host: Ints) -> list[tuple[int, tuple[int, ...]]]:
    cluster, count = hops.cluster, len(ranks)
    found = []
    if cluster.dimensions and ranks == tuple(range(cluster.num_devices)):
        found.append((1, tuple(d.size for d in cluster.dimensions)))
    hosts = int(host.max(initial=0)) + 1
    if 1 < hosts < count and np.array_equal(host, np.arange(count) // (count // hosts)):
        found.append((count // hosts, (hosts,)))
    return found


def _link_orbits(hops: Hops, src: Ints, dst: Ints, local: int, sizes: tuple[int, ...]) -> Ints | None:
    """The orbit of each link under translations, or None where translations do not map hops to hops."""
    count = local * prod(sizes)
    table = np.full((count, count), -1, np.int64)
    table[src, dst] = np.arange(len(src))
    lengths = np.diff(hops.link_ptr)
    links = hops.cluster.num_links
    orbit = np.arange(links)
    unit = 1
    for size in sizes:
        if size > 1:
            moved = np.arange(count) % local + local * translate(np.arange(count) // local, unit, sizes)
            image = table[moved[src], moved[dst]]
            if np.any(image < 0) or np.any(lengths[image] != lengths):
                return None
            entry = np.repeat(hops.link_ptr[image] - hops.link_ptr[:-1], lengths) + np.arange(len(hops.link))
            to = np.arange(links)
            to[hops.link] = hops.link[entry]
            same_speed = np.array_equal(hops.cluster.link_gb_per_s[to], hops.cluster.link_gb_per_s) and np.array_equal(
                hops.cluster.link_alpha_us[to], hops.cluster.link_alpha_us
            )
            if not same_speed or np.any(to[hops.link] != hops.link[entry]) or len(np.unique(to)) != links:
                return None
            for _ in range(size - 1):
                orbit = np.minimum(orbit, orbit[to])
        unit *= size
    return orbit
