# SPDX-License-Identifier: Apache-2.0
"""A lower bound on the period of every plan, from arguments that do not depend on any order.

* A compute stream has to run all its ops in every period.
* Circles of waiting take as long as their ops with the fastest option of each, per iteration of lag.
* A channel has to carry, at each end of a place, whatever options are chosen, and so has a link that several places
  share. With prices on these that sum to one, a period pays at least the cheapest option of every comm-op; the best
  prices come from a linear program, and any prices are valid.
* Between an op and the same op an iteration later, communication that has to come after the one and before the other
  must fit with what lies before and after it. The load of its channels and links, priced as before, adds to both.
* In such a window, messages of a stage and its gradients may take a channel in turns though they hold no common end of
  it (`cliques`).
* All of these have to hold with the *same* options: prices on circles and windows, too (`relaxation`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...workload.ordering import few
from ..algebra.nodes import Nodes, nodes_of
from .cliques import NO_CLIQUES, CliqueFinder, CliqueWindows
from .problem import Option, PlanProblem
from .relaxation import Circle, OptionCount, Relaxed, WindowLoads, relax, resource_loads

TOGETHER = "channel load and waiting together, with one option for each"
"""The name of the bound in which all arguments hold at once."""
WHOLE = "channel load and waiting together, with one whole option for each"
"""The name of the bound by channel load and waiting where no option is taken in shares."""
MAX_BETWEEN_OPS = 1000
LEAST_RISE = 1e-5
"""The share by which whole options have to raise the bound: below it, the bound that needs no solver is kept."""
MAX_FROM = 24
"""The number of compute-ops, and of thresholds, from which load is counted; fewer only weaken the bound."""


@dataclass(frozen=True, kw_only=True)
class PeriodBound:
    """A proved lower bound on the period, the argument that gives it, and the bounds of the other arguments."""

    us: float
    why: str
    arguments: dict[str, float] = field(default_factory=dict)
    relaxed: Relaxed | None = field(default=None, repr=False, compare=False)
    """The shares of options at which the bound is reached: a hint where to search."""


def lower_bound(
    problem: PlanProblem,
    *,
    serial: bool = False,
    counts: Sequence[OptionCount] = (),
    whole: bool = True,
    windows: bool = True,
) -> PeriodBound:
    """The largest of the bounds, valid for any options, orders and shifts.

    Args:
        problem: the problem.
        serial: whether a place runs one task of a collective at a time.
        counts: numbers of comm-ops to which options are held; the bound is then one for plans that have them.
        whole: whether options are also taken whole (not with `counts`); in shares alone, the bound is lower and owes
            nothing to a solver.
        windows: whether load between an op and the same op an iteration later is counted, which takes longest.

    Returns:
        The bound.
    """
    nodes = nodes_of(problem.workload)
    option_us = _option_us(problem)
    fastest = np.array([float(us.min()) for us in option_us])
    find = _circle_finder(nodes)
    _, circle_us, names = find(fastest)
    loads = resource_loads(problem, serial)
    between_ops, cliques = _windows(problem, nodes, fastest, MAX_BETWEEN_OPS if windows else 0)
    stream_us = max(nodes.stream_us, default=0.0)
    relaxed = relax(loads, option_us, stream_us, lambda us: find(us)[0], between_ops, cliques, counts, whole=whole)
    least = [loads.least(price) for price in relaxed.prices]
    between_us, between = max((between_ops.longest(each) for each in least), default=(0.0, "an op"))
    found = {
        "compute stream": stream_us,
        f"circle of waiting: {', '.join(few(_op_names(problem, nodes, names)))}": circle_us,
        "channel load": max((float(each.sum()) for each in least), default=0.0),
        f"channel load between {between} and the next": between_us,
    }
    why = max(found, key=lambda name: found[name])
    if relaxed.us > found[why] * (1 + 1e-9):
        why = TOGETHER
    found[TOGETHER] = relaxed.us if why == TOGETHER else min(relaxed.us, found[why])
    if relaxed.whole is not None and relaxed.whole.us > found[why] * (1 + LEAST_RISE):
        why = WHOLE
        found[WHOLE] = relaxed.whole.us
    return PeriodBound(us=found[why], why=why, arguments=found, relaxed=relaxed)


def least_us(option: Option) -> float:
    """A lower bound on an option's time: its longest chain of tasks, or a channel with what lies before and after.

    >>> from stretto.planner.schedule.problem import MotifTask
    >>> def task(channel, us, *after):
    ...     return MotifTask(motif="m", algorithm="a", channels=(channel,), duration_us=us, after=after)
    >>> inside, across = task("x", 1.0), task("y", 3.0)
    >>> segments = (inside, task("y", 3.0, 0), task("x", 1.0), task("y", 3.0, 2))
    >>> least_us(Option(name="two segments", expression="", tasks=segments))
    7.0
    """
    tasks = option.tasks
    ends: list[float] = []
    for task in tasks:
        ends.append(max((ends[at] for at in task.after), default=0.0) + task.duration_us)
    tails = [0.0] * len(tasks)
    for at in range(len(tasks) - 1, -1, -1):
        for before in tasks[at].after:
            tails[before] = max(tails[before], tails[at] + tasks[at].duration_us)
    load: dict[str, float] = defaultdict(float)
    head: dict[str, float] = {}
    tail: dict[str, float] = {}
    for task, end, after in zip(tasks, ends, tails, strict=True):
        for channel in set(task.channels):
            load[channel] += task.duration_us
            head[channel] = min(head.get(channel, end), end - task.duration_us)
            tail[channel] = min(tail.get(channel, after), after)
    return max(*ends, *(head[channel] + us + tail[channel] for channel, us in load.items()))


def _option_us(problem: PlanProblem) -> list[NDArray[np.float64]]:
    """The least time of each option of each comm-op."""
    known: dict[int, NDArray[np.float64]] = {}
    found = []
    for op in problem.workload.comm_ops:
        options = problem.options[op.name]
        if id(options) not in known:
            known[id(options)] = np.array([least_us(option) for option in options])
        found.append(known[id(options)])
    return found


def _op_names(problem: PlanProblem, nodes: Nodes, circle: list[int]) -> list[str]:
    """The names of a circle's ops, beginning with the op that the program has first."""
    workload = problem.workload
    names = list(dict.fromkeys(workload.ops[nodes.op[node]].name for node in circle))
    first = names.index(min(names, key=lambda name: workload.index[name])) if names else 0
    return [*names[first:], *names[:first]] or ["one stream's own"]


