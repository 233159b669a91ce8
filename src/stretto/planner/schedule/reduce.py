# SPDX-License-Identifier: Apache-2.0
"""A smaller step with the same iteration time: repeated layers become one op per micro-batch and stage.

A comm-op is *exposed* if the compute stream of its only place waits for it with nothing else to run: the collectives of
tensor parallelism between two halves of a layer. Nothing can be gained by delaying it or by taking another than its
fastest option, so it is fixed, and with the compute before and after it becomes one compute-op. A merged op ends where
the first other op waits for one of its parts. What remains is scheduled and searched; `ReducedStep.expanded` gives the
order of the whole step.

An exposed comm-op keeps its place in the step if a long comm-op may run at the same time on one of its channels, or in
the same queue of a system that runs one collective at a time. One that lasts less than half of the place's compute-ops
finds room while the place computes, when no exposed op runs: the iteration of the smaller step leaves that wait out.
The plan has the time of the whole step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...errors import Infeasible
from ...workload import Op, Workload
from ..algebra.nodes import is_queued
from ..costs.costs import CostModel, Motion
from .bounds import least_us
from .problem import MotifTask, Option, PlanProblem
from .schedule import SAME, Scheduler, StepSchedule

SHORT = 0.5
"""A comm-op finds room beside exposed ones if it lasts at most this share of the place's mean compute-op."""

Order = tuple[tuple[int, ...], list[tuple[int, int]], list[int]]
"""A choice, an order of (op, task) pairs, and their shifts."""
_Row = tuple[float, int, int, int, int]
"""Start in the window, number that orders equal starts, op, task, and shift."""


@dataclass(frozen=True, kw_only=True)
class MergedOp:
    """Ops that run one after the other without any other: compute-ops, and the exposed comm-ops between them."""

    ops: tuple[int, ...]
    """Positions in the whole step."""


