# SPDX-License-Identifier: Apache-2.0
"""The cluster as a resharding sees it: groups of devices that are close to one another, and their ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput
from .placing import host_of


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Groups of devices (hosts, or single devices if all are on one host), and the port by which each device sends and
    receives.

    A port is the slowest link between a device and the network outside its host: a NIC that devices share is one port.
    """

    group: dict[int, int]
    out_port: dict[int, int]
    in_port: dict[int, int]
    bytes_per_us: dict[int, float]
    """The rate of each port."""
    alpha_us: float
    """The longest latency between two groups."""
    local_bytes_per_us: float
    send_bytes_per_us: dict[int, float]
    """The rate of all links out of each group together."""
    receive_bytes_per_us: dict[int, float]
    """The rate of all links into each group together."""

    @cached_property
    def slowest(self) -> float:
        """The rate of the slowest port."""
        return min(self.bytes_per_us.values())

    @cached_property
    def several_ports(self) -> bool:
        """Whether devices of one group have different ports, and could lend them to one another."""
        return len(set(self.out_port.values())) > len(set(self.group.values()))

    @cached_property
    def port_number(self) -> dict[int, int]:
        """For each device the number of its port within its group, from 0."""
        found: dict[int, int] = {}
        for devices in self.members.values():
            ports = sorted({self.in_port[d] for d in devices})
            found |= {d: ports.index(self.in_port[d]) for d in devices}
        return found

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The devices of each group that take part in the resharding."""
        found: dict[int, list[int]] = {}
        for device, group in self.group.items():
            found.setdefault(group, []).append(device)
        return found

    def groups(self, devices: Sequence[int]) -> list[int]:
        """The groups of these devices, each once, in order."""
        return list(dict.fromkeys(self.group[d] for d in devices))

    @classmethod
    def of(cls, cluster: Cluster, devices: Sequence[int]) -> Hosts:
        """The groups and ports of the devices that take part in a resharding."""
        if max(devices) >= cluster.num_devices:
            has = f"{cluster.name} has {cluster.num_devices} devices"
            raise InvalidInput(f"mesh: device {max(devices)} does not exist; {has}")
        group = dict(zip(devices, (host_of(cluster)[d] for d in devices), strict=True))
        if len(set(group.values())) == 1:
            group = {d: d for d in devices}
        first: dict[int, int] = {}
        for device, host in group.items():
            first.setdefault(host, device)
        others = list(first.items())
        out_port, in_port, rate = dict[int, int](), dict[int, int](), dict[int, float]()
        alpha = 0.0
        for device, host in group.items():
            far = next((d for h, d in others if h != host), device)
            for ports, ends in ((out_port, (device, far)), (in_port, (far, device))):
                links = _route(cluster, *ends)
                port = _port(cluster, links, device, sends=ends[0] == device)
                ports[device] = port
                rate[port] = float(cluster.link_gb_per_s[port] * 1e3) if port >= 0 else np.inf
                alpha = max(alpha, float(cluster.link_alpha_us[links].sum()))
        local = np.inf
        seen: dict[int, int] = {}
        for device, host in group.items():
            if host in seen:
                local = min(local, float(cluster.link_gb_per_s[_route(cluster, seen[host], device)].min() * 1e3))
            seen[host] = device
        send, receive = _borders(cluster, group)
        return cls(
            group=group, out_port=out_port, in_port=in_port, bytes_per_us=rate, alpha_us=alpha,
            local_bytes_per_us=local, send_bytes_per_us=send, receive_bytes_per_us=receive,
        )  # fmt: skip


def _borders(cluster: Cluster, group: dict[int, int]) -> tuple[dict[int, float], dict[int, float]]:
    """The rates of the links out of and into each group: links of its devices, and of its host's switches and NICs."""
    on_host: dict[int, set[int]] = {}
    for device, number in group.items():
        on_host.setdefault(int(cluster.node_host[device]), set()).add(number)
    member = np.full(cluster.num_nodes, -1, np.int64)
    for host, numbers in on_host.items():
        if host >= 0 and len(numbers) == 1:
            member[cluster.node_host == host] = next(iter(numbers))
    for device, number in group.items():
        member[device] = number
    ends = member[cluster.link_src], member[cluster.link_dst]
    rate = cluster.link_gb_per_s * 1e3
    leaves = ends[0] != ends[1]
    send, receive = ({g: float(rate[leaves & (end == g)].sum()) for g in set(group.values())} for end in ends)
    return send, receive


def _route(cluster: Cluster, src: int, dst: int) -> np.ndarray:
    if src == dst:
        return np.zeros(0, np.int32)
    one = np.zeros(1, np.int32)
    return cluster.route_table(one + src, one + dst, np.zeros(1, np.int64))[1]


def _port(cluster: Cluster, links: np.ndarray, device: int, *, sends: bool) -> int:
    """The slowest link of a route inside or at the border of the device's host; of equal links the one nearest the
    border.
    """
    host = int(cluster.node_host[device])
    near = cluster.link_src if sends else cluster.link_dst
    mine = [x for x in links.tolist() if near[x] == device or (host >= 0 and cluster.node_host[near[x]] == host)]
    if not mine:
        return -1
    slowest: int = min(mine if not sends else mine[::-1], key=lambda x: float(cluster.link_gb_per_s[x]))
    return slowest
