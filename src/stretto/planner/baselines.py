# SPDX-License-Identifier: Apache-2.0
"""The systems of SYNDICATE's section 6.4 and table 3, each as its own way to make a schedule.

All are compared by the same number, the steady-state period of a replayed order. The traditional ones issue one
collective at a time (`serial`) and bind it as their library does; they differ in the order, and in how tensors are cut.
Stock systems (`STOCK`) see the step as PyTorch submits it (`as_submitted`): a comm-op waits for the compute
submitted before it, so that nothing of the next iteration is pulled ahead. SYNDICATE's scheduler adds that. Submission
order is kept per communicator: PyTorch gives every process group a stream of its own, and sends between pipeline stages
use connections of their own beside all collectives.

============== ============== ================================================ =============
system         order          pieces                                           channels
============== ============== ================================================ =============
fifo           submission     none                                             one at a time
nccl_ring      submission     none; NCCL's rings                               one at a time
nccl_tree      submission     none; NCCL's trees, rings for all but all-reduce one at a time
tictac         TAC            none                                             one at a time
p3             use            as near to 50,000 parameters as 1 to 16 come     one at a time
bytescheduler+ LIFO           oracle                                           one at a time
hand_optimised by hand, LIFO  oracle, and the fastest option of each op        one at a time
s_exec         submission     searched, with every option                      all
s_sched        critical path  oracle                                           one at a time
syndicate      critical path  searched, with every option                      all
============== ============== ================================================ =============

A baseline is a function ``baseline(run) -> StepSchedule`` with a `_register` line. `Systems.schedule` calls it in the
planning process with a compiled problem (as submitted if its name is in `STOCK`); it should keep to ``run.effort``, may
append sentences to ``run.notes``, and returns a schedule made by ``run.scheduler``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import unknown
from ..workload import Dep, Op, Workload
from ..workload.ordering import in_order
from .algebra.nodes import Nodes, nodes_of
from .plan import PLAIN
from .schedule.problem import PlanProblem
from .schedule.reduce import ReducedStep
from .schedule.schedule import Scheduler, StepSchedule
from .schedule.search import search

P3_SLICE_BYTES = 50_000 * 4
MAX_TAC_CELLS = 1 << 26
"""Largest product of nodes and comm-ops for which TicTac's order is computed in full."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a baseline that searches: schedules evaluated, seconds (after which it
    evaluates fewer), and its seed.
    """

    evaluations: int = 4000
    budget_s: float = 10.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class OrderRule:
    """How ready motifs are ordered: a discipline of the list scheduler, and priorities if it needs them."""

    discipline: str
    priority: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class BaselineRun:
    """One run of a baseline: the step as the system sees it, and the effort that it may spend."""

    scheduler: Scheduler
    effort: Effort
    begun: float = field(default_factory=time.monotonic)
    notes: list[str] = field(default_factory=list)

    @property
    def problem(self) -> PlanProblem:
        """The step with its options."""
        return self.scheduler.problem

    @property
    def in_time(self) -> bool:
        """Whether time is left of the effort's budget."""
        return time.monotonic() < self.begun + self.effort.budget_s


Baseline = Callable[[BaselineRun], StepSchedule]
BASELINES: dict[str, Baseline] = {}
STOCK = ("fifo", "nccl_ring", "nccl_tree", "tictac", "p3", "bytescheduler+", "hand_optimised", "s_exec")
"""The systems that know only the ops that have been submitted."""
DEFAULTS = ("fifo", "nccl_ring", "nccl_tree", "tictac", "p3", "bytescheduler+", "s_sched")
"""The systems that leave the algorithm of a collective to the library."""
REDUCE_FROM = 4000
"""The number of ops from which systems schedule a smaller step (`reduce`)."""


def _register(name: str) -> Callable[[Baseline], Baseline]:
    def keep(function: Baseline) -> Baseline:
        BASELINES[name] = function
        return function

    return keep