class ReducedStep:
    """A planning problem, and the smaller one with its exposed comm-ops merged into compute-ops.

    Args:
        problem: the whole problem.
        defaults: whether exposed comm-ops take their default options, as stock systems do, not their fastest.
        merged: the merged ops if they are known, from another `ReducedStep` of this problem.
    """

    def __init__(
        self, problem: PlanProblem, *, defaults: bool = False, merged: tuple[MergedOp, ...] | None = None
    ) -> None:  # fmt: skip
        self.whole = problem
        self._fixed = _Fixed(problem)
        self.merged = merged if merged is not None else _merged(problem, self._fixed)
        ops = problem.workload.ops
        exposed = [at for one in self.merged for at in one.ops if ops[at].is_comm]
        self._choice = {at: 0 if defaults else self._fixed.fastest(ops[at]) for at in exposed}
        self.problem = self._smaller()

    def _smaller(self) -> PlanProblem:
        workload = self.whole.workload
        inside = {at for one in self.merged for at in one.ops}
        last = {one.ops[-1]: one for one in self.merged}
        ops: list[Op] = []
        self._at: list[int] = []
        """For each op of the smaller step its position in the whole one; the last part of a merged op."""
        for at, op in enumerate(workload.ops):
            if at in last:
                us = sum(self.part_us(part) for part in last[at].ops)
                op = replace(op, after=workload.ops[last[at].ops[0]].after, duration_us=us)
            elif at in inside:
                continue
            ops.append(op)
            self._at.append(at)
        step = replace(workload, ops=tuple(ops))
        return replace(
            self.whole, workload=step, options={op.name: self.whole.options[op.name] for op in step.comm_ops}
        )

    def task(self, at: int) -> MotifTask:
        """The motif of an exposed comm-op."""
        return self.whole.options[self.whole.workload.ops[at].name][self._choice[at]].tasks[0]

    def part_us(self, at: int) -> float:
        """The time of a part of a merged op."""
        op = self.whole.workload.ops[at]
        return self.task(at).duration_us if op.is_comm else op.duration_us

    def exact(self, problem: PlanProblem, costs: CostModel) -> PlanProblem:
        """The smaller problem (as it is, or as stock systems see it) with exposed comm-ops at their exact cost."""
        known: dict[tuple[Motion, float, str], float] = {}
        longer = dict.fromkeys((op.name for op in problem.workload.ops), 0.0)
        for one in self.merged:
            name = self.whole.workload.ops[one.ops[-1]].name
            for task in (self.task(at) for at in one.ops if at in self._choice):
                if task.motion is not None:
                    key = (task.motion, task.nbytes, task.algorithm)
                    if key not in known:
                        known[key] = costs.cost(*key, exact=True).us
                    longer[name] += task.launch_us + known[key] - task.duration_us
        ops = tuple(
            replace(op, duration_us=max(op.duration_us + longer[op.name], 0.0)) if longer[op.name] else op
            for op in problem.workload.ops
        )
        return replace(problem, workload=replace(problem.workload, ops=ops))

    def with_figures(self, schedule: StepSchedule) -> StepSchedule:
        """A schedule of the smaller step with the idle time, exposed time and motifs of the whole one, for tables."""
        us = np.zeros(len(schedule.compute_idle))
        for at in self._choice:
            us[self.whole.workload.op_places[at][0]] += self.part_us(at)
        share = us / schedule.period_us if schedule.period_us > 0 else us
        return replace(
            schedule, compute_idle=schedule.compute_idle + share, exposed_us=schedule.exposed_us + us,
            comm_idle=np.maximum(schedule.comm_idle - share, 0.0),
            order=(*schedule.order, *((at, 0) for at in self._choice)),
        )  # fmt: skip

    def expanded(self, schedule: StepSchedule) -> Order:
        """The choice, order and shifts of the whole step that a schedule of the smaller one stands for."""
        workload, small = self.whole.workload, self.problem.workload
        picked = dict(zip((op.name for op in small.comm_ops), schedule.choice, strict=True))
        choice = tuple(
            picked[op.name] if op.name in picked else self._choice[workload.index[op.name]] for op in workload.comm_ops
        )
        period = schedule.period_us
        rank = {task: k for k, task in enumerate(schedule.order)}
        parts_of = {one.ops[-1]: one.ops for one in self.merged}
        fixed: list[_Row] = []
        left: list[_Row] = []
        for op, task, iteration, start in zip(
            schedule.op.tolist(), schedule.task.tolist(), schedule.iteration.tolist(), schedule.start_us.tolist(),
            strict=True,
        ):  # fmt: skip
            at = self._at[op]
            if task >= 0:
                left.append((start, 1 + rank[op, task], at, task, iteration))
                continue
            for part in parts_of.get(at, ()):
                if part in self._choice:
                    window = int(start / period + SAME) if period > 0 else 0
                    fixed.append((max(start - window * period, 0.0), 0, part, 0, iteration - window))
                start += self.part_us(part)
        rows = sorted([*fixed, *self._in_gaps(left, fixed, picked)])
        return choice, [(at, task) for _, _, at, task, _ in rows], [shift for *_, shift in rows]

    def _in_gaps(self, left: list[_Row], fixed: list[_Row], picked: dict[str, int]) -> list[_Row]:
        """The rows of other motifs; one that would hold up an exposed comm-op of its place comes after that."""
        workload = self.whole.workload
        busy: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for start, _, at, _, _ in sorted(fixed):
            for channel in self.task(at).channels:
                held = busy.setdefault((workload.op_places[at][0], channel), [])
                held.append((start, start + self.task(at).duration_us))
        found: list[_Row] = []
        for start, number, at, task, iteration in left:
            name = workload.ops[at].name
            motif = self.whole.options[name][picked[name]].tasks[task]
            rows = [
                busy[place, channel] for place in workload.op_places[at] for channel in motif.channels
                if (place, channel) in busy
            ]  # fmt: skip
            for held in rows:
                for begin, end in held[max(bisect_left(held, (start, 0.0)) - 1, 0) :]:
                    if begin >= start + motif.duration_us:
                        break
                    start = max(start, end)
            found.append((start, number, at, task, iteration))
        return found

    def schedule(self, whole: Scheduler, schedule: StepSchedule) -> StepSchedule:
        """The schedule of the whole step.

        Args:
            whole: the compiled whole problem.
            schedule: a schedule of the smaller one.

        Returns:
            The steady state of the expanded order; of a list schedule with the same options if that order waits for
            itself.
        """
        choice, order, shift = self.expanded(schedule)
        try:
            return whole.settled(choice, *whole.numbered(choice, order, shift), serial=schedule.serial)
        except Infeasible:
            return whole.schedule(choice, serial=schedule.serial)


