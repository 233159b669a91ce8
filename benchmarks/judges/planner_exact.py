# SPDX-License-Identifier: Apache-2.0
"""The best possible period of a small problem, with a proof.

Cyclic scheduling as an integer program for CP-SAT. Everything gets a time relative to its own iteration, and the period
T is a variable: a wait with lag L reads ``t[v] + L T >= end[u]``, linear in T because L is a number. Two tasks that
share a channel take turns: for one whole number k, b of k iterations later comes between a and the next a. So options,
orders and shifts are all decided at once, and the optimum is that of the steady state, not of some unrolled iterations.

The proof covers all options and all orders in which a task runs at most `SHIFT` iterations early or late. Durations are
counted in whole steps, rounded down, so that the bound holds for the true ones; the reported value is the true period
of the plan that was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.errors import InvalidInput
from stretto.planner.algebra.nodes import is_queued
from stretto.planner.schedule.problem import MotifTask, PlanProblem
from stretto.planner.schedule.resources import op_ends
from stretto.planner.schedule.schedule import Scheduler, StepSchedule
from stretto.solvers import cp_sat
from stretto.units import check_seed

Resource = tuple[object, str]

MAX_COMM_OPS = 12
MAX_PAIRS = 20_000
SHIFT = 1
STEPS = 1 << 16
"""The least number of steps into which a period is divided."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact:
    """The best plan found, and a lower bound for all plans within the limits of this module."""

    schedule: StepSchedule
    value_us: float
    bound_us: float
    status: str
    """``optimal`` (up to the rounding of steps, see `gap`) or ``feasible`` (out of time)."""

    @property
    def gap(self) -> float:
        """The largest possible distance of the value to the optimum, as a share of the bound."""
        return self.value_us / self.bound_us - 1 if self.bound_us > 0 else 0.0


def solve_exactly(
    problem: PlanProblem | Scheduler,
    *,
    limit_s: float = 60.0,
    seed: int = 0,
    start: StepSchedule | None = None,
    serial: bool = False,
) -> Exact:
    """The optimum of a small problem.

    Args:
        problem: a problem with at most 12 comm-ops, compiled or not.
        limit_s: seconds for the solver.
        seed: seed of the solver, >= 0.
        start: a plan to begin with; None takes a list schedule.
        serial: whether a place runs one task of a collective at a time.

    Returns:
        The best plan and its bound; its status says whether the optimum is proved.

    Raises:
        InvalidInput: OR-Tools is not installed, the problem is too large, or it has no compute-op.
    """
    check_seed(seed)
    scheduler = problem if isinstance(problem, Scheduler) else Scheduler(problem)
    workload = scheduler.problem.workload
    if not cp_sat.available():
        raise InvalidInput("exact: needs OR-Tools; install stretto[solvers]")
    if len(workload.comm_ops) > MAX_COMM_OPS:
        raise InvalidInput(f"exact: at most {MAX_COMM_OPS} comm-ops, not {len(workload.comm_ops)}")
    if start is None:
        start = min(
            (scheduler.schedule(scheduler.greedy, discipline=d, serial=serial) for d in ("critical_path", "fifo")),
            key=lambda plan: plan.period_us,
        )
    below = scheduler.bound(serial).us
    if start.period_us <= below * (1 + 1e-9):
        return Exact(schedule=start, value_us=start.period_us, bound_us=below, status="optimal")
    model = _Model(scheduler, start, below, serial)
    status, values, bound = cp_sat.minimize(model.task(seed), limit_s=limit_s)
    if status == "infeasible":  # no plan is better than the start, whose period was rounded up to steps
        bound, values, status = float(model.upper), None, "optimal"
    elif status == "unknown":  # out of time: the start and its bound remain
        return Exact(schedule=start, value_us=start.period_us, bound_us=below, status="feasible")
    best = start
    if values is not None:
        found = model.schedule(values)
        best = min((start, found), key=lambda plan: plan.period_us)
    # A period that is not a whole number of steps was rounded up, so one step is subtracted from the bound.
    proved = max(below, (bound - 1) * model.step_us)
    return Exact(schedule=best, value_us=best.period_us, bound_us=min(proved, best.period_us), status=status)


