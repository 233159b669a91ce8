# SPDX-License-Identifier: Apache-2.0
"""Exact mode: the least makespan of a small collective, found and proved on a grid of time slots.

The claim is about programs that send the collective's chunks one per message over the cluster's own shortest routes.
Start times of a best such program are sums of hop times, so where all of them are multiples of one slot nothing is
lost by the grid. Otherwise two grids are used: hop times rounded up give a program, hop times rounded down a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput, SearchTimeout, unknown
from ..programs import Program
from ..simulator import lower_bound, simulate
from ..solvers import cp_sat
from ..units import check_seed
from .combine import INVERSE, all_reduce_from, inverse, like, reversed_cluster
from .exact_grid import HopNetwork, Move, label
from .exact_models import AllReduceModel, CopyModel, SingleDestination, SlotModel

SOLVERS = ("auto", "cp-sat", "highs")
INVERTED = ("reduce_scatter", "reduce")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactResult:
    """A program, its simulated time, and a proof that no such program is faster than `proved_bound_us`."""

    program: Program
    time_us: float
    proved_bound_us: float
    grid: str
    """The length of a time slot, and which times were rounded to slots."""

    @property
    def optimal(self) -> bool:
        """Whether the program's time equals the bound."""
        return self.time_us <= self.proved_bound_us * (1 + 1e-9)

    @property
    def gap(self) -> float:
        """The most by which the time may exceed the optimum, as a share of the bound."""
        return max(0.0, self.time_us / self.proved_bound_us - 1) if self.proved_bound_us > 0 else 0.0


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    solver: str = "auto",
    channels: Iterable[str] | None = None,
) -> Program:
    """The fastest program found by `solve`.

    Args:
        collective: A small collective (about a dozen ranks).
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search.
        seed: The seed of the solver.
        progress: Called with a line of text and the share of the budget spent, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        solver: "auto", "highs" or "cp-sat".
        channels: The channels whose links may be used; all when not given.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is not served, or the model is too large.
        SearchTimeout: No schedule was found in time.
    """
    return solve(
        collective, cluster, nbytes=nbytes, budget_s=budget_s, seed=seed, progress=progress, alpha=alpha,
        solver=solver, channels=channels,
    ).program  # fmt: skip


def solve(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    solver: str = "auto",
    channels: Iterable[str] | None = None,
) -> ExactResult:
    """The fastest program for a small collective, with its proof.

    Horizons are tried upwards from a counting bound: each is proved too short, or gives the program. Reduce-scatter
    and reduce are solved as their inverses on the reversed cluster. All-reduce is searched among reductions to fixed
    roots followed by broadcasts, overlapped; its bound is by counting, for any algorithm.

    Args:
        collective: A small collective (about a dozen ranks), with chunks of one size.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search.
        seed: The seed of the solver.
        progress: Called with a line of text and the share of the budget spent, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        solver: "auto", "highs" or "cp-sat".
        channels: The channels whose links may be used; all when not given.

    Returns:
        The program, its time and the bound that was proved.

    Raises:
        Infeasible: The collective is not served, or the model is too large.
        SearchTimeout: No schedule was found in time.
        InvalidInput: The solver is unknown or not installed, or a device does not exist.

    >>> from stretto import AllGather
    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=0.0)
    >>> found = solve(AllGather(4), ring, nbytes=4e6)
    >>> found.time_us, found.optimal
    (200.0, True)
    """
    check_seed(seed)
    if solver not in SOLVERS:
        raise unknown("solver", solver, SOLVERS)
    search = _Search(
        nbytes=nbytes, alpha=alpha, seed=seed, progress=progress or (lambda message, share: None),
        solver=_solver(solver), channels=None if channels is None else tuple(channels),
        ends_at=time.monotonic() + budget_s, budget_s=budget_s,
    )  # fmt: skip
    if collective.kind in INVERTED:
        turned = like(collective, kind=INVERSE[collective.kind])
        found = search.spread(turned, reversed_cluster(cluster))
        program = inverse(found.program, cluster, nbytes=nbytes, alpha=alpha)
        return search.result(program.replace(name=found.program.name), cluster, found.proved_bound_us, found.grid)
    if collective.kind == "all_reduce":
        return search.all_reduce(collective, cluster)
    if collective.combining:
        raise Infeasible(f"exact: {collective.kind} combines parts in a way this mode does not know")
    return search.spread(collective, cluster)


