# SPDX-License-Identifier: Apache-2.0
"""The load of links over time as a heat map: which links are full, and when."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from ..simulator import Timeline
from .style import color

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LOAD_SLOTS = 200
"""In how many slots of time pages show the load of links; what `simulate` is asked to record for them."""
_MOST_LINKS = 32
_OF_A_KIND = 8


def time_unit(longest_us: float) -> tuple[str, float]:
    """The unit of a time axis that ends there, and how many microseconds it has.

    >>> time_unit(900.0), time_unit(2e5), time_unit(4e7)
    (('us', 1.0), ('ms', 1000.0), ('s', 1000000.0))
    """
    return ("us", 1.0) if longest_us < 1e4 else ("ms", 1e3) if longest_us < 1e7 else ("s", 1e6)


def load_note(timeline: Timeline) -> str:
    """What the heat map shows, in two sentences."""
    used = timeline.link_bytes > 0
    busy = timeline.link_utilization[used]
    shown = len(_shown(timeline))
    which = f"the fullest of each kind, {shown} of the {len(busy)}" if shown < len(busy) else f"all {shown}"
    return (
        f"Shade: how much of what a link can carry it carries, over time; {which} links in use. "
        f"The fullest is busy {busy.max(initial=0.0):.0%} of the time, a link in use {busy.mean():.0%} on average."
    )


def _shown(timeline: Timeline) -> list[int]:
    """The links to show, the fullest first, but not only those of one kind: they differ in more than their numbers."""
    kinds: dict[str, list[int]] = {}
    for link in np.argsort(-timeline.link_busy_us, kind="stable").tolist():
        if timeline.link_bytes[link] > 0:
            kinds.setdefault(re.sub(r"\d+", "", timeline.link_names[link]), []).append(link)
    each = max(_OF_A_KIND, _MOST_LINKS // max(len(kinds), 1))
    return [link for links in kinds.values() for link in links[:each]][:_MOST_LINKS]


def load_figure(timeline: Timeline, until_us: float) -> Figure:
    """A heat map of links and time.

    Args:
        timeline: a timeline with a record of the load of its links.
        until_us: where the time axis ends, so that several pictures can be compared.

    Returns:
        The figure, without the look that all figures share.
    """
    from plotly.graph_objects import Figure, Heatmap

    order = _shown(timeline)
    unit, factor = time_unit(until_us)
    slots = timeline.link_load.shape[1]
    slot = timeline.total_us / slots / factor
    figure = Figure(
        Heatmap(
            z=timeline.link_load[order].round(3).tolist(),
            x=[round((at + 0.5) * slot, 9) for at in range(slots)],
            y=[escape(timeline.link_names[link]) for link in order],
            zmin=0,
            zmax=1,
            colorscale=[[0, "#ffffff"], [1, color(0)]],
            colorbar={"tickformat": ".0%", "thickness": 12},
            hovertemplate=f"%{{y}}, %{{x:.4g}} {unit}: %{{z:.0%}}<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", automargin=True, dtick=1)
    figure.update_xaxes(title_text=unit, range=[0, until_us / factor])
    figure.update_layout(height=110 + 18 * len(order))
    return figure
