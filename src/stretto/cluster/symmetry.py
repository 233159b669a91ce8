# SPDX-License-Identifier: Apache-2.0
"""Whether a cluster looks the same from every device, and which links then correspond to one another."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .model import Cluster

Ints = NDArray[np.int64]


def link_orbits(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[Ints, Ints]:
    """The orbit of each link under translations of the torus `sizes`, and each orbit's first link.

    Raises `InvalidInput` where the cluster is not symmetric, or where translations fix a link (ranks share it, so
    that one rank cannot stand for all).

    >>> orbit, first = link_orbits(Cluster.preset("ring", nodes=4), (4,))
    >>> len(first), np.bincount(orbit).tolist()
    (2, [4, 4])
    """
    ranks = prod(sizes)
    if ranks != cluster.num_devices:
        raise InvalidInput(f"symmetry: {ranks} ranks do not fill the {cluster.num_devices} devices of {cluster.name}")
    kind = _classes(cluster)
    orbit = np.arange(cluster.num_links, dtype=np.int64)
    stride = 1
    for size in sizes:
        if size > 1:
            device = np.arange(ranks, dtype=np.int64)
            step = np.where(device // stride % size == size - 1, (1 - size) * stride, stride)
            moved = _move_links(cluster, _move_nodes(cluster, device + step, kind), kind)
            for _ in range(size - 1):  # each pass lets the least number of an orbit travel on
                orbit = np.minimum(orbit, orbit[moved])
        stride *= size
    first, number, count = np.unique(orbit, return_inverse=True, return_counts=True)
    shared = np.flatnonzero(count != ranks)
    if len(shared):
        raise InvalidInput(
            f"symmetry: link {cluster.link_name(int(first[shared[0]]))} of {cluster.name} is shared by several "
            f"ranks; simulate the expanded program"
        )
    return number.astype(np.int64), first


def _classes(cluster: Cluster) -> Ints:
    """A number for each link; links with equal numbers differ only in their ends."""
    columns: list[NDArray[Any]] = [
        cluster.link_channel, cluster.link_alpha_us, cluster.link_gb_per_s, cluster.link_flow_gb_per_s,
        cluster.link_incast,
    ]  # fmt: skip
    numbers = [np.unique(column, return_inverse=True)[1] for column in columns]
    key = np.zeros(cluster.num_links, np.int64)
    for number in numbers:
        key = np.unique(key * (int(number.max(initial=0)) + 1) + number, return_inverse=True)[1]
    return key


def _move_nodes(cluster: Cluster, device: Ints, kind: Ints) -> Ints:
    """The image of each node when device d moves to ``device[d]``; switches and NICs follow their neighbours."""
    moved = np.full(cluster.num_nodes, -1, np.int64)
    moved[: len(device)] = device
    known = moved >= 0
    while not known.all():
        # Nodes next to nodes with a known image are identified by the known nodes and link classes around them.
        was: dict[int, list[tuple[int, int, int]]] = {}
        now: dict[int, list[tuple[int, int, int]]] = {}
        for outward, ends, others in (
            (0, cluster.link_src, cluster.link_dst),
            (1, cluster.link_dst, cluster.link_src),
        ):
            for link in np.flatnonzero(known[others] & ~known[ends]):
                node, other, what = int(ends[link]), int(others[link]), int(kind[link])
                was.setdefault(node, []).append((other, outward, what))
                now.setdefault(node, []).append((int(moved[other]), outward, what))
        looks = {tuple(sorted(links)): node for node, links in was.items()}
        if not was or len(looks) != len(was):
            raise _not_symmetric(cluster)
        for node, links in now.items():
            target = looks.get(tuple(sorted(links)))
            if target is None:
                raise _not_symmetric(cluster)
            moved[node] = target
        known = moved >= 0
    return moved


def _move_links(cluster: Cluster, node: Ints, kind: Ints) -> Ints:
    before = np.lexsort((kind, cluster.link_dst, cluster.link_src))
    src, dst = node[cluster.link_src], node[cluster.link_dst]
    after = np.lexsort((kind, dst, src))
    alike = (
        np.array_equal(cluster.link_src[before], src[after])
        and np.array_equal(cluster.link_dst[before], dst[after])
        and np.array_equal(kind[before], kind[after])
    )
    if not alike:
        raise _not_symmetric(cluster)
    moved = np.empty(cluster.num_links, np.int64)
    moved[after] = before
    return moved


def _not_symmetric(cluster: Cluster) -> InvalidInput:
    return InvalidInput(
        f"symmetry: {cluster.name} does not look the same from every device; simulate the expanded program"
    )
