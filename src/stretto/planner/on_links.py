# SPDX-License-Identifier: Apache-2.0
"""A walk over options that is judged link by link.

The search has motifs of different groups take turns on a link that they share, which nothing enforces. What it finds is
best in turns, and may be far from best on the links: where all share, a collective that the others need later had
better leave the link free. From the best candidate, this walk changes the options of comm-ops that share links, one or
two at a time, and re-times each plan that the model does not rule out.
"""

from __future__ import annotations

import time
from math import exp
from random import Random

from ..errors import Infeasible
from .candidates import LinkLevelJudge, PlanCandidate
from .schedule.schedule import Scheduler, StepSchedule, check_order
from .schedule.search import with_option

SLACK = 1.02
"""A plan is re-timed if its predicted iteration is within this factor of the re-timed one that the walk stands at."""
WARMTH = 0.004
"""A plan that is slower by this share is taken by chance, once in e."""
TRIES = 50
"""Changes that are looked at for each re-timing, most of which the prediction rules out."""


class LinkWalk:
    """The walk from one candidate.

    Args:
        judge: re-times plans.
        scheduler: schedules the judge's problem.
        seed: seed of all choices.
    """

    def __init__(self, judge: LinkLevelJudge, scheduler: Scheduler, *, seed: int) -> None:
        self._judge, self._scheduler, self._random = judge, scheduler, Random(seed)
        options = [scheduler.problem.options[op.name] for op in scheduler.problem.workload.comm_ops]
        self._count = [len(some) for some in options]
        self._sharing = [
            at
            for at, some in enumerate(options)
            if len(some) > 1 and any(task.shared for option in some for task in option.tasks)
        ]
        self.retimed = 0
        """The number of plans that were re-timed."""

    def best(self, begin: PlanCandidate, *, name: str, most: int, until: float, bound_us: float) -> PlanCandidate:
        """The best plan of the walk, or the one from which it begins.

        Args:
            begin: a re-timed candidate.
            name: name of the candidates that the walk finds.
            most: the number of plans that are re-timed.
            until: the moment (`time.monotonic`) at which the walk ends.
            bound_us: a time that no plan beats; a plan that has it ends the walk.

        Returns:
            The candidate, re-timed.
        """
        if not self._sharing or begin.schedule.serial:
            return begin
        known = {begin.schedule.choice}
        best = now = begin
        for _ in range(TRIES * most):
            if time.monotonic() > until or self.retimed >= most or best.us <= bound_us * (1 + 1e-9):
                break
            choice = self._changed(now.schedule.choice)
            if choice in known:
                continue
            known.add(choice)
            other = self._judged(name, now, choice)
            if other is None or (
                other.us > now.us and self._random.random() >= exp((now.us - other.us) / WARMTH / now.us)
            ):
                continue
            now = other
            if now.us < best.us * (1 - 1e-9) and self._feedable(now.schedule):
                best = now
        return best

    def _changed(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """One or two comm-ops with other options, or two with each other's."""
        chosen, kind = list(choice), self._random.random()
        if kind < 0.2 and len(self._sharing) > 1:
            one, other = self._random.sample(self._sharing, 2)
            if self._count[one] == self._count[other]:
                chosen[one], chosen[other] = chosen[other], chosen[one]
        else:
            for at in self._random.sample(self._sharing, 2 if kind < 0.4 and len(self._sharing) > 1 else 1):
                chosen[at] = self._random.randrange(self._count[at])
        return tuple(chosen)

    def _judged(self, name: str, now: PlanCandidate, choice: tuple[int, ...]) -> PlanCandidate | None:
        """The plan with this choice, in the order of `now` or of a list schedule, re-timed; None if it is ruled out."""
        limit_us = SLACK * now.us
        plans: list[StepSchedule] = []
        if self._scheduler.evaluate(choice) <= limit_us:
            plans.append(self._scheduler.schedule(choice))
        kept: StepSchedule | None = now.schedule
        for at, option in enumerate(choice):
            if kept is not None and kept.choice[at] != option:
                kept = with_option(self._scheduler, kept, at, option)
        if kept is not None and kept.period_us <= limit_us:
            plans.append(kept)
        if not plans:
            return None
        self.retimed += 1
        other = self._judge.retimed(PlanCandidate(name=name, schedule=min(plans, key=lambda plan: plan.period_us)))
        return other if other.retimed is not None else None

    def _feedable(self, schedule: StepSchedule) -> bool:
        try:
            check_order(self._scheduler.problem.workload, schedule)
        except Infeasible:
            return False
        return True