class _Model:
    """Columns and rows for `cp_sat.minimize`."""

    def __init__(self, scheduler: Scheduler, start: StepSchedule, below_us: float, serial: bool) -> None:
        self.scheduler, self.serial = scheduler, serial
        self.step_us = _step_us(scheduler.problem, start.period_us)
        self.upper = -int(-start.period_us / self.step_us // 1) + 1
        self.reach = 4 * self.upper
        self.lower_: list[int] = []
        self.upper_: list[int] = []
        self.rows: list[tuple[int | None, int | None, list[int], list[int]]] = []
        self.period = self._column(max(int(below_us / self.step_us), 1), self.upper)
        self._ops()
        self._channels()

    def task(self, seed: int) -> dict[str, object]:
        cost = [0] * len(self.lower_)
        cost[self.period] = 1
        return {
            "lower": self.lower_, "upper": self.upper_, "cost": cost, "rows": self.rows, "hint": None, "gap": 0.0,
            "seed": seed,
        }  # fmt: skip

    def schedule(self, values: Sequence[int]) -> StepSchedule:
        """The order that the solver's times give, with its true period."""
        period = values[self.period]
        anchor = values[self.anchor]
        choice: list[int] = []
        placed: list[tuple[int, int, tuple[int, int], int]] = []
        for op, chosen in self.chosen.items():
            choice.append(next(k for k, column in enumerate(chosen) if values[column]))
            for task, column in enumerate(self.starts[op, choice[-1]]):
                window, phase = divmod(values[column] - anchor, period)
                placed.append((phase, values[column], (op, task), -window))
        placed.sort()
        found = self.scheduler.replay(choice, [x[2] for x in placed], [x[3] for x in placed], serial=self.serial)
        return self.scheduler.in_time_order(found)

    def _column(self, lower: int, upper: int) -> int:
        self.lower_.append(lower)
        self.upper_.append(upper)
        return len(self.lower_) - 1

    def _time(self) -> int:
        return self._column(-self.reach, self.reach)

    def _steps(self, us: float) -> int:
        return int(us / self.step_us + 1e-6)

    def _at_least(self, terms: list[tuple[int, int]], bound: int, only_if: Sequence[int] = ()) -> None:
        """Add the row ``sum(terms) >= bound``, which holds if all the binaries `only_if` are 1."""
        most = 12 * self.upper + 4 * self.reach
        columns = [column for column, _ in terms] + list(only_if)
        factors = [factor for _, factor in terms] + [-most] * len(only_if)
        self.rows.append((bound - most * len(only_if), None, columns, factors))

    def _ops(self) -> None:
        problem = self.scheduler.problem
        workload = problem.workload
        nodes = self.scheduler.nodes
        self.chosen: dict[int, list[int]] = {}
        self.starts: dict[tuple[int, int], list[int]] = {}
        first: list[list[int]] = []
        """For each node the columns of the start times that are bound by the node's waits."""
        end: list[tuple[int, int]] = []
        for at, place, us in zip(nodes.op, nodes.place, nodes.us, strict=True):
            if place >= 0:
                first.append([self._time()])
                end.append((first[-1][0], self._steps(us)))
                continue
            options = problem.options[workload.ops[at].name]
            self.chosen[at] = [self._column(0, 1) for _ in options]
            self.rows.append((1, 1, self.chosen[at], [1] * len(options)))
            end.append((self._time(), 0))
            first.append([])
            for k, option in enumerate(options):
                starts = self.starts[at, k] = [self._time() for _ in option.tasks]
                for column, task in zip(starts, option.tasks, strict=True):
                    for before in task.after:
                        length = self._steps(option.tasks[before].duration_us)
                        self._at_least([(column, 1), (starts[before], -1)], length)
                    self._at_least([(end[-1][0], 1), (column, -1)], self._steps(task.duration_us), [self.chosen[at][k]])
                first[-1] += [column for column, task in zip(starts, option.tasks, strict=True) if not task.after]
        if not nodes.num_streams:
            raise InvalidInput("exact: needs a compute-op")
        # Shifts are counted from the anchor, as in every schedule.
        self.anchor = first[nodes.anchor][0]
        self.lower_[self.anchor] = self.upper_[self.anchor] = 0
        for mine, needs in zip(first, nodes.all_waits(), strict=True):
            for other, lag in needs:
                earlier, length = end[other]
                for column in mine:
                    self._at_least([(column, 1), (self.period, lag), (earlier, -1)], length)

    def _channels(self) -> None:
        problem = self.scheduler.problem
        holds = _Holds(problem, self.serial)
        tasks: list[tuple[int, int, int, dict[Resource, int]]] = []
        for op, chosen in self.chosen.items():
            options = problem.options[problem.workload.ops[op].name]
            for k, column in enumerate(chosen):
                for start, task in zip(self.starts[op, k], options[k].tasks, strict=True):
                    held = {held: self._steps(us) for held, us in holds.of(op, task).items()}
                    tasks.append((op, column, start, held))
                    # The shift is at most SHIFT: the task starts in one of the windows -SHIFT .. SHIFT + 1.
                    self._at_least([(start, 1), (self.period, SHIFT)], 0, [column])
                    self._at_least([(self.period, SHIFT + 1), (start, -1)], 1, [column])
        pairs = 0
        load: dict[Resource, dict[int, int]] = {}
        for number, (op, chosen_a, a, held_a) in enumerate(tasks):
            for resource, steps in held_a.items():
                row = load.setdefault(resource, {})
                row[chosen_a] = row.get(chosen_a, 0) + steps
            for other, chosen_b, b, held_b in tasks[:number]:
                common = held_a.keys() & held_b.keys()
                if common and not (other == op and chosen_a != chosen_b):
                    pairs += 1
                    # An order names each task once, so two tasks take turns in the same order on all they share.
                    longest_a, longest_b = (max(held[r] for r in common) for held in (held_a, held_b))
                    self._turns(chosen_a, a, longest_a, chosen_b, b, longest_b)
        if pairs > MAX_PAIRS:
            raise InvalidInput(f"exact: at most {MAX_PAIRS} pairs of tasks that share a channel, not {pairs}")
        for terms in {tuple(sorted(row.items())) for row in load.values()}:
            self.rows.append((0, None, [self.period, *(column for column, _ in terms)], [1, *(-us for _, us in terms)]))

    def _turns(self, chosen_a: int, a: int, us_a: int, chosen_b: int, b: int, us_b: int) -> None:
        span = 2 * SHIFT + 1
        ways = []
        for k in range(1 - span, span + 1):
            way = self._column(0, 1)
            self._at_least([(b, 1), (self.period, k), (a, -1)], us_a, [way])
            self._at_least([(a, 1), (self.period, 1 - k), (b, -1)], us_b, [way])
            ways.append(way)
        both = [chosen_a, chosen_b] if chosen_a != chosen_b else [chosen_a]
        self.rows.append((1 - len(both), None, [*ways, *both], [1] * len(ways) + [-1] * len(both)))
        self.rows.append((None, 1, ways, [1] * len(ways)))


class _Holds:
    """The resources of tasks, and how long a task holds each."""

    def __init__(self, problem: PlanProblem, serial: bool) -> None:
        self._workload, self._serial, self._ends = problem.workload, serial, op_ends(problem.workload)

    def of(self, op: int, task: MotifTask) -> dict[Resource, float]:
        held: dict[Resource, float] = {
            (end, f"channel {channel}"): task.duration_us for end in self._ends[op] for channel in task.channels
        }
        if self._serial and is_queued(self._workload.ops[op]):
            held |= {(place, "queue"): task.duration_us for place in self._workload.op_places[op]}
        return held | {(link, "shared"): min(us, task.duration_us) for link, us in task.shared}


def _step_us(problem: PlanProblem, period_us: float) -> float:
    """A step that divides every duration if there is one (with room for fractions), else a small one."""
    lengths = [us for each_us in problem.workload.op_durations_us for us in each_us]
    tasks = [task for options in problem.options.values() for option in options for task in option.tasks]
    lengths += [us for task in tasks for us in (task.duration_us, *(us for _, us in task.shared))]
    for unit in (1.0, 0.5, 0.25, 0.1, 0.05, 0.01):
        if all(abs(us / unit - round(us / unit)) < 1e-9 for us in lengths) and period_us / unit < STEPS:
            return unit / max(1, round(STEPS * unit / period_us))
    return period_us / (4 * STEPS)
