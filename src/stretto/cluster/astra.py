# SPDX-License-Identifier: Apache-2.0
"""ASTRA-sim network YAML: ``topology``, ``npus_count``, ``bandwidth`` (GB/s), ``latency`` (ns), lists all."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import InvalidInput, unknown
from ..files import convert
from .grid import links_per_device, regular
from .model import Cluster, Dimension

_KINDS = {"Ring": "ring", "FullyConnected": "fully_connected", "Switch": "switch"}


class _File(msgspec.Struct):
    topology: list[str]
    npus_count: list[int]
    bandwidth: list[float]
    latency: list[float]


def read(data: Any, name: str) -> Cluster:
    """The network of the file; bandwidth and latency are per link, as in ASTRA-sim's analytical model."""
    form = convert(data, _File, where="")
    count = len(form.topology)
    for key in ("npus_count", "bandwidth", "latency"):
        if len(getattr(form, key)) != count:
            raise InvalidInput(f"$.{key}: has {len(getattr(form, key))} entries, topology has {count}")
    dimensions = []
    for at, kind in enumerate(form.topology):
        size, rate, latency = form.npus_count[at], form.bandwidth[at], form.latency[at]
        if kind not in _KINDS:
            raise InvalidInput(f"$.topology[{at}]: {unknown('topology', kind, _KINDS)}")
        if not 2 <= size <= 1 << 16:
            raise InvalidInput(f"$.npus_count[{at}]: must be 2..65536, not {size}")
        if not 0 < rate < 1e9:
            raise InvalidInput(f"$.bandwidth[{at}]: must be > 0, not {rate:g}")
        if not 0 <= latency < 1e12:
            raise InvalidInput(f"$.latency[{at}]: must be >= 0, not {latency:g}")
        hops = 2 if kind == "Switch" else 1
        dimensions.append(
            Dimension(
                kind=_KINDS[kind],
                size=size,
                gb_per_s=rate * links_per_device(_KINDS[kind], size),
                alpha_us=hops * latency / 1000,
            )
        )
    notes = [
        "bandwidth and latency are taken per link; a step over a switch pays the latency twice",
        "GB/s is 10^9 bytes here; ASTRA-sim's own analytical backend counts 2^30",
    ]
    left_out = sorted(str(key) for key in data if key not in _File.__struct_fields__)
    if left_out:
        notes.append(f"left out: {', '.join(left_out)}")
    return regular(name, dimensions, notes=notes, both_sides=True)
