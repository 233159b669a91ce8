# SPDX-License-Identifier: Apache-2.0
"""The choice among candidates: what the search found, and every baseline's order, judged link by link.

The search works in a time model in which motifs of different places take turns on shared links. Re-timing has them
share the links as transfers do. The plan is the candidate with the shortest re-timed iteration, so that no baseline
that was re-timed is faster link by link. Candidates whose predicted iteration is far longer are not re-timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..cluster import Cluster
from ..errors import Infeasible
from ..units import format_us
from .costs.costs import CostModel
from .plan import Plan
from .schedule.link_turns import LinkTurn
from .schedule.problem import PlanProblem
from .schedule.retime import RetimedPlan, retime
from .schedule.schedule import Scheduler, StepSchedule, check_order

DIFFERS = 0.03
"""A plan says so when its re-timed and its predicted iteration differ by more than this share."""
NEAR, NEAR_SHARING = 1.03, 1.25
"""A candidate is re-timed if its predicted iteration is within this factor of the best re-timed one: re-timing makes up
for the grid of sizes and, in the second case, for the model of shared links."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanCandidate:
    """A schedule that could become the plan; `retimed` is None where it was not simulated link by link."""

    name: str
    schedule: StepSchedule
    retimed: RetimedPlan | None = None
    why_not: str = ""
    """The reason why it could not be re-timed."""
    turns: tuple[LinkTurn, ...] = ()
    """Turns on links that it keeps."""

    @property
    def us(self) -> float:
        """The iteration time, link by link where that is known."""
        return self.retimed.period_us if self.retimed is not None else self.schedule.period_us


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkLevelJudge:
    """Re-times candidates for one problem, as long as there is time."""

    problem: PlanProblem
    cluster: Cluster
    costs: CostModel
    until: float = float("inf")
    """The moment (`time.monotonic`) after which only the first candidate is still re-timed."""

    def retimed(self, candidate: PlanCandidate) -> PlanCandidate:
        """The candidate with its re-timed iteration, or the reason why there is none."""
        try:
            found = retime(candidate.schedule, self.problem, self.cluster, self.costs, turns=candidate.turns)
        except Infeasible as error:
            return replace(candidate, why_not=str(error))
        return replace(candidate, retimed=found)

    def best(self, candidates: Sequence[PlanCandidate]) -> tuple[PlanCandidate, dict[str, float]]:
        """The candidate with the shortest re-timed iteration, and the re-timed iterations by name.

        Candidates are tried by their predicted iteration, of equal ones the first; a later one must be shorter.
        """
        shared = any(task.shared for some in self.problem.options.values() for option in some for task in option.tasks)
        first, *others = sorted(candidates, key=lambda one: one.schedule.period_us)
        best = self.retimed(first)
        known = {best.name: best.us} if best.retimed else {}
        for other in others if best.retimed is not None else ():
            if time.monotonic() > self.until or other.schedule.period_us > (NEAR_SHARING if shared else NEAR) * best.us:
                break
            other = self.retimed(other)
            if other.retimed is not None:
                known[other.name] = min(other.us, known.get(other.name, float("inf")))
                best = other if other.us < best.us * (1 - 1e-9) else best
        return best, known


def feedable(candidates: Iterable[PlanCandidate], scheduler: Scheduler) -> tuple[list[PlanCandidate], tuple[str, ...]]:
    """The candidates that the application can feed, as schedules of the step as it is; a note names a faster one that
    it cannot feed.

    Raises `Infeasible` if there is none.
    """
    kept: list[PlanCandidate] = []
    refused: list[tuple[float, str]] = []
    for one in candidates:
        plan = one.schedule
        try:
            check_order(scheduler.problem.workload, plan)
            again = scheduler.replay(plan.choice, plan.order, plan.shift, serial=plan.serial)
        except Infeasible as error:
            refused.append((plan.period_us, str(error)))
            continue
        kept.append(replace(one, schedule=again))
    if not kept:
        raise Infeasible(min(refused)[1])
    faster = [why for us, why in sorted(refused) if us <= min(one.schedule.period_us for one in kept)]
    return kept, tuple(f"a faster order cannot be fed by the application: {why}" for why in faster[:1])


def with_retiming(plan: Plan, candidate: PlanCandidate) -> Plan:
    """The plan with its link-level iteration time, or with a note that says why there is none.

    Args:
        plan: the plan.
        candidate: the candidate that the plan was made from.

    Returns:
        The plan with `retimed_us` or a further note; another note says where the two times differ.
    """
    found = candidate.retimed
    if found is None:
        why = f"not re-timed link by link: {candidate.why_not}" if candidate.why_not else ""
        return replace(plan, notes=(*plan.notes, *([why] if why else [])))
    notes = plan.notes
    if not found.settled:
        notes += (f"re-timed: no steady state in {found.iterations} iterations, their mean is given",)
    change = found.period_us / plan.iteration_us - 1 if plan.iteration_us > 0 else 0.0
    if abs(change) > DIFFERS:
        what = "motifs of different groups share links" if found.meeting else "sizes lie between those of the grid"
        notes += (
            f"link by link {format_us(found.period_us)}, {100 * change:+.1f} % of what the search predicts: {what}",
        )
    return replace(plan, retimed_us=found.period_us, notes=notes)
