# SPDX-License-Identifier: Apache-2.0
"""The native scheduler against a slow one written from the definition of the time model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from judges.drawn_steps import random_problem

from stretto.errors import Infeasible
from stretto.planner.schedule.problem import Option, PlanProblem
from stretto.planner.schedule.schedule import DISCIPLINES, Scheduler, check_order
from stretto.workload import Op

Node = tuple[int, int]
"""(op, task) of a comm-op, (op, -1) for its end; (op, -2 - place) for a compute-op at a place."""
At = tuple[Node, int]
"""A node of an iteration."""


class Reference:
    """Every rule looked up when it is needed; nothing is compiled."""

    def __init__(self, problem: PlanProblem, choice: Sequence[int], serial: bool) -> None:
        self.workload = workload = problem.workload
        self.tasks: dict[Node, float] = {}
        self.held: dict[Node, dict[tuple[int, str], float]] = {}
        """What every task holds, and for how long from its start."""
        self.needs: dict[Node, list[At]] = {}
        chosen = dict(zip((op.name for op in workload.comm_ops), choice, strict=True))
        where = [
            {k for k, place in enumerate(workload.places) if workload.takes_part(op, place)} for op in workload.ops
        ]
        stream: dict[tuple[int, str], list[Node]] = {}
        first: dict[int, Node] = {}
        self.times: dict[Node, float] = {}

        def parts(name: str, places: set[int]) -> list[Node]:
            """The nodes of an op that something at these places waits for."""
            at = workload.index[name]
            if workload.ops[at].is_comm:
                return [(at, -1)]
            return [(at, -2 - place) for place in sorted(where[at] & places or where[at])]

        for at, op in enumerate(workload.ops):
            places = where[at]
            if not op.is_comm:
                ranks = list(op.ranks or range(workload.num_ranks))
                for place in sorted(places):
                    node = (at, -2 - place)
                    lead = workload.places[place].ranks[0]
                    self.times[node] = op.durations_us[ranks.index(lead)] if op.durations_us else op.duration_us
                    self.needs[node] = [(u, dep.lag) for dep in op.after for u in parts(dep.op, {place})]
                    stream.setdefault((place, op.stream), []).append(node)
                    first.setdefault(place, node)
                continue
            deps = [(u, dep.lag) for dep in op.after for u in parts(dep.op, places)]
            option = problem.options[op.name][chosen[op.name]]
            for t, task in enumerate(option.tasks):
                self.tasks[at, t] = task.duration_us
                self.needs[at, t] = [((at, b), 0) for b in task.after] or deps
                held = {
                    (place, f"{way} {channel}") for channel in task.channels for place, way in self.ends(op, places)
                }
                if serial and op.kind != "send":
                    held |= {(place, "any") for place in places}
                self.held[at, t] = dict.fromkeys(held, task.duration_us) | {(k, "link"): us for k, us in task.shared}
            self.needs[at, -1] = [((at, t), 0) for t in range(len(option.tasks))]
        for nodes in stream.values():
            for k, node in enumerate(nodes):
                self.needs[node].append((nodes[k - 1], 0 if k else 1))
        for at, op in enumerate(workload.ops):
            if op.is_comm and not self.leads_to_compute(at):
                for place in where[at] & set(first):
                    self.needs[first[place]].append(((at, -1), 2))

    def ends(self, op: Op, places: set[int]) -> set[tuple[int, str]]:
        """A collective holds both directions everywhere, a send only one at each end."""
        if op.kind != "send":
            return {(place, way) for place in places for way in ("out", "in")}
        at = {rank: k for k, place in enumerate(self.workload.places) for rank in place.ranks}
        return {(at[a], "out") for a, _ in op.groups} | {(at[b], "in") for _, b in op.groups}

    def leads_to_compute(self, at: int) -> bool:
        """Whether a compute-op waits for this comm-op, directly or by way of others."""
        ops, reached = self.workload.ops, {self.workload.ops[at].name}
        while True:
            more = {op.name for op in ops if any(dep.op in reached for dep in op.after)} | reached
            if any(not self.workload.op(name).is_comm for name in more):
                return True
            if more == reached:
                return False
            reached = more

    def us(self, node: Node) -> float:
        return self.tasks[node] if node in self.tasks else self.times.get(node, 0.0)

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
            if discipline == "fifo":
                return (since[at], *program)
            return (priority[op], *program)

        since: dict[At, float] = {}
        start: dict[At, float] = {}
        end: dict[At, float] = {}
        waiting = {(v, i) for v in self.needs for i in range(iterations)}
        now = 0.0
        while waiting:
            moved = True
            while moved:
                moved = False
                done = {at for at, when in end.items() if when <= now}
                begun = [at for at in end if at[0] in self.tasks]
                busy = {r for at in begun for r, us in self.held[at[0]].items() if start[at] + us > now}
                can = [(v, i) for v, i in waiting if all(i < lag or (u, i - lag) in done for u, lag in self.needs[v])]
                for at in can:
                    since.setdefault(at, now)
                if discipline == "fifo":
                    can = [at for at in can if at[0] not in self.tasks or self.is_next(at, waiting)]
                plain = [at for at in can if at[0] not in self.tasks]
                tasks = [at for at in can if at[0] in self.tasks]
                fits = sorted((at for at in tasks if not busy & self.held[at[0]].keys()), key=urgency)
                for at in plain or fits[:1]:
                    start[at], end[at] = now, now + self.us(at[0])
                    waiting.discard(at)
                    moved = True
            given_back = [start[at] + us for at in end if at[0] in self.tasks for us in self.held[at[0]].values()]
            now = min((when for when in [*end.values(), *given_back] if when > now), default=now)
        return start

    def is_next(self, at: At, waiting: set[At]) -> bool:
        """Whether every earlier task of the communicator has started."""

        def line(node: Node) -> tuple[bool, tuple[tuple[int, ...], ...]]:
            op = self.workload.ops[node[0]]
            return op.kind == "send", op.groups

        return all(
            (other[1], other[0]) >= (at[1], at[0])
            for other in waiting
            if other[0] in self.tasks and line(other[0]) == line(at[0])
        )

    def replay(self, order: Sequence[Node], shift: Sequence[int], windows: int) -> list[float]:
        """Ends of the iterations, window after window; CycleError when it can never be done."""
        reach = max((abs(s) for s in shift), default=0)
        waits: dict[At, dict[At, float]] = {}
        for v, needs in self.needs.items():
            for i in range(windows):
                waits[v, i] = {(u, i - lag): self.us(u) for u, lag in needs if i >= lag}
        last: dict[tuple[int, str], At] = {}
        for w in range(-reach, windows + reach):
            for task, s in zip(order, shift, strict=True):
                if not 0 <= w + s < windows:
                    continue
                for r in self.held[task]:
                    if r in last:
                        mine, before = waits[task, w + s], last[r]
                        mine[before] = max(mine.get(before, 0.0), self.held[before[0]][r])
                    last[r] = (task, w + s)
        start: dict[At, float] = {}
        for at in TopologicalSorter(waits).static_order():
            start[at] = max((start[x] + us for x, us in waits[at].items()), default=0.0)
        return [max(start[v, i] + self.us(v) for v in self.needs) for i in range(windows)]


def sharing(option: Option, draw: Random) -> Option:
    """The option with some of its tasks on links 0 to 2, which other places use as well."""
    tasks = []
    for task in option.tasks:
        part = draw.randrange(1, round(2 * task.duration_us) + 1) / 2
        links = [link for link in range(3) if draw.random() < 0.25]
        tasks.append(replace(task, shared=tuple((link, part) for link in links)))
    return replace(option, tasks=tuple(tasks))


def drawn(seed: int) -> tuple[PlanProblem, Scheduler, tuple[int, ...], Random]:
    """A random step; on two kinds of ranks some compute takes another time on each, some ops are sends in one direction
    or the other, and some tasks meet others on a link for a part of their time.
    """
    draw = Random(seed)
    problem = random_problem(seed, num_comm=draw.randint(1, 6), two_places=draw.random() < 0.5)
    ops = []
    for op in problem.workload.ops:
        if not op.is_comm and draw.random() < 0.3:
            ranks = op.ranks or range(problem.workload.num_ranks)
            each = {half: draw.randrange(0, 9) / 2 for half in (0, 1)}
            op = replace(op, durations_us=tuple(each[rank // 2] for rank in ranks))
        elif not op.is_comm and draw.random() < 0.2:
            # What nobody waits for, and what waits for it.
            op = replace(op, after=op.after[1:])
        elif op.groups and draw.random() < 0.5:
            groups = draw.choice((op.groups, (op.groups[0][::-1],), ((0, 2), (1, 3)), ((2, 0), (3, 1))))
            op = replace(op, kind="send", groups=groups)
        ops.append(op)
    options = {name: tuple(sharing(option, draw) for option in some) for name, some in problem.options.items()}
    problem = replace(problem, workload=replace(problem.workload, ops=tuple(ops)), options=options)
    choice = tuple(draw.randrange(len(problem.options[op.name])) for op in problem.workload.comm_ops)
    return problem, Scheduler(problem), choice, draw


@settings(max_examples=80, deadline=None)
@given(seed=some.integers(0, 10_000), serial=some.booleans(), discipline=some.sampled_from(DISCIPLINES))
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
    nodes = scheduler.nodes
    for i in range(4):
        for k, (op, place) in enumerate(zip(nodes.op, nodes.place, strict=True)):
            if place >= 0:
                assert op_start[i * len(nodes.op) + k] == expected[(op, -2 - place), i]
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
    rows = zip(found.op, found.task, found.place, found.iteration, found.start_us, strict=True)
    start = {(int(o), int(t) if p < 0 else -2 - int(p)): s - i * found.period_us for o, t, p, i, s in rows}
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
        mine = sorted((start[v] % found.period_us, reference.held[v][resource]) for v in users)
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
