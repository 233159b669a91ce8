# SPDX-License-Identifier: Apache-2.0
"""AutoDist's clusters A1, A2 and B1..B12 (its Table 1): hosts of 1 or 4 GPUs on Ethernet."""

from __future__ import annotations

from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from ..model import NO_CAP, Cluster
from ..wiring import ETHERNET_ALPHA_US, PCIE3_GB_PER_S, PCIE_ALPHA_US, Wiring
from .registry import register


class _Host(NamedTuple):
    gpus: int
    gbit_per_s: int


TITAN = _Host(1, 40)
G3_4, G3_16, G4DN_2, G4DN_12 = _Host(1, 10), _Host(4, 25), _Host(1, 25), _Host(4, 50)

CLUSTERS: dict[str, tuple[_Host, ...]] = {
    "a1": (TITAN,) * 16,
    "a2": (TITAN,) * 11,
    "b1": (G3_16,) * 2,
    "b2": (G3_16,) * 3,
    "b3": (G3_16,) * 4,
    "b4": (G4DN_12,),
    "b5": (G4DN_12,) * 2,
    "b6": (G4DN_12,) * 3,
    "b7": (G4DN_12,) * 4,
    "b8": (G4DN_12,) * 8,
    "b9": (G3_4, G3_16),
    "b10": (G3_16, G4DN_12),
    "b11": (G3_16, G3_16, G4DN_12, G4DN_12),
    "b12": (G4DN_2, G4DN_12),
}
FLOW_GBIT_PER_S = 10


def _build(name: str, nodes: int) -> Cluster:
    table = CLUSTERS[name.removeprefix("autodist_")]
    hosts = list(islice(cycle(table), nodes))
    host_of = np.repeat(np.arange(nodes), [h.gpus for h in hosts])
    wiring = Wiring([f"h{h}.gpu{g}" for h, host in enumerate(hosts) for g in range(host.gpus)], hosts=host_of)
    pcie = wiring.add([f"h{h}.pcie" for h in range(nodes)], kind="switch", hosts=np.arange(nodes))
    wiring.duplex(
        wiring.devices,
        pcie[host_of],
        gb_per_s=PCIE3_GB_PER_S,
        alpha_us=PCIE_ALPHA_US,
        back_us=0.0,
        channel="pcie",
    )
    cloud = name.startswith("autodist_b")
    if nodes > 1:
        nics = wiring.add([f"h{h}.nic" for h in range(nodes)], kind="nic", hosts=np.arange(nodes))
        fabric = wiring.add(["ethernet"], kind="switch")
        wiring.duplex(pcie, nics, gb_per_s=PCIE3_GB_PER_S, alpha_us=0.0, channel="pcie")
        wiring.duplex(
            nics,
            fabric,
            gb_per_s=[h.gbit_per_s / 8 for h in hosts],
            alpha_us=ETHERNET_ALPHA_US,
            back_us=0.0,
            channel="ethernet",
            flow_gb_per_s=FLOW_GBIT_PER_S / 8 if cloud else NO_CAP,
        )
    notes = [
        f"assumed: GPUs of a host meet in one PCIe switch, no NVLink ({PCIE3_GB_PER_S:g} GB/s one way, "
        f"{PCIE_ALPHA_US:g} us); {ETHERNET_ALPHA_US:g} us for a TCP message",
    ]
    if cloud:
        notes.append(f"one flow gets at most {FLOW_GBIT_PER_S} Gb/s (AWS)")
    if len(set(table)) > 1 and nodes != len(table):
        notes.append("the hosts of the paper's table repeat in their order")
    return wiring.cluster(f"{name}:{nodes}", notes=notes)


def _describe(hosts: tuple[_Host, ...]) -> str:
    gpus = "+".join(str(h.gpus) for h in hosts) if len(set(hosts)) > 1 else f"{len(hosts)} x {hosts[0].gpus}"
    rates = "/".join(str(r) for r in dict.fromkeys(h.gbit_per_s for h in hosts))
    return f"{gpus} GPUs, {rates} Gb/s Ethernet"


for _name, _hosts in CLUSTERS.items():
    register(
        f"autodist_{_name}",
        f"AutoDist {_name.upper()}: {_describe(_hosts)}",
        default_nodes=len(_hosts),
        devices_per_node=4,
    )(_build)
