# SPDX-License-Identifier: Apache-2.0
"""Binomial tree: broadcast, reduce, gather and scatter in ceil(log2(n)) rounds.

The root first serves the rank half of all away, then both serve the rank a quarter away, and so on;
subtrees are ranges of neighbours. The choice for small broadcasts; gather and scatter move every byte at
most log2(n) times but pay only log2(n) latencies at the root.

Cost, one port per rank: broadcast, reduce ``ceil(log2 n) (alpha + beta S)``; gather, scatter, n a power
of two, ``log2(n) alpha + beta S (n-1)/n``. Any n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import COLLECTIVES
from ..programs.ir import Program
from .base import Algorithm, Ranks, Steps, choose, devices_of, label, placement, unless
from .trees import add_tree

KINDS = ("broadcast", "reduce", "gather", "scatter")


def binomial(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    root: int = 0,
    in_place: bool = False,
    order: Sequence[int] | None = None,
) -> Program:
    """Build a binomial tree, in which the distance between partners halves (or doubles) every round.

    Args:
        kind: "broadcast", "reduce", "gather" or "scatter".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces (of each shard, where there are shards) flow through the tree, >= 1.
        root: The root's rank.
        in_place: Whether the root's input and output share memory.
        order: The ranks in the order of positions in the tree; 0..n-1 when not given.

    Returns:
        The program.

    >>> binomial("broadcast", 8).num_transfers
    7
    """
    choose("collective for binomial", kind, KINDS)
    devices = devices_of(ranks, chunks, lambda n: n * n.bit_length())
    n = len(devices)
    rounds = (n - 1).bit_length()
    steps = Steps()
    if kind in ("broadcast", "reduce"):
        node = np.arange(n)
        jump = node & -node
        when = rounds - 1 - np.log2(np.maximum(jump, 1)).astype(np.int64)
        add_tree(steps, kind, np.where(node > 0, node - jump, -1), when, chunks=chunks)
    else:
        piece = np.arange(chunks)[:, None]
        for at in range(rounds):
            jump_by = 1 << (at if kind == "gather" else rounds - 1 - at)
            node = np.arange(jump_by, n, 2 * jump_by)
            shard = node[:, None] + np.arange(jump_by)
            chunk = np.where(shard < n, shard, -1) * chunks + piece[..., None]
            ends = (node, node - jump_by) if kind == "gather" else (node - jump_by, node)
            steps.add(src=ends[0], dst=ends[1], step=at + piece, chunk=np.where(shard < n, chunk, -1))
    name = label("binomial", chunks=unless(1, chunks), order=order)
    collective = COLLECTIVES[kind](devices, root=root, chunks=chunks, in_place=in_place)
    return steps.program(name, collective, placement(n, order, root))


ALGORITHM = Algorithm(
    name="binomial",
    collectives=KINDS,
    build=binomial,
    where="any number of ranks",
    summary="the number of ranks that are served doubles every round; the least latencies",
)
