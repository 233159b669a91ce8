# SPDX-License-Identifier: Apache-2.0
"""Routing and order in one model on a grid of time slots: for small cases, where the sketch leaves few choices."""

from __future__ import annotations

import math
import time

import numpy as np

from ..errors import Infeasible
from ..solvers.milp import Milp, solve
from .contiguity import MessageSchedule
from .ordering import SendTasks
from .routing_problem import Routing, RoutingProblem

MAX_BINARIES = 6000
FINEST = 8
"""The most slots that the shortest send takes."""


def slot_us(problem: RoutingProblem) -> float:
    """The largest slot (a fraction of the shortest send) of which all sends are nearly multiples."""
    times = np.unique(np.round(problem.us, 9))
    shortest = float(times.min())
    waste = {}
    for parts in range(1, FINEST + 1):
        slot = shortest / parts
        waste[parts] = float(np.sum(np.ceil(times / slot - 1e-6) * slot - times)) / float(times.sum())
    best = min(waste.values())
    return shortest / next(parts for parts, lost in waste.items() if lost <= best + 0.01)


def on_grid(
    problem: RoutingProblem, *, bound_us: float, best_us: float, limit_s: float, seed: int = 0, solver: str = "highs"
) -> MessageSchedule | None:
    """The plan with the fewest slots that beats `best_us`.

    Args:
        problem: The routing problem.
        bound_us: A proved lower bound on the time.
        best_us: The time to beat.
        limit_s: The seconds to search.
        seed: The seed of the solver.
        solver: "highs" or "cpsat".

    Returns:
        The plan, or None: there is none, the model is too large, or the time is over.
    """
    if not problem.num_orbits:
        return None
    slot, end = slot_us(problem), time.monotonic() + limit_s
    least = max(1, math.ceil(max(bound_us, float(problem.limit_us.max()) / 2) / slot - 1e-6))
    most = math.ceil(best_us / slot - 1e-6) - 1
    found = None
    for slots in range(min(least, most), most + 1):
        if problem.num_orbits * slots > MAX_BINARIES or slots < 1:
            return None
        left = end - time.monotonic()
        if left < 0.1:
            return None
        try:
            found = _solve(problem, slot, slots, left / 2, seed, solver)
        except Infeasible:
            continue
        if found is not None:
            return found
    return found


def _solve(
    problem: RoutingProblem, slot: float, slots: int, limit_s: float, seed: int, solver: str
) -> MessageSchedule | None:
    """A plan in which everything arrives in `slots` slots, or None; `Infeasible` where there provably is none."""
    logical = problem.logical
    src, dst = logical.src_list, logical.dst_list
    took = np.maximum(1, np.ceil(problem.us / slot - 1e-6)).astype(int).tolist()
    orbit = problem.orbit.tolist()
    model = Milp()
    column: dict[tuple[int, int], int] = {}
    for pair, k in enumerate(orbit):
        earliest = math.floor(float(problem.reach_us[problem.chunk[pair], src[problem.hop[pair]]]) / slot - 1e-6)
        for t in range(max(0, earliest), slots - took[pair] + 1):
            if (k, t) not in column:
                column[k, t] = model.column(cost=float(t) / slots, upper=1.0, integer=True)
    for c, pairs in enumerate(problem.pairs_of):
        into: dict[int, list[int]] = {}
        for p in pairs:
            into.setdefault(dst[problem.hop[p]], []).append(p)
        for rank, coming in into.items():
            terms: dict[int, float] = {}
            for p in coming:
                for t in range(slots):
                    if (orbit[p], t) in column:
                        at = column[orbit[p], t]
                        terms[at] = terms.get(at, 0.0) + 1.0
            if rank in logical.targets[c]:
                model.row(terms, lower=1.0, upper=1.0)
            else:
                model.row(terms, upper=1.0)
        for p in pairs:
            if src[problem.hop[p]] not in logical.sources[c]:
                _after_arrival(model, column, p, into.get(src[problem.hop[p]], []), orbit, took, slots)
    _one_at_a_time(problem, model, column, slot, slots)
    if any(not terms and lower > 0 for lower, _, terms in model.rows):
        raise Infeasible("a target cannot be reached in time")
    solved = solve(model, solver=solver, limit_s=limit_s, seed=seed, gap=1.0)
    if solved.values is None:
        return None
    starts = {k: t for (k, t), at in column.items() if solved.values[at] > 0.5}
    chosen = np.zeros(problem.num_orbits, np.bool_)
    chosen[list(starts)] = True
    return _plan(problem, problem.routing(chosen, by="slots"), starts, slot)


def _plan(
    problem: RoutingProblem, routing: Routing | None, starts: dict[int, int], slot: float
) -> MessageSchedule | None:
    if routing is None:
        return None
    tasks = SendTasks.of(problem, routing)
    pair = {(int(c), int(h)): p for p, (c, h) in enumerate(zip(problem.chunk, problem.hop, strict=True))}
    when = [starts[int(problem.orbit[pair[key]])] * slot for key in zip(tasks.chunk, tasks.hop, strict=True)]
    return MessageSchedule.single(tasks, np.array(when))


def _after_arrival(
    model: Milp,
    column: dict[tuple[int, int], int],
    pair: int,
    coming: list[int],
    orbit: list[int],
    took: list[int],
    slots: int,
) -> None:
    """Add rows: a rank sends a chunk in slot t only if the chunk has arrived there by then."""
    terms: dict[int, float] = {}
    for t in range(slots):
        for p in coming:
            at = column.get((orbit[p], t - took[p]))
            if at is not None:
                terms[at] = terms.get(at, 0.0) - 1.0
        sent = column.get((orbit[pair], t))
        if sent is not None:
            terms[sent] = terms.get(sent, 0.0) + 1.0
            model.row(terms, upper=0.0)


def _one_at_a_time(
    problem: RoutingProblem, model: Milp, column: dict[tuple[int, int], int], slot: float, slots: int
) -> None:
    """Add rows: a physical link carries one send at a time."""
    busy: dict[tuple[int, int], dict[int, float]] = {}
    for p, (c, hop) in enumerate(zip(problem.chunk.tolist(), problem.hop.tolist(), strict=True)):
        for link, us in problem.send(c, hop)[1]:
            length = max(1, math.ceil(us / slot - 1e-6))
            for t in range(slots):
                at = column.get((int(problem.orbit[p]), t))
                if at is not None:
                    for now in range(t, min(t + length, slots)):
                        row = busy.setdefault((link, now), {})
                        row[at] = row.get(at, 0.0) + 1.0
    for row in busy.values():
        if sum(row.values()) > 1:
            model.row(row, upper=1.0)
