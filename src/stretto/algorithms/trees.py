# SPDX-License-Identifier: Apache-2.0
"""The messages of a tree, shared by chain, binomial and binary trees: pieces flow down (broadcast) or up (reduce)."""

from __future__ import annotations

import numpy as np

from .base import Ints, Steps

KINDS = ("broadcast", "reduce", "all_reduce")


def add_tree(
    steps: Steps, kind: str, parent: Ints, when: Ints, *, chunks: int, first_chunk: int = 0, lane: int = 0
) -> None:
    """Add the messages of one tree, in which node v (not the root) hears from ``parent[v]`` in round ``when[v]``.

    Rounds order messages that could start at once; piece j follows j rounds behind the first. An all-reduce flows up,
    and each piece turns around at the root.

    Args:
        steps: The collector to add the messages to.
        kind: "broadcast", "reduce" or "all_reduce".
        parent: The parent of each node, -1 for the root.
        when: The round of each node, >= 0, later than its parent's; for a reduce the rounds run backwards.
        chunks: How many pieces flow through the tree.
        first_chunk: The number of the first piece's chunk.
        lane: The connection number of all messages.
    """
    node = np.flatnonzero(parent >= 0)
    piece = np.arange(chunks)[:, None]
    chunk = (first_chunk + piece)[..., None]
    rounds = int(when[node].max(initial=-1)) + 1
    if kind != "broadcast":
        up = rounds - 1 - when[node] + piece
        steps.add(src=node, dst=parent[node], step=up, chunk=chunk, reduce=True, lane=lane)
    if kind != "reduce":
        start = rounds if kind == "all_reduce" else 0
        steps.add(src=parent[node], dst=node, step=start + when[node] + piece, chunk=chunk, lane=lane)


def depths(parent: Ints) -> Ints:
    """The distance of each node from the root (whose parent is -1); its time grows with the tree's depth."""
    depth = np.zeros(len(parent), np.int64)
    above = parent.copy()
    while np.any(above >= 0):
        inside = above >= 0
        depth += inside
        above = np.where(inside, parent[above], -1)
    return depth
