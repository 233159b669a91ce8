# SPDX-License-Identifier: Apache-2.0
"""A walk over turns on links: which motifs of different groups wait for each other where they share a link.

A schedule's order on the links that groups share is only what the model assumes. As turns between ranks of the same
hosts it can be kept (`schedule.link_turns`), but not every turn is worth its wait: a motif is over some time after its
last byte has left the link, and the next one has to be told. So from the schedules that the model likes best, with no
turns or with all, this walk takes turns away and gives them back, one or those of two ops, and re-times each plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from ..errors import Infeasible
from .candidates import LinkLevelJudge, PlanCandidate
from .schedule.link_turns import LinkTurn, turns_of
from .schedule.schedule import check_order

LEAST_GAIN = 0.005
"""A plan has turns only if they save this share of the best iteration without."""
STARTS = 4
"""So many schedules are tried with turns, those with the shortest predicted iterations first."""
PATIENCE = 40
"""A schedule is left after so many changes of its turns that gained nothing."""


def turns_note(candidate: PlanCandidate) -> str:
    """The sentence of a plan with turns."""
    waiting = len({(turn.op, turn.task) for turn in candidate.turns})
    who = "1 motif of an iteration waits for its turn" if waiting == 1 else f"{waiting} motifs wait for their turns"
    return f"{who} on links that groups share: ranks of a host tell each other when a motif has ended"


class TurnWalk:
    """The walk for one step.

    Args:
        judge: re-times plans.
        seed: seed of all choices.
    """

    def __init__(self, judge: LinkLevelJudge, *, seed: int) -> None:
        self._judge, self._random = judge, Random(seed)
        self.retimed = 0
        """The number of plans that were re-timed."""

    def best(
        self,
        begin: PlanCandidate,
        candidates: Sequence[PlanCandidate],
        *,
        most: int,
        until: float,
        bound_us: float,
    ) -> PlanCandidate:
        """The best plan with turns, or the one from which the walk begins.

        Args:
            begin: the best candidate without turns, re-timed.
            candidates: further candidates.
            most: the number of plans that are re-timed.
            until: the moment (`time.monotonic`) at which the walk ends.
            bound_us: a time that no plan beats.

        Returns:
            The candidate, re-timed.
        """
        least = begin.us * (1 - LEAST_GAIN)
        starts = sorted([begin, *candidates], key=lambda one: one.schedule.period_us)
        best: PlanCandidate | None = None
        for start in starts[:STARTS]:
            # Turns bring a plan to what the model says of it, hardly further.
            if start.schedule.serial or start.schedule.period_us > min(least, best.us if best else least):
                continue
            turns = turns_of(start.schedule, self._judge.problem, self._judge.cluster)
            if self.retimed >= most or not turns or not self._feedable(start):
                continue
            now = self._with(start, turns)
            idle = 0
            while now is not None and idle < PATIENCE and now.us > bound_us * (1 + 1e-9):
                if time.monotonic() > until or self.retimed >= most:
                    break
                other = self._with(start, self._changed(now.turns, turns))
                gained = other is not None and other.us < now.us * (1 - 1e-6)
                idle = 0 if gained else idle + 1
                now = other if other is not None and other.us <= now.us else now
            if now is not None and now.turns and now.us < (best.us if best is not None else least):
                best = now
        return best if best is not None else begin

    def _with(self, start: PlanCandidate, turns: Sequence[LinkTurn]) -> PlanCandidate | None:
        self.retimed += 1
        found = self._judge.retimed(replace(start, turns=tuple(turns)))
        return found if found.retimed is not None else None

    def _changed(self, now: Sequence[LinkTurn], every: Sequence[LinkTurn]) -> list[LinkTurn]:
        """One turn less or more, or all between two ops."""
        one = self._random.choice(every)
        those = {one}
        if self._random.random() < 0.3:
            those = {turn for turn in every if (turn.op, turn.behind_op) == (one.op, one.behind_op)}
        kept = set(now) - those if one in now else set(now) | those
        return [turn for turn in every if turn in kept]

    def _feedable(self, candidate: PlanCandidate) -> bool:
        try:
            check_order(self._judge.problem.workload, candidate.schedule)
        except Infeasible:
            return False
        return True
