# SPDX-License-Identifier: Apache-2.0
"""All-reduce along pairs of trees with unequal root shares: at the bound also where ranks' links are unequal.

Reduce-scatter and all-gather give every rank an equal share of the roots, so the slowest port carries nearly twice the
data. Here any rank may be the root of as much as suits the links, and each link is divided freely between reducing and
spreading (`tree_pair_packing`). The data is cut into equal pieces, each of which goes along one pair; pieces enter the
network in turn at the rates of their pairs. Ranks hold back what they could send at once, so that it does not queue in
front of what others wait for: a send waits for an arrival that the plan has some pieces earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import AllReduce, Collective
from ..errors import Infeasible
from ..programs import Program
from ..simulator import simulate
from .pacing import paced
from .tree_pair_latency import quickest_pairs
from .tree_pair_packing import TreePair, pack_tree_pairs

MAX_TRANSFERS = 300_000
WORTH_IT = 0.002
"""The share of the time that twice as many pieces must save to be worth it."""
FEW = 16
"""The pieces for each pair from which on their shares follow the rates well."""
WAYS = ((np.inf, 0.0), (64.0, 1.0), (16.0, 1.0), (16.0, 4.0), (4.0, 1.0), (4.0, 4.0), (1.0, 2.0))
"""Ways to pace sends: how many pieces a rank may send before their turn by the rates of the packing, and how many
pieces earlier than in the plan the arrival is that a send waits for."""
KEPT = 3
"""The ways that are tried with the finest pieces."""

Floats = NDArray[np.float64]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceSends:
    """The sends of all pieces, piece after piece, each piece's from the leaves to the root and back."""

    program: Program
    piece: NDArray[np.int64]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    max_transfers: int = MAX_TRANSFERS,
) -> Program:
    """An all-reduce along packed pairs of trees, cut into as many pieces as simulation finds best.

    Args:
        collective: An all-reduce with the standard layout.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: Ignored: there is no chance involved.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        max_transfers: The most transfers of a program with more than one piece.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is no standard all-reduce, or some rank does not reach another one.
    """
    del seed
    began = time.monotonic()
    tell = progress or (lambda message, fraction: None)
    if collective.kind != "all_reduce" or collective.num_ranks < 2:
        raise Infeasible(f"tree_pairs: serves all_reduce of two or more ranks, not {collective.kind}")
    if collective != AllReduce(collective.ranks, chunks=collective.chunks, in_place=collective.in_place):
        raise Infeasible("tree_pairs: this all_reduce has a layout of its own; only the standard one is served")
    tell("packing pairs of trees", 0.0)
    packing = pack_tree_pairs(cluster, collective.ranks, until=began + budget_s / 4)
    tell(f"{len(packing.pairs)} pairs of trees, {packing.gb_per_s:.4g} GB/s", 0.2)
    _, quickest = quickest_pairs(cluster, collective.ranks, nbytes, packing, until=began + budget_s / 3)
    search = _Search(collective, cluster, nbytes, alpha, began + budget_s * 0.9)
    search.climb(quickest, max_transfers)
    if len(quickest) > 1:
        # Few pieces along one pair beat many pairs where the size is small.
        search.climb([max(quickest, key=lambda pair: pair.gb_per_s)], max_transfers)
    best = search.best
    assert best is not None
    best[1].verify()
    return best[1]


