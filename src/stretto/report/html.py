# SPDX-License-Identifier: Apache-2.0
"""Sections of pages: a sweep against the bound, its table, a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ..simulator import Timeline
from ..units import format_bytes, format_us
from .bars_html import bars_html
from .load_html import load_figure, load_note, time_unit
from .page import Section as Section
from .page import figure_html as figure_html
from .page import page_html as page_html
from .page import write_html as write_html
from .style import BOUND, color
from .sweep import Sweep, rates
from .tracks import busy_share, tracks

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MAX_BARS = 4000
_MAX_BAR_TRACKS = 64
_MAX_HEAT_ROWS = 128
_HEAT_COLUMNS = 400


def sweep_section(sweep: Sweep) -> Section:
    """Time, algorithm bandwidth and the multiple of the bound over bytes, with one legend."""
    about = "".join(f", {key} {value}" for key, value in sweep.facts)
    note = f"{sweep.collective} on {sweep.cluster}{about}. Click a name to hide it."
    for name, reason in sweep.left_out.items():
        note += f" Left out: {name} ({reason})."
    return Section(heading="Algorithms against the lower bound", note=note, body=figure_html(_sweep_figure(sweep)))


def sweep_table_section(sweep: Sweep) -> Section:
    """A table of the numbers of a sweep; the fastest algorithm at each size is bold."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ["bytes", "lower bound", *sweep.by_speed])
    rows = []
    for at, size in enumerate(sweep.sizes):
        best = sweep.best(at)
        cells = "".join(
            f"<td{' class=best' if name == best else ''}>{format_us(sweep.time_us[name][at])}</td>"
            for name in sweep.by_speed
        )
        rows.append(f"<tr><td>{format_bytes(size)}</td><td>{format_us(sweep.bound_us[at])}</td>{cells}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return Section(heading="Times", note="Simulated; the fastest at each size is bold.", body=body)


def comparison_section(sweep: Sweep) -> Section:
    """The times of a sweep of one size as bars beside the lower bound, the fastest first."""
    bound, best = sweep.bound_us[0], sweep.best(0)
    times = [(name, sweep.time_us[name][0]) for name in sweep.by_speed]
    multiple = f", {times[0][1] / bound:.2f} times the lower bound" if bound > 0 else ""
    note = f"{best}: {format_us(times[0][1])} for {sweep.largest}{multiple}."
    for name, reason in sweep.left_out.items():
        note += f" Left out: {name} ({reason})."
    heading = "Time against the lower bound"
    return Section(heading=heading, note=note, body=bars_html(times, bound_us=bound, label=heading))


def timeline_section(
    timeline: Timeline, heading: str, *, until_us: float | None = None, counted: str = "transfers",
    tints: Sequence[str] = (),
) -> Section:  # fmt: skip
    """A timeline as a figure: one bar per transfer if the bars can be distinguished, and the load of links if known.

    Where neither can be drawn, the figure shows how busy each rank was.

    Args:
        timeline: the timeline.
        heading: heading of the section.
        until_us: where the time axes end, so that several sections can be compared; by default where the timeline ends.
        counted: what a span is.
        tints: a color for each span; by default one for each stream.

    Returns:
        A section for `write_html`.
    """
    until = max(timeline.total_us if until_us is None else until_us, 1e-9)
    shown = tracks(timeline, max_spans=_MAX_BARS)
    about = "".join(f", {key} {value}" for key, value in timeline.facts)
    note = f"{format_us(timeline.total_us)} for {timeline.num_spans:,} {counted}{about}."
    figures = []
    if timeline.link_load.size and timeline.total_us > 0:
        note += f" {load_note(timeline)}"
        figures.append(load_figure(timeline, until).update_layout(**look()))
    if timeline.num_spans and not shown.left_out and len(shown.rank) <= _MAX_BAR_TRACKS:
        below = "Below, one" if figures else "One"
        edged = "; the critical path has a dark edge" if len(timeline.critical_path) else ""
        note += f" {below} bar per {counted.removesuffix('s')}{edged}."
        figures.append(_bars(timeline, until, tints))
    if not figures:
        note += " Shade: the share of the time in which a rank was sending."
        figures.append(_heat(timeline, until))
    return Section(heading=heading, note=note, body="".join(map(figure_html, figures)))


def _sweep_figure(sweep: Sweep) -> Figure:
    from plotly.subplots import make_subplots

    figure: Figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None]],
        subplot_titles=(
            "time",
            "bandwidth (bytes / time)",
            "time as a multiple of the lower bound",
        ),
        vertical_spacing=0.13,
        horizontal_spacing=0.08,
        row_heights=[0.55, 0.45],
    )
    series = [(name, sweep.time_us[name], color(at), "solid") for at, name in enumerate(sweep.by_speed)]
    for name, times, tint, dash in [*series, ("lower bound", sweep.bound_us, BOUND, "dash")]:
        speed = rates(sweep.sizes, times)
        ratio = [t / b if b > 0 else 1.0 for t, b in zip(times, sweep.bound_us, strict=True)]
        hover = [
            f"{name}, {format_bytes(size)}: {format_us(us)}, {rate:.4g} GB/s, {times_bound:.3g}x the bound"
            for size, us, rate, times_bound in zip(sweep.sizes, times, speed, ratio, strict=True)
        ]
        for y, row, column in ((times, 1, 1), (speed, 1, 2), (ratio, 2, 1)):
            figure.add_scatter(
                x=sweep.sizes,
                y=y,
                row=row,
                col=column,
                name=name,
                legendgroup=name,
                showlegend=(row, column) == (1, 1),
                mode="lines+markers" if dash == "solid" else "lines",
                line={"color": tint, "dash": dash, "width": 2},
                marker={"size": 6},
                hovertext=hover,
                hoverinfo="text",
            )
    tens = [10**d for d in range(16) if sweep.sizes[0] <= 1.5 * 10**d and 10**d <= 1.5 * sweep.sizes[-1]]
    figure.update_xaxes(
        type="log",
        title_text="bytes",
        tickvals=tens,
        ticktext=[format_bytes(t) for t in tens],
        gridcolor="#eee",
    )
    figure.update_yaxes(gridcolor="#eee")
    figure.update_yaxes(type="log", title_text="us", dtick=1, exponentformat="power", row=1, col=1)
    figure.update_yaxes(title_text="GB/s", rangemode="tozero", row=1, col=2)
    steps = [1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000]
    figure.update_yaxes(
        type="log",
        title_text="times the bound",
        tickvals=steps,
        ticktext=[f"{s:g}x" for s in steps],
        row=2,
        col=1,
    )
    figure.update_layout(height=760, **look(), legend={"orientation": "h", "y": -0.09})
    return figure


