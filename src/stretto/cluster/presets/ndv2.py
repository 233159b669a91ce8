# SPDX-License-Identifier: Apache-2.0
"""Azure NDv2: 8 V100 in an NVLink cube-mesh, four PCIe switches, one InfiniBand NIC."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import (
    NVLINK_ALPHA_US,
    PCIE3_GB_PER_S,
    PCIE_ALPHA_US,
    RDMA_ALPHA_US,
    SOCKET_GB_PER_S,
    Wiring,
    host_names,
    numbered,
)
from .registry import register

DOUBLE = ((0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7))
SINGLE = ((0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6))


def cube_mesh(wiring: Wiring, gpus: np.ndarray, *, double: float, single: float, alpha_us: float) -> None:
    """Add the NVLinks among each row of eight GPUs, both directions.

    Args:
        wiring: The builder to add the links to.
        gpus: Node ids, one row of eight per host.
        double: The rate in GB/s of a pair with two NVLinks.
        single: The rate in GB/s of a pair with one NVLink.
        alpha_us: The latency of a link, >= 0.
    """
    for pairs, rate in ((DOUBLE, double), (SINGLE, single)):
        first, second = np.array(pairs).T
        wiring.duplex(gpus[:, first], gpus[:, second], gb_per_s=rate, alpha_us=alpha_us, channel="nvlink")


@register("ndv2", "Azure NDv2 (TACCL): 8 V100 in an NVLink cube-mesh, 1 NIC", default_nodes=1, devices_per_node=8)
def ndv2(name: str, nodes: int) -> Cluster:
    """TACCL's figures: NVLink 0.3 us and 23 (double) or 46 us/MB, InfiniBand 2.6 us and 105 us/MB."""
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", 8)), hosts=np.repeat(hosts, 8))
    gpus = wiring.devices.reshape(nodes, 8)
    switches = wiring.add(host_names(nodes, numbered("pcie", 4)), kind="switch", hosts=np.repeat(hosts, 4))
    cpus = wiring.add(host_names(nodes, numbered("cpu", 2)), kind="switch", hosts=np.repeat(hosts, 2))
    switches, cpus = switches.reshape(nodes, 4), cpus.reshape(nodes, 2)
    cube_mesh(wiring, gpus, double=1000 / 23, single=1000 / 46, alpha_us=NVLINK_ALPHA_US)
    pcie = PCIE3_GB_PER_S
    wiring.duplex(gpus, np.repeat(switches, 2, axis=1), gb_per_s=pcie, alpha_us=0.0, channel="pcie")
    wiring.duplex(
        switches,
        np.repeat(cpus, 2, axis=1),
        gb_per_s=pcie,
        alpha_us=PCIE_ALPHA_US,
        back_us=0.0,
        channel="pcie",
    )
    wiring.duplex(cpus[:, 0], cpus[:, 1], gb_per_s=SOCKET_GB_PER_S, alpha_us=0.0, channel="pcie")
    if nodes > 1:
        nics = wiring.add(host_names(nodes, ["nic"]), kind="nic", hosts=hosts)
        fabric = wiring.add(["ib"], kind="switch")
        wiring.duplex(switches[:, 0], nics, gb_per_s=pcie, alpha_us=0.0, channel="pcie")
        wiring.duplex(nics, fabric, gb_per_s=1000 / 105, alpha_us=RDMA_ALPHA_US, back_us=0.0, channel="rdma")
    notes = (
        f"assumed: PCIe {pcie:g} GB/s one way, {SOCKET_GB_PER_S:g} GB/s between the sockets, "
        f"{PCIE_ALPHA_US:g} us for a path through a CPU; TACCL gives no PCIe figures",
        "assumed: PCIe switch k holds GPUs 2k and 2k+1; the NIC hangs on switch 0",
    )
    return wiring.cluster(f"{name}:{nodes}", notes=notes)


@register("ndv2_teccl", "NDv2 as TE-CCL models it: GPUs forward, no PCIe", default_nodes=1, devices_per_node=8)
def ndv2_teccl(name: str, nodes: int) -> Cluster:
    """NVLink 50/25 GB/s, 0.7 us; GPU 0 sends and GPU 1 receives over a NIC of 12.5 GB/s and 1.3 us."""
    wiring = Wiring(host_names(nodes, numbered("gpu", 8)), hosts=np.repeat(np.arange(nodes), 8))
    gpus = wiring.devices.reshape(nodes, 8)
    cube_mesh(wiring, gpus, double=50.0, single=25.0, alpha_us=0.7)
    if nodes == 2:
        wiring.link(gpus[:, 0], gpus[::-1, 1], gb_per_s=12.5, alpha_us=1.3, channel="rdma")
    elif nodes > 2:
        fabric = wiring.add(["ib"], kind="switch")
        wiring.link(gpus[:, 0], fabric, gb_per_s=12.5, alpha_us=1.3, channel="rdma")
        wiring.link(fabric, gpus[:, 1], gb_per_s=12.5, alpha_us=1.3, channel="rdma")
    return wiring.cluster(f"{name}:{nodes}", devices_forward=True)
