# SPDX-License-Identifier: Apache-2.0
"""Bounds from flows over time: what one rank contributes must all come to every other one, link by link.

In a time T a network brings at most ``sum of rate x max(0, T - latency)`` bytes from one device to another, over the
paths of a cheapest flow (Ford and Fulkerson). For parts that are not added up, all that comes to a rank from far away
is one flow, from any of the far ones. `docs/bounds.md` has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ... import _native
from .net import ArcNetwork, Floats
from .relays import Ends, TimedProof, Worths, far_ones

MAX_PAIRS = 1024
"""The most pairs of ranks that are tried; any choice is valid."""
MAX_WANTERS = 64
"""The most ranks for which flows from all that is far from them are tried."""
MAX_PATHS = 64
"""The most paths of one flow; what is left over is taken to be as quick as the last of them."""


def quickest_flows(net: ArcNetwork, ends: Ends) -> Iterator[TimedProof]:
    """A proof for every pair of ranks, or for every wanter and what is far from it.

    Args:
        net: The links, or these reversed. Devices must not forward messages: these would wait for alphas only once.
        ends: What must come from where to where.

    Yields:
        The proofs.
    """
    known = net.distances(net.alpha_us, np.arange(net.num_devices, dtype=np.int32))[:, : net.num_devices]
    if ends.combining:
        source, sink = _pairs(known, ends)
        origins = [np.array([a]) for a in source.tolist()]
        shares = np.full(len(source), float(ends.shares[0]))
    else:
        origins, sinks, amounts = [], [], []
        for wanter in ends.wanters[:: -(-len(ends.wanters) // MAX_WANTERS)].tolist():
            others = np.flatnonzero(ends.sources != wanter)
            for some in far_ones(known[ends.sources[others], wanter]):
                origins.append(ends.sources[others[some]])
                sinks.append(wanter)
                amounts.append(float(ends.shares[others[some]].sum()))
        sink, shares = np.array(sinks, np.int32), np.array(amounts)
    if not len(sink):
        return
    flows = [_flows(net, transit, origins, sink) for transit in _transits(net)]
    for at, share in enumerate(shares.tolist()):
        inside = np.zeros(net.num_devices, np.bool_)
        inside[sink[at]] = True
        worths = tuple(flow[at] for flow in flows)
        if all(len(speed) for speed, _ in worths):
            rate = float(min(speed.sum() for speed, _ in worths))
            yield TimedProof(
                need=share, worths=worths, share=share, inside=inside, rate=rate, origins=tuple(origins[at].tolist())
            )


def _pairs(known: Floats, ends: Ends) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The sources and wanters of all pairs; of too many, those farthest apart for each rank."""
    source, sink = (one.ravel() for one in np.meshgrid(ends.sources, ends.wanters, indexing="ij"))
    apart = source != sink
    source, sink = source[apart], sink[apart]
    if len(source) > MAX_PAIRS:
        order = np.lexsort((-known[source, sink], sink))
        rank = np.arange(len(order)) - np.searchsorted(sink[order], sink[order])
        order = order[rank < max(1, MAX_PAIRS // len(ends.wanters))]
        source, sink = source[order], sink[order]
    return source.astype(np.int32), sink.astype(np.int32)


def _transits(net: ArcNetwork) -> list[Floats]:
    """What passing each arc takes at least, where alphas are paid link by link, after the bytes, and before them.

    On a way through switches the bytes of a message may be on all links at once. Then all its alphas are paid at its
    last link, or at its first: the least of any message that has this link there.
    """
    if net.num_nodes == net.num_devices:
        return [net.alpha_us]
    to_device, from_device = net.dst < net.num_devices, net.src < net.num_devices
    before, after = net.reverse.nearest_device_us[net.src], net.nearest_device_us[net.dst]
    return [
        net.alpha_us,
        np.where(to_device, before + net.alpha_us, 0.0),
        np.where(from_device, net.alpha_us + after, 0.0),
    ]


def _flows(net: ArcNetwork, transit: Floats, origins: list[NDArray[np.int32]], sink: NDArray[np.int32]) -> list[Worths]:
    """The rates and latencies of the paths of each flow; devices that start it together get a node of their own."""
    groups: dict[tuple[int, ...], int] = {}
    start = [one[0] if len(one) == 1 else net.num_nodes + groups.setdefault(tuple(one), len(groups)) for one in origins]
    free = [(net.num_nodes + number, device) for group, number in groups.items() for device in group]
    ends = np.array(free, np.int32).reshape(-1, 2)
    ptr, speed, offset = _native.cheapest_flows(
        net.num_nodes + len(groups),
        np.concatenate([net.src, ends[:, 0]]),
        np.concatenate([net.dst, ends[:, 1]]),
        np.concatenate([transit, np.zeros(len(ends))]),
        np.concatenate([net.rate, np.full(len(ends), float(net.rate.sum()))]),
        np.array(start, np.int32),
        sink,
        MAX_PATHS,
    )
    return [(speed[a:b], offset[a:b]) for a, b in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
