# SPDX-License-Identifier: Apache-2.0
"""SYNDICATE's HGX-2 node: two disjoint channels, NVLink + RDMA and PCIe + Ethernet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..model import Cluster
from ..wiring import (
    ETHERNET_ALPHA_US,
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

NIC_GB_PER_S = 12.5
INCAST = ((33, 0.9), (65, 0.75), (129, 0.65), (257, 0.6))
"""Assumed: the share of a NIC's rate that is left from so many concurrent flows on. The paper shows that more senders
into one port lose throughput (its figure 17: 128, 64 and 32 destinations at a time win small, medium and large
all-to-alls) but gives no numbers; these are chosen so that its order appears. The preset `hgx2_no_incast` has no such
curve, so that a plan's gain there does not rest on these numbers (docs/calibration.md has both)."""


@register(
    "hgx2",
    "HGX-2 (SYNDICATE): 8 V100, NVLink+RDMA beside PCIe+Ethernet",
    default_nodes=16,
    devices_per_node=8,
)
def hgx2(name: str, nodes: int) -> Cluster:
    """1.2 TB/s one way per node over NVSwitch, 8 RoCE NICs and 2 host NICs of 100 Gb/s each."""
    notes = (
        "assumed: incast leaves a NIC "
        + ", ".join(f"{share:.0%} of its rate from {flows} flows on" for flows, share in INCAST)
        + " (preset hgx2_no_incast: nothing is lost)",
    )
    return _with_incast(_hgx2(name, nodes, notes))


@register(
    "hgx2_no_incast",
    "HGX-2 as hgx2, where many senders into one NIC lose nothing",
    default_nodes=16,
    devices_per_node=8,
)
def hgx2_no_incast(name: str, nodes: int) -> Cluster:
    """The links of `hgx2` without its assumed incast curve."""
    return _hgx2(name, nodes, ("assumed: many flows into one NIC lose no throughput (preset hgx2: they do)",))


def _hgx2(name: str, nodes: int, incast_notes: tuple[str, ...]) -> Cluster:
    hosts = np.arange(nodes)
    wiring = Wiring(host_names(nodes, numbered("gpu", 8)), hosts=np.repeat(hosts, 8))
    gpus = wiring.devices.reshape(nodes, 8)
    hubs = wiring.add(host_names(nodes, ["nvswitch"]), kind="switch", hosts=hosts)
    cpus = wiring.add(host_names(nodes, numbered("cpu", 2)), kind="switch", hosts=np.repeat(hosts, 2))
    cpus = cpus.reshape(nodes, 2)
    wiring.duplex(gpus, hubs[:, None], gb_per_s=1200 / 8, alpha_us=NVLINK_ALPHA_US, back_us=0.0, channel="nvlink")
    wiring.duplex(
        gpus,
        np.repeat(cpus, 4, axis=1),
        gb_per_s=PCIE3_GB_PER_S,
        alpha_us=PCIE_ALPHA_US,
        back_us=0.0,
        channel="pcie",
    )
    wiring.duplex(cpus[:, 0], cpus[:, 1], gb_per_s=SOCKET_GB_PER_S, alpha_us=0.0, channel="pcie")
    if nodes > 1:
        _network(wiring, gpus, cpus)
    notes = (
        f"assumed: latency {NVLINK_ALPHA_US:g} us over NVSwitch, {RDMA_ALPHA_US:g} us RDMA, "
        f"{PCIE_ALPHA_US:g} us PCIe, {ETHERNET_ALPHA_US:g} us TCP",
        f"assumed: PCIe {PCIE3_GB_PER_S:g} GB/s one way per GPU, {SOCKET_GB_PER_S:g} GB/s between the "
        "sockets; each socket holds 4 GPUs and a host NIC",
        *incast_notes,
        "assumed: an RDMA NIC and the host share no PCIe link, so that channels nvlink+rdma and pcie+ethernet share no "
        "link; on the real node GPUDirect RDMA crosses the same PCIe switch as copies to the host",
    )
    return wiring.cluster(f"{name}:{nodes}", notes=notes)


def _with_incast(cluster: Cluster) -> Cluster:
    """Give the links from the network's switches into the NICs the curve `INCAST`."""
    if cluster.num_hosts == 1:
        return cluster
    network = [cluster.node_names.index(name) for name in ("roce", "ethernet")]
    into_nic = np.isin(cluster.link_src, network)
    return replace(cluster, link_incast=np.where(into_nic, 0, -1).astype(np.int16), incast_curves=(INCAST,))


def _network(wiring: Wiring, gpus: np.ndarray, cpus: np.ndarray) -> None:
    nodes = len(gpus)
    hosts = np.arange(nodes)
    nics = wiring.add(host_names(nodes, numbered("nic", 8)), kind="nic", hosts=np.repeat(hosts, 8))
    host_nics = wiring.add(host_names(nodes, numbered("eth", 2)), kind="nic", hosts=np.repeat(hosts, 2))
    roce, ethernet = wiring.add(["roce", "ethernet"], kind="switch")
    wiring.duplex(gpus.ravel(), nics, gb_per_s=PCIE3_GB_PER_S, alpha_us=0.0, channel="rdma")
    wiring.duplex(nics, roce, gb_per_s=NIC_GB_PER_S, alpha_us=RDMA_ALPHA_US, back_us=0.0, channel="rdma")
    wiring.duplex(cpus.ravel(), host_nics, gb_per_s=PCIE3_GB_PER_S, alpha_us=0.0, channel="ethernet")
    wiring.duplex(
        host_nics,
        ethernet,
        gb_per_s=NIC_GB_PER_S,
        alpha_us=ETHERNET_ALPHA_US,
        back_us=0.0,
        channel="ethernet",
    )
