# SPDX-License-Identifier: Apache-2.0
"""Suggestions from a cluster: an order of the ranks along its fastest links, and the grid of hosts and local ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .base import near_square

if TYPE_CHECKING:
    from ..cluster import Cluster

MAX_SEARCHED = 128
"""With more ranks than this no order is searched for: the ranks' own order is kept."""
BUDGET = 20_000
"""The number of partial orders that are tried with links of one speed before slower links are allowed."""


def fast_orders(cluster: Cluster, devices: tuple[int, ...], *, rings: int = 1) -> list[list[int]] | None:
    """Orders of the ranks along direct links between devices, the slowest link being as fast as possible.

    An order is one closed ring over all ranks if there is one, else a line inside each host, host after host. Every
    further ring counts a link that is in use as that much slower, and leaves each host from another device, so that all
    NICs have work.

    Args:
        cluster: The cluster.
        devices: The device of each rank.
        rings: How many orders to find, >= 1.

    Returns:
        Each order as a list of ranks; None where the ranks' own order is to be kept.
    """
    count = len(devices)
    if not 3 <= count <= MAX_SEARCHED:
        return None
    speed = direct_speed(cluster, devices)
    if rings > 1 and not speed.any():
        return rail_orders(cluster, devices, rings)
    uses = np.zeros_like(speed)
    orders: list[list[int]] = []
    for at in range(rings):
        share = speed / (uses + 1)
        order = _fastest(share, closed=True) or _host_by_host(cluster, devices, share, turn=at / rings)
        uses[order, np.roll(order, -1)] += 1
        orders.append(order)
    return None if rings == 1 and orders[0] == list(range(count)) else orders


def direct_speed(cluster: Cluster, devices: tuple[int, ...]) -> NDArray[np.float64]:
    """GB/s of the direct links from rank to rank (parallel links together); 0 where there is none."""
    src, dst, gb_per_s = _direct_links(cluster, devices)
    speed = np.zeros((len(devices), len(devices)))
    np.add.at(speed, (src, dst), gb_per_s)
    return speed


def has_direct_links(cluster: Cluster, devices: tuple[int, ...]) -> bool:
    """Whether any two of the ranks' devices have a link between them."""
    return len(_direct_links(cluster, devices)[0]) > 0


