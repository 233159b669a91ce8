# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU, which is how programs for GPUs are tested where there is one: its memory is every link."""

from __future__ import annotations

import numpy as np

from ..model import Cluster
from ..wiring import Wiring, numbered
from .registry import register


@register("shared_gpu", "ranks that share one GPU (MPS): its memory is all links", default_nodes=8, max_nodes=64)
def shared_gpu(name: str, nodes: int, *, gb_per_s: float = 1600.0) -> Cluster:
    """Ranks on one GPU.

    Args:
        name: The registered name.
        nodes: The number of ranks.
        gb_per_s: What the GPU copies for all messages of all ranks together; by default an H200's.

    Returns:
        The cluster.
    """
    wiring = Wiring(numbered("rank", nodes), hosts=np.zeros(nodes, np.int32))
    memory = wiring.add(["read", "write"], kind="switch", hosts=0)
    wiring.link(wiring.devices, np.repeat(memory[0], nodes), gb_per_s=gb_per_s, alpha_us=0.0, channel="hbm")
    wiring.link(memory[:1], memory[1:], gb_per_s=gb_per_s, alpha_us=0.0, channel="hbm")
    wiring.link(np.repeat(memory[1], nodes), wiring.devices, gb_per_s=gb_per_s, alpha_us=0.0, channel="hbm")
    notes = ("assumed: an H200 copies 1600 GB/s for all ranks together (all-gathers of 64 MB reach 1450 to 1550)",)
    return wiring.cluster(f"{name}:{nodes}", notes=notes)
