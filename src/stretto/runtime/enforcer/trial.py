# SPDX-License-Identifier: Apache-2.0
"""A plan is set aside for some iterations, to measure beside it what it is compared with.

What a job took before its plan may be long ago, and the machine another. So after a while the same calls run for some
iterations on the job's own backend, and for some in plain order on ours, in turns. Which iterations these are follows
from the one at which the plan became active, which is the same on all ranks; which calls these are follows from the
plan's step. Nothing has to be agreed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["own", "ours"]
SIDES: tuple[Side, Side] = ("own", "ours")
SETTLED = 40
"""Iterations for which a plan runs first; the window of a report is 32."""
ROUNDS, BLOCK, SKIP = 2, 4, 1
"""How often each side runs, for how many iterations that count, after how many that do not."""


@dataclass(frozen=True)
class PlainTrial:
    """The iterations without a plan, for one that became active at `begun`."""

    begun: int

    def side(self, iteration: int) -> Side | None:
        """The side of the trial that runs an iteration; None where the plan runs it.

        >>> trial = PlainTrial(100)
        >>> [trial.side(100 + SETTLED + at) for at in (-1, 0, 4, 5, 9, 10, 19, 20)]
        [None, 'own', 'own', 'ours', 'ours', 'own', 'ours', None]
        """
        block, _ = divmod(iteration - self.begun - SETTLED, BLOCK + SKIP)
        return SIDES[block % len(SIDES)] if 0 <= block < ROUNDS * len(SIDES) else None

    def counts(self, iteration: int) -> bool:
        """Whether what an iteration takes says something of who runs it."""
        block, at = divmod(iteration - self.begun - SETTLED, BLOCK + SKIP)
        return not 0 <= block <= ROUNDS * len(SIDES) or at >= SKIP
