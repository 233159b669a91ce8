# SPDX-License-Identifier: Apache-2.0
"""What a job gained over itself unchanged, with the share of our backend and the share of the plan apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from ..runtime.enforcer.report import Timing

LEAST_UNDER_PLAN = 20
"""Iterations under a plan before it is said what was gained by it."""


class GainSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Three ways of running the same training step, as they were measured in this job.

    `unchanged` is the job as it was before anything was switched, on its own backend; `backend` is the same order of
    calls on ours; `plan` is the last plan that was active. Each is None where it was not measured. The predictions
    are the planner's, of the figure that they stand beside; 0 where there is none.
    """

    own: str = ""
    """The backend that the job asked for."""
    unchanged: Timing | None = None
    backend: Timing | None = None
    plan: Timing | None = None
    no_unchanged: str = ""
    """Why `unchanged` is not known."""
    predicted_backend_us: float = 0.0
    predicted_plan_us: float = 0.0
    plan_number: int = 0
    """The number of the plan that `plan` is of, where others were measured before; else 0."""
    whole_us: float = 0.0
    """The mean iteration of the whole job by the clock: recording, probing, measuring and planning again included."""
    whole_iterations: int = 0
    """How many these are: all but the first."""
    kept: str = ""
    """What runs now: "unchanged", "backend" or "plan"."""
    backend_share: float = 0.0
    """How many times faster our backend is than the unchanged job, both in the application's order; 0: not known."""
    plan_share: float = 0.0
    """How many times faster the plan is than the application's order on our backend; 0: not known."""
    gain: float = 0.0
    """How many times faster what runs now is than the unchanged job; 0 where one of them was not measured."""
    whole_gain: float = 0.0
    """How many times faster the whole job was than the unchanged one; 0 where that was not measured."""

    @property
    def early(self) -> bool:
        """Whether the plan that runs has had too few iterations to say what it gains."""
        return self.kept == "plan" and self.plan is not None and self.plan.iterations < LEAST_UNDER_PLAN


def split(
    *, own: str = "", unchanged: Timing | None = None, backend: Timing | None = None, plan: Timing | None = None,
    no_unchanged: str = "", predicted_backend_us: float = 0.0, predicted_plan_us: float = 0.0, kept: str = "",
    plan_number: int = 0, whole_us: float = 0.0, whole_iterations: int = 0,
) -> GainSplit:  # fmt: skip
    """The three figures with their ratios; arguments are the fields of `GainSplit`.

    >>> each = (Timing(median_us=us, low_us=us, high_us=us, iterations=8) for us in (300.0, 200.0, 100.0))
    >>> found = split(own="gloo", kept="plan", **dict(zip(("unchanged", "backend", "plan"), each)))
    >>> found.backend_share, found.plan_share, found.gain
    (1.5, 2.0, 3.0)

    Args:
        own: The backend that the job asked for.
        unchanged: Its iterations on that backend.
        backend: Its iterations on ours in plain order.
        plan: Its iterations under a plan.
        no_unchanged: Why there is no `unchanged`.
        predicted_backend_us: The predicted iteration in plain order.
        predicted_plan_us: The predicted iteration under the plan.
        kept: Which of the three the job runs on with.
        plan_number: The number of the plan, where it was not the only one.
        whole_us: The mean iteration of the whole job.
        whole_iterations: How many iterations that is the mean of.

    Returns:
        The figures with `backend_share`, `plan_share`, `gain` and `whole_gain`.
    """
    now = {"unchanged": unchanged, "backend": backend, "plan": plan}.get(kept)
    return GainSplit(
        own=own, unchanged=unchanged, backend=backend, plan=plan, no_unchanged=no_unchanged,
        predicted_backend_us=predicted_backend_us, predicted_plan_us=predicted_plan_us, kept=kept,
        backend_share=_times(unchanged, backend), plan_share=_times(backend, plan), gain=_times(unchanged, now),
        plan_number=plan_number, whole_us=whole_us, whole_iterations=whole_iterations,
        whole_gain=unchanged.median_us / whole_us if unchanged is not None and whole_us > 0 else 0.0,
    )  # fmt: skip


def over_ranks(timings: Sequence[Timing | None]) -> Timing | None:
    """The mean of what ranks measured of the same iterations; None until all have measured some."""
    known = [timing for timing in timings if timing is not None]
    if not known or len(known) < len(timings):
        return None
    return Timing(
        median_us=fmean(timing.median_us for timing in known), low_us=fmean(timing.low_us for timing in known),
        high_us=fmean(timing.high_us for timing in known), iterations=min(timing.iterations for timing in known),
    )  # fmt: skip


def _times(slow: Timing | None, fast: Timing | None) -> float:
    return slow.median_us / fast.median_us if slow is not None and fast is not None and fast.median_us > 0 else 0.0
