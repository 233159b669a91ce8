# SPDX-License-Identifier: Apache-2.0
"""Plots for the terminal: a size sweep on logarithmic axes, and the activity of ranks over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.style import Style
from rich.text import Text

from ..simulator import Timeline
from ..units import format_bytes, format_us
from .style import BOUND, color, mark
from .sweep import Sweep
from .tracks import busy_share

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_SHADES = " ░▒▓█"
_LABEL = 6
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 1.5, 3, 7, 15, 30, 70, 1.2)


def sweep_plot(sweep: Sweep, *, width: int = 80, height: int = 20) -> Text:
    """Time as a multiple of the lower bound over bytes, both axes logarithmic.

    A letter marks every simulated point of its algorithm; where points coincide, the faster algorithm is shown.

    Args:
        sweep: the sweep.
        width: columns of the whole plot.
        height: rows of the plotting area.

    Returns:
        The plot with axes and legend.
    """
    names = sweep.by_speed
    ratios = [sweep.times_bound(name) for name in names]
    every = [value for row in ratios for value in row]
    low, high = min([1.0, *every]), max([1.5, *every]) * 1.05
    canvas = _Canvas(width - _LABEL - 1, height)
    x = _positions([math.log(size) for size in sweep.sizes], canvas.columns * 2 - 1)

    def y(ratio: float) -> float:
        return (math.log(high) - math.log(ratio)) / (math.log(high) - math.log(low)) * (canvas.rows * 4 - 1)

    ticks: dict[int, str] = {}
    for tick in _TICKS:
        if low <= tick <= high and all(abs(round(y(tick)) // 4 - row) > 1 for row in ticks):
            ticks[round(y(tick)) // 4] = f"{tick:g}x"
    canvas.curve([0, canvas.columns * 2 - 1], [y(1), y(1)], BOUND, dash=3)
    for number in reversed(range(len(names))):
        canvas.curve(x, [y(v) for v in ratios[number]], color(number))
    for at in range(len(x)):
        for number in sorted(range(len(names)), key=lambda number: -ratios[number][at]):
            canvas.letter(x[at], y(ratios[number][at]), mark(number), color(number))
    text = Text(f"{sweep.collective} on {sweep.cluster}: time, as a multiple of the lower bound\n")
    for row, line in enumerate(canvas.lines()):
        text.append(f"{ticks.get(row, ''):>{_LABEL}}{'┤' if row in ticks else '│'}", style="dim")
        text.append_text(line).append("\n")
    text.append(" " * _LABEL + "└" + "─" * canvas.columns + "\n", style="dim")
    text.append(_size_axis(sweep.sizes, x, canvas.columns) + "\n", style="dim")
    return text.append_text(_legend(names, width))


def busy_plot(timeline: Timeline, *, width: int = 80, max_rows: int = 16) -> Text:
    """A Gantt chart in shades: the share of each time slot in which each rank (or group of ranks) was sending.

    Args:
        timeline: the timeline.
        width: columns of the whole plot.
        max_rows: most rows; with more ranks, a row stands for several.

    Returns:
        The plot with its time axis.
    """
    columns = width - 14
    ranks = int(timeline.rank.max(initial=-1)) + 1
    if ranks == 0 or timeline.total_us <= 0:
        return Text("nothing moved\n")
    per_row = -(-ranks // max_rows)
    rows = -(-ranks // per_row)
    share = busy_share(timeline, (timeline.rank // per_row).astype(np.int64), rows, columns)
    text = Text()
    for row, shares in enumerate(share):
        first, last = row * per_row, min((row + 1) * per_row, ranks) - 1
        label = f"rank {first}" if first == last else f"ranks {first}-{last}"
        if len(label) > 13:
            label = f"{first}-{last}"
        text.append(f"{label:<13.13} ", style="dim")
        text.append("".join(_SHADES[min(4, math.ceil(s * 4))] for s in shares) + "\n", style=color(0))
    end = format_us(timeline.total_us)
    text.append(" " * 14 + "0" + end.rjust(columns - 1) + "\n", style="dim")
    return text.append(" " * 14 + "░ sending up to a quarter of the slot ... █ nearly all of it\n", style="dim")


class _Canvas:
    """Braille dots in a grid of cells, 2 dots wide and 4 high, with one color per cell."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._colors = [[""] * columns for _ in range(rows)]
        self._letters: dict[tuple[int, int], str] = {}

    def curve(self, xs: Sequence[float], ys: Sequence[float], color: str, *, dash: int = 1) -> None:
        """Draw straight lines through the points; with `dash` only every dash-th dot."""
        for x in range(round(xs[0]), round(xs[-1]) + 1, dash):
            self._dot(x, float(np.interp(x, xs, ys)), color)
            if dash == 1:
                # A steep piece needs the dots between this column and the next.
                here, there = np.interp([x, min(x + 1, xs[-1])], xs, ys)
                for y in range(round(min(here, there)) + 1, round(max(here, there))):
                    self._dot(x, y, color)

    def _dot(self, x: int, y: float, color: str) -> None:
        row, column = round(y) // 4, x // 2
        if 0 <= row < self.rows and 0 <= column < self.columns:
            self._dots[row][column] |= _BRAILLE[round(y) % 4][x % 2]
            self._colors[row][column] = color

    def letter(self, x: float, y: float, letter: str, color: str) -> None:
        """Put a letter in place of the dots of a cell."""
        row, column = min(round(y) // 4, self.rows - 1), min(round(x) // 2, self.columns - 1)
        self._letters[row, column] = letter
        self._colors[row][column] = color

    def lines(self) -> list[Text]:
        """The rows of the canvas, top first."""
        result = []
        for row in range(self.rows):
            line = Text()
            for column in range(self.columns):
                dots = self._dots[row][column]
                letter = self._letters.get((row, column))
                style = Style(color=self._colors[row][column] or None, bold=letter is not None)
                line.append(letter or (chr(0x2800 + dots) if dots else " "), style=style)
            result.append(line)
        return result


def _positions(values: Sequence[float], last: int) -> list[float]:
    """Positions in 0..last in proportion to the values; a single value is in the middle."""
    spread = values[-1] - values[0]
    return [last / 2 if spread == 0 else (value - values[0]) / spread * last for value in values]


def _size_axis(sizes: Sequence[int], x: Sequence[float], columns: int) -> str:
    """Labels under their points, as many as fit."""
    line = [" "] * (_LABEL + 1 + columns)
    free = 0
    for size, at in zip(sizes, x, strict=True):
        label = format_bytes(size)
        begin = min(max(_LABEL + 1 + round(at / 2) - len(label) // 2, 0), len(line) - len(label))
        if begin >= free:
            line[begin : begin + len(label)] = label
            free = begin + len(label) + 2
    return "".join(line).rstrip()


def _legend(names: Sequence[str], width: int) -> Text:
    text = Text()
    used = width
    entries = [(mark(i), name, color(i)) for i, name in enumerate(names)] + [("⠒", "lower bound", BOUND)]
    for letter, name, tint in entries:
        if used + len(name) + 5 > width:
            text.append(("\n" if text else "") + " " * (_LABEL + 1))
            used = _LABEL + 1
        text.append(letter, style=Style(color=tint, bold=True)).append(f" {name}   ")
        used += len(name) + 5
    return text.append("\n")
