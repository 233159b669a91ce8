# SPDX-License-Identifier: Apache-2.0
"""Improving a plan: random changes of routes and orders that are kept when they help, and sends paced by arrivals."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..programs import Program
from . import pacing
from .contiguity import MessageSchedule
from .ordering import SendTasks, justify, schedule
from .routing_problem import Routing, RoutingProblem
from .routing_search import Trees

CLOSE = 1 + 1e-3
"""The ratio to a proved bound at which a plan is good enough."""
WALKS = 12
PATIENCE = 4000
"""The number of moves without gain after which a search starts again elsewhere."""


class ScheduleJudge(Protocol):
    """A judge of plans: it simulates them and keeps the best."""

    best_us: float

    def see(self, plan: MessageSchedule) -> float:
        """Simulate a plan, keep it if it is the best, and return its time in microseconds."""
        ...


def paced(program: Program, plan: MessageSchedule) -> Program:
    """The program in which a send also waits for the last arrival at its sender that the plan has before it.

    Links serve in order of request, so a send whose data is there too early would overtake a more urgent one that
    is still on its way. A sender has no other clock than its arrivals.
    """
    order = np.argsort(plan.start_us, kind="stable")
    return pacing.paced(program, plan.start_us[order], plan.ends_us[order])


def improve(
    judge: ScheduleJudge,
    plan: MessageSchedule,
    routings: Sequence[Routing],
    *,
    limit_s: float,
    seed: int,
    bound_us: float,
) -> None:
    """Improve a plan by simulated annealing over routes and priorities; the judge keeps the best.

    Args:
        judge: Simulates plans and keeps the best.
        plan: The plan to start from.
        routings: Further routings to start from.
        limit_s: The seconds to search.
        seed: The seed of the search.
        bound_us: A proved lower bound, at which the search ends.
    """
    problem = plan.tasks.problem
    end = time.monotonic() + limit_s
    fixed, free = problem.logical.sketch.own_first, not problem.logical.has_policies
    starts = [list(plan.tasks.routing.hops), *([list(r.hops) for r in routings])]
    for attempt in range(WALKS):
        if time.monotonic() > end or judge.best_us <= bound_us * CLOSE:
            return
        walk = _Walk(problem, starts[attempt % len(starts)], seed + attempt, reroute=free, reorder=not fixed)
        if attempt == 0:
            walk.adopt(plan.start_us)
        walk.run(judge, end, bound_us)


class _Walk:
    """One annealing run: it changes trees and priorities, compares planned times, and lets the simulator confirm."""

    def __init__(
        self, problem: RoutingProblem, hops: list[tuple[int, ...]], seed: int, *, reroute: bool, reorder: bool
    ) -> None:
        self.problem, self.reroute, self.reorder = problem, reroute, reorder
        self.rng = np.random.default_rng(seed)
        self.trees = Trees(problem, hops, seed)
        self.tasks = SendTasks.of(problem, self.trees.routing())
        self.noise: dict[tuple[int, int], float] = {}
        self.scale = float(np.mean(self.tasks.us)) if self.tasks.us else 1.0

    def adopt(self, start: NDArray[np.float64]) -> None:
        """Begin with the order of a plan."""
        wanted = start + self.tasks.remaining_us
        for t, value in enumerate(wanted.tolist()):
            self.noise[self.tasks.chunk[t], self.tasks.hop[t]] = value

    def plan(self, tasks: SendTasks) -> NDArray[np.float64]:
        """Start times by the rule "longest remaining first", with each send's priority shifted by its noise."""
        noise = self.noise
        shift = [noise.get(key, 0.0) for key in zip(tasks.chunk, tasks.hop, strict=True)]
        return schedule(tasks, np.array(shift) - tasks.remaining_us)

    def cost(self, tasks: SendTasks, start: NDArray[np.float64]) -> float:
        """The sum of the lateness of all sends beyond the target."""
        late = (start + np.array(tasks.us) - self.target_us) / self.scale
        return float(np.maximum(late, 0.0).sum())

    def run(self, judge: ScheduleJudge, end: float, bound_us: float) -> None:
        """Change the plan until an improvement is confirmed, or patience or time runs out."""
        self.target_us = max(bound_us, 0.97 * judge.best_us)
        start = self.plan(self.tasks)
        now = best = self.cost(self.tasks, start)
        judge.see(MessageSchedule.single(self.tasks, start))
        idle, heat = 0, 0.3
        while idle < PATIENCE and time.monotonic() < end and judge.best_us > bound_us * CLOSE:
            idle, heat = idle + 1, max(heat * 0.999, 0.002)
            undo: list[tuple[tuple[int, int], float | None]] = []
            changed = self.reroute and self.rng.random() < (0.6 if self.reorder else 1.0)
            if changed and not self.trees.move():
                continue
            tasks = SendTasks.of(self.problem, self.trees.routing()) if changed else self.tasks
            if not changed:
                for t in self.rng.integers(tasks.count, size=int(self.rng.integers(1, 4))).tolist():
                    key = (tasks.chunk[t], tasks.hop[t])
                    undo.append((key, self.noise.get(key)))
                    self.noise[key] = self.noise.get(key, 0.0) + float(self.rng.normal()) * self.scale
            start = self.plan(tasks)
            cost = self.cost(tasks, start)
            if cost <= now or math.log(max(self.rng.random(), 1e-12)) * heat > now - cost:
                now, self.tasks = cost, tasks
                if cost < best * (1 - 1e-9):
                    best, idle = cost, 0
                    if tasks.end_us(start) < judge.best_us * (1 - 1e-9):
                        judge.see(MessageSchedule.single(tasks, start))
                        judge.see(MessageSchedule.single(tasks, justify(tasks, start)))
                        return
                continue
            if changed:
                self.trees.undo()
            for key, value in undo:
                if value is None:
                    self.noise.pop(key, None)
                else:
                    self.noise[key] = value
