# SPDX-License-Identifier: Apache-2.0
"""Options mixed in any shares: the linear program behind the lower bound, and what it says about where to start.

Every argument of the bound is a row ``lag * period >= constant + what the chosen options add``: the load of a channel
or link, a circle of waiting, the load inside a window. If a comm-op may take options in shares, the least period that
fits all rows is a linear program. Circles and windows are too many to list: those that the last solution violates are
added until there is none.

The bound does not trust the solver. Its duals are prices on the rows; whatever they are, a period pays at least the
cheapest option of every comm-op, and that sum is the bound. With whole options (`whole_options`) the rows give a higher
one, which is the solver's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...workload import Op
from ..algebra.nodes import is_queued
from .cliques import CliqueWindows
from .problem import PlanProblem
from .resources import Ends, op_ends
from .whole_options import PeriodRow, WholeOptions, whole_options

Floats = NDArray[np.float64]

MAX_LP_TERMS = 400_000
MAX_CHANNELS = 256
ROUNDS, WHOLE_ROUNDS = 40, 6
"""How often violated rows are added: with options in shares, and with whole ones."""
WINDOWS_A_ROUND = 8
"""Rows of violated windows that are added at once."""
VIOLATED = 1e-6
"""The share of the period by which a row has to be violated to be added."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResourceLoads:
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


def resource_loads(problem: PlanProblem, serial: bool) -> ResourceLoads:
    """The loads of a problem's options; `serial` counts the queue of a system that runs one collective at a time."""
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
        return ResourceLoads(tables=[], of_op=[], count=0)
    # Channels that every option loads equally (the same channel at many places) are merged.
    kept = np.unique(np.concatenate(tables), axis=1, return_index=True)[1]
    return ResourceLoads(tables=[table[:, kept] for table in tables], of_op=of_op, count=len(kept))


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowLoads:
    """Windows of one period: communication that has to run inside, and time that is spent before and after it."""

    around_us: Floats
    """For each window the time before and after."""
    counts: Floats
    """For each window and comm-op how often the op runs inside."""
    names: tuple[str, ...]
    """For each window the compute-op from which to whose next start it lasts."""

    def longest(self, least: Floats) -> tuple[float, str]:
        """The longest window, given what each comm-op takes of a resource at least."""
        if not self.names:
            return 0.0, "an op"
        lengths = self.around_us + self.counts @ least
        at = int(lengths.argmax())
        return float(lengths[at]), self.names[at]


