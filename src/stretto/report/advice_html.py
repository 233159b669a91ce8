# SPDX-License-Identifier: Apache-2.0
"""Advice as one HTML page: the verdict, the step in bars, what each change gains, and what all of it rests on."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..advice import StepAdvice
from ..units import format_us
from .advice_text import changes_table, facts, inputs_table, verdict
from .html import Section, write_html
from .style import BOUND, color
from .table_html import table_html

_WIDTH, _ROW, _LEFT, _RIGHT = 900, 26, 250, 110


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
    sections = [Section(heading="What to do", note=verdict(advice), body=f"<table>{rows}</table>")]
    if advice.waiting:
        note = "Of each rank, the median step: what it computes, how long it waits for communication, and other pauses."
        sections.append(Section(heading="The step as it is", note=note, body=_waiting_svg(advice)))
    if advice.changes:
        note = "Each change by itself, simulated like the step as it is. The dashed line is the lower bound."
        body = _changes_svg(advice) + table_html(changes_table(advice.changes))
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


def _waiting_svg(advice: StepAdvice) -> str:
    longest = max(one.step_us for one in advice.waiting)
    shown = sorted(advice.waiting, key=lambda one: -one.share)[:16]
    tints = {"computes": color(0), "waits": color(1), "other pauses": "#bbb"}
    bars = []
    for number, one in enumerate(sorted(shown, key=lambda one: one.rank)):
        parts = [(one.compute_us, "computes"), (one.waits_us, "waits"), (one.idle_us, "other pauses")]
        bars.append(_bar(number, f"rank {one.rank}", parts, longest, tints, f"{one.share:.1%}"))
    legend = "".join(
        f"<rect x='{_LEFT + 150 * at}' y='4' width='12' height='12' fill='{tint}'/>"
        f"<text x='{_LEFT + 150 * at + 18}' y='15'>{escape(name)}</text>"
        for at, (name, tint) in enumerate(tints.items())
    )
    return _svg(len(shown), legend + "".join(bars), "How each rank spends a step")


def _changes_svg(advice: StepAdvice) -> str:
    rows = [("as it is", advice.model_us, BOUND)]
    rows += [(one.name, one.step_us, color(2 if one.worthwhile else 0)) for one in advice.changes]
    longest = max(us for _, us, _ in rows)
    bars = [
        _bar(number, name, [(us, "step")], longest, {"step": tint}, format_us(us))
        for number, (name, us, tint) in enumerate(rows)
    ]
    at = _LEFT + (_WIDTH - _LEFT - _RIGHT) * advice.bound_us / longest
    line = (
        f"<line x1='{at:.1f}' x2='{at:.1f}' y1='20' y2='{24 + _ROW * len(rows)}' stroke='currentColor' "
        f"stroke-dasharray='4 3'><title>lower bound {escape(format_us(advice.bound_us))}</title></line>"
        f"<text x='{at:.1f}' y='15' text-anchor='middle'>bound {escape(format_us(advice.bound_us))}</text>"
    )
    return _svg(len(rows), "".join(bars) + line, "The step with each change, and the lower bound")


def _bar(
    number: int, name: str, parts: list[tuple[float, str]], longest: float, tints: dict[str, str], end: str
) -> str:
    y, x = 24 + number * _ROW, float(_LEFT)
    room = _WIDTH - _LEFT - _RIGHT
    text = f"<text x='{_LEFT - 8}' y='{y + 15}' text-anchor='end'>{escape(name[:36])}</text>"
    for us, kind in parts:
        width = room * us / longest if longest > 0 else 0.0
        about = f"{escape(name)} {escape(kind)}: {escape(format_us(us))}"
        text += f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{_ROW - 6}' fill='{tints[kind]}'>"
        text += f"<title>{about}</title></rect>"
        x += width
    return f"{text}<text x='{x + 6:.1f}' y='{y + 15}'>{escape(end)}</text>"


def _svg(rows: int, body: str, label: str) -> str:
    height = 32 + _ROW * rows
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' role='img' font-size='13' "
        f"fill='currentColor' aria-label='{escape(label)}'>{body}</svg>"
    )
