# SPDX-License-Identifier: Apache-2.0
"""All-to-all, and any collective whose chunks each go from one rank to one other, as multi-commodity flow.

Every chunk takes one path over the physical links, passing switches and relayed by ranks. Paths are found by removing
chunks and putting them back where they add least to a price that grows steeply with a link's load, which brings the
busiest link to the bound of the concurrent flow, or within a chunk of it. The messages are then ordered by planning
with priorities, forwards and backwards, and by colouring where every message passes two busy ports. `simulate` decides
which program is best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible
from ..programs import Program
from ..simulator import lower_bound, simulate
from ..units import check_seed
from .flow_order import MessageOrder, Planner, RoutedMessages, messages_of
from .flow_routes import Paths, Traffic, gather, refined, route, traffic_of

PIECES = (1, 2, 3, 4, 6, 8, 12, 16)
MERGES = (None, "source", "destination")
SLACKS = (0.05, 0.01, 0.02, 0.1, 0.003)
"""The parts of the planned time by which arrivals may run behind the plan, each tried in turn."""
TURNS = 2
SHAKES = 48
MAX_MOVES = 250_000
"""The number of chunks x hops beyond which a finer cut is not tried."""
SMALL = 3_000
"""The most messages for which plans are perturbed, and the most chunks for which several seeds are tried."""
MAX_GATHER = 64
"""The most ranks for which every pair may become a hop."""
CLOSE = 1.001
"""The ratio to the bound at which the search ends."""
WORTHWHILE = 0.998
"""The factor by which a finer cut must reduce the time to be kept."""


@dataclass(frozen=True, kw_only=True)
class _Problem:
    collective: Collective
    cluster: Cluster
    nbytes: float
    alpha: str
    contention: str | None
    bandwidth_us: float
    bound_us: float
    seed: int


class _Search:
    """A search that keeps the best program, and ends when the time is over or the bound is reached."""

    def __init__(self, problem: _Problem, budget_s: float, progress: Callable[[str, float], None] | None) -> None:
        self.problem, self.budget_s, self.progress = problem, budget_s, progress
        self.began = time.monotonic()
        self.program: Program | None = None
        self.us = np.inf

    def spent(self) -> float:
        """The share of the budget that is spent."""
        return (time.monotonic() - self.began) / self.budget_s if self.budget_s > 0 else 1.0

    def done(self) -> bool:
        """Whether the search may end: a program is found, and the bound is reached or the time is over."""
        return self.program is not None and (self.us <= CLOSE * self.problem.bound_us or self.spent() >= 1)

    def offer(self, program: Program) -> float:
        """Prove and simulate a program, keep it if it is the best, and return its time."""
        p = self.problem
        us = simulate(program, p.cluster, nbytes=p.nbytes, alpha=p.alpha, contention=p.contention).total_us
        finer = self.program is not None and program.collective.chunks > self.program.collective.chunks
        if us < self.us * (WORTHWHILE if finer else 1.0):
            self.program, self.us = program, us
        if self.progress is not None:
            self.progress(f"{program.name}: best {self.us:.6g} us", min(1.0, self.spent()))
        return us


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    alpha: str = "pipelined",
    contention: str | None = None,
    pieces: int | None = None,
) -> Program:
    """The fastest program found for a collective whose chunks each go from one rank to one other.

    Args:
        collective: An all-to-all, or any collective of that form.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; what has begun by then is finished.
        seed: The seed of the routing and of the order.
        progress: Called with a line of text and the share of the budget spent, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        contention: "fifo" or "fair", as in `simulate`; what the cluster needs when not given.
        pieces: How many equal parts each chunk is cut into, >= 1; several numbers are tried when not given.

    Returns:
        The verified program.

    Raises:
        Infeasible: A chunk has several sources or destinations, nothing moves, or ranks are not connected.

    >>> from stretto import AllToAll
    >>> ring = Cluster.preset("ring", nodes=5, gb_per_s=10.0, alpha_us=0.0)
    >>> program = synthesize(AllToAll(5), ring, nbytes=5e6)
    >>> simulate(program, ring, nbytes=5e6).total_us
    300.0
    >>> lower_bound(AllToAll(5), ring, nbytes=5e6).reason
    'cut: 2 devices must receive 6 MB over 20 GB/s'
    """
    check_seed(seed)
    if not len(traffic_of(collective).chunk):
        raise Infeasible(f"flow: {collective.kind} has nothing to move")
    bound = lower_bound(collective, cluster, nbytes)
    problem = _Problem(
        collective=collective,
        cluster=cluster,
        nbytes=float(nbytes),
        alpha=alpha,
        contention=contention,
        bandwidth_us=bound.bandwidth_us,
        bound_us=bound.total_us,
        seed=seed,
    )
    search = _Search(problem, budget_s, progress)
    for cut in PIECES if pieces is None else (pieces,):
        moves = _try_cut(search, cut)
        if search.done() or search.spent() > 0.4 or 2 * moves > MAX_MOVES:
            break
    assert search.program is not None
    search.program.verify()
    return search.program


def _try_cut(search: _Search, cut: int) -> int:
    """Try candidates with each chunk cut into `cut` pieces; return the largest number of chunk moves."""
    p = search.problem
    collective = refined(p.collective, cut)
    traffic = traffic_of(collective)
    moves = 0
    for label, paths in chain(_gatherings(p, cut), _routings(p, collective, traffic)):
        for merge in MERGES if p.alpha == "blocking" and paths.turn is None else (None,):
            messages = messages_of(collective, p.cluster, traffic, paths, nbytes=p.nbytes, merge=merge)
            moves = max(moves, len(messages.chunk))
            _try_orders(search, messages, label + (f",merge={merge}" if merge else ""))
            if search.done():
                return moves
    return moves


def _routings(problem: _Problem, collective: Collective, traffic: Traffic) -> Iterator[tuple[str, Paths]]:
    """Paths chosen by bytes alone, and where alphas matter also shorter paths on links that may be busier."""
    p = problem
    seeds = range(p.seed, p.seed + (4 if len(traffic.chunk) <= SMALL else 1))
    for load, detour in ((1.0, 0.02), (1.0, 0.5), (1.5, 0.5), (4.0, 0.5), (16.0, 0.5)):
        if load * p.bandwidth_us > p.bound_us or (detour > 0.1 and p.bound_us < 1.05 * p.bandwidth_us):
            return
        found = [
            route(
                collective, p.cluster, traffic, nbytes=p.nbytes, target_us=load * p.bandwidth_us, detour=detour, seed=s
            )
            for s in seeds
        ]
        shorter = f",load={load:g}" if detour > 0.1 else ""
        yield f"k={collective.chunks}{shorter}", min(found, key=lambda paths: paths.worst_us)


def _gatherings(problem: _Problem, cut: int) -> Iterator[tuple[str, Paths]]:
    """Paths on which chunks share messages, for ``blocking`` alphas."""
    p = problem
    if p.alpha != "blocking" or p.collective.num_ranks > MAX_GATHER:
        return
    traffic = traffic_of(p.collective)
    for load, turns in ((2.0, 2), (1.5, 2), (1.0, 2), (1.0, 3)):
        with suppress(Infeasible):
            paths = gather(
                p.collective, p.cluster, traffic,
                nbytes=p.nbytes, target_us=load * p.bound_us, pieces=cut, turns=turns, seed=p.seed,
            )  # fmt: skip
            yield f"k={cut * p.collective.chunks},gather={turns},load={load:g}", paths


def _try_orders(search: _Search, messages: RoutedMessages, label: str) -> None:
    planner = Planner(messages, blocking=search.problem.alpha == "blocking")
    best: tuple[float, MessageOrder] | None = None

    def tried(plan: MessageOrder, how: str = "", slack_us: float | None = None) -> bool:
        nonlocal best
        us = search.offer(messages.program(f"flow({label},{plan.rule}{how})", plan, slack_us=slack_us))
        if best is None or us < best[0]:
            best = us, plan
        return search.done()

    for plan in planner.rules():
        for turn in range(TURNS + 1):
            if tried(plan, f"{turn or ''}"):
                return
            if plan.rule == "colour" and turn < 2:
                for slack in SLACKS:
                    if tried(plan, f"{turn or ''},slack={slack:g}", slack * plan.total_us):
                        return
            plan = planner.turn(plan)
    if len(messages.src) > SMALL or best is None:
        return
    random = np.random.default_rng(search.problem.seed)
    for shake in range(SHAKES):
        plan = best[1] if shake % 4 == 0 else plan
        size = (0.1, 0.03)[shake % 2] * plan.total_us
        plan = planner.turn(plan, size * random.standard_normal(len(messages.src)))
        if tried(plan, f",shake={shake}"):
            return