@dataclass(frozen=True, kw_only=True)
class Circle:
    """A circle of waiting: its ratio, how often each comm-op is in it, the time of its compute-ops, and its lag."""

    us: float
    counts: dict[int, int]
    compute_us: float
    lag: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxed:
    """The least period with options in shares, as proved by prices, and the shares of each comm-op's options."""

    us: float
    prices: list[Floats]
    """Prices on channels and links that sum to one: those that are best for all load, and each alone."""
    mix: list[Floats] | None
    """The shares of options of each comm-op; None where comm-ops were not told apart."""
    whole: WholeOptions | None = None
    """The relaxation with one whole option for each comm-op, where that was computed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OptionCount:
    """How many comm-ops take one of some options."""

    options: dict[int, NDArray[np.int64]]
    """By comm-op: the positions of these options."""
    least: int
    most: int


def relax(
    loads: ResourceLoads,
    option_us: Sequence[Floats],
    stream_us: float,
    worst_circle: Callable[[Floats], Circle | None],
    windows: WindowLoads,
    cliques: CliqueWindows,
    counts: Sequence[OptionCount] = (),
    *,
    whole: bool = True,
) -> Relaxed:
    """The linear relaxation over all options.

    Args:
        loads: the load of every option on channels and links.
        option_us: for each comm-op the least time of each option.
        stream_us: the compute of the busiest stream.
        worst_circle: gives the longest circle of waiting for a time of each comm-op; None if there is none.
        windows: windows of a period.
        cliques: windows with comm-ops that take one channel in turns.
        counts: numbers of comm-ops to which the options are held; not used where comm-ops are not told apart.
        whole: whether the bound for whole options is computed, too; not with `counts`.

    Returns:
        The bound, prices and shares.
    """
    if not loads.count:
        return Relaxed(us=0.0, prices=[], mix=None)
    alone = list(np.eye(loads.count)) if loads.count <= MAX_CHANNELS else []
    apart = sum(len(loads.tables[at]) for at in loads.of_op) * (loads.count + 1) <= MAX_LP_TERMS
    if not apart and sum(map(len, loads.tables)) * loads.count > MAX_LP_TERMS:
        return Relaxed(us=0.0, prices=[np.full(loads.count, 1.0 / loads.count), *alone], mix=None)
    tables = [loads.tables[at] for at in loads.of_op] if apart else loads.tables
    count = np.ones(len(tables)) if apart else np.bincount(loads.of_op, minlength=len(tables)).astype(np.float64)
    program = _Program(tables, count, loads.count, stream_us)
    for each in counts if apart else ():
        program.hold(each)
    if not program.solve():
        return Relaxed(us=0.0, prices=alone, mix=None)
    price = program.proved()[1]

    def violated() -> list[PeriodRow]:
        found = program.violated_circle(worst_circle, option_us) + program.violated_windows(windows, tables)
        return found + program.violated_cliques(cliques)

    for _ in range(ROUNDS if apart else 0):
        found = violated()
        for row in found:
            program.add(row)
        if not found or not program.solve():
            break
    us, mix = program.proved()[0], program.mix
    prices = [*([price] if price is not None else []), *alone]
    higher = program.whole(violated) if whole and apart and not counts else None
    return Relaxed(us=us, prices=prices, mix=mix if apart else None, whole=higher)


class _Program:
    """The linear program; `mix` and `period` are those of the last solution."""

    def __init__(self, tables: Sequence[Floats], count: Floats, resources: int, stream_us: float) -> None:
        from ...solvers.linear import LinearProgram

        self._scale = max(stream_us, *(float(table.max()) for table in tables)) or 1.0
        self._rows: list[PeriodRow] = []
        self._resources = resources
        self._program = LinearProgram(time_limit=10.0)
        self._period = self._program.column(cost=1.0)
        self._columns = [[self._program.column() for _ in table] for table in tables]
        self.mix: list[Floats] = []
        self.period = 0.0
        for columns in self._columns:
            self._program.row(columns, np.ones(len(columns)), lower=1.0, upper=1.0)
        loaded: list[list[int]] = [[] for _ in range(resources)]
        for k, table in enumerate(tables):
            for at in np.flatnonzero(table.any(axis=0)).tolist():
                loaded[at].append(k)
        for at in range(resources):
            adds = {k: count[k] * tables[k][:, at] for k in loaded[at]}
            self.add(PeriodRow(lag=1.0, constant_us=0.0, adds=adds))
        self.add(PeriodRow(lag=1.0, constant_us=stream_us, adds={}))

    def add(self, row: PeriodRow) -> None:
        index, value = [self._period], [row.lag]
        for unit, adds in row.adds.items():
            some = np.flatnonzero(adds)
            index += [self._columns[unit][k] for k in some]
            value += (-adds[some] / self._scale).tolist()
        self._program.row(index, value, lower=row.constant_us / self._scale)
        self._rows.append(row)

    def hold(self, count: OptionCount) -> None:
        """Holds the options to a count; these rows say nothing about the period, but their prices count."""
        for sign, limit in ((1.0, count.most), (-1.0, count.least)):
            adds = {}
            for unit, some in count.options.items():
                adds[unit] = np.zeros(len(self._columns[unit]))
                adds[unit][some] = sign * self._scale
            self.add(PeriodRow(lag=0.0, constant_us=-sign * limit * self._scale, adds=adds))

    def solve(self) -> bool:
        """Whether there is a solution; else the one before stays."""
        found = self._program.solve()
        if found.status != "optimal":
            return False
        self.period = found.objective * self._scale
        self.mix = [found.values[columns] for columns in self._columns]
        self._duals = found.duals[len(self._columns) :]
        return True

    def whole(self, violated: Callable[[], list[PeriodRow]]) -> WholeOptions | None:
        """The bound with whole options, and those of its last solution; the solution takes the place of `mix`."""
        best: WholeOptions | None = None
        for _ in range(WHOLE_ROUNDS):
            found = whole_options(self._rows, [len(columns) for columns in self._columns], self._scale)
            if found is None:
                break
            best = WholeOptions(us=max(found.us, best.us if best else 0.0), chosen=found.chosen)
            if found.chosen is None:
                break
            self.mix = [np.eye(1, len(columns), at)[0] for columns, at in zip(self._columns, found.chosen, strict=True)]
            self.period = best.us
            more = violated()
            if not more:
                break
            self._rows += more
        return best

    def violated_circle(self, worst: Callable[[Floats], Circle | None], option_us: Sequence[Floats]) -> list[PeriodRow]:
        mean = np.array([float(mix @ us) for mix, us in zip(self.mix, option_us, strict=True)])
        circle = worst(mean)
        if circle is None or circle.us <= self.period * (1 + VIOLATED):
            return []
        adds = {unit: times * option_us[unit] for unit, times in circle.counts.items()}
        return [PeriodRow(lag=float(circle.lag), constant_us=circle.compute_us, adds=adds)]

    def violated_windows(self, windows: WindowLoads, tables: Sequence[Floats]) -> list[PeriodRow]:
        if not windows.names:
            return []
        mean = np.stack([mix @ table for mix, table in zip(self.mix, tables, strict=True)])
        lengths = windows.around_us[:, None] + windows.counts @ mean
        best = lengths.max(axis=1)
        found = []
        for at in np.argsort(-best, kind="stable")[:WINDOWS_A_ROUND].tolist():
            if best[at] <= self.period * (1 + VIOLATED):
                break
            resource, times = int(lengths[at].argmax()), windows.counts[at]
            adds = {k: times[k] * tables[k][:, resource] for k in np.flatnonzero(times).tolist()}
            found.append(PeriodRow(lag=1.0, constant_us=float(windows.around_us[at]), adds=adds))
        return found

    def violated_cliques(self, cliques: CliqueWindows) -> list[PeriodRow]:
        if not len(cliques.around_us):
            return []
        mean = np.stack([mix @ us for mix, us in zip(self.mix, cliques.channel_us, strict=True)])
        lengths = cliques.around_us + (cliques.counts * mean[:, cliques.channel].T).sum(axis=1)
        found = []
        for at in np.argsort(-lengths, kind="stable")[:WINDOWS_A_ROUND].tolist():
            if lengths[at] <= self.period * (1 + VIOLATED):
                break
            times, channel = cliques.counts[at], cliques.channel[at]
            adds = {k: times[k] * cliques.channel_us[k][:, channel] for k in np.flatnonzero(times).tolist()}
            found.append(PeriodRow(lag=1.0, constant_us=float(cliques.around_us[at]), adds=adds))
        return found

    def proved(self) -> tuple[float, Floats | None]:
        """The bound that the duals prove as prices of rows, and the prices of channels and links among them."""
        duals = np.maximum(self._duals, 0.0)
        total = sum(dual * row.lag for dual, row in zip(duals, self._rows, strict=False))
        if not total > 0:
            return 0.0, None
        us = 0.0
        paid = [np.zeros(len(columns)) for columns in self._columns]
        for dual, row in zip(duals / total, self._rows, strict=False):
            if dual > 0:
                us += dual * row.constant_us
                for unit, adds in row.adds.items():
                    paid[unit] += dual * adds
        us = float(us + sum(each.min() for each in paid))
        price = duals[: self._resources]
        return us, price / price.sum() if price.sum() > 0 else None
