# SPDX-License-Identifier: Apache-2.0
"""The subject of the search: the options of every comm-op, each a small graph of bound motifs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from ...errors import InvalidInput
from ...workload import Workload
from ..costs.costs import Motion


@dataclass(frozen=True, kw_only=True)
class MotifTask:
    """A motif bound to its physical plan: once started it holds its channels for `duration_us`.

    `channels` are names of the cluster's link channels (``("nvlink", "rdma")``); two tasks may run at the same time at
    an end of a place if they share none (`resources`). `after` are positions of tasks of the same option that must have
    ended. `launch_us` is the part of the duration that issuing the motif takes, `source` says where the cost came from,
    `motion` holds groups and channels (None if only a duration is known). `shared` lists links that tasks of other
    places use as well, by a number that the problem gives them, with the microseconds that this task takes of each.
    """

    motif: str
    algorithm: str
    channels: tuple[str, ...]
    duration_us: float
    nbytes: float = 0.0
    launch_us: float = 0.0
    after: tuple[int, ...] = ()
    source: str = ""
    motion: Motion | None = None
    shared: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to execute a comm-op: a motif expression, its leaves bound to channels and algorithms.

    `rules` are the rewrites that led from the comm-op to the expression, in order (``("segment:4", "spline:2")``).
    """

    name: str
    expression: str
    tasks: tuple[MotifTask, ...]
    rules: tuple[str, ...] = ()

    @cached_property
    def total_us(self) -> float:
        """The time of the option alone, by list scheduling with the longest remaining chain first."""
        return _makespan_us(self.tasks)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InvalidInput(f"option {self.name}: has no tasks")
        for at, task in enumerate(self.tasks):
            if any(not 0 <= before < at for before in task.after):
                raise InvalidInput(f"option {self.name}: tasks[{at}].after must name earlier tasks")
            if not task.duration_us >= 0:
                raise InvalidInput(f"option {self.name}: tasks[{at}].duration_us must be >= 0")
            if not task.channels:
                raise InvalidInput(f"option {self.name}: tasks[{at}].channels must not be empty")


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """A workload, and the options of each of its comm-ops by name; the first option is the default one."""

    workload: Workload
    options: dict[str, tuple[Option, ...]]
    costs: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for op in self.workload.comm_ops:
            if not self.options.get(op.name):
                raise InvalidInput(f"options: comm-op {op.name!r} has none")
        extra = set(self.options) - {op.name for op in self.workload.comm_ops}
        if extra:
            raise InvalidInput(f"options: {min(extra)!r} is not a comm-op of {self.workload.name}")


def _makespan_us(tasks: tuple[MotifTask, ...]) -> float:
    """The time by list scheduling: whenever a task ends, tasks that may start do, the longest remaining chain first.

    If the tasks in their listed order take no longer than the busiest channel, that time is the answer.
    """
    written, load = _as_written_us(tasks)
    if written <= load * (1 + 1e-12):
        return written
    left = [task.duration_us for task in tasks]
    waits = [len(task.after) for task in tasks]
    behind: list[list[int]] = [[] for _ in tasks]
    for at in range(len(tasks) - 1, -1, -1):
        for before in tasks[at].after:
            behind[before].append(at)
            left[before] = max(left[before], tasks[before].duration_us + left[at])
    ready = sorted((at for at in range(len(tasks)) if not waits[at]), key=lambda at: (-left[at], at))
    running: list[tuple[float, int]] = []
    held: set[str] = set()
    now = 0.0
    while ready or running:
        waiting = []
        for at in ready:
            if held.isdisjoint(tasks[at].channels):
                held.update(tasks[at].channels)
                heappush(running, (now + tasks[at].duration_us, at))
            else:
                waiting.append(at)
        ready = waiting
        now = running[0][0]
        while running and running[0][0] <= now:
            _, ended = heappop(running)
            held.difference_update(tasks[ended].channels)
            for at in behind[ended]:
                waits[at] -= 1
                if not waits[at]:
                    ready.append(at)
        ready.sort(key=lambda at: (-left[at], at))
    return min(now, written)


def _as_written_us(tasks: tuple[MotifTask, ...]) -> tuple[float, float]:
    """The time if each channel serves tasks in their listed order, and the time of the busiest channel."""
    ends: list[float] = []
    free: dict[str, float] = {}
    load: dict[str, float] = {}
    for task in tasks:
        start = 0.0
        for at in task.after:
            start = max(start, ends[at])
        for channel in task.channels:
            start = max(start, free.get(channel, 0.0))
            load[channel] = load.get(channel, 0.0) + task.duration_us
        ends.append(start + task.duration_us)
        free.update(dict.fromkeys(task.channels, ends[-1]))
    return max(ends), max(load.values())
