# SPDX-License-Identifier: Apache-2.0
"""Pipelined `Program`s from trees: every tree carries its share of the data in pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..programs import Program
from .forest_trees import Forest

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sends:
    """Transfers of one chunk each, in arrays.

    `round` is when a transfer may run if every round moves one piece of every tree, `edge` the edge of a tree that it
    belongs to, `cast` its multicast (or -1), `onward` the length of the longest chain of transfers that follows it.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    round: Ints
    route: Ints
    reduce: NDArray[np.bool_]
    edge: Ints
    cast: Ints
    onward: Ints

    def __add__(self, other: Sends) -> Sends:
        joined = {key: np.append(getattr(self, key), getattr(other, key)) for key in self.__dataclass_fields__}
        edge = np.append(self.edge, other.edge + self.edge.max(initial=-1) + 1)
        casts = np.where(other.cast >= 0, other.cast + self.cast.max(initial=-1) + 1, -1)
        onward = np.append(self.onward + other.onward.max(initial=-1) + 1, other.onward)
        return Sends(**joined | {"edge": edge, "cast": np.append(self.cast, casts), "onward": onward})


def sends(forest: Forest, ranks: tuple[int, ...], chunks: int, after: Ints | None = None) -> tuple[Sends, Ints]:
    """The transfers of a forest.

    Args:
        forest: The forest.
        ranks: The device of each rank.
        chunks: The number of chunks per root, a multiple of k.
        after: The round before which each chunk must not start; when not given, its number among the tree's pieces.

    Returns:
        The transfers, and the round by which each chunk is done.
    """
    rank = np.zeros(forest.cluster.num_devices, np.int64)
    rank[list(ranks)] = np.arange(len(ranks))
    roots = np.zeros(forest.cluster.num_devices, np.int64)
    roots[list(forest.roots)] = np.arange(len(forest.roots))
    pieces = chunks // forest.k
    sizes = np.diff(forest.ptr)
    # The arrays have one row per tree, then one per edge of each tree, then one per piece on each edge.
    bundle = np.repeat(np.arange(len(forest.root)), forest.amount)
    at_root = roots[forest.root[bundle]]
    order = np.argsort(at_root, kind="stable")
    bundle, at_root = bundle[order], at_root[order]
    first_chunk = at_root * chunks + (np.arange(len(bundle)) % forest.k) * pieces
    rows = sizes[bundle]
    begin = np.cumsum(rows) - rows
    edge = np.repeat(forest.ptr[bundle] - begin, rows) + np.arange(int(rows.sum()))
    level, onward = (forest.below, forest.depth) if forest.reverse else (forest.depth, forest.below)
    base = np.repeat(first_chunk, rows)
    piece = np.tile(np.arange(pieces), len(edge))

    def each(values: NDArray[np.generic]) -> Ints:
        return np.repeat(values.astype(np.int64), pieces)

    chunk = each(base) + piece
    earliest = piece if after is None else after[chunk]
    near, far = each(rank[forest.src[edge]]), each(rank[forest.dst[edge]])
    done = np.zeros(len(forest.roots) * chunks, np.int64)
    rounds = earliest + each(level[edge])
    np.maximum.at(done, chunk, rounds + 1)
    return Sends(
        src=far if forest.reverse else near,
        dst=near if forest.reverse else far,
        chunk=chunk,
        round=rounds,
        route=each(forest.route[edge]),
        reduce=np.full(len(chunk), forest.reverse),
        edge=each(np.arange(len(edge))),
        cast=_cast_numbers(forest, edge, np.repeat(np.arange(len(bundle)), rows), piece),
        onward=each(onward[edge]),
    ), done


def _cast_numbers(forest: Forest, edge: Ints, tree: Ints, piece: Ints) -> Ints:
    """A number for every piece of every multicast of every tree; equal trees of one bundle get different numbers."""
    pieces = len(piece) // max(1, len(edge))
    numbers = np.full(len(piece), -1, np.int64)
    casts = int(forest.cast.max(initial=-1)) + 1
    if casts:
        of_tree = np.where(forest.cast[edge] >= 0, tree * casts + forest.cast[edge], -1)
        at = np.repeat(of_tree, pieces)
        several = at >= 0
        numbers[several] = np.unique(at[several] * pieces + piece[several], return_inverse=True)[1]
    return numbers


