# SPDX-License-Identifier: Apache-2.0
"""What one rank did in its recorded iterations: submits, waits and phases with their times. Knows nothing of torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidInput

Floats = NDArray[np.float64]

VARYING = ("all_to_all", "all_gather", "gather", "scatter", "send")
"""Kinds whose size may depend on the batch; the others move parameters or gradients, whose size may not change."""

FIRST_PHASE = "step"
"""What an iteration starts with, until a module's forward or a backward pass begins."""


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """What a submitted op is, apart from its size: the same in every iteration.

    `group` holds global ranks (for a send the sender and the receiver), `channel` the library's name of the group
    and, for a send, its tag: ops of one channel are matched between ranks in their order.
    """

    kind: str
    group: tuple[int, ...]
    channel: str
    root: int = 0
    encoding: str = ""
    phase: str = ""
    label: str = ""

    def __str__(self) -> str:
        return f"{self.label or self.kind} of ranks {', '.join(map(str, self.group))}"


@dataclass(frozen=True, kw_only=True)
class ThreadStep:
    """One thing the application's thread did: it submitted, or waited for, the op `call`, or entered a phase.

    `lag` counts iterations back: a wait with lag 1 is for an op that was submitted in the iteration before. A submit
    that is `behind` another call is made when that has ended: a stream, not the application, waits for it.
    """

    what: Literal["submit", "wait", "phase"]
    call: int = -1
    lag: int = 0
    phase: str = ""
    behind: int = -1


@dataclass(kw_only=True, eq=False)
class RecordedCall:
    """A submitted op while it is under way; times in microseconds of this rank's clock, NaN while unknown."""

    iteration: int
    number: int
    shape: CallShape
    nbytes: int
    splits: bool = False
    """Whether the call is an all-to-all whose pieces may differ."""
    workers: int
    """How many ops of its channel the library runs at once; 0 when there is no queue."""
    blocking: bool = False
    """Whether the call that submits it waits for it too."""
    submit_us: float
    end_us: float = float("nan")
    exact: bool = True
    """Whether the end is the op's own, or only when the application had waited for it."""
    waited: bool = False
    on_gpu: bool = False
    """Whether the call's times are those of a GPU."""
    on_side: bool = False
    """Whether a stream that is not the application's has waited for it."""


@dataclass(kw_only=True)
class TimedStep:
    """A `ThreadStep` with the times it was entered and left; a wait that is left with its op has `leave_us` NaN."""

    step: ThreadStep
    enter_us: float
    leave_us: float
    ends_with: RecordedCall | None = None
    place: int = 0
    """The call's position among those of its iteration; 0: behind those that were noted before."""


@dataclass(kw_only=True)
class RecordedIteration:
    """One iteration on one rank."""

    begin_us: float
    end_us: float = float("nan")
    marks: list[TimedStep] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    overhead_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """The recorded iterations of one rank, all with the same program; times are arrays (iteration, step or call)."""

    rank: int
    calls: tuple[CallShape, ...]
    steps: tuple[ThreadStep, ...]
    enter_us: Floats
    leave_us: Floats
    begin_us: Floats
    end_us: Floats
    started_us: Floats
    """When each call could start as far as this rank was concerned."""
    ended_us: Floats
    nbytes: NDArray[np.int64]
    exact: tuple[bool, ...]
    overhead_us: float
    splits: tuple[bool, ...] = ()
    """For each call whether it was an all-to-all with splits, in any iteration."""

    def gaps(self) -> Floats:
        """The application's own time before each step, and after the last: (iteration, step + 1)."""
        left: Floats = np.maximum.accumulate(np.concatenate([self.begin_us[:, None], self.leave_us], axis=1), axis=1)
        entered = np.concatenate([self.enter_us, self.end_us[:, None]], axis=1)
        own: Floats = np.maximum(entered - left, 0.0)
        return own


