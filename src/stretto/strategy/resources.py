# SPDX-License-Identifier: Apache-2.0
"""The devices on which a strategy runs, and which of them share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput

MAX_DEVICES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Named devices, one per rank, the host of each, and the rate of each host's uplink (GB/s; empty: all equal).

    Devices in `serving` hold no replica; builders place on them whatever they give to servers.
    """

    devices: tuple[str, ...]
    hosts: tuple[int, ...]
    host_gb_per_s: tuple[float, ...] = ()
    serving: tuple[str, ...] = ()

    @cached_property
    def by_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in the order of their first rank."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @property
    def firsts(self) -> tuple[str, ...]:
        """The first device of each host."""
        return tuple(self.devices[ranks[0]] for ranks in self.by_host)

    @property
    def servers(self) -> tuple[str, ...]:
        """Where builders put parameter servers: the devices that only serve, else the first device of each host."""
        return self.serving or self.firsts

    @property
    def rates(self) -> tuple[float, ...]:
        """The rate of the uplink of each host of `by_host`, relative to the others."""
        return self.host_gb_per_s or (1.0,) * len(self.by_host)

    @property
    def server_rates(self) -> tuple[float, ...]:
        """The rate that each of `servers` has of its host's uplink, relative to the others."""
        if not self.serving:
            return self.rates
        rate = {rank: rate for ranks, rate in zip(self.by_host, self.rates, strict=True) for rank in ranks}
        there = [self.devices.index(name) for name in self.serving]
        hosts = [self.hosts[rank] for rank in there]
        return tuple(rate[rank] / hosts.count(host) for rank, host in zip(there, hosts, strict=True))


Where = Resources | Cluster | Sequence[str] | int


def resources(where: Where) -> Resources:
    """Resources from a cluster, names of devices (``h0.gpu1`` is on ``h0``; a name without a dot is alone), or a rank
    count.

    >>> resources(3).devices
    ('rank0', 'rank1', 'rank2')
    >>> resources(["h0.gpu0", "h0.gpu1", "h1.gpu0"]).by_host
    ((0, 1), (2,))
    """
    if isinstance(where, Resources):
        return where
    if isinstance(where, Cluster):
        return _of_cluster(where)
    if isinstance(where, int):
        if not 1 <= where <= MAX_DEVICES:
            raise InvalidInput(f"devices: must be 1..{MAX_DEVICES}, not {where}")
        return resources([f"rank{rank}" for rank in range(where)])
    names = tuple(where)
    if not names or len(set(names)) != len(names) or len(names) > MAX_DEVICES:
        raise InvalidInput(f"devices: must be 1..{MAX_DEVICES} different names")
    number: dict[str, int] = {}
    keys = [name.rpartition(".")[0] or f"{name}." for name in names]
    return Resources(devices=names, hosts=tuple(number.setdefault(key, len(number)) for key in keys))


def _of_cluster(cluster: Cluster) -> Resources:
    count = cluster.num_devices
    given = cluster.node_host[:count].tolist()
    # A device that belongs to no host counts as a host of its own.
    hosts = tuple(host if host >= 0 else -1 - rank for rank, host in enumerate(given))
    rates = []
    for host in dict.fromkeys(hosts):
        inside = cluster.node_host == host if host >= 0 else np.arange(len(cluster.node_host)) == -1 - host
        entering = inside[cluster.link_dst] & ~inside[cluster.link_src]
        rates.append(float(cluster.link_gb_per_s[entering].sum()))
    known = tuple(rates) if all(rate > 0 for rate in rates) else ()
    return Resources(devices=cluster.node_names[:count], hosts=hosts, host_gb_per_s=known)
