"""What no plan can beat: a lower bound on the period, from arguments that know nothing of any order.

* A compute stream has to run all its ops in every period.
* Circles of waiting take as long as their ops with the fastest option of each, per iteration of lag.
* A channel has to carry whatever options are chosen. With prices on the channels that sum to one, a period pays at
  least the cheapest option of every comm-op; the best prices come from a linear program, and any prices are valid.
* Between an op and the same op an iteration later, communication that has to come after the one and before the other
  must fit with what lies before and after it. The load of its channels, priced as before, adds to both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from .. import _native
from .problem import Option, Problem
from .schedule import duration_us, places_of_ops, streams_of_ops

MAX_LP_TERMS = 200_000
MAX_CHANNELS = 256
MAX_BETWEEN_OPS = 1000
MAX_FROM = 24
"""Compute-ops, and thresholds, from which load is counted: more cost time, fewer only weaken the bound."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A proved lower bound on the period, the argument that gives it, and what the others give."""

    us: float
    why: str
    arguments: dict[str, float] = field(default_factory=dict)


def lower_bound(problem: Problem, *, serial: bool = False) -> Bound:
    """The largest of the bounds, for any options, orders and shifts.

    >>> from .example import figure6
    >>> bound = lower_bound(figure6())
    >>> round(bound.us, 3), bound.why
    (8.118, 'channel load between forward and the next')
    """
    workload = problem.workload
    places = places_of_ops(workload)
    fastest = [
        min(least_us(option) for option in problem.options[op.name]) if op.is_comm else duration_us(op)
        for op in workload.ops
    ]
    circle_us, circle = _circles(problem, fastest)
    loads = _loads(problem, places, serial)
    prices = _prices(loads)
    between_us, between = _between(problem, fastest, loads, prices)
    found = {
        "compute stream": workload_compute_us(problem),
        f"circle of waiting: {_names(circle)}": circle_us,
        "channel load": max((_paid(loads, price) for price in prices), default=0.0),
        f"channel load between {between} and the next": between_us,
    }
    why = max(found, key=lambda name: found[name])
    return Bound(us=found[why], why=why, arguments=found)


def workload_compute_us(problem: Problem) -> float:
    """The load of the busiest compute stream."""
    workload = problem.workload
    rows, count = streams_of_ops(workload, places_of_ops(workload))
    load = np.zeros(count)
    for op, row in zip(workload.ops, rows, strict=True):
        load[row] += duration_us(op) if row else 0.0
    return float(load.max(initial=0.0))


def least_us(option: Option) -> float:
    """An option cannot be faster than its longest chain of tasks, nor than its busiest channel."""
    ends: list[float] = []
    load: dict[str, float] = defaultdict(float)
    for task in option.tasks:
        ends.append(max((ends[at] for at in task.after), default=0.0) + task.duration_us)
        for channel in set(task.channels):
            load[channel] += task.duration_us
    return max(*ends, *load.values())


def _names(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:4], f"... ({len(names) - 6} more)", *names[-2:]])


def _circles(problem: Problem, fastest: list[float]) -> tuple[float, list[str]]:
    """The largest ratio of duration to lag, every comm-op as fast as it can be and on channels of its own."""
    workload = problem.workload
    rows, num_streams = streams_of_ops(workload, places_of_ops(workload))
    deps = [[(workload.index[dep.op], dep.lag) for dep in op.after] for op in workload.ops]
    count = len(workload.ops)
    none = np.zeros(0, np.int32)
    zeros = np.zeros(count + 1, np.int64)
    native = _native.ScheduleProblem(
        comm=np.zeros(count, np.uint8), duration_us=np.array(fastest, np.float64),
        stream_ptr=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        stream=np.array([s for row in rows for s in row], np.int32), num_streams=num_streams,
        dep_ptr=np.cumsum([0, *(len(row) for row in deps)], dtype=np.int64),
        dep_op=np.array([op for row in deps for op, _ in row], np.int32),
        dep_lag=np.array([lag for row in deps for _, lag in row], np.int32),
        option_ptr=zeros, task_ptr=zeros[:1], task_us=np.zeros(0), inner_ptr=zeros[:1], inner=none, held_ptr=zeros[:1],
        held=none, serial_ptr=zeros, serial=none, num_resources=0, anchor=0,
    )  # fmt: skip
    us, _, _, _, critical, _, _, _ = native.replay(np.zeros(count, np.int32), none, none, False, 2)
    names = [workload.ops[at].name for at in critical]
    first = names.index(min(names, key=lambda name: workload.index[name])) if names else 0
    return us, [*names[first:], *names[:first]] or ["one stream's own"]


Loads = list[list[NDArray[np.float64]]]
"""Per comm-op and option, the time it takes of every channel."""


