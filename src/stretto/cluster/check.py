# SPDX-License-Identifier: Apache-2.0
"""Findings about a cluster that is valid but unconnected or unusual."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np

from ..errors import InvalidInput
from .model import DEVICE, Cluster
from .shape import host_groups, ranges

MAX_EXAMPLES = 3


def require_reachable(cluster: Cluster) -> None:
    """Refuse a cluster in which some device cannot reach another, not even if those between pass data on.

    >>> require_reachable(Cluster.preset("dgx2", nodes=2))
    """
    pair = replace(cluster, devices_forward=True).unreachable()
    if pair is not None:
        a, b = (cluster.node_names[node] for node in pair)
        raise InvalidInput(f"links: no route from {a} to {b}")


def oddities(cluster: Cluster) -> list[str]:
    """One sentence for each unusual fact that a person would want to know before trusting the cluster.

    >>> oddities(Cluster.preset("ndv2_teccl", nodes=2))
    ['2 links have no link back: h0.gpu0>h1.gpu1, h1.gpu0>h0.gpu1']
    """
    return [
        *_one_sided(cluster), *_parallel(cluster), *_dead_ends(cluster), *_unlike(cluster), *_relayed(cluster)
    ]  # fmt: skip


def _relayed(cluster: Cluster) -> list[str]:
    """Whether some devices reach each other only through programs that pass data on (which `synth` makes)."""
    pair = None if cluster.devices_forward else cluster.unreachable()
    if pair is None or replace(cluster, devices_forward=True).unreachable() is not None:
        return []
    a, b = (cluster.node_names[node] for node in pair)
    return [f"no route from {a} to {b} but through devices, which do not forward (devices_forward is false)"]


def channel_groups(cluster: Cluster) -> dict[str, list[int]]:
    """For each channel the sizes of the groups of devices that its links alone connect, largest first."""
    result: dict[str, list[int]] = {}
    for at, channel in enumerate(cluster.channels):
        pick = cluster.link_channel == at
        root = np.arange(cluster.num_nodes)
        src, dst = cluster.link_src[pick], cluster.link_dst[pick]
        while True:
            # Each round pulls both ends of every link to the lower label, then shortens the chains.
            low = np.minimum(root[src], root[dst])
            new = root.copy()
            np.minimum.at(new, src, low)
            np.minimum.at(new, dst, low)
            np.minimum.at(new, root[src], low)
            np.minimum.at(new, root[dst], low)
            new = new[new]
            if np.array_equal(new, root):
                break
            root = new
        counts = Counter(root[: cluster.num_devices].tolist())
        result[channel] = sorted(counts.values(), reverse=True)
    return result


def _one_sided(cluster: Cluster) -> list[str]:
    rate: dict[tuple[int, int], float] = defaultdict(float)
    ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)
    for pair, each in zip(ends, cluster.link_gb_per_s.tolist(), strict=True):
        rate[pair] += each
    alone = [pair for pair in rate if (pair[1], pair[0]) not in rate]
    unequal = [p for p in rate if p[0] < p[1] and rate.get((p[1], p[0]), rate[p]) != rate[p]]
    found = []
    if alone:
        found.append(f"{len(alone)} links have no link back: {_some(cluster, alone)}")
    if unequal:
        found.append(f"{len(unequal)} pairs have another rate each way: {_some(cluster, unequal)}")
    return found


def _parallel(cluster: Cluster) -> list[str]:
    ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), cluster.link_channel.tolist(), strict=True)
    twice = [(a, b) for (a, b, _), count in Counter(ends).items() if count > 1]
    return [f"{len(twice)} pairs have parallel links of one channel: {_some(cluster, twice)}"] if twice else []


def _dead_ends(cluster: Cluster) -> list[str]:
    degree = np.zeros(cluster.num_nodes, np.int64)
    pairs = np.unique(np.sort(np.stack([cluster.link_src, cluster.link_dst], 1), axis=1), axis=0)
    np.add.at(degree, pairs.ravel(), 1)
    found = []
    lonely = np.flatnonzero(degree[: cluster.num_devices] == 0) if cluster.num_devices > 1 else np.array([])
    if len(lonely):
        found.append(f"{len(lonely)} devices have no link: {ranges(cluster.node_names[n] for n in lonely[:64])}")
    ends = np.flatnonzero((cluster.node_kind != DEVICE) & (degree <= 1))
    if len(ends):
        names = ranges(cluster.node_names[n] for n in ends[:64])
        found.append(f"{len(ends)} switches or NICs lead nowhere: {names}{' ...' if len(ends) > 64 else ''}")
    return found


def _unlike(cluster: Cluster) -> list[str]:
    groups = host_groups(cluster)
    if len(groups) < 2:
        return []
    hosts = "; ".join(ranges(str(h) for h in group.hosts) for group in groups[:8])
    return [f"hosts are of {len(groups)} kinds: {hosts}{' ...' if len(groups) > 8 else ''}"]


def _some(cluster: Cluster, pairs: list[tuple[int, int]]) -> str:
    names = [f"{cluster.node_names[a]}>{cluster.node_names[b]}" for a, b in pairs[:MAX_EXAMPLES]]
    return ", ".join(names) + (", ..." if len(pairs) > MAX_EXAMPLES else "")
