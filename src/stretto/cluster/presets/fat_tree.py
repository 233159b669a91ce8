# SPDX-License-Identifier: Apache-2.0
"""A three-level fat tree of k-port switches with full bisection bandwidth."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..model import Cluster
from ..wiring import Wiring, numbered
from .registry import register
from .regular import ALPHA_US, GB_PER_S


@register("fat_tree", "devices under a three-level fat tree of equal switches", default_nodes=16)
def fat_tree(name: str, nodes: int, *, gb_per_s: float = GB_PER_S, alpha_us: float = ALPHA_US) -> Cluster:
    """The smallest even k with k^3/4 >= nodes; k/2 devices per edge switch, k/2 edges per pod.

    Levels that `nodes` does not need are left out. `alpha_us` is paid at every hop upwards, so a path pays
    it once within an edge switch, twice within a pod and three times between pods.

    Args:
        name: The name of the preset.
        nodes: How many devices, >= 1.
        gb_per_s: The rate of each link and direction, > 0.
        alpha_us: The latency of each hop upwards, >= 0.

    Returns:
        The cluster.
    """
    half = 1
    while 2 * half**3 < nodes:
        half += 1
    wiring = Wiring(numbered("d", nodes))

    def wire(lower: ArrayLike, upper: ArrayLike) -> None:
        wiring.duplex(lower, upper, gb_per_s=gb_per_s, alpha_us=alpha_us, back_us=0.0, channel="link")

    edge_of = np.arange(nodes) // half
    edges = wiring.add(numbered("edge", int(edge_of[-1]) + 1), kind="switch")
    wire(wiring.devices, edges[edge_of])
    if len(edges) > 1:
        pod_of = np.arange(len(edges)) // half
        pods = int(pod_of[-1]) + 1
        middle = wiring.add(numbered("agg", pods * half), kind="switch").reshape(pods, half)
        wire(edges[:, None], middle[pod_of])
        if pods > 1:
            core = wiring.add(numbered("core", half * half), kind="switch").reshape(half, half)
            wire(middle[:, :, None], core[None])
    notes = (f"fat tree of {2 * half}-port switches; {2 * half**3} devices would fill it",)
    return wiring.cluster(f"{name}:{nodes}", notes=notes)
