# SPDX-License-Identifier: Apache-2.0
"""A quick routing: trees are grown one chunk at a time around busy links, then removed and regrown."""

from __future__ import annotations

import heapq

import numpy as np

from .routing_problem import Routing, RoutingProblem

ROUNDS = 4
UNWANTED = 1e9
"""The factor on the price of a way that opens a new connection under uc-min. All connections of a GPU over a switch
share its port, so that one connection loads the links no more than many do; but ways become long, so that searches
with haste do not use the factor. uc-max needs no factor: many connections are opened anyway."""
SHARPNESS = 6
"""The exponent with which the price of a link grows with its load relative to the busiest link."""


def search(problem: RoutingProblem, *, seed: int = 0, rounds: int = ROUNDS, haste: float = 0.0) -> Routing | None:
    """Find a good routing in a fraction of a second.

    Args:
        problem: The routing problem.
        seed: The seed; different seeds give different routings.
        rounds: How often all trees are removed and regrown.
        haste: The weight of early arrival relative to the load of links, >= 0.

    Returns:
        The routing with the least cost found, or None when some target was not reached.
    """
    state = _State(problem, seed)
    state.haste = haste
    order = sorted(range(len(problem.pairs_of)), key=lambda c: -float(problem.limit_us[c]))
    for c in order:
        state.grow(c)
    best, best_cost = state.chosen.copy(), problem.cost_us(state.chosen)
    for _ in range(rounds):
        for c in state.rng.permutation(order).tolist():
            if state.leaders[c]:
                state.remove(c)
                state.grow(c)
                for other in state.family.get(c, ()):
                    state.grow(other)
        cost = problem.cost_us(state.chosen)
        if cost < best_cost:
            best, best_cost = state.chosen.copy(), cost
    return problem.routing(best, by="search")


class _State:
    def __init__(self, problem: RoutingProblem, seed: int) -> None:
        self.problem = problem
        self.rng = np.random.default_rng(seed)
        self.haste = 0.0
        self.chosen = np.zeros(problem.num_orbits, np.bool_)
        self.load = [0.0] * problem.logical.hops.cluster.num_links
        self.uses = [0] * problem.logical.hops.num_hops
        src, dst = problem.logical.src.tolist(), problem.logical.dst.tolist()
        self.out: list[dict[int, list[tuple[int, int, float]]]] = []
        orbit, us = problem.orbit.tolist(), problem.us.tolist()
        hop = problem.hop.tolist()
        for pairs in problem.pairs_of:
            table: dict[int, list[tuple[int, int, float]]] = {}
            for p in pairs:
                table.setdefault(src[hop[p]], []).append((dst[hop[p]], orbit[p], us[p]))
            self.out.append(table)
        owner: dict[int, int] = {}
        self.leaders = [True] * len(problem.pairs_of)
        self.family: dict[int, list[int]] = {}
        for c, pairs in enumerate(problem.pairs_of):
            first = min((owner.setdefault(orbit[p], c) for p in pairs), default=c)
            if first != c:
                self.leaders[c] = False
                self.family.setdefault(first, []).append(c)

    def price(self, orbit: int, us: float) -> float:
        """The price of an orbit: high on busy links, nearly nothing where the orbit is chosen already."""
        if self.chosen[orbit]:
            return 1e-3 * us
        top = max(self.peak, 1e-9)
        total = 0.02 * us
        for link, busy in self.problem.orbit_loads[orbit]:
            total += busy * float(((self.load[link] + busy) / top) ** SHARPNESS)
        policy, hop = ("none", 0) if self.haste else self.problem.orbit_policy[orbit]
        if policy == "uc-min" and not self.uses[hop]:
            total *= UNWANTED
        return total * (1 + 0.1 * float(self.rng.random()))

    def grow(self, c: int) -> None:
        """Complete the tree of a chunk, cheap links first; ranks that get the chunk early send it on more often."""
        self.peak = max(max(self.load), 1e-9)
        out, targets = self.out[c], set(self.problem.logical.targets[c])
        tree = set(self.problem.logical.sources[c])
        free = dict.fromkeys(tree, 0.0)
        heap: list[tuple[float, float, int, int, int, float]] = []
        way_to: dict[int, tuple[int, int, float]] = {}

        def spread(rank: int, at: float) -> None:
            for to, orbit, us in out.get(rank, ()):
                if to not in tree:
                    cost = at + self.price(orbit, us)
                    heapq.heappush(heap, (cost + self.haste * (free[rank] + us), cost, to, rank, orbit, us))

        for rank in sorted(tree):
            spread(rank, 0.0)
        while heap and not targets <= tree:
            key, cost, rank, parent, orbit, us = heapq.heappop(heap)
            if rank in tree or (rank in way_to and rank not in targets):
                continue
            now = cost + self.haste * (free[parent] + us)
            if now > key * (1 + 1e-9):
                # The parent has sent to other ranks since this entry was made, so that its price has risen.
                heapq.heappush(heap, (now, cost, rank, parent, orbit, us))
                continue
            way_to[rank] = (parent, orbit, us)
            if rank not in targets:
                free[rank] = free[parent] + us
                spread(rank, cost)
                continue
            way = [rank]
            while way_to[way[-1]][0] not in tree:
                way.append(way_to[way[-1]][0])
            for joined in reversed(way):
                before, taken, took = way_to[joined]
                tree.add(joined)
                self.take(taken)
                free[before] += took
                free[joined] = free[before]
            for joined in way:
                spread(joined, 0.0)

    def take(self, orbit: int) -> None:
        """Choose an orbit, and add its load."""
        if not self.chosen[orbit]:
            self.chosen[orbit] = True
            self.uses[self.problem.orbit_policy[orbit][1]] += 1
            for link, busy in self.problem.orbit_loads[orbit]:
                self.load[link] += busy

    def flip(self, orbit: int) -> None:
        """Choose an orbit that is not chosen, or undo the choice of one that is."""
        if not self.chosen[orbit]:
            self.take(orbit)
            return
        self.chosen[orbit] = False
        self.uses[self.problem.orbit_policy[orbit][1]] -= 1
        for link, busy in self.problem.orbit_loads[orbit]:
            self.load[link] -= busy

    def remove(self, c: int) -> None:
        """Remove a chunk's tree, together with its rotations."""
        for p in self.problem.pairs_of[c]:
            orbit = int(self.problem.orbit[p])
            if self.chosen[orbit]:
                self.flip(orbit)


