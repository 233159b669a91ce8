# SPDX-License-Identifier: Apache-2.0
"""A lower bound on the period of every plan, from arguments that do not depend on any order.

* A compute stream has to run all its ops in every period.
* Circles of waiting take as long as their ops with the fastest option of each, per iteration of lag.
* A channel has to carry, at each end of a place, whatever options are chosen, and so has a link that several places
  share. With prices on these that sum to one, a period pays at least the cheapest option of every comm-op; the best
  prices come from a linear program, and any prices are valid.
* Between an op and the same op an iteration later, communication that has to come after the one and before the other
  must fit with what lies before and after it. The load of its channels and links, priced as before, adds to both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...workload import Op
from ...workload.ordering import few
from ..algebra.nodes import Nodes, is_queued, nodes_of
from .problem import Option, PlanProblem
from .resources import Ends, op_ends

MAX_LP_TERMS = 200_000
MAX_CHANNELS = 256
MAX_BETWEEN_OPS = 1000
MAX_FROM = 24
"""The number of compute-ops, and of thresholds, from which load is counted; fewer only weaken the bound."""


@dataclass(frozen=True, kw_only=True)
class PeriodBound:
    """A proved lower bound on the period, the argument that gives it, and the bounds of the other arguments."""

    us: float
    why: str
    arguments: dict[str, float] = field(default_factory=dict)


def lower_bound(problem: PlanProblem, *, serial: bool = False) -> PeriodBound:
    """The largest of the bounds, valid for any options, orders and shifts.

    >>> from stretto.planner.example import figure6
    >>> bound = lower_bound(figure6())
    >>> round(bound.us, 3), bound.why
    (8.118, 'channel load between forward and the next')
    """
    nodes = nodes_of(problem.workload)
    fastest = _fastest(problem, nodes)
    circle_us, circle = _circles(problem, nodes, fastest)
    loads = _loads(problem, serial)
    prices = _prices(loads)
    between_us, between = _between(problem, nodes, fastest, loads, prices)
    found = {
        "compute stream": max(nodes.stream_us, default=0.0),
        f"circle of waiting: {', '.join(few(circle))}": circle_us,
        "channel load": max((loads.paid(price) for price in prices), default=0.0),
        f"channel load between {between} and the next": between_us,
    }
    why = max(found, key=lambda name: found[name])
    return PeriodBound(us=found[why], why=why, arguments=found)


def least_us(option: Option) -> float:
    """A lower bound on an option's time: its longest chain of tasks, or its busiest channel."""
    ends: list[float] = []
    load: dict[str, float] = defaultdict(float)
    for task in option.tasks:
        ends.append(max((ends[at] for at in task.after), default=0.0) + task.duration_us)
        for channel in set(task.channels):
            load[channel] += task.duration_us
    return max(*ends, *load.values())


def _fastest(problem: PlanProblem, nodes: Nodes) -> list[float]:
    """The least time of each node."""
    known: dict[int, float] = {}
    found = []
    for at, place, us in zip(nodes.op, nodes.place, nodes.us, strict=True):
        if place < 0:
            options = problem.options[problem.workload.ops[at].name]
            if id(options) not in known:
                known[id(options)] = min(least_us(option) for option in options)
            us = known[id(options)]
        found.append(us)
    return found


