# SPDX-License-Identifier: Apache-2.0
"""All-reduce along pairs of trees with unequal root shares: at the bound also where ranks' links are unequal.

Reduce-scatter and all-gather give every rank an equal share of the roots, so the slowest port carries nearly twice the
data. Here any rank may be the root of as much as suits the links, and each link is divided freely between reducing and
spreading (`tree_pair_packing`). The data is cut into equal pieces, each of which goes along one pair; pieces enter the
network in turn at the rates of their pairs (`piece_search`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import AllReduce, Collective
from ..errors import Infeasible
from ..programs import Program
from .justify import SHAKES
from .piece_search import FEW, WORTH_IT, PieceSearch, PieceSends, share_pieces
from .tree_pair_latency import quickest_pairs
from .tree_pair_packing import TreePair, TreePairPacking, pack_tree_pairs

MAX_TRANSFERS = 300_000
LATENCY_MATTERS = 0.02
"""The share of the bytes' time from which on the latency of the quickest pair makes it worth to plan by urgency."""
WEIGHTS = (1.0, 0.1, 0.4)
"""What latencies count in the choice of pairs whose sends are planned by urgency."""
WORK_AHEAD = (8_000, 24_000, 48_000, 96_000)
"""The transfers of programs that are planned by urgency, while more are better."""
WORKING_AHEAD = 0.8
"""The share of the budget after which no more of them are planned: pieces in turn are rarely better there."""
FEWEST = 4
"""The fewest pieces for each pair in such a program."""

