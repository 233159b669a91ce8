# SPDX-License-Identifier: Apache-2.0
"""The joint search over options and orders.

`syndicate` is the paper's: one Metropolis-Hastings chain over options, which starts from the fastest option of each op;
every step is costed by the critical-path list schedule. `stretto` is ours: several chains of different temperatures
that change options and orders together, most often on the circle of waiting that sets the period, and start from every
given plan. With a budget of steps the result depends on the seed alone; with a budget of time, also on the number of
steps that the machine makes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ... import _native
from ...errors import Infeasible, InvalidInput, unknown
from ...units import check_seed
from .bounds import PeriodBound
from .problem import PlanProblem
from .runs import RunSearch
from .schedule import DISCIPLINES, ITERATIONS, Scheduler, StepSchedule

MODES = ("stretto", "syndicate")
CHAINS = 6
ROUND_STEPS = 256
"""The number of steps of each chain between two exchanges of states."""
SLICES = 8
"""With a budget of steps, a slice of the search is this part of all steps so far."""
SLICE_S = 0.1
"""Seconds that one call into the native module should take; between calls progress is shown and Ctrl-C noticed."""
LARGE_STEP, LARGE_ITERATIONS = 4000, 3
"""Nodes from which moves are judged by what they change (`kLargeStep` of the native module); a list schedule then has
fewer iterations."""
MAX_TIDY = 2000
"""The largest number of options of a problem for which the plan found is simplified."""
MIXED_STARTS = 3
"""Starts that take the options of the lower bound's linear program."""
MAX_RUNS, RUNS_SHARE, LEAST_RUNS_S, MOST_RUNS_SHARE, MOST_RUNS_S = 2000, 0.15, 1.0, 0.5, 3.0
"""The number of list schedules for a start with runs of equal ops (`runs`), the share of the budget of time, and
seconds of this thread's own time that it may take on any budget, on a busy machine, too."""
CLOSE = 5e-6
"""The share above the bound at which a plan equals it: one with whole options is lower by its solver's tolerance."""
PATIENCE = 0.1
"""The share of the budget before which no search is stopped for want of progress."""
BETA = {"stretto": 2000.0, "syndicate": 200.0}
"""The factor in the acceptance ``exp(beta * (cost - new cost) / start cost)``; of the coldest chain."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a search that is running."""

    elapsed_s: float
    left_s: float | None
    """Seconds left; None if the budget is a number of steps."""
    steps: int
    evaluations: int
    acceptance: float
    best_us: float
    bound_us: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """The best plan of a search, and how it was found."""

    schedule: StepSchedule
    bound: PeriodBound
    curve: tuple[tuple[float, int, float], ...]
    """Points (elapsed_s, evaluations, best_us), one for each improvement and one at the end."""
    start_us: float
    evaluations: int
    evaluations_per_s: float
    acceptance: float
    steps: int
    elapsed_s: float
    seed: int
    why_stopped: str
    others: tuple[StepSchedule, ...] = ()
    """The best plans of single chains, where motifs of different places share links and re-timing has to judge."""


