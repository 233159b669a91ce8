# SPDX-License-Identifier: Apache-2.0
"""Programs from schedules, which say when each transfer starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program


def program_from_schedule(
    name: str,
    collective: Collective,
    cluster: Cluster,
    *,
    start_us: ArrayLike,
    src: ArrayLike,
    dst: ArrayLike,
    chunks: Sequence[Sequence[int]] | NDArray[np.integer],
    routes: Sequence[tuple[int, ...]] | None = None,
    reduce: ArrayLike = False,
    lane: ArrayLike = 0,
) -> Program:
    """Make a program whose transfers are ordered by start time; a transfer may use what arrived from earlier ones.

    Times only give the order: dependencies are derived from it, and `simulate` says how long the program takes.

    Args:
        name: The program's name.
        collective: The collective that the program is to carry out.
        cluster: The cluster that `routes` refer to.
        start_us: The start of each transfer.
        src: The rank that sends each transfer.
        dst: The rank that receives it.
        chunks: The chunks of each transfer: a list per transfer, or one number each as an array.
        routes: The physical links of each transfer; the cluster's own routes when not given.
        reduce: Whether the receiver adds the chunks to its own; one truth value for all, or one per transfer.
        lane: The connection of each transfer; one number for all, or one per transfer.

    Returns:
        The program, not verified yet.
    """
    times = np.asarray(start_us, np.float64)
    order = np.argsort(times, kind="stable")
    moved = [[c] for c in chunks.tolist()] if isinstance(chunks, np.ndarray) else [list(c) for c in chunks]
    count = len(times)
    route = None
    table: dict[tuple[int, ...], int] = {}
    if routes is not None:
        route = np.array([table.setdefault(tuple(routes[t]), len(table)) for t in order.tolist()], np.int32)
    listed = [moved[t] for t in order.tolist()]
    return Program.from_steps(
        name,
        collective,
        src=np.asarray(src, np.int32)[order],
        dst=np.asarray(dst, np.int32)[order],
        chunk=np.array([c for row in listed for c in row], np.int32),
        chunk_ptr=np.cumsum([0, *map(len, listed)]),
        step=np.arange(count),
        reduce=np.broadcast_to(np.asarray(reduce, np.bool_), (count,))[order],
        lane=np.broadcast_to(np.asarray(lane, np.int16), (count,))[order],
        route=route,
        routes=tuple(table),
        routes_digest=cluster.digest if table else "",
    )
