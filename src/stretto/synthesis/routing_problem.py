# SPDX-License-Identifier: Apache-2.0
"""`RoutingProblem`: which chunks may take which hops of a logical topology, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import Infeasible, InvalidInput
from .logical import LogicalTopology

MAX_TABLE = 1 << 24
MAX_COLUMNS = 200_000
MANY_PAIRS = 50_000
"""The number of pairs beyond which chunks with one target must come nearer to it with every hop."""
POLICY_WEIGHT = 1e-2
"""The weight of all connections (uc-min, uc-max), or of the balance, relative to the whole time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """A routing: ``hops[c]`` leads chunk c from its sources to its targets, each hop after the one it depends on."""

    hops: tuple[tuple[int, ...], ...]
    bound_us: float
    """A proved lower bound on the load of every routing of this model; 0 where none was proved."""
    load_us: float
    """The load of the busiest link in microseconds."""
    by: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingProblem:
    """The (chunk, hop) pairs that may be chosen, and their costs."""

    logical: LogicalTopology
    chunk_bytes: NDArray[np.float64]
    blocking: bool
    chunk: NDArray[np.int32]
    hop: NDArray[np.int32]
    """Pair p sends ``chunk[p]`` over ``hop[p]``."""
    orbit: NDArray[np.int32]
    """The orbit of each pair; pairs of one orbit are chosen together."""
    reach_us: NDArray[np.float64]
    """The earliest time at which each chunk can be at each rank, indexed by [chunk, rank]."""
    limit_us: NDArray[np.float64]
    """The longest time that each chunk's way may take without contention."""

    @classmethod
    def of(
        cls, logical: LogicalTopology, *, nbytes: float, alpha: str = "pipelined", detour: float = 0.5
    ) -> RoutingProblem:
        """The routing problem with the pairs on near-shortest paths.

        Args:
            logical: The sketch applied to a cluster and a collective.
            nbytes: The size in bytes, > 0.
            alpha: "pipelined" or "blocking", as in `simulate`.
            detour: The share by which paths may take longer than the shortest path without contention, >= 0.

        Returns:
            The problem.

        Raises:
            Infeasible: The problem is too large, or the sketch leaves no path for some chunk.
        """
        c = logical.collective
        if c.num_chunks * max(logical.hops.num_hops, c.num_ranks) > MAX_TABLE:
            raise Infeasible(
                f"routing: {c.num_chunks} chunks over {logical.hops.num_hops} hops is too large for this synthesiser"
            )
        size = c.chunk_bytes(nbytes)
        cost = _hop_us(logical, size)
        allowed = logical.allowed & ~_returns(logical)
        reach = _distances(logical.src, logical.dst, cost, allowed, logical.sources, c.num_ranks)
        _require_paths(logical, reach)
        left = _distances(logical.dst, logical.src, cost, allowed, logical.targets, c.num_ranks)
        wanted = np.zeros_like(reach, np.bool_)
        for at, ranks in enumerate(logical.targets):
            wanted[at, list(ranks)] = True
        radius = np.max(np.where(wanted, reach, 0.0), axis=1)
        single = np.array([len(ranks) == 1 for ranks in logical.targets])
        limit = (1 + detour) * radius * (1 + 1e-9)
        # A tree may be as deep as the least total time allows: in the extreme a ring, when few connections are wanted.
        limit = np.where(single, limit, np.maximum(limit, _receive_us(logical, size)))
        keep = allowed & (reach[:, logical.src] + cost + left[:, logical.dst] <= limit[:, None])
        if np.count_nonzero(keep) > MANY_PAIRS:
            keep &= ~single[:, None] | (left[:, logical.dst] < left[:, logical.src] * (1 - 1e-9))
        for at in np.flatnonzero(single).tolist():
            keep[at, logical.src == logical.targets[at][0]] = False
        chunk, hop = np.nonzero(keep)
        orbit, alive = _orbits(logical, chunk, hop, keep)
        problem = cls(
            logical=logical,
            chunk_bytes=size,
            blocking=alpha == "blocking",
            chunk=chunk[alive].astype(np.int32),
            hop=hop[alive].astype(np.int32),
            orbit=orbit,
            reach_us=reach,
            limit_us=limit,
        )
        if problem.num_orbits > MAX_COLUMNS:
            raise Infeasible(f"routing: {problem.num_orbits} binaries is too large for this synthesiser")
        problem._require_symmetric_paths()
        return problem

    @cached_property
    def num_orbits(self) -> int:
        """The number of orbits, which is the number of binaries of the model."""
        return int(self.orbit.max(initial=-1)) + 1

    @cached_property
    def us(self) -> NDArray[np.float64]:
        """The time of each pair without contention."""
        h = self.logical.hops
        return h.alpha_us[self.hop] + self.chunk_bytes[self.chunk] / (h.gb_per_s[self.hop] * 1e3)

    @cached_property
    def pairs_of(self) -> list[list[int]]:
        """The pairs of each chunk."""
        found: list[list[int]] = [[] for _ in self.chunk_bytes]
        for pair, c in enumerate(self.chunk.tolist()):
            found[c].append(pair)
        return found

    @cached_property
    def orbit_loads(self) -> list[list[tuple[int, float]]]:
        """For each orbit the physical links that its pairs use, and for how long."""
        h = self.logical.hops
        links = h.cluster
        found: list[dict[int, float]] = [{} for _ in range(self.num_orbits)]
        alpha, rate = links.link_alpha_us * self.blocking, links.link_gb_per_s * 1e3
        split = self.logical.split
        for pair, (c, hop) in enumerate(zip(self.chunk.tolist(), self.hop.tolist(), strict=True)):
            at = found[self.orbit[pair]]
            for link in h.route(hop):
                busy = alpha[link] + self.chunk_bytes[c] / rate[link] * split[hop]
                at[link] = at.get(link, 0.0) + float(busy)
        return [sorted(at.items()) for at in found]

    def send(self, c: int, hop: int) -> tuple[float, list[tuple[int, float]]]:
        """The time of one send without contention, and how long it occupies each physical link of its hop."""
        size = float(self.chunk_bytes[c])
        known = self._sends.get((hop, size))
        if known is None:
            h, cluster = self.logical.hops, self.logical.hops.cluster
            us = float(h.alpha_us[hop]) + size / float(h.gb_per_s[hop] * 1e3)
            alpha, rate = cluster.link_alpha_us * self.blocking, cluster.link_gb_per_s * 1e3
            known = self._sends[hop, size] = (us, [(k, float(alpha[k] + size / rate[k])) for k in h.route(hop)])
        return known

    @cached_property
    def _sends(self) -> dict[tuple[int, float], tuple[float, list[tuple[int, float]]]]:
        return {}

    @cached_property
    def link_rows(self) -> list[tuple[tuple[int, float], ...]]:
        """For each physical link that may decide, the orbits that use it and how long each occupies it."""
        rows: dict[int, list[tuple[int, float]]] = {}
        for orbit, loads in enumerate(self.orbit_loads):
            for link, us in loads:
                rows.setdefault(link, []).append((orbit, us))
        # Of links that serve the same orbits (a GPU's PCIe link before its NIC), only the slowest can decide.
        slowest: dict[tuple[int, ...], tuple[tuple[int, float], ...]] = {}
        for row in rows.values():
            key = tuple(orbit for orbit, _ in row)
            if key not in slowest or sum(us for _, us in row) > sum(us for _, us in slowest[key]):
                slowest[key] = tuple(row)
        return list(slowest.values())

    def load_us(self, chosen: NDArray[np.bool_]) -> float:
        """The load of the busiest link when these orbits are chosen."""
        return max((sum(us for orbit, us in row if chosen[orbit]) for row in self.link_rows), default=0.0)

    @cached_property
    def orbit_policy(self) -> list[tuple[str, int]]:
        """For each orbit the switch policy of its hops, and its first hop, which stands for all its rotations."""
        policy = ["none"] * self.logical.hops.num_hops
        for strategy, hops in self.logical.connections:
            for hop in hops.tolist():
                policy[hop] = strategy
        first = np.full(self.num_orbits, len(policy))
        np.minimum.at(first, self.orbit, self.hop)
        return [(policy[hop], hop) for hop in first.tolist()]

    def cost_us(self, chosen: NDArray[np.bool_]) -> float:
        """The load of the busiest link, with the cost that the policies add to it in the model."""
        load = self.load_us(chosen)
        if not self.logical.has_policies:
            return load
        used = set(self.hop[chosen[self.orbit]].tolist())
        for strategy, hops in self.logical.connections:
            if strategy != "none" and len(hops):
                share = len(used & set(hops.tolist())) / len(hops)
                load *= 1 + POLICY_WEIGHT * (share if strategy == "uc-min" else -share)
        return load

    def longest_us(self, routing: Routing) -> float:
        """The time at which the last chunk has reached all its targets, without contention."""
        last = 0.0
        for c, hops in enumerate(routing.hops):
            at = dict.fromkeys(self.logical.sources[c], 0.0)
            for hop in hops:
                at[self.logical.dst_list[hop]] = at[self.logical.src_list[hop]] + self.send(c, hop)[0]
            last = max(last, *at.values(), 0.0)
        return last

    def tree(self, c: int, chosen: NDArray[np.bool_]) -> tuple[int, ...] | None:
        """The chosen hops of one chunk that lead to its targets, or None when a target is not reached."""
        src, dst = self.logical.src, self.logical.dst
        into: dict[int, int] = {}
        at = dict.fromkeys(self.logical.sources[c], 0.0)
        taken = [p for p in self.pairs_of[c] if chosen[self.orbit[p]]]
        ways = [(int(src[self.hop[p]]), int(dst[self.hop[p]]), float(self.us[p]), int(self.hop[p])) for p in taken]
        while True:
            steps = [(at[a] + us, hop, b) for a, b, us, hop in ways if a in at and b not in at]
            if not steps:
                break
            when, hop, rank = min(steps)
            into[rank], at[rank] = hop, when
        needed: set[int] = set()
        for target in self.logical.targets[c]:
            if target not in into:
                return None
            rank = target
            while rank in into and into[rank] not in needed:
                needed.add(into[rank])
                rank = int(src[into[rank]])
        return tuple(sorted(needed, key=lambda h: at[int(dst[h])]))

    def routing(self, chosen: NDArray[np.bool_], *, bound_us: float = 0.0, by: str) -> Routing | None:
        """The chosen pairs as trees without superfluous hops.

        Args:
            chosen: Whether each orbit is chosen.
            bound_us: A proved lower bound on the load, 0 for none.
            by: The name of the method that chose.

        Returns:
            The routing, or None when some target is not reached.
        """
        trees = []
        for c in range(len(self.pairs_of)):
            tree = self.tree(c, chosen)
            if tree is None:
                return None
            trees.append(tree)
        return Routing(hops=tuple(trees), bound_us=bound_us, load_us=self.load_us(chosen), by=by)

    def chosen(self, routing: Routing) -> NDArray[np.bool_]:
        """The orbits that a routing uses."""
        taken = np.zeros(self.num_orbits, np.bool_)
        for c, hops in enumerate(routing.hops):
            wanted = set(hops)
            taken[[self.orbit[p] for p in self.pairs_of[c] if int(self.hop[p]) in wanted]] = True
        return taken

    def _require_symmetric_paths(self) -> None:
        """Raise `Infeasible` where dropping pairs whose rotation does not exist leaves no way for some chunk."""
        if not self.logical.sketch.symmetry_offsets:
            return
        left = np.zeros_like(self.logical.allowed)
        left[self.chunk, self.hop] = True
        cost = _hop_us(self.logical, self.chunk_bytes)
        ranks = self.logical.collective.num_ranks
        reach = _distances(self.logical.src, self.logical.dst, cost, left, self.logical.sources, ranks)
        _require_paths(self.logical, reach, because="symmetry_offsets rotates onto links that do not exist")


