# SPDX-License-Identifier: Apache-2.0
"""AWS p3.8xlarge: 4 V100 with NVLink, one 10 Gb/s NIC per host."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import ETHERNET_ALPHA_US, NVLINK_ALPHA_US, PCIE3_GB_PER_S, Wiring, host_names, numbered
from .registry import register

NVLINK_GB_PER_S = 25.0


@register("p3_8xlarge", "AWS p3.8xlarge: 4 V100 with NVLink, 10 Gb/s NIC", default_nodes=2, devices_per_node=4)
def p3_8xlarge(name: str, nodes: int) -> Cluster:
    """The machine of the cross-mesh resharding paper: four GPUs per host with NVLink.

    The host's NIC (10 Gb/s, full duplex) is the bottleneck between hosts.
    """
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", 4)), hosts=np.repeat(hosts, 4))
    gpus = wiring.devices.reshape(nodes, 4)
    first, second = np.triu_indices(4, 1)
    wiring.duplex(gpus[:, first], gpus[:, second], gb_per_s=NVLINK_GB_PER_S, alpha_us=NVLINK_ALPHA_US, channel="nvlink")
    if nodes > 1:
        nics = wiring.add(host_names(nodes, ["nic"]), kind="nic", hosts=hosts)
        fabric = wiring.add(["ethernet"], kind="switch")
        wiring.duplex(gpus, nics[:, None], gb_per_s=PCIE3_GB_PER_S, alpha_us=0.0, channel="pcie")
        wiring.duplex(nics, fabric, gb_per_s=10 / 8, alpha_us=ETHERNET_ALPHA_US, back_us=0.0, channel="ethernet")
    notes = (
        f"assumed: one NVLink of {NVLINK_GB_PER_S:g} GB/s between every two GPUs, {NVLINK_ALPHA_US:g} us",
        f"assumed: PCIe {PCIE3_GB_PER_S:g} GB/s one way to the NIC, {ETHERNET_ALPHA_US:g} us for TCP",
    )
    return wiring.cluster(f"{name}:{nodes}", notes=notes)
