# SPDX-License-Identifier: Apache-2.0
"""TACCL's three stages, guided by a sketch: routing, ordering, contiguity; the simulator judges every plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput
from ..moved import old_name
from ..programs import Program
from ..simulator import simulate
from ..simulator.network import default_contention
from ..units import check_seed
from .contiguity import MessageSchedule, merge
from .exact_schedule import exact_schedule, schedule_bound_us
from .logical import LogicalTopology, default_sketch
from .ordering import VARIANTS, SendTasks, justify, priorities, schedule
from .refine import CLOSE, improve, paced
from .routing import route
from .routing_problem import Routing, RoutingProblem
from .schedule import program_from_schedule
from .sketch import Sketch
from .slots import on_grid

Progress = Callable[[str, float], None]
MAX_TRANSFERS = 1 << 18
LARGE = 1500
"""The number of binaries from which routing gets most of the time, because a longer search of orders gains little."""
EXACT_SHARE = 0.5
"""The share of what is left that CP-SAT gets to schedule one routing."""
POLICY_WORTH = 0.97
"""The factor by which a routing of the quick search must be faster to be tried where the sketch has a policy."""


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float | None = None,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    sketch: Sketch | None = None,
    alpha: str = "pipelined",
    solver: str = "highs",
    solutions: int = 3,
    detour: float = 0.5,
) -> Program:
    """The fastest program found that keeps to the sketch.

    Args:
        collective: An all-gather, all-to-all, broadcast, gather, scatter or anything else that does not combine chunks.
        cluster: The cluster.
        nbytes: The size in bytes, > 0; from the sketch's `input_size` when not given.
        budget_s: The seconds to search.
        seed: The seed of all stages.
        progress: Called with a line of text and the fraction done, 0..1.
        sketch: The sketch, whose `input_chunkup` cuts chunks further; what the cluster suggests when not given.
        alpha: "pipelined" or "blocking", as in `simulate`.
        solver: The solver of the models, "highs" or "cpsat".
        solutions: How many routings to look for, >= 1.
        detour: The share by which paths may be longer than the shortest, >= 0.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective combines chunks, the sketch leaves no routing, or the problem is too large.
        InvalidInput: The sketch does not fit the cluster, or there is no size.

    >>> from stretto import AllGather, Cluster, simulate
    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=0.0)
    >>> program = synthesize(AllGather(4), ring, nbytes=4e6, budget_s=2.0)
    >>> simulate(program, ring, nbytes=4e6).total_us
    2000.0
    """
    return solve(
        collective, cluster, nbytes=nbytes, budget_s=budget_s, seed=seed, progress=progress, sketch=sketch, alpha=alpha,
        solver=solver, solutions=solutions, detour=detour,
    ).program  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class SketchResult:
    """A program that keeps to a sketch, its simulated time, and a bound on all schedules of its routing."""

    program: Program
    time_us: float
    schedule_bound_us: float
    """No order of the program's sends, merged or not, is faster; 0 where links are shared, so that none was proved."""
    symmetric_bound_us: float = 0.0
    """No order of the program's single sends is faster in which those that the sketch's rotations map onto one another
    start together; 0 where links are shared, or where the routing has no such order."""

    @property
    def schedule_gap(self) -> float:
        """The most by which the time may exceed that of the best schedule of the routing, as a share of the bound."""
        return max(0.0, self.time_us / self.schedule_bound_us - 1) if self.schedule_bound_us > 0 else math.inf


