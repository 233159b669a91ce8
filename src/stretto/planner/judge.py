# SPDX-License-Identifier: Apache-2.0
"""Which candidate becomes the plan, and the schedules of all systems for the whole step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..cluster import Cluster
from ..errors import Infeasible
from .baselines import DEFAULTS, Systems
from .candidates import NEAR_SHARING, LinkLevelJudge, PlanCandidate, feedable
from .correction import differs, in_turns_note, searched_again
from .costs.costs import CostModel
from .in_turns import LEAST_GAIN, TurnWalk
from .on_links import LinkWalk
from .plan import PLAIN, SYSTEM
from .schedule.problem import PlanProblem
from .schedule.schedule import StepSchedule, check_order
from .schedule.search import SearchResult

MAX_WALK, WALK_STEPS = 500, 4
"""The most plans that a walk over options re-times; where a number of steps was asked for, one for every so many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanJudge:
    """Chooses the candidate that becomes the plan on the step that systems scheduled; gives it for the whole step."""

    compared: Systems
    cluster: Cluster
    costs: CostModel
    until: float = float("inf")
    link_turns: bool = True
    """Whether motifs of different groups may wait for their turns on links."""

    def chosen(
        self,
        found: SearchResult,
        orders: Mapping[str, StepSchedule],
        retimes: bool,
        least_gain: float,
        steps: int | None,
    ) -> tuple[str, PlanCandidate, dict[str, float], tuple[str, ...]]:
        """The plan's name, the candidate that it is made from, the re-timed iterations of candidates, and notes.

        Args:
            found: what the search found.
            orders: the orders of baselines and of plain order, by name.
            retimes: whether candidates are re-timed.
            least_gain: the share of plain order's iteration that the best candidate has to save.
            steps: number of steps of a search, half of which a second search makes; None searches while there is time.

        Returns:
            The candidate is a schedule of the whole step.
        """
        offered = [PlanCandidate(name=SYSTEM, schedule=one) for one in (found.schedule, *found.others)]
        offered += [PlanCandidate(name=name, schedule=schedule) for name, schedule in orders.items()]
        if self.compared.reduces:
            # To check an order of a large step takes seconds, and those that are far behind are not re-timed anyway.
            limit_us = NEAR_SHARING * min(one.schedule.period_us for one in offered)
            offered = [one for one in offered if one.schedule.period_us <= limit_us]
        offered, notes = feedable(offered, self.compared.own)
        best = min(offered, key=lambda one: one.schedule.period_us)
        link_level_us: dict[str, float] = {}
        judge = self._on_links(self.compared.own.problem)
        if retimes:
            best, link_level_us = judge.best(offered)
            first = best
            best = self._walked(best, judge, steps, found)
            in_turns = self._in_turns(best, offered, judge, steps, found)
            again = None if steps is None else max(1, steps // 2)
            best = searched_again(best, judge, name=SYSTEM, steps=again, seed=found.seed)
            if in_turns.turns and in_turns.us < best.us * (1 - LEAST_GAIN):
                best = in_turns
            if best is not first and differs(first):
                notes += (in_turns_note(first),)
            link_level_us[best.name] = min(best.us, link_level_us.get(best.name, best.us))
        if best.name != SYSTEM:
            notes += (f"the order is that of {best.name}: link by link no other one is faster",)
        usual = orders.get(PLAIN)
        gain = self._gain(best) if least_gain > 0 and usual is not None else 1.0
        name = SYSTEM
        if gain < least_gain and usual is not None:
            name, best = PLAIN, PlanCandidate(name=PLAIN, schedule=usual)
            notes += (f"plain order: all that another one promises is {100 * gain:.1f} % of it",)
            best = judge.retimed(best) if retimes else best
        return name, self._whole(best, retimes), link_level_us, notes

    def _walked(
        self, best: PlanCandidate, judge: LinkLevelJudge, steps: int | None, found: SearchResult
    ) -> PlanCandidate:
        """The best plan of a walk over options link by link; of large steps, which take seconds each, there is none."""
        if self.compared.reduces or best.retimed is None or not best.retimed.meeting:
            return best
        walk = LinkWalk(judge, self.compared.own, seed=found.seed)
        most = MAX_WALK if steps is None else min(MAX_WALK, steps // WALK_STEPS)
        until = float("inf") if steps is not None else (time.monotonic() + judge.until) / 2
        return walk.best(best, name=SYSTEM, most=most, until=until, bound_us=found.bound.us)

    def _in_turns(
        self,
        best: PlanCandidate,
        offered: list[PlanCandidate],
        judge: LinkLevelJudge,
        steps: int | None,
        found: SearchResult,
    ) -> PlanCandidate:
        """The best plan in which motifs of different groups take turns on links; not of large steps."""
        if not self.link_turns or self.compared.reduces or best.retimed is None or not best.retimed.meeting:
            return best
        most = MAX_WALK if steps is None else min(MAX_WALK, steps // WALK_STEPS)
        until = float("inf") if steps is not None else (time.monotonic() + judge.until) / 2
        walk = TurnWalk(judge, seed=found.seed)
        return walk.best(
            best, [replace(one, name=SYSTEM) for one in offered if one.name == SYSTEM], most=most, until=until,
            bound_us=found.bound.us,
        )  # fmt: skip

    def _whole(self, best: PlanCandidate, retimes: bool) -> PlanCandidate:
        if not self.compared.reduces:
            return best
        whole, problem = self.compared.whole, self.compared.problem
        schedule = self.compared.step().schedule(whole, best.schedule)
        try:
            check_order(problem.workload, schedule)
        except Infeasible:
            schedule = whole.schedule(schedule.choice, serial=schedule.serial)
            check_order(problem.workload, schedule)
        one = PlanCandidate(name=best.name, schedule=schedule)
        judge = LinkLevelJudge(problem=problem, cluster=self.cluster, costs=self.costs)
        return judge.retimed(one) if retimes else one

    def _on_links(self, problem: PlanProblem) -> LinkLevelJudge:
        """Re-times schedules of the step as it is, or as stock systems see it."""
        if self.compared.reduces:
            problem = self.compared.step().exact(problem, self.costs)
        return LinkLevelJudge(problem=problem, cluster=self.cluster, costs=self.costs, until=self.until)

    def _gain(self, best: PlanCandidate) -> float:
        """The share of plain order's iteration that a candidate saves; both re-timed, or neither."""
        plain = self.compared.plain
        now_us, usual_us = best.schedule.period_us, plain.period_us
        if best.retimed is not None:
            order = self._on_links(self.compared.stock.problem).retimed(PlanCandidate(name=PLAIN, schedule=plain))
            now_us, usual_us = (best.us, order.us) if order.retimed is not None else (now_us, usual_us)
        return 1 - now_us / usual_us if usual_us > 0 else 0.0


class SystemSchedules(Mapping[str, StepSchedule]):
    """The schedule of every system for the whole step; of a large step one is made when it is asked for."""

    def __init__(self, compared: Systems, schedules: Mapping[str, StepSchedule], plan: StepSchedule) -> None:
        self._compared, self._small, self._whole = compared, dict(schedules), {SYSTEM: plan}

    def __getitem__(self, name: str) -> StepSchedule:
        if name not in self._whole:
            self._whole[name] = self._compared.expanded(name, self._small[name])
        return self._whole[name]

    def for_tables(self) -> dict[str, StepSchedule]:
        """The schedules without times of single ops, which come at once for a large step, too."""
        if not self._compared.reduces:
            return dict(self)
        small = {n: self._compared.step(n in DEFAULTS).with_figures(one) for n, one in self._small.items()}
        return {**small, SYSTEM: self._whole[SYSTEM]}

    def __iter__(self) -> Iterator[str]:
        return iter((*self._small, SYSTEM))

    def __len__(self) -> int:
        return len(self._small) + 1
