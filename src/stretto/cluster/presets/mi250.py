# SPDX-License-Identifier: Apache-2.0
"""AMD MI250 box: 16 GCDs with direct links."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import NVLINK_ALPHA_US, RDMA_ALPHA_US, Wiring, host_names, numbered
from .registry import register

UNIT_GB_PER_S = 50.0
# (GCD, GCD, how many links of 50 GB/s)
LINKS = (
    (0, 1, 4), (0, 4, 2), (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 3, 4), (2, 6, 1), (2, 9, 1),
    (2, 10, 1), (3, 7, 2), (3, 11, 1), (4, 5, 4), (4, 6, 1), (5, 6, 1), (5, 7, 1), (6, 7, 4),
    (8, 9, 4), (8, 12, 2), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2), (12, 13, 4), (12, 14, 1),
    (13, 14, 1), (13, 15, 1), (14, 15, 4),
)  # fmt: skip


@register(
    "mi250",
    "16 MI250 GCDs with direct links, 16 GB/s each to other boxes",
    default_nodes=1,
    devices_per_node=16,
)
def mi250(name: str, nodes: int) -> Cluster:
    """Links in units of 50 GB/s; with several boxes each GCD has 16 GB/s to one switch between the boxes."""
    wiring = Wiring(host_names(nodes, numbered("gcd", 16)), hosts=np.repeat(np.arange(nodes), 16))
    gcds = wiring.devices.reshape(nodes, 16)
    for width in (4, 2, 1):
        first, second = np.array([(a, b) for a, b, n in LINKS if n == width]).T
        wiring.duplex(
            gcds[:, first],
            gcds[:, second],
            gb_per_s=width * UNIT_GB_PER_S,
            alpha_us=NVLINK_ALPHA_US,
            channel="xgmi",
        )
    if nodes > 1:
        fabric = wiring.add(["fabric"], kind="switch")
        wiring.duplex(gcds, fabric, gb_per_s=16.0, alpha_us=RDMA_ALPHA_US, back_us=0.0, channel="rdma")
    notes = (f"assumed: latency {NVLINK_ALPHA_US:g} us per direct link, {RDMA_ALPHA_US:g} us between boxes",)
    return wiring.cluster(f"{name}:{nodes}", devices_forward=True, notes=notes)
