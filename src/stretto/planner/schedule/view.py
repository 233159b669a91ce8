# SPDX-License-Identifier: Apache-2.0
"""Turns a schedule into a `Timeline`, the type that simulated and measured runs have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...simulator.timeline import Timeline
from .problem import PlanProblem

if TYPE_CHECKING:
    from .schedule import StepSchedule


def timeline(schedule: StepSchedule, problem: PlanProblem) -> Timeline:
    """One steady-state window: a span for each place of an op and each channel of a task."""
    workload = problem.workload
    chosen = {
        workload.index[op.name]: problem.options[op.name][k]
        for op, k in zip(workload.comm_ops, schedule.choice, strict=True)
    }
    streams: dict[str, int] = {op.stream: 0 for op in workload.ops if not op.is_comm}
    streams |= dict.fromkeys(sorted({c for o in chosen.values() for t in o.tasks for c in t.channels}), 0)
    streams = {name: at for at, name in enumerate(streams)}
    names: dict[str, int] = {}
    spans: list[tuple[int, int, int, float, float, float]] = []
    ahead = {1: " (next iteration)", -1: " (iteration before)"}
    for op, part, at, iteration, start, end in zip(
        schedule.op.tolist(), schedule.task.tolist(), schedule.place.tolist(), schedule.iteration.tolist(),
        schedule.start_us.tolist(), schedule.end_us.tolist(), strict=True,
    ):  # fmt: skip
        task = chosen[op].tasks[part] if part >= 0 else None
        note = f" ({iteration:+d} iterations)" if abs(iteration) > 1 else ahead.get(iteration, "")
        title = workload.ops[op].name + (f": {task.motif}" if task else "") + note
        name = names.setdefault(title, len(names))
        for stream in task.channels if task else (workload.ops[op].stream,):
            for place in workload.op_places[op] if at < 0 else (at,):
                rank = workload.places[place].ranks[0]
                spans.append((rank, streams[stream], name, start, end, task.nbytes if task else 0.0))
    rank_, stream_, name_, start_, end_, nbytes_ = zip(*spans, strict=True) if spans else ((),) * 6
    return Timeline(
        total_us=schedule.period_us,
        rank=np.array(rank_, np.int32),
        stream=np.array(stream_, np.int32),
        name=np.array(name_, np.int32),
        start_us=np.array(start_, np.float64),
        end_us=np.array(end_, np.float64),
        nbytes=np.array(nbytes_, np.float64),
        streams=tuple(streams),
        names=tuple(names),
        facts=(("workload", workload.name), ("window", "one steady iteration"), ("costs", problem.costs or "given")),
    )