def _hop_us(logical: LogicalTopology, size: NDArray[np.float64]) -> NDArray[np.float64]:
    h = logical.hops
    table: NDArray[np.float64] = h.alpha_us[None, :] + size[:, None] / (h.gb_per_s[None, :] * 1e3)
    return table


def _receive_us(logical: LogicalTopology, size: NDArray[np.float64]) -> float:
    """The least time of the slowest rank to receive what it wants over all its links together."""
    wanted = np.zeros(logical.collective.num_ranks)
    for c, ranks in enumerate(logical.targets):
        wanted[list(ranks)] += size[c]
    last = {rank: set[int]() for rank in range(len(wanted))}
    for hop, rank in enumerate(logical.dst_list):
        last[rank].add(logical.hops.route(hop)[-1])
    rate = np.array([logical.hops.cluster.link_gb_per_s[sorted(links)].sum() * 1e3 for links in last.values()])
    return float(np.max(wanted / np.maximum(rate, 1e-12), where=rate > 0, initial=0.0))


def _returns(logical: LogicalTopology) -> NDArray[np.bool_]:
    """A table [chunk, hop] of the hops that lead a chunk back into a host that has it already.

    The table is all False where no hop, or every hop, crosses between hosts.
    """
    table = np.zeros_like(logical.allowed)
    if not logical.crosses.any() or logical.crosses.all():
        return table
    for c, ranks in enumerate(logical.sources):
        homes = logical.host[list(ranks)]
        table[c] = logical.crosses & np.isin(logical.host[logical.dst], homes)
    return table


