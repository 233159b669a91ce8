# SPDX-License-Identifier: Apache-2.0
"""The shape of a cluster as pictures and tables show it: groups of equal hosts, link classes, levels, coordinates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..units import counted
from .grid import lines
from .model import DEVICE, NO_CAP, Cluster

MAX_HOSTS_COMPARED = 4096


@dataclass(frozen=True, kw_only=True)
class LinkClass:
    """A class of links with the same channel, rate and flow cap; `alphas_us` are their distinct latencies, rising."""

    channel: str
    gb_per_s: float
    flow_gb_per_s: float
    alphas_us: tuple[float, ...]
    count: int

    @property
    def rate(self) -> str:
        """The rate of one link with its unit, as text."""
        return f"{self.gb_per_s:.4g} GB/s"

    @property
    def latency(self) -> str:
        """The latency as text; where it is paid in one direction only, the text says so."""
        low, high = self.alphas_us[0], self.alphas_us[-1]
        if low == high:
            return f"{high:.4g} us"
        up_only = low == 0 and len(self.alphas_us) == 2
        return f"{high:.4g} us up, 0 down" if up_only else f"{low:.4g} to {high:.4g} us"

    @property
    def label(self) -> str:
        """Channel, rate and latency in one phrase."""
        return f"{self.channel} {self.rate}, {self.latency}"


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """A group of hosts that look the same; `nodes` are those of the first host, which stands for all."""

    hosts: tuple[int, ...]
    nodes: tuple[int, ...]


@lru_cache(maxsize=8)
def link_classes(cluster: Cluster) -> tuple[list[LinkClass], NDArray[np.int64]]:
    """The link classes of a cluster in the order of their first link, and the class of every link."""
    keys = np.stack([cluster.link_channel, cluster.link_gb_per_s, cluster.link_flow_gb_per_s], 1)
    found, first, where = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    of_link = rank[where.ravel()]
    classes = [
        LinkClass(
            channel=cluster.channels[int(found[at, 0])],
            gb_per_s=float(found[at, 1]),
            flow_gb_per_s=float(found[at, 2]),
            alphas_us=tuple(np.unique(cluster.link_alpha_us[of_link == new]).tolist()),
            count=int(np.count_nonzero(of_link == new)),
        )
        for new, at in enumerate(order.tolist())
    ]
    return classes, of_link


def host_groups(cluster: Cluster) -> list[HostGroup]:
    """Group the hosts that have equal parts, equal links inside and equal links to the outside."""
    members: dict[int, list[int]] = defaultdict(list)
    for node, host in enumerate(cluster.node_host.tolist()):
        if host >= 0:
            members[host].append(node)
    place = {node: at for nodes in members.values() for at, node in enumerate(nodes)}
    if len(members) > MAX_HOSTS_COMPARED:
        return [HostGroup(hosts=tuple(sorted(members)), nodes=tuple(members[min(members)]))]
    _, of_link = link_classes(cluster)
    facts: dict[int, list[tuple[object, ...]]] = {host: [] for host in members}
    hosts = cluster.node_host.tolist()
    ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), of_link.tolist(), strict=True)
    for src, dst, kind in ends:
        a, b = hosts[src], hosts[dst]
        if a == b and a >= 0:
            facts[a].append(("in", place[src], place[dst], kind))
            continue
        for here, there, node, way in ((a, b, src, "out"), (b, a, dst, "back")):
            if here >= 0:
                other = dst if node == src else src
                facts[here].append((way, place[node], kind, place[other] if there >= 0 else -1 - other))
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for host in sorted(members):
        kinds = tuple(cluster.node_kind[members[host]].tolist())
        groups[kinds, tuple(sorted(facts[host], key=repr))].append(host)
    return [HostGroup(hosts=tuple(same), nodes=tuple(members[same[0]])) for same in groups.values()]


def levels(cluster: Cluster, nodes: Sequence[int]) -> dict[int, int]:
    """The level of each of these nodes: 0 for devices, 1 for nodes linked with a device, and so on."""
    inside = set(nodes)
    near: dict[int, set[int]] = defaultdict(set)
    for src, dst in zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True):
        if src in inside and dst in inside:
            near[src].add(dst)
            near[dst].add(src)
    level = {node: 0 for node in nodes if cluster.node_kind[node] == DEVICE}
    frontier, depth = list(level), 0
    while frontier:
        depth += 1
        frontier = sorted({other for node in frontier for other in near[node]} - level.keys())
        level.update(dict.fromkeys(frontier, depth))
    return {node: level.get(node, depth) for node in nodes}


def coordinates(cluster: Cluster) -> NDArray[np.int64] | None:
    """The grid position of every device, one row each, or None; a mesh is recognised by its channels ``dimK``."""
    count = cluster.num_devices
    if cluster.dimensions:
        sizes = [d.size for d in cluster.dimensions]
        found = np.zeros((count, len(sizes)), np.int64)
        for axis in range(len(sizes)):
            rows = lines(sizes, axis)
            found[rows, axis] = np.arange(sizes[axis])
        return found
    names = [f"dim{k}" for k in range(len(cluster.channels))]
    if not names or list(cluster.channels) != names or cluster.num_nodes != count:
        return None
    found = np.zeros((count, len(names)), np.int64)
    for axis in range(len(names)):
        near: dict[int, list[int]] = defaultdict(list)
        pick = cluster.link_channel == axis
        for a, b in zip(cluster.link_src[pick].tolist(), cluster.link_dst[pick].tolist(), strict=True):
            near[a].append(b)
        seen: set[int] = set()
        for start in range(count):
            if start in seen:
                continue
            frontier, far = [start], 0
            while frontier:
                seen.update(frontier)
                found[frontier, axis] = far
                frontier = sorted({b for a in frontier for b in near[a]} - seen)
                far += 1
    return found if len({tuple(row) for row in found.tolist()}) == count else None


def size_of(cluster: Cluster) -> str:
    """The size of a cluster (devices, hosts, grid, links) in one phrase."""
    grid = "x".join(str(d.size) for d in cluster.dimensions) if len(cluster.dimensions) > 1 else ""
    hosts = ""
    if cluster.num_hosts < cluster.num_devices:
        hosts = f" on {cluster.num_hosts} host{'s' if cluster.num_hosts > 1 else ''}"
    return f"{cluster.num_devices} devices{hosts}{f', {grid}' if grid else ''}, {counted(cluster.num_links, 'link')}"


def local_name(cluster: Cluster, node: int) -> str:
    """A node's name without the ``hN.`` of its host."""
    return re.sub(r"^h\d+\.", "", cluster.node_names[node])


def ranges(names: Iterable[str]) -> str:
    """Names with runs of numbers drawn together.

    >>> ranges(["gpu0", "gpu1", "gpu2", "nic4", "cpu0", "cpu1"])
    'gpu0..2 nic4 cpu0 cpu1'
    """
    runs: list[tuple[str, int, int]] = []
    out: list[str] = []

    def flush() -> None:
        for stem, first, last in runs:
            if last - first > 1:
                out.append(f"{stem}{first}..{last}")
            else:
                out.extend(f"{stem}{i}" for i in range(first, last + 1))
        runs.clear()

    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9][0-9]{0,8})", name)
        if match is None:
            flush()
            out.append(name)
            continue
        number = int(match[2])
        if runs and runs[-1][0] == match[1] and runs[-1][2] + 1 == number:
            runs[-1] = (match[1], runs[-1][1], number)
        else:
            flush()
            runs.append((match[1], number, number))
    flush()
    return " ".join(out)


def capped(kind: LinkClass) -> str:
    """The text that a flow cap adds to a class's label; empty where there is no cap."""
    return "" if kind.flow_gb_per_s == NO_CAP else f", {kind.flow_gb_per_s:.4g} GB/s per flow"
