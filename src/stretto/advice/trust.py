# SPDX-License-Identifier: Apache-2.0
"""Judges how far to believe the model of a step: whether it can be used at all, and with what confidence."""

from __future__ import annotations

from collections.abc import Sequence

from ..units import format_us
from ..workload.kineto_waiting import StepWaiting
from .advice import WORTHWHILE, Confidence

CLOSE, FAR = 0.10, 0.25
"""The model's step is close to the measured one within the first share, and far from it beyond the second."""
OTHERWISE = 1.5
"""Recorded iterations that took this many times as long as the measured ones are not the same job."""
FEW_STEPS = 3
"""A trace of fewer steps gives no high confidence: docs/traces.md asks for three to ten."""


def contradiction(bound_us: float, measured_us: float, recorded_us: float = 0.0) -> str:
    """Why a model is unusable whose least time is longer than what was measured; empty where it is not.

    A difference that is too small for a change to be advised is none. A job's step is recorded in other iterations than
    those that are measured: where these took somewhat longer, so does the model, and its ratios stand.

    >>> contradiction(812_200.0, 496_900.0)
    'its least time, 812.2 ms, is longer than the 496.9 ms that were measured'
    >>> contradiction(500_000.0, 496_900.0)
    ''
    >>> contradiction(178_000.0, 137_500.0, recorded_us=180_000.0)
    ''

    Args:
        bound_us: The model's least time.
        measured_us: The step as it was measured; 0 where it was not.
        recorded_us: The iterations from which the step was recorded, where others were measured; 0 where not.

    Returns:
        The reason.
    """
    known_us = max(measured_us, recorded_us) if recorded_us <= OTHERWISE * measured_us else measured_us
    if not 0 < known_us * (1 + WORTHWHILE) < bound_us:
        return ""
    return f"its least time, {format_us(bound_us)}, is longer than the {format_us(measured_us)} that were measured"


def other_hosts(trace_hosts: int, taken: int) -> str:
    """Why a model is unusable whose ranks share hosts that the trace's did not; empty where it is not.

    >>> other_hosts(2, 1)
    'the ranks of the trace were on 2 hosts, those of the model are on 1'
    >>> other_hosts(1, 2)
    ''
    """
    if trace_hosts <= taken:
        return ""
    return f"the ranks of the trace were on {trace_hosts} hosts, those of the model are on {taken}"


def confidence_in_model(
    model_us: float, measured_us: float, *, waiting: Sequence[StepWaiting], missing: int, unusable: str,
    unexplained: float, recorded_us: float = 0.0,
) -> tuple[Confidence, str]:  # fmt: skip
    """How far to believe the simulated gains, and why.

    Args:
        model_us: The step as it is, simulated.
        measured_us: The step as it was measured; 0 where it was not.
        waiting: The measured steps of ranks.
        missing: The number of ranks of which there is no trace, where there are traces.
        unusable: Why the model cannot be used; empty where it can.
        unexplained: How many times longer collectives took than the network lets expect, for no known reason.
        recorded_us: The iterations from which the step was recorded, where others were measured; 0 where not.

    Returns:
        The confidence and a sentence.
    """
    if not measured_us:
        return "low", "nothing was measured: record a trace of some steps"
    off = model_us / measured_us - 1
    said = f"the model's step is {format_us(model_us)}, {off:+.0%} of the measured one"
    if recorded_us > (1 + CLOSE) * measured_us:
        said += (
            f"; the iterations that were recorded took longer than those that were measured, {format_us(recorded_us)}"
        )
    if unusable:
        return "low", said
    if unexplained:
        return "low", f"why collectives take {unexplained:.1f} times as long as expected is not known; {said}"
    if abs(off) > FAR:
        return "low", said
    few = few_steps(waiting)
    if abs(off) > CLOSE or missing or few:
        ranks = f"{len(waiting)} rank{'s' if len(waiting) > 1 else ''}"
        stand = f"; the traces of {ranks} stand for all" if missing else ""
        return "medium", said + stand + few
    return "high", said


def confidence_in_trace(waiting: Sequence[StepWaiting], communicates: bool) -> tuple[Confidence, str]:
    """How far to believe what a trace says without a cluster, and why.

    Args:
        waiting: The measured steps of ranks.
        communicates: Whether the step has collectives.

    Returns:
        The confidence and a sentence.
    """
    if not waiting:
        return "low" if communicates else "high", "nothing was measured and there is no cluster"
    few = few_steps(waiting)
    return "medium" if few else "high", "the waiting was measured" + few


def few_steps(waiting: Sequence[StepWaiting]) -> str:
    """What to say of a trace with fewer steps than a median needs; empty where there are enough."""
    steps = min((one.steps for one in waiting), default=FEW_STEPS)
    return f"; of {steps} step{'s' * (steps > 1)} only: record {FEW_STEPS} to 10" if steps < FEW_STEPS else ""
