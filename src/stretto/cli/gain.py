# SPDX-License-Identifier: Apache-2.0
"""What a job gained over itself unchanged, in words: one line for a summary, or some for the end of `stretto run`."""

from __future__ import annotations

from ..control.split import LEAST_UNDER_PLAN, GainSplit
from ..runtime.enforcer.report import Timing
from ..runtime.enforcer.trial import SETTLED
from ..units import format_us

NOTICEABLE = 1.005
"""A smaller gain is none: it rounds to 1.00x."""


def gain_line(split: GainSplit) -> str:
    """The three figures on one line, as far as they are known.

    Args:
        split: What was measured.

    Returns:
        For example ``gloo 370 ms -> our backend 270 ms (1.37x) -> plan 250 ms (1.08x), together 1.48x``; empty where
        nothing was measured.
    """
    parts = []
    if split.unchanged is not None:
        parts.append(f"{split.own} {format_us(split.unchanged.median_us)}")
    if split.backend is not None:
        parts.append(f"our backend {format_us(split.backend.median_us)}{_share(split.backend_share)}")
    if split.plan is not None:
        parts.append(f"plan {format_us(split.plan.median_us)}{_share(split.plan_share)}")
    if split.gain and split.kept != "unchanged":
        parts[-1] += f", together {split.gain:.2f}x"
    few = f", in only {split.plan.iterations} iterations" if split.early and split.plan is not None else ""
    return " -> ".join(parts) + (f" per iteration{few}" if parts else "")


def gain_lines(split: GainSplit) -> list[str]:
    """The three figures, a line each, with their spread and what was predicted of them; then what came of it.

    Args:
        split: What was measured.

    Returns:
        Lines without an end; the last one says what was gained, or that nothing was.
    """
    rows = []
    if split.unchanged is not None:
        rows.append((f"unchanged job ({split.own})", split.unchanged, 0.0, 0.0))
    if split.backend is not None:
        rows.append(("our backend, plain order", split.backend, split.backend_share, split.predicted_backend_us))
    if split.plan is not None:
        name = f"under plan {split.plan_number}, the last" if split.plan_number else "under the plan"
        rows.append((name, split.plan, split.plan_share, split.predicted_plan_us))
    lines = [f"{name + ':':<28} {_figure(timing, share, predicted_us)}" for name, timing, share, predicted_us in rows]
    if split.unchanged is None and split.no_unchanged:
        lines.insert(0, f"the unchanged job was not measured: {split.no_unchanged}")
    if split.whole_iterations:
        # Where nothing of ours runs, the ratio would tell how the machine has changed meanwhile.
        share = f", {split.whole_gain:.2f}x" if split.whole_gain and split.kept != "unchanged" else ""
        included = f"mean of {split.whole_iterations}; recording, probing, measuring and planning included"
        lines.append(f"{'the whole job:':<28} {format_us(split.whole_us)} per iteration{share} ({included})")
    return [*lines, verdict(split)]


def verdict(split: GainSplit) -> str:
    """What was gained over the unchanged job, or that nothing was, in one sentence."""
    runs = {"unchanged": f"the job runs on {split.own}, as without us", "backend": "our backend in plain order runs"}
    now = runs.get(split.kept, "the plan runs")
    if split.unchanged is None:
        gained = "what was gained over the unchanged job is not known"
        share = split.plan_share if split.kept == "plan" else 0.0
        return f"{gained}; the plan is {share:.2f} times as fast as plain order" if share else gained
    if split.kept == "unchanged":
        count = split.backend.iterations if split.backend is not None else 0
        tried = f"; our backend was {split.backend_share:.2f} times as fast in {count} iterations, too few to be sure"
        return f"nothing was gained: {now}{tried if split.backend_share >= NOTICEABLE else ''}"
    if split.early and split.plan is not None:
        few = f"{split.plan.iterations} iteration{'s' * (split.plan.iterations != 1)}"
        seen = f"{split.gain:.2f} times as fast as the unchanged job in these"
        return f"too early to say what was gained: {few} under the plan, of {LEAST_UNDER_PLAN} at least ({seen})"
    if split.gain < NOTICEABLE:
        said = f"nothing was gained: {split.gain:.2f} times as fast as the unchanged job; {now}"
        if split.kept == "plan" and split.plan is not None and split.plan.iterations < SETTLED:
            said += f" (for {split.plan.iterations} iterations: after {SETTLED} it is measured in turns with that job)"
        return said
    shares = f"our backend {split.backend_share:.2f}x"
    if split.kept == "plan" and split.plan_share:
        shares += f", the plan {split.plan_share:.2f}x"
    whole = f"; over the whole job {split.whole_gain:.2f} times" if split.whole_gain else ""
    return f"gained: {split.gain:.2f} times as fast as the unchanged job ({shares}){whole}"


def _share(share: float) -> str:
    return f" ({share:.2f}x)" if share else ""


def _figure(timing: Timing, share: float, predicted_us: float) -> str:
    text = f"{format_us(timing.median_us)} per iteration{f', {share:.2f}x' if share else ''}"
    text += f" (median of {timing.iterations}, half of them {format_us(timing.low_us)} to {format_us(timing.high_us)}"
    if predicted_us > 0 and timing.median_us > 0:
        off = predicted_us / timing.median_us - 1
        text += f"; predicted {format_us(predicted_us)}, {abs(off):.0%} too {'long' if off > 0 else 'short'}"
    return text + ")"