class _Fixed:
    """The options of comm-ops that may be fixed: one motif each, by default and at its fastest."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._known: dict[int, int] = {}

    def fastest(self, op: Op) -> int:
        """The option that is fastest alone; -1 if the op cannot be fixed."""
        options = self._problem.options[op.name]
        if id(options) not in self._known:
            self._known[id(options)] = _fastest_whole(options)
        return self._known[id(options)]

    def motifs(self, op: Op) -> tuple[MotifTask, MotifTask]:
        """The motifs of the default and of the fastest option."""
        options = self._problem.options[op.name]
        return options[0].tasks[0], options[self.fastest(op)].tasks[0]


def _fastest_whole(options: tuple[Option, ...]) -> int:
    whole = [k for k, option in enumerate(options) if len(option.tasks) == 1 and not option.tasks[0].shared]
    if 0 not in whole:
        return -1
    best = min(whole, key=lambda k: options[k].tasks[0].duration_us)
    least = min(least_us(option) for option in options)
    return best if options[best].tasks[0].duration_us <= least * (1 + 1e-12) else -1


def _merged(problem: PlanProblem, fixed: _Fixed) -> tuple[MergedOp, ...]:
    """The longest runs of ops that nothing comes between."""
    graph = _Graph(problem, fixed)
    found: list[MergedOp] = []
    for place, stream in graph.streams.items():
        chains = [graph.between(place, a, b) for a, b in pairwise(stream)]
        free = graph.free_of_conflicts(place, stream, chains)
        run = stream[:1]
        for (a, b), chain, is_free in zip(pairwise(stream), chains, free, strict=True):
            parts = [] if chain is None else [a, *chain]
            if parts and is_free and all(set(graph.readers[part]) <= {b, *parts} for part in parts):
                run += [*parts[1:], b]
                continue
            found += [MergedOp(ops=tuple(run))] if len(run) > 1 else []
            run = [b]
        found += [MergedOp(ops=tuple(run))] if len(run) > 1 else []
    return tuple(found)


class _Graph:
    """The ops of a step with what they wait for, what waits for them, and the stream of each place."""

    def __init__(self, problem: PlanProblem, fixed: _Fixed) -> None:
        self._problem, self._workload, self._fixed = problem, problem.workload, fixed
        index = self._workload.index
        self._waits = [[(index[dep.op], dep.lag) for dep in op.after] for op in self._workload.ops]
        self.readers: list[list[int]] = [[] for _ in self._waits]
        self._lags: list[list[int]] = [[] for _ in self._waits]
        for at, needs in enumerate(self._waits):
            for before, lag in needs:
                self.readers[before].append(at)
                self._lags[before].append(lag)
        self.streams = _streams(self._workload)
        self._on_stream = {at: (place, k) for place, ops in self.streams.items() for k, at in enumerate(ops)}
        self._comm: dict[int, list[int]] = {}
        for at, (op, places) in enumerate(zip(self._workload.ops, self._workload.op_places, strict=True)):
            for place in places if op.is_comm else ():
                self._comm.setdefault(place, []).append(at)

    def between(self, place: int, a: int, b: int) -> list[int] | None:
        """The exposed comm-ops between two compute-ops of a stream, one of which waits for the other; None if the
        second compute-op waits for anything else.
        """
        chain: list[int] = []
        now, open_ = b, set()
        while True:
            # What the stream ran before the first compute-op has ended anyway.
            needs = [one for one in self._waits[now] if not self._is_earlier(*one, a)]
            open_ |= {before for before, _ in needs if before != a}
            if any(lag for _, lag in needs):
                return None
            if not open_:
                # On a stream the second compute-op follows by itself; a comm-op must wait for the first one.
                return chain[::-1] if now == b or needs else None
            # Of several that are waited for, the last one waits for the others.
            last = [at for at in open_ if open_ <= {at, *(before for before, _ in self._waits[at])}]
            if len(last) != 1:
                return None
            now = last[0]
            open_.remove(now)
            op = self._workload.ops[now]
            if not op.is_comm or self._workload.op_places[now] != (place,) or self._fixed.fastest(op) < 0:
                return None
            chain.append(now)

    def _is_earlier(self, before: int, lag: int, a: int) -> bool:
        """Whether an op is a compute-op on the stream of another one, and comes before it."""
        place, number = self._on_stream.get(before, (-1, -1))
        return place >= 0 and place == self._on_stream[a][0] and (lag > 0 or number < self._on_stream[a][1])

    def free_of_conflicts(self, place: int, stream: list[int], chains: list[list[int] | None]) -> list[bool]:
        """For each pair of neighbors on the stream whether no long comm-op may hold up those between them."""
        ops, count = self._workload.ops, len(stream)
        exposed = {at for chain in chains for at in chain or ()}
        # Layers and micro-batches have the same options.
        kinds = {id(self._problem.options[ops[at].name]): ops[at] for at in exposed}
        channels = {c for op in kinds.values() for motif in self._fixed.motifs(op) for c in motif.channels}
        short_us = SHORT * sum(ops[at].duration_us for at in stream) / max(count, 1)
        position = {at: k for k, at in enumerate(stream)}
        held = np.zeros(2 * count + 1, np.int64)
        for at in self._comm.get(place, ()) if exposed else ():
            options = self._problem.options[ops[at].name]
            if at in exposed or options[0].total_us <= short_us:
                continue
            used = {c for option in options for task in option.tasks for c in task.channels}
            if is_queued(ops[at]) or not used.isdisjoint(channels):
                begin, end = self._before(at, position, count), self._after(at, position, count)
                begin = max(begin, end - count, -count)
                held[begin % count] += 1
                held[begin % count + max(end - begin, 0)] -= 1
        busy = np.cumsum(held)[: 2 * count]
        return [not (busy[k] or busy[k + count]) for k in range(count - 1)]

    def _before(self, at: int, position: dict[int, int], count: int) -> int:
        """The last position on a stream that a comm-op comes after; those of the iteration before are negative."""
        found = [-2 * count]
        for before, lag in self._waits[at]:
            if before in position:
                found.append(position[before] - lag * count)
            elif self._workload.ops[before].is_comm:
                found.append(self._before(before, position, count) - lag * count)
        return max(found)

    def _after(self, at: int, position: dict[int, int], count: int) -> int:
        """The first position on a stream that waits for a comm-op; those of the next iteration are above `count`."""
        found = [2 * count]
        for after, lag in zip(self.readers[at], self._lags[at], strict=True):
            if after in position:
                found.append(position[after] + lag * count)
            elif self._workload.ops[after].is_comm:
                found.append(self._after(after, position, count) + lag * count)
        return min(found)


def _streams(workload: Workload) -> dict[int, list[int]]:
    """The compute-ops of each place in order, for places with one stream whose compute-ops are at no other place."""
    found: dict[int, list[int]] = {}
    streams: dict[int, set[str]] = {}
    shared: set[int] = set()
    for at, (op, places) in enumerate(zip(workload.ops, workload.op_places, strict=True)):
        if not op.is_comm:
            for place in places:
                found.setdefault(place, []).append(at)
                streams.setdefault(place, set()).add(op.stream)
            if len(places) > 1 or op.durations_us:
                shared.update(places)
    return {place: ops for place, ops in found.items() if place not in shared and len(streams[place]) == 1}
