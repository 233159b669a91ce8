# SPDX-License-Identifier: Apache-2.0
"""Writes a plan as one page: before and after on the same clock, every decision with its reason, the search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..planner.api import SYSTEM, PlanResult
from ..planner.reasons import wrapped
from ..planner.schedule.problem import PlanProblem
from ..planner.schedule.schedule import StepSchedule
from ..units import format_bytes, format_us
from .html import Section, figure_html, look, write_html
from .style import BOUND, PALETTE, color

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_COMPUTE = {"forward": "#c9c9c9", "backward": "#9d9d9d", "optimizer": "#dddddd", "data": "#e8e0d0"}
_OTHER = "#bbbbbb"
_IDLE = "no compute"
_MAX_PLACES = 4
_MAX_BARS = 6000
_MAX_ROWS = 24
_TABLE_HEIGHT = 640
_EDGED = 0.004
"""Bars shorter than this share of the iteration have no white edge, because the edge would hide them."""
_US_PER_MS = 1e3
_NO_GAIN = 1.005
"""Below this ratio of throughputs the page says that nothing is gained."""


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """One bar: its track, its group (which has a color and a name in the legend), its start and its end."""

    track: tuple[int, int, str]
    """Place, 1 for a channel or 0 for a stream, and the channel's or stream's name; tracks are drawn in this order."""
    group: str
    start_us: float
    end_us: float
    text: str


def write_plan_html(path: str | Path, found: PlanResult, *, against: str = "fifo") -> None:
    """Write the page of a plan.

    Args:
        path: file to write.
        found: the plan with its problem, baselines and search.
        against: the system that is drawn above the plan, one of the keys of ``found.schedules``.

    Raises:
        InvalidInput: the file cannot be written.
    """
    plan = found.plan
    shown = {against: found.schedules[against], "plan": found.schedules[SYSTEM]}
    sections = [
        Section(heading="What the plan brings", note=_headline(found, against)),
        _timelines(found.problem, shown, plan.bound_us),
        Section(heading="All systems", note="Over the same options and costs.", body=_systems(found)),
        Section(heading="Decisions", note="By what each comm-op saves alone, the most first.", body=_decisions(found)),
        Section(
            heading="The search",
            note=f"{found.search.evaluations:,} schedules evaluated, {found.search.evaluations_per_s:,.0f} per second; "
            f"stopped: {found.search.why_stopped}. Seed {found.search.seed}.",
            body=figure_html(_curve(found)),
        ),
        Section(heading="What was assumed", body=_notes(found)),
    ]
    write_html(path, title=f"{plan.workload} on {plan.cluster}", sections=sections)


def _headline(found: PlanResult, against: str) -> str:
    plan = found.plan
    before, after = found.schedules[against], found.schedules[SYSTEM]
    gain = before.period_us / after.period_us
    text = (
        f"An iteration takes {format_us(after.period_us)} instead of {format_us(before.period_us)} with {against}: "
        f"{gain:.2f} times the throughput. Compute idles {_idle(after)} of the time "
        f"instead of {_idle(before)}, communication {_gaps(after)} instead of {_gaps(before)}."
    )
    if gain < _NO_GAIN:
        text = f"Nothing is gained: an iteration takes {format_us(after.period_us)}, with {against} as well."
    if plan.bound_us:
        text += f" In the planner's time model no plan over these options is faster than {format_us(plan.bound_us)}"
        text += f"; this is {100 * plan.gap:.2f} % above." if plan.gap > 1e-6 else ", and this one is as fast."
    if plan.retimed_us:
        change = 100 * (plan.retimed_us / plan.iteration_us - 1)
        text += f" Simulated link by link, with all motifs contending: {format_us(plan.retimed_us)} ({change:+.2f} %)."
    return text


def _idle(schedule: StepSchedule) -> str:
    return f"{100 * float(schedule.compute_idle.max(initial=0.0)):.1f} %"


def _gaps(schedule: StepSchedule) -> str:
    return f"{100 * float(schedule.comm_idle.max(initial=0.0)):.1f} %"


def _systems(found: PlanResult) -> str:
    shown = found.for_tables()
    reference = shown.get("bytescheduler+")
    best = min(schedule.period_us for schedule in shown.values())
    rows = [
        (
            name,
            format_us(schedule.period_us),
            f"{reference.period_us / schedule.period_us:.2f}x" if reference else "",
            _idle(schedule),
            format_us(float(schedule.exposed_us.max(initial=0.0))),
            _gaps(schedule),
            str(len(schedule.order)),
        )
        for name, schedule in shown.items()
    ]
    head = (
        "system",
        "iteration",
        "throughput",
        "compute idle",
        "exposed communication",
        "communication gaps",
        "motifs",
    )
    bold = {at for at, s in enumerate(shown.values()) if s.period_us <= best * (1 + 1e-9)}
    return _table(head, rows, bold=bold)


def _decisions(found: PlanResult) -> str:
    chosen = dict(zip((op.name for op in found.problem.workload.comm_ops), found.schedules[SYSTEM].choice, strict=True))
    saved = {
        name: options[0].total_us - options[chosen[name]].total_us for name, options in found.problem.options.items()
    }
    rows = [
        (
            op.op,
            op.kind,
            format_bytes(op.nbytes),
            format_us(saved[op.op]) if saved[op.op] > 0 else "",
            str(len(op.motifs)),
            ", ".join(f"{shift:+d}" for shift in sorted({motif.ahead for motif in op.motifs} - {0})),
            op.option,
            op.reason,
        )
        for op in sorted(found.plan.by_turn, key=lambda op: -saved[op.op])
    ]
    head = ("comm-op", "kind", "bytes", "saves alone", "motifs", "ahead", "how", "why")
    return _table(head, rows, text={1, 6, 7})


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Iterable[int] = (), bold: Iterable[int] = ()
) -> str:
    """An HTML table of plain text; columns in `text` are left-aligned and may wrap, rows in `bold` are bold."""
    left, marked = set(text), set(bold)

    def cell(tag: str, at: int, value: str, row: int = -1) -> str:
        style = " style='text-align:left;white-space:normal'" if at in left else ""
        return f"<{tag}{' class=best' if row in marked else ''}{style}>{escape(value)}</{tag}>"

    top = "".join(cell("th", at, name) for at, name in enumerate(head))
    lines = ["".join(cell("td", at, value, row) for at, value in enumerate(one)) for row, one in enumerate(rows)]
    body = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    return f"<div style='max-height:{_TABLE_HEIGHT}px;overflow-y:auto'>{body}</div>" if len(rows) > _MAX_ROWS else body


def _notes(found: PlanResult) -> str:
    lines = [f"Costs: {found.plan.costs}.", *found.plan.notes, *found.problem.workload.notes, *found.problem.notes]
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _idle_bars(bars: Sequence[_Bar], period_us: float) -> list[_Bar]:
    """The times in which no stream of a place computes, on the track of its first stream."""
    found = []
    for place in sorted({bar.track[0] for bar in bars}):
        work = sorted((bar for bar in bars if bar.track[:2] == (place, 0)), key=lambda bar: bar.start_us)
        at = 0.0
        for start, end in [*((bar.start_us, bar.end_us) for bar in work), (period_us, period_us)] if work else ():
            if start - at > _EDGED * period_us:
                text = f"no compute: {format_us(start - at)} from {format_us(at)}"
                track = min(bar.track for bar in work)
                found.append(_Bar(track=track, group=_IDLE, start_us=at, end_us=start, text=text))
            at = max(at, end)
    return found


def _timelines(problem: PlanProblem, schedules: Mapping[str, StepSchedule], bound_us: float) -> Section:
    from plotly.subplots import make_subplots

    bars = {name: _bars(problem, schedule) for name, schedule in schedules.items()}
    bars = {name: [*some, *_idle_bars(some, schedules[name].period_us)] for name, some in bars.items()}
    tracks = sorted({bar.track for some in bars.values() for bar in some})
    several = len({place for place, _, _ in tracks}) > 1
    label = {
        track: (f"rank {problem.workload.places[track[0]].ranks[0]} " if several else "") + escape(track[2])
        for track in tracks
    }
    row_height, gap, top, bottom = 26, 60, 40, 110
    height = top + bottom + len(schedules) * row_height * len(tracks) + gap * (len(schedules) - 1)
    timed, last = list(schedules.items()), list(schedules)[-1]
    bound = f", lower bound {format_us(bound_us)} (dashed)" if bound_us > 0 else ""
    figure: Figure = make_subplots(
        rows=len(schedules), cols=1, shared_xaxes=True, vertical_spacing=gap / (height - top - bottom),
        subplot_titles=[f"{escape(name)}: {format_us(one.period_us)}{bound * (name == last)}" for name, one in timed],
    )  # fmt: skip
    tint = _tints(problem) | {_IDLE: "#f4c7c3"}
    shown: set[str] = set()
    for row, (name, schedule) in enumerate(schedules.items(), 1):
        groups: dict[str, list[_Bar]] = {}
        for bar in bars[name][:_MAX_BARS]:
            groups.setdefault(bar.group, []).append(bar)
        for group in sorted(groups, key=list({**_COMPUTE, **tint}).index):
            some = groups[group]
            edge = [0.5 * (bar.end_us - bar.start_us > _EDGED * schedule.period_us) for bar in some]
            figure.add_bar(
                orientation="h", y=[label[bar.track] for bar in some], base=[b.start_us / _US_PER_MS for b in some],
                x=[(bar.end_us - bar.start_us) / _US_PER_MS for bar in some], hovertext=[bar.text for bar in some],
                hoverinfo="text", name=escape(group), legendgroup=escape(group), showlegend=group not in shown,
                marker={"color": tint[group], "line": {"color": "#fff", "width": edge}}, row=row, col=1,
            )  # fmt: skip
            shown.add(group)
        figure.add_vline(x=schedule.period_us / _US_PER_MS, line={"color": PALETTE[3], "dash": "dot"}, row=row, col=1)
    if bound_us > 0:
        figure.add_vline(
            x=bound_us / _US_PER_MS, line={"color": BOUND, "dash": "dash"}, row=len(schedules), col=1,
        )  # fmt: skip
    figure.update_yaxes(categoryorder="array", categoryarray=[label[t] for t in tracks][::-1], automargin=True)
    figure.update_xaxes(range=[0, max(s.period_us for s in schedules.values()) * 1.02 / _US_PER_MS], gridcolor="#eee")
    figure.update_xaxes(title_text="ms", row=len(schedules), col=1)
    legend = {"orientation": "h", "y": -60 / (height - top - bottom), "yanchor": "top"}
    margin = {"l": 60, "r": 20, "t": top, "b": bottom}
    figure.update_layout(barmode="overlay", bargap=0.15, height=height, **look() | {"margin": margin}, legend=legend)
    before = next(iter(schedules))
    note = (
        "Steady state, on the same clock; an iteration begins with its first compute-op. Grey is compute, rose where "
        "nothing computes, the dashed line is the lower bound; colours are "
        f"{'kinds of ' if tint.keys().isdisjoint(op.name for op in problem.workload.comm_ops) else ''}comm-ops on the "
        "channels they hold. Drag to zoom, double-click to see all again; click a name to hide it."
    )
    if len(problem.workload.places) > _MAX_PLACES:
        note += f" The first {_MAX_PLACES} of {len(problem.workload.places)} kinds of ranks are shown."
    if max(map(len, bars.values())) > _MAX_BARS:
        note += f" Only the first {_MAX_BARS:,} bars of each are drawn."
    return Section(heading=f"One iteration: {before} above, the plan below", note=note, body=figure_html(figure))


def _tints(problem: PlanProblem) -> dict[str, str]:
    """The color of each group; with more comm-ops than colors, a group is a kind of comm-op."""
    workload = problem.workload
    tints = {_compute_group(op.phase): _COMPUTE.get(op.phase, _OTHER) for op in workload.ops if not op.is_comm}
    named = [op.name for op in workload.comm_ops]
    if len(named) > len(PALETTE):
        named = list(dict.fromkeys(op.kind for op in workload.comm_ops))
    return tints | {name: color(at) for at, name in enumerate(named)}


def _compute_group(phase: str) -> str:
    return phase or "compute"


def _bars(problem: PlanProblem, schedule: StepSchedule) -> list[_Bar]:
    """The bars of one iteration at the places that are shown, sorted by start."""
    workload = problem.workload
    by_kind = len(workload.comm_ops) > len(PALETTE)
    chosen = {
        workload.index[op.name]: problem.options[op.name][k]
        for op, k in zip(workload.comm_ops, schedule.choice, strict=True)
    }
    bars = []
    for op, part, at, iteration, start, end in zip(
        schedule.op.tolist(), schedule.task.tolist(), schedule.place.tolist(), schedule.iteration.tolist(),
        schedule.start_us.tolist(), schedule.end_us.tolist(), strict=True,
    ):  # fmt: skip
        about = workload.ops[op]
        text = f"{escape(about.name)}: {format_us(end - start)} from {format_us(start)}"
        held: tuple[str, ...] = (about.stream,)
        if part >= 0:
            task = chosen[op].tasks[part]
            held = task.channels
            text += f"<br>{escape(task.algorithm)} of {format_bytes(task.nbytes)}<br>{escape(task.motif)}"
        if iteration:
            text += f"<br>for iteration {iteration:+d}"
        group = _compute_group(about.phase) if part < 0 else about.kind if by_kind else about.name
        bars += [
            _Bar(track=(place, int(part >= 0), name), group=group, start_us=a, end_us=b, text=text)
            for place in (workload.op_places[op] if at < 0 else (at,))
            if place < _MAX_PLACES
            for name in held
            for a, b in wrapped(start, end, schedule.period_us)
        ]
    return bars


def _curve(found: PlanResult) -> Figure:
    from plotly.graph_objects import Figure

    points = found.search.curve
    figure = Figure()
    figure.add_scatter(
        x=[p[0] for p in points], y=[p[2] / _US_PER_MS for p in points], mode="lines+markers",
        line={"shape": "hv", "color": color(0)}, name="best so far",
        hovertext=[f"{p[1]:,} evaluations: {format_us(p[2])}" for p in points], hoverinfo="text",
    )  # fmt: skip
    figure.add_scatter(
        x=[0, points[-1][0]], y=[found.search.bound.us / _US_PER_MS] * 2, mode="lines", name="lower bound",
        line={"color": BOUND, "dash": "dash"}, hoverinfo="name",
    )  # fmt: skip
    figure.update_xaxes(title_text="seconds", gridcolor="#eee", rangemode="tozero")
    figure.update_yaxes(title_text="iteration, ms", gridcolor="#eee")
    figure.update_layout(height=320, **look(), legend={"orientation": "h", "y": 1.12})
    return figure
