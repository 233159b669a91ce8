# SPDX-License-Identifier: Apache-2.0
"""Bruck's all-gather and all-to-all: ceil(log2(n)) steps for any n.

All-gather: in step i rank r sends what it has gathered to r - 2^i. Optimal in both terms for any n; it
wins over the ring for small messages. All-to-all: in step i everything whose remaining distance has bit i
set moves on by 2^i; every byte travels about log2(n)/2 times, so it wins only for small messages.

Cost: all-gather ``ceil(log2 n) alpha + beta S (n-1)/n``; all-to-all ``ceil(log2 n) alpha + beta (S/n) w``
where w is the number of ones in the binary forms of 1..n-1 (n log2(n) / 2 for powers of two). Any n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import COLLECTIVES
from ..programs.ir import Program
from .base import Algorithm, Ranks, Steps, choose, devices_of, label, placement, unless

KINDS = ("all_gather", "all_to_all")


def bruck(
    kind: str, ranks: Ranks, *, chunks: int = 1, in_place: bool = False, order: Sequence[int] | None = None
) -> Program:
    """Build Bruck's all-gather or all-to-all, which takes ceil(log2(n)) steps.

    Args:
        kind: "all_gather" or "all_to_all".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard is cut into, >= 1.
        in_place: Whether input and output share memory.
        order: The ranks in the order of positions; 0..n-1 when not given.

    Returns:
        The program.

    >>> bruck("all_gather", 5).num_transfers
    15
    """
    choose("collective for bruck", kind, KINDS)
    devices = devices_of(ranks, chunks, lambda n: n * n * n.bit_length())
    n = len(devices)
    steps = Steps()
    rank = np.arange(n)
    piece = np.arange(chunks)[:, None]
    for i in range((n - 1).bit_length()):
        jump = 1 << i
        if kind == "all_gather":
            shard = (rank[:, None] + np.arange(min(jump, n - jump))) % n
            dst = (rank - jump) % n
        else:
            distance = np.arange(n)
            distance = distance[distance >> i & 1 == 1]
            origin = (rank[:, None] - distance % jump) % n
            shard = origin * n + (origin + distance) % n
            dst = (rank + jump) % n
        steps.add(src=rank, dst=dst, step=i + piece, chunk=shard * chunks + piece[..., None])
    name = label("bruck", chunks=unless(1, chunks), order=order)
    collective = COLLECTIVES[kind](devices, chunks=chunks, in_place=in_place)
    return steps.program(name, collective, placement(n, order))


ALGORITHM = Algorithm(
    name="bruck",
    collectives=KINDS,
    build=bruck,
    where="any number of ranks",
    summary="jumps of 1, 2, 4, ... with ever more (or half of all) data; the least latencies for any n",
)
