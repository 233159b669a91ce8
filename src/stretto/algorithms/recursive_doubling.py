# SPDX-License-Identifier: Apache-2.0
"""Recursive doubling: all-gather and all-reduce in log2(n) exchanges.

In step i every rank exchanges with the rank whose number differs in bit i. Wins for small messages, where
latency counts: the all-gather is optimal in both terms, the all-reduce sends the whole tensor every time.

Cost, one chunk: all-gather ``log2(n) alpha + beta S (n-1)/n``; all-reduce ``log2(n) (alpha + beta S)``,
and two steps more where n is no power of two: n - p ranks (p the power of two below n) fold into a
neighbour first and are told the result at the end. With k chunks and a link per partner, all-reduce takes
``(log2(n) + k - 1) (alpha + beta S/k)``. Defined for any n (all-reduce), powers of two (all-gather;
`bruck` does any n).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import COLLECTIVES
from ..errors import InvalidInput
from ..programs.ir import Program
from .base import Algorithm, Ranks, Steps, choose, devices_of, each_to_each, is_power_of_two, label, placement, unless

KINDS = ("all_gather", "all_reduce")


def recursive_doubling(
    kind: str, ranks: Ranks, *, chunks: int = 1, in_place: bool = False, order: Sequence[int] | None = None
) -> Program:
    """Build exchanges with the rank 1, 2, 4, ... away.

    Args:
        kind: "all_gather" (n a power of two) or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard (or the tensor) is cut into, >= 1.
        in_place: Whether input and output share memory.
        order: The ranks in the order of positions; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: An all-gather over a number of ranks that is not a power of two.

    >>> recursive_doubling("all_reduce", 8).num_transfers
    24
    """
    choose("collective for recursive_doubling", kind, KINDS)
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    refused = _refusal(kind, n)
    if refused:
        raise InvalidInput(f"ranks: {refused}")
    steps = Steps()
    (_all_gather if kind == "all_gather" else _all_reduce)(steps, n, chunks)
    collective = COLLECTIVES[kind](devices, chunks=chunks, in_place=in_place)
    name = label("recursive_doubling", chunks=unless(1, chunks), order=order)
    return steps.program(name, collective, placement(n, order))


def _all_gather(steps: Steps, n: int, chunks: int) -> None:
    rank = np.arange(n)
    piece = np.arange(chunks)[:, None]
    for i in range(n.bit_length() - 1):
        held = (rank >> i << i)[:, None] + np.arange(1 << i)
        steps.add(src=rank, dst=rank ^ 1 << i, step=i + piece, chunk=held * chunks + piece[:, :, None])


def _all_reduce(steps: Steps, n: int, chunks: int) -> None:
    power = 1 << n.bit_length() - 1
    extra = n - power
    piece = np.arange(chunks)[:, None]
    chunk = piece[:, :, None]
    folded = 2 * np.arange(extra)
    active = np.concatenate([folded, np.arange(2 * extra, n)])
    if extra:
        steps.add(src=folded + 1, dst=folded, step=piece, chunk=chunk, reduce=True)
    rounds = power.bit_length() - 1
    for i in range(rounds):
        partner = active[np.arange(power) ^ 1 << i]
        steps.add(src=active, dst=partner, step=1 + i + piece, chunk=chunk, reduce=True)
    if extra:
        steps.add(src=folded, dst=folded + 1, step=1 + rounds + piece, chunk=chunk)


def _refusal(kind: str, count: int) -> str | None:
    if kind == "all_gather" and not is_power_of_two(count):
        return f"recursive_doubling all_gather needs a power of two, not {count}; bruck takes any"
    return None


ALGORITHM = Algorithm(
    name="recursive_doubling",
    collectives=KINDS,
    build=recursive_doubling,
    refusal=_refusal,
    where="any number of ranks (all_reduce), powers of two (all_gather)",
    summary="exchange everything with the rank 1, 2, 4, ... away; the least latencies",
)
