# SPDX-License-Identifier: Apache-2.0
"""Sketches that a cluster's own structure suggests: its symmetries, shared NICs, node boundaries and switches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..cluster.model import DEVICE
from ..programs.ir import take_rows

if TYPE_CHECKING:
    from .hops import Hops
    from .problem import SynthesisProblem
    from .sketch import Sketch

MAX_DEVICES = 256
LATENCY_BYTES = 64_000
"""The bytes per rank below which more chunks only add messages."""


def sketch_variants(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    """The sketches to try for a problem, with labels: the user's sketch, or those that the cluster suggests."""
    if problem.sketch is not None:
        return [("", {})]
    limit = 6 if problem.ranks <= 16 else 3
    split = problem.nbytes / problem.ranks > LATENCY_BYTES
    return [(sketch.name, {"sketch": sketch}) for sketch in islice(sketches(problem.cluster, split=split), limit)]


def sketches(cluster: Cluster, *, split: bool = True) -> Iterator[Sketch]:
    """Candidate sketches for a cluster, the most promising first, without repetitions.

    >>> [sketch.name for sketch in sketches(Cluster.load("ndv2:2"))][:3]
    ['auto', 'auto,chunks=2', 'auto,chunks=4']
    """
    from dataclasses import replace

    seen: list[Sketch] = []
    for sketch in _candidates(cluster, split):
        plain = replace(sketch, name="")
        if plain not in seen:
            seen.append(plain)
            yield sketch


def _candidates(cluster: Cluster, split: bool) -> Iterator[Sketch]:
    from .logical import default_sketch
    from .sketch import Hyperedge, Sketch

    auto = default_sketch(cluster)
    hosts, size = _hosts(cluster)
    yield auto
    turns = smallest(rotations(cluster))
    # A rotation merges variables; the smaller model is more likely to find the routing that a switch policy needs.
    turned = auto.vary(symmetry_offsets=turns) if turns else auto
    if turned != auto:
        label = "+".join(f"{offset}/{group}" for offset, group in turns)
        yield turned.vary(name=f"auto,rotate={label}")
    for chunks in (2, 4) if split else ():
        yield auto.vary(name=f"auto,chunks={chunks}", input_chunkup=chunks)
    joined = _switched(cluster, hosts)
    if joined:
        for strategy in ("uc-min", "uc-max"):
            edges = (Hyperedge(gpus=joined, strategy=strategy),)
            yield turned.vary(name=f"auto,{strategy}", switches=edges)
    if hosts > 1:
        # Let every GPU cross between hosts, or only to the GPU of its own number; relays of a shared NIC forbid both.
        yield auto.vary(name="direct", internode_conn="direct-map")
        yield auto.vary(name="full", internode_conn="fully-connected")
        for count in (2, 4):
            if size and count < size:
                yield auto.vary(name=f"conn={count}").with_connections(count, size)
    yield Sketch(name="free", channels="all")


def rotations(cluster: Cluster) -> list[tuple[int, int]]:
    """Rotations (offset, group) of every group of devices by the offset that map all direct hops to equal hops.

    >>> rotations(Cluster.preset("ring", nodes=6)), rotations(Cluster.load("ndv2:2"))
    ([(1, 6), (2, 6), (3, 6)], [(8, 16)])
    """
    from .hops import Hops

    n = cluster.num_devices
    if not 2 <= n <= MAX_DEVICES:
        return []
    hosts, size = _hosts(cluster)
    groups = [n] if hosts == 1 or not size else [n, size]
    hops = Hops.of(cluster)
    number = np.full((n, n), -1, np.int64)
    number[hops.src, hops.dst] = np.arange(hops.num_hops)
    found = []
    for group in groups:
        for offset in (o for o in range(1, group // 2 + 1) if group % o == 0):
            device = np.arange(n)
            moved = device // group * group + (device % group + offset) % group
            if _maps(hops, number[moved[hops.src], moved[hops.dst]]):
                found.append((offset, group))
    return found


def smallest(turns: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The smallest offset for each group: it merges most variables of a search.

    >>> smallest([(2, 16), (4, 16), (16, 32)])
    ((2, 16), (16, 32))
    """
    least: dict[int, int] = {}
    for offset, group in turns:
        least[group] = min(offset, least.get(group, group))
    return tuple((offset, group) for group, offset in sorted(least.items()))


def _maps(hops: Hops, image: NDArray[np.int64]) -> bool:
    """Whether each hop maps to an equally long and fast hop, and hops that share a link to hops that share a link."""
    if (image < 0).any():
        return False
    lengths = np.diff(hops.link_ptr)
    like = [lengths, np.round(hops.alpha_us, 9), np.round(hops.gb_per_s, 9)]
    if any(not np.array_equal(column, column[image]) for column in like):
        return False
    links = take_rows(hops.link_ptr, hops.link, image)[1]
    pairs = np.unique(hops.link.astype(np.int64) * hops.cluster.num_links + links)
    return len(pairs) == len(np.unique(hops.link)) == len(np.unique(links))


def _hosts(cluster: Cluster) -> tuple[int, int]:
    """The number of hosts, and the devices of each (0 where the numbers differ or devices are not host by host)."""
    host = cluster.node_host[: cluster.num_devices]
    if (host < 0).any():
        return cluster.num_hosts, 0
    counts = np.bincount(np.unique(host, return_inverse=True)[1])
    size = int(counts[0]) if len(set(counts.tolist())) == 1 else 0
    in_order = bool(np.all(np.diff(host) >= 0))
    return len(counts), size if in_order else 0


def _switched(cluster: Cluster, hosts: int) -> tuple[int, ...]:
    """The devices of the first host if one switch joins them all, else an empty tuple."""
    host = cluster.node_host[: cluster.num_devices]
    first = np.flatnonzero(host == host.min(initial=0)) if hosts else np.zeros(0, np.int64)
    if len(first) < 3:
        return ()
    for switch in np.flatnonzero(cluster.node_kind != DEVICE).tolist():
        into = set(cluster.link_src[cluster.link_dst == switch].tolist())
        if set(first.tolist()) <= into:
            return tuple(range(len(first)))
    return ()
