# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks would launch a plan's motifs in one order, where a launch may keep others from running.

A rank launches a motif as soon as its op is submitted and everything before it in its lines is launched. Ranks that do
not take part in the same motifs have different lines: where the plan holds something back, one may launch early what
another launches late, and two motifs in opposite orders on two ranks could wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from ...errors import PlanMismatch
from ...planner.plan import Plan
from ...workload import Workload
from .rank_plan import RankPlan, share_of
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp, Sequencer

ITERATIONS = 3
"""With motifs ahead of their iteration, or behind it, orders repeat from the second on."""
Launch = tuple[int, int, int, tuple[int, ...]]
"""(iteration, comm-op, motif, ranks)"""


def check_launches(plan: Plan, workload: Workload, hosts: Sequence[str]) -> None:
    """Raise `PlanMismatch` where no one order of launches suits all ranks.

    Args:
        plan: The plan.
        workload: The step that it is for.
        hosts: The host of every rank.

    Raises:
        PlanMismatch: There is no such order.
    """
    order: TopologicalSorter[Launch] = TopologicalSorter()
    for rank in range(workload.num_ranks):
        before: Launch | None = None
        for launch in launches(share_of(plan, workload, rank, hosts)):
            order.add(launch, *([before] if before is not None else []))
            before = launch
    try:
        order.prepare()
    except CycleError as error:
        names = sorted({workload.ops[op].name for _, op, _, _ in error.args[1]})
        raise PlanMismatch(
            f"plan {plan.name}: ranks would launch {' and '.join(names[:2])} in different orders"
        ) from None


def launches(share: RankPlan) -> list[Launch]:
    """The order in which one rank launches motifs when all that is waited for is the application's submissions."""
    sequencer, log = Sequencer(), _Log()
    made: dict[tuple[int, int], QueuedOp] = {}

    def queued(at: int, op: int, motif: int) -> QueuedMotif:
        if (at, op) not in made:
            made[at, op] = QueuedOp(0, share.ops[op], at)
        return made[at, op].motifs[motif]

    opened = -share.most_ahead
    for iteration in range(ITERATIONS + share.most_behind):
        for window in range(opened, iteration + 1 + share.most_behind):
            sequencer.add(
                queued(window + turn.ahead, turn.op, turn.motif)
                for turn in share.turns
                if 0 <= window + turn.ahead < ITERATIONS
            )
        opened = iteration + 1 + share.most_behind
        for op in sorted(share.ops) if iteration < ITERATIONS else ():
            if (iteration, op) in made:
                sequencer.submit(made[iteration, op], log)
    return log.launches


class _Log:
    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        iteration, op = motif.op.place
        self.launches.append((iteration, op, motif.rank_motif.number, motif.rank_motif.leaf.ranks))
        return None

    def watch(self, motif: QueuedMotif) -> None: ...

    def moved(self, motif: QueuedMotif) -> None: ...

    def over(self) -> None: ...
