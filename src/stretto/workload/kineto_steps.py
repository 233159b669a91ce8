# SPDX-License-Identifier: Apache-2.0
"""Cuts a rank's trace into iterations, and an iteration into segments between its communication calls."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

from .kineto_rank import KinetoRank, TraceCall, TraceWork

Cut = tuple[int, int]
"""A place in a stream's order: before work number `cut[1]` of the works that were submitted after `cut[0]` calls."""
Shape = tuple[tuple[str, int, bool], ...]


@dataclass(frozen=True, kw_only=True)
class StreamLane:
    """The works of one stream in one iteration, in order; `segments[i]` is the number of calls made before work i."""

    works: list[TraceWork]
    segments: list[int]

    @cached_property
    def ends(self) -> list[float]:
        """The end of each work, never earlier than the end of the work before it."""
        out: list[float] = []
        for work in self.works:
            out.append(max(work.end, out[-1] if out else work.end))
        return out

    @cached_property
    def submits(self) -> list[float]:
        """The time at which each work was submitted to the stream."""
        return [work.submit for work in self.works]

    def index(self, cut: Cut) -> int:
        """The number of works before a cut."""
        first = bisect_left(self.segments, cut[0])
        return min(first + cut[1], bisect_right(self.segments, cut[0])) if cut[1] else first

    def cut(self, index: int, end: Cut) -> Cut:
        """The cut before the work at an index; `end` for an index past the last work."""
        if index >= len(self.works):
            return end
        return self.segments[index], index - bisect_left(self.segments, self.segments[index])


_EMPTY = StreamLane(works=[], segments=[])


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """One iteration of one rank."""

    rank: int
    number: int
    calls: list[TraceCall]
    lanes: dict[str, StreamLane]

    @property
    def shape(self) -> Shape:
        """Kinds and group sizes of the calls; two iterations are compared op by op only if their shapes are equal."""
        return tuple((call.message.kind, len(call.message.group), call.receives) for call in self.calls)

    @property
    def end(self) -> Cut:
        """The cut after the last work."""
        return len(self.calls) + 1, 0

    def lane(self, stream: str) -> StreamLane:
        """The works of a stream in this iteration; an empty lane if there are none."""
        return self.lanes.get(stream, _EMPTY)


def steps_of(trace: KinetoRank, notes: list[str]) -> dict[int, TraceStep]:
    """The iterations of a rank by number that have the most common shape; a note says how many others were left out."""
    windows = _windows(trace, notes)
    steps = {number: _step(trace, number, low, high) for number, (low, high) in windows.items()}
    steps = {number: step for number, step in steps.items() if step.calls or step.lanes}
    if not steps:
        return {}
    usual = Counter(step.shape for step in steps.values()).most_common(1)[0][0]
    kept = {number: step for number, step in steps.items() if step.shape == usual}
    if len(kept) < len(steps):
        lost = len(steps) - len(kept)
        notes.append(f"rank {trace.rank}: left out {lost} of {len(steps)} steps that made other collectives")
    return kept


def _windows(trace: KinetoRank, notes: list[str]) -> dict[int, tuple[float, float]]:
    """Begin and end of each iteration on the CPU."""
    if trace.steps:
        starts = [start for start, _ in trace.steps.values()]
        ends = [*starts[1:], max(end for _, end in trace.steps.values())]
        return dict(zip(trace.steps, zip(starts, ends, strict=True), strict=True))
    every = float("inf")
    marks = sorted(
        [(work.submit, 0, (work.label, work.stream)) for work in trace.works]
        + [(call.submit, 1, (call.message.kind, call.message.nbytes)) for call in trace.calls],
        key=lambda mark: mark[:2],
    )
    chosen = [mark for mark in marks if mark[1]]
    period = _period([mark[1:] for mark in marks])
    if period:
        chosen = marks
    else:
        period = _period([mark[1:] for mark in chosen])
    if not period:
        notes.append(f"rank {trace.rank}: no ProfilerStep and no repetition: all of the trace is taken as one step")
        return {0: (-every, every)}
    starts = [mark[0] for mark in chosen[::period]]
    notes.append(f"rank {trace.rank}: no ProfilerStep; {len(chosen) // period} steps found by repetition")
    whole = len(chosen) // period
    return {at: (starts[at], starts[at + 1] if at + 1 < len(starts) else every) for at in range(whole)}


def _period(items: list[tuple[int, object]]) -> int:
    """The length of the shortest sequence that, repeated at least twice, gives the items; 0 when there is none.

    >>> _period([(0, "a"), (0, "b"), (0, "a"), (0, "b"), (0, "a")])
    2
    """
    border = [0] * len(items)
    for at in range(1, len(items)):
        length = border[at - 1]
        while length and items[at] != items[length]:
            length = border[length - 1]
        border[at] = length + (items[at] == items[length])
    period = len(items) - border[-1] if items else 0
    return period if items and 2 * period <= len(items) else 0


def _step(trace: KinetoRank, number: int, low: float, high: float) -> TraceStep:
    submits = [call.submit for call in trace.calls]
    calls = trace.calls[bisect_left(submits, low) : bisect_left(submits, high)]
    inner = [call.submit for call in calls]
    first = bisect_left(trace.works, low, key=lambda work: work.submit)
    last = bisect_left(trace.works, high, key=lambda work: work.submit)
    works: dict[str, list[TraceWork]] = defaultdict(list)
    segments: dict[str, list[int]] = defaultdict(list)
    for work in trace.works[first:last]:
        works[work.stream].append(work)
        segments[work.stream].append(bisect_right(inner, work.submit))
    lanes = {stream: StreamLane(works=works[stream], segments=segments[stream]) for stream in works}
    return TraceStep(rank=trace.rank, number=number, calls=calls, lanes=lanes)