class Systems:
    """Every system on one problem, which is compiled only twice: as it is, and as stock systems see it.

    Of a large step every system schedules the smaller one of `reduce`. Comm-ops that are merged there take their
    default options with the systems of `DEFAULTS`, else their fastest. The waits of stock systems are for merged ops
    then: a comm-op may start a little before they would start it, which favors them.

    Args:
        problem: the problem.
        reduces: whether a smaller step is made; None makes one of steps with more than `REDUCE_FROM` ops.
    """

    def __init__(self, problem: PlanProblem, *, reduces: bool | None = None) -> None:
        self.problem = problem
        self.notes: list[str] = []
        """Sentences about parts of a method that a system had to leave out."""
        self.reduces = len(problem.workload.ops) > REDUCE_FROM if reduces is None else reduces
        self._steps: dict[bool, ReducedStep] = {}
        self._schedulers: dict[tuple[bool, bool], Scheduler] = {}

    @cached_property
    def whole(self) -> Scheduler:
        """The scheduler of the whole step."""
        return Scheduler(self.problem)

    @cached_property
    def _whole_stock(self) -> Scheduler:
        return Scheduler(replace(self.problem, workload=as_submitted(self.problem.workload)))

    def step(self, defaults: bool = False) -> ReducedStep:
        """The smaller step."""
        if defaults not in self._steps:
            other = self._steps.get(not defaults)
            merged = other.merged if other is not None else None
            self._steps[defaults] = ReducedStep(self.problem, defaults=defaults, merged=merged)
        return self._steps[defaults]

    def _scheduler(self, stock: bool, defaults: bool) -> Scheduler:
        key = (stock, defaults)
        if not self.reduces:
            return self._whole_stock if stock else self.whole
        if key not in self._schedulers:
            problem = self.step(defaults).problem
            if stock:
                problem = replace(problem, workload=as_submitted(problem.workload))
            self._schedulers[key] = Scheduler(problem)
        return self._schedulers[key]

    @property
    def own(self) -> Scheduler:
        """The scheduler of the step as it is."""
        return self._scheduler(False, False)

    @property
    def stock(self) -> Scheduler:
        """The scheduler of the step as PyTorch submits it."""
        return self._scheduler(True, False)

    @cached_property
    def plain(self) -> StepSchedule:
        """The schedule of Stretto's backend without a plan, with the waits of stock systems."""
        return plain(self.stock)

    def schedule(self, name: str, effort: Effort | None = None) -> StepSchedule:
        """The schedule that a system would run, over the same options and costs."""
        if name not in BASELINES:
            raise unknown("baseline", name, BASELINES)
        begun = time.monotonic()
        scheduler = self._scheduler(name in STOCK, name in DEFAULTS)
        return BASELINES[name](
            BaselineRun(scheduler=scheduler, effort=effort or Effort(), begun=begun, notes=self.notes)
        )

    def expanded(self, name: str, schedule: StepSchedule) -> StepSchedule:
        """The schedule of a system, or of ``plain``, for the whole step, with its own waits."""
        if not self.reduces:
            return schedule
        whole = self._whole_stock if name in (*STOCK, PLAIN) else self.whole
        return self.step(name in DEFAULTS).schedule(whole, schedule)


def baseline(name: str, problem: PlanProblem, effort: Effort | None = None) -> StepSchedule:
    """The schedule of one system; use `Systems` to compile a problem once for several.

    Args:
        name: one of `BASELINES`.
        problem: the problem.
        effort: limits of the search; None takes the defaults.

    Returns:
        The schedule.

    Raises:
        InvalidInput: the name is unknown.
    """
    return Systems(problem, reduces=False).schedule(name, effort)