def _distances(
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    cost: NDArray[np.float64],
    allowed: NDArray[np.bool_],
    starts: Sequence[Sequence[int]],
    ranks: int,
) -> NDArray[np.float64]:
    """The length of the shortest way from any of a chunk's starts to each rank, as a table [chunk, rank]."""
    table = np.full((len(starts), ranks), np.inf)
    for c, at in enumerate(starts):
        table[c, list(at)] = 0.0
    price = np.where(allowed, cost, np.inf)
    for _ in range(ranks):
        before = table.copy()
        for hop, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
            np.minimum(table[:, b], table[:, a] + price[:, hop], out=table[:, b])
        if np.array_equal(before, table):
            break
    return table


def _require_paths(logical: LogicalTopology, reach: NDArray[np.float64], because: str | None = None) -> None:
    """Raise `Infeasible` for the first chunk without a way, naming the limit of the sketch that forbids it."""
    for c, targets in enumerate(logical.targets):
        for target in targets:
            if np.isfinite(reach[c, target]):
                continue
            names = logical.hops.cluster.node_names
            a, b = (names[logical.collective.ranks[r]] for r in (logical.sources[c][0], target))
            why = because or _culprit(logical, c, target)
            raise Infeasible(f"sketch {logical.sketch.name}: no path for chunk {c} from {a} to {b}: {why}")


