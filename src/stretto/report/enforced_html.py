# SPDX-License-Identifier: Apache-2.0
"""Writes a running job as one page: its gain, and its step before and after on one clock, as
predicted and as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..files import write_file
from ..units import format_bytes, format_us
from .html import look
from .page import Section, figure_html, page_html
from .style import color

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..control.messages import JobStatus, MotifStatus, Status
    from ..control.spans import ReportSpan
    from ..runtime.enforcer.report import Timing

_MAX_MOTIFS = 3000
_MAX_RANKS = 64
_US_PER_MS = 1e3
_COMPUTE = {"forward": "#c9c9c9", "backward": "#9d9d9d", "optimizer": "#dddddd"}
_OTHER = "#bbbbbb"
_EDGE = {"color": "#fff", "width": 0.5}


class _Bar(NamedTuple):
    """One bar on a track; bars of a `group` share one color and one name in the legend."""

    track: str
    group: str
    start_us: float
    us: float
    text: str
    comm: bool = True


class _Row(NamedTuple):
    """One timeline; `end_us` is the end of the iteration, 0 if it is not known."""

    title: str
    end_us: float
    bars: list[_Bar]


def write_enforced_html(path: str | Path, status: Status) -> None:
    """Write the page, with a part for every job of a controller's status."""
    write_file(path, enforced_page(status))


def enforced_page(status: Status, *, again_s: float = 0.0) -> str:
    """The text of the page; with `again_s` a browser asks for it again after so many seconds."""
    sections = [section for job in status.jobs for section in _sections(job, status)]
    if not sections:
        sections = [Section(heading="No job", note="The controller has not heard of any.")]
    head = f'<meta http-equiv="refresh" content="{again_s:g}">' if again_s else ""
    return page_html(title="Plans, promised and measured", sections=sections, head=head)


def _sections(job: JobStatus, status: Status) -> list[Section]:
    plan = f"plan {job.plan.number}, hash {job.plan.hash}" if job.plan.number else "plain order"
    note = f"{job.size} ranks, {plan}; {job.about}."
    if job.predicted_us and job.iteration_us:
        note += f" An iteration takes {job.iteration_us / job.predicted_us:.2f} times what was predicted."
    found = [Section(heading=f"Job {job.job}", note=note, body=_gain(job))]
    faults = [hang.text for hang in status.hangs if hang.job == job.job]
    faults += [f"Rank {rank.rank} fell back: {rank.fell_back}" for rank in job.ranks if rank.fell_back]
    found.append(Section(heading=f"Ranks of {job.job}", note=" ".join(faults) or "No faults.", body=_ranks(job)))
    motifs = job.motifs[:_MAX_MOTIFS]
    rows = _rows(job, motifs)
    if rows:
        left_out = f" The first {_MAX_MOTIFS} of {len(job.motifs)} motifs." if len(job.motifs) > len(motifs) else ""
        found.append(
            Section(
                heading=_heading(job),
                note="On one clock, from the begin of an iteration to its end (the dotted line). Grey is compute, "
                "colours are communication on its channels: what stands under grey is hidden. Measured times are "
                f"rank 0's, medians of its last window; motifs wait for the slowest rank inside their bars.{left_out}",
                body=figure_html(_figure(rows)),
            )
        )
    elif not job.recorded:
        found.append(Section(heading="No timelines", note="No training step was recorded."))
    if motifs:
        found.append(Section(heading=f"Motifs of {job.motifs_plan}", body=_table(motifs)))
    return found


def _ranks(job: JobStatus) -> str:
    """A table of the ranks as the controller last heard of them."""
    rows = []
    for rank in job.ranks[:_MAX_RANKS]:
        times = [format_us(us) if us else "" for us in (rank.iteration_us, rank.waits_us, rank.held_us)]
        heard = "has ended" if rank.left else f"{rank.heard_s:.1f} s ago"
        cells = [str(rank.rank), str(rank.active), str(rank.iteration), *times, heard]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("rank", "runs", "iterations", "time", "waits", "held", "heard"))
    more = f"<p>{len(job.ranks) - _MAX_RANKS} more ranks.</p>" if len(job.ranks) > _MAX_RANKS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"