DRAWN, IDLE = 100, 40
"""How many numbers of pieces and ways to pace them are drawn at last, and after how many in vain that ends."""
DRAWN_PIECES, DRAWN_LEAD, DRAWN_MARGIN = (0.25, 4.0), (2.0, 64.0), (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Pieces beside the best number so far, how many may be sent before their turn, and margins, of those."""

Progress = Callable[[str, float], None]
MostPieces = Callable[[list[TreePair]], float]
"""Maps pairs of trees to the most pieces that may go along them."""


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
    max_steps: int | None = None,
) -> Program:
    """An all-reduce along packed pairs of trees, cut into as many pieces as simulation finds best.

    Args:
        collective: An all-reduce with the standard layout.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: The seed of the ways to pace pieces that are tried at last.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        max_transfers: The most transfers of a program with more than one piece.
        max_steps: About the most messages from one rank to another, for files; no limit where None.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is no standard all-reduce, or some rank does not reach another one.
    """
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
    search = PieceSearch(cluster, nbytes, alpha, began + budget_s * 0.9)
    most = partial(_most_pieces, transfers=max_transfers, steps=max_steps)
    _work_ahead(search, collective, packing, quickest, most=most, until=began + WORKING_AHEAD * budget_s)
    # Few pieces along one pair beat many pairs where the size is small.
    ways = [quickest] if len(quickest) == 1 else [quickest, [max(quickest, key=lambda pair: pair.gb_per_s)]]
    if len(quickest) > 1 and _passes_switches(quickest):
        until = began + budget_s / 2
        ways.insert(0, quickest_pairs(cluster, collective.ranks, nbytes, packing, calm=True, until=until)[1])
    for pairs in ways:
        sends = partial(piece_sends, collective, cluster, pairs, nbytes=nbytes)
        search.climb(sends, first=len(pairs), few=FEW * len(pairs), most=most(pairs))
    if _passes_switches(quickest):
        # With latencies that count less there are other shares, which may do better where pieces overlap.
        until, lighter = search.until, WEIGHTS[-1]
        ways.append(quickest_pairs(cluster, collective.ranks, nbytes, packing, weight=lighter, until=until)[1])
        _draw(search, collective, ways, most=most, seed=seed)
    best = search.best
    assert best is not None
    best[1].verify()
    return best[1]


def _draw(
    search: PieceSearch, collective: Collective, ways: list[list[TreePair]], *, most: MostPieces, seed: int
) -> None:
    """Draw numbers of pieces and ways to pace them around the best, since both have many local optima on switches."""
    draw = np.random.default_rng(seed)
    center = min(search.finest, key=lambda pieces: search.finest[pieces][0])
    idle = 0
    for _ in range(DRAWN):
        if time.monotonic() > search.until or idle > IDLE:
            return
        pairs = ways[int(draw.integers(len(ways)))]
        pieces = max(len(pairs), int(min(center * np.exp(draw.uniform(*np.log(DRAWN_PIECES))), most(pairs))))
        lead, margin = float(np.exp(draw.uniform(*np.log(DRAWN_LEAD)))), float(draw.choice(DRAWN_MARGIN))
        assert search.best is not None
        before = search.best[0]
        sends = piece_sends(collective, search.cluster, pairs, pieces, nbytes=search.nbytes)
        idle = 0 if search.attempt(sends, lead, margin) < before else idle + 1


def _work_ahead(
    search: PieceSearch,
    collective: Collective,
    packing: TreePairPacking,
    quickest: list[TreePair],
    *,
    most: MostPieces,
    until: float,
) -> None:
    """Try sends by their urgency, along the quickest pairs and along those for which latency counts less.

    Where latencies are nothing beside the bytes, pieces in turn are as good and cheaper to plan. Where routes pass
    switches they are better: messages of unequal urgency meet there and wait for each other.
    """
    cluster, nbytes, ranks = search.cluster, search.nbytes, collective.ranks
    if _passes_switches(quickest):
        return
    latency = min(pair.latency_us(cluster.link_alpha_us) for pair in quickest)
    if latency < LATENCY_MATTERS * nbytes / packing.gb_per_s / 1e3:
        return
    # All weights with few transfers first, then more of them with the weight that was best.
    weights, pairs, reached = list(WEIGHTS), {1.0: quickest}, np.inf
    for transfers in WORK_AHEAD:
        pieces = int(min(transfers / (2 * (len(ranks) - 1)), most(pairs[weights[0]])))
        if pieces < FEWEST * len(pairs[weights[0]]):
            continue
        times: dict[float, float] = {}
        for weight in weights:
            if time.monotonic() > until:
                return
            if weight not in pairs:
                pairs[weight] = quickest_pairs(cluster, ranks, nbytes, packing, weight=weight, until=until)[1]
            if pieces >= FEWEST * len(pairs[weight]):
                sends = piece_sends(collective, cluster, pairs[weight], pieces, nbytes=nbytes)
                times[weight] = search.justify(sends, shakes=SHAKES)
        best = min(times, key=lambda weight: times[weight])
        if times[best] > reached * (1 - WORTH_IT) or pieces == int(most(pairs[best])):
            return
        reached, weights = times[best], [best]


def _most_pieces(pairs: list[TreePair], *, transfers: int, steps: int | None) -> float:
    """The most pieces with which there are about so many transfers, and messages from one rank to another."""
    most = transfers / (2 * (len(pairs[0].gather) - 1))
    if steps is None:
        return most
    rates = np.array([pair.gb_per_s for pair in pairs]) if len(pairs) > 1 else np.ones(1)
    messages: Counter[tuple[int, int]] = Counter()
    for pair, share in zip(pairs, (rates / rates.sum()).tolist(), strict=True):
        for rank, (to, back) in enumerate(zip(pair.gather, pair.spread, strict=True)):
            if rank != pair.root:
                messages[rank, to] += share
                messages[back, rank] += share
    return min(most, steps / max(messages.values()))


def _passes_switches(pairs: list[TreePair]) -> bool:
    return any(len(route) > 1 for pair in pairs for route in (*pair.gather_route, *pair.spread_route))


def piece_sends(
    collective: Collective, cluster: Cluster, pairs: list[TreePair], pieces: int, nbytes: float = 0.0
) -> PieceSends:
    """Share equal pieces among pairs of trees by their rates, and list what becomes of each piece.

    Args:
        collective: The all-reduce.
        cluster: The cluster.
        pairs: The pairs of trees.
        pieces: The number of pieces, at least one for each pair.
        nbytes: The size of the tensor in bytes, for the time between two pieces.

    Returns:
        The sends in the order in which pieces take turns.
    """
    rate = np.array([pair.gb_per_s for pair in pairs]) if len(pairs) > 1 else np.ones(1)
    count = share_pieces(rate, pieces)
    which = np.repeat(np.arange(len(pairs)), count)
    turn = np.concatenate([(np.arange(c) + 0.5) / c for c in count.tolist() if c])
    which = which[np.lexsort((which, turn))]
    routes: dict[tuple[int, ...], int] = {}
    tables = [_rows_of(pair, routes) for pair in pairs]
    rows = np.concatenate([tables[k] for k in which.tolist()])
    lengths = np.array([len(tables[k]) for k in which.tolist()])
    piece = np.repeat(np.arange(pieces), lengths)
    total = sum(pair.gb_per_s for pair in pairs)
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
        gathers=rows[:, 2].astype(np.bool_),
        piece_us=nbytes / total / 1e3 / pieces if total else 0.0,
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
