"""The systems of SYNDICATE's section 6.4 and table 3, each as its own way to fill in a schedule.

All are compared by the same number, the steady-state period of a replayed order. The traditional ones issue one
comm-op at a time (`serial`) and bind it as their library does; what differs is the order, and how tensors are cut.
Stock systems (the first six) see the step as PyTorch submits it (`as_submitted`): a comm-op waits for the compute
submitted before it, so that nothing of the next iteration is pulled ahead. That is what SYNDICATE's scheduler adds.

============== ============== ================================================ =============
system         order          pieces                                           channels
============== ============== ================================================ =============
fifo           submission     none                                             one at a time
tictac         TAC            none                                             one at a time
p3             use            slices of 50,000 parameters (all-to-all: none)   one at a time
bytescheduler+ LIFO           oracle                                           one at a time
hand_optimised by hand, LIFO  oracle, and the fastest option of each op        one at a time
s_exec         submission     searched, with every option                      all
s_sched        critical path  oracle                                           one at a time
syndicate      critical path  searched, with every option                      all
============== ============== ================================================ =============
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import unknown
from ..workload import Dep, Op, Workload
from ..workload.ordering import in_order
from .problem import Problem
from .schedule import Schedule, Scheduler, duration_us, places_of_ops, streams_of_ops
from .search import search

P3_SLICE_BYTES = 50_000 * 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much a baseline that searches may try, how long that may take (then it tries less), and from which seed."""

    evaluations: int = 4000
    budget_s: float = 10.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How ready motifs are ordered."""

    discipline: str
    priority: Mapping[str, float] | None = None


Baseline = Callable[[Problem, Effort], Schedule]
BASELINES: dict[str, Baseline] = {}
STOCK = ("fifo", "tictac", "p3", "bytescheduler+", "hand_optimised", "s_exec")
"""The systems that know only what has been submitted."""


def _register(name: str) -> Callable[[Baseline], Baseline]:
    def keep(function: Baseline) -> Baseline:
        BASELINES[name] = function
        return function

    return keep


def baseline(name: str, problem: Problem, effort: Effort | None = None) -> Schedule:
    """The schedule that a system would run, over the same options and costs."""
    if name not in BASELINES:
        raise unknown("baseline", name, BASELINES)
    seen = replace(problem, workload=as_submitted(problem.workload)) if name in STOCK else problem
    return BASELINES[name](seen, effort or Effort())


def as_submitted(workload: Workload) -> Workload:
    """The step with PyTorch's own waits: what is submitted waits for the compute that was submitted before it.

    On each of its places a comm-op waits for the last compute-op listed before it, on any stream; before the first,
    that is the last one of the iteration before. A comm-op that already says after which op it is submitted (in a
    captured step, say) is left as it is.
    """
    places = places_of_ops(workload)
    # Where an op is listed before what it waits for, it cannot have been submitted there.
    listed = in_order({name: [before for before, lag in waits if lag == 0] for name, waits in _waits(workload).items()})
    last: dict[int, tuple[str, int]] = {}
    for name in listed:
        at = workload.index[name]
        if not workload.ops[at].is_comm:
            last.update({place: (name, 1) for place in places[at]})
    ops = {}
    for name in listed:
        at = workload.index[name]
        op = workload.ops[at]
        if not op.is_comm:
            last.update({place: (name, 0) for place in places[at]})
        elif all(dep.why != "submit" for dep in op.after):
            known = {(dep.op, dep.lag) for dep in op.after}
            waits = dict.fromkeys(last[place] for place in places[at] if place in last and last[place] not in known)
            op = replace(op, after=(*op.after, *(Dep(op=name, lag=lag, why="submit") for name, lag in waits)))
        ops[at] = op
    return replace(workload, ops=tuple(ops[at] for at in range(len(ops))))


@_register("fifo")
def fifo(problem: Problem, effort: Effort) -> Schedule:
    """PyTorch as it is: whole collectives, in the order of submission."""
    return Scheduler(problem).schedule(_defaults(problem), discipline="fifo", serial=True)


@_register("tictac")
def tictac(problem: Problem, effort: Effort) -> Schedule:
    """TicTac's TAC order of whole tensors: what lets the most compute start, for the least communication, first."""
    return Scheduler(problem).schedule(
        _defaults(problem), discipline="priority", priority=_by_rank(tac_order(problem)), serial=True
    )