def _heading(job: JobStatus) -> str:
    if not job.motifs:
        return "What was recorded; no plan was used"
    now = "" if job.motifs_plan == job.plan else ", the last that was active"
    return f"One iteration: plain order above, plan {job.motifs_plan.number} below{now}"


def _gain(job: JobStatus) -> str:
    """A table of the unchanged job, our backend and the plan, each with its measured spread and its prediction."""
    split = job.split
    under_plan = f"under plan {split.plan_number}, the last" if split.plan_number else "under the plan"
    rows: list[tuple[str, Timing | None, float, float]] = [
        (f"unchanged job ({split.own})" if split.own else "unchanged job", split.unchanged, 0.0, 0.0),
        ("our backend, plain order", split.backend, split.backend_share, split.predicted_backend_us),
        (under_plan, split.plan, split.plan_share, split.predicted_plan_us),
    ]
    lines = "".join(_line(*row) for row in rows)
    names = ("", "per iteration", "share", "middle half", "iterations", "predicted", "measured / predicted")
    head = "".join(f"<th>{name}</th>" for name in names)
    total = f"<p>Together {split.gain:.2f} times as fast as the unchanged job.</p>" if split.gain else ""
    if split.early and split.plan is not None:
        total = f"<p>Too early to say what was gained: {split.plan.iterations} iterations under the plan.</p>"
    if split.kept == "unchanged":
        total = f"<p>Nothing was gained: the job runs on {escape(split.own)}, as without us.</p>"
    elif split.unchanged is None:
        total = f"<p>The unchanged job was not measured: {escape(split.no_unchanged) or 'the job ended first'}.</p>"
    if split.whole_iterations:
        share = (
            f", {split.whole_gain:.2f} times as fast as unchanged"
            if split.whole_gain and split.kept != "unchanged"
            else ""
        )
        included = f"mean of {split.whole_iterations} iterations, recording, probing, measuring and planning included"
        total += f"<p>The whole job: {format_us(split.whole_us)} per iteration{share} ({included}).</p>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{total}"


def _line(name: str, timing: Timing | None, share: float, predicted_us: float) -> str:
    cells = [name, *[""] * 4, format_us(predicted_us) if predicted_us else "", ""]
    if timing is not None:
        half = f"{format_us(timing.low_us)} to {format_us(timing.high_us)}"
        cells[1:5] = [format_us(timing.median_us), f"{share:.2f}x" if share else "", half, str(timing.iterations)]
        if predicted_us:
            cells[6] = f"{timing.median_us / predicted_us:.2f}"
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _rows(job: JobStatus, motifs: Sequence[MotifStatus]) -> list[_Row]:
    """The timelines that exist: the recording, plain order, the plan as predicted, the plan as measured."""
    split = job.split
    rows: list[_Row] = []
    if job.recorded and not motifs:
        bars = [_bar(span) for span in job.recorded]
        end_us = split.unchanged.median_us if split.unchanged else 0.0
        rows.append(_Row(f"recorded: {job.about_recorded}", end_us, bars))
    if job.before:
        rows.append(_Row("plain order, predicted", split.predicted_backend_us, [_bar(span) for span in job.before]))
    if motifs:
        compute = [_bar(span) for span in job.after if not span.comm]
        promised_us = split.predicted_plan_us or job.predicted_us
        rows.append(_Row("the plan, predicted", promised_us, compute + _motif_bars(motifs, measured=False)))
        plan_us = split.plan.median_us if split.plan else job.iteration_us
        measured = _motif_bars(motifs, measured=True)
        if measured:
            rows.append(_Row("the plan, measured", plan_us, measured))
    return rows