def _culprit(logical: LogicalTopology, c: int, target: int) -> str:
    """The first sketch limit without which the chunk would have a way, or that the cluster has none, in words."""
    one = np.ones((1, logical.hops.num_hops))
    ranks = logical.collective.num_ranks

    def reached(limits: Sequence[NDArray[np.bool_]]) -> bool:
        allowed = np.ones_like(one, np.bool_)
        for limit in limits:
            allowed &= limit[c]
        found = _distances(logical.src, logical.dst, one, allowed, [logical.sources[c]], ranks)
        return bool(np.isfinite(found[0, target]))

    limits = logical.restrictions
    if not reached([]):
        where = "" if logical.sketch.channels == "all" else f" over links.channels {logical.sketch.channels}"
        return f"the cluster has no links{where} that lead there"
    for at, (name, _) in enumerate(limits):
        if reached([limit for i, (_, limit) in enumerate(limits) if i != at]):
            return name
    for at in range(1, len(limits) + 1):
        if not reached([limit for _, limit in limits[:at]]):
            return " and ".join(name for name, _ in limits[:at])
    return "the way leads through its own host again"


def _orbits(
    logical: LogicalTopology, chunk: NDArray[np.intp], hop: NDArray[np.intp], keep: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Number pairs by their orbit under the sketch's rotations; pairs whose rotation does not exist are dropped."""
    number = np.full(keep.shape, -1, np.int64)
    number[chunk, hop] = np.arange(len(chunk))
    label = np.arange(len(chunk))
    alive = np.ones(len(chunk), np.bool_)
    images = []
    for at, (offset, group) in enumerate(logical.sketch.symmetry_offsets):
        rank = _rotation(logical, at, offset, group)
        moved = _rotated_chunks(logical, rank, at)
        between = {pair: h for h, pair in enumerate(zip(logical.src.tolist(), logical.dst.tolist(), strict=True))}
        ends = zip(rank[logical.src].tolist(), rank[logical.dst].tolist(), strict=True)
        hops = np.array([between.get(pair, -1) for pair in ends], np.int64)
        image = np.where(hops[hop] >= 0, number[moved[chunk], hops[hop]], -1)
        # As in TACCL, links between groups need not be symmetric: they are tied only where their image exists.
        across = (logical.src // group != logical.dst // group)[hop]
        alive &= (image >= 0) | across
        images.append(image)
    changed = True
    while changed:
        changed = False
        for image in images:
            here = np.flatnonzero(image >= 0)
            there = image[here]
            low = np.minimum(label[here], label[there])
            good = alive[here] & alive[there]
            across_alive = (label[here] != low).any() or (label[there] != low).any()
            if across_alive or (alive[here] != good).any() or (alive[there] != good).any():
                np.minimum.at(label, here, low)
                np.minimum.at(label, there, low)
                alive[here] &= good
                alive[there] &= good
                changed = True
    _, orbit = np.unique(label[alive], return_inverse=True)
    return orbit.astype(np.int32), alive


def _rotation(logical: LogicalTopology, at: int, offset: int, group: int) -> NDArray[np.int64]:
    count = logical.collective.num_ranks
    if count % group:
        raise InvalidInput(f"symmetry_offsets[{at}]: groups of {group} do not divide {count} ranks")
    rank = np.arange(count)
    return rank // group * group + (rank % group + offset) % group


def _rotated_chunks(logical: LogicalTopology, rank: NDArray[np.int64], at: int) -> NDArray[np.int64]:
    """The image of each chunk under a rotation: the chunk whose sources and targets are the rotated ones.

    Chunks with equal sources and targets are matched in order.
    """
    c = logical.collective
    numbered: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    keys = []
    for sources, targets in zip(logical.sources, logical.targets, strict=True):
        keys.append((frozenset(sources), frozenset((*sources, *targets))))
        numbered.setdefault(keys[-1], []).append(len(keys) - 1)
    moved = np.zeros(c.num_chunks, np.int64)
    for (start, end), chunks in numbered.items():
        image = numbered.get((frozenset(rank[list(start)].tolist()), frozenset(rank[list(end)].tolist())), [])
        if len(image) != len(chunks):
            raise Infeasible(f"symmetry_offsets[{at}]: {c.kind} changes with this rotation (chunk {chunks[0]})")
        moved[chunks] = image
    return moved
