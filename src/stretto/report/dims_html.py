# SPDX-License-Identifier: Apache-2.0
"""Runs on multi-dimensional networks, in the terminal and in HTML: activity (Fig. 9 of Themis), sweeps, iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from ..dimensions.simulation import DimRun
from ..dimensions.training import IterationTime
from ..units import format_us
from .html import Section, figure_html, look
from .load_html import time_unit
from .style import BOUND, color

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHADES = " ▁▂▃▄▅▆▇█"
_LABEL = 6


def activity_plot(runs: Sequence[DimRun], *, width: int = 80) -> Text:
    """The share of time in which each dimension had a chunk, one line per dimension; all runs share one time axis."""
    longest = max(run.total_us for run in runs)
    columns = max(20, width - _LABEL - 8)
    text = Text()
    for run in runs:
        text.append(f"{run.schedule.name}", style="bold")
        text.append(f"  {format_us(run.total_us)}, {100 * run.utilization:.1f} % of all bandwidth\n")
        shares = run.activity(longest / columns)
        for at, row in enumerate(shares):
            text.append(f"{f'dim{at + 1}':<{_LABEL}}")
            bar = "".join(_SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1)))] for share in row)
            text.append(f"{bar:<{columns}}", style=Style(color=color(at)))
            text.append(f" {100 * run.busy_us[at] / run.total_us:5.1f} %\n")
    return text.append(f"{'':<{_LABEL}}0{format_us(longest):>{columns - 1}}\n")


def activity_section(runs: Sequence[DimRun], *, window_us: float = 100.0) -> Section:
    """The activity of every dimension over time, one row of curves per scheduler."""
    from plotly.subplots import make_subplots

    height = 200 * len(runs)
    unit, factor = time_unit(max(run.total_us for run in runs))
    figure: Figure = make_subplots(
        rows=len(runs),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[
            f"{run.schedule.name}: {format_us(run.total_us)}, {100 * run.utilization:.1f} %" for run in runs
        ],
        vertical_spacing=50 / height,
    )
    for row, run in enumerate(runs):
        for at, shares in enumerate(run.activity(window_us)):
            figure.add_scatter(
                x=[(k + 0.5) * window_us / factor for k in range(len(shares))],
                y=(100 * shares).round(2).tolist(),
                row=row + 1,
                col=1,
                name=f"dim{at + 1}",
                legendgroup=str(at),
                showlegend=row == 0,
                mode="lines",
                stackgroup="all",
                line={"color": color(at), "width": 1},
            )
    most = 100 * max(len(run.busy_us) for run in runs)
    figure.update_yaxes(title_text="% active", range=[0, 1.02 * most], dtick=100, gridcolor="#eee")
    figure.update_xaxes(title_text=unit, row=len(runs), col=1)
    legend = {"orientation": "h", "y": 1 + 45 / height, "yanchor": "bottom"}
    figure.update_layout(
        height=110 + height, **look() | {"margin": {"l": 60, "r": 20, "t": 70, "b": 40}}, legend=legend
    )
    first = runs[0]
    note = (
        f"{first.schedule.collective}, the share of each {window_us:g} us in which a dimension had a chunk, one "
        "dimension on top of the other: full height means that none of them idles; "
        f"{first.in_flight} stages in flight, {first.sharing} sharing."
    )
    return Section(heading="Activity of the dimensions", note=note, body=figure_html(figure))


def sweep_section(title: str, counts: Sequence[int], series: Mapping[str, Sequence[float]], note: str) -> Section:
    """Utilization over the number of chunks, one curve per scheduler.

    Args:
        title: heading of the section.
        counts: numbers of chunks.
        series: for each scheduler its utilization, 0..1, at every count.
        note: sentence below the heading.

    Returns:
        A section for `write_html`.
    """
    from plotly.graph_objects import Figure

    figure = Figure()
    for at, (name, values) in enumerate(series.items()):
        figure.add_scatter(
            x=list(counts), y=[100 * value for value in values], name=name, mode="lines+markers",
            line={"color": color(at), "width": 2},
        )  # fmt: skip
    figure.update_xaxes(type="log", title_text="chunks", tickvals=list(counts), gridcolor="#eee")
    figure.update_yaxes(title_text="% of all bandwidth", range=[0, 102], gridcolor="#eee")
    figure.update_layout(height=420, **look())
    return Section(heading=title, note=note, body=figure_html(figure))


def iteration_section(title: str, found: Sequence[IterationTime], note: str) -> Section:
    """Forward, backward and exposed communication as stacked bars, one bar per system (Fig. 12 of Themis).

    Args:
        title: heading of the section.
        found: one iteration per system.
        note: sentence below the heading.

    Returns:
        A section for `write_html`.
    """
    from plotly.graph_objects import Figure

    figure = Figure()
    parts = {
        "forward": [each.forward_us for each in found],
        "backward": [each.backward_us for each in found],
        "exposed, data parallel": [each.data_parallel_us for each in found],
        "exposed, model parallel": [each.model_parallel_us for each in found],
    }
    for at, (name, values) in enumerate(parts.items()):
        figure.add_bar(
            orientation="h", y=[each.system for each in found], x=[value / 1e3 for value in values], name=name,
            marker={"color": BOUND if name == "backward" else color(at)},
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms", gridcolor="#eee")
    figure.update_layout(barmode="stack", height=120 + 40 * len(found), **look())
    return Section(heading=title, note=note, body=figure_html(figure))
