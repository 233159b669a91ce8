# SPDX-License-Identifier: Apache-2.0
"""Symmetric programs from an algorithm inside a group of ranks and one between groups, backwards, and joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..programs import Program, SymmetricProgram
from ..programs.ir import take_rows
from ..programs.symmetry_views import translate

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """An all-gather between groups, the same for every group up to translations of the torus `sizes`.

    In round i the ranks of a group send to the group at point ``to[i]``, each to the rank with its own number there,
    the shards of the groups ``rows[i]``; points are counted from the sender.
    """

    name: str
    sizes: tuple[int, ...]
    to: tuple[int, ...]
    rows: tuple[Ints, ...]

    def came(self) -> Ints:
        """The round in which a group's shards arrive, counted from 1, for each group as seen from the receiver."""
        groups = int(np.prod(self.sizes))
        found = np.zeros(groups, np.int64)
        for number, (to, row) in enumerate(zip(self.to, self.rows, strict=True), 1):
            found[translate(row, to, self.sizes, sign=-1)] = number
        return found


def exchanges(groups: int) -> Iterator[Exchange]:
    """The exchanges between so many groups: everyone to everyone, in a ring, and by doubling where that is possible.

    >>> [(e.name, len(e.to)) for e in exchanges(8)]
    [('direct', 7), ('ring', 7), ('recursive_doubling', 3)]
    """
    own = np.zeros(1, np.int64)
    turns = range(1, groups)
    yield Exchange(name="direct", sizes=(groups,), to=tuple(turns), rows=(own,) * (groups - 1))
    # The shard that is sent in a round came in the round before.
    ring = tuple((own - turn + 1) % groups for turn in turns)
    yield Exchange(name="ring", sizes=(groups,), to=(1,) * (groups - 1), rows=ring)
    if groups & (groups - 1) == 0:
        bits = range(groups.bit_length() - 1)
        held = tuple(np.arange(1 << bit) for bit in bits)
        sizes = (2,) * len(held)
        yield Exchange(name="recursive_doubling", sizes=sizes, to=tuple(1 << bit for bit in bits), rows=held)


def gathering(name: str, exchange: Exchange, inside: Program, *, pieces: int) -> SymmetricProgram:
    """An all-gather: shards go between groups, and are spread inside each group in the order of their arrival.

    Args:
        name: The program's name.
        exchange: The all-gather between groups.
        inside: An all-gather over the ranks of one group, with one chunk per shard.
        pieces: How many pieces each shard is cut into, >= 1.

    Returns:
        The symmetric program, not verified yet.
    """
    local, came = inside.collective.num_ranks, exchange.came()
    groups, each = len(came), inside.num_transfers + 1
    number = np.arange(local)
    src, dst, step, home, widths = [], [], [], [], []
    for turn, (to, row) in enumerate(zip(exchange.to, exchange.rows, strict=True)):
        src.append(number)
        dst.append(number + local * to)
        step.append(np.full(local, turn * each))
        home.append((number[:, None] + local * row).ravel())
        widths.append(np.full(local, len(row)))
    for t in range(inside.num_transfers):
        shards = inside.chunks_of(t)
        src.append(np.full(groups, inside.src[t]))
        dst.append(np.full(groups, inside.dst[t]))
        step.append(came * each + t + 1)
        home.append((shards + local * np.arange(groups)[:, None]).ravel())
        widths.append(np.full(groups, len(shards)))
    column = [np.concatenate(blocks) for blocks in (src, dst, step, widths)]
    ptr, homes = np.concatenate([[0], np.cumsum(column[3])]), np.concatenate(home)
    count, last = len(column[0]), (len(exchange.to) + 1) * each
    steps = (column[2] + last * np.arange(pieces)[:, None]).ravel()
    order = np.argsort(steps, kind="stable")
    which, rows = np.divmod(order, count)
    new_ptr, sent = take_rows(ptr, homes, rows)
    return SymmetricProgram.from_steps(
        name, "all_gather", exchange.sizes, pieces=pieces, dst=column[1][rows], home=sent,
        piece=np.repeat(which, np.diff(new_ptr)), step=steps[order], chunk_ptr=new_ptr, src=column[0][rows],
        local=local,
    )  # fmt: skip


