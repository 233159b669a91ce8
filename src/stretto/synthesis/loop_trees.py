# SPDX-License-Identifier: Apache-2.0
"""Packed trees for plans that loop: few trees, each a stream of its own, whose loop does what pieces do elsewhere.

On boxes whose links differ (NVLinks between some pairs of GPUs, one or two of them) the optimum of the links is a
packing of trees in hundreds of pieces. A plan has room for some eighty threadblocks with few steps each: there every
tree gets one, and sends its share piece by piece in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import StrettoError
from ..programs import Program
from ..programs.wide import runs_of
from . import forest
from .forest_program import PACES
from .forest_trees import Forest
from .loop_balance import balanced_forests
from .loop_packing import packed_forests
from .loop_paths import loop_paths

TREES = (1, 2, 3, 4, 5, 6, 8)
"""The most trees of a root, of those that are tried: fewer are fewer steps, more of them fill the links better."""
PACKED = ((72, 3, 0.9), (96, 2, 0.9), (96, 3, 0.95), (24, 2, 0.9))
"""The packings that are tried: shares of a root, height of trees, and the part of links on longer routes."""
BALANCED = tuple((height, room, seed) for seed in range(4) for height, room in ((3, 0.95), (2, 0.97), (2, 0.9)))
"""Those of which every stream is one tree of nearly one size: height, the part of links on longer routes, and seed."""
PATHS = ((12, 5e-5), (32, 1e-6), (12, 2e-5))
"""Settings of the packing for all-to-alls: shares of a pair of ranks, and the price of a detour."""
WAYS = {"all_gather": (False,), "reduce_scatter": (True,), "all_reduce": (True, False)}
"""In which directions data goes along trees: True to the root."""
FEWEST = 2
"""A root has at least so many streams, or its trees are not packed."""


def loop_trees(collective: Collective, cluster: Cluster, *, most: int) -> Iterator[Program]:
    """Programs of few trees, verified, that give a plan of at most some streams work on all links.

    Args:
        collective: The collective.
        cluster: The cluster.
        most: The most streams, >= 1.

    Yields:
        Programs of trees whose shares differ as the best rates do, in chunks of one share that lie side by side; then
        of more and more trees of the optimum's rates, each with one and with two pieces, whose chunks that travel alike
        do not lie side by side: they would become one stream. For an all-to-all those of `loop_paths`.

    >>> from stretto import AllGather
    >>> [p.name for p in loop_trees(AllGather(8), Cluster.preset("dgx_a100"), most=15)]
    ['loop_trees(k=1,pieces=1)', 'loop_trees(k=1,pieces=2)']
    """
    if collective.kind == "all_to_all":
        yield from _paths(collective, cluster, most)
        return
    yield from packed_trees(collective, cluster, most=most)
    yield from equal_trees(collective, cluster, most=most)


def equal_trees(collective: Collective, cluster: Cluster, *, most: int) -> Iterator[Program]:
    """Programs of more and more trees of the optimum's rates, verified, each with one and with two pieces.

    Args:
        collective: The collective.
        cluster: The cluster.
        most: The most streams, >= 1.

    Yields:
        The programs.
    """
    seen: set[tuple[int, ...]] = set()
    for trees in TREES:
        try:
            forests = forest.forests_of(collective, cluster, max_k=trees)
        except StrettoError:
            return
        k = tuple(one.k for one in forests)
        if k in seen:
            continue
        seen.add(k)
        for pieces in (1, 2):
            made = _program(collective, forests, pieces)
            if made.collective.num_chunks > 2 * most:
                break
            made.verify()
            yield made


def packed_trees(collective: Collective, cluster: Cluster, *, most: int) -> Iterator[Program]:
    """Programs of trees whose shares load links as the best rates do, where every rank is a root.

    Args:
        collective: The collective.
        cluster: The cluster.
        most: The most streams, >= 1.

    Yields:
        The programs, verified.
    """
    ways = WAYS.get(collective.kind, ())
    if not ways or FEWEST * collective.num_ranks > most:
        return
    for shares, height, room in PACKED:
        try:
            forests, _ = packed_forests(cluster, collective.ranks, shares, ways=ways, height=height, room=room)
        except StrettoError:
            continue
        built = forest._build(collective, forests, 1, PACES[0])
        made = replace(built, name=f"loop_trees(packed,shares={shares},height={height},room={room:g})")
        if len(runs_of(made)) <= most:
            made.verify()
            yield made


def balanced_trees(collective: Collective, cluster: Cluster, *, most: int) -> Iterator[Program]:
    """Programs of one tree for each stream, verified, all of nearly one size, where every rank is a root.

    Args:
        collective: The collective.
        cluster: The cluster.
        most: The most streams, >= 1.

    Yields:
        Programs that load links nearly alike; which of them is the fastest, their times have to say.
    """
    ways = WAYS.get(collective.kind, ())
    if not ways or FEWEST * collective.num_ranks > most:
        return
    for height, room, seed in BALANCED:
        try:
            forests, _ = balanced_forests(
                cluster, collective.ranks, most, ways=ways, height=height, room=room, seed=seed
            )  # fmt: skip
        except StrettoError:
            return
        built = forest._build(collective, forests, 1, PACES[0])
        made = replace(built, name=f"loop_trees(balanced,height={height},room={room:g},seed={seed})")
        made.verify()
        yield made


def _paths(collective: Collective, cluster: Cluster, most: int) -> Iterator[Program]:
    """All-to-alls in which some data goes by way of another rank, that have few enough streams."""
    for shares, detour in PATHS:
        try:
            made = loop_paths(collective, cluster, shares=shares, detour=detour)
        except StrettoError:
            continue
        if len(runs_of(made)) <= most:
            made.verify()
            yield made


def _program(collective: Collective, forests: tuple[Forest, ...], pieces: int) -> Program:
    built = forest._build(collective, forests, pieces, PACES[0])
    name = built.name.replace("forest", "loop_trees", 1)
    return replace(built, name=name, chunk=_apart(built)[built.chunk])


def _apart(program: Program) -> NDArray[np.int32]:
    """New numbers for the chunks of each root: those that travel alike in turn with others, where there are others."""
    chunks = program.collective.num_chunks
    ways: list[list[tuple[int, int, bool]]] = [[] for _ in range(chunks)]
    for t in range(program.num_transfers):
        for chunk in program.chunks_of(t).tolist():
            ways[chunk].append((int(program.src[t]), int(program.dst[t]), bool(program.reduce[t])))
    found = np.arange(chunks, dtype=np.int32)
    roots = program.collective.num_ranks if chunks % program.collective.num_ranks == 0 else 1
    for first in range(0, chunks, chunks // roots):
        mine = range(first, first + chunks // roots)
        times: dict[tuple[tuple[int, int, bool], ...], int] = {}
        turns = []
        for chunk in mine:
            way = tuple(ways[chunk])
            turns.append((times.setdefault(way, 0), chunk))
            times[way] += 1
        for place, (_, chunk) in zip(mine, sorted(turns), strict=True):
            found[chunk] = place
    return found