def _turn(total: Sends) -> Ints:
    """Number the multicasts of each rank and round, since they must be in the same order on all connections.

    Transfers to one rank only get -1 and go first.
    """
    turn = np.full(len(total.src), -1, np.int64)
    several = np.flatnonzero(total.cast >= 0)
    if len(several):
        several = several[np.lexsort((-total.onward[several], total.cast[several]))]
        begins = np.diff(total.cast[several], prepend=-1) > 0
        first = several[begins]
        order = np.lexsort((-total.onward[first], total.src[first], total.round[first]))
        who = np.stack([total.round[first], total.src[first]])[:, order]
        fresh = np.append(True, np.any(who[:, 1:] != who[:, :-1], axis=0))
        place = np.arange(len(order))
        number = np.empty(len(order), np.int64)
        number[order] = place - np.maximum.accumulate(np.where(fresh, place, 0))
        turn[several] = number[np.cumsum(begins) - 1]
    return turn


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far a rank may run ahead with data that it holds from the start.

    The rank sends the next piece only when the piece `window` places before it has arrived: on the same edge of a tree,
    or (`port`) among all pieces that leave over the same link. Otherwise all pieces would queue at the rank's links at
    once, in front of data that the rank has to pass on for others.
    """

    window: int
    port: bool = False


PACES: tuple[Pace, ...] = (
    Pace(window=1), Pace(window=2), Pace(window=2, port=True), Pace(window=8, port=True), Pace(window=64, port=True)
)  # fmt: skip


def program(name: str, collective: Collective, forests: tuple[Forest, ...], chunks: int, pace: Pace) -> Program:
    """The transfers of one forest, or of one that reduces and then one that spreads, as a program.

    Args:
        name: The program's name.
        collective: The collective, cut to fit.
        forests: One forest or two, all on one cluster.
        chunks: The number of chunks per root, a multiple of each k.
        pace: How far ranks may run ahead.

    Returns:
        The program, not verified yet.
    """
    routes: list[tuple[int, ...]] = []
    total: Sends | None = None
    done: Ints | None = None
    for forest in forests:
        part, done = sends(forest, collective.ranks, chunks, done)
        part = Sends(**(vars(part) | {"route": part.route + len(routes)}))
        routes += forest.routes
        total = part if total is None else total + part
    assert total is not None
    order = np.lexsort((-total.onward, _turn(total), total.round))
    plain = Program.from_steps(
        name,
        collective,
        src=total.src[order],
        dst=total.dst[order],
        chunk=total.chunk[order],
        step=total.round[order],
        reduce=total.reduce[order],
        route=total.route[order],
        routes=tuple(routes),
        routes_digest=forests[0].cluster.digest,
        cast=total.cast[order],
    )
    first_link = np.array([route[0] for route in routes], np.int64)
    return _paced(plain, first_link[plain.route] if pace.port else total.edge[order], pace.window)


def _paced(plain: Program, group: Ints, window: int) -> Program:
    """Let each transfer without dependencies wait for the transfer `window` places before it in its group.

    A multicast is one transfer here: its first member stands for all.
    """
    leader = np.arange(len(group))
    if plain.multicasts:
        several = np.flatnonzero(plain.cast >= 0)
        _, first, which = np.unique(plain.cast[several], return_index=True, return_inverse=True)
        leader[several] = several[first][which]
    ahead = np.flatnonzero(leader == np.arange(len(group)))
    order = ahead[np.argsort(group[ahead], kind="stable")]
    before = np.full(len(group), -1, np.int64)
    same = group[order[window:]] == group[order[:-window]]
    before[order[window:][same]] = order[:-window][same]
    before = before[leader]
    given = np.diff(plain.after_ptr)
    waits = (before >= 0) & (given == 0)
    ptr = np.concatenate([[0], np.cumsum(given + waits)])
    after = np.empty(ptr[-1], np.int32)
    after[np.repeat(ptr[:-1] - plain.after_ptr[:-1], given) + np.arange(len(plain.after))] = plain.after
    after[ptr[:-1][waits]] = before[waits]
    return plain.replace(after_ptr=ptr, after=after)