class _Search:
    """The fastest program so far, and until when to look for a faster one."""

    def __init__(self, collective: Collective, cluster: Cluster, nbytes: float, alpha: str, until: float) -> None:
        self.collective, self.cluster, self.nbytes, self.alpha, self.until = collective, cluster, nbytes, alpha, until
        self.best: tuple[float, Program] | None = None

    def climb(self, pairs: list[TreePair], max_transfers: int) -> None:
        """Cut ever finer, until the additional alphas cost more than pipelining saves."""
        each = 2 * (self.collective.num_ranks - 1)
        pieces, idle, reached, ways = len(pairs), 0, np.inf, list(WAYS)
        while idle < 2 and (self.best is None or pieces * each <= max_transfers):
            times = {}
            for way, took, program in self._candidates(pairs, pieces, ways):
                times[way] = took
                if self.best is None or took < self.best[0]:
                    self.best = took, program
                if time.monotonic() > self.until:
                    return
            # While a pair has few pieces, their shares are far from its rate, and the times say little.
            if pieces >= FEW * len(pairs):
                idle = 0 if min(times.values()) < reached * (1 - WORTH_IT) else idle + 1
                ways = sorted(ways, key=lambda way: times[way])[: max(KEPT, len(ways) - 2)]
            reached = min(reached, *times.values())
            pieces *= 4 if pieces < FEW * len(pairs) else 2

    def _candidates(
        self, pairs: list[TreePair], pieces: int, ways: list[tuple[float, float]]
    ) -> Iterator[tuple[tuple[float, float], float, Program]]:
        """Programs of one number of pieces, by (lead, margin), each with its time."""
        sends = piece_sends(self.collective, self.cluster, pairs, pieces)
        rate = sum(pair.gb_per_s for pair in pairs)
        piece_us = self.nbytes / rate / 1e3 / pieces if rate else 0.0
        planned: dict[float, tuple[NDArray[np.int64], Floats, Floats]] = {}
        for lead, margin in ways:
            if lead not in planned:
                planned[lead] = self._planned(sends, np.maximum(sends.piece - lead, 0.0) * piece_us)
            order, start, arrive = planned[lead]
            program = reordered(sends.program, order)
            if np.isfinite(lead):
                program = paced(program, start[order] - margin * piece_us, arrive[order])
            took = simulate(program, self.cluster, nbytes=self.nbytes, alpha=self.alpha).total_us
            yield (lead, margin), took, program

    def _planned(self, sends: PieceSends, release_us: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The order, starts and arrivals when every rank sends what has waited longest for its turn."""
        program, cluster = sends.program, self.cluster
        size = program.transfer_bytes(self.nbytes)
        route_ptr = np.cumsum([0, *map(len, program.routes)])
        start, arrive = _native.time_sends(
            program.after_ptr,
            program.after,
            program.route,
            route_ptr,
            np.array([link for route in program.routes for link in route], np.int32),
            size,
            size * program.reduce * cluster.reduce_us_per_mb / 1e6,
            cluster.link_alpha_us,
            cluster.link_gb_per_s * 1e3,
            np.arange(program.num_transfers),
            np.broadcast_to(release_us, size.shape).astype(np.float64),
            self.alpha == "blocking",
        )
        return np.lexsort((np.arange(len(start)), start)), start, arrive


def piece_sends(collective: Collective, cluster: Cluster, pairs: list[TreePair], pieces: int) -> PieceSends:
    """Share equal pieces among pairs of trees by their rates, and list what becomes of each piece.

    Args:
        collective: The all-reduce.
        cluster: The cluster.
        pairs: The pairs of trees.
        pieces: The number of pieces, at least one for each pair.

    Returns:
        The sends in the order in which pieces take turns.
    """
    rate = np.array([pair.gb_per_s for pair in pairs]) if len(pairs) > 1 else np.ones(1)
    share = rate / rate.sum() * pieces
    count = np.floor(share).astype(np.int64)
    count[np.argsort(count - share, kind="stable")[: pieces - int(count.sum())]] += 1
    which = np.repeat(np.arange(len(pairs)), count)
    turn = np.concatenate([(np.arange(c) + 0.5) / c for c in count.tolist() if c])
    which = which[np.lexsort((which, turn))]
    routes: dict[tuple[int, ...], int] = {}
    tables = [_rows_of(pair, routes) for pair in pairs]
    rows = np.concatenate([tables[k] for k in which.tolist()])
    lengths = np.array([len(tables[k]) for k in which.tolist()])
    piece = np.repeat(np.arange(pieces), lengths)
    return PieceSends(
        program=Program.from_steps(
            f"tree_pairs({len(pairs)},pieces={pieces})",
            AllReduce(collective.ranks, chunks=pieces, in_place=collective.in_place),
            src=rows[:, 0],
            dst=rows[:, 1],
            chunk=piece,
            step=np.arange(len(rows)),
            reduce=rows[:, 2].astype(np.bool_),
            route=rows[:, 3],
            routes=tuple(routes),
            routes_digest=cluster.digest,
        ),
        piece=piece,
    )


def _rows_of(pair: TreePair, routes: dict[tuple[int, ...], int]) -> NDArray[np.int64]:
    """The sends of one piece as rows (source, destination, whether it is added, route), in an order that works."""

    def depth(parent: tuple[int, ...], rank: int) -> int:
        steps = 0
        while parent[rank] >= 0:
            rank, steps = parent[rank], steps + 1
        return steps

    rows = []
    ranks = [rank for rank in range(len(pair.gather)) if rank != pair.root]
    for rank in sorted(ranks, key=lambda rank: -depth(pair.gather, rank)):
        rows.append((rank, pair.gather[rank], 1, routes.setdefault(pair.gather_route[rank], len(routes))))
    for rank in sorted(ranks, key=lambda rank: depth(pair.spread, rank)):
        rows.append((pair.spread[rank], rank, 0, routes.setdefault(pair.spread_route[rank], len(routes))))
    return np.array(rows, np.int64)


def reordered(program: Program, order: NDArray[np.int64]) -> Program:
    """The same sends in another order, with the dependencies that this order needs.

    Args:
        program: A program whose transfers move one chunk each.
        order: The transfers, none before one that it waits for.

    Returns:
        The program in that order.
    """
    return Program.from_steps(
        program.name,
        program.collective,
        src=program.src[order],
        dst=program.dst[order],
        chunk=program.chunk[order],
        step=np.arange(len(order)),
        reduce=program.reduce[order],
        route=program.route[order],
        routes=program.routes,
        routes_digest=program.routes_digest,
    )
