# SPDX-License-Identifier: Apache-2.0
"""Binary tree, pipelined: broadcast, reduce and all-reduce in pieces over one balanced tree.

Few latencies and pipelining; but every inner rank sends each byte twice, so on one port per rank it
reaches only half the bandwidth (`double_binary_tree` mends that). Subtrees are ranges of neighbours.

Cost with k chunks, depth h = floor(log2 n) and a link per pair: ``(h + k - 1) (alpha + beta S/k)``;
all-reduce ``(2h + k - 1) (alpha + beta S/k)``. Any n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import COLLECTIVES
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, label, placement, unless
from .trees import KINDS, add_tree, depths


def binary_tree(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 8,
    root: int = 0,
    in_place: bool = False,
    order: Sequence[int] | None = None,
) -> Program:
    """Build one balanced binary tree below the root.

    Args:
        kind: "broadcast", "reduce" or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces flow through the tree, >= 1.
        root: The root's rank; for an all-reduce only the top of the tree.
        in_place: Whether input and output share memory.
        order: The ranks in the order in which ranges of them become subtrees; 0..n-1 when not given.

    Returns:
        The program.

    >>> binary_tree("reduce", 7, chunks=1).num_transfers
    6
    """
    choose("collective for binary_tree", kind, KINDS)
    devices = devices_of(ranks, chunks, lambda n: 2 * n)
    n = len(devices)
    parent = _balanced(n)
    steps = Steps()
    add_tree(steps, kind, parent, depths(parent) - 1, chunks=chunks)
    name = label("binary_tree", chunks=unless(1, chunks), order=order)
    rooted = {} if kind == "all_reduce" else {"root": root}
    collective = COLLECTIVES[kind](devices, chunks=chunks, in_place=in_place, **rooted)
    return steps.program(name, collective, placement(n, order, root))


def _balanced(count: int) -> Ints:
    """The parent of each node: the first node of a range is its root, and the rest is cut into two ranges below it."""
    parent = np.full(count, -1, np.int64)
    ranges = [(0, count)]
    while ranges:
        first, end = ranges.pop()
        middle = (first + 1 + end + 1) // 2
        for low, high in ((first + 1, middle), (middle, end)):
            if low < high:
                parent[low] = first
                ranges.append((low, high))
    return parent


ALGORITHM = Algorithm(
    name="binary_tree",
    collectives=KINDS,
    build=binary_tree,
    where="any number of ranks",
    summary="piece after piece down (or up) a balanced binary tree; few latencies, pipelined",
)
