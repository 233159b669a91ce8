# SPDX-License-Identifier: Apache-2.0
"""A start of the search in which runs of equal comm-ops take another option than the rest.

The layers of a model have equal collectives, and often the best plan has some of them on a slower network beside the
faster one: so many of the first, of the last, or one of every so many. A search that changes one op after the other
takes thousands of steps to get there, because each change alone gains little. Here such runs are tried as a whole, each
by one list schedule; the best one is kept, made longer or shorter, and the next is looked for, until none gains.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from .bounds import PeriodBound, least_us
from .relaxation import ResourceLoads, resource_loads
from .schedule import Scheduler

NEAR = 1.2
"""An option is tried if it costs at most this many times the cheapest one, at the prices of the bound."""
PARTS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1.0)
"""The lengths of runs that are tried first, as shares of all equal ops."""
MAX_SINGLES = 300
"""The largest number of pairs of an op and an option for which ops also change one by one."""
ROUNDS = 12
LEAST_GAIN = 1e-6
"""The share of the period that a run has to save."""
PLACEMENTS = ("first", "last", "spread")


@dataclass(frozen=True, kw_only=True)
class OpRun:
    """Some of the comm-ops with equal options, by their position among all comm-ops, and the option they take."""

    ops: tuple[int, ...]
    """All ops with these options."""
    option: int
    placement: str
    length: int

    def members(self) -> list[int]:
        """The ops of the run."""
        count = len(self.ops)
        if self.placement == "first":
            return list(self.ops[: self.length])
        if self.placement == "last":
            return list(self.ops[count - self.length :])
        return [self.ops[int((k + 0.5) * count / self.length)] for k in range(self.length)]

    def resized(self, length: int) -> OpRun:
        """The run with another length."""
        return OpRun(ops=self.ops, option=self.option, placement=self.placement, length=length)


_Trial = tuple[float, tuple[int, ...], OpRun]
"""A period, the choice that has it, and the run that made the choice."""


class RunSearch:
    """Steepest descent over runs.

    Args:
        scheduler: the compiled problem.
        bound: its bound, whose prices say which options are worth a try.
        serial: whether a place runs one task of a collective at a time.
        most: the largest number of list schedules.
        until: the moment of `time.monotonic` at which the descent ends.
        own_s: seconds of this thread's own time for which it goes on even then, but not after `latest`.
        latest: the moment of `time.monotonic` at which it ends in any case.
    """

    def __init__(
        self, scheduler: Scheduler, bound: PeriodBound, *, serial: bool, most: int, until: float = float("inf"),
        own_s: float = 0.0, latest: float = float("inf"),
    ) -> None:  # fmt: skip
        self._own_until, self._latest = time.thread_time() + own_s, latest
        self._scheduler, self._serial, self._most, self._until = scheduler, serial, most, until
        self._bound_us = bound.us
        self.evaluations = 0
        prices = bound.relaxed.prices if bound.relaxed is not None else []
        self._runs = _first_runs(scheduler, resource_loads(scheduler.problem, serial), prices[0]) if prices else []

    def descend(self, choice: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """The best period and choice found from `choice`."""
        us = self._period(choice)
        for _ in range(ROUNDS):
            found: list[_Trial] = []
            for run in self._runs:
                if self._spent():
                    break
                found.append(self._tried(choice, run))
            best = min(found, key=lambda one: one[0], default=None)
            if best is None or best[0] >= us * (1 - LEAST_GAIN):
                break
            us, choice = self._resized(choice, best)
            if us <= self._bound_us * (1 + LEAST_GAIN):
                break
        return us, choice

    def _resized(self, before: tuple[int, ...], best: _Trial) -> tuple[float, tuple[int, ...]]:
        """The run of a trial with the best length near its own."""
        step = max(1, len(best[2].ops) // 16)
        while step and not self._spent():
            run = best[2]
            lengths = [run.length + by for by in (-step, step) if 1 <= run.length + by <= len(run.ops)]
            tried = [self._tried(before, run.resized(length)) for length in lengths]
            found = min(tried, key=lambda one: one[0], default=best)
            if found[0] < best[0]:
                best = found
            else:
                step //= 2
        return best[:2]

    def _tried(self, choice: tuple[int, ...], run: OpRun) -> _Trial:
        changed = list(choice)
        for op in run.members():
            changed[op] = run.option
        return self._period(tuple(changed)), tuple(changed), run

    def _period(self, choice: tuple[int, ...]) -> float:
        self.evaluations += 1
        return self._scheduler.evaluate(choice, serial=self._serial)

    def _spent(self) -> bool:
        now = time.monotonic()
        late = now >= self._until and (time.thread_time() >= self._own_until or now >= self._latest)
        return late or self.evaluations >= self._most


def _first_runs(scheduler: Scheduler, loads: ResourceLoads, price: np.ndarray) -> list[OpRun]:
    comm = scheduler.problem.workload.comm_ops
    classes: dict[int, list[int]] = {}
    for at, table in enumerate(loads.of_op):
        classes.setdefault(table, []).append(at)
    runs = []
    for table, members in classes.items():
        options = scheduler.problem.options[comm[members[0]].name]
        cost = loads.tables[table] @ price
        fastest = np.array([least_us(option) for option in options])
        by_channels: dict[frozenset[str], list[int]] = {}
        for at in np.flatnonzero(cost <= NEAR * cost.min()).tolist():
            by_channels.setdefault(frozenset(c for task in options[at].tasks for c in task.channels), []).append(at)
        # On each set of channels the cheapest option and the fastest one.
        tried = [min(some, key=lambda at: (cost[at], fastest[at])) for some in by_channels.values()]
        tried += [min(some, key=lambda at: (fastest[at], cost[at])) for some in by_channels.values()]
        count = len(members)
        lengths = sorted({1, *(max(1, round(part * count)) for part in PARTS)})
        runs += [
            OpRun(ops=tuple(members), option=option, placement=placement, length=length)
            for option in dict.fromkeys(tried)
            for placement in (PLACEMENTS if count > 1 else PLACEMENTS[:1])
            for length in lengths
            if length < count or placement == "first"
        ]
    singles = sorted({(op, run.option) for run in runs for op in run.ops if len(run.ops) > 1})
    if len(singles) <= MAX_SINGLES:
        runs += [OpRun(ops=(op,), option=option, placement="first", length=1) for op, option in singles]
    return runs