def phased(local: int, groups: int, pieces: int) -> SymmetricProgram:
    """An all-to-all in phases: in phase k each group sends to the k-th after it, in phase 0 to itself.

    What a rank has for rank m of another group goes to rank m of its own group first, and from there, together with
    what its neighbors have, to the other group: every message between groups joins ranks of one number (a rail).

    Args:
        local: The number of ranks in a group.
        groups: The number of groups.
        pieces: How many pieces each shard is cut into, >= 1; pieces follow one another.

    Returns:
        The symmetric program, not verified yet.
    """
    ranks, number = local * groups, np.arange(local)
    giver, taker = (side.ravel() for side in np.meshgrid(number, number, indexing="ij"))
    apart = giver != taker
    giver, taker = giver[apart], taker[apart]
    src, dst, home, piece, widths = [], [], [], [], []
    # What stays inside a group comes last: it needs no time between groups, which the others do.
    for phase in [*range(1, groups), 0]:
        for part in range(pieces):
            src.append(giver)
            dst.append(taker)
            home.append(giver)
            piece.append((taker + local * phase) * pieces + part)
            widths.append(np.ones(len(giver), np.int64))
            if phase:
                src.append(number)
                dst.append(number + local * phase)
                home.append(np.tile(number, local))
                piece.append(np.repeat((number + local * phase) * pieces + part, local))
                widths.append(np.full(local, local))
    steps = np.repeat(np.arange(len(src)), [len(block) for block in src])
    cut = f",chunks={pieces}" if pieces > 1 else ""
    return SymmetricProgram.from_steps(
        f"symmetric(phases{cut})", "all_to_all", (groups,), pieces=ranks * pieces, dst=np.concatenate(dst),
        home=np.concatenate(home), piece=np.concatenate(piece), step=steps,
        chunk_ptr=np.concatenate([[0], np.cumsum(np.concatenate(widths))]), src=np.concatenate(src), local=local,
    )  # fmt: skip


def backwards(gather: SymmetricProgram, order: NDArray[np.intp]) -> SymmetricProgram:
    """The reduce-scatter that an all-gather becomes when its transfers go back, in `order`."""
    p, local = gather, gather.local
    away = p.dst.astype(np.int64) // local
    entry = np.repeat(away, np.diff(p.chunk_ptr))
    back = translate(p.home, entry, p.sizes, sign=-1, local=local).astype(np.int32)
    receiver = translate(p.src, away, p.sizes, sign=-1, local=local)
    ptr, home = take_rows(p.chunk_ptr, back, order)
    _, piece = take_rows(p.chunk_ptr, p.piece, order)
    return SymmetricProgram.from_steps(
        p.name, "reduce_scatter", p.sizes, pieces=p.pieces, dst=receiver[order], home=home,
        piece=piece, step=np.arange(len(order)), reduce=True, chunk_ptr=ptr, lane=p.lane[order],
        src=(p.dst % local)[order], local=local,
    )  # fmt: skip


def joined(scatter: SymmetricProgram, gather: SymmetricProgram) -> SymmetricProgram:
    """The all-reduce that a reduce-scatter and an all-gather over the same groups make, one after the other."""
    halves = (scatter, gather)
    columns = {
        key: np.concatenate([getattr(half, key) for half in halves])
        for key in ("src", "dst", "home", "piece", "reduce", "lane")
    }
    ptr = np.concatenate([scatter.chunk_ptr, scatter.chunk_ptr[-1] + gather.chunk_ptr[1:]])
    return SymmetricProgram.from_steps(
        gather.name, "all_reduce", gather.sizes, pieces=gather.pieces, chunk_ptr=ptr, local=gather.local,
        step=np.arange(len(columns["dst"])), **columns,
    )  # fmt: skip
