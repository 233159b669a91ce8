# SPDX-License-Identifier: Apache-2.0
"""DGX A100, H100 and H200: 8 GPUs on NVSwitch, a NIC per GPU, NICs spread over rail switches."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import (
    NVLINK_ALPHA_US,
    PCIE4_GB_PER_S,
    PCIE5_GB_PER_S,
    RDMA_ALPHA_US,
    Wiring,
    host_names,
    numbered,
)
from .registry import register


def _box(name: str, nodes: int, *, nvlink: float, nic: float, pcie: float, rails: int, spine: bool = False) -> Cluster:
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", 8)), hosts=np.repeat(hosts, 8))
    gpus = wiring.devices.reshape(nodes, 8)
    hubs = wiring.add(host_names(nodes, ["nvswitch"]), kind="switch", hosts=hosts)
    wiring.duplex(gpus, hubs[:, None], gb_per_s=nvlink, alpha_us=NVLINK_ALPHA_US, back_us=0.0, channel="nvlink")
    notes = [f"assumed: latency {NVLINK_ALPHA_US:g} us over NVSwitch, {RDMA_ALPHA_US:g} us between hosts"]
    if nodes > 1:
        nics = wiring.add(host_names(nodes, numbered("nic", 8)), kind="nic", hosts=np.repeat(hosts, 8))
        fabric = wiring.add(numbered("rail", rails), kind="switch")
        wiring.duplex(gpus.ravel(), nics, gb_per_s=pcie, alpha_us=0.0, channel="pcie")
        wiring.duplex(
            nics.reshape(nodes, 8),
            fabric[np.arange(8) % rails],
            gb_per_s=nic,
            alpha_us=RDMA_ALPHA_US,
            back_us=0.0,
            channel="rdma",
        )
        if spine:
            top = wiring.add(["spine"], kind="switch")
            up = nodes * 8 // rails * nic
            wiring.duplex(fabric, top, gb_per_s=up, alpha_us=0.0, channel="rdma")
            notes.append(f"assumed: {up:g} GB/s from a rail switch to the spine, so that it never limits")
        notes.append(f"assumed: PCIe {pcie:g} GB/s one way between a GPU and its NIC")
        notes.append("a GPU passes traffic on to a GPU of another rail (as NCCL's PXN does)")
    return wiring.cluster(f"{name}:{nodes}", devices_forward=True, notes=notes)


@register(
    "dgx_a100",
    "8 A100 on NVSwitch, 25 GB/s NIC each, even and odd rails",
    default_nodes=1,
    devices_per_node=8,
)
def dgx_a100(name: str, nodes: int) -> Cluster:
    """300 GB/s per GPU each way; with several hosts a 25 GB/s NIC per GPU on an even or an odd switch."""
    return _box(name, nodes, nvlink=300.0, nic=25.0, pcie=PCIE4_GB_PER_S, rails=2)


@register("dgx_h100", "8 H100 on NVSwitch, 50 GB/s NIC each, eight rails", default_nodes=1, devices_per_node=8)
def dgx_h100(name: str, nodes: int) -> Cluster:
    """450 GB/s per GPU each way; with several hosts a 50 GB/s NIC per GPU, NIC r on rail switch r."""
    return _box(name, nodes, nvlink=450.0, nic=50.0, pcie=PCIE5_GB_PER_S, rails=8)


@register(
    "dgx_h100_spine",
    "dgx_h100 with a spine switch over its rails",
    default_nodes=2,
    devices_per_node=8,
)
def dgx_h100_spine(name: str, nodes: int) -> Cluster:
    """The links of `dgx_h100`, and a spine that joins the rails without being a bottleneck."""
    return _box(name, nodes, nvlink=450.0, nic=50.0, pcie=PCIE5_GB_PER_S, rails=8, spine=True)


@register("dgx_h200", "8 H200 on NVSwitch, 50 GB/s NIC each, eight rails", default_nodes=1, devices_per_node=8)
def dgx_h200(name: str, nodes: int) -> Cluster:
    """The links of a DGX H100: an H200 has other memory, and the same NVLink 4 (900 GB/s both ways) and NICs."""
    return _box(name, nodes, nvlink=450.0, nic=50.0, pcie=PCIE5_GB_PER_S, rails=8)