def _bars(timeline: Timeline, until_us: float, tints: Sequence[str] = ()) -> Figure:
    from plotly.graph_objects import Bar, Figure

    unit, factor = time_unit(until_us)
    shown = tracks(timeline)
    labels = [f"rank {r} {shown.label(j, timeline.streams)}" for j, r in enumerate(shown.rank.tolist())]
    row = np.repeat(np.arange(len(labels)), np.diff(shown.ptr))
    critical = np.zeros(timeline.num_spans, np.bool_)
    critical[timeline.critical_path] = True
    spans = shown.order.tolist()
    hover = [
        f"{timeline.names[timeline.name[k]]}: {f'{format_bytes(timeline.nbytes[k])}, ' if timeline.nbytes[k] else ''}"
        f"{format_us(timeline.start_us[k])} to {format_us(timeline.end_us[k])}"
        for k in spans
    ]
    figure = Figure(
        Bar(
            orientation="h",
            y=[labels[j] for j in row.tolist()],
            base=(timeline.start_us[spans] / factor).tolist(),
            x=((timeline.end_us[spans] - timeline.start_us[spans]) / factor).tolist(),
            hovertext=hover,
            hoverinfo="text+y",
            marker={
                "color": [tints[k] for k in spans] if tints else [color(k) for k in timeline.stream[spans].tolist()],
                "line": {
                    "color": np.where(critical[spans], "#222", "#fff").tolist(),
                    "width": np.where(critical[spans], 1.5, 0.5).tolist(),
                },
            },
        )
    )
    figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1], automargin=True)
    figure.update_xaxes(title_text=unit, gridcolor="#eee", range=[0, until_us / factor])
    height = 140 + 18 * len(labels)
    figure.update_layout(barmode="overlay", bargap=0.15, height=height, **look())
    return figure


def _heat(timeline: Timeline, until_us: float) -> Figure:
    from plotly.graph_objects import Figure, Heatmap

    unit, factor = time_unit(until_us)
    ranks = int(timeline.rank.max(initial=0)) + 1
    per_row = -(-ranks // _MAX_HEAT_ROWS)
    rows = -(-ranks // per_row)
    share = busy_share(timeline, (timeline.rank // per_row).astype(np.int64), rows, _HEAT_COLUMNS)
    labels = [f"rank {r * per_row}" for r in range(rows)]
    slot = timeline.total_us / _HEAT_COLUMNS / factor
    figure = Figure(
        Heatmap(
            z=share.round(3).tolist(),
            x=[(k + 0.5) * slot for k in range(_HEAT_COLUMNS)],
            y=labels,
            zmin=0,
            zmax=1,
            colorscale=[[0, "#ffffff"], [1, color(0)]],
            colorbar={"title": "busy"},
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text=unit, range=[0, until_us / factor])
    figure.update_layout(height=120 + rows * max(5, min(20, 640 // rows)), **look())
    return figure


def look() -> dict[str, Any]:
    """The plotly layout that all figures share."""
    return {
        "plot_bgcolor": "#fff",
        "paper_bgcolor": "#fff",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 60, "r": 20, "t": 40, "b": 40},
    }
