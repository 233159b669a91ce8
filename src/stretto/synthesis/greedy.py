# SPDX-License-Identifier: Apache-2.0
"""Scale mode: a time-expanded greedy for hundreds to thousands of devices and for irregular networks.

At every moment free hops are matched with chunks that their receivers lack (``native/greedy.cpp``). On a network that
translations leave unchanged (a torus, equal hosts) only one device of each orbit is planned, and the others do the
same: the problem shrinks by the size of the symmetry, and all copies of a hop run side by side without conflict. Runs
with different rules and seeds are compared by their planned times, and the best of them by `simulate`.

Sums are planned as copies on the reversed network with time running backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput, SearchTimeout
from ..programs import Program
from ..programs.symmetry_views import translate
from ..simulator import Timeline, simulate
from ..units import check_seed
from .combine import all_reduce_from, like, reversed_cluster
from .hops import Hops, joins_all
from .pacing import one_then_other, paced
from .quotient import Quotient, quotient
from .schedule import program_from_schedule

MAX_MOVES = 1 << 20
"""The most transfers up to which finer chunks are tried."""
MAX_TABLE = 1 << 26
MAX_OVERLAPPED = 1 << 13
"""The most transfers of a half up to which overlapping the two halves of an all-reduce is tried."""
FINALISTS = 2
RESTARTS = 8
KEPT_WAYS = 4
"""The number of rule sets (`GreedyOptions`) that are kept for finer chunks."""
PIECES = (1, 2, 4, 8)
PLANNING = 0.8
"""The share of what is left of the budget after which a plan that is not done is given up."""
LEAST_S = 2.0
"""The least time limit of a plan: small plans are made, however short the budget and busy the machine."""
SYMMETRIC = ("all_gather", "all_to_all")
INVERSE = {"reduce_scatter": "all_gather", "reduce": "broadcast"}

Progress = Callable[[str, float], None]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    pieces: Sequence[int] | None = None,
    symmetric: bool = True,
) -> Program:
    """The best program that greedy runs find within the budget.

    Args:
        collective: A collective that copies, or a reduce-scatter, reduce or all-reduce.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search.
        seed: The seed of the first run; further runs count from it.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        pieces: The numbers of pieces to cut chunks into; 1, 2, 4 and 8 while the program stays small when not given.
        symmetric: Whether symmetries of the cluster are used.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is not served, or some rank cannot be reached.
        SearchTimeout: One plan takes longer than the budget.
        InvalidInput: A device does not exist, or a number of pieces is < 1.

    >>> from stretto import AllGather, MB
    >>> torus = Cluster.preset("torus", nodes=16, alpha_us=0.0, gb_per_s=1.0)
    >>> program = synthesize(AllGather(16), torus, nbytes=16 * MB, pieces=[1])
    >>> program.num_transfers, simulate(program, torus, nbytes=16 * MB).total_us
    (240, 4000.0)
    """
    check_seed(seed)
    deadline = time.monotonic() + budget_s
    search = GreedySearch(
        nbytes=nbytes, seed=seed, alpha=alpha, pieces=pieces, symmetric=symmetric, tell=progress or _quiet
    )
    if max(collective.ranks) >= cluster.num_devices:
        raise InvalidInput(f"ranks: device {max(collective.ranks)} does not exist in {cluster.name}")
    if collective.num_ranks == 1:
        return program_from_schedule("greedy", collective, cluster, start_us=[], src=[], dst=[], chunks=[])
    if collective.kind == "all_reduce":
        return search.all_reduce(collective, cluster, deadline)
    if not collective.combining:
        return search.program(collective, cluster, deadline)
    if collective.kind not in INVERSE:
        raise Infeasible(f"greedy: {collective.kind} is none of {', '.join(INVERSE)}, all_reduce")
    return search.program(like(collective, kind=INVERSE[collective.kind]), cluster, deadline, backwards=collective.kind)


def _quiet(message: str, fraction: float) -> None:
    pass


@dataclass(frozen=True, kw_only=True, eq=False)
class GreedySearch:
    """The options that all runs of one synthesis share."""

    nbytes: float
    seed: int
    alpha: str
    pieces: Sequence[int] | None
    symmetric: bool
    tell: Progress

    def run(self, program: Program, cluster: Cluster) -> Timeline:
        """The simulated timeline of a program."""
        return simulate(program, cluster, nbytes=self.nbytes, contention="fifo", alpha=self.alpha)

    def program(self, collective: Collective, cluster: Cluster, deadline: float, *, backwards: str = "") -> Program:
        """The best program for a collective that only copies, or for its inverse.

        Args:
            collective: The collective that only copies.
            cluster: The cluster that the result runs on.
            deadline: The time (of `time.monotonic`) at which to end.
            backwards: The kind of the inverse to make ("reduce_scatter", "reduce"), or empty for the collective itself.

        Returns:
            The verified program.

        Raises:
            Infeasible: No hop joins two of the ranks, or some rank cannot be reached.
            SearchTimeout: One plan takes longer than the time that is left.
        """
        turned = reversed_cluster(cluster) if backwards else cluster
        hops = Hops.of(turned, devices=collective.ranks, nbytes=float(collective.chunk_bytes(self.nbytes).mean()))
        if not hops.num_hops:
            raise Infeasible(f"greedy: no hop of {cluster.name} joins two of the ranks")
        view = quotient(hops, collective.ranks, symmetric=self.symmetric and collective.kind in SYMMETRIC)
        ways = _ways(view, blocking=self.alpha == "blocking", mirrored=bool(backwards))
        best: tuple[float, Program] | None = None
        cuts = list(_cuts(collective, self.pieces))
        took = 0.0
        for at, count in enumerate(cuts):
            began = time.monotonic()
            left = deadline - began
            if best and left < 3 * took:
                break  # Twice as many chunks take more than twice as long to plan.
            finer = collective if count == 1 else like(collective, chunks=collective.chunks * count)
            until = began + 0.6 * left / (len(cuts) - at)
            # The rest of the time is for turning the plan into a program, proving and simulating it.
            plans = _plans(LocalDemand.of(finer, view, self.nbytes), ways, self.seed, until, began + PLANNING * left)
            if not plans:
                break
            for plan in plans[: FINALISTS if finer.num_chunks * finer.num_ranks <= MAX_MOVES // 4 else 1]:
                name = f"greedy(pieces={count})" if count > 1 else "greedy"
                program = _program(name, plan, finer, hops, cluster, backwards)
                time_us = self.run(program, cluster).total_us
                best = min(best or (time_us, program), (time_us, program), key=lambda pair: pair[0])
                self.tell(f"{name}: {time_us:.6g} us (planned {plan.end_us:.6g})", (at + 1) / len(cuts))
            ways = list(dict.fromkeys(plan.way for plan in plans))[:KEPT_WAYS]
            took = time.monotonic() - began
        if best is None:
            raise SearchTimeout(f"greedy: one plan for {collective.num_ranks} ranks takes longer than the budget")
        return best[1]

    def all_reduce(self, collective: Collective, cluster: Cluster, deadline: float) -> Program:
        """All-reduce from a reduce-scatter and an all-gather, one after the other or overlapped.

        Args:
            collective: The all-reduce.
            cluster: The cluster.
            deadline: The time (of `time.monotonic`) at which to end.

        Returns:
            The verified program.
        """
        gather = like(collective, kind="all_gather", chunks=max(1, collective.num_chunks // collective.num_ranks))
        now = time.monotonic()
        spread = self.program(gather, cluster, now + (deadline - now) / 2)
        same = replace(self, pieces=(1,))
        summed = same.program(spread.collective, cluster, deadline, backwards="reduce_scatter")
        target = like(collective, chunks=spread.collective.num_chunks)
        timelines = (self.run(summed, cluster), self.run(spread, cluster))
        found = [one_then_other(spread.name, target, (summed, spread), timelines, cluster)]
        if spread.num_transfers <= MAX_OVERLAPPED:
            overlapped = all_reduce_from(summed, spread, cluster, nbytes=self.nbytes, alpha=self.alpha)
            found.append(overlapped.replace(name=spread.name))
        for program in found:
            program.verify()
        return min(found, key=lambda program: self.run(program, cluster).total_us)


def _cuts(collective: Collective, pieces: Sequence[int] | None) -> Iterator[int]:
    moves = collective.num_chunks * (1 if collective.kind == "all_to_all" else collective.num_ranks)
    for count in PIECES if pieces is None else pieces:
        if count < 1:
            raise InvalidInput(f"pieces: must be >= 1, not {count}")
        if count == 1 or pieces is not None or moves * count <= MAX_MOVES:
            yield count


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalDemand:
    """The chunks that the local devices of a quotient hold and want, numbered relative to each device."""

    nbytes: Floats
    kind: NDArray[np.int32]
    held: Ints
    goal: NDArray[np.int32]
    """The only rank that wants each chunk; empty where all ranks want all chunks."""
    there: NDArray[np.int32]
    back: NDArray[np.int32]

    @classmethod
    def of(cls, collective: Collective, view: Quotient, nbytes: float) -> LocalDemand:
        """The demand of a collective that copies: all chunks to all ranks, or each chunk to one rank.

        Args:
            collective: The collective.
            view: The network up to symmetry.
            nbytes: The size in bytes, > 0.

        Returns:
            The demand of the local devices.

        Raises:
            Infeasible: Some chunks are wanted by several but not all ranks, or there are too many chunks.
        """
        chunks, ranks = collective.num_chunks, collective.num_ranks
        holder = np.repeat(np.arange(ranks), np.diff(collective.in_ptr))
        wanter = np.repeat(np.arange(ranks), np.diff(collective.out_ptr))
        wanted = np.bincount(collective.out_chunk, minlength=chunks)
        goal = np.zeros(0, np.int32)
        if not np.all(wanted == ranks):
            if np.any(wanted != 1) or np.any(np.bincount(collective.in_chunk, minlength=chunks) != 1):
                raise Infeasible(f"greedy: {collective.kind} wants some chunks at some ranks only, but not at one")
            goal = np.empty(chunks, np.int32)
            goal[collective.out_chunk] = wanter
        if chunks * len(view.moves) > MAX_TABLE:
            raise Infeasible(f"greedy: {chunks} chunks under {len(view.moves)} translations are too many")
        here = holder < view.local
        kind = np.arange(chunks)
        for t in range(1, view.copies):
            kind = np.minimum(kind, _translated(collective, view, t))
        there = [_translated(collective, view, t) for t in view.moves.tolist()]
        back = [_translated(collective, view, t, sign=-1) for t in view.moves.tolist()]
        none = [np.zeros(0, np.int64)]
        return cls(
            nbytes=collective.chunk_bytes(nbytes),
            kind=np.unique(kind, return_inverse=True)[1].astype(np.int32),
            held=holder[here] * chunks + collective.in_chunk[here],
            goal=goal,
            there=np.concatenate(there or none).astype(np.int32),
            back=np.concatenate(back or none).astype(np.int32),
        )


def _translated(collective: Collective, view: Quotient, by: int, sign: int = 1) -> Ints:
    """The number of each chunk after a translation."""
    count = collective.num_ranks
    rank = np.arange(count)
    moved = rank % view.local + view.local * translate(rank // view.local, by, view.sizes, sign=sign)
    piece = np.arange(collective.chunks)
    if collective.kind == "all_to_all":
        return np.asarray(((moved[:, None] * count + moved)[..., None] * collective.chunks + piece).ravel())
    return np.asarray((moved[:, None] * collective.chunks + piece).ravel())


@dataclass(frozen=True, kw_only=True, eq=False)
class GreedyOptions:
    """A set of rules for a greedy run: the hops that it may use, and how it decides."""

    view: Quotient
    blocking: bool
    """Whether to plan as if alpha occupied the link, too; chunks that arrive a little later are then considered."""
    mirrored: bool
    once: bool
    """Whether each chunk may come into a region only once."""
    patient: bool
    """Whether a slow link stays idle when the faster links will bring everything sooner."""


def _ways(view: Quotient, *, blocking: bool, mirrored: bool) -> list[GreedyOptions]:
    views = [*filter(None, (_without_shared(view), _without_slowest(view))), view]
    taken = (True,) if blocking else (False, True) if view.alpha_us.any() else (False,)
    patient = (False,) if len(np.unique(view.rate)) == 1 else (True, False)
    once = (True, False) if view.crosses.any() else (False,)
    return [
        GreedyOptions(view=v, blocking=b, mirrored=mirrored, once=o, patient=p)
        for o in once for b in taken for p in patient for v in views
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class HopSchedule:
    """A schedule: when each hop carries which chunk, by the receiver's numbering of chunks."""

    way: GreedyOptions
    start_us: Floats
    arrive_us: Floats
    hop: NDArray[np.int32]
    chunk: NDArray[np.int32]

    @property
    def end_us(self) -> float:
        """The time at which the last chunk arrives, in microseconds."""
        return float(self.arrive_us.max(initial=0.0))


