# SPDX-License-Identifier: Apache-2.0
"""When a running plan should be thought over: a judgement of reports, without time of its own.

A window is some iterations of every rank, fewer where they are long. Windows in a row in which the plan's order holds
motifs back for more than 5 % of the iteration (SYNDICATE's rule, on its own quantity: a motif could run, and its
channel lies idle, but the one before it was not submitted yet), with motifs that take 25 % longer or less long than
promised, or with iterations slower than in plain order, ask for a new plan. How long the application waits is told but
asks nothing: a job that is bound by its communication waits under the best plan. What is measured is learnt at once,
so that the same difference asks only once; and as it may be unavoidable that motifs are held back, each answer that
brought nothing doubles how many windows the next question needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from ..planner.plan import Plan
from ..runtime.enforcer.report import EnforcerReport
from .refine import Factors, ratios, refined

WINDOW_ITERATIONS = 20
LEAST_ITERATIONS = 5
WINDOW_S = 2.0
"""A window is over after so many iterations, or where they are long after so many seconds."""
WINDOWS = 3
MOST_WINDOWS = 96
HELD_SHARE = 0.05
"""The share of an iteration for which motifs may be held back before the plan is thought over (SYNDICATE, 4.4)."""
DRIFT = 0.25
LEAST_GAIN = 0.03
"""What a new plan has to promise."""
SLOWER = 0.01
"""The share of the plain iteration by which a plan may be slower, for windows in a row, before it is given up."""

Why = Literal["held", "drift", "slower"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """That the plan should be made anew, why, and with which factors."""

    why: Why
    text: str
    factors: Factors


@dataclass(kw_only=True)
class PlanWatch:
    """Looks at one plan while it is active; `factors` are those it was made with."""

    plan: Plan
    number: int
    size: int
    factors: Factors = field(default_factory=dict)
    patience: int = WINDOWS
    motif_us: float = 0.0
    """What every motif costs beside its bytes."""
    plain_times: float = 1.0
    """How many times longer plain order takes by what was learnt since it was measured."""
    only_drift: bool = False
    """Whether nothing but other costs can ask: for the application's own order, which stays until there are some."""
    _reports: dict[int, EnforcerReport] = field(default_factory=dict)
    _taken: int = -1
    _rows: dict[Why, int] = field(default_factory=dict)
    _learnt: Factors = field(default_factory=dict)

    def hear(self, rank: int, report: EnforcerReport) -> Question | None:
        """Take in a report; a question once enough windows in a row ask it."""
        if report.number != self.number:
            return None
        self._reports[rank] = report
        if len(self._reports) < self.size:
            return None
        reached = min(report.iteration for report in self._reports.values())
        if self._taken < 0:
            # The first iterations of a plan still set up what they need.
            self._taken = reached
        if reached < self._taken + self._window_iterations():
            return None
        self._taken = reached
        return self._window(list(self._reports.values()))

    def _window_iterations(self) -> int:
        longest_us = max(report.iteration_us for report in self._reports.values())
        fitting = int(WINDOW_S * 1e6 / longest_us) if longest_us > 0 else WINDOW_ITERATIONS
        return min(max(fitting, LEAST_ITERATIONS), WINDOW_ITERATIONS)

    def asked_in_vain(self, factors: Factors) -> None:
        """Remember that these factors led to no better plan, and wait longer before the next question."""
        self._learnt = dict(factors)
        self.patience = min(2 * self.patience, MOST_WINDOWS)
        self._rows.clear()

    def _window(self, reports: list[EnforcerReport]) -> Question | None:
        iteration_us = fmean(report.iteration_us for report in reports)
        plain_us = self.plain_times * fmean(report.plain_us for report in reports)
        held_us = fmean(report.held_us for report in reports)
        if iteration_us <= 0:
            return None
        seen = ratios(self.plan, reports, self.motif_us)
        factors = refined(self.factors, seen)
        known = {**self.factors, **self._learnt}
        off = {key: factors[key] / known.get(key, 1.0) for key in seen}
        worst = max(off, key=lambda key: abs(off[key] - 1), default="")
        drift = bool(off) and not 1 / (1 + DRIFT) <= off[worst] <= 1 + DRIFT
        holds: dict[Why, bool] = {
            "drift": drift,
            # Where links are not what they were, plain order would not be either.
            "slower": not drift and plain_us > 0 and iteration_us > (1 + SLOWER) * plain_us,
            "held": held_us > HELD_SHARE * iteration_us,
        }
        words: dict[Why, str] = {
            "slower": f"an iteration takes {iteration_us / 1e3:.2f} ms, in plain order {plain_us / 1e3:.2f} ms",
            "drift": f"motifs on {worst} take {off.get(worst, 1.0):.2f} times what was expected",
            "held": f"for {100 * held_us / iteration_us:.0f} % of an iteration the plan's order holds motifs back",
        }
        self._rows = {why: self._rows.get(why, 0) + 1 for why, holding in holds.items() if holding}
        for why, count in self._rows.items():
            if self.only_drift and why != "drift":
                continue
            # A change is news, while the order has held motifs back before.
            if count >= (max(WINDOWS, self.patience // 4) if why == "drift" else self.patience):
                return Question(why=why, text=words[why], factors=factors)
        return None
