# SPDX-License-Identifier: Apache-2.0
"""The usable links of a cluster as a network of flows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...cluster import Cluster
from ...errors import unknown

Floats = NDArray[np.float64]
Nodes = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class ArcNetwork:
    """The links that may be used, as arcs with rates in bytes per microsecond.

    The nodes of the cluster are followed by one node per entry of `Demand.shared`, with free arcs to its devices.
    """

    num_nodes: int
    num_devices: int
    src: Nodes
    dst: Nodes
    rate: Floats
    alpha_us: Floats
    link: NDArray[np.int64]
    """The cluster's link that each arc stands for, or -1 for a free arc."""
    channel: NDArray[np.int64]
    """The channel of that link, or -1."""

    @classmethod
    def of(cls, cluster: Cluster, channels: Iterable[str] | None, shared: Sequence[Sequence[int]] = ()) -> ArcNetwork:
        """Make the network of usable links; links that no message between devices can pass are left out.

        Args:
            cluster: The cluster.
            channels: The channels whose links may be used; all when None.
            shared: The sets of devices that get a common node each, see `Demand.shared`.

        Returns:
            The network.

        Raises:
            InvalidInput: A channel is unknown.
        """
        wanted = set(cluster.channels if channels is None else channels)
        for channel in sorted(wanted):
            if channel not in cluster.channels:
                raise unknown("channel", channel, cluster.channels)
        numbers = [i for i, channel in enumerate(cluster.channels) if channel in wanted]
        free = [(cluster.num_nodes + j, device) for j, devices in enumerate(shared) for device in devices]
        ends = np.array(free, np.int32).reshape(-1, 2)

        def net(link: NDArray[np.int64]) -> ArcNetwork:
            return cls(
                num_nodes=cluster.num_nodes + len(shared),
                num_devices=cluster.num_devices,
                src=np.concatenate([cluster.link_src[link], ends[:, 0]]),
                dst=np.concatenate([cluster.link_dst[link], ends[:, 1]]),
                rate=np.concatenate([cluster.link_gb_per_s[link] * 1e3, np.full(len(ends), np.inf)]),
                alpha_us=np.concatenate([cluster.link_alpha_us[link], np.zeros(len(ends))]),
                link=np.concatenate([link, np.full(len(ends), -1)]),
                channel=np.concatenate([cluster.link_channel[link], np.full(len(ends), -1)]),
            )

        link = np.flatnonzero(np.isin(cluster.link_channel, numbers))
        return net(link[np.isfinite(net(link).message_us[: len(link)])])

    @cached_property
    def reverse(self) -> ArcNetwork:
        """The network with the direction of every arc reversed."""
        fields = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return ArcNetwork(**(fields | {"src": self.dst, "dst": self.src}))

    @cached_property
    def message_us(self) -> Floats:
        """For each arc the least sum of alphas of any message, from device to device, that passes it."""
        return self.reverse.nearest_device_us[self.src] + self.alpha_us + self.nearest_device_us[self.dst]

    @cached_property
    def nearest_device_us(self) -> Floats:
        """The least sum of alphas on a path from each node to a device."""
        devices = np.arange(self.num_devices, dtype=np.int32)
        return _native.path_lengths(
            self.num_nodes + 1,
            np.concatenate([self.dst, np.full(len(devices), self.num_nodes, np.int32)]),
            np.concatenate([self.src, devices]),
            np.concatenate([self.alpha_us, np.zeros(len(devices))]),
            np.array([self.num_nodes], np.int32),
        )

    def distances(self, length: Floats, sources: Nodes) -> Floats:
        """The shortest path from each source (row) to each node (column) where arcs have these lengths."""
        flat = _native.path_lengths(self.num_nodes, self.src, self.dst, length, sources)
        return flat.reshape(len(sources), self.num_nodes)

    def narrowest_entry(self, inside: Mask) -> Mask:
        """The sink side of the narrowest cut around these devices; a switch may be on either side."""
        number = np.arange(self.num_devices, dtype=np.int32)
        unlimited = np.full(self.num_devices, np.inf)
        self._flow.run(number[~inside], unlimited[~inside], number[inside], unlimited[inside])
        return self._flow.sink_side().astype(np.bool_)

    @cached_property
    def _flow(self) -> _native.MaxFlow:
        flow = _native.MaxFlow(self.num_nodes, self.src, self.dst)
        rate = np.where(self.link >= 0, self.rate, 0)
        flow.set_capacity(rate, float(rate.sum()) * 2.0**-58)
        return flow

    @cached_property
    def switches_balanced(self) -> bool:
        """Whether every switch and NIC sends as fast as it receives."""
        rate = np.where(self.link >= 0, self.rate, 0)
        into, out = (np.bincount(ends, rate, self.num_nodes) for ends in (self.dst, self.src))
        return bool(np.all(np.abs(into - out)[self.num_devices :] <= 1e-9 * into[self.num_devices :]))
