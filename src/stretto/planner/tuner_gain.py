# SPDX-License-Identifier: Apache-2.0
"""The gain of a plan with NCCL alone: whole collectives as its tuner is told, in the order of submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cluster import Cluster
from .algebra.options import Menu
from .algebra.rewrites import rewrites
from .baselines import Systems
from .costs.costs import CostModel, simulated_costs
from .schedule.problem import Option, PlanProblem
from .schedule.schedule import StepSchedule
from .tuner_csv import COLLECTIVES, NCCL_NAMES, TunerLine, shape_of, told


def with_tuner_alone(
    lines: Sequence[TunerLine], problem: PlanProblem, cluster: Cluster, costs: CostModel | None = None
) -> StepSchedule:
    """The step as PyTorch and NCCL run it with a tuner's table and no other part of a plan.

    Args:
        lines: the table.
        problem: the step with its options; the first option of an op is what NCCL does by itself.
        cluster: the cluster on which the step runs.
        costs: the cost model; None simulates.

    Returns:
        The schedule, whose period is the time of an iteration.
    """
    menu = Menu(cluster, costs if costs is not None else simulated_costs(cluster))
    options: dict[str, tuple[Option, ...]] = {}
    for op in problem.workload.comm_ops:
        groups = problem.workload.groups_of(op)
        known = COLLECTIVES.get(op.kind, "")
        found = {told(lines, known, round(op.nbytes), *shape_of(cluster, group)) for group in groups}
        names = {line.algorithm for line in found if line is not None}
        whole = None
        if len(names) == 1 and None not in found:
            whole = menu.whole(next(iter(rewrites(op, groups, cluster))), NCCL_NAMES.get(names.pop(), ()))
        options[op.name] = (whole or problem.options[op.name][0],)
    return Systems(replace(problem, options=options), reduces=False).schedule("fifo")
