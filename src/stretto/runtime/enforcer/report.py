# SPDX-License-Identifier: Apache-2.0
"""What an enforcer tells of itself: which plan runs, how long iterations take, and where the application waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Protocol

from ...planner.plan import Plan
from ...units import format_us
from ...workload import Workload


@dataclass(frozen=True, kw_only=True)
class MotifReport:
    """One motif of the active plan, its medians over the last window.

    `wait_us` is how long the application stood in ``wait()`` of the op while this motif was what it waited for;
    `turn_us` how long the motif itself could have run and waited for its turn: for its channels, or for one before it.
    """

    op: str
    motif: int
    duration_us: float
    wait_us: float
    start_us: float = 0.0
    """After the begin of the iteration in which it started."""
    turn_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OutgrownOp:
    """A comm-op that this rank has called with more bytes than the active plan was made for."""

    op: str
    planned_nbytes: float
    nbytes: float
    """The most so far."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What iterations took: their median, the quarter points around it, and how many they were."""

    median_us: float
    low_us: float
    high_us: float
    """A quarter of the iterations took less than `low_us`, a quarter more than `high_us`."""
    iterations: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing | None:
        """The timing of these iterations; None where there are none.

        >>> Timing.of([4.0, 2.0, 3.0, 1.0, 100.0])
        Timing(median_us=3.0, low_us=2.0, high_us=4.0, iterations=5)
        """
        if not times_us:
            return None
        low, _, high = quantiles(times_us, n=4, method="inclusive") if len(times_us) > 1 else (times_us[0],) * 3
        return cls(median_us=median(times_us), low_us=low, high_us=high, iterations=len(times_us))


@dataclass(frozen=True, kw_only=True)
class EnforcerReport:
    """The state of one rank's enforcer; number 0 and no hash stand for plain order."""

    number: int = 0
    hash: str = ""
    committed: int = 0
    """The newest plan that may become active at the next boundary where all ranks hold it."""
    iteration: int = 0
    """How many iterations have ended."""
    iteration_us: float = 0.0
    """Median of the last window under the active plan (or in plain order, when none is)."""
    plain_us: float = 0.0
    """Median of the last window in plain order: before the first plan, or since one was given up."""
    waits_us: float = 0.0
    """How long the application stood in ``wait()``, mean per iteration."""
    held_us: float = 0.0
    """How long the plan's order held motifs back, mean per iteration: one could run and its channel lay idle, but the
    one before it in the order had not been submitted. SYNDICATE's section 4.4 calls this the wait time."""
    motifs: tuple[MotifReport, ...] = ()
    outgrown: tuple[OutgrownOp, ...] = ()
    """Ops whose size follows the data, or that came with splits, and has grown beyond what was recorded."""
    fell_back: str = ""
    """Why the last plan was left, if it was."""
    resting: int = 0
    """A plan that is not active until the application does again what it was made for."""
    window: Timing | None = None
    """The last window, of which `iteration_us` is the median."""
    plain: Timing | None = None
    """The last window in plain order, of which `plain_us` is the median."""
    under_plan: Timing | None = None
    """All iterations under the active plan, or the last ones where they are many: not only those of a window."""
    job_iterations: int = 0
    """How many iterations have ended since the job's first one; set by `stretto run`."""
    job_us: float = 0.0
    """What these took, by the clock: with recording, probing, measuring, and whatever came in between."""
    own: Timing | None = None
    """The unchanged job on the backend that it asked for, where that was measured; set by `stretto run`."""
    backend: Timing | None = None
    """The application's order on our backend, as it was measured in turns with `own`."""
    own_name: str = ""
    """The backend that the job asked for, where ours stands in for it."""
    on_own: bool = False
    """Whether that one, not ours, runs without a plan: ours was not faster."""
    no_own: str = ""
    """Why there is no `own`."""

    def __str__(self) -> str:
        """One line for people; `repr` has everything.

        >>> print(EnforcerReport(number=1, iteration=20, iteration_us=48341, plain_us=58092, waits_us=23181))
        plan 1 after 20 iterations: 48.34 ms per iteration, plain order 58.09 ms; waited 23.18 ms of it, 0 motifs
        """
        what = f"plan {self.number}" if self.number else "plain order"
        times = f"{format_us(self.iteration_us)} per iteration" if self.iteration_us else "no window of iterations yet"
        plain = f", plain order {format_us(self.plain_us)}" if self.number and self.plain_us else ""
        waits = f"; waited {format_us(self.waits_us)} of it, {len(self.motifs)} motifs" if self.number else ""
        left = f"; the last plan was left: {self.fell_back}" if self.fell_back else ""
        return f"{what} after {self.iteration} iterations: {times}{plain}{waits}{left}"


class DataPlane(Protocol):
    """What the control plane asks of a rank."""

    def prepare(self, plan: Plan, workload: Workload, number: int) -> None:
        """Check a plan and make it ready beside the one that runs; raises `PlanMismatch` or `InvalidInput`.

        Args:
            plan: The plan.
            workload: The step that it is for.
            number: The plan's number, which all ranks agree on.

        Raises:
            PlanMismatch: The plan does not fit here.
            InvalidInput: The number is out of range.
        """

    def commit(self, number: int, hash: str) -> None:
        """All ranks are ready: the plan may become active at the next boundary where all know this."""

    def discard(self, number: int) -> None:
        """Forget a prepared plan that is not active."""

    def report(self) -> EnforcerReport:
        """What was measured since the plan began."""
