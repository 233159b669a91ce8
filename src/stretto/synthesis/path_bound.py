# SPDX-License-Identifier: Apache-2.0
"""`path_bound`: a time that no program beats whose messages take the routes of a GPU's memory.

A GPU that reads or writes a peer's memory does not choose the route, so a plan can relay through other GPUs but not
send over PCIe between two GPUs that have NVLink. The argument is that of every bound (docs/bounds.md): weights on
links, and the least weighted bytes that any program sends.

- All-gather, reduce-scatter: the messages with a byte of one rank reach all others, so they hold a tree, and weigh at
  least as much as the cheapest one from (to) that rank.
- All-to-all: what a rank has for another one takes a path there, and weighs at least as much as the cheapest.
- All-reduce: up to the moment when a first rank has the sum of a byte, messages form a tree to it. Every other rank has
  its sum later, from a message that is none of these and weighs at least as much as the cheapest into that rank. The
  cheapest root counts. Nothing is said about trees that spread: sums may be complete in several places at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible
from ..simulator import Bound
from ..solvers.linear import LinearProgram
from .loop_packing import TreeLinks

DONE = 1e-9
"""The part of the bound by which a set of messages has to be cheaper than those that are known."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Floats = NDArray[np.float64]


def path_bound(collective: Collective, cluster: Cluster, nbytes: float) -> Bound:
    """The least time of any program whose messages take the routes of a GPU's memory, alphas left aside.

    Args:
        collective: An all-gather, a reduce-scatter, an all-reduce or an all-to-all of at least two ranks.
        cluster: The cluster.
        nbytes: The larger of one rank's send and receive buffer in bytes, > 0.

    Returns:
        The bound, with weights on links that prove it.

    Raises:
        Infeasible: The collective is of another kind, or routes depend on the size of messages.

    >>> from stretto import AllGather
    >>> path_bound(AllGather(8), Cluster.preset("ndv2"), 1e9)
    <Bound 6.461 ms: trees over the routes of GPU memory (linear program)>
    """
    if collective.kind not in KINDS or collective.num_ranks < 2:
        raise Infeasible(f"path_bound: serves {', '.join(KINDS)} of at least two ranks, not {collective.kind}")
    search = _Weights(collective, cluster)
    weights, per_byte = search.solve()
    used = np.flatnonzero(weights > 0)
    rates = cluster.link_gb_per_s[search.links[used]] * 1e3
    demand = per_byte * nbytes
    took = demand / float(weights[used] @ rates)
    return Bound(
        total_us=took, bandwidth_us=took, latency_us=0.0,
        reason=f"{'paths' if collective.kind == 'all_to_all' else 'trees'} over the routes of GPU memory",
        method="linear program", exact=collective.kind != "all_reduce", links=search.links[used],
        weights=weights[used], demand_bytes=demand, nbytes=float(nbytes),
    )  # fmt: skip


class _Weights:
    """The weights of links for which the cheapest messages weigh most; rows are added as they are found to be cheaper.

    The columns are a weight for each link, of which all together (times their rates) are 1, and the weighted bytes of
    each kind of data: that of every root, or the one kind of an all-reduce.
    """

    def __init__(self, collective: Collective, cluster: Cluster) -> None:
        n = self._ranks = collective.num_ranks
        self._sums, self._apart = collective.kind == "all_reduce", collective.kind == "all_to_all"
        paths = TreeLinks(cluster, collective.ranks, reverse=collective.kind in ("reduce_scatter", "all_reduce"))
        near, far = (np.array([pair[side] for pair in paths.pairs], np.int32) for side in (0, 1))
        if int(cluster.route_classes(near, far).max(initial=1)) > 1:
            raise Infeasible(f"path_bound: routes of {cluster.name} depend on the size of messages")
        self.links = np.array(sorted({link for route in paths.routes for link in route}), np.int64)
        self._passes = paths.per_share > 0
        self._ends = np.array([(a, b) for a in range(n) for b in range(n) if a != b], np.int32)
        rates = cluster.link_gb_per_s[self.links] * 1e3
        self._model = LinearProgram(maximize=True)
        self._kinds = 1 if self._sums else n
        for _ in self.links:
            self._model.column()
        for _ in range(self._kinds):
            self._model.column(cost=1.0 / self._kinds)
        self._model.row(np.arange(len(rates)), rates, upper=1.0)
        self._weights: Floats = 1 / (len(rates) * rates)

    def solve(self) -> tuple[Floats, float]:
        """The weights, and the least weighted bytes for a byte of the whole collective."""
        best, known = (self._weights, 0.0), set[tuple[int, bytes]]()
        while True:
            weighed, counts = self._cheapest(self._weights)
            best = max(best, (self._weights, float(weighed.mean())), key=lambda pair: pair[1])
            rows = {(kind, count.tobytes()): count for kind, count in enumerate(counts)}
            for key, count in rows.items():
                if key not in known:
                    used = np.flatnonzero(count)
                    at = [*used.tolist(), len(self.links) + key[0]]
                    self._model.row(at, [*count[used].tolist(), -1.0], lower=0.0)
            found = self._model.solve()
            if found.objective <= best[1] * (1 + DONE) or rows.keys() <= known:
                return best
            known |= rows.keys()
            self._weights = np.maximum(found.values[: len(self.links)], 0.0)

    def _cheapest(self, weights: Floats) -> tuple[Floats, Floats]:
        """What the cheapest messages for a byte of each kind weigh, and how often they pass every link."""
        n = self._ranks
        cost = np.asarray(self._passes @ weights)
        if self._apart:
            counts = self._cheapest_paths(cost)
            return counts @ weights, counts
        _, spread, *_ = _native.cheapest_trees(
            n, self._ends[:, 0].copy(), self._ends[:, 1].copy(), cost, np.zeros(n, np.bool_),
            np.arange(n, dtype=np.int32),
        )  # fmt: skip
        counts = np.zeros((n, len(self.links)))
        for root in range(n):
            for v in range(n):
                if v != root:
                    counts[root] += self._passes[self._number(int(spread[root * n + v]), v)]
        if self._sums:
            # Pairs are written from the root outward and data goes inward: what comes into v begins with it.
            last = [
                min((k for k in range(len(cost)) if self._ends[k, 0] == v), key=lambda k: cost[k]) for v in range(n)
            ]
            into = self._passes[last].astype(np.float64)
            counts += into.sum(axis=0) - into
            counts = counts[[int((counts @ weights).argmin())]]
        return counts @ weights, counts

    def _cheapest_paths(self, cost: Floats) -> Floats:
        """How often the cheapest paths from each rank to all others pass every link."""
        n = self._ranks
        table = np.zeros((n, n))
        table[~np.eye(n, dtype=np.bool_)] = cost
        before = np.tile(np.arange(n)[:, None], (1, n))
        for middle in range(n):
            through = table[:, [middle]] + table[[middle], :]
            shorter = through < table
            table = np.where(shorter, through, table)
            before = np.where(shorter, before[middle][None, :], before)
        counts = np.zeros((n, len(self.links)))
        for root in range(n):
            for v in range(n):
                while v != root:
                    counts[root] += self._passes[self._number(int(before[root, v]), v)]
                    v = int(before[root, v])
        return counts

    def _number(self, a: int, b: int) -> int:
        """The number of a pair of ranks."""
        return a * (self._ranks - 1) + b - (b > a)
