# SPDX-License-Identifier: Apache-2.0
"""Which known cluster a probed one is, under which numbering of ranks, and whether another order of ranks is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...algorithms import algorithm
from ...cluster import Cluster
from ...cluster.numbering import TOLERANCE, placed
from ...cluster.presets import preset, presets
from ...errors import StrettoError
from ...simulator import simulate
from ...units import MB

RING_BYTES = 16 * MB
MAX_RANKS = 256
"""Larger jobs are not compared with presets: the search is over orders of ranks."""

Rates = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Match:
    """`order[i]` is the rank that stands where the known cluster has its device i; `error` is the worst rate's."""

    name: str
    order: tuple[int, ...]
    error: float


def pair_rates(cluster: Cluster) -> Rates:
    """What one transfer between each two devices gets, in GB/s."""
    count = cluster.num_devices
    a, b = (x.astype(np.int32) for x in np.nonzero(~np.eye(count, dtype=bool)))
    ptr, links = cluster.route_table(a, b, np.zeros(len(a), np.int64))
    rate = np.minimum(cluster.link_gb_per_s, cluster.link_flow_gb_per_s)
    found = np.zeros((count, count))
    found[a, b] = np.minimum.reduceat(rate[links], ptr[:-1]) if len(a) else 0.0
    return found


def match(cluster: Cluster, known: Cluster, tolerance: float = TOLERANCE) -> Match | None:
    """The numbering under which every two ranks have the rate that the known cluster gives them; None: there is none.

    Of several numberings (the known cluster's automorphisms) the one that moves the first ranks least is taken.

    >>> from stretto.runtime.probe.match import match
    >>> pair = Cluster.preset("dgx2", nodes=2)
    >>> match(pair, pair).order == tuple(range(32))
    True

    Args:
        cluster: The cluster that was probed.
        known: The cluster to compare with.
        tolerance: By which share rates may differ.

    Returns:
        The numbering, or None.
    """
    count = cluster.num_devices
    if known.num_devices != count or known.num_hosts != cluster.num_hosts or count > MAX_RANKS:
        return None
    mine, theirs = pair_rates(cluster), pair_rates(known)
    near, far = _same_host(cluster), _same_host(known)
    pairs = [(mine, theirs, tolerance), (near.astype(float), far.astype(float), 0.0)]
    order = placed(pairs, prefer=range(count))
    if order is None:
        return None
    there = mine[np.ix_(order, order)]
    off = ~np.eye(count, dtype=bool)
    error = float(np.max(np.abs(there[off] / theirs[off] - 1), initial=0.0))
    return Match(name=known.name, order=order, error=error)


def match_presets(cluster: Cluster) -> Match | None:
    """The preset that a cluster is nearest to, if it is one."""
    found: list[Match] = []
    for info in presets():
        # Nodes are hosts, or in regular networks devices, which are then hosts of their own.
        try:
            known = preset(info.name, nodes=cluster.num_hosts)
        except StrettoError:
            continue
        one = match(cluster, known)
        if one is not None:
            found.append(one)
    return min(found, key=lambda one: one.error, default=None)


def host_order(hosts: Sequence[int], ports: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Ranks of a host beside each other, and on it those that share an uplink; `hosts[rank]` is a rank's host.

    >>> host_order([0, 1, 0, 1])
    (0, 2, 1, 3)
    >>> host_order([0, 0, 0, 0], ports=[[0, 2], [1, 3]])
    (0, 2, 1, 3)
    """
    group = {rank: min(port) for port in ports for rank in port}
    first = {host: at for at, host in reversed(list(enumerate(hosts)))}
    return tuple(sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], group.get(rank, 0), rank)))


def ring_us(cluster: Cluster, order: Sequence[int], nbytes: float = RING_BYTES) -> float:
    """What a ring all-reduce in this order of ranks is predicted to take.

    Args:
        cluster: The cluster.
        order: The ranks in the order of the ring.
        nbytes: The size of the all-reduce.

    Returns:
        Microseconds.
    """
    program = algorithm("ring", "all_reduce", tuple(order))
    return simulate(program, cluster, nbytes=nbytes).total_us


def _same_host(cluster: Cluster) -> NDArray[np.bool_]:
    host = cluster.node_host[: cluster.num_devices].astype(np.int64)
    alone = np.where(host < 0, -1 - np.arange(len(host)), host)
    same: NDArray[np.bool_] = alone[:, None] == alone[None, :]
    return same
