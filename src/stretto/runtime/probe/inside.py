# SPDX-License-Identifier: Apache-2.0
"""The PCIe tree and the NVLinks of one host, from copies that are timed alone and together.

TACCL's questions (its section 4.2), asked of copies between GPUs, sockets' memory and NICs: which socket is nearest
(rate, else latency), which GPUs share a PCIe switch (two copies to memory slow each other down), which GPUs share one
with a NIC (the same with a copy from the NIC), and which pairs have links of their own (faster than PCIe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster, Link, Node
from ...cluster.numbering import PCIE
from ...errors import InvalidInput
from .build import settled

NBYTES, SMALL = 64 << 20, 64
TIMES = 5
"""Disturbances only make copies slower, so that the least of several runs counts."""
SHARED = 1.35
"""Copies that take that many times as long together as alone share a link (two that share one equally take 2)."""
NEARER = 1.15
FASTER = 1.25
"""A pair whose rate is that many times that of its PCIe has links of its own."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """A copy inside a host; its ends are ``gpu0``, ``cpu0`` (the memory of a socket) or a NIC's name."""

    src: str
    dst: str
    nbytes: int = NBYTES


class HostMeter(Protocol):
    """A host that can be measured: this one, or in tests a simulated one."""

    gpus: int
    sockets: int
    nics: tuple[str, ...]
    """NICs whose copies to memory can be timed."""

    def copies(self, copies: Sequence[HostCopy], times: int) -> Floats:
        """Start all at once, `times` times: microseconds of each, a column per copy."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class InsideHost:
    """What was found. Sockets and switches are numbers for each GPU, then for each NIC; -1: could not be told."""

    nics: tuple[str, ...]
    to_memory: tuple[float, ...]
    """GB/s from each GPU, then from each NIC, to the memory of its socket."""
    socket: tuple[int, ...]
    switch: tuple[int, ...]
    """A number for each GPU and NIC; those that share a link to the socket have equal numbers."""
    direct: Floats
    """GB/s of the links of their own from each GPU to each; 0: there are none."""
    ports: tuple[bool, ...]
    """Whether all direct links of a GPU share one port, as on an NVSwitch."""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the GPUs and NICs on each PCIe switch."""
        names = [*(f"gpu{at}" for at in range(len(self.direct))), *self.nics]
        return tuple(
            tuple(name for name, one in zip(names, self.switch, strict=True) if one == number)
            for number in sorted(set(self.switch) - {-1})
        )

    def cluster(self, name: str = "probed") -> Cluster:
        """The host as a cluster: GPUs, a switch for each that was found, sockets, and NICs."""
        return _draw(self, name)


def find_inside(meter: HostMeter) -> InsideHost:
    """Measure a host; nothing else should copy meanwhile.

    Args:
        meter: The host.

    Returns:
        What was found.

    Raises:
        InvalidInput: It has no GPUs.
    """
    if not meter.gpus or not meter.sockets:
        raise InvalidInput("probe: a host without GPUs has nothing to find inside")
    ends = [*(f"gpu{at}" for at in range(meter.gpus)), *meter.nics]
    near = [_nearest(meter, end) for end in ends]
    home = [HostCopy(src=end, dst=f"cpu{max(socket, 0)}") for end, (socket, _) in zip(ends, near, strict=True)]
    group = list(range(len(ends)))
    for a, b in combinations(range(len(ends)), 2):
        if b < meter.gpus or (a < meter.gpus <= b):
            alone = [near[at][1] for at in (a, b)]
            if group[a] != group[b] and _in_the_way(meter, [home[a], home[b]], alone):
                group = [group[a] if one == group[b] else one for one in group]
    known = {one: at for at, one in enumerate(dict.fromkeys(one for one in group if group.count(one) > 1))}
    direct, ports = _direct(meter, [NBYTES / us * 1e-3 for _, us in near[: meter.gpus]])
    return InsideHost(
        nics=meter.nics, to_memory=tuple(settled([NBYTES / us * 1e-3 for _, us in near])),
        socket=tuple(socket for socket, _ in near), switch=tuple(known.get(one, -1) for one in group),
        direct=direct, ports=ports,
    )  # fmt: skip