def _circle_finder(nodes: Nodes) -> Callable[[NDArray[np.float64]], tuple[Circle | None, float, list[int]]]:
    """A function from the times of comm-ops, each on channels of its own, to the longest circle of waiting."""
    count = len(nodes.op)
    none, zeros = np.zeros(0, np.int32), np.zeros(1, np.int64)
    comm = {node: at for at, node in enumerate(node for node, place in enumerate(nodes.place) if place < 0)}
    at_nodes, us = np.array(list(comm), np.int64), np.array(nodes.us, np.float64)
    stream_ptr = np.cumsum([0, *(stream >= 0 for stream in nodes.stream)], dtype=np.int64)
    stream = np.array([stream for stream in nodes.stream if stream >= 0], np.int32)
    dep_ptr = np.cumsum([0, *(len(row) for row in nodes.waits)], dtype=np.int64)
    dep_op = np.array([node for row in nodes.waits for node, _ in row], np.int32)
    dep_lag = np.array([lag for row in nodes.waits for _, lag in row], np.int32)

    def find(comm_us: NDArray[np.float64]) -> tuple[Circle | None, float, list[int]]:
        durations = us.copy()
        durations[at_nodes] = comm_us
        native = _native.ScheduleProblem(
            comm=np.zeros(count, np.uint8), duration_us=durations, stream_ptr=stream_ptr, stream=stream,
            num_streams=nodes.num_streams, dep_ptr=dep_ptr, dep_op=dep_op, dep_lag=dep_lag,
            set=np.full(count, -1, np.int32), line=np.full(count, -1, np.int32),
            option_ptr=zeros, task_ptr=zeros, task_us=np.zeros(0), inner_ptr=zeros, inner=none, held_ptr=zeros,
            held=none, held_us=np.zeros(0), serial_ptr=zeros, serial=none, num_resources=0, anchor=0,
        )  # fmt: skip
        ratio, _, _, _, critical, _, _, _ = native.replay(np.zeros(count, np.int32), none, none, False, 2)
        circle: list[int] = critical.tolist()
        if not circle or not ratio > 0:
            return None, float(ratio), circle
        counts: dict[int, int] = {}
        for node in circle:
            if node in comm:
                counts[comm[node]] = counts.get(comm[node], 0) + 1
        compute_us = float(sum(us[node] for node in circle if node not in comm))
        lag = round(float(durations[circle].sum()) / ratio)
        return Circle(us=float(ratio), counts=counts, compute_us=compute_us, lag=lag), float(ratio), circle

    return find