def _loads(problem: Problem, places: tuple[tuple[int, ...], ...], serial: bool) -> Loads:
    workload = problem.workload
    tasks = [task for options in problem.options.values() for option in options for task in option.tasks]
    channels = {c: at for at, c in enumerate(sorted({c for task in tasks for c in task.channels}))}
    width = len(channels) + serial
    found: Loads = []
    for op in workload.comm_ops:
        of_op = []
        for option in problem.options[op.name]:
            row = np.zeros((len(workload.places), width))
            for task in option.tasks:
                columns = [channels[c] for c in set(task.channels)] + ([len(channels)] if serial else [])
                row[np.ix_(places[workload.index[op.name]], columns)] += task.duration_us
            of_op.append(row.ravel())
        found.append(of_op)
    if not found:
        return found
    # Channels that every option loads alike (the same one at many places) are one.
    table = np.array([row for of_op in found for row in of_op])
    kept = np.unique(table, axis=1, return_index=True)[1]
    return [[row[kept] for row in of_op] for of_op in found]


def _paid(loads: Loads, price: NDArray[np.float64]) -> float:
    return float(sum(min(float(row @ price) for row in of_op) for of_op in loads))


def _prices(loads: Loads) -> list[NDArray[np.float64]]:
    """Prices worth trying: each channel alone, and the best mixture for all communication together."""
    if not loads:
        return []
    count = len(loads[0][0])
    alone = list(np.eye(count)) if count <= MAX_CHANNELS else []
    if count > 1 and sum(map(len, loads)) * count > MAX_LP_TERMS:
        return [np.full(count, 1.0 / count), *alone]
    from ..synthesis.milp import Milp, solve

    model = Milp()
    prices = [model.column(upper=1.0) for _ in range(count)]
    model.row(dict.fromkeys(prices, 1.0), lower=1.0, upper=1.0)
    scale = max(float(row.max()) for of_op in loads for row in of_op) or 1.0
    for of_op in loads:
        paid = model.column(cost=-1.0)
        for row in of_op:
            terms = {price: -float(us) / scale for price, us in zip(prices, row, strict=True) if us}
            model.row({paid: 1.0, **terms}, upper=0.0)
    values = solve(model, limit_s=10.0).values
    if values is None:
        return alone
    # Whatever the solver's tolerance, prices that sum to one are valid.
    best = np.maximum(values[prices], 0.0)
    return [best / best.sum(), *alone]


def _between(
    problem: Problem, fastest: list[float], loads: Loads, prices: list[NDArray[np.float64]]
) -> tuple[float, str]:
    """The longest wait from a compute-op to its next iteration, counting the load that has to fit between."""
    workload = problem.workload
    compute = [at for at, op in enumerate(workload.ops) if not op.is_comm]
    comm = [at for at, op in enumerate(workload.ops) if op.is_comm]
    if not compute or not comm or len(workload.ops) > MAX_BETWEEN_OPS:
        return 0.0, "an op"
    cost = np.array([[min(float(row @ price) for row in of_op) for price in prices] for of_op in loads])
    graph = _Unrolled(problem, fastest)
    best, name = 0.0, "an op"
    for op in compute[:: max(1, len(compute) // MAX_FROM)]:
        before, after = graph.around(op)
        heads = np.array([before[i][at] for i in (0, 1) for at in comm])
        tails = np.array([after[i][at] for i in (0, 1) for at in comm])
        twice = np.concatenate([cost, cost])
        inside = (heads > -np.inf) & (tails > -np.inf)
        for head in np.unique(heads[inside])[:MAX_FROM]:
            for tail in np.unique(tails[inside & (heads >= head)])[:MAX_FROM]:
                fits = inside & (heads >= head) & (tails >= tail)
                us = float(heads[fits].min() + tails[fits].min() + twice[fits].sum(axis=0).max())
                if us > best:
                    best, name = us, workload.ops[op].name
    return best, name


class _Unrolled:
    """Two iterations of ops at their fastest; waits for earlier iterations are left out, which only weakens a bound."""

    def __init__(self, problem: Problem, fastest: list[float]) -> None:
        workload = problem.workload
        self.fastest = fastest
        self.needs = [[(workload.index[dep.op], dep.lag) for dep in op.after if dep.lag <= 1] for op in workload.ops]
        rows, count = streams_of_ops(workload, places_of_ops(workload))
        streams: list[list[int]] = [[] for _ in range(count)]
        for at, row in enumerate(rows):
            for stream in row:
                streams[stream].append(at)
        for ops in streams:
            for k, at in enumerate(ops):
                self.needs[at].append((ops[k - 1], int(k == 0)))
        inside = {at: {u for u, lag in needs if lag == 0} for at, needs in enumerate(self.needs)}
        self.order = list(TopologicalSorter(inside).static_order())

    def around(self, op: int) -> tuple[list[list[float]], list[list[float]]]:
        """For every op of both iterations: the longest time from the start of `op` to its start, and from its end to
        the start of `op` in the second."""
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
