# SPDX-License-Identifier: Apache-2.0
"""Programs whose transfers name routes, on an executor that knows networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cluster import Cluster
from ...programs import Program


def on_networks(program: Program, cluster: Cluster | None, names: Sequence[str]) -> Program:
    """The program with every transfer on a lane that the executor puts on the network of its route.

    The executor does not know routes: lane i of a program goes over network i, in turn over all of them.

    Args:
        program: A program, perhaps with routes of `cluster`.
        cluster: The cluster whose channels are named as the executor's networks; None if it is not known.
        names: The executor's networks, in their order.

    Returns:
        The program, with as many lanes for each of its own as there are networks; or itself, where there is one
        network, or its routes are those of another cluster.
    """
    known = [cluster.channels.index(name) if cluster and name in cluster.channels else -1 for name in names]
    if cluster is None or len(names) < 2 or max(known) < 0:
        return program
    if not program.routes or program.routes_digest != cluster.digest:
        return program
    devices = np.asarray(program.collective.ranks, np.int32)
    ptr, links = cluster.route_table(
        devices[program.src], devices[program.dst], np.zeros(program.num_transfers, np.int64)
    )
    lane = program.lane.astype(np.int64) * len(names)
    for at, route in enumerate(program.route.tolist()):
        taken = program.routes[route] if route >= 0 else links[ptr[at] : ptr[at + 1]]
        over = {int(cluster.link_channel[link]) for link in taken}
        lane[at] += next((place for place, channel in enumerate(known) if channel in over), 0)
    return program.replace(lane=lane.astype(program.lane.dtype))


__all__ = ["on_networks"]