def _windows(
    problem: PlanProblem, nodes: Nodes, fastest: NDArray[np.float64], most_ops: int
) -> tuple[WindowLoads, CliqueWindows]:
    """Windows from a compute-op to its next iteration, with the comm-ops that have to run inside."""
    compute = [node for node, place in enumerate(nodes.place) if place >= 0]
    comm = [node for node, place in enumerate(nodes.place) if place < 0]
    around: list[float] = []
    counts: list[NDArray[np.float64]] = []
    names: list[str] = []
    known: set[tuple[float, bytes]] = set()
    found = NO_CLIQUES
    if compute and comm and len(nodes.op) <= most_ops:
        times = np.array(nodes.us, np.float64)
        times[comm] = fastest
        graph = _Unrolled(nodes, times.tolist())
        cliques = CliqueFinder(problem, nodes, graph.needs, graph.order)
        for op in compute[:: max(1, len(compute) // MAX_FROM)]:
            before, after = graph.around(op)
            heads = np.array([before[i][at] for i in (0, 1) for at in comm])
            tails = np.array([after[i][at] for i in (0, 1) for at in comm])
            inside = (heads > -np.inf) & (tails > -np.inf)
            cliques.add(heads, tails)
            for head in np.unique(heads[inside])[:MAX_FROM]:
                behind = inside & (heads >= head)
                least = np.unique(tails[behind])[:MAX_FROM]
                fits = behind & (tails >= least[:, None])
                first_us = np.where(fits, heads, np.inf).min(axis=1) + least
                for us, twice in zip(first_us.tolist(), fits.reshape(len(least), 2, -1).sum(axis=1), strict=True):
                    key = (us, twice.tobytes())
                    if key not in known:
                        known.add(key)
                        around.append(us)
                        counts.append(twice.astype(np.float64))
                        names.append(problem.workload.ops[nodes.op[op]].name)
        found = cliques.windows(problem)
    table = np.stack(counts) if counts else np.zeros((0, len(comm)))
    return WindowLoads(around_us=np.array(around), counts=table, names=tuple(names)), found


class _Unrolled:
    """Two iterations of ops at their fastest; waits for earlier iterations are left out, which only weakens a bound."""

    def __init__(self, nodes: Nodes, fastest: list[float]) -> None:
        self.fastest = fastest
        self.needs = [[(node, lag) for node, lag in waits if lag <= 1] for waits in nodes.all_waits()]
        inside = {at: {u for u, lag in needs if lag == 0} for at, needs in enumerate(self.needs)}
        self.order = list(TopologicalSorter(inside).static_order())

    def around(self, op: int) -> tuple[list[list[float]], list[list[float]]]:
        """Longest times around `op`, for every op of both iterations.

        These are the time from the start of `op` to the other's start, and from the other's end to the start of `op` in
        the second iteration.
        """
        none = float("-inf")
        before = [[none] * len(self.fastest) for _ in range(2)]
        after = [[none] * len(self.fastest) for _ in range(2)]
        before[0][op] = 0.0
        for i in range(2):
            for v in self.order:
                for u, lag in self.needs[v]:
                    if i >= lag:
                        before[i][v] = max(before[i][v], before[i - lag][u] + self.fastest[u])
        for i in (1, 0):
            for v in reversed(self.order):
                start = 0.0 if (v, i) == (op, 1) else after[i][v] + self.fastest[v]
                for u, lag in self.needs[v]:
                    if i >= lag:
                        after[i - lag][u] = max(after[i - lag][u], start)
        return before, after