def _direct_links(
    cluster: Cluster, devices: tuple[int, ...]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    rank_of = np.full(cluster.num_nodes, -1)
    rank_of[list(devices)] = np.arange(len(devices))
    src, dst = rank_of[cluster.link_src], rank_of[cluster.link_dst]
    both = (src >= 0) & (dst >= 0)
    return src[both], dst[both], cluster.link_gb_per_s[both]


def host_grid(cluster: Cluster, devices: tuple[int, ...]) -> tuple[int, list[int] | None] | None:
    """(ranks per host, the ranks host by host), or None where hosts are not alike or there is only one.

    The order is None where the ranks already come host by host.
    """
    groups = _by_host(cluster, devices)
    sizes = {len(group) for group in groups}
    if len(groups) < 2 or len(sizes) != 1 or sizes == {1}:
        return None
    order = [rank for group in groups for rank in group]
    return sizes.pop(), None if order == list(range(len(devices))) else order


def local_count(name: str, count: int, local: int | None) -> int:
    """The number of ranks per host: `local` once it is checked, or a near-square cut.

    Args:
        name: The algorithm, for the message.
        count: How many ranks there are.
        local: The number that the user gave, or None.

    Returns:
        How many ranks share a host; it divides `count`.

    Raises:
        InvalidInput: `local` does not divide `count`, or it is not given and `count` has no two factors > 1.
    """
    if local is None:
        refused = composite_refusal(name, count)
        if refused:
            raise InvalidInput(f"ranks: {refused}")
        return count // near_square(count)
    if local < 1 or count % local:
        raise InvalidInput(f"local: {count} ranks cannot be cut into hosts of {local}")
    return local


def composite_refusal(name: str, count: int) -> str | None:
    """The reason to refuse a rank count that is not a product of two factors > 1, or None where it is."""
    if near_square(count) == 1:
        return f"{name} needs ranks = local x hosts, both > 1, but {count} has no such factors"
    return None


def host_lines(cluster: Cluster, devices: tuple[int, ...], rings: int) -> tuple[list[int], list[list[int]]]:
    """The ranks host by host, once for each ring: a line inside each host, which begins at another device each time.

    Args:
        cluster: The cluster.
        devices: The device of each rank.
        rings: How many orders to make, >= 1.

    Returns:
        How many ranks each host has, and the orders.
    """
    share = direct_speed(cluster, devices)
    orders = [_host_by_host(cluster, devices, share, turn=at / rings) for at in range(rings)]
    return [len(group) for group in _by_host(cluster, devices)], orders


def rail_orders(cluster: Cluster, devices: tuple[int, ...], rings: int) -> list[list[int]]:
    """The ranks host by host, once for each ring, such that a ring enters a host on the rail on which it left the last.

    Every ring enters and leaves every host at other devices, and each device near a NIC serves one ring each way. The
    order of the devices between these two is free: they hang on a switch. (NCCL lays rings out so with
    ``NCCL_CROSS_NIC=2``, its default, where that is faster.)

    Args:
        cluster: The cluster; there are no direct links between devices of a host.
        devices: The device of each rank.
        rings: How many orders to make, >= 1.

    Returns:
        The orders.
    """
    groups = _by_host(cluster, devices)
    # Neighbors in the circle of hosts have different offsets: 0, 1, 0, 1, ..., and 2 at the end of an odd circle.
    offsets = [host % 2 for host in range(len(groups))]
    if len(groups) % 2:
        offsets[-1] = 2 if len(groups) > 1 else 0
    orders = []
    for at in range(rings):
        order: list[int] = []
        for host, group in enumerate(groups):
            following = offsets[(host + 1) % len(groups)]
            first, last = (
                int((at + offset) / rings * len(group)) % len(group) for offset in (offsets[host], following)
            )
            turned = group[first:] + group[:first]
            if first != last:
                turned.remove(group[last])
                turned.append(group[last])
            order += turned
        orders.append(order)
    return orders


def rails(cluster: Cluster, devices: Sequence[int]) -> int:
    """The number of rings or chains to run side by side: one per link out of a host, as many as a device can feed.

    >>> from ..cluster import Cluster
    >>> hgx2 = Cluster.preset("hgx2", nodes=2)
    >>> rails(hgx2, range(16)), rails(hgx2, range(8)), rails(hgx2, (0, 8))
    (8, 1, 1)
    """
    host = cluster.hosts_of(devices)
    nodes = np.asarray(devices, np.int32)
    mates, others = nodes[host == host[0]], nodes[host != host[0]]
    if len(mates) < 2 or not len(others):
        return 1
    try:
        _, inside = cluster.route_table(mates[:1], mates[1:2], np.zeros(1, np.int64))
        dst = np.resize(others, len(mates))
        _, across = cluster.route_table(mates, dst, mates.astype(np.int64) + dst)
    except InvalidInput:
        return 1
    leaving = (cluster.node_host[cluster.link_src[across]] == host[0]) & (
        cluster.node_host[cluster.link_dst[across]] != host[0]
    )
    exits = np.unique(across[leaving])
    if not len(exits):
        return 1
    fed = cluster.link_gb_per_s[inside].min() / cluster.link_gb_per_s[exits].max()
    return max(1, min(len(exits), int(fed)))


def _by_host(cluster: Cluster, devices: tuple[int, ...]) -> list[list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, device in enumerate(devices):
        host = int(cluster.node_host[device])
        groups.setdefault((host, -1) if host >= 0 else (-1, device), []).append(rank)
    return list(groups.values())


def _host_by_host(cluster: Cluster, devices: tuple[int, ...], share: NDArray[np.float64], turn: float) -> list[int]:
    order: list[int] = []
    for group in _by_host(cluster, devices):
        inner = share[np.ix_(group, group)]
        line = None if inner.any() else list(range(len(group)))
        closed = line or _fastest(inner, closed=True)
        if closed:
            first = int(turn * len(closed))
            line = closed[first:] + closed[:first]
        else:
            line = _fastest(inner, closed=False) or list(range(len(group)))
        order += [group[i] for i in line]
    return order


def _fastest(speed: NDArray[np.float64], *, closed: bool) -> list[int] | None:
    """A Hamiltonian cycle (or path) whose slowest link is as fast as the search can make it."""
    count = len(speed)
    if count < 3:
        return None
    natural = list(range(count))
    for least in np.unique(speed[speed > 0])[::-1].tolist():
        linked = speed >= least
        if np.all(linked[natural[:-1], natural[1:]]) and (not closed or linked[-1, 0]):
            return natural
        if closed and not (_reaches_all(linked) and _reaches_all(linked.T)):
            continue
        starts = 1 if closed else count
        for start in range(starts):
            found = _hamiltonian(linked, start, closed, BUDGET // starts)
            if found is not None:
                return found
    return None


def _reaches_all(linked: NDArray[np.bool_]) -> bool:
    seen = np.zeros(len(linked), np.bool_)
    front = [0]
    while front:
        seen[front] = True
        front = np.flatnonzero(linked[front].any(axis=0) & ~seen).tolist()
    return bool(seen.all())


def _hamiltonian(linked: NDArray[np.bool_], start: int, closed: bool, budget: int) -> list[int] | None:
    """A Hamiltonian path or cycle by depth-first search, or None; it gives up after `budget` extensions."""
    count = len(linked)
    free = np.ones(count, np.bool_)
    free[start] = False
    path = [start]

    def ways(node: int) -> list[int]:
        following = np.flatnonzero(linked[node] & free)
        onward = np.count_nonzero(linked[following][:, free], axis=1)
        return [int(way) for way in following[np.lexsort((following, onward))][::-1]]

    open_ways = [ways(start)]
    for _ in range(budget):
        if len(path) == count and (not closed or linked[path[-1], start]):
            return path
        while open_ways and not open_ways[-1]:
            open_ways.pop()
            free[path.pop()] = True
        if not open_ways:
            return None
        node = open_ways[-1].pop()
        path.append(node)
        free[node] = False
        open_ways.append(ways(node))
    return None
