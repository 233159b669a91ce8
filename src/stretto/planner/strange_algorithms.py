# SPDX-License-Identifier: Apache-2.0
"""Algorithms that a plan names and that only a cost model of somebody else's knows."""

from __future__ import annotations

from .algebra.recipes import library
from .costs.measured import NCCL
from .costs.providers import BALANCED, SYNTHESIZED
from .schedule.problem import PlanProblem
from .schedule.schedule import StepSchedule

USUAL = (SYNTHESIZED, BALANCED, NCCL, "gloo")
"""Names that stand for a program that comes along, or for whatever a library runs."""


def strange_algorithms(schedule: StepSchedule, problem: PlanProblem) -> tuple[str, ...]:
    """A note for each algorithm of a schedule that nothing here can make a program of."""
    found: dict[str, None] = {}
    for op, chosen in zip(problem.workload.comm_ops, schedule.choice, strict=True):
        for task in problem.options[op.name][chosen].tasks:
            if task.motion is not None and task.algorithm not in (*USUAL, *library(task.motion.ask())):
                found[task.algorithm] = None
    return tuple(
        f"no algorithm is called {name!r}, which the cost model names: this plan can be timed, but our executor cannot "
        "carry it out"
        for name in found
    )