def _plans(demand: LocalDemand, ways: list[GreedyOptions], seed: int, until: float, last: float) -> list[HopSchedule]:
    """Plans by every set of rules and with several seeds, the shortest first.

    No plan is begun after `until`, and a plan that is not done at `last` is given up, so that there may be none.
    """
    usual = float(demand.nbytes.mean())
    far = {id(way.view): way.view.distances(usual) if len(demand.goal) else np.zeros(0) for way in ways}
    goal_us = min(_counting_us(demand, way) for way in ways)
    found: list[HopSchedule] = []
    for at in range(RESTARTS * len(ways)):
        way = ways[at % len(ways)]
        plan = _plan(demand, way, far[id(way.view)], seed + at, max(last - time.monotonic(), LEAST_S))
        if plan is None:
            break
        found.append(plan)
        if found[-1].end_us <= goal_us * (1 + 1e-9) or time.monotonic() > until:
            break
    found.sort(key=lambda plan: plan.end_us)
    return found


def _plan(demand: LocalDemand, way: GreedyOptions, distance: Floats, seed: int, limit_s: float) -> HopSchedule | None:
    view = way.view
    start, arrive, hop, chunk, missing = _native.greedy_schedule(
        num_devices=view.local, hop_src=view.src, hop_dst=view.dst, link_ptr=view.link_ptr, link=view.link,
        alpha_us=view.alpha_us, bytes_per_us=view.rate, shift=view.shift, there=demand.there, back=demand.back,
        nbytes=demand.nbytes, kind=demand.kind, region=view.region, crosses=view.crosses, goal=demand.goal,
        distance=distance, held=demand.held, alpha_blocks=way.blocking, mirrored=way.mirrored, once=way.once,
        patient=way.patient, seed=seed, limit_s=limit_s,
    )  # fmt: skip
    if missing < 0:
        return None
    if missing:
        raise Infeasible(f"greedy: no hops lead to {missing} of the places where chunks are wanted")
    return HopSchedule(way=way, start_us=start, arrive_us=arrive, hop=hop, chunk=chunk)