def as_submitted(workload: Workload) -> Workload:
    """The step with PyTorch's own waits: a submitted op waits for the compute that was submitted before it.

    At each of its places a comm-op waits for the last compute-op listed before it, on any stream; a comm-op before the
    first compute-op waits for the last one of the previous iteration. A comm-op that already has a ``submit``
    dependency (in a captured step, say) is left as it is.
    """
    places = workload.op_places
    # An op that is listed before an op that it waits for cannot have been submitted at that place.
    nodes = nodes_of(workload)
    needs: dict[int, list[int]] = {at: [] for at in range(len(workload.ops))}
    for at, waits in zip(nodes.op, nodes.all_waits(), strict=True):
        needs[at] += [nodes.op[before] for before, lag in waits if lag == 0]
    listed = in_order(needs)
    last: dict[int, tuple[str, int]] = {}
    for at in listed:
        if not workload.ops[at].is_comm:
            last.update({place: (workload.ops[at].name, 1) for place in places[at]})
    ops = {}
    for at in listed:
        op = workload.ops[at]
        if not op.is_comm:
            last.update({place: (op.name, 0) for place in places[at]})
        elif all(dep.why != "submit" for dep in op.after):
            known = {(dep.op, dep.lag) for dep in op.after}
            last_ones = dict.fromkeys(last[place] for place in places[at] if place in last and last[place] not in known)
            op = replace(op, after=(*op.after, *(Dep(op=name, lag=lag, why="submit") for name, lag in last_ones)))
        ops[at] = op
    return replace(workload, ops=tuple(ops[at] for at in range(len(ops))))


def plain(scheduler: Scheduler) -> StepSchedule:
    """The schedule of Stretto's backend without a plan: whole collectives in order, each by its fastest usual
    algorithm.

    This is no system to be compared with, but a plan must beat it to be worthwhile.
    """
    choice = {}
    for name, options in scheduler.problem.options.items():
        usual = options[0].tasks[0].channels
        whole = [at for at, o in enumerate(options) if len(o.tasks) == 1 and o.tasks[0].channels == usual]
        choice[name] = min(whole, key=lambda at, o=options: o[at].total_us)  # type: ignore[misc]
    return scheduler.schedule(choice, discipline="fifo")


@_register("fifo")
def fifo(run: BaselineRun) -> StepSchedule:
    """PyTorch as it is: whole collectives, in the order of submission."""
    return run.scheduler.schedule(_defaults(run.problem), discipline="fifo", serial=True)


@_register("nccl_ring")
def nccl_ring(run: BaselineRun) -> StepSchedule:
    """PyTorch with ``NCCL_ALGO=Ring``: whole collectives in the order of submission, all-reduces by rings."""
    return run.scheduler.schedule(_by_algorithm(run, "ring"), discipline="fifo", serial=True)


@_register("nccl_tree")
def nccl_tree(run: BaselineRun) -> StepSchedule:
    """PyTorch with ``NCCL_ALGO=Tree``: whole collectives in the order of submission, all-reduces by NCCL's trees."""
    return run.scheduler.schedule(_by_algorithm(run, "nccl_tree"), discipline="fifo", serial=True)


@_register("tictac")
def tictac(run: BaselineRun) -> StepSchedule:
    """TicTac's TAC order of whole tensors: first the op that lets the most compute start for
    the least communication.
    """
    order, note = _tac(run.problem, run.scheduler.nodes, lambda: run.in_time)
    run.notes.extend([note] if note else [])
    return run.scheduler.schedule(_defaults(run.problem), discipline="priority", priority=_by_rank(order), serial=True)


@_register("p3")
def p3(run: BaselineRun) -> StepSchedule:
    """P3: slices as near to 50,000 parameters as 1 to 16 pieces come; slices that are needed first have priority."""
    problem = run.problem
    choice = {}
    for op in problem.workload.comm_ops:
        pieces = _pieces(problem, op)
        wanted = max(1.0, op.nbytes / P3_SLICE_BYTES) if op.kind != "all_to_all" else 1.0
        choice[op.name] = min(pieces, key=lambda at, p=pieces: abs(np.log(p[at] / wanted)))  # type: ignore[misc]
    order = _by_use(problem.workload, (op.name for op in problem.workload.comm_ops))
    return run.scheduler.schedule(choice, discipline="priority", priority=_by_rank(order), serial=True)


@_register("bytescheduler+")
def bytescheduler(run: BaselineRun) -> StepSchedule:
    """ByteScheduler with a segmentation oracle: the most recently submitted op first, cut so that this works best."""
    return _oracle(run, OrderRule(discipline="lifo"))


