# SPDX-License-Identifier: Apache-2.0
"""Pairwise all-to-all: n-1 rounds, in each of which every rank has one partner.

Where `direct` starts everything at once, here a rank begins a round when what it receives in the round
before has arrived, so that no port serves two messages at a time: the choice for large messages on shared
ports and where many senders into one port lose throughput.

Cost ``(n-1) (alpha + beta S/n)``. In round s rank r exchanges with r XOR s where n is a power of two, and
else sends to r+s and receives from r-s (`pattern` chooses). Any n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import AllToAll
from ..errors import InvalidInput
from ..programs.ir import Program
from .base import Algorithm, Ranks, Steps, choose, devices_of, each_to_each, is_power_of_two, label, placement, unless

KINDS = ("all_to_all",)


def pairwise(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    pattern: str | None = None,
    order: Sequence[int] | None = None,
) -> Program:
    """Build an all-to-all of n-1 rounds with one partner per round.

    Args:
        kind: "all_to_all".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard is cut into, >= 1.
        in_place: Whether input and output share memory.
        pattern: "xor" (n a power of two) or "shift"; "xor" where n allows it when not given.
        order: The ranks in the order of positions; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: The pattern is "xor" and n is not a power of two.

    >>> pairwise("all_to_all", 4).num_transfers
    12
    """
    choose("collective for pairwise", kind, KINDS)
    choose("pattern", pattern, (None, "xor", "shift"))
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    if pattern == "xor" and not is_power_of_two(n):
        raise InvalidInput(f"pattern: xor needs a power of two, not {n} ranks; choose shift")
    xor = pattern != "shift" and is_power_of_two(n)
    rank = np.arange(n)
    turn = np.arange(1, n)[:, None, None]
    piece = np.arange(chunks)[:, None]
    dst = rank ^ turn if xor else (rank + turn) % n
    sender = rank ^ turn if xor else (rank - turn) % n
    steps = Steps()
    chunk = (rank * n + dst) * chunks + piece
    steps.add(src=rank, dst=dst, step=turn * chunks + piece, chunk=chunk[..., None])
    name = label("pairwise", chunks=unless(1, chunks), pattern=pattern, order=order)
    program = steps.program(name, AllToAll(devices, chunks=chunks, in_place=in_place), placement(n, order))
    # Message (turn, piece, rank) is number ((turn-1)*chunks + piece)*n + rank. The messages of a round wait for the
    # last message that the same rank receives in the previous round.
    waits = np.zeros((max(n - 1, 0), chunks, n), np.int64)
    waits[1:] = 1
    last = ((turn[:-1] - 1) * chunks + chunks - 1) * n + sender[:-1]
    after = np.broadcast_to(last, (max(n - 2, 0), chunks, n))
    return program.replace(after_ptr=np.concatenate([[0], np.cumsum(waits)]), after=after.ravel().astype(np.int32))


ALGORITHM = Algorithm(
    name="pairwise",
    collectives=KINDS,
    build=pairwise,
    where="any number of ranks",
    summary="n-1 rounds with one partner each; no port serves two messages at a time",
)
