"""What chain, binomial and binary trees share: pieces that flow down (broadcast) or up (reduce) a tree."""

from __future__ import annotations

import numpy as np

from .base import Ints, Steps

KINDS = ("broadcast", "reduce", "all_reduce")


def add_tree(
    steps: Steps, kind: str, parent: Ints, when: Ints, *, chunks: int, first_chunk: int = 0, lane: int = 0
) -> None:
    """Add one tree: node v (not the root) hears from ``parent[v]`` in round ``when[v]``.

    Rounds order what could happen at once; piece j follows j rounds behind the first. An all-reduce flows
    up, and each piece turns around at the root."""
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
    """How far each node is from the root (whose parent is -1); meant for shallow trees."""
    depth = np.zeros(len(parent), np.int64)
    above = parent.copy()
    while np.any(above >= 0):
        inside = above >= 0
        depth += inside
        above = np.where(inside, parent[above], -1)
    return depth
