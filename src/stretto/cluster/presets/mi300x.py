# SPDX-License-Identifier: Apache-2.0
"""AMD MI300X box: 8 GPUs, each linked to every other, a NIC per GPU."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import NVLINK_ALPHA_US, RDMA_ALPHA_US, Wiring, host_names, numbered
from .registry import register

XGMI_GB_PER_S = 64.0
"""One Infinity Fabric link each way: 128 GB/s both ways, seven links a GPU."""


@register("mi300x", "8 MI300X, each linked to every other, 50 GB/s NIC each", default_nodes=1, devices_per_node=8)
def mi300x(name: str, nodes: int) -> Cluster:
    """64 GB/s each way between any two GPUs of a box; with several boxes a 50 GB/s NIC per GPU on its rail switch."""
    wiring = Wiring(host_names(nodes, numbered("gpu", 8)), hosts=np.repeat(np.arange(nodes), 8))
    gpus = wiring.devices.reshape(nodes, 8)
    first, second = np.triu_indices(8, 1)
    wiring.duplex(gpus[:, first], gpus[:, second], gb_per_s=XGMI_GB_PER_S, alpha_us=NVLINK_ALPHA_US, channel="xgmi")
    notes = [
        "source: AMD's data sheet of the MI300X platform (128 GB/s both ways per Infinity Fabric link, seven per GPU)",
        f"assumed: latency {NVLINK_ALPHA_US:g} us per link, {RDMA_ALPHA_US:g} us between boxes, 400 Gbit/s NICs",
    ]
    if nodes > 1:
        rails = wiring.add(numbered("rail", 8), kind="switch")
        wiring.duplex(gpus, rails, gb_per_s=50.0, alpha_us=RDMA_ALPHA_US, back_us=0.0, channel="rdma")
        notes.append("a GPU passes traffic on to a GPU of another rail")
    return wiring.cluster(f"{name}:{nodes}", devices_forward=True, notes=notes)
