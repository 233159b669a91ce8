# SPDX-License-Identifier: Apache-2.0
"""When everything runs: list schedules, the periodic order taken from them, and its steady state.

The time model: a *place* is a class of ranks that no op distinguishes. At each of its places a compute-op holds its
stream for that place's time, and ops of a stream run in program order, iteration after iteration. A comm-op is the
tasks of its chosen option; a task holds its channels at the ends of the op's places, and every link that it shares with
tasks of other places for as long as its bytes take there (`resources`). Communication that no op waits for has ended
two iterations later (`nodes`). A periodic order fixes, for one window of time, the order of the tasks on every channel
and shared link; a task with shift s runs in window w for iteration w + s (1: pulled ahead, -1: pushed back). The
iteration time is the steady-state period of that order, which is exactly the largest ratio of duration to lag over all
circles of waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...errors import Infeasible, InvalidInput, unknown
from ...simulator.timeline import Timeline
from ...workload import Workload
from ..algebra.nodes import Nodes, communicator, is_queued, nodes_of
from .problem import Option, PlanProblem
from .resources import Ends, op_ends

if TYPE_CHECKING:
    from .bounds import PeriodBound

DISCIPLINES = ("critical_path", "lifo", "priority", "fifo")
"""The disciplines in the order of the native module's numbers."""
ITERATIONS = 4
MAX_ITERATIONS = 64
SAME = 1e-9
"""Starts that differ by less than this share of the period are at the same time."""