def solve(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float | None = None,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    sketch: Sketch | None = None,
    alpha: str = "pipelined",
    solver: str = "highs",
    solutions: int = 3,
    detour: float = 0.5,
) -> SketchResult:
    """The fastest program found that keeps to the sketch, with how near its schedule is to the best of its routing.

    Args:
        collective: As for `synthesize`, like all that follows.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search.
        seed: The seed of all stages.
        progress: Called with a line of text and the fraction done, 0..1.
        sketch: The sketch.
        alpha: "pipelined" or "blocking".
        solver: "highs" or "cpsat".
        solutions: How many routings to look for, >= 1.
        detour: The share by which paths may be longer than the shortest, >= 0.

    Returns:
        The verified program and its bound.

    Raises:
        Infeasible: The collective combines chunks, the sketch leaves no routing, or the problem is too large.
        InvalidInput: The sketch does not fit the cluster, or there is no size.
    """
    check_seed(seed)
    clock = _Clock(budget_s)
    tell = progress or (lambda message, fraction: None)
    chosen = default_sketch(cluster, collective) if sketch is None else sketch
    fine = refined(collective, math.lcm(collective.chunks, chosen.input_chunkup) // collective.chunks)
    size = bytes_of(chosen, fine) if nbytes is None else nbytes
    logical = LogicalTopology.of(chosen, cluster, fine)
    problem = RoutingProblem.of(logical, nbytes=size, alpha=alpha, detour=detour)
    judge = _Judge(problem, f"three_stage({chosen.name}, chunks={fine.chunks})", size, alpha)
    routings = route(
        problem,
        limit_s=budget_s * (0.55 if problem.num_orbits > LARGE else 0.4),
        seed=seed,
        solver=solver,
        solutions=solutions,
        rate=_rated(problem),
        progress=lambda message, fraction: tell(message, 0.4 * fraction),
    )
    if not routings:
        raise Infeasible(f"sketch {chosen.name}: no routing was found in {budget_s:g} s; allow more time or more links")
    bound = max(r.bound_us for r in routings)
    policies = logical.has_policies or chosen.own_first
    _order(judge, routings, clock, tell)
    if judge.best_us > bound * CLOSE and clock.left_s > 0 and not policies:
        exact = on_grid(
            problem, bound_us=bound, best_us=judge.best_us, limit_s=clock.left_s / 3, seed=seed, solver=solver
        )
        if exact is not None:
            judge.see(exact)
            tell(f"exact on a grid: {judge.best_us:.6g} us", 0.7)
    if judge.best_us > bound * CLOSE and not chosen.own_first:
        _schedule_exactly(judge, routings, clock, seed, tell)
    if judge.best_us > bound * CLOSE and clock.left_s > 0:
        share = 0.4 if problem.blocking and logical.hops.alpha_us.any() else 0.9
        others = [r for r in routings if r.by != "search"] if policies else routings
        improve(judge, judge.plan, others, limit_s=clock.left_s * share, seed=seed, bound_us=bound)
        tell(f"search: {judge.best_us:.6g} us", 0.8)
    if problem.blocking and clock.left_s > 0:
        merge(judge.plan, judge.see, limit_s=clock.left_s * 0.9, seed=seed, solver=solver)
        tell(f"contiguity: {judge.best_us:.6g} us", 1.0)
    return judge.result()


class _Clock:
    """The budget of a search and what is left of it."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s, self.began = budget_s, time.monotonic()

    @property
    def left_s(self) -> float:
        """The seconds left; negative once the budget is overrun."""
        return self.began + self.budget_s - time.monotonic()


def _order(judge: _Judge, routings: Sequence[Routing], clock: _Clock, tell: Progress) -> None:
    """Show the judge every routing in the orders of all rules, until three quarters of the time are spent."""
    problem = judge.problem
    fixed = problem.logical.sketch.own_first
    policies = problem.logical.has_policies or fixed
    rated = _rated(problem)
    for at, routing in enumerate(routings):
        if policies and routing.by == "search" and rated(routing) > POLICY_WORTH * judge.best_us:
            continue
        tasks = SendTasks.of(problem, routing)
        if tasks.count > MAX_TRANSFERS:
            raise Infeasible(f"routing: {tasks.count} transfers is too large for this synthesiser")
        for variant in VARIANTS:
            plan = schedule(tasks, priorities(tasks, variant))
            judge.see(MessageSchedule.single(tasks, plan))
            if not fixed:
                judge.see(MessageSchedule.single(tasks, justify(tasks, plan)))
            if clock.left_s < clock.budget_s / 4:
                break
        tell(f"ordering {at}: {judge.best_us:.6g} us", 0.4 + 0.2 * (at + 1) / len(routings))
        if clock.left_s < clock.budget_s / 4:
            break


def _schedule_exactly(judge: _Judge, routings: Sequence[Routing], clock: _Clock, seed: int, tell: Progress) -> None:
    """Schedule the best plan's routing exactly, then other routings whose bound says that they may be faster."""
    others = [SendTasks.of(judge.problem, r) for r in routings if r is not judge.plan.tasks.routing]
    for tasks in [judge.plan.tasks, *others]:
        limit_s = clock.left_s * EXACT_SHARE
        bound_us = schedule_bound_us(tasks, merged=1)
        if limit_s <= 0 or bound_us * CLOSE >= judge.best_us:
            continue
        known = (
            judge.plan.start_us
            if tasks is judge.plan.tasks
            else schedule(tasks, priorities(tasks, next(iter(VARIANTS))))
        )
        found = exact_schedule(tasks, known, limit_s=limit_s, seed=seed)
        if found.start_us is not None:
            judge.see(MessageSchedule.single(tasks, found.start_us))
        judge.symmetric_bounds_us[tasks.routing] = found.bound_us
        what = f"single sends of this routing take {bound_us:.6g} us, {found.bound_us:.6g} if images start together"
        tell(f"exact scheduling: {judge.best_us:.6g} us, {what}", 0.75)


def _rated(problem: RoutingProblem) -> Callable[[Routing], float]:
    """A function that returns a routing's planned time by the first rule of ordering."""

    def rate(routing: Routing) -> float:
        tasks = SendTasks.of(problem, routing)
        return tasks.end_us(schedule(tasks, priorities(tasks, "longest remaining first")))

    return rate


class _Judge:
    """A judge that turns plans into programs, simulates them, and keeps the best."""

    def __init__(self, problem: RoutingProblem, name: str, nbytes: float, alpha: str) -> None:
        self.problem, self.name, self.nbytes, self.alpha = problem, name, nbytes, alpha
        self.best_us = math.inf
        self.symmetric_bounds_us: dict[Routing, float] = {}

    def see(self, plan: MessageSchedule) -> float:
        """The simulated time of a plan, the better of as it is and with its sends paced by arrivals."""
        program = self.program_of(plan)
        us = self._time(program, plan)
        if us > plan.end_us * (1 + 1e-6):
            us = min(us, self._time(paced(program, plan), plan))
        return us

    def _time(self, program: Program, plan: MessageSchedule) -> float:
        us = simulate(program, self.cluster, nbytes=self.nbytes, alpha=self.alpha).total_us
        if us < self.best_us:
            self.best_us, self.plan, self.program = us, plan, program
        return us

    def result(self) -> SketchResult:
        """The best program, verified, with the bound on its schedule where links serve one message at a time."""
        self.program.verify()
        fifo = default_contention(self.cluster) == "fifo"
        return SketchResult(
            program=self.program,
            time_us=self.best_us,
            schedule_bound_us=schedule_bound_us(self.plan.tasks) if fifo else 0.0,
            symmetric_bound_us=self.symmetric_bounds_us.get(self.plan.tasks.routing, 0.0) if fifo else 0.0,
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster that programs are simulated on."""
        return self.problem.logical.hops.cluster

    def program_of(self, plan: MessageSchedule) -> Program:
        """The plan as a program: its order is the plan's order."""
        logical, tasks = self.problem.logical, plan.tasks
        hop = [tasks.hop[sends[0]] for sends in plan.sends]
        return program_from_schedule(
            self.name,
            logical.collective,
            self.cluster,
            start_us=plan.start_us,
            src=logical.src[hop],
            dst=logical.dst[hop],
            chunks=[[tasks.chunk[t] for t in sends] for sends in plan.sends],
            routes=[logical.hops.route(h) for h in hop],
        )


def refined(collective: Collective, pieces: int) -> Collective:
    """The same collective with every chunk cut into equal pieces.

    >>> from stretto import AllGather
    >>> refined(AllGather(4), 2) == AllGather(4, chunks=2)
    True
    """
    if pieces == 1:
        return collective
    c = collective

    def cut(chunks: NDArray[np.int32]) -> NDArray[np.int32]:
        return (chunks[:, None] * pieces + np.arange(pieces, dtype=np.int32)).ravel().astype(np.int32)

    return Collective(
        kind=c.kind,
        ranks=c.ranks,
        num_chunks=c.num_chunks * pieces,
        chunks=c.chunks * pieces,
        in_ptr=c.in_ptr * pieces,
        in_chunk=cut(c.in_chunk),
        in_part=np.repeat(c.in_part, pieces),
        out_ptr=c.out_ptr * pieces,
        out_chunk=cut(c.out_chunk),
        out_set=np.repeat(c.out_set, pieces),
        chunk_share=np.repeat(c.chunk_share / pieces, pieces),
        place=c.place * pieces,
        part_sets=c.part_sets,
        in_place=c.in_place,
        root=c.root,
    )


def bytes_of(sketch: Sketch, collective: Collective) -> float:
    """The collective's bytes that correspond to a sketch's `input_size`, the data that one GPU starts with."""
    if sketch.input_bytes is None:
        raise InvalidInput("nbytes: is needed, for the sketch has no input_size")
    held = np.zeros(collective.num_ranks)
    rank = np.repeat(np.arange(collective.num_ranks), np.diff(collective.in_ptr))
    np.add.at(held, rank, collective.chunk_share[collective.in_chunk])
    return sketch.input_bytes / float(held.max())


def ablation(
    sketch: Sketch,
    *,
    gpus: int,
    connections: Sequence[int] = (),
    chunks: Sequence[int] = (),
    strategies: Sequence[str] = (),
) -> Iterable[tuple[str, Sketch]]:
    """The paper's ablations of a sketch, one field at a time.

    Args:
        sketch: The sketch to vary.
        gpus: How many GPUs a host has.
        connections: Numbers of GPUs of another host that each GPU sends to, 1..gpus.
        chunks: Values of `input_chunkup`.
        strategies: Policies for all switches: "uc-min", "uc-max" or "none".

    Yields:
        (What was changed, the sketch).

    >>> [label for label, _ in ablation(Sketch(), gpus=8, connections=(1, 4), chunks=(2,))]
    ['internode_conn=1', 'internode_conn=4', 'input_chunkup=2']
    """
    for count in connections:
        yield f"internode_conn={count}", sketch.with_connections(count, gpus)
    for count in chunks:
        yield f"input_chunkup={count}", sketch.vary(input_chunkup=count)
    for strategy in strategies:
        yield f"switches={strategy}", sketch.with_strategy(strategy)


def __getattr__(name: str) -> object:
    return old_name(__name__, name)
