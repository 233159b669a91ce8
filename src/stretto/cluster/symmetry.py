# SPDX-License-Identifier: Apache-2.0
"""Whether a cluster looks the same from every device, and which links then correspond to one another."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .model import Cluster

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkOrbits:
    """The links of a cluster up to translations of a torus whose points are groups of devices."""

    orbit: Ints
    """The orbit of each link."""
    first: Ints
    """The first link of each orbit."""
    shared: NDArray[np.bool_]
    """Whether translations leave the links of an orbit in place: several groups use such a link, so that one group
    cannot stand for all."""


def link_orbits(cluster: Cluster, sizes: tuple[int, ...], *, local: int = 1) -> LinkOrbits:
    """The orbits of links under translations of the torus `sizes` of groups of `local` devices each.

    Args:
        cluster: The cluster; device l of the group at point t is number ``l + local * t``.
        sizes: The sides of the torus, the fastest varying first.
        local: The number of devices in a group.

    Returns:
        The orbits.

    Raises:
        InvalidInput: The cluster is not symmetric, or has another number of devices.

    >>> found = link_orbits(Cluster.preset("ring", nodes=4), (4,))
    >>> len(found.first), np.bincount(found.orbit).tolist(), found.shared.tolist()
    (2, [4, 4], [False, False])
    """
    copies = prod(sizes)
    if local * copies != cluster.num_devices:
        ranks, devices = local * copies, cluster.num_devices
        raise InvalidInput(f"symmetry: {ranks} ranks do not fill the {devices} devices of {cluster.name}")
    kind = _classes(cluster)
    key = _end_keys(cluster, np.arange(cluster.num_nodes), kind)
    sorted_by = np.argsort(key, kind="stable")
    orbit = np.arange(cluster.num_links, dtype=np.int64)
    stride = local
    for size in sizes:
        if size > 1:
            device = np.arange(cluster.num_devices, dtype=np.int64)
            step = np.where(device // stride % size == size - 1, (1 - size) * stride, stride)
            there = _end_keys(cluster, _move_nodes(cluster, device + step, kind), kind)
            after = np.argsort(there, kind="stable")
            if not np.array_equal(key[sorted_by], there[after]):
                raise _not_symmetric(cluster)
            moved = np.empty(cluster.num_links, np.int64)
            moved[after] = sorted_by
            for _ in range((size - 1).bit_length()):  # each pass lets the least number of an orbit go twice as far
                orbit = np.minimum(orbit, orbit[moved])
                moved = moved[moved]
        stride *= size
    first, number, count = np.unique(orbit, return_inverse=True, return_counts=True)
    return LinkOrbits(orbit=number.astype(np.int64), first=first, shared=count != copies)


def host_group(cluster: Cluster) -> int:
    """The number of devices on each host, where hosts have equally many, numbered one host after the other; else 0."""
    host = cluster.node_host[: cluster.num_devices]
    hosts = len(np.unique(host))
    each = cluster.num_devices // hosts
    regular = hosts > 1 and host.min() >= 0 and cluster.num_devices % hosts == 0
    return each if regular and np.all(host.reshape(hosts, each) == host.reshape(hosts, each)[:, :1]) else 0


def translations(cluster: Cluster) -> list[tuple[int, tuple[int, ...]]]:
    """The symmetries that a cluster suggests, not checked: the devices of a group, and the torus of groups."""
    found: list[tuple[int, tuple[int, ...]]] = []
    if cluster.dimensions:
        found.append((1, tuple(dimension.size for dimension in cluster.dimensions)))
    local = host_group(cluster)
    if local:
        found.append((local, (cluster.num_devices // local,)))
    return found


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
    """The image of each node when device d moves to ``device[d]``; switches and NICs follow their neighbours.

    Nodes next to nodes with a known image are identified by the known nodes and link classes around them, as sums of
    scrambled numbers; that these are links of the same classes is checked afterwards (`_end_keys`). Nodes that look
    alike, such as the spines of a fabric, are exchanged in the order of their numbers.
    """
    nodes = cluster.num_nodes
    moved = np.full(nodes, -1, np.int64)
    moved[: len(device)] = device
    while not (known := moved >= 0).all():
        was, now = np.zeros(nodes, np.uint64), np.zeros(nodes, np.uint64)
        near = np.zeros(nodes, np.bool_)
        for outward, ends, others in (
            (0, cluster.link_src, cluster.link_dst),
            (1, cluster.link_dst, cluster.link_src),
        ):
            link = np.flatnonzero(known[others] & ~known[ends])
            what = 2 * kind[link] + outward
            np.add.at(was, ends[link], _scrambled(others[link], what))
            np.add.at(now, ends[link], _scrambled(moved[others[link]], what))
            near[ends[link]] = True
        found = np.flatnonzero(near)
        before, after = (found[np.argsort(side[found], kind="stable")] for side in (was, now))
        if not len(found) or not np.array_equal(was[before], now[after]):
            raise _not_symmetric(cluster)
        moved[after] = before
    return moved


def _scrambled(node: NDArray[np.integer], what: Ints) -> NDArray[np.uint64]:
    """A number for each node and class of link, such that sums of different sets of them differ."""
    mixed: NDArray[np.uint64] = node.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + what.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _end_keys(cluster: Cluster, node: Ints, kind: Ints) -> Ints:
    """A number for each link's ends, which move to `node`, and its class; links with equal numbers are parallel."""
    keys: Ints = (node[cluster.link_src] * cluster.num_nodes + node[cluster.link_dst]) * (int(kind.max(initial=0)) + 1)
    return keys + kind


def _not_symmetric(cluster: Cluster) -> InvalidInput:
    return InvalidInput(
        f"symmetry: {cluster.name} does not look the same from every device; simulate the expanded program"
    )
