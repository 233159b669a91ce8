# SPDX-License-Identifier: Apache-2.0
"""A `Cluster` from what the probe found: the same form as a lab's own, so that predictions can be set side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...cluster import Cluster, Link, Node
from .find import ProbedChannel, ProbeFindings, Uplink
from .meter import MEMORY

ALIKE = 1.06
"""Uplinks of a channel whose measured rates lie that close together get one rate, the middle one."""
DIGITS = 4


def build(found: ProbeFindings, *, name: str = "probed", notes: Iterable[str] = ()) -> Cluster:
    """The cluster that the findings of a probe describe.

    Device r is rank r. The memory of a host is a switch; a channel is a switch with an uplink for each group of ranks.

    Args:
        found: What was measured.
        name: The name of the cluster.
        notes: What was assumed.

    Returns:
        The cluster.
    """
    return _Drawing(found).cluster(name, notes)


def settled(rates: Sequence[float]) -> list[float]:
    """The rates, where those that differ by no more than repeated measurements do become one rate.

    >>> settled([0.0495, 0.0502, 0.0247, 0.0499])
    [0.0499, 0.0499, 0.0247, 0.0499]
    """
    order = sorted(range(len(rates)), key=lambda at: rates[at])
    groups: list[list[int]] = []
    for at in order:
        if groups and rates[at] <= ALIKE * rates[groups[-1][0]]:
            groups[-1].append(at)
        else:
            groups.append([at])
    made = [0.0] * len(rates)
    for group in groups:
        for at in group:
            made[at] = _rounded(rates[group[len(group) // 2]])
    return made


class _Drawing:
    def __init__(self, found: ProbeFindings) -> None:
        self.found = found
        self.nodes: list[Node] = []
        self.links: list[Link] = []

    def cluster(self, name: str, notes: Iterable[str]) -> Cluster:
        found = self.found
        host_of = {rank: host for host, ranks in enumerate(found.hosts) for rank in ranks}
        for rank in sorted(host_of):
            self.nodes.append(Node(name=f"h{host_of[rank]}.rank{rank}", host=host_of[rank]))
        if found.memory is not None:
            for host, ranks in enumerate(found.hosts):
                memory = self._node(f"h{host}.{MEMORY}", "switch", host)
                for rank in ranks:
                    rate, alpha = _rounded(found.memory.gb_per_s), _rounded(found.memory.alpha_us)
                    self._link(rank, memory, rate, alpha, MEMORY)
                    self._link(memory, rank, rate, 0.0, MEMORY)
        for network in found.networks:
            self._network(network)
        said = [*notes, *found.notes, *(_note(net) for net in found.networks)]
        return Cluster.build(name, nodes=self.nodes, links=self.links, notes=tuple(said))

    def _network(self, net: ProbedChannel) -> None:
        up, down = self._switches(net)
        rates = settled([rate for port in net.ports for rate in (port.out_gb_per_s, port.in_gb_per_s)])
        alpha = _rounded(net.alpha_us)
        # The link from a rank to its uplink is as fast as the uplink, and between ranks of a host slower than memory.
        memory = 0.0 if self.found.memory is None else self.found.memory.gb_per_s
        own = max(*rates, _rounded(0.99 * memory))
        several = {port.host for port in net.ports if port.ranks != self.found.hosts[port.host]}
        for at, port in enumerate(net.ports):
            number = _number(net.ports, at) if port.host in several else ""
            nic = self._node(f"h{port.host}.{net.name}{number}", "nic", port.host)
            for rank in port.ranks:
                self._link(rank, nic, own, 0.0, net.name)
                self._link(nic, rank, own, 0.0, net.name)
            cap = _rounded(net.flow_gb_per_s)
            self._link(nic, up[port.host], rates[2 * at], alpha, net.name, cap)
            self._link(down[port.host], nic, rates[2 * at + 1], 0.0, net.name, cap)

    def _switches(self, net: ProbedChannel) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """For every host the node that its uplink leads to, and the node that its downlink comes from."""
        hosts = range(len(self.found.hosts))
        whole = next((trunk for trunk in net.trunks if len(trunk.hosts) == len(hosts)), None)
        if whole is not None:
            into, out = (self._node(f"{net.name}.{side}", "switch", -1) for side in ("in", "out"))
            self._link(into, out, _rounded(whole.out_gb_per_s), 0.0, net.name)
            return dict.fromkeys(hosts, into), dict.fromkeys(hosts, out)
        core = self._node(net.name, "switch", -1)
        at = dict.fromkeys(hosts, core)
        for number, trunk in enumerate(net.trunks):
            switch = self._node(f"{net.name}.s{number}", "switch", -1)
            forth, back = settled([trunk.out_gb_per_s, trunk.in_gb_per_s])
            self._link(switch, core, forth, 0.0, net.name)
            self._link(core, switch, back, 0.0, net.name)
            at.update(dict.fromkeys(trunk.hosts, switch))
        return at, at

    def _node(self, name: str, kind: str, host: int) -> int:
        self.nodes.append(Node(name=name, kind=kind, host=host))
        return len(self.nodes) - 1

    def _link(self, src: int, dst: int, rate: float, alpha: float, channel: str, cap: float = math.inf) -> None:
        self.links.append(Link(src=src, dst=dst, alpha_us=alpha, gb_per_s=rate, channel=channel, flow_gb_per_s=cap))


def _number(ports: Sequence[Uplink], at: int) -> str:
    return str(sum(port.host == ports[at].host for port in ports[:at]))


def _note(net: ProbedChannel) -> str:
    return f"{net.name}: measured; the lines through the times are off by {100 * net.error:.1f} % at most"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value
