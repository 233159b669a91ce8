# SPDX-License-Identifier: Apache-2.0
"""Simulates a plan's iteration link by link: every motif at its exact size, contending with all others for the links.

The search takes the cost of each motif by itself, interpolated on a grid of sizes, and has motifs of different places
take turns on the links that they share. Here every motif is simulated at its own size. A link belongs to one channel
and a motif holds its channels at the ends of its places (`resources`), so two motifs can meet on a link only if they
hold no common end (stages of a pipeline that share a spine, say). A motif that meets no other takes the time that it
takes alone, which is exact. Motifs that can meet become one set of transfers over several iterations, with everything
else as work between them, and the simulator says when each iteration ends. A motif still starts on all its ranks at
once, when the plan's order and its dependencies let it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...errors import Infeasible, InvalidInput
from ...workload.ordering import in_order
from ..algebra.nodes import is_queued, nodes_of
from ..costs.costs import CostModel, Motion, SimulatedCosts, simulated_costs, simulator_of
from .link_turns import TURN_US, LinkTurn
from .merge import Merge, Transfers, contention_on, transfers_of
from .problem import MotifTask, Option, PlanProblem
from .resources import op_ends
from .schedule import Scheduler, StepSchedule

FIRST_ITERATIONS = 4
MAX_ITERATIONS = 32
MAX_TRANSFERS = 12_000_000
SETTLED = 1e-6
"""Two iterations whose times differ by less than this share are the steady state."""

Node = tuple[int, int, int]
"""Iteration, node of the workload, and task of a comm-op; -1 for a compute-op at a place."""
TaskId = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RetimedPlan:
    """The steady-state iteration time by simulation, and how it was found."""

    period_us: float
    meeting: int = 0
    """The number of motifs of an iteration that can meet another one on a link."""
    transfers: int = 0
    iterations: int = 0
    contention: str = ""
    settled: bool = True
    """Whether iterations reached a constant time; else the period is the mean over the later half of them."""
    spans_us: Mapping[TaskId, float] = field(default_factory=dict)
    """The time of each motif that can meet another one, from its launch to its end, by op and task; of the last
    iteration that counts."""


def retime(
    schedule: StepSchedule,
    problem: PlanProblem,
    cluster: Cluster,
    costs: CostModel | None = None,
    *,
    turns: Sequence[LinkTurn] = (),
) -> RetimedPlan:
    """Simulate a schedule link by link.

    Args:
        schedule: the schedule.
        problem: the problem that it solves.
        cluster: the cluster.
        costs: the model that the problem was costed with; None means the simulator's. A measured motif keeps its
            measured time, unless it meets another one and the program of its algorithm is known.
        turns: the turns on links that are enforced; without any, all motifs that meet share their links.

    Returns:
        The iteration time.

    Raises:
        Infeasible: the contending motifs have too many transfers.
    """
    model = costs if costs is not None else simulated_costs(cluster)
    alone = _exact(schedule, problem, model)
    meeting = _meeting(alone, cluster, simulator_of(model))
    if not meeting:
        first = [0] * len(schedule.choice)
        us = Scheduler(alone).period_us(first, schedule.order, schedule.shift, serial=schedule.serial)
        return RetimedPlan(period_us=us)
    return _Unrolled(schedule, alone, cluster, meeting, turns).run()


def _exact(schedule: StepSchedule, problem: PlanProblem, model: CostModel) -> PlanProblem:
    """The problem with the chosen options alone, and each motif with the cost of its exact size."""
    options: dict[str, tuple[Option, ...]] = {}
    known: dict[tuple[int, int], tuple[Option, ...]] = {}
    for op, chosen in zip(problem.workload.comm_ops, schedule.choice, strict=True):
        # Layers and micro-batches have the same options, and must go on doing so: what compiles them counts on it.
        key = (id(problem.options[op.name]), chosen)
        if key in known:
            options[op.name] = known[key]
            continue
        option = problem.options[op.name][chosen]
        tasks = tuple(
            task
            if task.motion is None
            else replace(
                task,
                duration_us=task.launch_us + model.cost(task.motion, task.nbytes, task.algorithm, exact=True).us,
                shared=(),
            )
            for task in option.tasks
        )
        options[op.name] = known[key] = (replace(option, tasks=tasks),)
    return replace(problem, options=options)


def _tasks(problem: PlanProblem) -> dict[TaskId, MotifTask]:
    workload = problem.workload
    return {
        (workload.index[op.name], at): task
        for op in workload.comm_ops
        for at, task in enumerate(problem.options[op.name][0].tasks)
    }


def _meeting(alone: PlanProblem, cluster: Cluster, costs: SimulatedCosts) -> dict[TaskId, Transfers]:
    """The motifs that can meet another one on a link, as transfers."""
    ends = [frozenset(held) for held in op_ends(alone.workload)]
    sorts: dict[tuple[frozenset[int], Motion, float, str], list[TaskId]] = {}
    for (op, at), task in _tasks(alone).items():
        if task.motion is not None:
            sorts.setdefault((ends[op], task.motion, task.nbytes, task.algorithm), []).append((op, at))
    made: dict[tuple[Motion, float, str], Transfers | None] = {}

    def transfers(motion: Motion, nbytes: float, algorithm: str) -> Transfers | None:
        key = (motion, nbytes, algorithm)
        if key not in made:
            made[key] = transfers_of(motion, nbytes, algorithm, cluster, costs)
        return made[key]

    use = _LinkSets(costs)
    found: dict[TaskId, Transfers] = {}
    for one, other in combinations(sorts, 2):
        if one[0].isdisjoint(other[0]) and not set(one[1].channels).isdisjoint(other[1].channels):
            if use.apart(one[1:], other[1:]):
                continue
            left, right = transfers(*one[1:]), transfers(*other[1:])
            if left is not None and right is not None and not left.links.isdisjoint(right.links):
                found |= dict.fromkeys(sorts[one], left) | dict.fromkeys(sorts[other], right)
    return found


class _LinkSets:
    """The links of motifs as their loads tell them, so that transfers are made only of motifs that meet."""

    def __init__(self, costs: SimulatedCosts) -> None:
        self._costs = costs
        self._number: dict[bytes, int] = {}
        self._links: list[frozenset[int]] = []
        self._of: dict[tuple[Motion, float, str], int] = {}
        self._apart: dict[tuple[int, int], bool] = {}

    def apart(self, one: tuple[Motion, float, str], other: tuple[Motion, float, str]) -> bool:
        """Whether two motifs are known to use no common link."""
        # Loads leave multicasts out.
        if self._costs.cluster.multicasts:
            return False
        pair = (self._set(one), self._set(other))
        if min(pair) < 0:
            return False
        if pair not in self._apart:
            self._apart[pair] = self._links[pair[0]].isdisjoint(self._links[pair[1]])
        return self._apart[pair]

    def _set(self, motif: tuple[Motion, float, str]) -> int:
        if motif not in self._of:
            try:
                links = self._costs.link_loads(*motif).links
            except InvalidInput:
                self._of[motif] = -1
                return -1
            self._of[motif] = self._number.setdefault(links.tobytes(), len(self._links))
            if len(self._number) > len(self._links):
                self._links.append(frozenset(links.tolist()))
        return self._of[motif]


class _Unrolled:
    """Some iterations of a schedule as one set of transfers."""

    def __init__(
        self,
        schedule: StepSchedule,
        alone: PlanProblem,
        cluster: Cluster,
        meeting: Mapping[TaskId, Transfers],
        turns: Sequence[LinkTurn],
    ) -> None:
        self._schedule, self._workload, self._cluster, self._meeting = schedule, alone.workload, cluster, meeting
        self._tasks = _tasks(alone)
        self._tasks_of: dict[int, list[int]] = {}
        for op, task in self._tasks:
            self._tasks_of.setdefault(op, []).append(task)
        self._nodes = nodes_of(self._workload)
        self._needs = self._nodes.all_waits()
        self._ends = op_ends(self._workload)
        self._contention = contention_on(cluster, meeting.values())
        self._turns: dict[TaskId, list[LinkTurn]] = {}
        for turn in turns:
            self._turns.setdefault((turn.op, turn.task), []).append(turn)

    def run(self) -> RetimedPlan:
        """Simulate more and more iterations until one takes as long as the one before it."""
        tail = max(1, *self._schedule.shift)
        per_iteration = sum(moves.count for moves in self._meeting.values()) + 2 * len(self._tasks)
        most = min(MAX_ITERATIONS + tail, MAX_TRANSFERS // per_iteration)
        iterations = FIRST_ITERATIONS - 1 + tail
        if iterations > most:
            raise Infeasible(
                f"{per_iteration} transfers in each of {iterations} iterations are more than {MAX_TRANSFERS}"
            )
        while True:
            # The last iterations lack the motifs that later iterations would have pulled ahead into them.
            finish, transfers, spans_us = self._finish(iterations, iterations - tail - 1)
            steps = np.diff(finish[: iterations - tail])
            settled = bool(abs(steps[-1] - steps[-2]) <= SETTLED * steps[-1])
            if settled or iterations == most:
                later = steps[len(steps) // 2 :]
                return RetimedPlan(
                    period_us=float(steps[-1] if settled else later.mean()), meeting=len(self._meeting),
                    transfers=transfers, iterations=iterations, contention=self._contention, settled=settled,
                    spans_us=spans_us,
                )  # fmt: skip
            iterations = min(2 * iterations, most)

    def _finish(self, iterations: int, shown: int) -> tuple[NDArray[np.float64], int, dict[TaskId, float]]:
        """The time at which everything of each iteration has ended, the number of transfers, and how long the meeting
        motifs of iteration `shown` took.
        """
        merge = Merge(self._cluster, self._contention)
        waits = self._waits(iterations)
        end: dict[Node, int] = {}
        began: dict[Node, int] = {}
        turns = {node: [*before, *self._given(node, iterations)] for node, before in waits.items()}
        for node in in_order(turns):
            _, at, task = node
            op = self._nodes.op[at]
            needs = [end[before] for before in waits[node]]
            given = [end[before] for before in self._given(node, iterations)]
            if given:
                needs.append(merge.work(given, TURN_US))
            if task < 0:
                end[node] = merge.work(needs, self._nodes.us[at])
            elif (op, task) in self._meeting:
                start = merge.work(needs, self._tasks[op, task].launch_us)
                end[node] = merge.move(self._meeting[op, task], start)
                began[node] = start
            else:
                end[node] = merge.work(needs, self._tasks[op, task].duration_us)
        times = merge.end_us()
        finish = np.zeros(iterations)
        for (iteration, _, _), number in end.items():
            finish[iteration] = max(finish[iteration], times[number])
        spans_us = {}
        for node, start in began.items():
            if node[0] == shown:
                key = (self._nodes.op[node[1]], node[2])
                spans_us[key] = float(times[end[node]] - times[start]) + self._tasks[key].launch_us
        return finish, merge.count, spans_us

    def _waits(self, iterations: int) -> dict[Node, list[Node]]:
        """For every node the nodes that must have ended: by dependencies, program order and the plan's order."""
        waits: dict[Node, list[Node]] = {}
        for iteration in range(iterations):
            for at, before in enumerate(self._needs):
                needs = [
                    node for other, lag in before if iteration >= lag for node in self._parts(iteration - lag, other)
                ]
                for node in self._parts(iteration, at):
                    inner = self._tasks[self._nodes.op[at], node[2]].after if node[2] >= 0 else ()
                    waits[node] = [*needs, *((iteration, at, task) for task in inner)]
        held: dict[tuple[int, str], Node] = {}
        shifts = self._schedule.shift
        for window in range(-max(shifts), iterations - min(shifts)):
            for (op, task), shift in zip(self._schedule.order, shifts, strict=True):
                node = (window + shift, self._nodes.of_op[op][0], task)
                if not 0 <= node[0] < iterations:
                    continue
                for resource in self._resources(op, task):
                    if resource in held:
                        waits[node].append(held[resource])
                    held[resource] = node
        return waits

    def _given(self, node: Node, iterations: int) -> list[Node]:
        """The motifs of other groups that must have ended before a motif has its turn on a link."""
        iteration, at, task = node
        return [
            (iteration - turn.lag, self._nodes.of_op[turn.behind_op][0], turn.behind_task)
            for turn in self._turns.get((self._nodes.op[at], task), ())
            if 0 <= iteration - turn.lag < iterations
        ]

    def _parts(self, iteration: int, at: int) -> list[Node]:
        return [(iteration, at, task) for task in self._tasks_of.get(self._nodes.op[at], (-1,))]

    def _resources(self, op: int, task: int) -> list[tuple[int, str]]:
        held = [(end, channel) for end in self._ends[op] for channel in self._tasks[op, task].channels]
        if self._schedule.serial and is_queued(self._workload.ops[op]):
            held += [(place, "queue") for place in self._workload.op_places[op]]
        return held
