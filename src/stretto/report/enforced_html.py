"""A running job as one page: what its plan promised, above what is measured, on the same clock and in the same form."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..units import format_us
from .html import Section, figure_html, look, write_html
from .style import colour, short_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..control.messages import JobStatus, MotifStatus, Status

_MAX_MOTIFS = 3000
_US_PER_MS = 1e3


def write_enforced_html(path: str | Path, status: Status) -> None:
    """Write the page, with a part for every job."""
    sections = [section for job in status.jobs for section in _sections(job)]
    if not sections:
        sections = [Section(heading="No job", note="The controller has not heard of any.")]
    write_html(path, title="Plans, promised and measured", sections=sections)


def _sections(job: JobStatus) -> list[Section]:
    plan = f"plan {job.plan.number}, hash {job.plan.hash}" if job.plan.number else "plain order"
    note = f"{job.size} ranks, {plan}; {job.about}."
    if job.plan.number and job.plain_us:
        note += f" In plain order {format_us(job.plain_us)} per iteration, now {format_us(job.iteration_us)}."
    times = {"predicted": job.predicted_us, "measured": job.iteration_us, "plain order": job.plain_us}
    rows = "".join(f"<tr><td>{name}</td><td>{format_us(us)}</td></tr>" for name, us in times.items() if us)
    if job.predicted_us and job.iteration_us:
        note += f" That is {job.iteration_us / job.predicted_us:.2f} times what was predicted."
    head = Section(heading=f"Job {job.job}", note=note, body=f"<table><tbody>{rows}</tbody></table>")
    shown = job.motifs[:_MAX_MOTIFS]
    if not shown:
        return [head]
    left_out = f" The first {_MAX_MOTIFS} of {len(job.motifs)} motifs." if len(job.motifs) > len(shown) else ""
    timelines = Section(
        heading="Predicted beside measured",
        note="One bar per motif, on its channels, from the begin of an iteration to its end (the dotted line); "
        "measured by rank 0, medians of its last window. Motifs wait for the slowest rank inside their bars."
        f"{left_out}",
        body=figure_html(_figure(shown, (job.predicted_us, job.iteration_us))),
    )
    return [head, timelines, Section(heading="Motifs", body=_table(shown))]


def _figure(motifs: Sequence[MotifStatus], ends_us: tuple[float, float]) -> Figure:
    from plotly.graph_objects import Bar
    from plotly.subplots import make_subplots

    channels = list(dict.fromkeys(channel for motif in motifs for channel in motif.channels))
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=("predicted", "measured")
    )
    for number, op in enumerate(dict.fromkeys(motif.op for motif in motifs)):
        for row in (1, 2):
            bars = [
                (channel, *((m.predicted_start_us, m.predicted_us) if row == 1 else (m.start_us, m.duration_us)), m)
                for m in motifs
                for channel in m.channels
                if m.op == op and (row == 1 or m.duration_us > 0)
            ]
            figure.add_trace(
                Bar(
                    orientation="h", name=op, legendgroup=op, showlegend=row == 1, marker={"color": colour(number)},
                    y=[channel for channel, *_ in bars], base=[start / _US_PER_MS for _, start, *_ in bars],
                    x=[us / _US_PER_MS for _, _, us, _ in bars],
                    hovertext=[
                        f"{m.op}#{m.motif} {m.algorithm}, {short_bytes(m.nbytes)}: {format_us(us)}"
                        for _, _, us, m in bars
                    ],
                    hoverinfo="text",
                ),
                row=row, col=1,
            )  # fmt: skip
    for row, end_us in enumerate(ends_us, 1):
        if end_us > 0:
            figure.add_vline(x=end_us / _US_PER_MS, row=row, col=1, line={"dash": "dot", "width": 1})
    figure.update_yaxes(categoryorder="array", categoryarray=channels[::-1])
    figure.update_xaxes(title_text="ms", row=2, col=1)
    figure.update_layout(**look(), barmode="overlay", height=200 + 90 * len(channels))
    return figure


def _table(motifs: Sequence[MotifStatus]) -> str:
    names = ("motif", "algorithm", "channels", "bytes", "predicted", "measured", "ratio", "waited for")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                f"{m.op}#{m.motif}", m.algorithm, "+".join(m.channels), short_bytes(m.nbytes),
                format_us(m.predicted_us), format_us(m.duration_us) if m.duration_us else "",
                f"{m.duration_us / m.predicted_us:.2f}" if m.duration_us and m.predicted_us else "",
                format_us(m.wait_us) if m.wait_us else "",
            )
        )
        + "</tr>"
        for m in motifs
    )  # fmt: skip
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