Choice = Sequence[int] | Mapping[str, int]
"""The option of every comm-op: in program order, or by name (a missing name takes the first option)."""
Priority = Mapping[str, float] | Sequence[float]
"""A number for every comm-op: by name, or in program order."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StepSchedule:
    """The order of a plan and its steady state.

    ``order[k]`` is a task as (position of its op in the workload, position in the option); ``shift[k]`` and ``seq[k]``
    belong to it. Tasks with equal `seq` start together and share no channel. The arrays list one steady-state window,
    sorted by start: compute-ops have task -1 and appear once for each `place`; tasks run at all places of their op
    (place -1). `iteration` is relative to the window's own, and a node that starts in the window may end after it.
    Times count from the start of the window's first compute-op.
    """

    choice: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    shift: tuple[int, ...]
    seq: tuple[int, ...]
    serial: bool
    period_us: float
    first_us: float
    """The end of the first iteration if everything was idle before."""
    op: NDArray[np.int32]
    task: NDArray[np.int32]
    place: NDArray[np.int32]
    iteration: NDArray[np.int32]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    compute_idle: NDArray[np.float64]
    """The share of the period in which no compute-op runs, for each place."""
    exposed_us: NDArray[np.float64]
    """Microseconds of a period in which communication runs and no compute-op does, for each place."""
    comm_idle: NDArray[np.float64]
    """The share of the period in which no motif runs, for each place: the gaps of the communication stream."""
    critical: tuple[tuple[int, int], ...]
    """The circle of ops and tasks that sets the period; empty if a compute stream's own load does."""

    def timeline(self, problem: PlanProblem) -> Timeline:
        """One steady-state window: compute streams and channels of every place, shown at the place's first rank."""
        from .view import timeline

        return timeline(self, problem)

    def __repr__(self) -> str:
        from ...units import format_us

        return (
            f"<Schedule {format_us(self.period_us)}: {len(self.order)} tasks of {len(self.choice)} comm-ops, compute "
            f"idle {100 * float(self.compute_idle.max(initial=0.0)):.1f} %>"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Steady:
    """The steady state of a periodic order as the native module gives it; tasks are numbered in program order."""

    order: NDArray[np.int32]
    shift: NDArray[np.int32]
    period_us: float
    first_us: float
    op_start: NDArray[np.float64]
    task_start: NDArray[np.float64]
    critical: tuple[tuple[int, int], ...]


class Scheduler:
    """A problem compiled once, so that each of its schedules takes microseconds."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        workload = problem.workload
        self._comm = [at for at, op in enumerate(workload.ops) if op.is_comm]
        self._options = [problem.options[op.name] for op in workload.comm_ops]
        self.nodes = nodes_of(workload)
        self._node_place = np.array(self.nodes.place, np.int32)
        self._comm_nodes = np.flatnonzero(self._node_place < 0)
        self.native = _compile(problem, self.nodes)
        self._bounds: dict[tuple[bool, bool], PeriodBound] = {}

    def bound(self, serial: bool = False, *, quick: bool = False) -> PeriodBound:
        """The lower bound on the period of every plan; computed once.

        Args:
            serial: whether a place runs one task of a collective at a time.
            quick: whether a lower one will do, which takes a fraction of the time.

        Returns:
            The bound.
        """
        from .bounds import lower_bound

        if quick and (serial, False) not in self._bounds:
            if (serial, True) not in self._bounds:
                self._bounds[serial, True] = lower_bound(self.problem, serial=serial, whole=False, windows=False)
            return self._bounds[serial, True]
        if (serial, False) not in self._bounds:
            self._bounds[serial, False] = lower_bound(self.problem, serial=serial)
        return self._bounds[serial, False]

    @property
    def greedy(self) -> tuple[int, ...]:
        """For every comm-op the option that is fastest alone, as an execution planner without a schedule chooses."""
        return tuple(min(range(len(o)), key=lambda k, o=o: (o[k].total_us, k)) for o in self._options)  # type: ignore[misc]

    def choice(self, choice: Choice) -> tuple[int, ...]:
        """A choice as a checked tuple of option numbers in program order."""
        names = [op.name for op in self.problem.workload.comm_ops]
        if isinstance(choice, Mapping):
            extra = sorted(set(choice) - set(names))
            if extra:
                raise unknown("comm-op", extra[0], names)
            choice = [choice.get(name, 0) for name in names]
        if len(choice) != len(names):
            raise InvalidInput(f"choice: {len(choice)} for {len(names)} comm-ops")
        for name, chosen, options in zip(names, choice, self._options, strict=True):
            if not 0 <= chosen < len(options):
                raise InvalidInput(f"choice of {name}: must be 0..{len(options) - 1}, not {chosen}")
        return tuple(int(chosen) for chosen in choice)

    def tasks(self, choice: Choice) -> tuple[tuple[int, int], ...]:
        """The (op, task) pairs of a choice, in program order."""
        counts = [len(o[k].tasks) for o, k in zip(self._options, self.choice(choice), strict=True)]
        return tuple((op, task) for op, count in zip(self._comm, counts, strict=True) for task in range(count))

    def evaluate(
        self,
        choice: Choice,
        *,
        discipline: str = "critical_path",
        priority: Priority | None = None,
        serial: bool = False,
        iterations: int = ITERATIONS,
    ) -> float:
        """The period that `schedule` finds, without the schedule.

        Args:
            choice: the option of every comm-op.
            discipline: one of `DISCIPLINES`, see `schedule`.
            priority: a number for every comm-op, the smallest first; only with the discipline ``priority``.
            serial: whether a place runs one task of a collective at a time.
            iterations: iterations of the list schedule, 2..64.

        Returns:
            The period in microseconds.

        Raises:
            InvalidInput: an argument is unknown or out of range.
        """
        return self.native.evaluate(*self._arguments(choice, discipline, priority, serial, iterations))

    def schedule(
        self,
        choice: Choice,
        *,
        discipline: str = "critical_path",
        priority: Priority | None = None,
        serial: bool = False,
        iterations: int = ITERATIONS,
    ) -> StepSchedule:
        """List scheduling over some iterations, and the steady state of the middle one's order.

        Disciplines: ``critical_path`` (the task with the longest path to the end first), ``lifo`` (the last submitted
        of the ready tasks), ``priority`` (the comm-op with the smallest number), ``fifo`` (every communicator strictly
        in program order; of several communicators the one that is ready first).

        Args:
            choice: the option of every comm-op.
            discipline: one of `DISCIPLINES`.
            priority: a number for every comm-op; only with the discipline ``priority``.
            serial: whether a place runs one task of a collective at a time, whatever its channels; sends run beside.
            iterations: iterations of the list schedule, 2..64.

        Returns:
            The schedule.

        Raises:
            InvalidInput: an argument is unknown or out of range.
        """
        arguments = self._arguments(choice, discipline, priority, serial, iterations)
        _, order, shift = self.native.schedule(*arguments)
        return self.settled(self.choice(choice), order, shift, serial=serial)

    def replay(
        self, choice: Choice, order: Sequence[tuple[int, int]], shift: Sequence[int], *, serial: bool = False
    ) -> StepSchedule:
        """The steady state of a given periodic order.

        Args:
            choice: the option of every comm-op.
            order: every (op, task) pair of the choice once, in the order in which channels serve them.
            shift: for each of them the number of iterations by which it runs ahead, within -64..64.
            serial: whether a place runs one task of a collective at a time.

        Returns:
            The schedule.

        Raises:
            InvalidInput: order or shift do not fit the choice.
            Infeasible: tasks of the order wait for each other in a circle.
        """
        choice = self.choice(choice)
        return self._view(choice, self._steady(choice, *self.numbered(choice, order, shift), serial), serial)

    def numbered(
        self, choice: tuple[int, ...], order: Sequence[tuple[int, int]], shift: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """An order as numbers of the choice's tasks in program order, and the shift of each task, for `settled`.

        Args:
            choice: the option of every comm-op in program order.
            order: every (op, task) pair of the choice once.
            shift: for each of them the number of iterations by which it runs ahead.

        Returns:
            The order, and the shifts by task.

        Raises:
            InvalidInput: order or shift do not fit the choice.
        """
        flat = {task: at for at, task in enumerate(self.tasks(choice))}
        numbers = np.array([flat.get(task, -1) for task in order], np.int32)
        fits = len(order) == len(shift) == len(flat) and (np.sort(numbers) == np.arange(len(flat))).all()
        if not fits:
            raise InvalidInput(f"order: must name each of the {len(flat)} tasks once, with a shift for each")
        of_task = np.zeros(len(flat), np.int32)
        of_task[numbers] = shift
        return numbers, of_task

    def period_us(
        self, choice: Choice, order: Sequence[tuple[int, int]], shift: Sequence[int], *, serial: bool = False
    ) -> float:
        """The period of `replay` alone, without the schedule.

        Args:
            choice: the option of every comm-op.
            order: every (op, task) pair of the choice once.
            shift: for each of them the number of iterations by which it runs ahead.
            serial: whether a place runs one task of a collective at a time.

        Returns:
            The period in microseconds.

        Raises:
            InvalidInput: order or shift do not fit the choice.
            Infeasible: tasks of the order wait for each other in a circle.
        """
        choice = self.choice(choice)
        return self._steady(choice, *self.numbered(choice, order, shift), serial, cold=False).period_us

    def settled(
        self, choice: tuple[int, ...], order: NDArray[np.int32], shift: NDArray[np.int32], *, serial: bool = False
    ) -> StepSchedule:
        """`in_time_order` of `replay`, for an order of numbers of tasks as the native module has it.

        Args:
            choice: the option of every comm-op in program order.
            order: the number of each task of the choice in program order, once.
            shift: by task in program order.
            serial: whether a place runs one task of a collective at a time.

        Returns:
            The schedule.

        Raises:
            Infeasible: tasks of the order wait for each other in a circle.
        """
        first = self._steady(choice, order, shift, serial, cold=False)
        window = _windows(first.task_start, first.period_us)
        start = np.maximum(first.task_start - window * first.period_us, 0.0)
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        again: _Steady | None = None
        with suppress(Infeasible):  # tasks without duration may swap places at the cut
            again = self._steady(
                choice, np.lexsort((position, start)).astype(np.int32), (-window).astype(np.int32), serial
            )
        if again is None or again.period_us > first.period_us * (1 + SAME):
            again = self._steady(choice, order, shift, serial)
        return self._view(choice, again, serial)

    def _steady(
        self, choice: tuple[int, ...], order: NDArray[np.int32], shift: NDArray[np.int32], serial: bool, *,
        cold: bool = True,
    ) -> _Steady:  # fmt: skip
        most = int(np.abs(shift).max(initial=0))
        if most > MAX_ITERATIONS:
            raise InvalidInput(f"shift: must be within {MAX_ITERATIONS} iterations")
        period, op_start, task_start, ends, critical_op, critical_task, circle, behind = self.native.replay(
            self._native_choice(choice), order, shift, serial, 2 + 2 * most if cold else 0
        )
        if len(circle):
            raise Infeasible(self._deadlock(circle, behind))
        return _Steady(
            order=order, shift=shift, period_us=period, first_us=float(ends[0]) if cold else 0.0, op_start=op_start,
            task_start=task_start,
            critical=tuple(zip((self.nodes.op[node] for node in critical_op), critical_task.tolist(), strict=True)),
        )  # fmt: skip

    def _view(self, choice: tuple[int, ...], found: _Steady, serial: bool) -> StepSchedule:
        nodes, period = self.nodes, found.period_us
        chosen = [o[k].tasks for o, k in zip(self._options, choice, strict=True)]
        tasks = self.tasks(choice)
        compute = np.flatnonzero(self._node_place >= 0)
        ops = np.concatenate([np.array(nodes.op, np.int32)[compute], np.array([op for op, _ in tasks], np.int32)])
        places = np.concatenate([self._node_place[compute], np.full(len(tasks), -1, np.int32)])
        parts = np.concatenate([np.full(len(compute), -1, np.int32), np.array([at for _, at in tasks], np.int32)])
        start = np.concatenate([found.op_start[compute], found.task_start])
        lasts = np.array([task.duration_us for of_op in chosen for task in of_op], np.float64)
        length = np.concatenate([np.array(nodes.us, np.float64)[compute], lasts])
        window = _windows(start, period)
        start = np.maximum(start - window * period, 0.0)
        channels = [set(task.channels) for of_op in chosen for task in of_op]
        listed = found.order.tolist()
        seq = _sequence(start[len(compute) :][found.order].tolist(), [channels[k] for k in listed], period)
        sort = np.lexsort((places, ops, start))
        ops, parts, places, window = ops[sort], parts[sort], places[sort], window[sort]
        start, end = start[sort], (start + length)[sort]
        idle, exposed, gaps = _shares(self.problem.workload, ops, places, start, end, period)
        return StepSchedule(
            choice=choice, order=tuple(tasks[k] for k in listed), shift=tuple(found.shift[found.order].tolist()),
            seq=seq, serial=serial, period_us=period, first_us=found.first_us, op=ops, task=parts, place=places,
            iteration=(-window).astype(np.int32), start_us=start, end_us=end, compute_idle=idle, exposed_us=exposed,
            comm_idle=gaps, critical=found.critical,
        )  # fmt: skip

    def in_time_order(self, found: StepSchedule) -> StepSchedule:
        """The same order on every channel, cut where the window begins and sorted by start."""
        place = {task: k for k, task in enumerate(found.order)}
        listed = [
            (float(start), place[int(op), int(task)], int(iteration))
            for op, task, iteration, start in zip(found.op, found.task, found.iteration, found.start_us, strict=True)
            if task >= 0
        ]
        listed.sort()
        order = [found.order[k] for _, k, _ in listed]
        try:
            again = self.replay(found.choice, order, [s for _, _, s in listed], serial=found.serial)
        except Infeasible:  # tasks without duration may swap places at the cut
            return found
        return again if again.period_us <= found.period_us * (1 + SAME) else found

    def _native_choice(self, choice: tuple[int, ...]) -> NDArray[np.int32]:
        chosen = np.zeros(len(self.nodes.op), np.int32)
        chosen[self._comm_nodes] = choice
        return chosen

    def _arguments(
        self, choice: Choice, discipline: str, priority: Priority | None, serial: bool, iterations: int
    ) -> tuple[NDArray[np.int32], int, NDArray[np.float64], float, bool, int]:
        choice = self.choice(choice)
        if discipline not in DISCIPLINES:
            raise unknown("discipline", discipline, DISCIPLINES)
        if not 2 <= iterations <= MAX_ITERATIONS:
            raise InvalidInput(f"iterations: must be 2..{MAX_ITERATIONS}, not {iterations}")
        if (discipline == "priority") != (priority is not None):
            raise InvalidInput("priority: goes with discipline='priority', and only with it")
        names = [op.name for op in self.problem.workload.comm_ops]
        values: list[float] = []
        if isinstance(priority, Mapping):
            missing = [name for name in names if name not in priority]
            if missing:
                raise InvalidInput(f"priority: {missing[0]!r} has none")
            values = [float(priority[name]) for name in names]
        elif priority is not None:
            values = [float(value) for value in priority]
            if len(values) != len(names):
                raise InvalidInput(f"priority: {len(values)} for {len(names)} comm-ops")
        if any(value != value for value in values):
            raise InvalidInput("priority: must be numbers")
        of_op = dict(zip(self._comm, values, strict=False))
        of_task = np.array([of_op[op] for op, _ in self.tasks(choice)] if values else [], np.float64)
        return self._native_choice(choice), DISCIPLINES.index(discipline), of_task, 0.0, serial, iterations

    def _deadlock(self, circle: NDArray[np.int32], behind: NDArray[np.int32]) -> str:
        names = [self.problem.workload.ops[self.nodes.op[node]].name for node in circle]
        k = int(np.flatnonzero(behind)[0])
        late, early = names[k], names[(k + 1) % len(names)]
        return f"order: {late!r} is behind {early!r} on a channel, but {early!r} waits for {late!r}"


def check_order(workload: Workload, schedule: StepSchedule) -> None:
    """Raise `Infeasible` for a schedule that the application cannot feed if tasks start
    strictly in the plan's order.
    """
    check_sequence(workload, schedule.order, schedule.shift)


def check_sequence(workload: Workload, sequence: Sequence[tuple[int, int]], shift: Sequence[int]) -> None:
    """Check that the application can feed (op, task) pairs that start strictly in order.

    A task starts only when all before it have started, on whatever channel (the enforcer requires this per channel
    only). So a task that is pulled ahead must be submittable before the application waits for anything behind it.

    Args:
        workload: the step.
        sequence: the (op, task) pairs in order.
        shift: for each pair the number of iterations by which it runs ahead.

    Raises:
        Infeasible: the application would wait for an op before it submits one that comes earlier in the order.
    """
    nodes = nodes_of(workload)
    size = len(nodes.op)
    task_node = {task: size + k for k, task in enumerate(sequence)}
    of_op: dict[int, list[int]] = {}
    for task, node in task_node.items():
        of_op.setdefault(task[0], []).append(node)
    waits: list[tuple[int, int, int]] = []
    held: set[tuple[int, int]] = set()
    for at, needs in enumerate(nodes.all_waits()):
        mine = of_op[nodes.op[at]] if nodes.place[at] < 0 else [at]
        waits += [(node, before, lag) for node in mine for before, lag in needs]
        waits += [(at, node, 0) for node in mine if node != at]
    count = len(sequence)
    for k in range(count):
        before, window = (k - 1, 0) if k else (count - 1, 1)
        node, earlier = task_node[sequence[k]], task_node[sequence[before]]
        waits.append((node, earlier, shift[k] - shift[before] + window))
        held.add((node, earlier))
    node_, waits_for, lag_ = (np.array(x, np.int32) for x in (zip(*waits, strict=True) if waits else ((), (), ())))
    circle = _native.waiting_circle(size + count, node_, waits_for, lag_).tolist()
    pairs = list(zip(circle, [*circle[1:], *circle[:1]], strict=True))
    if not pairs:
        return
    op_of = [*nodes.op, *(op for op, _ in sequence)]
    # Find the whole run of tasks held behind each other: its first cannot be submitted until its last is done.
    start = next(k for k, pair in enumerate(pairs) if pair in held and pairs[k - 1] not in held)
    run = [*pairs[start:], *pairs[:start]]
    stop = next(k for k, pair in enumerate(run) if pair not in held)
    late, early = workload.ops[op_of[run[0][0]]].name, workload.ops[op_of[run[stop - 1][1]]].name
    raise Infeasible(
        f"order: {early!r} comes before {late!r}, but the application submits {early!r} only after it has waited for "
        f"{late!r}"
    )


def _windows(start: NDArray[np.float64], period: float) -> NDArray[np.float64]:
    """How many periods each start lies after the start of the window."""
    return np.floor(start / period + SAME) if period > 0 else np.zeros(len(start))


def _sequence(starts: Sequence[float], channels: Sequence[set[str]], period: float) -> tuple[int, ...]:
    """A number for each task in order; those that start together and share no channel have the same."""
    numbers: list[int] = []
    taken: set[str] = set()
    begun = 0.0
    for start, held in zip(starts, channels, strict=True):
        together = numbers and abs(start - begun) <= SAME * period and taken.isdisjoint(held)
        if not together:
            taken, begun = set(), start
        numbers.append((numbers[-1] + (not together)) if numbers else 0)
        taken |= held
    return tuple(numbers)


def _shares(
    workload: Workload,
    op: NDArray[np.int32],
    place: NDArray[np.int32],
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    period: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """For each place: the share of the period without compute, microseconds of that with communication, and the share
    without communication.
    """
    num_places = len(workload.places)
    compute: list[list[tuple[float, float]]] = [[] for _ in range(num_places)]
    either: list[list[tuple[float, float]]] = [[] for _ in range(num_places)]
    sent: list[list[tuple[float, float]]] = [[] for _ in range(num_places)]
    for o, at, a, b in zip(op.tolist(), place.tolist(), start.tolist(), end.tolist(), strict=True):
        pieces = [(0.0, period)] if b - a >= period else [(a, min(b, period)), (0.0, max(b - period, 0.0))]
        for where in workload.op_places[o] if at < 0 else (at,):
            either[where] += pieces
            (compute if at >= 0 else sent)[where] += pieces
    busy = np.array([_covered(pieces) for pieces in compute])
    exposed = np.array([_covered(pieces) for pieces in either]) - busy
    sending = np.array([_covered(pieces) for pieces in sent])
    idle, gaps = (1 - each / period if period > 0 else np.zeros(num_places) for each in (busy, sending))
    return np.clip(idle, 0.0, 1.0), np.maximum(exposed, 0.0), np.clip(gaps, 0.0, 1.0)


def _covered(pieces: list[tuple[float, float]]) -> float:
    total = reached = 0.0
    for a, b in sorted(pieces):
        total += max(b - max(a, reached), 0.0)
        reached = max(reached, b)
    return total


def _rows(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    ptr = np.array([0, *accumulate(len(row) for row in rows)], np.int64)
    return ptr, np.array([x for row in rows for x in row], np.int32)


class _Sets:
    """Sets of options: ops with the same options at the same ends of places share one set."""

    def __init__(self, problem: PlanProblem, nodes: Nodes) -> None:
        workload = problem.workload
        self.options: list[tuple[Option, ...]] = []
        self.places: list[tuple[int, ...]] = []
        self.ends: list[Ends] = []
        self.queued: list[bool] = []
        self.of_node: list[int] = []
        known: dict[tuple[int, Ends, bool], int] = {}
        ends = op_ends(workload)
        for at, place in zip(nodes.op, nodes.place, strict=True):
            if place >= 0:
                self.of_node.append(-1)
                continue
            op = workload.ops[at]
            options, queued = problem.options[op.name], is_queued(op)
            self.of_node.append(known.setdefault((id(options), ends[at], queued), len(known)))
            if len(known) > len(self.options):
                self.options.append(options)
                self.places.append(workload.op_places[at])
                self.ends.append(ends[at])
                self.queued.append(queued)


def _compile(problem: PlanProblem, nodes: Nodes) -> _native.ScheduleProblem:
    workload = problem.workload
    sets = _Sets(problem, nodes)
    channels = sorted({c for options in sets.options for o in options for t in o.tasks for c in t.channels})
    number = {channel: at for at, channel in enumerate(channels)}
    flat = [(at, task) for at, options in enumerate(sets.options) for option in options for task in option.tasks]
    # First one resource for each channel at each end, then each place's queue of collectives, then the shared links.
    queues = 2 * len(workload.places) * len(channels)
    links = queues + len(workload.places)
    held = [
        {end * len(channels) + number[c]: task.duration_us for end in sets.ends[at] for c in task.channels}
        | {links + link: us for link, us in task.shared}
        for at, task in flat
    ]
    serial = [
        [queues + place for place in places] if queued else []
        for places, queued in zip(sets.places, sets.queued, strict=True)
    ]
    lines: dict[object, int] = {}
    line = [
        -1 if place >= 0 else lines.setdefault(communicator(workload.ops[at]), len(lines))
        for at, place in zip(nodes.op, nodes.place, strict=True)
    ]
    dep_ptr, dep_op = _rows([[node for node, _ in row] for row in nodes.waits])
    _, dep_lag = _rows([[lag for _, lag in row] for row in nodes.waits])
    streams = np.array(nodes.stream, np.int32)
    stream_ptr, stream_ids = np.concatenate([[0], np.cumsum(streams >= 0)]), streams[streams >= 0]
    inner_ptr, inner = _rows([task.after for _, task in flat])
    held_ptr, held_ids = _rows([list(row) for row in held])
    serial_ptr, serial_ids = _rows(serial)
    return _native.ScheduleProblem(
        comm=np.array([place < 0 for place in nodes.place], np.uint8),
        duration_us=np.array(nodes.us, np.float64),
        stream_ptr=stream_ptr, stream=stream_ids, num_streams=nodes.num_streams,
        dep_ptr=dep_ptr, dep_op=dep_op, dep_lag=dep_lag,
        set=np.array(sets.of_node, np.int32), line=np.array(line, np.int32),
        option_ptr=np.array([0, *accumulate(len(options) for options in sets.options)], np.int64),
        task_ptr=np.array([0, *accumulate(len(o.tasks) for options in sets.options for o in options)], np.int64),
        task_us=np.array([task.duration_us for _, task in flat], np.float64),
        inner_ptr=inner_ptr, inner=inner, held_ptr=held_ptr, held=held_ids,
        held_us=np.array([us for row in held for us in row.values()], np.float64),
        serial_ptr=serial_ptr, serial=serial_ids,
        num_resources=links + 1 + max((link for _, task in flat for link, _ in task.shared), default=-1),
        anchor=nodes.anchor,
    )  # fmt: skip
