# SPDX-License-Identifier: Apache-2.0
"""Trees that pass switches which copy: their edges as multicasts from device to devices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster

Columns = dict[str, NDArray[np.int32]]
Route = tuple[int, ...]
Branches = list[tuple[int, Route]]
"""The destinations of one message, each with its route."""


def without_switches(
    cluster: Cluster, ptr: NDArray[np.int64], columns: Columns, routes: list[Route]
) -> tuple[NDArray[np.int64], Columns, list[Route]]:
    """Turn trees over devices and switches into trees whose edges lead from device to device only, parents first.

    Edges that part at a switch are one multicast. Switches at which a branch ends are left out, since no device is
    behind them.

    Args:
        cluster: The cluster.
        ptr: Tree t has edges ``ptr[t]:ptr[t+1]``.
        columns: The arrays src, dst, route and cast of all edges.
        routes: The routes that `route` refers to.

    Returns:
        The new pointers, columns and routes.
    """
    rows: dict[str, list[int]] = {key: [] for key in columns}
    new_ptr = [0]
    number: dict[Route, int] = {}
    casts = 0
    src, dst, via = (columns[key].tolist() for key in ("src", "dst", "route"))
    for first, last in pairwise(ptr.tolist()):
        # For each switch of this tree: the device that it is reached from, the links, and the message.
        reached: dict[int, tuple[int, Route, int]] = {}
        messages: dict[int, Branches] = {}
        for e in range(first, last):
            a, b, links = src[e], dst[e], routes[via[e]]
            begin, way, message = reached.get(a, (a, (), e))
            if b >= cluster.num_devices:
                reached[b] = begin, way + links, message
            else:
                messages.setdefault(message, []).append((b, way + links))
        for message, ends in _parents_first(src, messages):
            begin = src[message]
            groups = _casts(cluster, ends)
            for group in groups:
                for b, way in group:
                    rows["src"].append(begin)
                    rows["dst"].append(b)
                    rows["route"].append(number.setdefault(way, len(number)))
                    rows["cast"].append(casts if len(group) > 1 else -1)
                casts += len(group) > 1
        new_ptr.append(len(rows["src"]))
    made = {key: np.array(values, np.int32) for key, values in rows.items()}
    return np.array(new_ptr, np.int64), made, list(number)


def _parents_first(src: list[int], messages: dict[int, Branches]) -> list[tuple[int, Branches]]:
    """The messages of a tree in an order in which each device receives before it sends."""
    from_device: dict[int, list[int]] = {}
    for message in messages:
        from_device.setdefault(src[message], []).append(message)
    received = {end for ends in messages.values() for end, _ in ends}
    waiting = [device for device in from_device if device not in received]
    order = []
    for device in waiting:
        for message in from_device.get(device, ()):
            order.append((message, messages[message]))
            waiting += [end for end, _ in messages[message]]
    return order


def _casts(cluster: Cluster, ends: Branches) -> list[Branches]:
    """Group the branches of one message greedily into few casts; a cast parts only at nodes that copy."""
    found: list[tuple[set[Route], Branches]] = []
    for end, way in ends:
        fits = (cast for cast in found if _parts_well(cluster, cast[0], way))
        strands, group = next(fits, (set(), []))
        if not group:
            found.append((strands, group))
        group.append((end, way))
        strands.update(way[: hop + 1] for hop in range(len(way)))
    return [group for _, group in found]


def _parts_well(cluster: Cluster, strands: set[Route], way: Route) -> bool:
    """Whether a route leaves these strands at a node that copies; all routes of one message begin alike."""
    shared = 1
    while way[: shared + 1] in strands:
        shared += 1
    return bool(cluster.node_multicast[cluster.link_dst[way[shared - 1]]])
