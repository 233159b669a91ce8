# SPDX-License-Identifier: Apache-2.0
"""Tables of plans for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from ..planner.compare import PlanChange
from ..planner.plan import OpPlan, Plan
from ..units import format_bytes, format_us
from .table import ResultTable

if TYPE_CHECKING:
    from ..planner.schedule.schedule import StepSchedule

_SHOWN_MOTIFS = 24


def plan_tables(plan: Plan) -> Group:
    """A plan's prediction beside every system it was compared with, and the decision for each comm-op."""
    return Group(*(Padding(part, (0, 0, 1, 0), expand=False) for part in (promise_table(plan), decisions_table(plan))))


def systems_table(schedules: Mapping[str, StepSchedule], *, reference: str = "bytescheduler+") -> ResultTable:
    """Every system's iteration time, throughput relative to `reference`, idle compute, exposed communication, and the
    share without communication.
    """
    table = ResultTable("system", ">iteration", ">throughput", ">idle", ">exposed", ">gaps", ">motifs")
    base = schedules[reference].period_us if reference in schedules else 0.0
    best = min(schedule.period_us for schedule in schedules.values())
    for name, schedule in schedules.items():
        style = "bold green" if schedule.period_us <= best * (1 + 1e-9) else ""
        table.add_row(
            Text(name, style=style),
            Text(format_us(schedule.period_us), style=style),
            f"{base / schedule.period_us:.2f}x" if base else "",
            f"{100 * float(schedule.compute_idle.max()):.1f} %",
            format_us(float(schedule.exposed_us.max())),
            f"{100 * float(schedule.comm_idle.max()):.1f} %",
            str(len(schedule.order)),
        )
    return table


def motif_table(op: OpPlan) -> Group:
    """Every motif of one comm-op, and the reason for the decision."""
    table = ResultTable(">seq", ">ahead", ">starts", ">takes", ">bytes", "algorithm", "channels", "motif")
    for motif in sorted(op.motifs, key=lambda m: m.seq)[:_SHOWN_MOTIFS]:
        table.add_row(
            str(motif.seq), f"{motif.ahead:+d}" if motif.ahead else "", format_us(motif.start_us),
            format_us(motif.duration_us), format_bytes(motif.nbytes), Text(motif.algorithm),
            Text("+".join(motif.channels)), Text(motif.motif),
        )  # fmt: skip
    parts: list[Text | ResultTable] = [
        Text(f"{op.op}: {op.kind} of {format_bytes(op.nbytes)} as {op.option}", style="bold"),
        Text(f"why: {op.reason}"),
        Text(f"expression: {op.expression}", overflow="fold"),
        Text(f"costs: {'; '.join(dict.fromkeys(motif.source for motif in op.motifs))}"),
        table,
    ]
    if len(op.motifs) > _SHOWN_MOTIFS:
        parts.append(Text(f"... and {len(op.motifs) - _SHOWN_MOTIFS} more motifs"))
    return Group(*parts)


def changes_table(changes: Sequence[PlanChange], before: str, after: str) -> ResultTable:
    """The decisions in which two plans differ.

    Args:
        changes: the differences.
        before: heading of the first plan's column.
        after: heading of the second plan's column.

    Returns:
        The table, one row per difference.
    """
    table = ResultTable("comm-op", "decision", before, after)
    for change in changes:
        table.add_row(Text(change.op), change.what, Text(change.before), Text(change.after, style="bold"))
    return table


def promise_table(plan: Plan) -> ResultTable:
    """What a plan promises: its iteration time beside the bound and every system it was compared with."""
    table = ResultTable("", "", header=False)
    table.columns[0].style = "dim"
    rows = [
        ("plan", f"{plan.name} for {plan.workload} on {plan.cluster}, hash {plan.hash}"),
        ("iteration", format_us(plan.iteration_us)),
    ]
    if plan.retimed_us:
        change = 100 * (plan.retimed_us / plan.iteration_us - 1)
        rows.append(("link by link", f"{format_us(plan.retimed_us)} ({change:+.2f} %, all motifs contending)"))
    if plan.bound_us:
        above = f"the plan is {100 * plan.gap:.2f} % above"
        rows.append(("lower bound", f"{format_us(plan.bound_us)} ({above}; {plan.bound_by})"))
    if plan.baselines_us:
        compared = (f"{name} {value / plan.iteration_us:.2f}" for name, value in plan.baselines_us.items())
        rows.append(("times ours", ", ".join(compared)))
    rows.append(("costs", plan.costs))
    if plan.made_by:
        rows.append(("made by", f"{plan.made_by}, seed {plan.seed}"))
    rows += [("note", note) for note in plan.notes]
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def decisions_table(plan: Plan) -> ResultTable:
    """The decision for each comm-op, in the order of their first motifs."""
    table = ResultTable(">seq", ">motifs", "comm-op", ">bytes", "how", "why")
    for op in plan.by_turn:
        first, last = min(m.seq for m in op.motifs), max(m.seq for m in op.motifs)
        table.add_row(
            f"{first} .. {last}" if last > first else str(first), str(len(op.motifs)), Text(op.op),
            format_bytes(op.nbytes), Text(op.option), Text(op.reason),
        )  # fmt: skip
    return table
