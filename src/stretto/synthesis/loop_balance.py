# SPDX-License-Identifier: Apache-2.0
"""Trees for plans that loop, one for each stream and all of nearly one size, so that streams end at about one time.

Streams share a link evenly, whatever their size: where sizes differ, the long ones are left over in the end and leave
links idle. So the rates of the linear program (`loop_packing`) are made into as many trees as there are streams, and a
local search moves single ranks below other parents, and chunks between trees of one root, until no link has much more
to do than the program says. There are many such packings, which take different times: a seed draws one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..errors import Infeasible
from .forest_trees import Forest
from .loop_packing import TreeLinks, TreePacking, _forest, _Rates

CHUNKS = 10
"""The chunks of a stream, about."""
POWER = 48.0
"""What a link's load counts: the power of its part of the best time."""
KICKS = 40
"""How often the search goes on from where it cannot get better."""
KICKED = 4
"""The ranks that are moved at random then."""
ROUNDS = 2000
DRAWN = 0.3
"""By how much of a tree the shares are disturbed, from which whole trees are made."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def balanced_forests(
    cluster: Cluster,
    devices: tuple[int, ...],
    streams: int,
    *,
    ways: Sequence[bool] = (False,),
    height: int = 3,
    room: float = 1.0,
    seed: int = 0,
) -> tuple[tuple[Forest, ...], float]:
    """Pack trees of nearly equal size from every device, as many as there are streams.

    Args:
        cluster: The cluster.
        devices: The devices, each of which is a root.
        streams: The most trees, >= the devices.
        ways: In which directions data goes along the trees, one after the other: True to the root, False from it.
        height: The most edges between a root and a rank (`loop_packing.packed_forests`).
        room: The part of its rate that a link may use which is a part of longer routes.
        seed: Which of many packings.

    Returns:
        As `packed_forests`: a forest for each way, and the nanoseconds that the fullest links take for one byte of
        every root.

    Raises:
        Infeasible: There are fewer streams than devices.
    """
    each = streams // len(devices)
    if not each:
        raise Infeasible(f"loop_trees: {streams} streams are fewer than {len(devices)} roots")
    sides = [TreeLinks(cluster, devices, reverse=reverse) for reverse in ways]
    rates = _Rates([side.per_share / np.where(side.shared, room, 1.0) for side in sides], len(devices), height)
    best = rates.solve()
    search = _Balance(best, rates, each, height if rates._low is not None else len(devices), seed)
    search.run()
    trees, amount = search.bundles()
    shares = CHUNKS * each
    packing = TreePacking(
        roots=tuple(root for root, _ in trees), trees=tuple(tree for _, tree in trees),
        share=amount / shares, ns_per_byte=best.ns_per_byte,
    )  # fmt: skip
    use = search.use() / shares
    full = sum(float((use @ side.per_share).max()) for side in sides)
    return tuple(
        _forest(cluster, devices, packing, amount, shares, side, reverse)
        for side, reverse in zip(sides, ways, strict=True)
    ), full


class _Balance:
    """One tree for each stream: the parents of all ranks, the root and the chunks."""

    def __init__(self, best: TreePacking, rates: _Rates, each: int, height: int, seed: int) -> None:
        self._n, self._height = rates.ranks, height
        self._random = np.random.default_rng(seed)
        self._links = np.concatenate(rates.per_share, axis=1)
        # Of an all-reduce both ways together take `ns_per_byte`: each about its part.
        self._best = best.ns_per_byte / len(rates.per_share) * CHUNKS * each
        self.root = np.repeat(np.arange(self._n), each)
        self.size = np.full(len(self.root), CHUNKS)
        self.parent = np.array([tree for r in range(self._n) for tree in self._begin(best, r, each)])
        ways = list(permutations(range(self._n), 3))
        self._rank, self._from, self._to = (np.array(column) for column in zip(*ways, strict=True))
        self._change = (
            self._links[self._pair(self._to, self._rank)] - self._links[self._pair(self._from, self._rank)]
        )  # fmt: skip

    def _begin(self, best: TreePacking, root: int, each: int) -> list[tuple[int, ...]]:
        """Whole trees of a root, as near to the best shares as they can be."""
        mine = [at for at, other in enumerate(best.roots) if other == root and best.share[at] > 0]
        wanted = best.share[mine] * each
        whole = np.floor(wanted).astype(np.int64)
        order = np.argsort(whole - wanted - DRAWN * self._random.random(len(mine)))
        whole[order[: each - int(whole.sum())]] += 1
        trees = [best.trees[at] for at, count in zip(mine, whole.tolist(), strict=True) for _ in range(count)]
        return (trees * each)[:each]

    def _pair(self, a: Ints, b: Ints) -> Ints:
        return a * (self._n - 1) + b - (b > a)

    def use(self) -> Floats:
        """The chunks on every pair of ranks."""
        child = np.tile(np.arange(self._n), (len(self.parent), 1))
        below = self.parent >= 0
        found = np.zeros(self._n * (self._n - 1))
        np.add.at(found, self._pair(self.parent[below], child[below]), np.repeat(self.size, below.sum(axis=1)))
        return found

    def bundles(self) -> tuple[list[tuple[int, tuple[int, ...]]], Ints]:
        """The different trees with their roots, and the chunks of each."""
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        for root, tree, size in zip(self.root.tolist(), self.parent.tolist(), self.size.tolist(), strict=True):
            key = root, tuple(tree)
            found[key] = found.get(key, 0) + size
        return sorted(found), np.array([found[key] for key in sorted(found)], np.int64)

    def run(self) -> None:
        """Move ranks and chunks for as long as that helps, and go on from the best after some moves at random."""
        load = self.use() @ self._links
        best = float(load.max()), self.parent.copy(), self.size.copy()
        kicks = 0
        for _ in range(ROUNDS):
            moved = self._move_rank(load) or self._move_chunk(load)
            if float(load.max()) < best[0] * (1 - 1e-12):
                best = float(load.max()), self.parent.copy(), self.size.copy()
            if not moved:
                kicks += 1
                if kicks > KICKS:
                    break
                self.parent, self.size = best[1].copy(), best[2].copy()
                for tree, rank, parent in self._random.integers((len(self.root), self._n, self._n), size=(KICKED, 3)):
                    if self.parent[tree, rank] >= 0 and self._fits(tree, rank, parent):
                        self.parent[tree, rank] = parent
                load[:] = self.use() @ self._links
        _, self.parent, self.size = best

    def _cost(self, load: Floats) -> Floats:
        return np.asarray(((np.maximum(load, 0.0) / self._best) ** POWER).sum(axis=-1))

    def _move_rank(self, load: Floats) -> bool:
        """Hang one rank below another parent in one tree, where that is the best such move."""
        now = float(self._cost(load)) * (1 - 1e-9)
        sizes = np.unique(self.size)
        cost = self._cost(load + sizes[:, None, None] * self._change)
        better = np.flatnonzero(cost.ravel() < now)
        for k in better[np.argsort(cost.ravel()[better])].tolist():
            size, at = sizes[k // len(self._change)], k % len(self._change)
            rank, before, parent = int(self._rank[at]), int(self._from[at]), int(self._to[at])
            trees = np.flatnonzero((self.parent[:, rank] == before) & (self.size == size))
            for tree in self._random.permutation(trees).tolist():
                if self._fits(tree, rank, parent):
                    self.parent[tree, rank] = parent
                    load += size * self._change[at]
                    return True
        return False

    def _move_chunk(self, load: Floats) -> bool:
        """Give one chunk of a tree to another one of its root, where that is the best such move."""
        child = np.arange(self._n)
        each = np.array([
            self._links[self._pair(tree[tree >= 0], child[tree >= 0])].sum(axis=0) for tree in self.parent
        ])  # fmt: skip
        more, less = np.nonzero(
            (self.root[:, None] == self.root)
            & (self.size[:, None] <= CHUNKS)
            & (self.size >= CHUNKS)
            & ~np.eye(len(self.root), dtype=np.bool_)
        )
        if not len(more):
            return False
        cost = self._cost(load + each[more] - each[less])
        k = int(cost.argmin())
        if cost[k] >= float(self._cost(load)) * (1 - 1e-9):
            return False
        self.size[more[k]] += 1
        self.size[less[k]] -= 1
        load += each[more[k]] - each[less[k]]
        return True

    def _fits(self, tree: int, rank: int, parent: int) -> bool:
        """Whether a rank may hang below another one: not below itself, and not too deep."""
        if rank == parent:
            return False
        parents = self.parent[tree].tolist()
        parents[rank] = parent
        for v in range(self._n):
            depth = 0
            while parents[v] >= 0 and depth <= self._height:
                v, depth = parents[v], depth + 1
            if depth > self._height:
                return False
        return True
