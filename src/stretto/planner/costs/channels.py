# SPDX-License-Identifier: Apache-2.0
"""Bindings of a motif: sets of a cluster's channels, with the part inside hosts and the part between hosts apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...errors import Infeasible, unknown

MAX_CHANNELS = 8
"""Largest number of channels of which every subset is tried; with more, only single channels and all together."""
MAX_GROUPS = 16
"""The number of groups whose routes are read to find the channels that groups usually take."""

Scope = Literal["intra", "inter", "mixed"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Channels that a motif may hold: `intra` for traffic inside a host, `inter` for traffic between hosts.

    Either may be empty, for motifs that have no such traffic. `cpu_driven` says that the binding uses links that GPU
    libraries would not take, so that host code moves (and adds) the data.
    """

    name: str
    channels: tuple[str, ...]
    intra: tuple[str, ...] = ()
    inter: tuple[str, ...] = ()
    cpu_driven: bool = False


@lru_cache(maxsize=64)
def bindings(cluster: Cluster) -> tuple[Binding, ...]:
    """Every binding of a cluster: first the one that its own routes take, then those for all, intra and inter traffic.

    An intra fabric is a smallest set of channels whose links inside hosts join the devices of every host; an inter
    fabric is one over which each device reaches every other host. Each pair of them is a binding, and so is each alone.

    >>> [b.name for b in bindings(Cluster.preset("hgx2", nodes=2))]
    ['nvlink+rdma', 'nvlink+pcie+ethernet', 'pcie+rdma', 'pcie+ethernet', 'nvlink', 'pcie', 'rdma']
    >>> [b.name for b in bindings(Cluster.preset("dgx2"))]
    ['nvlink']
    """
    found = [default_binding(cluster)]
    intras, inters = _intra_fabrics(cluster), _inter_fabrics(cluster)
    pairs = [(a, b) for a in intras for b in inters]
    for intra, inter in [*pairs, *((a, ()) for a in intras), *(((), b) for b in inters)]:
        made = _binding(cluster, intra, inter)
        if all(made.channels != other.channels for other in found):
            found.append(made)
    return tuple(found)


@lru_cache(maxsize=64)
def default_binding(cluster: Cluster) -> Binding:
    """The channels that the cluster's own routes take between its devices, which a GPU library would use."""
    return _usual(cluster, (tuple(range(cluster.num_devices)),))


def bindings_for(cluster: Cluster, groups: Sequence[Sequence[int]]) -> tuple[Binding, ...]:
    """The bindings that serve these groups without channels that they do not need; the usual one first.

    Groups inside single hosts hold an intra fabric only, groups with one rank per host an inter fabric only.

    >>> hgx2 = Cluster.preset("hgx2", nodes=2)
    >>> [b.name for b in bindings_for(hgx2, [range(8)])], [b.name for b in bindings_for(hgx2, [(0, 8)])]
    (['nvlink', 'pcie'], ['rdma', 'pcie+ethernet'])
    """
    scope = scope_of(cluster, groups)
    found = {(usual := _usual(cluster, groups)).channels: usual}
    for binding in bindings(cluster):
        intra, inter = binding.intra * (scope != "inter"), binding.inter * (scope != "intra")
        made = _binding(cluster, intra, inter)
        if made.channels not in found and all(connected(cluster, group, made.channels) for group in groups):
            found[made.channels] = made
    return tuple(found.values())