@_register("hand_optimised")
def hand_optimised(run: BaselineRun) -> StepSchedule:
    """The order that a person would write, with the oracle, and for each comm-op the option that is fastest alone.

    All-to-alls come first (the embeddings wait for them), then gathers of parameters, then gradients, latest first; or
    ByteScheduler+'s order if that is better. Each order may try as much as ByteScheduler+ did.
    """
    urgency = {"all_to_all": 0, "send": 0, "collective_permute": 0, "all_gather": 1, "broadcast": 1}
    problem, workload = run.problem, run.problem.workload
    names = sorted(
        (op.name for op in workload.comm_ops),
        key=lambda name: (urgency.get(workload.op(name).kind, 2), -workload.index[name]),
    )
    fastest = {}
    for name, options in problem.options.items():
        home = set(options[0].tasks[0].channels)
        stays = [at for at, option in enumerate(options) if all(home.issuperset(t.channels) for t in option.tasks)]
        fastest[name] = min(stays, key=lambda at, o=options: o[at].total_us)  # type: ignore[misc]
    lifo = OrderRule(discipline="lifo")
    start = dict(zip((op.name for op in workload.comm_ops), _oracle(run, lifo).choice, strict=True))
    schedules = [
        _oracle(run, OrderRule(discipline="priority", priority=_by_rank(names)), also=fastest),
        _oracle(run, lifo, also=fastest, start=start),
    ]
    return min(schedules, key=lambda schedule: schedule.period_us)


@_register("s_sched")
def s_sched(run: BaselineRun) -> StepSchedule:
    """SYNDICATE without execution planning: default options, cut by the oracle, critical path first."""
    return _oracle(run, OrderRule(discipline="critical_path"))


@_register("s_exec")
def s_exec(run: BaselineRun) -> StepSchedule:
    """SYNDICATE without scheduling: every option is searched, but all ops run in the order of submission."""
    scheduler, whole = run.scheduler, fifo(run)
    found = [
        _chain(run, "fifo"),
        scheduler.schedule(whole.choice, discipline="fifo"),
        scheduler.replay(whole.choice, whole.order, whole.shift),
    ]
    return min(found, key=lambda schedule: schedule.period_us)


@_register("syndicate")
def syndicate(run: BaselineRun) -> StepSchedule:
    """The paper's search: Metropolis-Hastings over the options, critical path first."""
    return _chain(run, "critical_path")


def _chain(run: BaselineRun, discipline: str) -> StepSchedule:
    """SYNDICATE's own search, with as many steps as the effort allows."""
    scheduler, effort = run.scheduler, run.effort
    scheduler.bound(quick=True)
    begun = time.monotonic()
    scheduler.evaluate(_defaults(run.problem), discipline=discipline)
    each_s = max(time.monotonic() - begun, 1e-6)
    left_s = max(run.begun + effort.budget_s - begun, 0.0)
    steps = max(1, min(effort.evaluations, int(min(left_s / each_s, 1e9))))
    return search(scheduler, mode="syndicate", discipline=discipline, steps=steps, seed=effort.seed).schedule


def tac_order(problem: PlanProblem) -> list[str]:
    """The order of TicTac's timing-aware heuristic over the comm-ops of one iteration.

    P of an op is the compute that could start if this op alone arrived, M its own time (an op that waits for others has
    no P before those are sent). Op A goes before B if ``min(P_B, M_A) < min(P_A, M_B)``; in a tie, if the compute that
    it enables together with others needs less communication. The compute that waits may lie in the next iteration.
    """
    return _tac(problem, nodes_of(problem.workload), lambda: True)[0]


def _tac(problem: PlanProblem, nodes: Nodes, in_time: Callable[[], bool]) -> tuple[list[str], str]:
    """`tac_order`; ops for which there was no time or memory follow by first use, and a note says so."""
    names = [op.name for op in problem.workload.comm_ops]
    picked: list[int] = []
    if len(nodes.op) * len(names) <= MAX_TAC_CELLS:
        time_us = np.array([problem.options[name][0].total_us for name in names])
        ready = _Tac(time_us, *_communication_needed(nodes, len(names)))
        while len(picked) < len(names) and in_time():
            picked.append(ready.pick())
    rest = set(range(len(names))).difference(picked)
    order = [*(names[at] for at in picked), *_by_use(problem.workload, (names[at] for at in sorted(rest)))]
    note = f"tictac: {len(rest)} of {len(names)} comm-ops in the order of their use, for want of time"
    return order, note if rest else ""


