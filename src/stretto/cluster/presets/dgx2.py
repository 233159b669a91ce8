# SPDX-License-Identifier: Apache-2.0
"""NVIDIA DGX-2: 16 V100 on NVSwitch, 8 NICs, each shared by a pair of GPUs."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import NVLINK_ALPHA_US, PCIE3_GB_PER_S, RDMA_ALPHA_US, Wiring, host_names, numbered
from .registry import register


@register("dgx2", "DGX-2 (TACCL): 16 V100 on NVSwitch, 8 NICs shared by pairs", default_nodes=1, devices_per_node=16)
def dgx2(name: str, nodes: int) -> Cluster:
    """TACCL's figures: NVSwitch 0.3 us and 8 us/MB per GPU port, InfiniBand 2.6 us and 105 us/MB per NIC."""
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", 16)), hosts=np.repeat(hosts, 16))
    gpus = wiring.devices.reshape(nodes, 16)
    hubs = wiring.add(host_names(nodes, ["nvswitch"]), kind="switch", hosts=hosts)
    wiring.duplex(gpus, hubs[:, None], gb_per_s=1000 / 8, alpha_us=NVLINK_ALPHA_US, back_us=0.0, channel="nvlink")
    notes: tuple[str, ...] = ()
    if nodes > 1:
        nics = wiring.add(host_names(nodes, numbered("nic", 8)), kind="nic", hosts=np.repeat(hosts, 8))
        fabric = wiring.add(["ib"], kind="switch")
        nics = nics.reshape(nodes, 8)
        wiring.duplex(gpus, np.repeat(nics, 2, axis=1), gb_per_s=PCIE3_GB_PER_S, alpha_us=0.0, channel="pcie")
        wiring.duplex(nics, fabric, gb_per_s=1000 / 105, alpha_us=RDMA_ALPHA_US, back_us=0.0, channel="rdma")
        notes = (f"assumed: PCIe {PCIE3_GB_PER_S:g} GB/s one way between a GPU and its NIC",)
    return wiring.cluster(f"{name}:{nodes}", notes=notes)


@register(
    "dgx2_teccl",
    "DGX-2 as TE-CCL models it: odd GPUs send, even ones receive",
    default_nodes=1,
    devices_per_node=16,
)
def dgx2_teccl(name: str, nodes: int) -> Cluster:
    """125 GB/s and 0.35 us on each side of the NVSwitch; 8 NIC links of 12.5 GB/s and 2.6 us per host."""
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", 16)), hosts=np.repeat(hosts, 16))
    gpus = wiring.devices.reshape(nodes, 16)
    hubs = wiring.add(host_names(nodes, ["nvswitch"]), kind="switch", hosts=hosts)
    wiring.duplex(gpus, hubs[:, None], gb_per_s=125.0, alpha_us=0.35, channel="nvlink")
    senders, receivers = gpus[:, 1::2], gpus[:, ::2]
    notes: tuple[str, ...] = ()
    if nodes == 2:
        wiring.link(senders, receivers[::-1], gb_per_s=12.5, alpha_us=2.6, channel="rdma")
    elif nodes > 2:
        fabric = wiring.add(["ib"], kind="switch")
        wiring.link(senders, fabric, gb_per_s=12.5, alpha_us=2.6, channel="rdma")
        wiring.link(fabric, receivers, gb_per_s=12.5, alpha_us=0.0, channel="rdma")
        notes = ("assumed: from three hosts on one switch joins them (TE-CCL publishes two hosts only)",)
    return wiring.cluster(f"{name}:{nodes}", devices_forward=True, notes=notes)
