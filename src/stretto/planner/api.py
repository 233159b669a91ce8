# SPDX-License-Identifier: Apache-2.0
"""The planner's entry points: a workload and a cluster in, a `Plan` out, with everything it was compared with."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..errors import InvalidInput, PlanMismatch, unknown
from ..programs.formats.text import dumps
from ..simulator import Runtime, Timeline
from ..units import check_seed
from ..workload import Workload
from .algebra.options import problem as make_problem
from .algebra.recipes import library
from .baselines import BASELINES, REDUCE_FROM, Effort, Systems
from .candidates import with_retiming
from .costs.costs import CostModel, SimulatedCosts, simulated_costs
from .costs.providers import providers_for
from .in_turns import turns_note
from .judge import PlanJudge, SystemSchedules
from .plan import MAX_PROGRAM_CHARS, PLAIN, MotifPlan, OpPlan, Plan, ProgramPlan, TurnPlan
from .plan import SYSTEM as SYSTEM
from .reasons import reasons
from .schedule.branch import branched
from .schedule.link_turns import LinkTurn
from .schedule.problem import PlanProblem
from .schedule.schedule import Scheduler, StepSchedule
from .schedule.search import Progress as Searching
from .schedule.search import SearchResult, search
from .strange_algorithms import strange_algorithms

ROUNDING = 1e-9
"""How far, as a share, sums of the same times in another order may lie apart."""
COSTING_SHARE = 0.4
"""The share of the budget after which no further options are costed."""
LEAST_COSTING_S, MOST_COSTING_SHARE, MOST_COSTING_S = 2.0, 0.6, 5.0
"""Seconds of this thread's own time for costing, even after that share, but neither after the second one nor, on small
budgets, for more seconds than these: steps of up to 4,000 ops then have their options on a busy machine, too, such as
one whose processors all train."""
LEAST_SEARCH_S = 0.2
"""Seconds for the search on any budget."""
BASELINES_SHARE = 0.3
"""The share of the time that is then left for the baselines, which share it evenly; the rest is the search's."""
JUDGING_SHARE = 0.1
"""The share of the budget at its end in which candidates are re-timed."""
JUDGING_OWN_SHARE, MOST_JUDGING_SHARE = 0.06, 0.4
"""Where the machine gives little processor time, candidates are re-timed for longer: as long as it takes to get the
first share of the budget as processor time, at the rate seen so far, but no longer than the second."""
WRITING_TIMES = 7.0
"""To write out, check and re-time the plan of a large step takes so many times as long as to make its smaller one."""
URGENT = ("fifo", "syndicate", "s_exec", "s_sched", "nccl_ring", "nccl_tree", "bytescheduler+", "hand_optimised")
"""The order in which systems are scheduled on a large step, where there may be no time for all; then the others."""
OVERRUN = 1.05
"""A plan says so when it took longer than this factor of its budget."""
ALWAYS = URGENT[:2]
"""The systems that get at least one schedule."""
TEXT_CHARS = 40
"""Characters that one transfer takes as text, roughly."""
Progress = Callable[[str, float], None]
"""Called with a description of the current work, and the share of it that is done (0..1)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """A plan with the problem, the search and the schedule of every system that it was compared with.

    Attributes of the plan that are not listed here are there too, for code that was written when `plan` returned the
    `Plan` alone.
    """

    plan: Plan
    problem: PlanProblem
    schedules: Mapping[str, StepSchedule]
    """By system: ``stretto`` (the plan's own) and every baseline."""
    search: SearchResult
    make_plain: Callable[[], StepSchedule]
    """Makes `plain`."""
    link_level_us: dict[str, float] = field(default_factory=dict)
    """The iteration of candidates link by link, by the system whose order it is; only of those that came near."""

    @cached_property
    def plain(self) -> StepSchedule:
        """The schedule that Stretto's backend runs without a plan."""
        return self.make_plain()

    @property
    def iteration_us(self) -> float:
        """The plan's iteration time in the planner's time model."""
        return self.plan.iteration_us

    @property
    def bound_us(self) -> float:
        """A time that no plan of this problem beats in the same model; `plan.bound_by` says why."""
        return self.plan.bound_us

    @property
    def baselines_us(self) -> dict[str, float]:
        """The iteration time of every system that the plan was compared with."""
        return dict(self.plan.baselines_us)

    def timeline(self, system: str = SYSTEM) -> Timeline:
        """One iteration as a system schedules it: ``stretto``, or one of `baselines_us`.

        Args:
            system: a key of `schedules`.

        Returns:
            The predicted timeline, for `stretto.report`.

        Raises:
            InvalidInput: there is no such system.
        """
        if system not in self.schedules:
            raise unknown("system", system, self.schedules)
        return self.schedules[system].timeline(self.problem)

    def for_tables(self) -> dict[str, StepSchedule]:
        """`schedules` for tables of systems: of a large step without the times of single ops, and at once."""
        made = self.schedules
        return made.for_tables() if isinstance(made, SystemSchedules) else dict(made)

    def save(self, path: str | Path) -> None:
        """Write the plan, which is all that an enforcer needs, to a file."""
        self.plan.save(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.plan, name)


def plan(
    workload: Workload,
    cluster: Cluster,
    *,
    budget_s: float = 30.0,
    steps: int | None = None,
    seed: int = 0,
    costs: CostModel | None = None,
    runtime: Runtime | str | Path | None = None,
    synthesis_s: float = 0.0,
    systems: tuple[str, ...] = tuple(BASELINES),
    retime: bool = True,
    least_gain: float = 0.0,
    branches: int = 0,
    link_turns: bool = True,
    progress: Progress | None = None,
) -> PlanResult:
    """Plan the communication of a training step: all choices together, beside every baseline and a lower bound.

    Options of all comm-ops are costed, every baseline is scheduled with them, the search starts from the best, and the
    plan is the best of all link by link.

    With `steps` the result depends on the seed alone; with a time budget only the number of steps varies.

    Args:
        workload: the training step, with at least one comm-op.
        cluster: the cluster; rank r runs on device r.
        budget_s: seconds for costing, baselines, search and the comparison of candidates, > 0. What cannot be left out
            (default options, one schedule of each system, the plan's own re-timing) is done even if it takes longer.
        steps: number of search steps, >= 1, instead of a time budget; None uses `budget_s`.
        seed: seed of all searches, >= 0.
        costs: the cost model; None simulates.
        runtime: what carries the motifs out, its name or its file: the price of its instructions is added to what the
            links take (`planner.costs.priced`). None: links alone. Not with `costs`.
        synthesis_s: seconds for each algorithm that is synthesized for this cluster; 0 synthesizes none. Not used with
            `costs`.
        systems: names of the baselines to compare with.
        retime: whether candidates are also simulated link by link, which then decides among them.
        least_gain: if the best plan saves less than this share of plain order's iteration time, 0 <= least_gain < 1,
            the plan is plain order and is called ``plain``.
        branches: number of bounds, >= 0, by which the lower bound is raised where it lies below the plan: options of
            comm-ops are divided, so that none is taken in shares (`schedule.branch`). Not in the budget; steps of more
            than 4,000 ops have none.
        link_turns: whether motifs of different groups that share links of their hosts may wait for each other, where
            that is faster link by link (`in_turns`). Carriers of CPU tensors keep such turns, NCCL's does not.
        progress: called with a description of the current work and the share of it that is done.

    Returns:
        The plan with everything it was compared with.

    Raises:
        InvalidInput: an argument is invalid, or the workload has no comm-ops.
        Infeasible: a comm-op cannot be carried by the cluster's channels, or no order can be fed by the application.
    """
    _check(workload, budget_s, steps, seed, systems, least_gain)
    if branches < 0:
        raise InvalidInput(f"branches: must be at least 0, not {branches}")
    with collecting_less(len(workload.ops)):
        return _plan(
            workload,
            cluster,
            budget_s,
            steps,
            seed,
            _model(cluster, costs, runtime, synthesis_s, seed),
            systems,
            retime,
            least_gain,
            branches,
            link_turns,
            progress,
        )


def _plan(
    workload: Workload, cluster: Cluster, budget_s: float, steps: int | None, seed: int, model: CostModel,
    systems: tuple[str, ...], retime: bool, least_gain: float, branches: int, link_turns: bool,
    progress: Progress | None,
) -> PlanResult:  # fmt: skip
    tell = progress or (lambda message, fraction: None)
    time_left = _Budget(budget_s, limited=steps is None)
    tell("costing options", 0.0)
    least_s = LEAST_COSTING_S if len(workload.ops) <= REDUCE_FROM else 0.0
    problem = make_problem(
        workload, cluster, model, until=time_left.until(COSTING_SHARE), least_s=least_s,
        latest=time_left.until(MOST_COSTING_SHARE, least_s=MOST_COSTING_S),
        progress=lambda share: tell("costing options", share),
    )  # fmt: skip
    compared = Systems(problem)
    writing_s = time_left.reserve(compared)
    schedules = _baselines(compared, systems, time_left, steps, seed, tell)
    starts = {**schedules, PLAIN: compared.plain}
    found = search(
        compared.own, budget_s=time_left.for_search(), steps=steps, seed=seed,
        start=tuple(starts.values()), progress=lambda state: tell(_words(state), _fraction(state, steps)),
    )  # fmt: skip
    until = (time_left.until(1.0) or float("inf")) - writing_s
    judge = PlanJudge(compared=compared, cluster=cluster, costs=model, until=until, link_turns=link_turns)
    if retime:
        tell("re-timing link by link", 0.0)
    name, best, link_level_us, notes = judge.chosen(found, starts, retime, least_gain, steps)
    if branches and not compared.reduces:
        tell("dividing options for the bound", 0.0)
        higher = branched(problem, found.bound, min(best.us, best.schedule.period_us), branches=branches)
        found = replace(found, bound=higher)
    plain = to_plan(name, best.schedule, problem, cluster, turns=best.turns)
    # A plan at the bound may lie below it by a rounding error.
    rounded = min(found.bound.us, max(plain.iteration_us, found.bound.us * (1 - ROUNDING)))
    made = replace(
        plain, bound_us=rounded, bound_by=found.bound.why,
        baselines_us={name: schedule.period_us for name, schedule in schedules.items()},
        seed=seed, made_by=f"stretto search: {found.evaluations} evaluations, {found.why_stopped}",
        notes=(*compared.notes, *notes),
    )  # fmt: skip
    if best.turns:
        made = replace(made, notes=(*made.notes, turns_note(best)))
    made = with_retiming(with_programs(made, best.schedule, problem, model), best)
    overrun = time_left.overrun()
    made = replace(made, notes=(*made.notes, *overrun)) if overrun else made
    return PlanResult(
        plan=made, problem=problem, schedules=SystemSchedules(compared, schedules, best.schedule),
        search=replace(found, schedule=best.schedule, others=()) if compared.reduces else found,
        make_plain=lambda: compared.expanded(PLAIN, compared.plain), link_level_us=link_level_us,
    )  # fmt: skip


def _model(
    cluster: Cluster, costs: CostModel | None, runtime: Runtime | str | Path | None, synthesis_s: float, seed: int
) -> CostModel:
    """The cost model of a planning run."""
    if costs is not None:
        if runtime is not None:
            raise InvalidInput("runtime: is for simulated costs; leave it out with costs, or give `PricedCosts`")
        return costs
    providers = providers_for(cluster, synthesis_s=synthesis_s, seed=seed)
    if runtime is not None:
        from .costs.priced import PricedCosts

        return PricedCosts(cluster, runtime, providers=providers)
    return SimulatedCosts(cluster, providers=providers) if providers else simulated_costs(cluster)


def _check(
    workload: Workload, budget_s: float, steps: int | None, seed: int, systems: tuple[str, ...], least_gain: float
) -> None:
    check_seed(seed)
    if not 0 <= least_gain < 1:
        raise InvalidInput(f"least_gain: must be at least 0 and below 1, not {least_gain:g}")
    if not 0 < budget_s < float("inf"):
        raise InvalidInput(f"budget_s: must be finite and > 0, not {budget_s:g}")
    if steps is not None and steps < 1:
        raise InvalidInput(f"steps: must be > 0, not {steps}")
    for name in systems:
        if name not in BASELINES:
            raise unknown("baseline", name, BASELINES)
    if not workload.comm_ops:
        raise InvalidInput(f"workload {workload.name}: has no comm-ops, so there is nothing to plan")


@contextmanager
def collecting_less(num_ops: int) -> Iterator[None]:
    """Keeps Python from looking for garbage among the millions of objects of a large step, which makes none to speak
    of: that takes a fifth of the time.
    """
    stops = num_ops > REDUCE_FROM and gc.isenabled()
    if stops:
        gc.disable()
    try:
        yield
    finally:
        if stops:
            gc.enable()


class _Budget:
    """The time of a planning run; without a limit (a number of steps was asked for) there is always time."""

    def __init__(self, budget_s: float, *, limited: bool) -> None:
        self._begun, self._budget_s, self.limited = time.monotonic(), budget_s, limited
        self._own_begun = time.process_time()
        self._judging_s = JUDGING_SHARE * budget_s
        self._own_share = JUDGING_OWN_SHARE

    def until(self, share: float, *, least_s: float = 0.0) -> float | None:
        """The moment at which this share of the budget is spent, or so many seconds; None without a limit."""
        return self._begun + max(share * self._budget_s, least_s) if self.limited else None

    def seconds(self, share: float, *, least_s: float = 1e-3) -> float:
        """Seconds until this share of the budget is spent; at least a few."""
        return max(self._begun + share * self._budget_s - time.monotonic(), least_s)

    def reserve(self, compared: Systems) -> float:
        """Seconds to keep for writing out the plan of a large step, told by how long it took to make it smaller."""
        if not compared.reduces:
            return 0.0
        begun, self._own_share = time.monotonic(), 0.0
        _ = compared.own
        writing_s = WRITING_TIMES * (time.monotonic() - begun)
        self._judging_s += writing_s
        return writing_s

    def for_search(self) -> float:
        """Seconds until candidates have to be judged."""
        wall_s = max(time.monotonic() - self._begun, 1e-6)
        rate = min(max((time.process_time() - self._own_begun) / wall_s, 1e-3), 1.0)
        own_s = min(self._own_share / rate, MOST_JUDGING_SHARE) * self._budget_s
        return max(self.seconds(1.0) - max(self._judging_s, own_s), LEAST_SEARCH_S)

    def overrun(self) -> tuple[str, ...]:
        """A note where the budget did not last, with the processor time that the machine gave meanwhile."""
        took_s = time.monotonic() - self._begun
        if not self.limited or took_s <= max(OVERRUN * self._budget_s, LEAST_COSTING_S + LEAST_SEARCH_S):
            return ()
        own_s = time.process_time() - self._own_begun
        return (
            f"took {took_s:.0f} s of a budget of {self._budget_s:g} s, with {own_s:.0f} s of processor time: "
            "what cannot be left out takes that long here",
        )


def _baselines(
    compared: Systems, systems: tuple[str, ...], time_left: _Budget, steps: int | None, seed: int, tell: Progress
) -> dict[str, StepSchedule]:
    # The baseline hand_optimised runs three searches, so it gets three shares of the baselines' time; NCCL's make one
    # schedule each.
    shares = max(
        len(systems) + 2 * ("hand_optimised" in systems) - len({"nccl_ring", "nccl_tree"}.intersection(systems)), 1
    )
    all_s = BASELINES_SHARE * time_left.for_search()
    effort = Effort(budget_s=all_s / shares, seed=seed)
    if steps is not None:
        effort = replace(effort, evaluations=steps, budget_s=float("inf"))
    until = time.monotonic() + all_s if compared.reduces and time_left.limited else float("inf")
    order = sorted(systems, key=lambda name: [*URGENT, *systems].index(name)) if until < float("inf") else systems
    schedules: dict[str, StepSchedule] = {}
    for number, name in enumerate(order):
        if number == 0 or name in ALWAYS or time.monotonic() < until:
            tell(name, number / len(systems))
            schedules[name] = compared.schedule(name, effort)
    left_out = [name for name in systems if name not in schedules]
    if left_out:
        compared.notes.append(f"not compared with {', '.join(left_out)}, for want of time")
    return {name: schedules[name] for name in systems if name in schedules}


def with_programs(plan: Plan, schedule: StepSchedule, problem: PlanProblem, costs: CostModel) -> Plan:
    """The plan with the programs that have no library name; a note names those that are too large to be included.

    An enforcer runs the library's usual algorithm instead of a program that is not included.

    Args:
        plan: the plan.
        schedule: the schedule that the plan was made from.
        problem: the problem that the schedule solves.
        costs: the cost model of the problem; only `SimulatedCosts` has programs.

    Returns:
        The plan with `programs`.
    """
    if not isinstance(costs, SimulatedCosts):
        strange = strange_algorithms(schedule, problem)
        return replace(plan, notes=(*plan.notes, *strange)) if strange else plan
    found: dict[tuple[str, str, tuple[str, ...], str], list[tuple[int, ...]]] = {}
    left_out: dict[str, None] = {}
    size = 0
    for op, chosen in zip(problem.workload.comm_ops, schedule.choice, strict=True):
        for task in problem.options[op.name][chosen].tasks:
            motion = task.motion
            if motion is None or task.algorithm in library(motion.ask()):
                continue
            for at, group in enumerate(motion.groups):
                program = costs.program(motion, task.nbytes, task.algorithm, at)
                if TEXT_CHARS * program.num_transfers > MAX_PROGRAM_CHARS - size:
                    left_out[f"{task.algorithm} of {motion.kind}"] = None
                    continue
                text = dumps(program.replace(collective=replace(program.collective, ranks=tuple(range(len(group))))))
                key = (task.algorithm, motion.kind, motion.channels, text)
                size += len(text) if key not in found else 0
                found.setdefault(key, []).append(group)
    programs = tuple(
        ProgramPlan(algorithm=name, kind=kind, channels=channels, groups=tuple(dict.fromkeys(groups)), text=text)
        for (name, kind, channels, text), groups in found.items()
    )
    notes = tuple(f"{what} is too large to be handed on: an enforcer runs the usual algorithm" for what in left_out)
    return replace(plan, programs=programs, notes=(*plan.notes, *notes)) if programs or notes else plan


def to_plan(
    name: str, schedule: StepSchedule, problem: PlanProblem, cluster: Cluster, *, turns: Sequence[LinkTurn] = ()
) -> Plan:
    """A schedule written down as a plan.

    Args:
        name: name of the plan.
        schedule: the schedule.
        problem: the problem that the schedule solves.
        cluster: the cluster.
        turns: the turns on links that motifs of different groups take.

    Returns:
        The plan, without bound, baselines and programs.
    """
    workload = problem.workload
    position = {task: at for at, task in enumerate(schedule.order)}
    start = {
        (int(op), int(task)): float(at)
        for op, task, at in zip(schedule.op, schedule.task, schedule.start_us, strict=True)
    }
    why = reasons(schedule, problem)
    ops = []
    for op, chosen in zip(workload.comm_ops, schedule.choice, strict=True):
        option = problem.options[op.name][chosen]
        number = workload.index[op.name]
        motifs = tuple(
            MotifPlan(
                motif=task.motif, algorithm=task.algorithm, channels=task.channels,
                seq=schedule.seq[position[number, at]], ahead=schedule.shift[position[number, at]],
                after=task.after, nbytes=task.nbytes, duration_us=task.duration_us, launch_us=task.launch_us,
                start_us=start[number, at], source=task.source,
            )
            for at, task in enumerate(option.tasks)
        )  # fmt: skip
        ops.append(
            OpPlan(
                op=op.name, kind=op.kind, nbytes=op.nbytes, option=option.name, expression=option.expression,
                motifs=motifs, reason=why[op.name],
            )
        )  # fmt: skip
    return Plan(
        name=name, workload=workload.name, workload_digest=workload.digest, cluster=cluster.name,
        cluster_digest=cluster.digest, ops=tuple(ops), iteration_us=schedule.period_us, serial=schedule.serial,
        costs=problem.costs,
        link_turns=tuple(
            TurnPlan(
                op=workload.ops[turn.op].name, motif=turn.task, behind=workload.ops[turn.behind_op].name,
                behind_motif=turn.behind_task, lag=turn.lag,
            )
            for turn in turns
        ),
    )  # fmt: skip


def turns_in(plan: Plan, workload: Workload) -> tuple[LinkTurn, ...]:
    """The turns on links of a plan, as re-timing takes them."""
    return tuple(
        LinkTurn(
            op=workload.index[turn.op], task=turn.motif, behind_op=workload.index[turn.behind],
            behind_task=turn.behind_motif, lag=turn.lag,
        )
        for turn in plan.link_turns
    )  # fmt: skip


def to_schedule(plan: Plan, problem: PlanProblem) -> StepSchedule:
    """The schedule of a plan over the options of a problem; its times are those of the problem.

    Raises `PlanMismatch` if the plan is for another workload, or its options no longer exist.
    """
    workload = problem.workload
    plan.check(workload)
    choice: dict[str, int] = {}
    steps: list[tuple[int, int, int, int]] = []
    for op in workload.comm_ops:
        made = plan.op(op.name)
        names = [option.name for option in problem.options[op.name]]
        if made.option not in names:
            raise PlanMismatch(f"plan {plan.name}: {op.name} can no longer run as {made.option!r}")
        choice[op.name] = names.index(made.option)
        tasks = problem.options[op.name][choice[op.name]].tasks
        if [(motif.channels, motif.after) for motif in made.motifs] != [(task.channels, task.after) for task in tasks]:
            raise PlanMismatch(f"plan {plan.name}: {op.name} has other motifs as {made.option!r} now")
        steps += [(motif.seq, workload.index[op.name], at, motif.ahead) for at, motif in enumerate(made.motifs)]
    steps.sort()
    order, shift = [(op, task) for _, op, task, _ in steps], [ahead for *_, ahead in steps]
    return Scheduler(problem).replay(choice, order, shift, serial=plan.serial)


def _words(state: Searching) -> str:
    from ..units import format_us

    gap = 100 * (state.best_us / state.bound_us - 1) if state.bound_us > 0 else 0.0
    return (
        f"best {format_us(state.best_us)}, {gap:.1f} % above the bound; {state.evaluations} evaluations, "
        f"{100 * state.acceptance:.0f} % accepted"
    )


def _fraction(state: Searching, steps: int | None) -> float:
    if steps is not None:
        return min(1.0, state.steps / steps)
    return state.elapsed_s / max(state.elapsed_s + (state.left_s or 0.0), 1e-9)
