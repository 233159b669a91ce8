# SPDX-License-Identifier: Apache-2.0
"""Double binary tree (Sanders, Speck, Träff): two complementary trees, each carrying half of the data.

Below the root, which feeds both, the other ranks form two trees such that (nearly) every rank is a leaf
in one and an inner node in the other; so each sends and receives every byte about once. Logarithmic
latency and full bandwidth: the choice for broadcast, reduce and all-reduce of middling size over many
ranks.

Cost with k chunks per tree, depth h = floor(log2(n-1)) + 1 and a link per pair: broadcast, reduce
``(h + k - 1) (alpha + beta S/(2k))``; all-reduce ``(2h + k - 1) (alpha + beta S/(2k))``. Any n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import COLLECTIVES
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, label, placement, unless
from .trees import KINDS, add_tree, depths


def double_binary_tree(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 4,
    root: int = 0,
    in_place: bool = False,
    order: Sequence[int] | None = None,
) -> Program:
    """Build two complementary trees that carry half of the data each.

    Args:
        kind: "broadcast", "reduce" or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces flow through each tree, >= 1.
        root: The root's rank; for an all-reduce only the top of both trees.
        in_place: Whether input and output share memory.
        order: The ranks in the order of positions in the trees; 0..n-1 when not given.

    Returns:
        The program.

    >>> double_binary_tree("all_reduce", 8).num_transfers
    112
    """
    choose("collective for double_binary_tree", kind, KINDS)
    devices = devices_of(ranks, chunks, lambda n: 4 * n)
    n = len(devices)
    steps = Steps()
    for tree, parent in enumerate(two_trees(n)):
        add_tree(steps, kind, parent, depths(parent) - 1, chunks=chunks, first_chunk=tree * chunks, lane=tree)
    name = label("double_binary_tree", chunks=unless(1, chunks), order=order)
    rooted = {} if kind == "all_reduce" else {"root": root}
    collective = COLLECTIVES[kind](devices, chunks=2 * chunks, in_place=in_place, **rooted)
    return steps.program(name, collective, placement(n, order, root))


def two_trees(count: int) -> tuple[Ints, Ints]:
    """The parents in both trees; node 0 is the root of both.

    >>> [tree.tolist() for tree in two_trees(8)]
    [[-1, 2, 4, 2, 0, 6, 4, 6], [-1, 3, 1, 0, 5, 3, 5, 1]]
    """
    below = count - 1
    node = np.arange(1, count)
    # In the in-order tree over 1..m odd nodes are leaves and even ones are not. In the second tree each takes
    # a place of the other parity: the mirrored one where m is even, the next one where m is odd.
    place = below + 1 - node if below % 2 == 0 else node % max(below, 1) + 1
    parents = []
    for at in (node, place):
        node_at = np.zeros(count, np.int64)
        node_at[at] = node
        parents.append(np.concatenate([[-1], node_at[_in_order_parent(below)[at - 1]]]))
    return parents[0], parents[1]


def _in_order_parent(below: int) -> Ints:
    place = np.arange(1, below + 1)
    low = place & -place
    above = (place ^ low) | low << 1
    return np.where(above <= below, above, place ^ low)


ALGORITHM = Algorithm(
    name="double_binary_tree",
    collectives=KINDS,
    build=double_binary_tree,
    where="any number of ranks",
    summary="two complementary pipelined trees with half the data each; few latencies, full bandwidth",
)