def trace_of(rank: int, iterations: Sequence[RecordedIteration]) -> RankRecording:
    """One program and its times; refuses iterations that do not all do the same in the same order."""
    first = iterations[0]
    calls = tuple(call.shape for call in first.calls)
    steps = tuple(mark.step for mark in first.marks)
    for number, iteration in enumerate(iterations[1:], start=1):
        _same_program(rank, number, first, iteration)
    nbytes = np.array([[call.nbytes for call in it.calls] for it in iterations], dtype=np.int64)
    for at, shape in enumerate(calls):
        if shape.kind not in VARYING and len(set(nbytes[:, at])) > 1:
            sizes = sorted(set(nbytes[:, at].tolist()))
            raise InvalidInput(f"rank {rank}: op {at} ({shape}) has {sizes[0]} to {sizes[-1]} bytes")
    return RankRecording(
        rank=rank,
        calls=calls,
        steps=steps,
        enter_us=_array([[mark.enter_us for mark in it.marks] for it in iterations]),
        leave_us=_array([[_left(mark) for mark in it.marks] for it in iterations]),
        begin_us=_array([it.begin_us for it in iterations]),
        end_us=_array([it.end_us for it in iterations]),
        started_us=_started(iterations),
        ended_us=_array([[call.end_us for call in it.calls] for it in iterations]),
        nbytes=nbytes,
        exact=tuple(all(it.calls[at].exact for it in iterations) for at in range(len(calls))),
        overhead_us=float(np.median([it.overhead_us for it in iterations])),
        splits=tuple(any(it.calls[at].splits for it in iterations) for at in range(len(calls))),
    )


def _same_program(rank: int, number: int, first: RecordedIteration, other: RecordedIteration) -> None:
    where = f"rank {rank}: recorded iteration {number} does not do the same as the first"
    for at, (a, b) in enumerate(zip(first.calls, other.calls, strict=False)):
        if a.shape != b.shape:
            raise InvalidInput(f"{where}: op {at} is {b.shape} there, {a.shape} here")
    if len(first.calls) != len(other.calls):
        at = min(len(first.calls), len(other.calls))
        longer = first if len(first.calls) > at else other
        only = "only the first has" if longer is first else "the first does not have"
        raise InvalidInput(f"{where}: {only} op {at} ({longer.calls[at].shape})")
    mine = [mark.step for mark in first.marks]
    theirs = [mark.step for mark in other.marks]
    if mine != theirs:
        differing = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        at = next(differing, min(len(mine), len(theirs)))
        here, there = (_say(steps[at], first) if at < len(steps) else "the end" for steps in (mine, theirs))
        raise InvalidInput(f"{where}: step {at} is {there} there, {here} here")


def _say(step: ThreadStep, iteration: RecordedIteration) -> str:
    if step.what == "phase":
        return f"the start of {step.phase}"
    name = str(iteration.calls[step.call].shape) if step.call < len(iteration.calls) else ""
    before = " of the iteration before" if step.lag else ""
    return f"{'the submit of' if step.what == 'submit' else 'the wait for'} op {step.call} ({name}){before}"


def _left(mark: TimedStep) -> float:
    if mark.ends_with is None:
        return mark.leave_us
    return float(np.nanmax([mark.enter_us, mark.ends_with.end_us]))


def _started(iterations: Sequence[RecordedIteration]) -> Floats:
    """A library runs the ops of a channel in order, a few at a time: one starts when submitted and a place is free."""
    free: dict[str, list[float]] = {}
    rows: list[list[float]] = []
    for iteration in iterations:
        row = []
        for call in iteration.calls:
            start = call.submit_us
            if call.workers:
                workers = free.setdefault(call.shape.channel, [-np.inf] * call.workers)
                start = max(start, workers[0])
                known = call.exact and not np.isnan(call.end_us)
                heapq.heapreplace(workers, max(start, call.end_us) if known else start)
            row.append(start)
        rows.append(row)
    return _array(rows)


def _array(values: object) -> Floats:
    return np.array(values, dtype=np.float64)