class Trees:
    """A routing that changes by one move at a time, of which the last can be undone."""

    def __init__(self, problem: RoutingProblem, hops: list[tuple[int, ...]], seed: int) -> None:
        self.problem = problem
        self.state = _State(problem, seed)
        self.rng = self.state.rng
        self.hops = list(hops)
        self.users: list[list[int]] = [[] for _ in range(problem.num_orbits)]
        self.pair: dict[tuple[int, int], int] = {}
        for c, pairs in enumerate(problem.pairs_of):
            for p in pairs:
                self.pair[c, int(problem.hop[p])] = p
                if c not in self.users[problem.orbit[p]][-1:]:
                    self.users[problem.orbit[p]].append(c)
        for c, ways in enumerate(hops):
            for hop in ways:
                self.state.take(int(problem.orbit[self.pair[c, hop]]))
        self.movable = [c for c, pairs in enumerate(problem.pairs_of) if self.state.leaders[c] and pairs]
        self.before: tuple[list[tuple[int, ...]], list[int]] | None = None

    def routing(self) -> Routing:
        """The current trees as a routing."""
        return Routing(hops=tuple(self.hops), bound_us=0.0, load_us=0.0, by="walk")

    def move(self) -> bool:
        """Attach one rank of one chunk's tree elsewhere, or regrow a tree; False where nothing has changed."""
        if not self.movable:
            return False
        problem = self.problem
        c = self.movable[int(self.rng.integers(len(self.movable)))]
        held = list(self.hops)
        flipped: list[int] = []
        if len(problem.logical.targets[c]) > 1 and self.rng.random() < 0.9:
            pair = problem.pairs_of[c][int(self.rng.integers(len(problem.pairs_of[c])))]
            new = int(problem.orbit[pair])
            rank = problem.logical.dst_list[problem.hop[pair]]
            old = [h for h in self.hops[c] if problem.logical.dst_list[h] == rank]
            if self.state.chosen[new] or not old:
                return False
            flipped = [int(problem.orbit[self.pair[c, old[0]]]), new]
            for orbit in flipped:
                self.state.flip(orbit)
        else:
            was = self.state.chosen.copy()
            self.state.remove(c)
            self.state.grow(c)
            for other in self.state.family.get(c, ()):
                self.state.grow(other)
            flipped = np.flatnonzero(was != self.state.chosen).tolist()
        self.before = (held, flipped)
        for other in sorted({c for orbit in flipped for c in self.users[orbit]}):
            tree = problem.tree(other, self.state.chosen)
            if tree is None:
                self.undo()
                return False
            self.hops[other] = tree
        return bool(flipped)

    def undo(self) -> None:
        """Undo the last move."""
        assert self.before is not None
        self.hops, flipped = self.before
        for orbit in flipped:
            self.state.flip(orbit)
        self.before = None