class _Tac:
    """The remaining entries of TAC's tables, updated with every pick.

    Rows are sets of comm-ops that some compute needs. Times are whole numbers, so that equal sums compare as equal.
    """

    def __init__(
        self, time_us: NDArray[np.float64], computes_us: NDArray[np.float64], needs: NDArray[np.bool_]
    ) -> None:
        self.time_us, self.computes_us, self.needs = time_us, computes_us, needs
        scale = float(1 << 40) / max(float(time_us.sum()), 1e-300)
        self.whole = np.rint(time_us * scale).astype(np.int64)
        self.left = np.ones(len(time_us), np.bool_)
        self.count = needs.sum(axis=1)
        self.together = np.array([self.whole[row].sum() for row in needs], np.int64)
        self.gain = np.zeros(len(time_us))
        self._open(self.count == 1)

    def _open(self, rows: NDArray[np.bool_]) -> None:
        """Add compute that now waits for a single comm-op to the gain of that op."""
        for row in np.flatnonzero(rows).tolist():
            self.gain[np.flatnonzero(self.needs[row] & self.left)] += self.computes_us[row]

    def _shared(self, at: int) -> float:
        rows = self.needs[:, at] & (self.count > 1)
        return float(self.together[rows].min()) if rows.any() else np.inf

    def pick(self) -> int:
        """The number of the next comm-op."""
        gains = np.flatnonzero(self.left & (self.gain > 0)).tolist()
        if gains:
            best = gains[0]
            for at in gains[1:]:
                a, b = min(self.gain[best], self.time_us[at]), min(self.gain[at], self.time_us[best])
                if a < b or (a == b and self._shared(at) < self._shared(best)):
                    best = at
        else:
            several = self.count > 1
            near = several & (self.together == self.together[several].min()) if several.any() else several
            offered = self.needs[near].any(axis=0) & self.left if near.any() else self.left
            best = int(np.flatnonzero(offered)[0])
        self.left[best] = False
        rows = self.needs[:, best]
        self.count[rows] -= 1
        self.together[rows] -= self.whole[best]
        self._open(rows & (self.count == 1))
        return int(best)


