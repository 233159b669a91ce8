# SPDX-License-Identifier: Apache-2.0
"""A program for a cluster that has changed a little, from the program of the cluster as it was.

Links or NICs that are down, or slower than they were, leave most of an old program right. The trees that its pieces
took are columns to begin with: those that still have routes are packed anew for the rates of now, with what other trees
the prices of links ask for (`steiner_packing`), and cut into about as many pieces as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program
from .piece_search import FEW, PieceSearch
from .steiner import PieceLayout, only_used_helpers, with_helpers
from .steiner_packing import Pairs, Shard, TreeFinder, pack_shards, shards_of

MAX_TRANSFERS = 200_000
ENOUGH = 1.01
"""The share of the time that the rates of the packing allow at which the search ends."""
MAX_OLD_TREES = 4096
"""The most different trees of the old program that are taken over."""

Progress = Callable[[str, float], None]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    base: Program,
    helpers: Sequence[int] = (),
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    max_transfers: int = MAX_TRANSFERS,
) -> Program:
    """A program along the trees of an old one, packed anew for the links of now.

    Args:
        collective: A collective of the library, of equal shards.
        cluster: The cluster as it is now; its devices are those of the old one.
        base: The old program, for the same collective.
        helpers: The devices outside the group that may forward, copy and add.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: Ignored: there is no chance involved.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        max_transfers: The most transfers of a program with more than one piece for each shard.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is not one of the library, or some rank does not reach another one.
    """
    del seed
    began = time.monotonic()
    tell = progress or (lambda message, fraction: None)
    named, devices = with_helpers("repair", collective, helpers)
    plain = named.build()
    shards, shard_bytes = shards_of(plain), float(plain.chunk_share[0]) * nbytes
    finder = TreeFinder(cluster, devices, shards)
    old = finder.routed(trees_of(base, devices, shards), 1.0 / cluster.link_gb_per_s)
    tell(f"{len(old)} trees of {base.name} still have routes", 0.0)
    packing = pack_shards(cluster, devices, shards, start=old, until=began + budget_s / 3)
    tell(f"{len(packing.trees)} trees, {packing.gb_per_s:.4g} GB/s for each of {len(shards)} shards", 0.3)
    search = PieceSearch(cluster, nbytes, alpha, began + budget_s * 0.9)
    layout = PieceLayout(named, devices, cluster, packing.trees, shard_bytes)
    few = FEW * max(1, len(packing.trees) // len(shards))
    before = max(1, base.collective.num_chunks // plain.num_chunks)
    most = max_transfers / layout.hops_of_a_piece
    search.climb(
        layout.sends,
        first=max(1, min(before, int(most), few)),
        few=few,
        most=most,
        together=len(shards),
        enough_us=ENOUGH * shard_bytes / packing.gb_per_s / 1e3,
    )
    best = search.best
    assert best is not None
    program = only_used_helpers(best[1])
    if not base.name.startswith("repair("):
        program = program.replace(name=f"repair({base.name})")
    else:
        program = program.replace(name=base.name)
    program.verify()
    return program


def trees_of(base: Program, devices: Sequence[int], shards: Sequence[Shard]) -> Iterator[tuple[int, Pairs, Pairs]]:
    """The different trees along which an old program moves chunks: the shard, what is gathered, what is spread.

    Args:
        base: The program.
        devices: The device of each rank that the trees are for; trees with others are left out.
        shards: The shards of the collective.

    Yields:
        Trees of chunks that move along trees; of others, such as those of an exchange, none.
    """
    c = base.collective
    at = {device: rank for rank, device in enumerate(devices)}
    rank_of = [at.get(device, -1) for device in c.ranks]
    shard_at = {shard.first: k for k, shard in enumerate(shards)}
    pieces = max(1, c.num_chunks // (1 + max(shard_at, default=0))) if c.kind == "all_reduce" else c.chunks
    moves: dict[int, list[tuple[int, int]]] = {}
    owner = np.repeat(np.arange(base.num_transfers), np.diff(base.chunk_ptr))
    for t, chunk in zip(owner.tolist(), base.chunk.tolist(), strict=True):
        moves.setdefault(chunk, []).append((rank_of[int(base.src[t])], rank_of[int(base.dst[t])]))
    seen: set[tuple[int, Pairs, Pairs]] = set()
    for chunk, hops in moves.items():
        number = shard_at.get(chunk // pieces, -1)
        if number < 0 or any(a < 0 or b < 0 for a, b in hops):
            continue
        split = _split(hops, shards[number])
        if split is not None and (number, *split) not in seen and len(seen) < MAX_OLD_TREES:
            seen.add((number, *split))
            yield number, *split


def _split(hops: list[tuple[int, int]], shard: Shard) -> tuple[Pairs, Pairs] | None:
    """What one chunk's sends gather and what they spread, or None where they are no trees."""
    held = {rank: {rank} for rank in shard.sources}
    whole = set(shard.sources)
    gather, spread = [], []
    for a, b in hops:
        mine = held.get(a, set())
        if mine == whole:
            spread.append((a, b))
            held[b] = set(whole)
        else:
            gather.append((a, b))
            if mine & held.get(b, set()):
                return None
            held[b] = held.get(b, set()) | mine
    senders, receivers = [a for a, _ in gather], [b for _, b in spread]
    trees = len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
    right = all(held.get(rank) == whole for rank in shard.wanters)
    return (tuple(gather), tuple(spread)) if trees and right else None
