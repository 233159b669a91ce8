# SPDX-License-Identifier: Apache-2.0
"""Collectives derived from one another: inverses, finer chunks, and all-reduce as two overlapped halves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..algorithms.base import MAX_NAME
from ..cluster import Cluster
from ..collectives import COLLECTIVES, ROOTED, Collective
from ..errors import Infeasible, InvalidInput, VerificationError
from ..programs import Program
from ..programs.ir import take_rows
from ..simulator import simulate
from ..simulator.network import routes_of
from ..units import MB
from .pacing import paced

INVERSE = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
    "all_to_all": "all_to_all",
}
HALVES = {"reduce_scatter": "all_gather", "reduce": "broadcast"}
DEFAULT_BYTES = 64 * MB
MAX_RANKED = 100_000
"""The most transfers for which orders are tried that need a walk over all dependencies in Python."""

Order = NDArray[np.intp]


def reversed_cluster(cluster: Cluster) -> Cluster:
    """The cluster with the direction of every link reversed; nodes and the numbers of links stay.

    An all-gather routed on it inverts to a reduce-scatter on the cluster itself, link by link.

    >>> ring = Cluster.preset("ring", nodes=4)
    >>> reversed_cluster(ring).routes(0, 1), ring.routes(1, 0)
    ([(1,)], [(1,)])
    """
    fields = {key: getattr(cluster, key) for key in cluster.__dataclass_fields__}
    turned = {"name": f"{cluster.name} reversed", "link_src": cluster.link_dst, "link_dst": cluster.link_src}
    return Cluster(**(fields | turned))


def like(collective: Collective, *, kind: str | None = None, chunks: int | None = None) -> Collective:
    """The library's collective of this (or another) kind with the same ranks, root and in-place flag.

    Args:
        collective: The collective to follow.
        kind: Another kind, or None for the same.
        chunks: Another number of chunks per shard (or tensor), or None for the same.

    Returns:
        The collective.

    >>> from stretto import AllGather
    >>> like(AllGather(4, chunks=2), chunks=6)
    <Collective all_gather over 4 ranks, 24 chunks, out of place>
    """
    kind = collective.kind if kind is None else kind
    root = {"root": collective.root} if kind in ROOTED else {}
    build = COLLECTIVES[kind]
    pieces = collective.chunks if chunks is None else chunks
    return build(collective.ranks, chunks=pieces, in_place=collective.in_place, **root)


def refine(program: Program, factor: int, *, split: bool = True) -> Program:
    """The same program with every chunk cut into `factor` chunks.

    Args:
        program: A program for a collective of the library.
        factor: How many chunks each chunk becomes, >= 1.
        split: Whether each piece is a message of its own; otherwise messages stay whole.

    Returns:
        The finer program.

    Raises:
        InvalidInput: The factor is < 1, or the collective is not one of the library's plain ones.

    >>> from stretto import algorithm
    >>> refine(algorithm("ring", "all_gather", 4), 2)
    <Program ring: all_gather over 4 ranks, 24 transfers, 16 dependencies, 1 lane>
    """
    collective = _of_library(program)
    if factor < 1:
        raise InvalidInput(f"factor: must be >= 1, not {factor}")
    if factor == 1:
        return program
    ptr, piece = program.chunk_ptr, np.arange(factor, dtype=np.int32)
    order = np.arange(program.num_transfers)
    if split:
        order = np.repeat(order, factor)
        ptr, chunk = take_rows(ptr, program.chunk, order)
        chunk = chunk * factor + np.repeat(np.tile(piece, program.num_transfers), np.diff(ptr))
    else:
        chunk = (program.chunk[:, None] * factor + piece).ravel()
        ptr = ptr * factor
    return _assemble(program.name, like(collective, chunks=collective.chunks * factor), [program], order, ptr, chunk)


def inverse(program: Program, cluster: Cluster, *, nbytes: float = DEFAULT_BYTES, alpha: str = "pipelined") -> Program:
    """The program run backwards: data that was copied out is now summed (or collected) along the same routes.

    All-gather and reduce-scatter become each other, and so do broadcast and reduce, gather and scatter; an all-to-all
    becomes the all-to-all of the transposed chunks. Transfers are ordered (or also held back) as in the mirror image of
    the program's timeline, whichever is fastest for `nbytes`.

    Args:
        program: A program on `reversed_cluster(cluster)`, or on the cluster itself where each link has one that leads
            back.
        cluster: The cluster that the result runs on.
        nbytes: The size in bytes to choose the order for, > 0.
        alpha: "pipelined" or "blocking", as in `simulate`.

    Returns:
        The verified inverse.

    Raises:
        InvalidInput: The collective has no inverse.
        Infeasible: Some link has none that leads back, or a rank passes a chunk on in a way that cannot be inverted.

    >>> from stretto import algorithm
    >>> inverse(algorithm("ring", "all_gather", 4), Cluster.preset("ring", nodes=4))
    <Program inverse(ring): reduce_scatter over 4 ranks, 12 transfers, 8 dependencies, 1 lane>
    """
    collective = _of_library(program)
    if collective.kind not in INVERSE:
        raise InvalidInput(f"inverse: {collective.kind} has none; these have: {', '.join(INVERSE)}")
    back = reversed_cluster(cluster)
    forth = _first_arrivals(_routed_on(program, cluster, back))
    target = like(collective, kind=INVERSE[collective.kind])
    times = simulate(forth, back, nbytes=nbytes, alpha=alpha)
    index = np.arange(forth.num_transfers)
    orders = [np.lexsort((-index, -key)) for key in (times.end_us, times.start_us)]
    found = [_backwards(forth, target, order, cluster) for order in orders]
    if len(index) <= MAX_RANKED:
        mirrored = [(times.total_us - us)[orders[0]] for us in (times.end_us, times.start_us)]
        found.append(paced(found[0], *mirrored))
    return _best(found, cluster, nbytes, alpha)


def all_reduce_from(
    first: Program, second: Program, cluster: Cluster, *, nbytes: float = DEFAULT_BYTES, alpha: str = "pipelined"
) -> Program:
    """All-reduce as reduce-scatter and all-gather (or reduce and broadcast), overlapped.

    A chunk is sent on as soon as it is whole; nothing waits for the first half to end. Where the halves are cut
    differently, both are refined to the least common multiple. Several orders and lanes are tried, and the fastest
    for `nbytes` is kept.

    Args:
        first: The reduce-scatter or reduce.
        second: The all-gather or broadcast, over the same ranks and root.
        cluster: The cluster.
        nbytes: The size in bytes to choose the order for, > 0.
        alpha: "pipelined" or "blocking", as in `simulate`.

    Returns:
        The verified all-reduce.

    Raises:
        InvalidInput: The halves do not fit together.
    """
    kinds = first.collective.kind, second.collective.kind
    if HALVES.get(kinds[0]) != kinds[1]:
        pairs = " or ".join(" and ".join(pair) for pair in HALVES.items())
        raise InvalidInput(f"all_reduce_from: needs {pairs}, not {kinds[0]} and {kinds[1]}")
    if first.collective.ranks != second.collective.ranks or first.collective.root != second.collective.root:
        raise InvalidInput("all_reduce_from: both halves need the same ranks and root")
    pieces = math.lcm(first.collective.chunks, second.collective.chunks)
    found = []
    for split in (False, True):
        halves = [refine(half, pieces // half.collective.chunks, split=split) for half in (first, second)]
        found += list(_joined(halves, cluster, nbytes, alpha))
        if first.collective.chunks == second.collective.chunks:
            break
    return _best(found, cluster, nbytes, alpha)


def _of_library(program: Program) -> Collective:
    c = program.collective
    if c.kind not in COLLECTIVES or c.kind in ("all_to_all_v", "permute") or like(c) != c:
        raise InvalidInput(f"program {program.name}: its collective {c.kind} is not one of the library's plain ones")
    return c


def _routed_on(program: Program, cluster: Cluster, back: Cluster) -> Program:
    """The program with its routes expressed as links of the reversed cluster."""
    if not program.routes or program.routes_digest == back.digest:
        return program
    if program.routes_digest != cluster.digest:
        raise InvalidInput(f"routes: program {program.name} was routed on another cluster than {cluster.name}")
    twin = _twins(cluster)
    lone = next((link for route in program.routes for link in route if twin[link] < 0), None)
    if lone is not None:
        raise Infeasible(f"inverse: no link leads back along {cluster.link_name(lone)}")
    routes = tuple(tuple(twin[list(route)].tolist()) for route in program.routes)
    return program.replace(routes=routes, routes_digest=back.digest)


def _twins(cluster: Cluster) -> NDArray[np.int64]:
    """For each link the one that leads back on the same channel, the widest for the widest; -1 where there is none."""
    twin = np.full(cluster.num_links, -1, np.int64)
    ends: dict[tuple[int, int, int], list[int]] = {}
    for link in np.argsort(-cluster.link_gb_per_s, kind="stable").tolist():
        key = (int(cluster.link_src[link]), int(cluster.link_dst[link]), int(cluster.link_channel[link]))
        ends.setdefault(key, []).append(link)
    for (a, b, channel), links in ends.items():
        opposite = ends.get((b, a, channel), [])
        for at, link in enumerate(links[: len(opposite)]):
            twin[link] = opposite[at]
    return twin


def _first_arrivals(program: Program) -> Program:
    """The program without deliveries of chunks that a rank already has: backwards they would be summed twice."""
    c = program.collective
    if program.reduce.any():
        return program
    owner = np.repeat(np.arange(program.num_transfers), np.diff(program.chunk_ptr))
    slot = program.dst[owner].astype(np.int64) * c.num_chunks + program.chunk
    held = np.repeat(np.arange(c.num_ranks), np.diff(c.in_ptr)) * c.num_chunks + c.in_chunk
    first = np.zeros(len(slot), np.bool_)
    first[np.unique(slot, return_index=True)[1]] = True
    first &= ~np.isin(slot, held)
    if first.all():
        return program
    widths = np.bincount(owner[first], minlength=program.num_transfers)
    order = np.flatnonzero(widths)
    ptr = np.concatenate([[0], np.cumsum(widths[order])])
    return _assemble(program.name, c, [program], order, ptr, program.chunk[first])


def _backwards(forth: Program, target: Collective, order: Order, cluster: Cluster) -> Program:
    ptr, chunk = take_rows(forth.chunk_ptr, forth.chunk, order)
    if target.kind == "all_to_all":
        pair, piece = np.divmod(chunk, target.chunks)
        source, dest = np.divmod(pair, target.num_ranks)
        chunk = (dest * target.num_ranks + source) * target.chunks + piece
    program = Program.from_steps(
        _name("inverse", forth.name),
        target,
        src=forth.dst[order],
        dst=forth.src[order],
        chunk=chunk,
        chunk_ptr=ptr,
        step=np.arange(len(order)),
        reduce=target.combining,
        lane=forth.lane[order],
        route=forth.route[order],
        routes=tuple(route[::-1] for route in forth.routes),
        routes_digest=cluster.digest if forth.routes else "",
    )
    try:
        program.verify()
    except VerificationError as problem:
        raise Infeasible(f"inverse of {forth.name}: some rank passes a chunk on more than once: {problem}") from None
    return program


def _assemble(
    name: str,
    collective: Collective,
    programs: list[Program],
    order: Order,
    ptr: NDArray[np.int64],
    chunk: NDArray[np.int32],
    *,
    lanes: int = 0,
) -> Program:
    """A program of the transfers of other programs, numbered consecutively, in the given order.

    The lanes of the k-th program begin at ``k * lanes``.
    """
    routes = tuple(route for p in programs for route in p.routes)
    shift = np.cumsum([0, *(len(p.routes) for p in programs)])
    digests = {p.routes_digest for p in programs if p.routes}
    if len(digests) > 1:
        raise InvalidInput("routes: the parts were routed on different clusters")
    column = {key: np.concatenate([getattr(p, key) for p in programs]) for key in ("src", "dst", "reduce")}
    lane = np.concatenate([p.lane + k * lanes for k, p in enumerate(programs)])
    route = np.concatenate([np.where(p.route >= 0, p.route + shift[k], -1) for k, p in enumerate(programs)])
    return Program.from_steps(
        name,
        collective,
        **{key: value[order] for key, value in column.items()},
        chunk=chunk,
        chunk_ptr=ptr,
        step=np.arange(len(order)),
        lane=lane[order],
        route=route[order],
        routes=routes,
        routes_digest=digests.pop() if digests else "",
    )


def _joined(halves: list[Program], cluster: Cluster, nbytes: float, alpha: str) -> Iterator[Program]:
    first, second = halves
    target = like(first.collective, kind="all_reduce", chunks=first.collective.num_chunks)
    rows = np.concatenate([first.chunk_ptr, first.chunk_ptr[-1] + second.chunk_ptr[1:]])
    chunks = np.concatenate([first.chunk, second.chunk])
    names = dict.fromkeys(half.name.removeprefix("inverse(").removesuffix(")") for half in halves)
    name = _name("all_reduce", *names)

    def joined(order: Order, lanes: int) -> Program:
        ptr, chunk = take_rows(rows, chunks, order)
        return _assemble(name, target, halves, order, ptr, chunk, lanes=lanes)

    late = np.arange(first.num_transfers + second.num_transfers)
    apart = max(first.num_lanes, second.num_lanes)
    plain = joined(late, 0)
    yield plain
    yield joined(late, apart)
    if plain.num_transfers > MAX_RANKED:
        return
    work = TransferJobs.of(plain, cluster, nbytes, alpha)
    begun = np.arange(len(late)) >= first.num_transfers
    tail = work.remaining_us()
    # Priorities to try: the longest remaining chain; the first half first; the second half first; program order.
    keys = ((-tail,), (-tail, begun), (-tail, ~begun), (late,))
    orders = {tuple(work.list_order(np.lexsort(key)).tolist()) for key in keys}
    for order in sorted(orders):
        chosen = _kept(plain, np.array(order, np.intp))
        for lanes in (0, apart):
            yield joined(chosen, lanes)


def _kept(program: Program, order: Order) -> Order:
    """The order, or the program's own order where the given one would let a write overtake a read that it waits for."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    kept = bool(np.all(place[program.gate] < np.repeat(place, np.diff(program.gate_ptr))))
    return order if kept else np.arange(len(order))


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferJobs:
    """A program's transfers as jobs: how many others each waits for, which follow it, its links and its times."""

    waits: list[int]
    follows: list[list[int]]
    links: list[list[int]]
    taken_us: list[list[float]]
    arrives_us: list[float]

    @classmethod
    def of(cls, program: Program, cluster: Cluster, nbytes: float, alpha: str) -> TransferJobs:
        """The jobs of a program on a cluster.

        Args:
            program: The program.
            cluster: The cluster.
            nbytes: The size in bytes, > 0.
            alpha: "pipelined" or "blocking", as in `simulate`.

        Returns:
            The jobs, numbered as the transfers.
        """
        _, route, ptr, link = routes_of(program, cluster, nbytes=nbytes)
        follows: list[list[int]] = [[] for _ in range(program.num_transfers)]
        owner = np.repeat(np.arange(program.num_transfers), np.diff(program.after_ptr))
        for before, t in zip(program.after.tolist(), owner.tolist(), strict=True):
            follows[before].append(t)
        links = [link[ptr[r] : ptr[r + 1]] for r in route.tolist()]
        sizes = program.transfer_bytes(nbytes).tolist()
        blocks = alpha == "blocking"
        us = [size / (cluster.link_gb_per_s[used] * 1e3) for size, used in zip(sizes, links, strict=True)]
        alphas = [cluster.link_alpha_us[used] for used in links]
        return cls(
            waits=np.diff(program.after_ptr).tolist(),
            follows=follows,
            links=[used.tolist() for used in links],
            taken_us=[(u + a * blocks).tolist() for u, a in zip(us, alphas, strict=True)],
            arrives_us=[float(u.max() + a.sum()) for u, a in zip(us, alphas, strict=True)],
        )

    def remaining_us(self) -> NDArray[np.float64]:
        """The time of the longest chain that begins with each transfer, without contention."""
        tail = list(self.arrives_us)
        for t in range(len(tail) - 1, -1, -1):
            tail[t] += max((tail[f] for f in self.follows[t]), default=0.0)
        return np.array(tail)

    def list_order(self, priority: Order) -> Order:
        """The transfers by start time when every link, once free, serves the first by priority of those waiting."""
        rank = np.empty(len(priority), np.int64)
        rank[priority] = np.arange(len(priority))
        ranks = rank.tolist()
        waits = list(self.waits)
        busy_until: dict[int, float] = {}
        parked: dict[int, list[tuple[int, int]]] = {}
        pool = [(ranks[t], t) for t, left in enumerate(waits) if left == 0]
        heapq.heapify(pool)
        events: list[tuple[float, int, int]] = []
        order: list[int] = []
        now = 0.0
        while pool or events:
            while pool:
                entry = heapq.heappop(pool)
                t = entry[1]
                blocked = next((link for link in self.links[t] if busy_until.get(link, 0.0) > now), None)
                if blocked is not None:
                    heapq.heappush(parked.setdefault(blocked, []), entry)
                    # The transfer stays parked, so the free links that it would have used go to the next one waiting.
                    for link in self.links[t]:
                        if busy_until.get(link, 0.0) <= now and parked.get(link):
                            heapq.heappush(pool, heapq.heappop(parked[link]))
                    continue
                order.append(t)
                heapq.heappush(events, (now + self.arrives_us[t], 1, t))
                for link, us in zip(self.links[t], self.taken_us[t], strict=True):
                    busy_until[link] = now + us
                    heapq.heappush(events, (now + us, 0, link))
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] <= now * (1 + 1e-12):
                _, arrival, what = heapq.heappop(events)
                if not arrival:
                    busy_until[what] = 0.0
                    if parked.get(what):
                        heapq.heappush(pool, heapq.heappop(parked[what]))
                    continue
                for later in self.follows[what]:
                    waits[later] -= 1
                    if waits[later] == 0:
                        heapq.heappush(pool, (ranks[later], later))
        return np.array(order, np.intp)


def _best(found: list[Program], cluster: Cluster, nbytes: float, alpha: str) -> Program:
    """The first of the fastest programs, verified."""
    times = [simulate(p, cluster, nbytes=nbytes, alpha=alpha).total_us for p in found]
    best = found[int(np.argmin(np.round(times, 9)))]
    best.verify()
    return best


def _name(what: str, *parts: str) -> str:
    whole = f"{what}({'+'.join(parts)})"
    return whole if len(whole) <= MAX_NAME else whole[: MAX_NAME - 1] + ")"