def _without_shared(view: Quotient) -> Quotient | None:
    """The quotient without local hops over links that chunks use to cross between regions.

    None where there are no such hops, or where the others do not connect each region.
    """
    foreign = np.zeros(len(view.rate), np.bool_)
    lengths = np.diff(view.link_ptr)
    foreign[view.link[np.repeat(view.crosses, lengths)]] = True
    shares = np.logical_or.reduceat(foreign[view.link], view.link_ptr[:-1]) & ~view.crosses
    if not shares.any():
        return None
    kept = view.keep(~shares)
    inside = ~kept.crosses
    reach = np.eye(view.local, dtype=np.bool_)
    reach[kept.src[inside], kept.dst[inside]] = True
    for _ in range(max(1, view.local.bit_length())):
        reach = reach @ reach
    same = view.region[:, None] == view.region
    return kept if np.all(reach[same]) else None


def _without_slowest(view: Quotient) -> Quotient | None:
    """The quotient without its slowest hops, or None where the others do not connect all devices."""
    rate = np.minimum.reduceat(view.rate[view.link], view.link_ptr[:-1])
    slow = rate < rate.min() * (1 + 1e-9)
    kept = view.keep(~slow)
    return kept if joins_all(*kept.ends(), view.local * view.copies) else None


def _counting_us(demand: LocalDemand, way: GreedyOptions) -> float:
    """The earliest time at which links that are never idle could have brought each device all chunks that it lacks."""
    if len(demand.goal):
        return 0.0
    view, size = way.view, float(demand.nbytes.min(initial=np.inf))
    chunks, worst = len(demand.nbytes), 0.0
    held = np.bincount(demand.held // chunks, minlength=view.local)
    last = view.link[view.link_ptr[1:] - 1]
    for device in range(view.local):
        into = np.unique(last[view.dst == device])
        each = size / view.rate[into] + (view.alpha_us[into] if way.blocking else 0.0)
        wanted = chunks - int(held[device])
        moments = np.sort((each[:, None] * np.arange(1, wanted + 1)).ravel()) if len(into) else np.zeros(0)
        worst = max(worst, float(moments[wanted - 1]) if 0 < wanted <= len(moments) else 0.0)
    return worst


def _program(
    name: str, plan: HopSchedule, collective: Collective, hops: Hops, cluster: Cluster, backwards: str = ""
) -> Program:
    """The program of a plan with all copies of each transfer, in order of start; backwards its mirror image, which
    reduces."""
    view = plan.way.view
    start, arrive = plan.start_us, plan.arrive_us
    if backwards:
        start, arrive = plan.end_us - arrive, plan.end_us - start
    order = np.argsort(start, kind="stable")
    hop = plan.hop[order]
    src, dst = (all_ends.reshape(-1, view.copies)[hop] for all_ends in view.ends())
    # A chunk is numbered relative to its receiver's position on the torus.
    moved = np.stack([_translated(collective, view, t) for t in range(view.copies)], axis=1)
    chunk = moved[plan.chunk[order][:, None], dst // view.local]
    begin, end = (dst.ravel(), src.ravel()) if backwards else (src.ravel(), dst.ravel())
    route, routes = _routes(begin, end, collective.ranks, hops, cluster)
    program = Program.from_steps(
        name,
        like(collective, kind=backwards) if backwards else collective,
        src=begin,
        dst=end,
        chunk=chunk.ravel(),
        step=np.arange(src.size),
        reduce=bool(backwards),
        route=route,
        routes=routes,
        routes_digest=cluster.digest if routes else "",
    )
    if _shares_links(view):
        program = paced(program, *(np.repeat(times[order], view.copies) for times in (start, arrive)), sends=True)
    program.verify()
    return program


def _shares_links(view: Quotient) -> bool:
    """Whether two hops use the same link; otherwise the order on connections is the order on links."""
    return len(np.unique(view.link)) < len(view.link)


def _routes(
    src: Ints, dst: Ints, ranks: tuple[int, ...], hops: Hops, cluster: Cluster
) -> tuple[NDArray[np.int32] | None, tuple[tuple[int, ...], ...]]:
    """The routes of transfers, where they are not the cluster's own at any size; those of the reversed cluster are
    reversed.
    """
    device, count = np.array(ranks, np.int64), cluster.num_devices
    turned = hops.cluster is not cluster
    begins, ends = (hops.dst, hops.src) if turned else (hops.src, hops.dst)
    key = begins.astype(np.int64) * count + ends
    by_key = np.argsort(key)
    used, which = np.unique(device[src] * count + device[dst], return_inverse=True)
    hop = by_key[np.searchsorted(key[by_key], used)]
    a, b = begins[hop], ends[hop]
    ptr, links = cluster.route_table(a, b, a.astype(np.int64) + b)
    mine = [hops.route(h)[:: -1 if turned else 1] for h in hop.tolist()]
    usual = all(tuple(links[ptr[i] : ptr[i + 1]].tolist()) == route for i, route in enumerate(mine))
    if usual and cluster.route_classes(a, b).max(initial=0) <= 1:
        return None, ()
    return which.astype(np.int32), tuple(mine)
