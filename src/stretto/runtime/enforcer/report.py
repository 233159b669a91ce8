"""What an enforcer tells of itself: which plan runs, how long iterations take, and where the application waited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...planner.plan import Plan
from ...workload import Workload


@dataclass(frozen=True, kw_only=True)
class MotifReport:
    """One motif of the active plan, its medians over the last window.

    `wait_us` is how long the application stood in ``wait()`` of the op while this motif was what it waited for.
    """

    op: str
    motif: int
    duration_us: float
    wait_us: float
    start_us: float = 0.0
    """After the begin of the iteration in which it started."""


@dataclass(frozen=True, kw_only=True)
class Report:
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
    motifs: tuple[MotifReport, ...] = ()
    fell_back: str = ""
    """Why the last plan was left, if it was."""
    resting: int = 0
    """A plan that is not active until the application does again what it was made for."""


class DataPlane(Protocol):
    """What the control plane asks of a rank."""

    def prepare(self, plan: Plan, workload: Workload, number: int) -> None:
        """Check a plan and make it ready beside the one that runs; raises `PlanMismatch` or `InvalidInput`."""

    def commit(self, number: int, hash: str) -> None:
        """All ranks are ready: the plan may become active at the next boundary where all know this."""

    def discard(self, number: int) -> None:
        """Forget a prepared plan that is not active."""

    def report(self) -> Report:
        """How it goes."""
