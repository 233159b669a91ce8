# SPDX-License-Identifier: Apache-2.0
"""NCCL topology XML (``NCCL_TOPO_FILE``, ``NCCL_TOPO_DUMP_FILE``): PCIe tree, NVLinks and NICs of one host.

Rates are the ones NCCL itself plans with: per PCIe lane and generation, per NVLink and compute capability,
and between sockets per processor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from ..errors import InvalidInput
from ..files import parse_xml
from .model import Cluster, Link, Node
from .replicate import NicPort, replicate
from .wiring import ETHERNET_ALPHA_US, NVLINK_ALPHA_US, PCIE_ALPHA_US, RDMA_ALPHA_US

# Usable Gb/s of a PCIe lane by its GT/s.
_LANE_GBIT = {2.5: 1.5, 5.0: 3.0, 8.0: 6.0, 16.0: 12.0, 32.0: 24.0, 64.0: 48.0}
# (least compute capability, GB/s of one NVLink one way), first match wins.
_NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0), (0, 20.0))
MAX_PARTS, MAX_CPUS = 16384, 256
_RDMA_NAMES = ("mlx", "ib", "roce", "hfi", "bnxt_re", "efa", "rdmap", "irdma", "cxi", "opa")


def parse(text: str, *, where: str) -> Element:
    """The root element of an NCCL topology file."""
    root = parse_xml(text, where=where)
    if root.tag != "system":
        raise InvalidInput(f"{where}: expected an NCCL topology, <system> with <cpu> inside, not <{root.tag}>")
    return root


def read(root: Element, name: str, nodes: int = 1) -> Cluster:
    """Read the host of the file, or join several copies of it by one switch.

    Args:
        root: The root element, from `parse`.
        name: The cluster's name.
        nodes: How many hosts, >= 1.

    Returns:
        The cluster; its notes say what was assumed.

    Raises:
        InvalidInput: A field is missing or out of range, or several hosts have no NIC.
    """
    box = _Box()
    for at, element in enumerate(root):
        if element.tag == "cpu":
            box.add_cpu(element, f"system.cpu[{at}]")
    return box.finish(name, nodes)


@dataclass
class _Gpu:
    path: str
    element: Element
    cpu: int
    node: int


@dataclass
class _Box:
    nodes: list[Node] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ports: dict[str, NicPort] = field(default_factory=dict)
    hosts: dict[str, int] = field(default_factory=dict)
    cpus: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    bus: dict[tuple[int, str], int] = field(default_factory=dict)
    gpus: list[_Gpu] = field(default_factory=list)
    pci_links: list[tuple[str, int, int, str]] = field(default_factory=list)

    def add_cpu(self, element: Element, path: str) -> None:
        host = self.hosts.setdefault(element.get("host_hash", ""), len(self.hosts))
        cpu = self.node(f"cpu{_int(element, path, 'numaid', 0, -1, 4096)}", "switch", host)
        self.cpus[host].append((cpu, _socket_gb_per_s(element, path)))
        for at, child in enumerate(element):
            inner = f"{path}.{child.tag}[{at}]"
            if child.tag == "pci":
                self.add_pci(child, inner, cpu, cpu, host)
            elif child.tag == "nic":
                total = sum(_net_gb_per_s(net, inner) for net in child.iter("net"))
                self.add_nic(child, inner, f"nic@cpu{len(self.nodes)}", cpu, host, total or 1.0)

    def add_pci(self, element: Element, path: str, parent: int, cpu: int, host: int) -> None:
        bus, rate = element.get("busid", ""), _pci_gb_per_s(element, path)
        short = bus.removeprefix("0000:")
        if not bus:
            raise InvalidInput(f"{path}.busid: is missing")
        gpus = [child for child in element if child.tag == "gpu"]
        nics = [child for child in element if child.tag == "nic"]
        for child in gpus:
            label = child.get("rank") or child.get("dev") or str(len(self.gpus))
            gpu = self.node(f"gpu{label}", "device", host)
            self.bus[host, bus] = gpu
            self.duplex(gpu, parent, rate, "pcie", PCIE_ALPHA_US, 0.0)
            self.gpus.append(_Gpu(path=f"{path}.gpu", element=child, cpu=cpu, node=gpu))
        for child in nics:
            self.add_nic(child, f"{path}.nic", f"nic@{short}", parent, host, rate)
        if gpus or nics or not element.get("class", "0x0604").startswith("0x06"):
            return
        bridge = self.node(f"pci@{short}", "switch", host)
        self.bus[host, bus] = bridge
        self.duplex(bridge, parent, rate, "pcie", 0.0, 0.0)
        for at, child in enumerate(element):
            if child.tag == "pci":
                self.add_pci(child, f"{path}.pci[{at}]", bridge, cpu, host)
            elif child.tag == "pcilink":
                self.pci_links.append((f"{path}.pcilink[{at}]", host, bridge, child.get("target", "")))

    def add_nic(self, element: Element, path: str, label: str, parent: int, host: int, rate: float) -> None:
        nets = [net for net in element if net.tag == "net" and net.get("dev") is not None]
        if len(nets) > 1:
            card = self.node(label, "switch", host)
            self.duplex(card, parent, rate, "pcie", 0.0, 0.0)
            parent = card
        for net in nets:
            title = net.get("name") or f"net{net.get('dev')}"
            nic = self.node(title, "nic", host)
            self.duplex(nic, parent, rate, "pcie", 0.0, 0.0)
            rdma = title.lower().startswith(_RDMA_NAMES)
            latency = _float(net, path, "latency")
            self.ports[self.nodes[nic].name] = NicPort(
                gb_per_s=_net_gb_per_s(net, path),
                alpha_us=latency or (RDMA_ALPHA_US if rdma else ETHERNET_ALPHA_US),
                channel="rdma" if rdma else "ethernet",
            )

    def finish(self, name: str, nodes: int) -> Cluster:
        if not self.gpus:
            raise InvalidInput("system: no <gpu> in the file")
        lost = sum(self.add_nvlinks(gpu) for gpu in self.gpus)
        for path, host, bridge, target in self.pci_links:
            if (host, target) not in self.bus:
                raise InvalidInput(f"{path}.target: no pci with busid {target!r}")
            self.link(bridge, self.bus[host, target], 5000.0, "pcie", 0.0)
        for sockets in self.cpus.values():
            if len(sockets) > MAX_CPUS:
                raise InvalidInput(f"system: a host has at most {MAX_CPUS} <cpu>, not {len(sockets)}")
            for at, (a, rate) in enumerate(sockets):
                for b, other in sockets[at + 1 :]:
                    self.duplex(a, b, min(rate, other), "pcie", 0.0, 0.0)
        notes = [
            "rates as NCCL plans with them (PCIe by lane and generation, NVLink by compute capability)",
            f"assumed: latency {NVLINK_ALPHA_US:g} us NVLink, {PCIE_ALPHA_US:g} us PCIe; between hosts the "
            f"file's, or {RDMA_ALPHA_US:g} us RDMA and {ETHERNET_ALPHA_US:g} us TCP",
        ]
        if lost:
            notes.append(f"{lost} NVLinks lead to GPUs that the file does not hold; they are left out")
        if nodes > 1:
            notes.append("assumed: one switch joins all NICs of all hosts")
        box = Cluster.build(name, nodes=self.ordered(), links=self.renumbered())
        ids = {box.node_names.index(nic): port for nic, port in self.ports.items()}
        return replicate(box, nodes, ids, name=name if nodes == 1 else f"{name}:{nodes}", notes=notes)

    def add_nvlinks(self, gpu: _Gpu) -> int:
        """Add the NVLinks of one GPU, parallel ones as one link; return how many lead to GPUs outside the file."""
        sm = _int(gpu.element, gpu.path, "sm", 0, 0, 10_000)
        each = next(rate for least, rate in _NVLINK if sm >= least)
        host = self.nodes[gpu.node].host
        totals: dict[int | None, float] = defaultdict(float)
        for at, child in enumerate(gpu.element):
            path = f"{gpu.path}.{child.tag}[{at}]"
            if child.tag == "c2c":
                mb = _int(child, path, "bw", 0, 1, 10**9) * _int(child, path, "count", 1, 1, 1024)
                self.duplex(gpu.node, gpu.cpu, mb / 1000, "c2c", NVLINK_ALPHA_US, 0.0)
            elif child.tag == "nvlink":
                count = _int(child, path, "count", 1, 1, 1024)
                target = self.bus.get((host, child.get("target", "")))
                kind = child.get("tclass", "0x068000" if target is None else "0x03")
                if kind == "0x068001":
                    target = gpu.cpu
                elif not kind.startswith("0x03"):
                    target = -1
                totals[target] += count * each
        for target, rate in totals.items():
            if target == -1:
                self.duplex(gpu.node, self.nvswitch(), rate, "nvlink", NVLINK_ALPHA_US, 0.0)
            elif target == gpu.cpu:
                self.duplex(gpu.node, gpu.cpu, rate, "nvlink", NVLINK_ALPHA_US, 0.0)
            elif target is not None:
                self.link(gpu.node, target, rate, "nvlink", NVLINK_ALPHA_US)
        return round(totals.get(None, 0.0) / each)

    def nvswitch(self) -> int:
        """The node that stands for all NVSwitches of the file, also where they join several hosts."""
        for at, node in enumerate(self.nodes):
            if node.name == "nvswitch":
                return at
        self.nodes.append(Node(name="nvswitch", kind="switch", host=0 if len(self.hosts) == 1 else -1))
        return len(self.nodes) - 1

    def node(self, label: str, kind: str, host: int) -> int:
        if len(self.nodes) >= MAX_PARTS:
            raise InvalidInput(f"system: more than {MAX_PARTS} processors, bridges, GPUs and NICs")
        self.nodes.append(Node(name=label if host == 0 else f"s{host}.{label}", kind=kind, host=host))
        return len(self.nodes) - 1

    def link(self, a: int, b: int, rate: float, channel: str, alpha_us: float) -> None:
        self.links.append(Link(src=a, dst=b, alpha_us=alpha_us, gb_per_s=rate, channel=channel))

    def duplex(self, a: int, b: int, rate: float, channel: str, there_us: float, back_us: float) -> None:
        self.link(a, b, rate, channel, there_us)
        self.link(b, a, rate, channel, back_us)

    def _order(self) -> list[int]:
        """The order of nodes: GPUs by rank (by device number where the file has no ranks), then all other nodes."""
        key = "rank" if all(gpu.element.get("rank") is not None for gpu in self.gpus) else "dev"
        numbers = [(_int(gpu.element, gpu.path, key, at, 0, 1 << 20), gpu.node) for at, gpu in enumerate(self.gpus)]
        first = [node for _, node in sorted(numbers)]
        return [*first, *(at for at in range(len(self.nodes)) if self.nodes[at].kind != "device")]

    def ordered(self) -> list[Node]:
        return [self.nodes[at] for at in self._order()]

    def renumbered(self) -> list[Link]:
        new = {old: at for at, old in enumerate(self._order())}
        return [
            Link(src=new[x.src], dst=new[x.dst], alpha_us=x.alpha_us, gb_per_s=x.gb_per_s, channel=x.channel)
            for x in self.links
        ]


def _pci_gb_per_s(element: Element, path: str) -> float:
    lanes = _int(element, path, "link_width", 0, 0, 64) or 16
    speed = re.match(r"[\d.]{1,8}", element.get("link_speed", ""))
    try:
        rate = float(speed[0]) if speed else 8.0
    except ValueError:
        rate = 8.0
    return lanes * _LANE_GBIT.get(rate, _LANE_GBIT[8.0]) / 8


def _net_gb_per_s(element: Element, path: str) -> float:
    speed = _int(element, path, "speed", 0, -(1 << 31), 10**9)
    return (speed if speed > 0 else 10_000) / 8000


def _socket_gb_per_s(element: Element, path: str) -> float:
    arch, vendor = element.get("arch", "x86_64"), element.get("vendor", "")
    if arch != "x86_64":
        return 32.0 if arch == "ppc64" else 6.0
    family = _int(element, path, "familyid", 0, 0, 1 << 16)
    model = _int(element, path, "modelid", 0, 0, 1 << 16)
    if vendor == "AuthenticAMD":
        return 32.0 if family in (26, 0xBF) else 24.0 if family in (25, 0xAF) else 16.0
    if vendor == "GenuineIntel" and family == 6 and model >= 0x55:
        return 40.0 if model >= 0xCF or model in (0xAD, 0xAE, 0xAF) else 22.0 if model >= 0x8F else 10.0
    return 6.0


def _int(element: Element, path: str, key: str, default: int, low: int, high: int) -> int:
    text = element.get(key)
    if text is None:
        return default
    try:
        value = int(text[:20], 16 if text.startswith("0x") else 10)
    except ValueError:
        raise InvalidInput(f"{path}.{key}: must be a whole number, not {text[:40]!r}") from None
    if not low <= value <= high:
        raise InvalidInput(f"{path}.{key}: must be {low}..{high}, not {value}")
    return value


def _float(element: Element, path: str, key: str) -> float:
    text = element.get(key, "0")
    try:
        value = float(text[:40])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise InvalidInput(f"{path}.{key}: must be a number >= 0, not {text[:40]!r}")
    return value
