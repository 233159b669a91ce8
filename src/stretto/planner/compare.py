# SPDX-License-Identifier: Apache-2.0
"""The differences between two plans, op by op."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ..errors import PlanMismatch
from .plan import OpPlan, Plan


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """One decision in which two plans differ; `before` or `after` is empty if that plan does not have the op."""

    op: str
    what: str
    before: str
    after: str


def diff(before: Plan, after: Plan) -> list[PlanChange]:
    """Every decision that changed; plans of different workloads raise `PlanMismatch`."""
    if before.workload_digest != after.workload_digest:
        raise PlanMismatch(
            f"the plans are for different workloads: {before.workload} ({before.workload_digest}) and "
            f"{after.workload} ({after.workload_digest})"
        )
    old, new = ({op.op: op for op in plan.ops} for plan in (before, after))
    changes = []
    for name in dict.fromkeys([*old, *new]):
        for what, of in DECISIONS.items():
            was, now = (of(plan[name]) if name in plan else "" for plan in (old, new))
            if was != now:
                changes.append(PlanChange(op=name, what=what, before=was, after=now))
    return changes + _moved(before, after)


def _moved(before: Plan, after: Plan) -> list[PlanChange]:
    """The fewest comm-ops that would have to change places: those outside the longest common subsequence of turns."""
    turns = [[op.op for op in plan.by_turn] for plan in (before, after)]
    common = [name for name in turns[0] if name in set(turns[1])]
    place = {name: at for at, name in enumerate(turns[1])}
    kept = _longest_rising([place[name] for name in common])
    moved = [name for name in common if place[name] not in kept]
    return [
        PlanChange(op=name, what="turn", before=_after(name, turns[0]), after=_after(name, turns[1])) for name in moved
    ]


def _after(name: str, turns: list[str]) -> str:
    at = turns.index(name)
    return f"after {turns[at - 1]}" if at else "first"


def _longest_rising(values: list[int]) -> set[int]:
    """The members of a longest rising subsequence of different numbers."""
    ends: list[int] = []
    before: dict[int, int | None] = {}
    for value in values:
        at = bisect_left(ends, value)
        before[value] = ends[at - 1] if at else None
        ends[at : at + 1] = [value]
    found: set[int] = set()
    last = ends[-1] if ends else None
    while last is not None:
        found.add(last)
        last = before[last]
    return found


def _ahead(op: OpPlan) -> str:
    shifts = sorted({motif.ahead for motif in op.motifs})
    return ", ".join(f"{shift:+d}" if shift else "0" for shift in shifts)


DECISIONS = {
    "option": lambda op: op.option,
    "motifs": lambda op: str(len(op.motifs)),
    "channels": lambda op: "; ".join(dict.fromkeys("+".join(motif.channels) for motif in op.motifs)),
    "iterations ahead": _ahead,
}
