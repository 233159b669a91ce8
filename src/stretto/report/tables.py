# SPDX-License-Identifier: Apache-2.0
"""Tables of timelines and sweeps for the terminal. Names come from files, so they are never read as rich markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from ..simulator import Timeline
from ..units import format_bytes, format_us
from .sweep import Sweep
from .table import ResultTable

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..simulator.bounds import Bound

_PATH_ENDS = 4
_BUSIEST = 5


def timeline_tables(timeline: Timeline, *, cluster: Cluster | None = None, bound: Bound | None = None) -> Group:
    """The main figures of a timeline: total and bound, channels, busiest links, critical path.

    Args:
        timeline: the timeline.
        cluster: the cluster it was simulated on, for the table of channels; None leaves that table out.
        bound: the lower bound; None leaves it out.

    Returns:
        The tables, one below the other.
    """
    parts = [_summary(timeline, bound)]
    if cluster is not None and cluster.num_links == len(timeline.link_names):
        parts.append(_channels(timeline, cluster))
    if len(timeline.link_names):
        parts.append(_links(timeline))
    if len(timeline.critical_path):
        parts.append(_critical_path(timeline))
    return Group(*(Padding(part, (0, 0, 1, 0), expand=False) for part in parts))


def sweep_table(sweep: Sweep, *, width: int = 80) -> ResultTable:
    """At every size the best algorithm with its time, then those of the others, as many as fit into `width` columns."""
    names = sweep.by_speed
    leaders = dict.fromkeys(sweep.best(at) for at in range(len(sweep.sizes)))
    shown: list[str] = []
    free = width - 44 - max(map(len, leaders))
    for name in (*leaders, *(n for n in names if n not in leaders)):
        free -= max(len(name), 9) + 2
        if free >= 0:
            shown.append(name)
    shown.sort(key=names.index)
    table = ResultTable(">bytes", ">bound", "best", ">time", ">of the bound", *(f">{name}" for name in shown))
    table.columns[1].style = "dim"
    for at, size in enumerate(sweep.sizes):
        best = sweep.best(at)
        cells = [Text(format_us(sweep.time_us[name][at]), style="bold green" if name == best else "") for name in shown]
        bound = sweep.bound_us[at]
        multiple = f"{sweep.time_us[best][at] / bound:.2f}x" if bound > 0 else ""
        time = Text(format_us(sweep.time_us[best][at]), style="bold green")
        table.add_row(format_bytes(size), format_us(bound), Text(best), time, multiple, *cells)
    if len(shown) < len(names):
        table.caption = f"{len(names) - len(shown)} more algorithms are in the plot"
    return table


def comparison_table(sweep: Sweep) -> ResultTable:
    """A sweep of one size: every algorithm with its time, rate and multiple of the bound, fastest first."""
    table = ResultTable("algorithm", ">time", ">GB/s", ">of the bound")
    for position, name in enumerate(sweep.by_speed):
        us = sweep.time_us[name][0]
        multiple = f"{us / sweep.bound_us[0]:.2f}x" if sweep.bound_us[0] > 0 else ""
        rate = f"{sweep.algorithm_gb_per_s(name)[0]:.4g}"
        table.add_row(Text(name), format_us(us), rate, multiple, style="bold" if position == 0 else "")
    table.add_row("lower bound", format_us(sweep.bound_us[0]), "", "1x", style="dim")
    return table


def _summary(timeline: Timeline, bound: Bound | None) -> ResultTable:
    table = ResultTable("", "", header=False)
    table.columns[0].style = "dim"
    for key, value in timeline.facts:
        table.add_row(Text(key), Text(value))
    table.add_row("transfers", f"{timeline.num_spans:,}, {format_bytes(float(timeline.nbytes.sum()))} in all")
    table.add_row("total", Text(format_us(timeline.total_us), style="bold"))
    if bound is not None:
        gap = f", {timeline.total_us / bound.total_us:.3f}x the bound" if bound.total_us > 0 else ""
        table.add_row("lower bound", f"{format_us(bound.total_us)}{gap}")
        table.add_row("", Text(bound.reason, style="dim"))
    return table


def _channels(timeline: Timeline, cluster: Cluster) -> ResultTable:
    table = ResultTable("channel", ">links used", ">bytes", ">busy, average", ">busiest")
    for index, channel in enumerate(cluster.channels):
        here = cluster.link_channel == index
        used = here & (timeline.link_bytes > 0)
        busy = timeline.link_utilization[used]
        table.add_row(
            Text(channel),
            f"{np.count_nonzero(used)} of {np.count_nonzero(here)}",
            format_bytes(float(timeline.link_bytes[used].sum())),
            f"{100 * busy.mean():.1f} %" if len(busy) else "-",
            f"{100 * busy.max():.1f} %" if len(busy) else "-",
        )
    return table


def _links(timeline: Timeline) -> ResultTable:
    table = ResultTable("busiest links", ">busy", ">bytes")
    order = np.argsort(-timeline.link_busy_us, kind="stable")
    used = int(np.count_nonzero(timeline.link_bytes > 0))
    for index in order[: min(_BUSIEST, used)].tolist():
        table.add_row(
            Text(timeline.link_names[index]),
            f"{100 * timeline.link_utilization[index]:.1f} %",
            format_bytes(float(timeline.link_bytes[index])),
        )
    if used > _BUSIEST:
        table.add_row(Text(f"{used - _BUSIEST} more", style="dim"), "", "")
    return table


def _critical_path(timeline: Timeline) -> ResultTable:
    path = timeline.critical_path.tolist()
    table = ResultTable(f"critical path ({len(path)})", ">rank", "stream", ">from", ">to", ">bytes")
    keep = path if len(path) <= 2 * _PATH_ENDS + 1 else [*path[:_PATH_ENDS], -1, *path[-_PATH_ENDS:]]
    for span in keep:
        if span < 0:
            table.add_row(Text(f"{len(path) - 2 * _PATH_ENDS} more", style="dim"))
            continue
        table.add_row(
            Text(timeline.names[timeline.name[span]]),
            str(timeline.rank[span]),
            Text(timeline.streams[timeline.stream[span]]),
            format_us(float(timeline.start_us[span])),
            format_us(float(timeline.end_us[span])),
            format_bytes(float(timeline.nbytes[span])),
        )
    return table
