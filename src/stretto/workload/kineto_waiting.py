# SPDX-License-Identifier: Apache-2.0
"""Measures in profiler traces how much of a training step computed, and how much waited for communication.

Nothing is modelled here. A pause is a time in which a rank computes on no stream. It is waiting for communication up to
the end of the last collective that ended in it: the work after the pause cannot have waited for a collective that was
still running. What is left of a pause is launches, Python, the data loader, or waiting for something else.

On CPUs the profiler notes the end of a collective some time after the ranks that waited for it have gone on, so that
one with at most `LATE_END` of its time left counts as ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .kineto_rank import KinetoRank, merged
from .kineto_steps import TraceStep, steps_of

Spans = Sequence[tuple[float, float]]
LATE_END = 0.05
"""By this share of its time a collective on CPUs may seem to last longer than it did."""


@dataclass(frozen=True, kw_only=True)
class StepWaiting:
    """The median step of one rank, in microseconds; `compute_us`, `waits_us` and `idle_us` add up to `step_us`."""

    rank: int
    steps: int
    """How many steps of the trace were measured."""
    step_us: float
    compute_us: float
    """The time with work on at least one stream."""
    waits_us: float
    """The time without work, up to the end of a collective."""
    comm_us: float
    """The time in which at least one collective ran, hidden or not."""
    calls_us: float
    """The times of all collectives added up: more than `comm_us` where several ran at once."""

    @property
    def idle_us(self) -> float:
        """The time without work that no collective explains."""
        return self.step_us - self.compute_us - self.waits_us

    @property
    def share(self) -> float:
        """The share of the step that waits for communication."""
        return self.waits_us / self.step_us if self.step_us > 0 else 0.0


def waiting_of(traces: Mapping[int, KinetoRank]) -> tuple[StepWaiting, ...]:
    """How the median step of every rank was spent.

    On GPUs a step lasts from its first kernel to the first kernel of the next; the last one, whose end is not recorded,
    counts only where it is alone. On CPUs a step is what the profiler marked.

    Args:
        traces: the traces by rank, as `kineto.read_ranks` returns them.

    Returns:
        One entry for each rank with steps, by rank.
    """
    found = []
    for rank, trace in sorted(traces.items()):
        steps = list(steps_of(trace, []).values())
        compute = merged((work.start, work.end) for work in trace.works)
        comm = merged((call.start, call.end) for call in trace.calls)
        late = 0.0 if trace.gpu else LATE_END
        ends = sorted((call.end - late * (call.end - call.start), call.end) for call in trace.calls)
        measured = [_measure(window, compute, comm, ends) for window in _windows(trace, steps)]
        if measured:
            step_us, compute_us, waits_us, comm_us, low = sorted(measured)[(len(measured) - 1) // 2]
            calls_us = _length(_clipped(((call.start, call.end) for call in trace.calls), low, low + step_us))
            found.append(
                StepWaiting(
                    rank=rank, steps=len(measured), step_us=step_us, compute_us=compute_us, waits_us=waits_us,
                    comm_us=comm_us, calls_us=calls_us,
                )
            )  # fmt: skip
    return tuple(found)


def _windows(trace: KinetoRank, steps: list[TraceStep]) -> list[tuple[float, float]]:
    """Begin and end of each step, on the clock of what computes."""
    if not trace.gpu and trace.steps:
        numbers = {step.number for step in steps}
        marked = list(trace.steps.items())
        ends = [start for _, (start, _) in marked[1:]] + [max(end for _, (_, end) in marked)]
        return [(start, end) for (number, (start, _)), end in zip(marked, ends, strict=True) if number in numbers]
    begins = [_first(step) for step in steps]
    if len(begins) == 1:
        return [(begins[0], _last(steps[0]))]
    # Steps that were left out because they differ leave a hole, which is no step.
    pairs = zip(steps, steps[1:], begins, begins[1:], strict=False)
    found = [(begin, end) for one, other, begin, end in pairs if other.number == one.number + 1]
    return found or [(begins[-1], _last(steps[-1]))]


def _first(step: TraceStep) -> float:
    works = [lane.works[0].start for lane in step.lanes.values()]
    return min(works or [call.start for call in step.calls])


def _last(step: TraceStep) -> float:
    return max([work.end for lane in step.lanes.values() for work in lane.works] + [call.end for call in step.calls])


def _measure(
    window: tuple[float, float], compute: Spans, comm: Spans, comm_ends: Spans
) -> tuple[float, float, float, float, float]:
    """The length of a window, the time in it that computes, waits, and communicates, and its begin.

    `comm_ends` has, in order, the moment from which on each collective may have ended, and its end.
    """
    low, high = window
    busy = list(_clipped(compute, low, high))
    moving = list(_clipped(comm, low, high))
    waits = 0.0
    for start, end in _between(busy, low, high):
        at = bisect_right(comm_ends, (end, float("inf"))) - 1
        if at >= 0 and comm_ends[at][1] > start:
            waits += _length(_clipped(moving, start, min(comm_ends[at][1], end)))
    return high - low, _length(busy), waits, _length(moving), low


def _between(spans: Spans, low: float, high: float) -> list[tuple[float, float]]:
    """The pauses of a window around spans that are in order."""
    edges = [low, *(edge for span in spans for edge in span), high]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


def _clipped(spans: Iterable[tuple[float, float]], low: float, high: float) -> Iterable[tuple[float, float]]:
    return ((max(start, low), min(end, high)) for start, end in spans if start < high and end > low)


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
