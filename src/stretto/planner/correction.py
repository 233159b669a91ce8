# SPDX-License-Identifier: Apache-2.0
"""A second search, with the times that motifs took on the links instead of those that the model gave them.

The search has motifs of different places take turns on a link that they share, in its own order. No rank sees both, so
nothing enforces that order: on the wire they share the link. Where re-timing therefore disagrees with the search, the
motifs get the durations that re-timing found (other options of an op are stretched alike), take turns no more, and the
search goes on from the plan with these. Whatever it finds is re-timed, too, and the shortest is kept.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..units import format_us
from .candidates import LinkLevelJudge, PlanCandidate, feedable
from .schedule.problem import MotifTask, Option, PlanProblem
from .schedule.schedule import Scheduler
from .schedule.search import search

CORRECTED = 0.01
"""A plan is searched again if its re-timed and its predicted iteration differ by more than this share."""
ROUNDS = 3
LEAST_SEARCH_S = 0.5


def differs(candidate: PlanCandidate) -> bool:
    """Whether motifs that meet on links make a candidate's re-timed iteration another one than the predicted."""
    found = candidate.retimed
    if found is None or not found.meeting:
        return False
    return abs(found.period_us / candidate.schedule.period_us - 1) > CORRECTED


def corrected(problem: PlanProblem, candidate: PlanCandidate) -> PlanProblem:
    """The problem with the durations that re-timing found for a candidate's motifs.

    Args:
        problem: the problem that the candidate solves.
        candidate: a re-timed candidate.

    Returns:
        The problem; the options of every comm-op are in the same order as before.
    """
    assert candidate.retimed is not None
    spans_us = candidate.retimed.spans_us
    options = dict(problem.options)
    for op, chosen in zip(problem.workload.comm_ops, candidate.schedule.choice, strict=True):
        number, tasks = problem.workload.index[op.name], problem.options[op.name][chosen].tasks
        known = {at: spans_us[number, at] for at in range(len(tasks)) if (number, at) in spans_us}
        if not known:
            continue
        alone_us = sum(tasks[at].duration_us for at in known)
        stretch = sum(known.values()) / alone_us if alone_us > 0 else 1.0
        options[op.name] = tuple(
            _option(option, known if at == chosen else {}, stretch)
            for at, option in enumerate(problem.options[op.name])
        )
    return replace(problem, options=options)


def _option(option: Option, known: dict[int, float], stretch: float) -> Option:
    def task_of(at: int, task: MotifTask) -> MotifTask:
        if at in known:
            return replace(task, duration_us=known[at], shared=())
        # A motif that met nobody where the plan had it keeps its own time; one of another option may well meet others.
        return replace(task, duration_us=task.duration_us * (1.0 if known else stretch), shared=())

    return replace(option, tasks=tuple(task_of(at, task) for at, task in enumerate(option.tasks)))


def in_turns_note(first: PlanCandidate) -> str:
    """The sentence of a plan that was searched again: what the search said before, and what the links did."""
    said_us = first.schedule.period_us
    return (
        f"motifs of different groups share links: as if they took turns the search predicted {format_us(said_us)}, "
        f"link by link it was {format_us(first.us)} ({100 * (first.us / said_us - 1):+.1f} %); it was searched again "
        f"with the times that motifs took on the links"
    )


def searched_again(
    best: PlanCandidate, judge: LinkLevelJudge, *, name: str, steps: int | None, seed: int
) -> PlanCandidate:
    """The best candidate after further searches with corrected durations, or the same with a corrected prediction.

    Args:
        best: the best candidate so far, re-timed.
        judge: re-times candidates; its time limit ends the searches, unless `steps` is given.
        name: name of candidates that these searches find.
        steps: number of steps of each search; None searches for a part of the time that is left.
        seed: seed of the searches.

    Returns:
        The candidate; its schedule has the times of the corrected model.
    """
    for turn in range(ROUNDS):
        if not differs(best):
            return best
        scheduler = Scheduler(corrected(judge.problem, best))
        now = best.schedule
        best = replace(best, schedule=scheduler.replay(now.choice, now.order, now.shift, serial=now.serial))
        left_s = (judge.until - time.monotonic()) / 2
        if (steps is None and left_s < LEAST_SEARCH_S) or turn == ROUNDS - 1 or now.serial:
            return best
        found = search(scheduler, budget_s=left_s, steps=steps, seed=seed, start=(best.schedule,))
        offered = [PlanCandidate(name=name, schedule=one) for one in (found.schedule, *found.others)]
        for one in feedable([*offered, best], scheduler)[0][:-1]:
            other = judge.retimed(one)
            if other.retimed is not None and other.us < best.us * (1 - 1e-9):
                best = other
    return best
