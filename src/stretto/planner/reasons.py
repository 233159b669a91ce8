# SPDX-License-Identifier: Apache-2.0
"""Sentences that say why a comm-op runs as it does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from .schedule.problem import Option, PlanProblem
from .schedule.schedule import StepSchedule

MAX_NAMED = 3
LEAST_OVERLAP = 0.05
"""The least overlap that is mentioned, as a share of the shorter op's time."""

Span = tuple[float, float]


def reasons(schedule: StepSchedule, problem: PlanProblem) -> dict[str, str]:
    """For each comm-op the difference from its default option, its cost, and the ops that it overlaps with."""
    workload = problem.workload
    places = workload.op_places
    spans: dict[int, list[Span]] = {}
    computing: list[list[Span]] = [[] for _ in workload.places]
    for op, place, start, end in zip(
        schedule.op.tolist(), schedule.place.tolist(), schedule.start_us.tolist(), schedule.end_us.tolist(), strict=True
    ):
        mine = spans.setdefault(op, []) if place < 0 else computing[place]
        mine += wrapped(start, end, schedule.period_us)
    busy = {op: union(some) for op, some in spans.items()}
    compute = [union(some) for some in computing]
    shifts: dict[int, set[int]] = {}
    for (op, _), shift in zip(schedule.order, schedule.shift, strict=True):
        shifts.setdefault(op, set()).add(shift)
    critical = {op for op, _ in schedule.critical}
    partners = _partners(busy, places)
    said = {}
    for about, chosen in zip(workload.comm_ops, schedule.choice, strict=True):
        op, options = workload.index[about.name], problem.options[about.name]
        parts = [_difference(options[chosen], options[0])]
        if shifts[op] != {0}:
            parts.append(_moved(shifts[op]))
        length = length_us(busy[op])
        if length > 0:
            hidden = min(overlap_us(busy[op], compute[place]) for place in places[op])
            parts.append(f"{100 * hidden / length:.0f} % hidden behind compute")
        names = [workload.ops[other].name for other in partners.get(op, [])]
        if names:
            parts.append(f"overlaps {', '.join(names[:MAX_NAMED])}{' ...' if len(names) > MAX_NAMED else ''}")
        if op in critical:
            parts.append("on the circle that sets the iteration time")
        said[about.name] = "; ".join(parts)
    return said


def _difference(option: Option, default: Option) -> str:
    if option is default:
        return "as a library does it"
    if default.total_us <= 0:
        return "not the default"
    ratio = option.total_us / default.total_us
    if ratio > 1.005:
        return f"{100 * (ratio - 1):.0f} % slower alone than the default, but better in place"
    if ratio < 0.995:
        return f"{100 * (1 - ratio):.0f} % faster alone than the default"
    return "as fast alone as the default"


def _moved(shifts: set[int]) -> str:
    some = "partly " if 0 in shifts else ""
    most = max(shifts, key=abs)
    if most == -1:
        return f"runs {some}in the next iteration"
    far = "an iteration" if most == 1 else f"{abs(most)} iterations"
    return f"runs {some}{far} {'ahead' if most > 0 else 'late'}"


def _partners(busy: dict[int, list[Span]], places: tuple[tuple[int, ...], ...]) -> dict[int, list[int]]:
    """For each comm-op the comm-ops of a common place that run at the same time for a while."""
    shared: dict[tuple[int, int], float] = {}
    running: list[tuple[float, int]] = []
    for start, end, op in sorted((start, end, op) for op, some in busy.items() for start, end in some):
        running = [(until, other) for until, other in running if until > start]
        for until, other in running:
            pair = min(op, other), max(op, other)
            shared[pair] = shared.get(pair, 0.0) + min(end, until) - start
        running.append((end, op))
    found: dict[int, list[int]] = {}
    for (a, b), us in sorted(shared.items()):
        enough = us > LEAST_OVERLAP * min(length_us(busy[a]), length_us(busy[b]))
        if enough and not set(places[a]).isdisjoint(places[b]):
            found.setdefault(a, []).append(b)
            found.setdefault(b, []).append(a)
    return found


def wrapped(start: float, end: float, period: float) -> list[Span]:
    """A span of a periodic schedule as spans inside one period.

    >>> wrapped(8.0, 11.0, 10.0), wrapped(2.0, 13.0, 10.0)
    ([(8.0, 10.0), (0.0, 1.0)], [(0.0, 10.0)])

    Args:
        start: start of the span, 0 <= start < period.
        end: end of the span, >= start.
        period: length of the period.

    Returns:
        One or two spans within 0..period.
    """
    if end - start >= period:
        return [(0.0, period)]
    return [(start, end)] if end <= period else [(start, period), (0.0, end - period)]


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that the spans cover together, as sorted spans that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length_us(spans: list[Span]) -> float:
    """The total length of a union of spans in microseconds."""
    return sum(end - start for start, end in spans)


def overlap_us(a: list[Span], b: list[Span]) -> float:
    """Microseconds in which two unions of spans run at the same time."""
    total, i = 0.0, 0
    j = max(bisect_left(b, a[0]) - 1, 0) if a else 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total