def scope_of(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Scope:
    """``intra`` if groups stay inside hosts, ``inter`` if each has one rank per host, else ``mixed``."""
    hosts = [cluster.hosts_of(group).tolist() for group in groups]
    if all(len(set(each)) == 1 for each in hosts):
        return "intra"
    return "inter" if all(len(set(each)) == len(each) for each in hosts) else "mixed"


def restrict(cluster: Cluster, channels: Iterable[str]) -> Cluster:
    """The same nodes with only the links of these channels; raises `Infeasible` if they join no two devices.

    >>> restrict(Cluster.preset("hgx2", nodes=2), ["nvlink", "rdma"])
    <Cluster hgx2:2[nvlink+rdma]: 16 devices on 2 hosts, 96 links over nvlink, rdma>
    """
    wanted = set(channels)
    for channel in sorted(wanted):
        if channel not in cluster.channels:
            raise unknown("channel", channel, cluster.channels)
    kept = _ordered(cluster, wanted)
    if kept == cluster.channels:
        return cluster
    name = f"{cluster.name}[{'+'.join(kept)}]"
    label = components(cluster, kept)[: cluster.num_devices]
    if cluster.num_devices > 1 and len(np.unique(label)) == cluster.num_devices:
        raise Infeasible(f"channels: {'+'.join(kept) or 'none'} join no two devices of {cluster.name}")
    pick = np.isin(cluster.link_channel, [cluster.channels.index(channel) for channel in kept])
    number = np.array([kept.index(c) if c in kept else -1 for c in cluster.channels], np.int16)
    return replace(
        cluster,
        name=name,
        link_src=cluster.link_src[pick],
        link_dst=cluster.link_dst[pick],
        link_alpha_us=cluster.link_alpha_us[pick],
        link_gb_per_s=cluster.link_gb_per_s[pick],
        link_channel=number[cluster.link_channel[pick]],
        channels=kept,
        link_flow_gb_per_s=cluster.link_flow_gb_per_s[pick],
        link_incast=cluster.link_incast[pick],
        dimensions=(),
    )


def require_connected(cluster: Cluster, groups: Sequence[Sequence[int]], channels: Iterable[str]) -> None:
    """Check that links of these channels join the devices of each group.

    Args:
        cluster: the cluster.
        groups: the groups of ranks.
        channels: names of channels.

    Raises:
        Infeasible: a group is not joined; the text names two of its devices.
    """
    held = _ordered(cluster, set(channels))
    label = components(cluster, held)
    for group in groups:
        apart = next((rank for rank in group if label[rank] != label[group[0]]), None)
        if apart is not None:
            a, b = cluster.node_names[group[0]], cluster.node_names[apart]
            raise Infeasible(f"channels: {'+'.join(held) or 'none'} do not join {a} and {b} of {cluster.name}")


def connected(cluster: Cluster, group: Sequence[int], channels: Iterable[str]) -> bool:
    """Whether links of these channels join the devices of a group, if devices forward.

    Args:
        cluster: the cluster.
        group: the ranks.
        channels: names of channels.

    Returns:
        True if every device reaches every other.
    """
    return len(np.unique(components(cluster, _ordered(cluster, set(channels)))[list(group)])) == 1


def components(cluster: Cluster, channels: Sequence[str], *, inside: bool = False) -> Ints:
    """For each node a number that is equal for all nodes that links of these channels join.

    Args:
        cluster: the cluster.
        channels: names of channels.
        inside: whether only links inside hosts count.

    Returns:
        One number per node.
    """
    pick = np.isin(cluster.link_channel, [cluster.channels.index(channel) for channel in channels])
    if inside:
        ends = cluster.node_host[cluster.link_src], cluster.node_host[cluster.link_dst]
        pick &= (ends[0] == ends[1]) & (ends[0] >= 0)
    src, dst = cluster.link_src[pick], cluster.link_dst[pick]
    label = np.arange(cluster.num_nodes, dtype=np.int64)
    while True:
        # Both ends of every link, and the nodes that they point to, take the lower number; then chains are shortened.
        low = np.minimum(label[src], label[dst])
        new = label.copy()
        for at in (src, dst, label[src], label[dst]):
            np.minimum.at(new, at, low)
        new = new[new]
        if np.array_equal(new, label):
            return label
        label = new


def _binding(cluster: Cluster, intra: Sequence[str], inter: Sequence[str]) -> Binding:
    held = _ordered(cluster, {*intra, *inter})
    usual = set(default_binding(cluster).channels)
    return Binding(
        name="+".join(held), channels=held, intra=tuple(intra), inter=tuple(inter), cpu_driven=not set(held) <= usual
    )


def _usual(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Binding:
    """The channels on the cluster's own routes inside these groups."""
    inside: set[str] = set()
    across: set[str] = set()
    for group in groups[:MAX_GROUPS]:
        host = cluster.hosts_of(group)
        values, counts = np.unique(host, return_counts=True)
        mates = np.flatnonzero(host == values[counts.argmax()])
        src = np.repeat(np.asarray(group)[mates], len(group))
        dst = np.tile(np.asarray(group), len(mates))
        for same, used in ((True, inside), (False, across)):
            pick = (src != dst) & ((np.repeat(host[mates], len(group)) == np.tile(host, len(mates))) == same)
            a, b = src[pick].astype(np.int32), dst[pick].astype(np.int32)
            if len(a):
                _, links = cluster.route_table(a, b, a.astype(np.int64) + b)
                used |= {cluster.channels[at] for at in np.unique(cluster.link_channel[links])}
    held = _ordered(cluster, inside | across)
    return Binding(name="+".join(held), channels=held, intra=_ordered(cluster, inside), inter=_ordered(cluster, across))


def _intra_fabrics(cluster: Cluster) -> list[tuple[str, ...]]:
    host = cluster.hosts_of(range(cluster.num_devices))
    if len(np.unique(host)) == len(host):
        return []

    def joins(label: Ints) -> bool:
        return len(np.unique(np.stack([host, label]), axis=1).T) == len(np.unique(host))

    return _least_sets(cluster, joins, inside=True)


def _inter_fabrics(cluster: Cluster) -> list[tuple[str, ...]]:
    host = cluster.hosts_of(range(cluster.num_devices))
    count = len(np.unique(host))
    if count == 1:
        return []

    def joins(label: Ints) -> bool:
        seen = np.unique(np.stack([label, host]), axis=1)[0]
        reached = dict(zip(*np.unique(seen, return_counts=True), strict=True))
        return all(reached[one] == count for one in label)

    return _least_sets(cluster, joins)


def _least_sets(cluster: Cluster, joins: Callable[[Ints], bool], *, inside: bool = False) -> list[tuple[str, ...]]:
    """Smallest sets of channels that satisfy `joins`: no channel of a set can be left out."""
    channels = cluster.channels
    small = len(channels) <= MAX_CHANNELS
    sizes = range(1, len(channels) + 1) if small else (1, len(channels))
    found: list[tuple[str, ...]] = []
    for size in sizes:
        for some in combinations(channels, size):
            if any(set(other) <= set(some) for other in found):
                continue
            if joins(components(cluster, some, inside=inside)[: cluster.num_devices]):
                found.append(some)
    return found


def _ordered(cluster: Cluster, channels: Iterable[str]) -> tuple[str, ...]:
    wanted = set(channels)
    return tuple(channel for channel in cluster.channels if channel in wanted)
