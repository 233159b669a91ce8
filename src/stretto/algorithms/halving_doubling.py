# SPDX-License-Identifier: Apache-2.0
"""Halving-doubling (Rabenseifner): reduce-scatter by recursive halving, all-gather by recursive doubling.

Each exchange halves (doubles) what is still to be moved, so it is optimal in bandwidth and takes only
log2(n) latencies: the best all-round choice on a network where every pair is equally near. `largest` says
whether the largest messages go to the nearest partner (good where ranks of a host are neighbours) or to
the farthest.

Cost for n a power of two: reduce-scatter, all-gather ``log2(n) alpha + beta S (n-1)/n``; all-reduce twice
that. Otherwise n - p ranks (p the power of two below n) fold into a neighbour first (``alpha + beta S``
for reduce-scatter and all-reduce, ``alpha + beta S/n`` for all-gather) and get their part at the end.
Any n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import COLLECTIVES
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, each_to_each, label, placement, unless

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def halving_doubling(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    largest: str = "near",
    order: Sequence[int] | None = None,
) -> Program:
    """Build a reduce-scatter by recursive halving, an all-gather by recursive doubling, or an all-reduce by both.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard is cut into, >= 1.
        in_place: Whether input and output share memory.
        largest: Whether the largest messages go to the nearest partner ("near") or to the farthest ("far").
        order: The ranks in the order of positions; 0..n-1 when not given.

    Returns:
        The program.

    >>> halving_doubling("all_reduce", 8).num_transfers
    48
    """
    choose("collective for halving_doubling", kind, KINDS)
    choose("largest", largest, ("near", "far"))
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    power = 1 << n.bit_length() - 1
    extra = n - power
    rounds = power.bit_length() - 1
    bits = range(rounds) if largest == "near" else range(rounds - 1, -1, -1)
    active = np.concatenate([2 * np.arange(extra), np.arange(2 * extra, n)])
    blocks = _blocks(kind, n, extra, power, chunks, largest)
    steps = Steps()
    # In an all-reduce a connection serves a piece twice, the second time an odd number of steps later.
    later = np.arange(chunks)[:, None] * (2 if kind == "all_reduce" else 1)
    everything = blocks.reshape(chunks, 1, -1)
    folded = active[:extra]
    own = blocks[:, :extra, 1:]  # a folded rank's shard, where there are shards
    if extra:
        brought = own if kind == "all_gather" else everything
        steps.add(src=folded + 1, dst=folded, step=later, chunk=brought, reduce=kind != "all_gather")
    start = 1
    if kind != "all_gather":
        for at, (partner, sent) in enumerate(halvings(power, bits)):
            chunk = blocks[:, sent].reshape(chunks, power, -1)
            steps.add(src=active, dst=active[partner], step=start + at + later, chunk=chunk, reduce=True)
        start += rounds
    if kind != "reduce_scatter":
        for at, (partner, sent) in enumerate(reversed(halvings(power, bits))):
            chunk = blocks[:, sent].reshape(chunks, power, -1)
            steps.add(src=active[partner], dst=active, step=start + at + later, chunk=chunk)
        start += rounds
    if extra:
        told = everything
        if kind != "all_reduce":
            told = own if kind == "reduce_scatter" else np.where(everything == own, -1, everything)
        steps.add(src=folded, dst=folded + 1, step=start + later, chunk=told)

    pieces = chunks * power if kind == "all_reduce" else chunks
    collective = COLLECTIVES[kind](devices, chunks=pieces, in_place=in_place)
    name = label("halving_doubling", chunks=unless(1, chunks), largest=unless("near", largest), order=order)
    return steps.program(name, collective, placement(n, order))


def halvings(power: int, bits: Sequence[int]) -> list[tuple[Ints, Ints]]:
    """For each round of a reduce-scatter: every rank's partner, and the blocks it sends there.

    >>> [(partner.tolist(), sent[0].tolist()) for partner, sent in halvings(4, [1, 0])]
    [([2, 3, 0, 1], [2, 3]), ([1, 0, 3, 2], [1])]
    """
    rank = np.arange(power)
    rounds = []
    kept = np.broadcast_to(rank, (power, power))
    for bit in bits:
        partner = rank ^ 1 << bit
        away = (kept ^ rank[:, None]) >> bit & 1 == 1
        shape = (power, kept.shape[1] // 2)
        rounds.append((partner, kept[away].reshape(shape)))
        kept = kept[~away].reshape(shape)
    return rounds


def _blocks(kind: str, n: int, extra: int, power: int, chunks: int, largest: str) -> Ints:
    """The chunks of each block, indexed by (piece, block, member); -1 stands for no chunk."""
    piece = np.arange(chunks)[:, None, None]
    block = np.arange(power)
    if kind == "all_reduce":
        # Blocks are named so that each message is one contiguous range.
        return np.asarray(piece * power + (bit_reversed(power) if largest == "near" else block)[:, None])
    shard = np.where(block < extra, 2 * block, block + extra)[:, None] + np.arange(2 if extra else 1)
    if extra:
        shard[extra:, 1] = -1
    return np.where(shard < 0, -1, shard * chunks + piece)


def bit_reversed(power: int) -> Ints:
    """The numbers below a power of two with their bits read backwards.

    >>> bit_reversed(8).tolist()
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    reverse = np.zeros(1, np.int64)
    while len(reverse) < power:
        reverse = np.concatenate([2 * reverse, 2 * reverse + 1])
    return reverse


ALGORITHM = Algorithm(
    name="halving_doubling",
    collectives=KINDS,
    build=halving_doubling,
    where="any number of ranks",
    summary="exchange halves with the rank 1, 2, 4, ... away; few latencies and the least bytes",
)
