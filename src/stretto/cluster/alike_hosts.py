# SPDX-License-Identifier: Apache-2.0
"""Hosts of a cluster that can change places: what is computed for groups on some of them holds for all their images.

Two hosts are *alike* if they have the same nodes and links in the same order and hang on the same nodes outside. If the
two are swapped, the cluster is the same cluster. So the devices of a group can be renamed host by host, each host
becoming the first one alike that is not taken, and groups with equal names are images of each other. A host with one
slower link, one more NIC, another switch or a link straight to another host is alike to no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .model import DEVICE, LARGE_MESSAGE, Cluster

Groups = tuple[tuple[int, ...], ...]
MAX_PAIRS = 4096
"""Pairs of devices whose equal routes are counted; a cluster with larger hosts counts as one without symmetry."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Renaming:
    """Groups under the names of the first hosts alike, and which host each of those stands for."""

    groups: Groups
    host: NDArray[np.int64]
    """For every host of the cluster the host that it is renamed from; itself where nothing is renamed."""


class HostSymmetry:
    """The hosts of a cluster in classes of hosts that are alike.

    >>> hosts = HostSymmetry(Cluster.preset("dgx2", nodes=4))
    >>> hosts.renamed(((16, 32), (17, 33))).groups, hosts.renamed(((48, 0), (49, 1))).groups
    (((0, 16), (1, 17)), ((0, 16), (1, 17)))

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        owner = cluster.node_host.astype(np.int64)
        lone = np.flatnonzero((owner < 0) & (cluster.node_kind == DEVICE))
        owner[lone] = owner.max(initial=-1) + 1 + np.arange(len(lone))
        self._owner, count = owner, int(owner.max(initial=-1)) + 1
        src, dst = owner[cluster.link_src], owner[cluster.link_dst]
        between = (src >= 0) & (dst >= 0) & (src != dst)
        self._joined = frozenset(np.concatenate([src[between], dst[between]]).tolist())
        self._link_owner = np.where(between, -1, np.maximum(src, dst))
        self._nodes = _members(owner, count)
        self._links = _members(self._link_owner, count)
        self._local, self._local_link = _positions(self._nodes, len(owner)), _positions(self._links, len(src))
        # Devices are the first nodes of a cluster, and so of every host.
        devices = [nodes[nodes < cluster.num_devices] for nodes in self._nodes]
        self._devices = np.full((count, max(map(len, devices), default=0)), -1, np.int64)
        for row, own in zip(self._devices, devices, strict=True):
            row[: len(own)] = own
        self._follow: dict[frozenset[str], bool] = {}

    @cached_property
    def classes(self) -> tuple[NDArray[np.int64], ...]:
        """The hosts of each class, by number."""
        found: dict[tuple[object, ...], list[int]] = {}
        for host in range(len(self._nodes)):
            found.setdefault(self._signature(host), []).append(host)
        return tuple(np.array(hosts, np.int64) for hosts in found.values())

    @cached_property
    def _class_of(self) -> NDArray[np.int64]:
        number = np.zeros(len(self._nodes), np.int64)
        for at, hosts in enumerate(self.classes):
            number[hosts] = at
        return number

    def _signature(self, host: int) -> tuple[object, ...]:
        if host in self._joined:
            return (host,)
        c, nodes, links = self.cluster, self._nodes[host], self._links[host]
        ends = [
            np.where(self._owner[end] == host, self._local[end], -1 - end)
            for end in (c.link_src[links].astype(np.int64), c.link_dst[links].astype(np.int64))
        ]
        return (
            c.node_kind[nodes].tobytes(), c.node_multicast[nodes].tobytes(), *(end.tobytes() for end in ends),
            c.link_alpha_us[links].tobytes(), c.link_gb_per_s[links].tobytes(), c.link_channel[links].tobytes(),
            c.link_flow_gb_per_s[links].tobytes(), c.link_incast[links].tobytes(),
        )  # fmt: skip

    def renamed(self, groups: Sequence[Sequence[int]], channels: Iterable[str] | None = None) -> Renaming:
        """Rename the hosts of groups; groups that are images of each other get the same names.

        Args:
            groups: the groups of devices.
            channels: the channels that routes between the devices may take; all when not given.

        Returns:
            The renamed groups. Nothing is renamed where an image might take other ones of several equal routes.
        """
        same = Renaming(groups=tuple(map(tuple, groups)), host=np.arange(len(self._nodes)))
        held = frozenset(channels if channels is not None else self.cluster.channels)
        if len(self.classes) == len(self._nodes) or not self._routes_follow(held):
            return same
        flat = np.array([rank for group in groups for rank in group], np.int64)
        hosts, first = np.unique(self._owner[flat], return_index=True)
        hosts = hosts[np.argsort(first)]
        taken = [0] * len(self.classes)
        to, back = np.arange(len(self._nodes)), np.arange(len(self._nodes))
        for host in hosts.tolist():
            kind = int(self._class_of[host])
            to[host] = self.classes[kind][taken[kind]]
            back[to[host]] = host
            taken[kind] += 1
        new = self._moved(flat, to).tolist()
        ends = np.cumsum([0, *map(len, groups)]).tolist()
        return Renaming(groups=tuple(tuple(new[a:b]) for a, b in pairwise(ends)), host=back)

    def links(self, links: NDArray[np.integer], renaming: Renaming) -> NDArray[np.int64]:
        """The links that links between renamed devices stand for."""
        found = links.astype(np.int64)
        owned = np.flatnonzero(self._link_owner[found] >= 0)
        host, local = self._link_owner[found[owned]], self._local_link[found[owned]]
        found[owned] = [self._links[h][at] for h, at in zip(renaming.host[host].tolist(), local.tolist(), strict=True)]
        return found

    def _moved(self, ranks: NDArray[np.int64], to: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._devices[to[self._owner[ranks]], self._local[ranks]]
        return found

    def _routes_follow(self, channels: frozenset[str]) -> bool:
        """Whether equal routes are chosen alike for all images.

        Of several equal routes the sum of both device numbers picks one, modulo their number. That is the same one for
        all images if the numbers of alike hosts differ by multiples of it.
        """
        if channels not in self._follow:
            self._follow[channels] = self._count_routes(channels)
        return self._follow[channels]

    def _count_routes(self, channels: frozenset[str]) -> bool:
        steps = [np.diff(self._devices[hosts, 0]) for hosts in self.classes if len(self._devices[0])]
        step = int(np.gcd.reduce(np.concatenate([np.zeros(1, np.int64), *steps])))
        # Two hosts of a class stand for all pairs of its hosts.
        some = np.concatenate([hosts[:2] for hosts in self.classes])
        devices = [device for device in self._devices[some].ravel().tolist() if device >= 0]
        if len(devices) ** 2 > MAX_PAIRS:
            return False
        return all(
            step % max(len(self.cluster.routes(a, b, nbytes=size, channels=channels, limit=step + 1)), 1) == 0
            for a in devices for b in devices if a != b for size in (0.0, LARGE_MESSAGE)
        )  # fmt: skip


def _members(owner: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """What each owner has, in order; -1 owns nothing."""
    sort = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[sort], np.arange(count + 1))
    return [sort[a:b] for a, b in pairwise(ends)]


def _positions(members: Sequence[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """For each thing its position among those of its owner."""
    found = np.full(count, -1, np.int64)
    for own in members:
        found[own] = np.arange(len(own))
    return found
