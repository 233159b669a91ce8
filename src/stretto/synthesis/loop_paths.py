# SPDX-License-Identifier: Apache-2.0
"""All-to-alls for plans that loop, where links differ: a part of some pairs' data goes by way of another rank.

As with `loop_packing`, a pair of ranks is one edge. A linear program says how much of each pair's data takes which
path, a second one with whole numbers makes equal shares of it. Its best solutions have few paths, and each path is a
stream of its own, whose loop passes data on.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import AllToAll, Collective
from ..errors import Infeasible
from ..programs import Program
from ..solvers.linear import LinearProgram, ProgramArrays
from .loop_packing import NODES, WHOLE_GAP, TreeLinks

MOST_RANKS = 16
"""The most ranks: their paths through one other rank are listed."""
LEAST = 1e-6
"""The least part of a share that counts."""

Floats = NDArray[np.float64]
Path = tuple[int, ...]
"""Ranks, from the one that has the data to the one that wants it."""


def loop_paths(collective: Collective, cluster: Cluster, *, shares: int, detour: float) -> Program:
    """An all-to-all whose data takes the paths on which the fullest link has least to do.

    Args:
        collective: An all-to-all of equal shards.
        cluster: The cluster.
        shares: The equal shares of each pair's data, >= 1.
        detour: What a share that goes by way of another rank costs, in parts of what all of a pair's data takes on the
            slowest path: more paths, which are more streams, have to gain something.

    Returns:
        The program, not verified; chunks that travel alike lie side by side.

    Raises:
        Infeasible: It is another collective, has too many ranks, or no shares were found.

    >>> loop_paths(AllToAll(8), Cluster.preset("ndv2"), shares=12, detour=5e-5)
    <Program loop_paths(shares=12,detour=5e-05): all_to_all over 8 ranks, 90 transfers, 26 dependencies, 1 lane>
    """
    n = collective.num_ranks
    if collective.kind != "all_to_all" or not 2 <= n <= MOST_RANKS:
        raise Infeasible(f"loop_paths: serves all-to-alls of 2 to {MOST_RANKS} ranks")
    links = TreeLinks(cluster, collective.ranks, reverse=False)
    number = {pair: at for at, pair in enumerate((a, b) for a in range(n) for b in range(n) if a != b)}
    paths = [(a, *way, b) for a, b in number for way in [(), *((v,) for v in range(n) if v not in (a, b))]]
    load = np.array([links.per_share[[number[hop] for hop in _hops(path)]].sum(axis=0) for path in paths])
    price = detour * float(load.max())
    best = _shares(paths, load, shares, price, whole=False)
    kept = np.flatnonzero(best > LEAST)
    amount = np.round(_shares([paths[at] for at in kept], load[kept], shares, price, whole=True)).astype(np.int64)
    taken = [(paths[at], int(many)) for at, many in zip(kept, amount, strict=True) if many]
    return _program(f"loop_paths(shares={shares},detour={detour:g})", collective, taken, shares)


def _hops(path: Path) -> list[tuple[int, int]]:
    return list(pairwise(path))


def _shares(paths: list[Path], load: Floats, shares: int, detour: float, *, whole: bool) -> Floats:
    """How many shares of its pair's data take each path."""
    count, rows = load.shape
    start, index, value = [0], list[int](), list[float]()
    for link in range(rows):
        used = np.flatnonzero(load[:, link])
        index += [*used.tolist(), count]
        value += [*(load[used, link] / shares).tolist(), -1.0]
        start.append(len(index))
    pairs = sorted({(path[0], path[-1]) for path in paths})
    for pair in pairs:
        mine = [at for at, path in enumerate(paths) if (path[0], path[-1]) == pair]
        index += mine
        value += [1.0] * len(mine)
        start.append(len(index))
    model = LinearProgram(mip_max_nodes=NODES, mip_rel_gap=WHOLE_GAP) if whole else LinearProgram()
    model.load(
        ProgramArrays(
            cost=np.array([*(detour * (len(path) - 2) for path in paths), 1.0]), lower=np.zeros(count + 1),
            upper=np.append(np.full(count, float(shares)), np.inf),
            row_lower=np.append(np.full(rows, -np.inf), np.full(len(pairs), float(shares))),
            row_upper=np.append(np.zeros(rows), np.full(len(pairs), float(shares))),
            start=start, index=index, value=value, integer=[whole] * count + [False],
        )
    )  # fmt: skip
    found = model.solve()
    if not found.has_values:
        raise Infeasible("loop_paths: no whole shares of the paths were found")
    return np.asarray(found.values[:count])


def _program(name: str, collective: Collective, taken: list[tuple[Path, int]], shares: int) -> Program:
    """Every path's shares, hop by hop; those of a pair lie one behind the other."""
    n = collective.num_ranks
    src, dst, chunk, ptr, step = list[int](), list[int](), list[int](), [0], list[int]()
    begun: dict[tuple[int, int], int] = {}
    for path, many in sorted(taken, key=lambda one: (one[0][0], one[0][-1], len(one[0]))):
        pair = path[0], path[-1]
        first = (pair[0] * n + pair[1]) * shares + begun.get(pair, 0)
        begun[pair] = begun.get(pair, 0) + many
        for at, (a, b) in enumerate(_hops(path)):
            src.append(a)
            dst.append(b)
            chunk += range(first, first + many)
            ptr.append(len(chunk))
            step.append(at)
    wanted = AllToAll(collective.ranks, chunks=shares, in_place=collective.in_place)
    return Program.from_steps(name, wanted, src=src, dst=dst, chunk=chunk, chunk_ptr=ptr, step=step)
