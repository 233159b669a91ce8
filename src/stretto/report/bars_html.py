# SPDX-License-Identifier: Apache-2.0
"""Times as horizontal bars beside the lower bound, in plain HTML: its text keeps its size on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..units import format_us
from .style import BOUND, color

Part = tuple[str, float, str]
"""What a part of a bar is, its microseconds, and its color."""


def bars_html(times_us: Sequence[tuple[str, float]], *, label: str, bound_us: float = 0.0) -> str:
    """One bar for each time on one axis, the least of them in another color, and a line at the lower bound.

    Args:
        times_us: names and times, in the order in which they are drawn.
        label: what the picture shows, for readers that do not see it.
        bound_us: the lower bound; 0: none is drawn.

    Returns:
        HTML for the body of a section.
    """
    least = min((us for _, us in times_us), default=0.0)
    rows = [(name, [("time", us, color(2 if us <= least else 0))], format_us(us)) for name, us in times_us]
    return parted_bars_html(rows, label=label, bound_us=bound_us)


def parted_bars_html(
    rows: Sequence[tuple[str, Sequence[Part], str]], *, label: str, bound_us: float = 0.0, legend: bool = False
) -> str:
    """Bars of several parts on one axis.

    Args:
        rows: names, the parts of their bars, and what is written behind each.
        label: what the picture shows, for readers that do not see it.
        bound_us: where a dashed line is drawn; 0: nowhere.
        legend: whether the colors of the parts are explained above.

    Returns:
        HTML for the body of a section.
    """
    longest = max([bound_us, *(sum(us for _, us, _ in parts) for _, parts, _ in rows)]) or 1.0
    mark = f"<i style='left:{100 * bound_us / longest:.2f}%'></i>" if bound_us > 0 else ""
    lines = []
    for name, parts, behind in rows:
        fills = "".join(
            f"<b style='width:{100 * us / longest:.2f}%;background:{tint}' "
            f"title='{escape(f'{name}, {what}: {format_us(us)}', quote=True)}'></b>"
            for what, us, tint in parts
        )
        lines.append(f"<span>{escape(name)}</span><span class=bar>{fills}{mark}</span><span>{escape(behind)}</span>")
    if bound_us > 0:
        lines.append(f"<span>lower bound</span><span class=bar>{mark}</span><span>{escape(format_us(bound_us))}</span>")
    keys = dict.fromkeys((what, tint) for _, parts, _ in rows for what, _, tint in parts) if legend else {}
    key = "".join(f"<span><b style='background:{tint}'></b>{escape(what)}</span> " for what, tint in keys)
    top = f"<div class=key>{key}</div>" if key else ""
    return f"{top}<div class=bars role='img' aria-label='{escape(label, quote=True)}'>{''.join(lines)}</div>"


WAITS, PAUSES = color(1), BOUND
"""The colors of time that is spent waiting, and of other time without compute."""
