# SPDX-License-Identifier: Apache-2.0
"""Advice as one HTML page: the verdict, the step in bars, what each change gains, and what all of it rests on."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..advice import StepAdvice
from ..units import format_us
from .advice_text import changes_table, facts, inputs_table, verdict
from .bars_html import PAUSES, WAITS, parted_bars_html
from .html import Section, write_html
from .style import color
from .table_html import table_html

_MOST_RANKS = 16


def write_advice_html(path: str | Path, advice: StepAdvice) -> None:
    """Write the page.

    Args:
        path: file to write.
        advice: the advice.

    Raises:
        InvalidInput: the file cannot be written.
    """
    style = "align=left style='white-space:normal'"
    rows = "".join(f"<tr><td>{escape(name)}</td><td {style}>{escape(text)}</td></tr>" for name, text in facts(advice))
    where = f" on {advice.cluster.name}" if advice.cluster is not None else ""
    sections = [Section(heading="What to do", note=verdict(advice), body="")]
    note = "Of each rank, the median step: what it computes, how long it waits for communication, and other pauses."
    bars = _waiting_bars(advice) if advice.waiting else ""
    table = f"{bars}<table>{rows}</table>"
    sections.append(Section(heading="The step as it is", note=note if advice.waiting else "", body=table))
    if advice.changes:
        note = "Each change by itself. The dashed line is the lower bound with the buckets as they are."
        body = _changes_bars(advice) + table_html(changes_table(advice))
        sections.append(Section(heading="What each change would gain", note=note, body=body))
    if advice.advised:
        items = "".join(
            f"<tr><td>{escape(one.name)}</td><td {style}><code>{escape(one.how)}</code>"
            f"{f'<br>{escape(one.note)}' if one.note else ''}</td></tr>"
            for one in advice.advised
        )
        sections.append(Section(heading="How", note="The least effort first.", body=f"<table>{items}</table>"))
    why = f"Confidence: {advice.confidence}; {advice.confidence_why}."
    sections.append(Section(heading="What this rests on", note=why, body=table_html(inputs_table(advice))))
    write_html(path, title=f"Advice for {advice.workload.name}{where}", sections=sections)


def _waiting_bars(advice: StepAdvice) -> str:
    shown = sorted(advice.waiting, key=lambda one: -one.share)[:_MOST_RANKS]
    rows = []
    for one in sorted(shown, key=lambda one: one.rank):
        waits, pauses = ("waits", one.waits_us, WAITS), ("other pauses", one.idle_us, PAUSES)
        rows.append((f"rank {one.rank}", [("computes", one.compute_us, color(0)), waits, pauses], f"{one.share:.1%}"))
    return parted_bars_html(rows, label="How each rank spends a step", legend=True)


def _changes_bars(advice: StepAdvice) -> str:
    rows = [("as it is", advice.step_us, PAUSES)]
    rows += [(one.name, one.step_us, color(2 if one.worthwhile else 0)) for one in advice.changes]
    bars = [(name, [("step", us, tint)], format_us(us)) for name, us, tint in rows]
    label = "The step with each change, and the lower bound"
    return parted_bars_html(bars, label=label, bound_us=advice.bound_us)