def search(
    problem: PlanProblem | Scheduler,
    *,
    budget_s: float = 30.0,
    steps: int | None = None,
    seed: int = 0,
    mode: str = "stretto",
    start: Sequence[StepSchedule] = (),
    discipline: str = "critical_path",
    serial: bool = False,
    chains: int = CHAINS,
    threads: int | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> SearchResult:
    """The best plan found within the budget; it is never worse than any plan of `start`.

    The search stops early when the plan equals the lower bound, or (`syndicate`) when nothing better was found in more
    than half of the time so far. Ctrl-C ends it with the best plan so far.

    Args:
        problem: the problem, compiled or not.
        budget_s: seconds, > 0; not used with `steps`.
        steps: number of steps, >= 1; the result then depends on the seed alone.
        seed: seed, >= 0.
        mode: one of `MODES`.
        start: plans to start from; only for the mode ``stretto``.
        discipline: discipline of the list schedule that costs a step, not ``priority``; the mode ``stretto`` only
            starts from it.
        serial: whether a place runs one task of a collective at a time.
        chains: number of chains of the mode ``stretto``, 1..64.
        threads: number of threads, 1..64; None uses all cores. The result of a number of steps does not depend on it.
        progress: called from time to time with the state of the search.

    Returns:
        The best plan, the bound, and figures of the search.

    Raises:
        InvalidInput: an argument is unknown or out of range.
    """
    threads = threads if threads is not None else min(os.cpu_count() or 1, 64)
    _check(budget_s, steps, seed, mode, discipline, chains, threads)
    begun = time.monotonic()
    scheduler = problem if isinstance(problem, Scheduler) else Scheduler(problem)
    joint = mode == "stretto"
    bound = scheduler.bound(serial, quick=not joint)
    large = joint and len(scheduler.nodes.op) >= LARGE_STEP
    iterations = LARGE_ITERATIONS if large else ITERATIONS
    run = _native.ScheduleSearch(
        scheduler.native, joint, DISCIPLINES.index(discipline), serial, iterations, chains, BETA[mode],
        seed % (1 << 63), threads,
    )  # fmt: skip
    _start(run, scheduler, joint, discipline, serial, start)
    listed = 0
    if joint:
        _start_mixed(run, scheduler, bound, seed)
        if not large:
            # The clock must not decide anything where a number of steps was asked for.
            until = begun + RUNS_SHARE * budget_s if steps is None else float("inf")
            latest = begun + max(MOST_RUNS_SHARE * budget_s, MOST_RUNS_S) if steps is None else float("inf")
            runs = RunSearch(
                scheduler, bound, serial=serial, most=min(MAX_RUNS, steps or MAX_RUNS), until=until,
                own_s=LEAST_RUNS_S, latest=latest,
            )  # fmt: skip
            _, chosen = runs.descend(scheduler.greedy)
            run.start_listed(scheduler._native_choice(chosen), DISCIPLINES.index("critical_path"))
            listed = runs.evaluations
    loop = _Loop(run, scheduler, bound, joint, budget_s, steps, chains if joint else 1, begun)
    start_us = loop.best
    try:
        loop.go(progress)
    except KeyboardInterrupt:
        loop.why = "interrupted"
    evaluations, proposed, accepted = run.counts()
    evaluations += listed
    elapsed = time.monotonic() - begun
    found = _schedule(run, scheduler, serial, -1)
    return SearchResult(
        schedule=_tidy(scheduler, found) if joint else found, bound=bound, start_us=start_us,
        others=_others(run, scheduler, serial, chains if joint else 1),
        curve=(*loop.curve, (elapsed, evaluations, loop.best)), evaluations=evaluations,
        evaluations_per_s=evaluations / max(elapsed, 1e-9), acceptance=accepted / max(proposed, 1), steps=loop.done,
        elapsed_s=elapsed, seed=seed, why_stopped=loop.why,
    )  # fmt: skip


def _check(
    budget_s: float, steps: int | None, seed: int, mode: str, discipline: str, chains: int, threads: int
) -> None:
    check_seed(seed)
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    if discipline not in DISCIPLINES or discipline == "priority":
        raise unknown("discipline", discipline, [d for d in DISCIPLINES if d != "priority"])
    if steps is None and not 0 < budget_s < float("inf"):
        raise InvalidInput(f"budget_s: must be finite and > 0, not {budget_s:g}")
    if steps is not None and steps < 1:
        raise InvalidInput(f"steps: must be > 0, not {steps}")
    if not 1 <= chains <= 64 or not 1 <= threads <= 64:
        raise InvalidInput("chains, threads: must be 1..64")


class _Loop:
    """Runs the chains in slices until the budget is spent."""

    def __init__(
        self, run: _native.ScheduleSearch, scheduler: Scheduler, bound: PeriodBound, joint: bool, budget_s: float,
        steps: int | None, chains: int, begun: float,
    ) -> None:  # fmt: skip
        self._run, self._bound, self._joint = run, bound, joint
        self._budget_s, self._steps, self._begun = budget_s, steps, begun
        self._round_steps = _round_steps(scheduler, ROUND_STEPS)
        self._per_round = self._round_steps * chains
        self.best, self.done, self.why = run.plan()[0], 0, ""
        self.curve = [(time.monotonic() - begun, run.counts()[0], self.best)]

    def go(self, progress: Callable[[Progress], object] | None) -> None:
        rounds, improved_at = 1, 0.0
        while True:
            self.why = self._stop(improved_at)
            if self.why:
                return
            if self._steps is not None:
                # How long a slice is decides where the search may end, so it must not depend on the clock.
                grown = self.done // (SLICES * self._per_round)
                rounds = max(1, min(grown, -(-(self._steps - self.done) // self._per_round)))
            called = time.monotonic()
            now = self._run.run(rounds, self._round_steps)
            took = time.monotonic() - called
            self.done += rounds * self._per_round
            rounds = max(1, min(4 * rounds, int(rounds * SLICE_S / max(took, 1e-6))))
            if now < self.best:
                elapsed = time.monotonic() - self._begun
                self.best, improved_at = now, float(self.done) if self._steps is not None else elapsed
                self.curve.append((elapsed, self._run.counts()[0], self.best))
            if progress is not None:
                progress(self._report())

    def _report(self) -> Progress:
        evaluations, proposed, accepted = self._run.counts()
        elapsed = time.monotonic() - self._begun
        return Progress(
            elapsed_s=elapsed, left_s=None if self._steps is not None else max(self._budget_s - elapsed, 0.0),
            steps=self.done, evaluations=evaluations, acceptance=accepted / max(proposed, 1), best_us=self.best,
            bound_us=self._bound.us,
        )  # fmt: skip

    def _stop(self, improved_at: float) -> str:
        if self.best <= self._bound.us * (1 + CLOSE):
            return f"optimal: equals the lower bound ({self._bound.why})"
        now, budget = time.monotonic() - self._begun, self._budget_s
        if self._steps is not None:
            now, budget = float(self.done), float(self._steps)
        # On a busy machine the start alone may take all of a short time.
        if now >= budget and self.done:
            return "budget"
        if not self._joint and now > PATIENCE * budget and now - improved_at > now / 2:
            return "nothing better for half of the search"
        return ""


def _start(
    run: _native.ScheduleSearch,
    scheduler: Scheduler,
    joint: bool,
    discipline: str,
    serial: bool,
    start: Sequence[StepSchedule],
) -> None:
    greedy = scheduler._native_choice(scheduler.greedy)
    run.start_listed(greedy, DISCIPLINES.index(discipline))
    if not joint:
        if start:
            raise InvalidInput("start: mode 'syndicate' has its own, the fastest option of every comm-op")
        return
    for other in DISCIPLINES:
        if other not in (discipline, "priority"):
            run.start_listed(greedy, DISCIPLINES.index(other))
    for plan in start:
        # The order of a serial plan is also valid where tasks may overlap; the reverse does not hold.
        if serial and not plan.serial:
            raise InvalidInput("start: a plan that overlaps tasks cannot start a serial search")
        tasks = scheduler.tasks(plan.choice)
        at = {task: k for k, task in enumerate(tasks)}
        shift = np.zeros(len(tasks), np.int32)
        shift[[at[task] for task in plan.order]] = plan.shift
        order = np.array([at[task] for task in plan.order], np.int32)
        run.start_ordered(scheduler._native_choice(scheduler.choice(plan.choice)), order, shift)


def _start_mixed(run: _native.ScheduleSearch, scheduler: Scheduler, bound: PeriodBound, seed: int) -> None:
    """The options by which the bound could be reached: those with the largest shares, and some drawn by their shares.

    They balance the load of channels, which changes of single options from elsewhere take long to do.
    """
    if bound.relaxed is None or bound.relaxed.mix is None:
        return
    if bound.relaxed.whole is not None and bound.relaxed.whole.chosen is not None:
        run.start_listed(scheduler._native_choice(bound.relaxed.whole.chosen), DISCIPLINES.index("critical_path"))
    draw = np.random.default_rng(seed)
    shares = [np.maximum(mix, 0.0) for mix in bound.relaxed.mix]
    for number in range(MIXED_STARTS):
        chosen = tuple(
            int(share.argmax()) if number == 0 else int(draw.choice(len(share), p=share / share.sum()))
            for share in shares
        )
        run.start_listed(scheduler._native_choice(chosen), DISCIPLINES.index("critical_path"))


def _schedule(run: _native.ScheduleSearch, scheduler: Scheduler, serial: bool, chain: int) -> StepSchedule:
    _, chosen, order, shift = run.plan(chain)
    return scheduler.settled(tuple(chosen[scheduler._comm_nodes].tolist()), order, shift, serial=serial)


def _others(run: _native.ScheduleSearch, scheduler: Scheduler, serial: bool, chains: int) -> tuple[StepSchedule, ...]:
    """The best plan of each chain where motifs share links: the model does not say for certain which is the best."""
    options = scheduler.problem.options.values()
    if not any(task.shared for some in options for option in some for task in option.tasks):
        return ()
    return tuple(_schedule(run, scheduler, serial, chain) for chain in range(chains))


def _tidy(scheduler: Scheduler, plan: StepSchedule) -> StepSchedule:
    """Replace each op's option by the simplest one that costs nothing, so that a plan is elaborate only where that
    pays.
    """
    options = [scheduler.problem.options[op.name] for op in scheduler.problem.workload.comm_ops]
    if sum(len(of_op) for of_op in options) > MAX_TIDY:
        return plan
    for at, of_op in enumerate(options):
        effort = [(len(option.tasks), option.total_us) for option in of_op]
        simpler = [k for k in range(len(of_op)) if effort[k] < effort[plan.choice[at]]]
        for k in sorted(simpler, key=lambda k: effort[k]):
            other = with_option(scheduler, plan, at, k)
            if other is not None and other.period_us <= plan.period_us * (1 + 1e-12):
                plan = scheduler.in_time_order(other)
                break
    return plan


def with_option(scheduler: Scheduler, plan: StepSchedule, at: int, option: int) -> StepSchedule | None:
    """A plan in which one comm-op has another option, whose tasks run one after the other where its first one did.

    Args:
        scheduler: the scheduler of the plan's problem.
        plan: the plan.
        at: position of the comm-op among all.
        option: the option.

    Returns:
        The plan; None if its tasks would wait for each other in a circle.
    """
    op, choice = scheduler._comm[at], (*plan.choice[:at], option, *plan.choice[at + 1 :])
    mine = [(op, task) for task in range(len(scheduler._options[at][option].tasks))]
    first = next(n for n, task in enumerate(plan.order) if task[0] == op)
    rest = [(task, s) for task, s in zip(plan.order, plan.shift, strict=True) if task[0] != op]
    listed = [*rest[:first], *((task, plan.shift[first]) for task in mine), *rest[first:]]
    try:
        return scheduler.replay(choice, [x for x, _ in listed], [s for _, s in listed], serial=plan.serial)
    except Infeasible:
        return None


def _round_steps(scheduler: Scheduler, most: int) -> int:
    """Fewer steps on large problems, so that a round stays short; the number must not depend on the machine's speed."""
    return max(8, min(most, 200_000 // max(len(scheduler.problem.workload.ops), 1)))