def _communication_needed(nodes: Nodes, num_comm: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The comm-ops that compute of this and the next iteration needs, with the time of that compute.

    Compute that needs the same comm-ops is merged into one row. An op at several places counts once, by shares.
    """
    waits = nodes.all_waits()
    order = in_order({node: [u for u, lag in needs if lag == 0] for node, needs in enumerate(waits)})
    comm = (node for node, place in enumerate(nodes.place) if place < 0)
    bit = {node: 1 << at for at, node in enumerate(comm)}
    needed: list[list[int]] = [[0] * len(order), [0] * len(order)]
    times: dict[int, float] = {}
    for iteration, mine in enumerate(needed):
        for node in order:
            row = 0
            for before, lag in waits[node]:
                if lag <= iteration:
                    row |= needed[iteration - lag][before]
            if node not in bit:
                times[row] = times.get(row, 0.0) + nodes.us[node] / len(nodes.of_op[nodes.op[node]])
            elif iteration == 0:
                row |= bit[node]
            mine[node] = row
    width = (num_comm + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in times), np.uint8).reshape(-1, width)
    table = np.unpackbits(packed, axis=1, count=num_comm, bitorder="little").astype(np.bool_)
    return np.array(list(times.values())), table


def _by_use(workload: Workload, names: Iterable[str]) -> list[str]:
    uses = first_uses(workload)
    return sorted(names, key=lambda name: uses[name])


def first_uses(workload: Workload) -> dict[str, tuple[int, int]]:
    """For every comm-op the first compute-op that uses its result: how many iterations later, and its position.

    An optimizer step does not use gradients itself but passes on to the ops that read the parameters; so does a
    comm-op.
    """
    readers: dict[str, list[tuple[int, int]]] = {}
    for at, op in enumerate(workload.ops):
        for dep in op.after:
            readers.setdefault(dep.op, []).append((dep.lag, at))
    found = {}
    for op in workload.comm_ops:
        best = (2, workload.index[op.name])
        stack, seen = [(0, op.name)], {(0, op.name)}
        while stack:
            late, name = stack.pop()
            for lag, at in readers.get(name, ()):
                node, reader = (late + lag, workload.ops[at].name), workload.ops[at]
                if (late + lag, at) >= best or node in seen:
                    continue
                seen.add(node)
                if reader.is_comm or reader.phase == "optimizer":
                    stack.append(node)
                else:
                    best = (late + lag, at)
        found[op.name] = best
    return found


def _defaults(problem: PlanProblem) -> dict[str, int]:
    return {op.name: 0 for op in problem.workload.comm_ops}


def _by_algorithm(run: BaselineRun, name: str) -> dict[str, int]:
    """The default of every op, but all-reduces by one algorithm; a note counts those for which it was not costed."""
    choice, missing = _defaults(run.problem), 0
    for op in run.problem.workload.comm_ops:
        if op.kind != "all_reduce":
            continue
        options = run.problem.options[op.name]
        home = options[0].tasks[0].channels
        found = [
            at for at, option in enumerate(options)
            if len(option.tasks) == 1 and option.tasks[0].channels == home
            and option.tasks[0].algorithm.partition(":")[0] == name
        ]  # fmt: skip
        missing += not found
        choice[op.name] = min(found, key=lambda at, o=options: o[at].total_us, default=0)  # type: ignore[misc]
    if missing:
        run.notes.append(f"nccl: {missing} all-reduces run by their default option, as no costs of {name} are known")
    return choice


def _by_rank(names: Sequence[str]) -> dict[str, float]:
    return {name: float(at) for at, name in enumerate(names)}


def _pieces(problem: PlanProblem, op: Op) -> dict[int, int]:
    """The options that only cut the default one into segments, with the number of segments."""
    default = problem.options[op.name][0]
    found = {0: len(default.tasks)}
    for at, option in enumerate(problem.options[op.name]):
        plain = all(
            task.algorithm == default.tasks[0].algorithm
            and task.channels == default.tasks[0].channels
            and not task.after
            for task in option.tasks
        )
        if plain and all(rule.startswith("segment") for rule in option.rules) and len(default.tasks) == 1:
            found[at] = len(option.tasks)
    return found


def _oracle(
    run: BaselineRun, rule: OrderRule, *,
    also: Mapping[str, int] | None = None, start: Mapping[str, int] | None = None,
) -> StepSchedule:  # fmt: skip
    """The best cut of every comm-op: a local search op by op, then all ops at one size, then from random starts.

    `also` holds one more option per op that may be taken, `start` a choice to begin with.
    """
    problem, scheduler, effort = run.problem, run.scheduler, run.effort
    rng = np.random.default_rng(effort.seed)
    deadline = time.monotonic() + effort.budget_s
    grid = {op.name: list(_pieces(problem, op)) for op in problem.workload.comm_ops}
    for name, extra in (also or {}).items():
        grid[name] = list(dict.fromkeys([*grid[name], extra]))
    names = [name for name, choices in grid.items() if len(choices) > 1]
    best = (float("inf"), _defaults(problem))
    used = 0

    def more() -> bool:
        return used < effort.evaluations and time.monotonic() < deadline

    def period_us(choice: dict[str, int]) -> float:
        nonlocal used, best
        used += 1
        found = scheduler.evaluate(choice, discipline=rule.discipline, priority=rule.priority, serial=True)
        if found < best[0]:
            best = (found, dict(choice))
        return found

    def descend(choice: dict[str, int]) -> None:
        now, better = period_us(choice), True
        while better:
            better = False
            for name in names:
                for at in grid[name]:
                    if at != choice[name] and more():
                        found = period_us({**choice, name: at})
                        if found < now * (1 - 1e-9):
                            choice[name], now, better = at, found, True

    for first in (start, _defaults(problem), also):
        if first is not None:
            descend(dict(first))
    for level in range(1, max((len(choices) for choices in grid.values()), default=1)):
        if more():
            period_us({name: choices[min(level, len(choices) - 1)] for name, choices in grid.items()})
    while names and more():
        descend({name: choices[rng.integers(len(choices))] for name, choices in grid.items()})
    return scheduler.schedule(best[1], discipline=rule.discipline, priority=rule.priority, serial=True)
