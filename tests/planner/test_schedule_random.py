"""The native scheduler against a slow one written from the definition of the time model."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from stretto.errors import Infeasible
from stretto.planner.example import random_problem
from stretto.planner.problem import Problem
from stretto.planner.schedule import DISCIPLINES, Scheduler, check_order

Node = tuple[int, int]
"""(op, task); task -1 is a compute-op or the end of a comm-op."""
At = tuple[Node, int]
"""A node of an iteration."""


class Reference:
    """Every rule looked up when it is needed; nothing is compiled."""

    def __init__(self, problem: Problem, choice: Sequence[int], serial: bool) -> None:
        self.workload = workload = problem.workload
        self.tasks: dict[Node, float] = {}
        self.held: dict[Node, set[tuple[int, str]]] = {}
        self.needs: dict[Node, list[At]] = {}
        chosen = dict(zip((op.name for op in workload.comm_ops), choice, strict=True))
        stream: dict[tuple[int, str], list[int]] = {}
        for at, op in enumerate(workload.ops):
            deps = [((workload.index[dep.op], -1), dep.lag) for dep in op.after]
            places = [k for k, place in enumerate(workload.places) if workload.takes_part(op, place)]
            if not op.is_comm:
                self.needs[at, -1] = deps
                for place in places:
                    stream.setdefault((place, op.stream), []).append(at)
                continue
            option = problem.options[op.name][chosen[op.name]]
            for t, task in enumerate(option.tasks):
                self.tasks[at, t] = task.duration_us
                self.needs[at, t] = [((at, b), 0) for b in task.after] or deps
                self.held[at, t] = {(place, channel) for place in places for channel in task.channels}
                if serial:
                    self.held[at, t] |= {(place, "any") for place in places}
            self.needs[at, -1] = [((at, t), 0) for t in range(len(option.tasks))]
        for ops in stream.values():
            for k, at in enumerate(ops):
                self.needs[at, -1].append(((ops[k - 1], -1), 0 if k else 1))

    def us(self, node: Node) -> float:
        return self.tasks[node] if node in self.tasks else self.workload.ops[node[0]].duration_us

    def tail(self, iterations: int) -> dict[At, float]:
        after: dict[At, set[At]] = {(v, i): set() for v in self.needs for i in range(iterations)}
        for v, needs in self.needs.items():
            for i in range(iterations):
                for u, lag in needs:
                    if i >= lag:
                        after[u, i - lag].add((v, i))
        found: dict[At, float] = {}
        for at in TopologicalSorter(after).static_order():
            found[at] = max((found[x] for x in after[at]), default=0.0) + self.us(at[0])
        return found

    def list_schedule(self, iterations: int, discipline: str, priority: dict[int, float]) -> dict[At, float]:
        """Moment by moment: what can end ends, what can start starts, the most urgent first."""
        tail = self.tail(iterations)

        def urgency(at: At) -> tuple[float, ...]:
            (op, task), i = at
            program = (i, op, task)
            if discipline == "critical_path":
                return (-tail[at], *program)
            if discipline == "lifo":
                return (-i, -op, task)
            return (priority[op], *program)

        start: dict[At, float] = {}
        end: dict[At, float] = {}
        waiting = {(v, i) for v in self.needs for i in range(iterations)}
        now = 0.0
        while waiting:
            moved = True
            while moved:
                moved = False
                done = {at for at, when in end.items() if when <= now}
                busy = {r for at, when in end.items() if when > now and at[0] in self.tasks for r in self.held[at[0]]}
                can = [
                    (v, i) for v, i in waiting if all(i < lag or (u, i - lag) in done for u, lag in self.needs[v])
                ]
                plain = [at for at in can if at[0] not in self.tasks]
                fits = sorted((at for at in can if at[0] in self.tasks and not busy & self.held[at[0]]), key=urgency)
                for at in plain or fits[:1]:
                    start[at], end[at] = now, now + self.us(at[0])
                    waiting.discard(at)
                    moved = True
            now = min((when for when in end.values() if when > now), default=now)
        return start

    def replay(self, order: Sequence[Node], shift: Sequence[int], windows: int) -> list[float]:
        """Ends of the iterations, window after window; CycleError when it can never be done."""
        reach = max((abs(s) for s in shift), default=0)
        waits: dict[At, set[At]] = {}
        for v, needs in self.needs.items():
            for i in range(windows):
                waits[v, i] = {(u, i - lag) for u, lag in needs if i >= lag}
        last: dict[tuple[int, str], At] = {}
        for w in range(-reach, windows + reach):
            for task, s in zip(order, shift, strict=True):
                if not 0 <= w + s < windows:
                    continue
                for r in self.held[task]:
                    if r in last:
                        waits[task, w + s].add(last[r])
                    last[r] = (task, w + s)
        end: dict[At, float] = {}
        for at in TopologicalSorter(waits).static_order():
            end[at] = max((end[x] for x in waits[at]), default=0.0) + self.us(at[0])
        return [max(end[v, i] for v in self.needs) for i in range(windows)]


def drawn(seed: int) -> tuple[Problem, Scheduler, tuple[int, ...], Random]:
    draw = Random(seed)
    problem = random_problem(seed, num_comm=draw.randint(1, 6), two_places=draw.random() < 0.5)
    choice = tuple(draw.randrange(len(problem.options[op.name])) for op in problem.workload.comm_ops)
    return problem, Scheduler(problem), choice, draw


@settings(max_examples=80, deadline=None)
@given(seed=some.integers(0, 10_000), serial=some.booleans(), discipline=some.sampled_from(DISCIPLINES[:3]))
def test_list_schedules_are_those_of_the_definition(seed: int, serial: bool, discipline: str) -> None:
    problem, scheduler, choice, draw = drawn(seed)
    workload = problem.workload
    numbers = [float(draw.randrange(4)) for _ in workload.comm_ops]
    given_numbers = numbers if discipline == "priority" else None
    arguments = scheduler._arguments(choice, discipline, given_numbers, serial, 4)
    op_start, task_start = scheduler.native.unrolled(*arguments)
    by_op = {workload.index[op.name]: x for op, x in zip(workload.comm_ops, numbers, strict=True)}
    expected = Reference(problem, choice, serial).list_schedule(4, discipline, by_op)
    tasks = scheduler.tasks(choice)
    for i in range(4):
        for at, op in enumerate(workload.ops):
            if not op.is_comm:
                assert op_start[i * len(workload.ops) + at] == expected[(at, -1), i]
        for k, task in enumerate(tasks):
            assert task_start[i * len(tasks) + k] == expected[task, i]


@settings(max_examples=60, deadline=None)
@given(seed=some.integers(0, 10_000), serial=some.booleans(), discipline=some.sampled_from(DISCIPLINES))
def test_the_period_is_what_replaying_the_order_settles_at(seed: int, serial: bool, discipline: str) -> None:
    problem, scheduler, choice, _ = drawn(seed)
    numbers = [float(k) for k in range(len(choice))] if discipline == "priority" else None
    found = scheduler.schedule(choice, discipline=discipline, priority=numbers, serial=serial)
    ends = Reference(problem, choice, serial).replay(found.order, found.shift, 200)
    # 60 is a multiple of every small number of iterations after which a pattern can repeat.
    assert (ends[190] - ends[130]) / 60 == pytest.approx(found.period_us, rel=1e-9)
    assert ends[0] == pytest.approx(found.first_us, rel=1e-12)
    fast = scheduler.evaluate(choice, discipline=discipline, priority=numbers, serial=serial)
    assert fast == pytest.approx(found.period_us, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=some.integers(0, 10_000), serial=some.booleans())
def test_the_steady_state_keeps_every_rule(seed: int, serial: bool) -> None:
    problem, scheduler, choice, _ = drawn(seed)
    found = scheduler.schedule(choice, serial=serial)
    reference = Reference(problem, choice, serial)
    rows = zip(found.op, found.task, found.iteration, found.start_us, found.end_us, strict=True)
    start = {(int(o), int(t)): s - i * found.period_us for o, t, i, s, _ in rows}
    end = {node: s + reference.us(node) for node, s in start.items()}
    for op in problem.workload.comm_ops:
        at = problem.workload.index[op.name]
        end[at, -1] = max(e for node, e in end.items() if node[0] == at)
    slack = 1e-7 * found.period_us
    for node, when in start.items():
        for before, lag in reference.needs[node]:
            assert when >= end[before] - lag * found.period_us - slack
    for resource in {r for held in reference.held.values() for r in held}:
        users = [v for v, held in reference.held.items() if resource in held]
        mine = sorted((start[v] % found.period_us, reference.us(v)) for v in users)
        for (a, us), (b, _) in zip(mine, [*mine[1:], (mine[0][0] + found.period_us, 0.0)], strict=True):
            assert a + us <= b + slack
    check_order(problem.workload, found)
    assert list(found.seq) == sorted(found.seq)


@settings(max_examples=100, deadline=None)
@given(seed=some.integers(0, 10_000))
def test_any_order_is_replayed_or_refused_as_the_definition_says(seed: int) -> None:
    problem, scheduler, choice, draw = drawn(seed)
    order = list(scheduler.tasks(choice))
    draw.shuffle(order)
    shift = [draw.choice((0, 0, 0, 1, -1)) for _ in order]
    reference = Reference(problem, choice, False)
    try:
        found = scheduler.replay(choice, order, shift)
    except Infeasible:
        with pytest.raises(ValueError, match="cycle"):
            reference.replay(order, shift, 24)
        return
    ends = reference.replay(order, shift, 200)
    assert (ends[190] - ends[130]) / 60 == pytest.approx(found.period_us, rel=1e-9)
    assert np.all(found.end_us >= found.start_us)
