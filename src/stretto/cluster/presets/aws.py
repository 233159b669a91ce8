# SPDX-License-Identifier: Apache-2.0
"""AWS p4d.24xlarge and p5.48xlarge: eight GPUs on NVSwitch, EFA between hosts.

Figures are those of AWS's instance pages: p4d has 8 A100 with 600 GB/s of NVSwitch bandwidth each (both directions
together) and 4 network cards of 100 Gb/s, each behind the PCIe switch of two GPUs; p5 has 8 H100 with 900 GB/s each and
32 network cards of 100 Gb/s, four for each GPU.
"""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import NVLINK_ALPHA_US, PCIE4_GB_PER_S, PCIE5_GB_PER_S, Wiring, host_names, numbered
from .registry import register

GPUS = 8
CARD_GB_PER_S = 100 / 8
EFA_ALPHA_US = 15.0
"""Assumed: the latency of a message over EFA, of the order of its MPI ping-pongs; AWS's pages give none."""


@register("p4d_24xlarge", "AWS p4d.24xlarge: 8 A100, 4 x 100 Gb/s EFA", default_nodes=2, devices_per_node=GPUS)
def p4d_24xlarge(name: str, nodes: int) -> Cluster:
    """Two GPUs share a card of 100 Gb/s, so that a host sends 50 GB/s."""
    return _instance(f"{name}:{nodes}", nodes, 300.0, 4, CARD_GB_PER_S, PCIE4_GB_PER_S)


@register("p5_48xlarge", "AWS p5.48xlarge: 8 H100, 32 x 100 Gb/s EFA", default_nodes=2, devices_per_node=GPUS)
def p5_48xlarge(name: str, nodes: int) -> Cluster:
    """Each GPU has four cards of 100 Gb/s, drawn as one of 50 GB/s: NCCL's plugin stripes messages over them."""
    return _instance(f"{name}:{nodes}", nodes, 450.0, GPUS, 4 * CARD_GB_PER_S, PCIE5_GB_PER_S)


def _instance(name: str, nodes: int, nvlink: float, nics: int, nic: float, pcie: float) -> Cluster:
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", GPUS)), hosts=np.repeat(hosts, GPUS))
    gpus = wiring.devices.reshape(nodes, GPUS)
    switches = wiring.add(host_names(nodes, ["nvswitch"]), kind="switch", hosts=hosts)
    wiring.duplex(gpus, switches[:, None], gb_per_s=nvlink, alpha_us=NVLINK_ALPHA_US, back_us=0.0, channel="nvlink")
    notes = [f"assumed: {NVLINK_ALPHA_US:g} us over NVSwitch"]
    if nodes > 1:
        cards = wiring.add(host_names(nodes, numbered("efa", nics)), kind="nic", hosts=np.repeat(hosts, nics))
        fabric = wiring.add(["fabric"], kind="switch")
        near = np.repeat(cards.reshape(nodes, nics), GPUS // nics, axis=1)
        wiring.duplex(gpus, near, gb_per_s=pcie, alpha_us=0.0, channel="pcie")
        wiring.duplex(cards, fabric, gb_per_s=nic, alpha_us=EFA_ALPHA_US, back_us=0.0, channel="rdma")
        notes.append(f"assumed: {EFA_ALPHA_US:g} us for a message over EFA, whose fabric never blocks")
        notes.append(f"assumed: PCIe {pcie:g} GB/s one way between a GPU and its card")
    return wiring.cluster(name, notes=notes)
