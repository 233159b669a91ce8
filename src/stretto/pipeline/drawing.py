# SPDX-License-Identifier: Apache-2.0
"""Draws a simulated schedule as text: for each rank one line with its compute actions and one below with its sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import SENDS
from .simulation import PipelineRun

if TYPE_CHECKING:
    from rich.text import Text

FILL = {"F": "░", "I": "▓", "B": "▓", "W": "▒", "REDUCE_GRAD": "=", "SEND_F": "→", "SEND_B": "←"}
STYLE = {
    "F": "black on cyan", "B": "black on green", "I": "black on green", "W": "black on yellow",
    "REDUCE_GRAD": "black on white", "SEND_F": "cyan", "SEND_B": "green",
}  # fmt: skip
LEGEND = "░ forward  ▓ backward (input)  ▒ weights  → activations  ← gradients"


def draw(run: PipelineRun, *, width: int = 100, until_us: float | None = None) -> list[Text]:
    """Draw a run as lines of text, colored where the terminal can.

    Each box shows the number of its micro-batch, or ``stage:micro-batch`` where a rank holds several stages.

    >>> from stretto.pipeline import one_f_one_b, simulate, StageCosts
    >>> for line in draw(simulate(one_f_one_b(2, 2), StageCosts.even(2, transfer_us=0.5)), width=44):
    ...     print(line.plain.rstrip())
    rank 0 │0░░░1░░           0▓▓▓▓▓▓    1▓▓▓▓▓▓
           │    →  →→
    rank 1 │     0░░░0▓▓▓▓▓▓1░░░1▓▓▓▓▓▓
           │                ←←         ←←

    Args:
        run: the simulated schedule.
        width: columns of the terminal; at least 10 are used for the time axis.
        until_us: end of the time axis in microseconds; None (or <= 0) draws the whole run.

    Returns:
        Up to two lines per rank; a rank that sends nothing in that time has one.
    """
    from rich.text import Text

    ranks = len(run.schedule.ranks)
    label = len(f"rank {ranks - 1} ")
    columns = max(10, width - label - 1)
    end = until_us if until_us is not None and until_us > 0 else run.total_us
    scale = columns / end if end else 0.0
    several = run.schedule.num_stages > ranks
    cells = [[" "] * columns for _ in range(2 * ranks)]
    styles = [[""] * columns for _ in range(2 * ranks)]
    for span in run.spans:
        kind = span.action.kind
        if kind not in FILL or span.end_us <= span.start_us or span.start_us >= end:
            continue
        line = 2 * span.rank + (kind in SENDS)
        first = min(columns - 1, round(span.start_us * scale))
        after = min(columns, max(first + 1, round(span.end_us * scale)))
        text = FILL[kind] * (after - first)
        if kind in "FIBW":
            name = f"{span.action.stage}:{span.action.microbatch}" if several else str(span.action.microbatch)
            if len(name) < after - first or (len(name) == after - first == 1):
                text = name + text[len(name) :]
        for at, letter in zip(range(first, after), text, strict=True):
            cells[line][at], styles[line][at] = letter, STYLE[kind]
    lines = []
    for row, (letters, looks) in enumerate(zip(cells, styles, strict=True)):
        text_line = Text(f"rank {row // 2}".ljust(label) if row % 2 == 0 else " " * label)
        text_line.append("│")
        for letter, look in zip(letters, looks, strict=True):
            text_line.append(letter, look or None)
        if row % 2 == 0 or any(letter != " " for letter in letters):
            lines.append(text_line)
    return lines
