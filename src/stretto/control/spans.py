# SPDX-License-Identifier: Apache-2.0
"""Timelines of a training step for whoever looks at a job: what was recorded, and what a schedule makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..planner.reasons import wrapped
from ..workload import Workload

if TYPE_CHECKING:
    from ..planner.schedule.problem import PlanProblem
    from ..planner.schedule.schedule import StepSchedule

MAX_SPANS = 2000
"""The most spans of one timeline; later ones are left out."""
CALLS = "communication"
"""The track of comm-ops of which nobody knows yet where they run."""


class ReportSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One bar: compute on a stream, or communication on a channel; times count from the begin of an iteration."""

    track: str
    name: str
    start_us: float
    duration_us: float
    phase: str = ""
    """The phase of the training step ("forward", ...) that a span of compute belongs to."""
    comm: bool = False


def recorded_spans(workload: Workload) -> tuple[ReportSpan, ...]:
    """The step of the first rank with its recorded durations, as far as a page shows it."""
    return replayed(workload)[:MAX_SPANS]


def replayed(workload: Workload) -> tuple[ReportSpan, ...]:
    """The step of the first rank with its recorded durations, everything as early as it may begin."""
    place = 0
    ends: dict[str, float] = {}
    free: dict[str, float] = {}
    spans = []
    for op, places, each_us in zip(workload.ops, workload.op_places, workload.op_durations_us, strict=True):
        start_us = max((ends.get(dep.op, 0.0) for dep in op.after if not dep.lag), default=0.0)
        if place not in places:
            ends[op.name] = start_us
            continue
        us = op.duration_us if op.is_comm else each_us[places.index(place)]
        if not op.is_comm:
            start_us = max(start_us, free.get(op.stream, 0.0))
            free[op.stream] = start_us + us
        ends[op.name] = start_us + us
        track, phase = (CALLS, "") if op.is_comm else (op.stream, op.phase)
        spans.append(
            ReportSpan(track=track, name=op.name, start_us=start_us, duration_us=us, phase=phase, comm=op.is_comm)
        )
    return tuple(spans)


def schedule_spans(schedule: StepSchedule, problem: PlanProblem) -> tuple[ReportSpan, ...]:
    """One steady iteration of the first rank, as a schedule predicts it."""
    workload, place = problem.workload, 0
    chosen = {
        workload.index[op.name]: problem.options[op.name][k]
        for op, k in zip(workload.comm_ops, schedule.choice, strict=True)
    }
    spans: list[ReportSpan] = []
    for op, part, at, start, end in zip(
        schedule.op.tolist(), schedule.task.tolist(), schedule.place.tolist(), schedule.start_us.tolist(),
        schedule.end_us.tolist(), strict=True,
    ):  # fmt: skip
        if place not in (workload.op_places[op] if at < 0 else (at,)):
            continue
        about = workload.ops[op]
        tracks = (about.stream,) if part < 0 else chosen[op].tasks[part].channels
        spans += [
            ReportSpan(
                track=track, name=about.name, start_us=a, duration_us=b - a, phase="" if part >= 0 else about.phase,
                comm=part >= 0,
            )
            for track in tracks
            for a, b in wrapped(start, end, schedule.period_us)
        ]  # fmt: skip
    return tuple(spans[:MAX_SPANS])
