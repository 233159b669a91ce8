# SPDX-License-Identifier: Apache-2.0
"""AutoDist's Table 1: clusters A1, A2 and B1..B12, with the GPUs that they have and how these compare."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import Cluster
from ..cluster.presets.autodist import CLUSTERS, G3_4, G3_16, G4DN_2, G4DN_12, TITAN
from ..errors import unknown
from .zoo import DEVICES

GPU_OF_HOST = {TITAN: "titan_x", G3_4: "m60", G3_16: "m60", G4DN_2: "t4", G4DN_12: "t4"}


@dataclass(frozen=True, kw_only=True, eq=False)
class PaperCluster:
    """A cluster, its fastest GPU (for which a model's times are made), and the slowdown of each rank relative to it."""

    name: str
    cluster: Cluster
    device: str
    slowdown: tuple[float, ...] = ()


def paper_cluster(name: str) -> PaperCluster:
    """A cluster of the AutoDist paper by its name there.

    >>> mixed = paper_cluster("b10")
    >>> mixed.device, [round(factor, 2) for factor in mixed.slowdown[3:5]], paper_cluster("b9").slowdown
    ('t4', [1.69, 1.0], ())
    """
    if name not in CLUSTERS:
        raise unknown("cluster of the paper", name, CLUSTERS)
    hosts = CLUSTERS[name]
    gpus = [GPU_OF_HOST[host] for host in hosts for _ in range(host.gpus)]
    fastest = max(set(gpus), key=lambda gpu: DEVICES[gpu].tflops["fp32"])
    ratios = tuple(DEVICES[fastest].tflops["fp32"] / DEVICES[gpu].tflops["fp32"] for gpu in gpus)
    return PaperCluster(
        name=name, cluster=Cluster.preset(f"autodist_{name}"), device=fastest,
        slowdown=ratios if len(set(ratios)) > 1 else (),
    )  # fmt: skip


__all__ = ["CLUSTERS", "PaperCluster", "paper_cluster"]