@_register("p3")
def p3(problem: Problem, effort: Effort) -> Schedule:
    """P3: small fixed slices, those that the next forward pass needs first have priority."""
    choice = {}
    for op in problem.workload.comm_ops:
        pieces = _pieces(problem, op)
        wanted = max(1.0, op.nbytes / P3_SLICE_BYTES) if op.kind != "all_to_all" else 1.0
        choice[op.name] = min(pieces, key=lambda at, p=pieces: abs(np.log(p[at] / wanted)))  # type: ignore[misc]
    uses = first_uses(problem.workload)
    order = sorted((op.name for op in problem.workload.comm_ops), key=lambda name: uses[name])
    return Scheduler(problem).schedule(choice, discipline="priority", priority=_by_rank(order), serial=True)


@_register("bytescheduler+")
def bytescheduler(problem: Problem, effort: Effort) -> Schedule:
    """ByteScheduler with a segmentation oracle: the most recently submitted first, cut so that this works best."""
    return _oracle(problem, effort, Rule(discipline="lifo"))


@_register("hand_optimised")
def hand_optimised(problem: Problem, effort: Effort) -> Schedule:
    """The order a person would write, with the oracle, and for each comm-op the option that is fastest alone.

    All-to-alls first (the embeddings wait for them), then what gathers parameters, then gradients, latest first; or
    ByteScheduler+'s order, where that is better. Each order may try as much as ByteScheduler+ did.
    """
    urgency = {"all_to_all": 0, "send": 0, "all_gather": 1, "broadcast": 1}
    workload = problem.workload
    names = sorted(
        (op.name for op in workload.comm_ops),
        key=lambda name: (urgency.get(workload.op(name).kind, 2), -workload.index[name]),
    )
    fastest = {}
    for name, options in problem.options.items():
        home = set(options[0].tasks[0].channels)
        stays = [at for at, option in enumerate(options) if all(home.issuperset(t.channels) for t in option.tasks)]
        fastest[name] = min(stays, key=lambda at, o=options: o[at].total_us)  # type: ignore[misc]
    lifo = Rule(discipline="lifo")
    start = dict(zip((op.name for op in workload.comm_ops), _oracle(problem, effort, lifo).choice, strict=True))
    schedules = [
        _oracle(problem, effort, Rule(discipline="priority", priority=_by_rank(names)), also=fastest),
        _oracle(problem, effort, lifo, also=fastest, start=start),
    ]
    return min(schedules, key=lambda schedule: schedule.period_us)


@_register("s_sched")
def s_sched(problem: Problem, effort: Effort) -> Schedule:
    """SYNDICATE without execution planning: default options, cut by the oracle, critical path first."""
    return _oracle(problem, effort, Rule(discipline="critical_path"))


@_register("s_exec")
def s_exec(problem: Problem, effort: Effort) -> Schedule:
    """SYNDICATE without scheduling: every option is searched, but all run in the order of submission."""
    scheduler = Scheduler(problem)
    found = _chain(scheduler, effort, "fifo")
    default = scheduler.schedule(_defaults(problem), discipline="fifo")
    return min(found, default, key=lambda schedule: schedule.period_us)


@_register("syndicate")
def syndicate(problem: Problem, effort: Effort) -> Schedule:
    """The paper's search: Metropolis-Hastings over the options, critical path first."""
    return _chain(Scheduler(problem), effort, "critical_path")


def _chain(scheduler: Scheduler, effort: Effort, discipline: str) -> Schedule:
    """SYNDICATE's own search: as many steps as wanted, or as the time allows."""
    begun = time.monotonic()
    scheduler.evaluate(_defaults(scheduler.problem), discipline=discipline)
    each_s = max(time.monotonic() - begun, 1e-6)
    steps = max(1, min(effort.evaluations, int(min(effort.budget_s / each_s, 1e9))))
    return search(scheduler, mode="syndicate", discipline=discipline, steps=steps, seed=effort.seed).schedule


