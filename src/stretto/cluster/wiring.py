# SPDX-License-Identifier: Apache-2.0
"""`Wiring`: builds a `Cluster` from arrays of link ends, which is fast for tens of thousands of devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput
from .model import DEVICE, KINDS, MAX_LINKS, NO_CAP, Cluster

Ids = NDArray[np.int64]

MAX_DEVICES = 1 << 16
"""The most devices a preset or a reader makes; a file of our own form may hold more."""

NVLINK_ALPHA_US = 0.3
RDMA_ALPHA_US = 2.6
"""Latencies that TACCL measured for NVLink and InfiniBand; used where a source gives no latency."""
PCIE_ALPHA_US = 1.0
ETHERNET_ALPHA_US = 20.0
"""Assumed latencies of one crossing of a PCIe root, and of one TCP message between hosts."""
PCIE3_GB_PER_S, PCIE4_GB_PER_S, PCIE5_GB_PER_S = 13.0, 26.0, 52.0
"""Assumed: the one-way rate of an x16 slot in practice (82 % of its raw rate)."""
SOCKET_GB_PER_S = 20.0
"""Assumed: the one-way rate between two CPU sockets."""


class Wiring:
    """A builder of clusters, used by presets and readers: nodes and links are added, then `cluster` makes the result.

    The devices are given to the constructor, so that they come first; node ids are final as soon as they are returned.

    >>> w = Wiring(["a", "b"], hosts=0)
    >>> hub = w.add(["hub"], kind="switch", hosts=0)
    >>> w.duplex([0, 1], hub, gb_per_s=25.0, alpha_us=0.5, back_us=0.0, channel="nvlink")
    >>> w.cluster("pair")
    <Cluster pair: 2 devices on 1 hosts, 4 links over nvlink>
    """

    def __init__(self, devices: Sequence[str], *, hosts: ArrayLike = -1) -> None:
        self._names: list[str] = []
        self._kinds: list[NDArray[np.int8]] = []
        self._hosts: list[NDArray[np.int32]] = []
        self._links: list[NDArray[np.float64]] = []
        self._ends: list[Ids] = []
        self._channels: list[str] = []
        self._count = 0
        self.devices = self.add(devices, kind="device", hosts=hosts)

    def add(self, names: Sequence[str], *, kind: str, hosts: ArrayLike = -1) -> Ids:
        """Add nodes of one kind.

        Args:
            names: The name of each node; names differ within a cluster.
            kind: "switch" or "nic"; devices are given to the constructor.
            hosts: The host of each node, or one for all; -1 for none.

        Returns:
            The ids of the new nodes, for `duplex` and `link`.
        """
        first = len(self._names)
        self._names.extend(names)
        self._kinds.append(np.full(len(names), KINDS.index(kind), np.int8))
        self._hosts.append(np.broadcast_to(np.asarray(hosts, np.int32), (len(names),)))
        return np.arange(first, len(self._names), dtype=np.int64)

    def duplex(
        self,
        a: ArrayLike,
        b: ArrayLike,
        *,
        gb_per_s: ArrayLike,
        alpha_us: float,
        channel: str,
        back_us: float | None = None,
        flow_gb_per_s: float = NO_CAP,
    ) -> None:
        """Add a link each way between a[i] and b[i]; `a` and `b` are broadcast against each other.

        Args:
            a: Ids of nodes.
            b: Ids of nodes.
            gb_per_s: The rate of each pair, or one for all, in GB/s and direction, > 0.
            alpha_us: The latency from a to b in microseconds, >= 0.
            channel: The name of the channel that the links belong to, such as "nvlink".
            back_us: The latency from b to a; that of a to b when not given.
            flow_gb_per_s: The most that one flow gets on such a link; infinite when not given.
        """
        a, b = (np.ravel(x) for x in np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64)))
        ends = np.stack([np.stack([a, b], 1), np.stack([b, a], 1)], 1).reshape(-1, 2)
        alpha = np.tile([alpha_us, alpha_us if back_us is None else back_us], len(a))
        rate = np.repeat(np.broadcast_to(np.ravel(np.asarray(gb_per_s, np.float64)), a.shape), 2)
        self._append(ends, alpha, rate, channel, flow_gb_per_s)

    def link(self, a: ArrayLike, b: ArrayLike, *, gb_per_s: ArrayLike, alpha_us: float, channel: str) -> None:
        """Add one link from a[i] to b[i]; `a` and `b` are broadcast against each other.

        Args:
            a: Ids of the nodes that the links start at.
            b: Ids of the nodes that they lead to.
            gb_per_s: The rate of each link, or one for all, in GB/s, > 0.
            alpha_us: The latency in microseconds, >= 0.
            channel: The name of the channel that the links belong to.
        """
        a, b = (np.ravel(x) for x in np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64)))
        rate = np.broadcast_to(np.ravel(np.asarray(gb_per_s, np.float64)), a.shape)
        self._append(np.stack([a, b], 1), np.full(len(a), alpha_us), rate, channel, NO_CAP)

    def _append(
        self, ends: Ids, alpha: NDArray[np.float64], rate: NDArray[np.float64], channel: str, flow: float
    ) -> None:
        self._count += len(ends)
        if self._count > MAX_LINKS:
            raise InvalidInput(f"links: a cluster has at most {MAX_LINKS} links")
        if channel not in self._channels and len(ends):
            self._channels.append(channel)
        at = self._channels.index(channel) if len(ends) else 0
        self._ends.append(ends)
        rows = np.stack([alpha, rate, np.full(len(ends), flow), np.full(len(ends), at)], 1)
        self._links.append(rows.astype(np.float64))

    def cluster(self, name: str, *, notes: Iterable[str] = (), **rest: Any) -> Cluster:
        """Make the finished cluster.

        Args:
            name: The cluster's name, by habit ``preset:nodes``.
            notes: Sentences about what was assumed.
            **rest: Other fields of `Cluster`: dimensions, devices_forward, reduce_us_per_mb.

        Returns:
            The validated cluster.

        Raises:
            InvalidInput: A rate, a latency or a name is not valid.
        """
        kinds = np.concatenate(self._kinds)
        ends = np.concatenate([np.zeros((0, 2), np.int64), *self._ends])
        links = np.concatenate([np.zeros((0, 4)), *self._links])
        assert not np.any(np.diff((kinds != DEVICE).astype(np.int8)) < 0), "devices are added first"
        return Cluster(
            name=name,
            node_names=tuple(self._names),
            node_kind=kinds,
            node_host=np.concatenate(self._hosts),
            link_src=ends[:, 0].astype(np.int32),
            link_dst=ends[:, 1].astype(np.int32),
            link_alpha_us=links[:, 0].copy(),
            link_gb_per_s=links[:, 1].copy(),
            link_channel=links[:, 3].astype(np.int16),
            channels=tuple(self._channels),
            link_flow_gb_per_s=links[:, 2].copy(),
            link_incast=np.full(len(ends), -1, np.int16),
            notes=tuple(notes),
            **rest,
        )


def host_names(hosts: int, parts: Sequence[str]) -> list[str]:
    """The names of the parts of every host, host by host: ``h0.gpu0, h0.gpu1, ..., h1.gpu0, ...``."""
    return [f"h{host}.{part}" for host in range(hosts) for part in parts]


def numbered(name: str, count: int) -> list[str]:
    """The names ``name0, name1, ...``, `count` of them."""
    return [f"{name}{i}" for i in range(count)]