def _nearest(meter: HostMeter, end: str) -> tuple[int, float]:
    """The nearest socket (-1 where all are alike), and the time of a copy to its memory."""
    long_us, short_us = (
        np.array([_least(meter, [HostCopy(src=end, dst=f"cpu{at}", nbytes=n)])[0] for at in range(meter.sockets)])
        for n in (NBYTES, SMALL)
    )
    if meter.sockets == 1:
        return 0, float(long_us[0])
    for times in (long_us, short_us):
        if times.max() > NEARER * times.min():
            at = int(times.argmin())
            return at, float(long_us[at])
    return -1, float(long_us.min())


def _in_the_way(meter: HostMeter, copies: Sequence[HostCopy], alone: Sequence[float]) -> bool:
    return bool(np.any(_least(meter, copies) > SHARED * np.asarray(alone)))


def _least(meter: HostMeter, copies: Sequence[HostCopy]) -> Floats:
    least: Floats = meter.copies(copies, TIMES).min(axis=0)
    return least


def _direct(meter: HostMeter, to_memory: Sequence[float]) -> tuple[Floats, tuple[bool, ...]]:
    """Rates of links between GPUs, and whose links are one port."""
    count = meter.gpus
    rate = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a != b:
                us = _least(meter, [HostCopy(src=f"gpu{a}", dst=f"gpu{b}")])[0]
                rate[a, b] = NBYTES / us * 1e-3
    own = rate > FASTER * np.maximum.outer(to_memory, to_memory)
    rate[own] = settled(rate[own].tolist()) if own.any() else []
    rate[~own] = 0.0
    ports = []
    for a in range(count):
        peers = np.flatnonzero(own[a])[:2].tolist()
        both = [HostCopy(src=f"gpu{a}", dst=f"gpu{b}") for b in peers]
        ports.append(len(peers) == 2 and _in_the_way(meter, both, [1e-3 * NBYTES / rate[a, b] for b in peers]))
    return rate, tuple(ports)


def _draw(found: InsideHost, name: str) -> Cluster:
    count = len(found.direct)
    nodes = [Node(name=f"gpu{at}", host=0) for at in range(count)]
    nodes += [Node(name=nic, kind="nic", host=0) for nic in found.nics]
    links: list[Link] = []

    def node(label: str) -> int:
        nodes.append(Node(name=label, kind="switch", host=0))
        return len(nodes) - 1

    def link(a: int, b: int, rate: float, channel: str) -> None:
        links.append(Link(src=a, dst=b, alpha_us=0.0, gb_per_s=rate, channel=channel))

    sockets = {at: node(f"cpu{at}") for at in sorted({max(at, 0) for at in found.socket})}
    for a, b in combinations(sockets.values(), 2):
        link(a, b, max(found.to_memory), PCIE)
        link(b, a, max(found.to_memory), PCIE)
    switches: dict[int, int] = {}
    for at, (switch, socket, rate) in enumerate(zip(found.switch, found.socket, found.to_memory, strict=True)):
        above = sockets[max(socket, 0)]
        if switch >= 0:
            if switch not in switches:
                switches[switch] = node(f"pci{switch}")
                most = max(r for one, r in zip(found.switch, found.to_memory, strict=True) if one == switch)
                link(switches[switch], above, most, PCIE)
                link(above, switches[switch], most, PCIE)
            above = switches[switch]
        link(at, above, rate, PCIE)
        link(above, at, rate, PCIE)
    on_port = [at for at in range(count) if found.ports[at]]
    hub = node("nvswitch") if on_port else -1
    for a in on_port:
        link(a, hub, float(found.direct[a].max()), "nvlink")
        link(hub, a, float(found.direct[:, a].max()), "nvlink")
    for a, b in zip(*np.nonzero(found.direct), strict=True):
        if not (found.ports[a] and found.ports[b]):
            link(int(a), int(b), float(found.direct[a, b]), "nvlink")
    unknown = [at for at in range(count) if found.socket[at] < 0]
    notes = ["measured by copies: latencies are left out; a switch below a switch is not looked for"]
    if unknown:
        notes.append(f"which socket is nearest could not be told for GPUs {', '.join(map(str, unknown))}")
    return Cluster.build(name, nodes=nodes, links=links, notes=tuple(notes))