@dataclass(frozen=True, kw_only=True)
class _Search:
    nbytes: float
    alpha: str
    seed: int
    progress: Progress
    solver: str
    channels: tuple[str, ...] | None
    ends_at: float
    budget_s: float

    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def spread(self, collective: Collective, cluster: Cluster) -> ExactResult:
        """Solve a collective in which chunks are only copied."""
        net = HopNetwork.of(collective, cluster, nbytes=self.nbytes, alpha=self.alpha, channels=self.channels)
        down, up = net.grids
        exact = up is down
        plain = CopyModel(collective, net, down)
        least = plain.least_slots()
        bound = lower_bound(collective, cluster, self.nbytes, channels=self.channels).total_us
        kind = SingleDestination if plain.single() else CopyModel
        # On an exact grid a bound between two slots is rounded up to the next slot.
        known = math.ceil(bound / down.slot_us - 1e-6) if exact else math.floor(bound / down.slot_us + 1e-6)
        first = max(least, known)
        proved, moves = self.climb(partial(kind, collective, net, down), first, 1.0 if exact else 0.4)
        bound = max(bound, proved * down.slot_us)
        if not exact:
            first = max(CopyModel(collective, net, up).least_slots(), math.ceil(bound / up.slot_us - 1e-6))
            _, moves = self.climb(partial(kind, collective, net, up), first, 1.0)
        if moves is None:
            raise SearchTimeout(f"exact: no schedule found in {self.budget_s:g} s; at least {bound:g} us are needed")
        return self.result(self.fastest(net.programs(collective, up, moves), cluster), cluster, bound, net.describe())

    def all_reduce(self, collective: Collective, cluster: Cluster) -> ExactResult:
        n = collective.num_ranks
        if collective.num_chunks % n:
            raise Infeasible(f"chunks: exact all-reduce needs a multiple of {n} chunks, not {collective.num_chunks}")
        net = HopNetwork.of(collective, cluster, nbytes=self.nbytes, alpha=self.alpha, channels=self.channels)
        down, up = net.grids
        counted = AllReduceModel(collective, net, down).least_slots() * down.slot_us
        bound = max(lower_bound(collective, cluster, self.nbytes, channels=self.channels).total_us, counted)
        found = self.two_halves(collective, cluster)
        first = math.ceil(bound / up.slot_us - 1e-6)
        last = math.ceil(self.time_us(found[0], cluster) / up.slot_us - 1e-6) - 1 if found else None
        _, moves = self.climb(partial(AllReduceModel, collective, net, up), first, 1.0, last)
        if moves is not None:
            found += net.programs(collective, up, moves)
        if not found:
            raise SearchTimeout(f"exact: no schedule found in {self.budget_s:g} s; at least {bound:g} us are needed")
        best = self.fastest(found, cluster).replace(name=label(up))
        return self.result(best, cluster, bound, net.describe())

    def two_halves(self, collective: Collective, cluster: Cluster) -> list[Program]:
        """All-reduce from the best all-gather and its inverse, if one is found in part of the time."""
        gathered = like(collective, kind="all_gather", chunks=collective.num_chunks // collective.num_ranks)
        search = self.until(0.6)
        try:
            gather = search.spread(gathered, cluster).program
            back = gather if _same_both_ways(cluster) else search.spread(gathered, reversed_cluster(cluster)).program
        except SearchTimeout:
            return []
        scatter = inverse(back, cluster, nbytes=self.nbytes, alpha=self.alpha)
        return [all_reduce_from(scatter, gather, cluster, nbytes=self.nbytes, alpha=self.alpha)]

    def until(self, share: float) -> _Search:
        """The same search with part of the time that is left."""
        values = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return _Search(**(values | {"ends_at": time.monotonic() + share * self.left_s()}))

    def climb(
        self, build: Callable[[int, bool], SlotModel], first: int, share: float, last: int | None = None
    ) -> tuple[int, list[Move] | None]:
        """The least horizon not proved too short, and the first schedule found from there on."""
        limit = time.monotonic() + share * self.left_s()
        proved = slots = first
        while (last is None or slots <= last) and time.monotonic() < limit:
            self.progress(f"exact: {slots} slots", 1 - max(self.left_s(), 0.0) / self.budget_s)
            status = "unknown"
            # Most often there is a schedule in which no message waits inside a switch, and it is found much faster.
            for rigid in (True, False):
                model = build(slots, rigid)
                # A horizon that is hard to decide must not use up the time for the next, easier one.
                status, values = model.solve(self.solver, (limit - time.monotonic()) / 2, self.seed)
                if values is not None:
                    return proved, model.moves(values)
                if not model.net.staged:
                    break
            if status == "infeasible" and proved == slots:
                proved += 1
            slots += 1
        return proved, None

    def time_us(self, program: Program, cluster: Cluster) -> float:
        return simulate(program, cluster, nbytes=self.nbytes, alpha=self.alpha).total_us

    def fastest(self, programs: list[Program], cluster: Cluster) -> Program:
        return min(programs, key=lambda program: self.time_us(program, cluster))

    def result(self, program: Program, cluster: Cluster, bound_us: float, grid: str) -> ExactResult:
        program.verify()
        time_us = self.time_us(program, cluster)
        return ExactResult(program=program, time_us=time_us, proved_bound_us=bound_us, grid=grid)


def _solver(name: str) -> str:
    """The solver to use: HiGHS unless told otherwise, as it is at least as fast here and always installed."""
    if name == "cp-sat" and not cp_sat.available():
        raise InvalidInput("solver: cp-sat needs OR-Tools (the extra 'solvers'); highs needs nothing")
    return "highs" if name == "auto" else name


def _same_both_ways(cluster: Cluster) -> bool:
    """Whether for every link another one leads back at the same cost."""
    columns = [cluster.link_channel, cluster.link_alpha_us, cluster.link_gb_per_s]
    there = zip(cluster.link_src, cluster.link_dst, *columns, strict=True)
    back = zip(cluster.link_dst, cluster.link_src, *columns, strict=True)
    return sorted(there) == sorted(back)
