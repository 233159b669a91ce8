# SPDX-License-Identifier: Apache-2.0
"""Turns on links that motifs of different groups share, as ranks of one host can keep them.

Motifs of one group stand in line at its ranks. Those of different groups do not: where they share a link (the NIC of a
host), both are on it at once, and the one that the plan would serve first ends later than planned. But ranks of a host
can tell each other when a motif has ended, so a motif can wait for its turn on the host's links, in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...cluster import Cluster
from ...workload import PAIRWISE
from .problem import PlanProblem
from .resources import op_ends
from .schedule import StepSchedule

TURN_US = 20.0
"""What it takes a rank to hear from another rank of its host that a motif has ended."""


@dataclass(frozen=True, kw_only=True)
class LinkTurn:
    """A motif waits until another group's motif, of `lag` iterations before, has ended on the ranks of its hosts."""

    op: int
    task: int
    behind_op: int
    behind_task: int
    lag: int


def turns_of(schedule: StepSchedule, problem: PlanProblem, cluster: Cluster) -> tuple[LinkTurn, ...]:
    """The turns that the order of a schedule means on links.

    A turn is between two collectives of different ranks that follow each other on a link, where the one that waits has
    ranks on no host where the other has none. Messages go when they can.

    Args:
        schedule: the schedule.
        problem: the problem that it solves, with the links that tasks share.
        cluster: the cluster.

    Returns:
        The turns; empty where nothing is shared.
    """
    workload = problem.workload
    chosen = {
        workload.index[op.name]: problem.options[op.name][at].tasks
        for op, at in zip(workload.comm_ops, schedule.choice, strict=True)
        if op.kind not in PAIRWISE
    }
    ends = [frozenset(held) for held in op_ends(workload)]
    hosts = {op: frozenset(cluster.hosts_of(workload.ranks_of(workload.ops[op])).tolist()) for op in chosen}
    lines: dict[int, list[tuple[int, int, int]]] = {}
    for (op, task), shift in zip(schedule.order, schedule.shift, strict=True):
        for link, us in chosen[op][task].shared if op in chosen else ():
            if us > 0:
                lines.setdefault(link, []).append((op, task, shift))
    found: dict[LinkTurn, None] = {}
    for line in lines.values():
        for at, (op, task, shift) in enumerate(line):
            before_op, before_task, before_shift = line[at - 1]
            if ends[op].isdisjoint(ends[before_op]) and hosts[op] <= hosts[before_op]:
                lag = shift - before_shift + (at == 0)
                found[LinkTurn(op=op, task=task, behind_op=before_op, behind_task=before_task, lag=lag)] = None
    return tuple(found)
