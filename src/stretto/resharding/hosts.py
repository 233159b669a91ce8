# SPDX-License-Identifier: Apache-2.0
"""The cluster as a resharding sees it: groups of devices that are close to one another, and their ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..errors import InvalidInput
from .placing import host_of

NEAR_DOMAINS = 8


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
    plane: dict[int, int]
    """The switch or node that each device's port leads to: a rail, or the whole network."""
    reach: dict[int, frozenset[int]]
    """For each plane the planes that it sends to without passing through a further device."""
    doors: dict[int, int]
    """For each port the device with the shortest way to it."""

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
        domain = domains_of(cluster)
        group = {d: domain[d] for d in devices}
        if len(set(group.values())) == 1:
            group = {d: d for d in devices}
        out_port, in_port, rate = dict[int, int](), dict[int, int](), dict[int, float]()
        plane, to_port = dict[int, int](), dict[int, int]()
        alpha = 0.0
        for device, far in _direct_peers(cluster, group).items():
            for ports, ends in ((out_port, (device, far)), (in_port, (far, device))):
                links = _route(cluster, *ends)
                port = _port(cluster, links, device, sends=ends[0] == device)
                ports[device] = port
                rate[port] = float(cluster.link_gb_per_s[port] * 1e3) if port >= 0 else np.inf
                if ends[0] == device and port >= 0:
                    to_port[device] = links.tolist().index(port)
                alpha = max(alpha, float(cluster.link_alpha_us[links].sum()))
            plane[device] = _plane(cluster, device, far)
        local = np.inf
        seen: dict[int, int] = {}
        for device, host in group.items():
            if host in seen:
                local = min(local, float(cluster.link_gb_per_s[_route(cluster, seen[host], device)].min() * 1e3))
            seen[host] = device
        send, receive = _borders(cluster, group)
        return cls(
            group=group, out_port=out_port, in_port=in_port, bytes_per_us=rate, alpha_us=alpha,
            local_bytes_per_us=local, send_bytes_per_us=send, receive_bytes_per_us=receive, plane=plane,
            reach=_reach(cluster, group, plane), doors=_doors(out_port, to_port),
        )  # fmt: skip


def _doors(out_port: dict[int, int], to_port: dict[int, int]) -> dict[int, int]:
    """For each port the device with the fewest links before it."""
    return {out_port[d]: d for d in sorted(to_port, key=lambda d: (-to_port[d], -d))}


def domains_of(cluster: Cluster) -> list[int]:
    """The group of each device: its host, or the hosts that share its scale-up network, such as the trays of a rack.

    Two hosts are one group where messages between them take switches alone, of the same channel and as fast as inside a
    host; if that joins all hosts, each stays a group of its own.
    """
    host = host_of(cluster)
    first: dict[int, list[int]] = {}
    for device in range(cluster.num_devices):
        first.setdefault(host[device], []).append(device)
    pair = next(iter(first.values()))[:2]
    if len(pair) < 2:
        return host
    inside = _route(cluster, *pair)
    channels, slowest = set(cluster.link_channel[inside].tolist()), float(cluster.link_gb_per_s[inside].min())
    joined: dict[int, int] = {}
    for h in first:
        # Hosts of one domain stand next to each other, so only the latest domains can take a host in.
        for other in list(dict.fromkeys(joined.values()))[-NEAR_DOMAINS:]:
            links = _route(cluster, first[h][0], first[other][0])
            if (
                set(cluster.link_channel[links].tolist()) <= channels
                and bool(np.all(cluster.link_dst[links[:-1]] >= cluster.num_devices))
                and float(cluster.link_gb_per_s[links].min()) >= slowest
            ):
                joined[h] = other
                break
        else:
            joined[h] = h
    return [joined[h] for h in host] if len(set(joined.values())) > 1 else host


def _direct_peers(cluster: Cluster, group: dict[int, int]) -> dict[int, int]:
    """For each device one of another group, to which it sends through no further device where there is one."""
    members: dict[int, list[int]] = {}
    for device, number in group.items():
        members.setdefault(number, []).append(device)
    found: dict[int, int] = {}
    for device, number in group.items():
        other = next((g for g in members if g != number), None)
        able = members[other] if other is not None else [device]
        found[device] = next((d for d in able if not _passes_devices(cluster, device, d)), able[0])
    return found


def _passes_devices(cluster: Cluster, src: int, dst: int) -> int:
    """The number of further devices that the fastest route between two devices takes."""
    return int(np.sum(cluster.link_dst[_route(cluster, src, dst)[:-1]] < cluster.num_devices))


def _plane(cluster: Cluster, device: int, far: int) -> int:
    """The first node outside of a device's host on its way to another group; -1 where there is none before `far`."""
    host = int(cluster.node_host[device])
    between = cluster.link_dst[_route(cluster, device, far)[:-1]].tolist()
    return next((n for n in between if host < 0 or int(cluster.node_host[n]) != host), -1)


def _reach(cluster: Cluster, group: dict[int, int], plane: dict[int, int]) -> dict[int, frozenset[int]]:
    """For each plane the planes that its devices send to through no further device."""
    ends: dict[int, dict[int, int]] = {}
    for device, number in group.items():
        ends.setdefault(plane[device], {}).setdefault(number, device)
    found = {}
    for a, mine in ends.items():
        near = set()
        for b, theirs in ends.items():
            pair = next(((d, e) for g, d in mine.items() for h, e in theirs.items() if g != h), None)
            if pair is not None and not _passes_devices(cluster, *pair):
                near.add(b)
        found[a] = frozenset(near)
    return found


def _borders(cluster: Cluster, group: dict[int, int]) -> tuple[dict[int, float], dict[int, float]]:
    """The rates of the links out of and into each group: links of its devices, and of its host's switches and NICs."""
    on_host: dict[int, set[int]] = {}
    for device, number in group.items():
        on_host.setdefault(int(cluster.node_host[device]), set()).add(number)
    member = np.full(cluster.num_nodes, -1, np.int64)
    for device, number in enumerate(domains_of(cluster)):
        member[device] = number if number in group.values() else -1
    for host, numbers in on_host.items():
        if host >= 0 and len(numbers) == 1:
            member[cluster.node_host == host] = next(iter(numbers))
        elif host >= 0:
            member[cluster.node_host == host] = -1
    for device, number in group.items():
        member[device] = number
    hub = _hubs(cluster, member)
    member[hub >= 0] = hub[hub >= 0]
    ends = member[cluster.link_src], member[cluster.link_dst]
    rate = cluster.link_gb_per_s * 1e3
    leaves = ends[0] != ends[1]
    send, receive = ({g: float(rate[leaves & (end == g)].sum()) for g in set(group.values())} for end in ends)
    return send, receive


def _hubs(cluster: Cluster, member: NDArray[np.int64]) -> NDArray[np.int64]:
    """The group of each switch outside of any host all of whose links lead to devices of that group; else -1."""
    low = np.full(cluster.num_nodes, np.iinfo(np.int64).max)
    high = np.full(cluster.num_nodes, -1, np.int64)
    for near, far in ((cluster.link_src, cluster.link_dst), (cluster.link_dst, cluster.link_src)):
        np.minimum.at(low, near, member[far])
        np.maximum.at(high, near, member[far])
    lone = (low == high) & (member < 0) & (np.arange(cluster.num_nodes) >= cluster.num_devices)
    found: NDArray[np.int64] = np.where(lone & (cluster.node_host < 0), high, -1)
    return found


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