def _waits(workload: Workload) -> dict[str, list[tuple[str, int]]]:
    """What each op waits for, with the lag: its dependencies, and the op before it on each of its streams."""
    waits = {op.name: [(dep.op, dep.lag) for dep in op.after] for op in workload.ops}
    streams, count = streams_of_ops(workload, places_of_ops(workload))
    before: list[tuple[str, int] | None] = [None] * count
    for lag in (1, 0):
        for op, held in zip(workload.ops, streams, strict=True):
            for stream in held:
                last = before[stream]
                if lag == 0 and last is not None:
                    waits[op.name].append(last)
                before[stream] = (op.name, lag)
    return waits


def tac_order(problem: Problem) -> list[str]:
    """The order of TicTac's timing-aware heuristic over the comm-ops of one iteration.

    An op's P is the compute that could start if it alone arrived, its M its own time (an op that waits for others has
    no P before those are sent). Op A goes before B if ``min(P_B, M_A) < min(P_A, M_B)``, and where that says nothing if
    what it opens together with others needs less communication. The compute that waits may lie in the next iteration.
    """
    names = [op.name for op in problem.workload.comm_ops]
    time_us = np.array([problem.options[name][0].total_us for name in names])
    computes_us, needs = _communication_needed(problem.workload)
    left = np.ones(len(names), np.bool_)
    order: list[str] = []
    while left.any():
        still = needs & left
        count = still.sum(axis=1)
        gain = (still[count == 1] * computes_us[count == 1, None]).sum(axis=0)
        several = still[count > 1]
        together = np.where(several, (several @ time_us)[:, None], np.inf).min(axis=0, initial=np.inf)
        best = int(np.flatnonzero(left)[0])
        for at in np.flatnonzero(left)[1:].tolist():
            a, b = min(gain[best], time_us[at]), min(gain[at], time_us[best])
            if a < b or (a == b and together[at] < together[best]):
                best = at
        order.append(names[best])
        left[best] = False
    return order


def _communication_needed(workload: Workload) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The comm-ops of an iteration that compute-ops of it and the next need, with how long those take.

    Compute-ops that need the same are drawn together in one row.
    """
    position = {op.name: at for at, op in enumerate(workload.comm_ops)}
    nodes = {
        (name, iteration): [(before, iteration - lag) for before, lag in waits if lag <= iteration]
        for iteration in (0, 1)
        for name, waits in _waits(workload).items()
    }
    needed: dict[tuple[str, int], NDArray[np.bool_]] = {}
    times: dict[bytes, float] = {}
    for node in in_order(nodes):
        row = np.zeros(len(position), np.bool_)
        for before in nodes[node]:
            row |= needed[before]
        needed[node] = row
        name, iteration = node
        if name not in position:
            key = row.tobytes()
            times[key] = times.get(key, 0.0) + duration_us(workload.op(name))
        elif iteration == 0:
            row[position[name]] = True
    table = np.array([np.frombuffer(key, np.bool_) for key in times], np.bool_).reshape(len(times), len(position))
    return np.array(list(times.values())), table


def first_uses(workload: Workload) -> dict[str, tuple[int, int]]:
    """For every comm-op the first compute-op that has use of it: how many iterations later, and its position.

    An optimiser's step has no use of gradients itself, it hands on to whoever reads the parameters; so does a comm-op.
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


def _defaults(problem: Problem) -> dict[str, int]:
    return {op.name: 0 for op in problem.workload.comm_ops}


def _by_rank(names: Sequence[str]) -> dict[str, float]:
    return {name: float(at) for at, name in enumerate(names)}


def _pieces(problem: Problem, op: Op) -> dict[int, int]:
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
    problem: Problem, effort: Effort, rule: Rule, *,
    also: Mapping[str, int] | None = None, start: Mapping[str, int] | None = None,
) -> Schedule:  # fmt: skip
    """The best cut of every comm-op: one op at a time to a local optimum, all at one size, then from random starts.

    `also` holds one more option per op that may be taken, `start` a choice to begin with.
    """
    scheduler = Scheduler(problem)
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
