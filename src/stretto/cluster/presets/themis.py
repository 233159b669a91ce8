# SPDX-License-Identifier: Apache-2.0
"""The six networks of Themis' Table 2: per NPU and dimension the aggregate rate and the step latency."""

from __future__ import annotations

import math
from typing import Any

from ...errors import InvalidInput
from ..grid import regular
from ..model import Cluster, Dimension
from .registry import register

KINDS = {"sw": "switch", "fc": "fully_connected", "ring": "ring"}

# name: (sizes, aggregate Gb/s per NPU, step latency in ns)
NETWORKS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "themis_2d_sw_sw": ((16, 64), (1200, 800), (700, 1700)),
    "themis_3d_sw_sw_sw_homo": ((16, 8, 8), (800, 800, 800), (700, 700, 1700)),
    "themis_3d_sw_sw_sw_hetero": ((16, 8, 8), (1600, 800, 400), (700, 700, 1700)),
    "themis_3d_fc_ring_sw": ((8, 16, 8), (1400, 800, 400), (700, 700, 1700)),
    "themis_4d_ring_sw_sw_sw": ((4, 4, 8, 8), (2000, 1600, 800, 400), (20, 700, 700, 1700)),
    "themis_4d_ring_fc_ring_sw": ((4, 8, 4, 8), (3000, 1400, 1200, 800), (20, 700, 700, 1700)),
}


def _build(name: str, nodes: int) -> Cluster:
    sizes, rates, latencies = NETWORKS[name]
    inner = math.prod(sizes[:-1])
    if nodes % inner or nodes < 2 * inner:
        raise InvalidInput(
            f"nodes: {name} takes a multiple of {inner} from {2 * inner} on (the last dimension grows), not {nodes}"
        )
    kinds = [KINDS[part] for part in name.split("_")[2:] if part in KINDS]
    dimensions = [
        Dimension(kind=kind, size=size, gb_per_s=rate / 8, alpha_us=ns / 1000)
        for kind, size, rate, ns in zip(kinds, (*sizes[:-1], nodes // inner), rates, latencies, strict=True)
    ]
    return regular(f"{name}:{nodes}", dimensions)


def _register_all() -> None:
    for name, (sizes, rates, _) in NETWORKS.items():
        text = f"Themis {'x'.join(map(str, sizes))}, {'/'.join(map(str, rates))} Gb/s per NPU"
        options: dict[str, Any] = {"default_nodes": math.prod(sizes)}
        register(name, text, **options)(_build)


_register_all()
