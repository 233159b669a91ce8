"""From a schedule (who sends what when) to a `Program`."""

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
    """A program whose transfers are ordered by start time; a transfer may use what arrived from earlier ones.

    `src` and `dst` are ranks of the collective. `routes` gives the physical links of each transfer; without it the
    cluster's own routes are used. Times only give the order: what really waits for what is derived, and `simulate`
    says how long it takes.
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
