# SPDX-License-Identifier: Apache-2.0
"""The network as synthesisers see it: hops from device to device, and the physical links that hops share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.model import DEVICE, LARGE_MESSAGE
from ..errors import Infeasible

MAX_HOPS = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class Hops:
    """The direct hops between devices, in arrays.

    Hop h goes from device ``src[h]`` to ``dst[h]`` over the physical links ``link[link_ptr[h]:link_ptr[h+1]]`` without
    passing another device. Alone it takes ``alpha_us[h] + bytes / (gb_per_s[h] * 1e3)``; hops that share a physical
    link (a switch port, a NIC) share its rate. Devices are numbered as in the cluster.
    """

    cluster: Cluster
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    link_ptr: NDArray[np.int64]
    link: NDArray[np.int32]
    alpha_us: NDArray[np.float64]
    gb_per_s: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        *,
        devices: Sequence[int] | None = None,
        channels: Iterable[str] | None = None,
        nbytes: float = LARGE_MESSAGE,
    ) -> Hops:
        """Every direct hop between devices, over the route that is fastest for messages of `nbytes`.

        Args:
            cluster: The cluster.
            devices: The devices; all when not given.
            channels: The channels whose links may be used; all when not given.
            nbytes: The size of a message in bytes; a large one when not given.

        Returns:
            The hops.

        Raises:
            Infeasible: There are too many pairs of devices.

        >>> ring = Hops.of(Cluster.preset("ring", nodes=4))
        >>> len(ring.src), ring.route(0)
        (8, (0,))
        """
        keep = np.arange(cluster.num_devices, dtype=np.int32) if devices is None else np.array(devices, np.int32)
        if len(keep) ** 2 > MAX_HOPS:
            raise Infeasible(f"hops: {len(keep)} devices have too many pairs for this synthesiser")
        allowed = np.ones(cluster.num_links, np.bool_)
        if channels is not None:
            wanted = set(channels)
            allowed = np.array([cluster.channels[c] in wanted for c in cluster.link_channel], np.bool_)
        router = _native.Router(
            cluster.num_nodes,
            cluster.link_src,
            cluster.link_dst,
            cluster.link_alpha_us,
            cluster.link_gb_per_s,
            allowed,
            cluster.node_kind != DEVICE,
        )
        src, dst = (end.ravel() for end in np.meshgrid(keep, keep, indexing="ij"))
        ptr, link = router.routes(src, dst, src.astype(np.int64) + dst, np.full(len(src), float(nbytes)))
        there = np.diff(ptr) > 0
        lengths = np.diff(ptr)[there]
        link_ptr = np.concatenate([[0], np.cumsum(lengths)])
        starts = link_ptr[:-1]
        return cls(
            cluster=cluster,
            src=src[there],
            dst=dst[there],
            link_ptr=link_ptr,
            link=link,
            alpha_us=np.add.reduceat(cluster.link_alpha_us[link], starts) if len(starts) else np.zeros(0),
            gb_per_s=np.minimum.reduceat(cluster.link_gb_per_s[link], starts) if len(starts) else np.zeros(0),
        )

    @property
    def num_hops(self) -> int:
        """The number of hops."""
        return len(self.src)

    def route(self, hop: int) -> tuple[int, ...]:
        """The physical links of a hop, in order."""
        return tuple(self.link[self.link_ptr[hop] : self.link_ptr[hop + 1]].tolist())

    @cached_property
    def between(self) -> dict[tuple[int, int], int]:
        """The hop from one device to another, by (source, destination)."""
        return {(a, b): h for h, (a, b) in enumerate(zip(self.src.tolist(), self.dst.tolist(), strict=True))}

    def hop_us(self, nbytes: float) -> NDArray[np.float64]:
        """The time in microseconds of a message of `nbytes` over each hop, without contention."""
        return self.alpha_us + nbytes / (self.gb_per_s * 1e3)


def joins_all(src: NDArray[np.integer[Any]], dst: NDArray[np.integer[Any]], count: int) -> bool:
    """Whether hops lead, directly or by relaying, from every device to every other one.

    Args:
        src: The device that each hop starts at, 0..count-1.
        dst: The device that it leads to.
        count: How many devices there are.

    Returns:
        True if the hops strongly connect all devices.

    >>> ring = Hops.of(Cluster.preset("ring", nodes=4))
    >>> joins_all(ring.src, ring.dst, 4), joins_all(ring.src[:-2], ring.dst[:-2], 4)
    (True, False)
    """
    for a, b in ((src, dst), (dst, src)):
        reached = np.zeros(count, np.bool_)
        reached[0] = True
        before = 0
        while (now := int(np.count_nonzero(reached))) > before:
            before = now
            reached[b[reached[a]]] = True
        if not reached.all():
            return False
    return True
