# SPDX-License-Identifier: Apache-2.0
"""An order of ranks along a ring whose hops have low latencies, where switches make some pairs nearer than others.

A ring's last message takes its longest hop, so that hop is shortened first, then the others: hops cost the fourth power
of their alphas, and the order is improved by reversing parts of it and by moving up to three ranks (2-opt and or-opt).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..errors import StrettoError
from ..simulator.network import routes_between

MOST_RANKS = 64
"""The most ranks whose order is searched."""
POWER = 4
MOVED = (1, 2, 3)
"""How many neighboring ranks are moved together."""
NEARER = 1 - 1e-9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def near_order(cluster: Cluster, devices: tuple[int, ...], nbytes: float) -> tuple[int, ...] | None:
    """An order whose longest hop is shorter than in the ranks' own order, or as long with a shorter way in total.

    Args:
        cluster: The cluster.
        devices: The device of each rank.
        nbytes: The size of a message, for routes that depend on it.

    Returns:
        The ranks along the ring; None where their own order is as good, where there are too many of them, or where
        some do not reach each other.
    """
    if not 4 <= len(devices) <= MOST_RANKS:
        return None
    try:
        alpha = _alphas(cluster, np.array(devices, np.int32), nbytes)
    except StrettoError:
        return None
    own = np.arange(len(devices))
    order = _improved(alpha**POWER, own)
    before, after = (alpha[tour, np.roll(tour, -1)] for tour in (own, order))
    worse = after.max() > before.max() or (after.max() > NEARER * before.max() and after.sum() > NEARER * before.sum())
    return None if worse else tuple(order.tolist())


def _alphas(cluster: Cluster, devices: NDArray[np.int32], nbytes: float) -> Floats:
    """The alphas between ranks in microseconds, the larger of both directions."""
    count = len(devices)
    src, dst = (ends[~np.eye(count, dtype=np.bool_)] for ends in np.meshgrid(devices, devices, indexing="ij"))
    _, route, ptr, links = routes_between(src, dst, np.full(len(src), nbytes), cluster)
    alpha = np.zeros((count, count))
    way = np.add.reduceat(cluster.link_alpha_us[links].astype(np.float64), ptr[:-1])
    alpha[~np.eye(count, dtype=np.bool_)] = way[route]
    return np.maximum(alpha, alpha.T)


def _improved(cost: Floats, order: Ints) -> Ints:
    """A closed tour that no reversal of a part and no move of few neighbors makes cheaper."""
    while True:
        shorter = _reversed_part(cost, order)
        if shorter is None:
            shorter = _moved_part(cost, order)
        if shorter is None:
            return order
        order = shorter


def _reversed_part(cost: Floats, order: Ints) -> Ints | None:
    """The tour with the part reversed that saves most; None where none saves anything."""
    before, after = np.roll(order, 1), np.roll(order, -1)
    here = cost[before, order]
    gain = here[:, None] + cost[order, after] - cost[before[:, None], order] - cost[order[:, None], after]
    gain = np.triu(gain, 1)
    gain[0, -1] = 0.0
    i, j = np.unravel_index(int(gain.argmax()), gain.shape)
    if gain[i, j] <= (1 - NEARER) * here.sum():
        return None
    return np.concatenate([order[:i], order[i : j + 1][::-1], order[j + 1 :]])


def _moved_part(cost: Floats, order: Ints) -> Ints | None:
    """The first tour found in which some neighbors stand elsewhere, either way round, and that is cheaper."""
    whole = float(cost[order, np.roll(order, -1)].sum())
    for size in MOVED:
        for at in range(len(order) - size):
            part, rest = order[at : at + size], np.concatenate([order[:at], order[at + size :]])
            after = np.roll(rest, -1)
            apart = cost[rest, after]
            for turned in (part, part[::-1]):
                more = cost[rest, turned[0]] + cost[turned[-1], after] - apart
                to = int(more.argmin())
                inside = float(cost[part[:-1], part[1:]].sum())
                if apart.sum() + more[to] + inside < NEARER * whole:
                    return np.concatenate([rest[: to + 1], turned, rest[to + 1 :]])
    return None