def _bar(span: ReportSpan) -> _Bar:
    group = span.name if span.comm else span.phase or "compute"
    text = f"{span.name}: {format_us(span.duration_us)} from {format_us(span.start_us)}"
    return _Bar(span.track, group, span.start_us, span.duration_us, text, span.comm)


def _motif_bars(motifs: Sequence[MotifStatus], *, measured: bool) -> list[_Bar]:
    bars = []
    for m in motifs:
        start_us, us = (m.start_us, m.duration_us) if measured else (m.predicted_start_us, m.predicted_us)
        if measured and us <= 0:
            continue
        text = f"{m.op}#{m.motif} {m.algorithm}, {format_bytes(m.nbytes)}: {format_us(us)}"
        bars += [_Bar(channel, m.op, start_us, us, text) for channel in m.channels]
    return bars


def _figure(rows: Sequence[_Row]) -> Figure:
    from plotly.subplots import make_subplots

    drawn = [bar for row in rows for bar in row.bars]
    tracks = list(dict.fromkeys(bar.track for bar in sorted(drawn, key=lambda bar: bar.comm)))
    groups = list(dict.fromkeys(bar.group for bar in drawn))
    colored = list(dict.fromkeys(bar.group for bar in drawn if bar.comm))
    tint = {group: _COMPUTE.get(group, _OTHER) for group in groups}
    tint |= {group: color(at) for at, group in enumerate(colored)}
    row_height, gap, top, bottom = 26, 60, 40, 110
    inner = len(rows) * row_height * max(len(tracks), 2) + gap * (len(rows) - 1)
    figure: Figure = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=gap / inner if len(rows) > 1 else 0.0,
        subplot_titles=[f"{escape(row.title)}{f', {format_us(row.end_us)}' if row.end_us else ''}" for row in rows],
    )  # fmt: skip
    shown: set[str] = set()
    for at, row in enumerate(rows, 1):
        for group in groups:
            some = [bar for bar in row.bars if bar.group == group]
            if not some:
                continue
            figure.add_bar(
                orientation="h", name=escape(group), legendgroup=escape(group), showlegend=group not in shown,
                marker={"color": tint[group], "line": _EDGE}, y=[escape(bar.track) for bar in some],
                base=[bar.start_us / _US_PER_MS for bar in some], x=[bar.us / _US_PER_MS for bar in some],
                hovertext=[escape(bar.text) for bar in some], hoverinfo="text", row=at, col=1,
            )  # fmt: skip
            shown.add(group)
        if row.end_us > 0:
            figure.add_vline(x=row.end_us / _US_PER_MS, row=at, col=1, line={"dash": "dot", "width": 1})
    last_us = max([row.end_us for row in rows] + [bar.start_us + bar.us for bar in drawn])
    figure.update_yaxes(categoryorder="array", categoryarray=[escape(track) for track in tracks][::-1], automargin=True)
    figure.update_xaxes(range=[0, 1.02 * last_us / _US_PER_MS], gridcolor="#eee")
    figure.update_xaxes(title_text="ms", row=len(rows), col=1)
    legend = {"orientation": "h", "y": -60 / inner, "yanchor": "top"}
    margin = {"l": 60, "r": 20, "t": top, "b": bottom}
    figure.update_layout(**look() | {"margin": margin}, barmode="overlay", height=top + bottom + inner, legend=legend)
    return figure


def _table(motifs: Sequence[MotifStatus]) -> str:
    names = ("motif", "algorithm", "channels", "bytes", "predicted", "measured", "ratio", "waited for")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                f"{m.op}#{m.motif}", m.algorithm, "+".join(m.channels), format_bytes(m.nbytes),
                format_us(m.predicted_us), format_us(m.duration_us) if m.duration_us else "",
                f"{m.duration_us / m.predicted_us:.2f}" if m.duration_us and m.predicted_us else "",
                format_us(m.wait_us) if m.wait_us else "",
            )
        )
        + "</tr>"
        for m in motifs
    )  # fmt: skip
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
