# SPDX-License-Identifier: Apache-2.0
"""What was measured refines what is simulated: a factor for each set of channels.

Only the motifs of the running plan are measured. To believe those and the simulator's figures of all others would make
every other plan look better as soon as a link slows down; so what is learnt of a set of channels holds for everything
that runs on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ..planner.algebra.recipes import library
from ..planner.costs.costs import Bounding, Cost, CostModel, Motion, SimulatedCosts
from ..planner.plan import Plan
from ..runtime.enforcer.report import EnforcerReport

LEAST, MOST = 1 / 64, 64.0
"""What is further off than this is not a slow link."""
SAME = 1.25
"""Factors within this of each other say the same."""
TELLING = 3.0
"""How many times the cost of any motif one has to take to tell of its link."""

Factors = Mapping[str, float]
"""By channels joined with ``+``: how many times longer a motif takes there than simulated."""


class RefinedCosts:
    """Another model's costs times what was learnt of their channels, and at least `motif_us` more for every motif.

    `motif_us` is what a sum of a few bytes takes, in which every rank sends and receives to and from every other one
    twice. A program in which a rank has more messages than that costs in proportion: each is a packet with headers, for
    which a thread wakes up. Without this the planner would cut a sum into hundreds of messages of some bytes each to
    gain a thousandth.

    Channels that were not seen take the worst of those that share one with them.
    """

    def __init__(self, inner: CostModel, factors: Factors, motif_us: float = 0.0) -> None:
        self.cluster = inner.cluster
        self._inner, self._motif_us = inner, motif_us
        self._factors = {frozenset(key.split("+")): value for key, value in factors.items()}
        self._starts: dict[tuple[Motion, str, float], float] = {}

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The algorithms that the refined model knows."""
        return self._inner.algorithms(motion, nbytes)

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The inner model's cost, refined; see `CostModel.cost`."""
        cost = self._inner.cost(motion, nbytes, algorithm, exact=exact)
        factor = self.factor(motion.channels)
        if factor == 1.0 and not self._motif_us:
            return cost
        start_us = self._start_us(motion, nbytes, algorithm)
        source = f"{cost.source}; x{factor:.3g} + {start_us:.3g} us"
        return replace(cost, us=cost.us * factor + start_us, source=source)

    def at_least_us(self, motion: Motion, nbytes: float, algorithm: str) -> float:
        """The inner model's bound, refined; see `Bounding.at_least_us`."""
        if not isinstance(self._inner, Bounding):
            return 0.0
        least_us = self._inner.at_least_us(motion, nbytes, algorithm)
        return least_us * self.factor(motion.channels) + self._motif_us

    def _start_us(self, motion: Motion, nbytes: float, algorithm: str) -> float:
        """What a motif costs beside its bytes: `motif_us` for as many messages as a small sum has, more for more."""
        if not self._motif_us or not isinstance(self._inner, SimulatedCosts):
            return self._motif_us
        key = motion, algorithm, 0.0 if algorithm in library(motion.ask()) else nbytes
        if key not in self._starts:
            program = self._inner.program(motion, nbytes, algorithm)
            at_rank = np.bincount(np.concatenate([program.src, program.dst]))
            usual = 4 * (len(motion.groups[0]) - 1)
            self._starts[key] = self._motif_us * max(1.0, float(at_rank.max(initial=0)) / usual)
        return self._starts[key]

    def factor(self, channels: Iterable[str]) -> float:
        """What times on these channels are multiplied with."""
        held = frozenset(channels)
        if held in self._factors:
            return self._factors[held]
        return max((value for key, value in self._factors.items() if key & held), default=1.0)


def ratios(plan: Plan, reports: Iterable[EnforcerReport], motif_us: float = 0.0) -> dict[str, float]:
    """Measured over predicted time, by channels, both without the `motif_us` that any motif costs.

    A motif seems long to a rank that came early, so that of all ranks the shortest time counts. Motifs that are, and
    should be, hardly longer than `motif_us` say nothing of a link.

    Args:
        plan: The plan that ran.
        reports: What the ranks measured.
        motif_us: What any motif costs, whatever it moves.

    Returns:
        By channels joined with ``+``; none for channels of which nothing was measured.
    """
    least: dict[tuple[str, int], float] = {}
    for report in reports:
        for motif in report.motifs:
            key = (motif.op, motif.motif)
            if motif.duration_us > 0:
                least[key] = min(least.get(key, motif.duration_us), motif.duration_us)
    measured: dict[str, float] = {}
    expected: dict[str, float] = {}
    for op in plan.ops:
        for at, planned in enumerate(op.motifs):
            if (op.op, at) not in least:
                continue
            promised_us, took_us = planned.duration_us + planned.launch_us, least[op.op, at]
            if max(promised_us, took_us) < TELLING * motif_us:
                continue
            channels = "+".join(planned.channels)
            measured[channels] = measured.get(channels, 0.0) + max(took_us - motif_us, LEAST * took_us)
            expected[channels] = expected.get(channels, 0.0) + max(promised_us - motif_us, LEAST * promised_us)
    return {key: measured[key] / expected[key] for key in measured if expected[key] > 0}


def alike(one: Factors, other: Factors) -> bool:
    """Whether two say much the same of every set of channels that either knows."""
    keys = one.keys() | other.keys()
    return all(1 / SAME <= one.get(key, 1.0) / other.get(key, 1.0) <= SAME for key in keys)


def refined(factors: Factors, seen: Mapping[str, float]) -> dict[str, float]:
    """The factors after ratios were seen of a plan that was made with them.

    A slow link may recover, but none is learnt to be faster than it was probed: a motif that finds its channel idle
    seems so, since shapers and switches save up a burst.
    """
    both = dict(factors)
    for key, ratio in seen.items():
        both[key] = min(max(both.get(key, 1.0) * ratio, 1.0), MOST)
    return both
