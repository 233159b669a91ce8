# SPDX-License-Identifier: Apache-2.0
"""The links of ranks to a switch that adds up and copies for them (NVLink SHARP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class SwitchLinks:
    """The link of each rank to a switch, and from it."""

    up: tuple[int, ...]
    down: tuple[int, ...]


def switch_links(cluster: Cluster, devices: Sequence[int]) -> SwitchLinks | None:
    """The links of devices to a switch that multicasts and that each of them has a link to; None where there is none.

    >>> switch_links(Cluster.preset("dgx_h200"), range(8)) is None
    True
    >>> len(switch_links(Cluster.load("dgx_h200+multicast"), range(8)).up)
    8
    """
    rate = cluster.link_gb_per_s
    for node in np.flatnonzero(cluster.node_multicast):
        ends = [
            {int(near[link]): int(link) for link in sorted(np.flatnonzero(far == node), key=lambda at: rate[at])}
            for near, far in ((cluster.link_src, cluster.link_dst), (cluster.link_dst, cluster.link_src))
        ]
        if all(device in end for end in ends for device in devices):
            up, down = (tuple(end[device] for device in devices) for end in ends)
            return SwitchLinks(up=up, down=down)
    return None
