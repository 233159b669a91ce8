# SPDX-License-Identifier: Apache-2.0
"""GB200 NVL72: 72 GPUs of 18 trays on one NVLink domain, a NIC per GPU."""

from __future__ import annotations

import numpy as np

from ...errors import InvalidInput
from ..model import Cluster
from ..wiring import NVLINK_ALPHA_US, RDMA_ALPHA_US, Wiring, host_names, numbered
from .registry import register

TRAYS, GPUS_PER_TRAY = 18, 4
NVLINK5_GB_PER_S = 900.0
"""NVLink 5: 1.8 TB/s of a GPU, both ways together."""
NIC_GB_PER_S = 50.0
"""ConnectX-7, 400 Gbit/s, one for each GPU."""


@register(
    "gb200_nvl72",
    "racks of 72 GB200 GPUs on one NVSwitch domain, 50 GB/s NIC each",
    default_nodes=1,
    devices_per_node=TRAYS * GPUS_PER_TRAY,
)
def gb200_nvl72(name: str, nodes: int, *, trays: int = TRAYS) -> Cluster:
    """900 GB/s per GPU each way inside a rack; a host is a tray of four; racks meet on four rails of 50 GB/s NICs.

    Args:
        name: the name of the preset.
        nodes: the number of racks.
        trays: the trays of each rack that are part of the cluster: a job of 64 GPUs on a rack has 16.

    Returns:
        The cluster.

    Raises:
        InvalidInput: a rack has no such number of trays.
    """
    if not 1 <= trays <= TRAYS:
        raise InvalidInput(f"trays: a rack has 1..{TRAYS}, not {trays}")
    per_rack, full = trays * GPUS_PER_TRAY, trays == TRAYS
    trays *= nodes
    wiring = Wiring(host_names(trays, numbered("gpu", GPUS_PER_TRAY)), hosts=np.repeat(np.arange(trays), GPUS_PER_TRAY))
    racks = wiring.devices.reshape(nodes, per_rack)
    hubs = wiring.add(numbered("nvswitch", nodes), kind="switch")
    wiring.duplex(
        racks, hubs[:, None], gb_per_s=NVLINK5_GB_PER_S, alpha_us=NVLINK_ALPHA_US, back_us=0.0, channel="nvlink"
    )
    notes = [
        "sources: NVIDIA's data sheet of the GB200 NVL72 (1.8 TB/s NVLink per GPU both ways, 400 Gbit/s NICs)",
        f"assumed: latency {NVLINK_ALPHA_US:g} us over NVSwitch, {RDMA_ALPHA_US:g} us between racks",
    ]
    if nodes > 1:
        rails = wiring.add(numbered("rail", GPUS_PER_TRAY), kind="switch")
        wiring.duplex(
            wiring.devices.reshape(trays, GPUS_PER_TRAY),
            rails,
            gb_per_s=NIC_GB_PER_S,
            alpha_us=RDMA_ALPHA_US,
            back_us=0.0,
            channel="rdma",
        )
        notes.append("a GPU passes traffic on to a GPU of another rail (as NCCL's PXN does)")
    return wiring.cluster(
        f"{name}:{nodes}" + ("" if full else f",trays={trays // nodes}"), devices_forward=True, notes=notes
    )