def _circles(problem: PlanProblem, nodes: Nodes, fastest: list[float]) -> tuple[float, list[str]]:
    """The largest ratio of duration to lag, with every comm-op as fast as possible and on channels of its own."""
    workload = problem.workload
    count = len(nodes.op)
    none = np.zeros(0, np.int32)
    zeros = np.zeros(1, np.int64)
    native = _native.ScheduleProblem(
        comm=np.zeros(count, np.uint8), duration_us=np.array(fastest, np.float64),
        stream_ptr=np.cumsum([0, *(stream >= 0 for stream in nodes.stream)], dtype=np.int64),
        stream=np.array([stream for stream in nodes.stream if stream >= 0], np.int32), num_streams=nodes.num_streams,
        dep_ptr=np.cumsum([0, *(len(row) for row in nodes.waits)], dtype=np.int64),
        dep_op=np.array([node for row in nodes.waits for node, _ in row], np.int32),
        dep_lag=np.array([lag for row in nodes.waits for _, lag in row], np.int32),
        set=np.full(count, -1, np.int32), line=np.full(count, -1, np.int32),
        option_ptr=zeros, task_ptr=zeros, task_us=np.zeros(0), inner_ptr=zeros, inner=none, held_ptr=zeros,
        held=none, held_us=np.zeros(0), serial_ptr=zeros, serial=none, num_resources=0, anchor=0,
    )  # fmt: skip
    us, _, _, _, critical, _, _, _ = native.replay(np.zeros(count, np.int32), none, none, False, 2)
    names = list(dict.fromkeys(workload.ops[nodes.op[node]].name for node in critical))
    first = names.index(min(names, key=lambda name: workload.index[name])) if names else 0
    return us, [*names[first:], *names[:first]] or ["one stream's own"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loads:
    """The time that options take of every channel and link; equal ops share a table with a row for each option."""

    tables: list[NDArray[np.float64]]
    of_op: list[int]
    """The table of each comm-op."""
    count: int
    """The number of channels and links that differ."""

    def least(self, price: NDArray[np.float64]) -> NDArray[np.float64]:
        """The price of each comm-op's cheapest option."""
        each = np.array([float((table @ price).min()) for table in self.tables])
        return each[self.of_op] if self.of_op else np.zeros(0)

    def paid(self, price: NDArray[np.float64]) -> float:
        """The least total price of all comm-ops."""
        return float(self.least(price).sum())


def _loads(problem: PlanProblem, serial: bool) -> _Loads:
    workload = problem.workload
    known: dict[tuple[int, Ends, bool], int] = {}
    of_op: list[int] = []
    first: list[Op] = []
    ends = op_ends(workload)
    for op in workload.comm_ops:
        key = (id(problem.options[op.name]), ends[workload.index[op.name]], serial and is_queued(op))
        of_op.append(known.setdefault(key, len(known)))
        if len(known) > len(first):
            first.append(op)
    all_options = [problem.options[op.name] for op in first]
    tasks = [task for options in all_options for option in options for task in option.tasks]
    channels = {c: at for at, c in enumerate(sorted({c for task in tasks for c in task.channels}))}
    num_links = 1 + max((link for task in tasks for link, _ in task.shared), default=-1)
    # Ends that the same ops use have equal loads, so one of them stands for all.
    users: dict[int, list[int]] = defaultdict(list)
    for at, (_, held, _) in enumerate(known):
        for end in held:
            users[end].append(at)
    lead = {tuple(row): end for end, row in sorted(users.items(), reverse=True)}
    column = {end: at for at, end in enumerate(sorted(lead.values()))}
    tables = []
    for options, (_, held, queued) in zip(all_options, known, strict=True):
        table = np.zeros((len(options), len(column), len(channels) + 1))
        links = np.zeros((len(options), num_links))
        where = [column[end] for end in held if end in column]
        for row, on_links, option in zip(table, links, options, strict=True):
            for task in option.tasks:
                columns = [channels[c] for c in set(task.channels)] + ([len(channels)] if queued else [])
                row[np.ix_(where, columns)] += task.duration_us
                for link, us in task.shared:
                    on_links[link] += min(us, task.duration_us)
        tables.append(np.concatenate([table.reshape(len(options), -1), links], axis=1))
    if not tables:
        return _Loads(tables=[], of_op=[], count=0)
    # Channels that every option loads equally (the same channel at many places) are merged.
    kept = np.unique(np.concatenate(tables), axis=1, return_index=True)[1]
    return _Loads(tables=[table[:, kept] for table in tables], of_op=of_op, count=len(kept))


def _prices(loads: _Loads) -> list[NDArray[np.float64]]:
    """Prices worth trying: each channel alone, and the best mixture for all communication together."""
    count = loads.count
    if not count:
        return []
    alone = list(np.eye(count)) if count <= MAX_CHANNELS else []
    if count > 1 and sum(map(len, loads.tables)) * count > MAX_LP_TERMS:
        return [np.full(count, 1.0 / count), *alone]
    from ...solvers.milp import Milp, solve

    model = Milp()
    prices = [model.column(upper=1.0) for _ in range(count)]
    model.row(dict.fromkeys(prices, 1.0), lower=1.0, upper=1.0)
    scale = max(float(table.max()) for table in loads.tables) or 1.0
    for number, table in enumerate(loads.tables):
        paid = model.column(cost=-float(loads.of_op.count(number)))
        for row in table:
            terms = {price: -float(us) / scale for price, us in zip(prices, row, strict=True) if us}
            model.row({paid: 1.0, **terms}, upper=0.0)
    values = solve(model, limit_s=10.0).values
    if values is None:
        return alone
    # Prices that sum to one are valid whatever the solver's tolerance, so they are normalized.
    best = np.maximum(values[prices], 0.0)
    return [best / best.sum(), *alone]


def _between(
    problem: PlanProblem, nodes: Nodes, fastest: list[float], loads: _Loads, prices: list[NDArray[np.float64]]
) -> tuple[float, str]:
    """The longest wait from a compute-op to its next iteration, including the load that has to fit between."""
    compute = [node for node, place in enumerate(nodes.place) if place >= 0]
    comm = [node for node, place in enumerate(nodes.place) if place < 0]
    if not compute or not comm or len(nodes.op) > MAX_BETWEEN_OPS:
        return 0.0, "an op"
    cost = np.stack([loads.least(price) for price in prices], axis=1)
    graph = _Unrolled(nodes, fastest)
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
                    best, name = us, problem.workload.ops[nodes.op[op]].name
    return best, name


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
