# SPDX-License-Identifier: Apache-2.0
"""The job as it is, on its own backend, against the same order of calls on ours: measured in turns, inside the job.

Blocks of some iterations alternate, so that a machine that gets slower meanwhile slows both down. All ranks change at
the same call, or none does; what each iteration took is the mean over all ranks, so that all come to the same end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil, sqrt
from statistics import median
from typing import TYPE_CHECKING, Literal

from ..runtime.enforcer.report import Timing
from ..runtime.torch_backend.own_backend import OWN_BACKEND

if TYPE_CHECKING:
    from ..runtime.torch_backend.engine import Engine
    from .aside import SideGroup

Side = Literal["own", "ours"]
ROUNDS, MOST_ROUNDS = 2, 3
"""How often both are measured; once more where neither is faster for sure."""
LEAST, MOST, BLOCK_S = 4, 8, 2.0
"""Iterations of a block that count: as many as fit into so many seconds, within these limits."""
SETTLE = 2
"""Iterations after a change that do not count: programs are chosen in the first, and the change itself takes time."""
MAX_MISSES = 8
"""Boundaries at which ranks had not submitted the same calls, until it is given up."""
SURE = 2.33
"""How many standard deviations of chance the pairs must be off: one in a hundred comparisons of equals is further."""


OURS_SHARE = 0.05
"""The part of a job's iterations that ours runs in later turns at most: were it 20 % slower, the job would be 1 %."""
MOST_LATER = 12
"""Later turns of each side."""


def faster(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether some times are shorter than others with confidence, by the test of Mann and Whitney.

    It counts the pairs (one time of each) in which the first is shorter: a few spikes change neither that nor medians.

    >>> faster([*range(90, 97), 500], range(100, 108)), faster([99, 104, 100], [100, 101, 103])
    (True, False)
    """
    n, m = len(some), len(others)
    if not n or not m:
        return False
    shorter = sum((a < b) + (a == b) / 2 for a in some for b in others)
    chance = sqrt(n * m * (n + m + 1) / 12)
    return median(some) < median(others) and shorter - n * m / 2 > SURE * chance


class Comparison:
    """One rank's part. Begins on the job's own backend; `iteration` is called at the end of every iteration."""

    def __init__(self, aside: SideGroup, engines: Callable[[], Iterable[Engine]]) -> None:
        self._aside, self._engines = aside, engines
        self._blocks: list[Side] = ["own", "ours"] * ROUNDS
        self._times: dict[Side, list[float]] = {"own": [], "ours": []}
        self._rounds = ROUNDS - 1
        self._length = 0
        self._counted = 0
        self._settling = SETTLE
        self._misses = 0
        self._turning: Side | None = None if OWN_BACKEND.runs else "own"
        self._last = time.perf_counter()
        self.over = False
        self.settled = False
        """Whether both were measured, and the faster one runs."""

    @property
    def own(self) -> Timing | None:
        """What was measured of the job's own backend."""
        return Timing.of(self._times["own"])

    @property
    def ours(self) -> Timing | None:
        """What was measured of ours, in plain order."""
        return Timing.of(self._times["ours"])

    @property
    def undecided(self) -> bool:
        """Whether neither was faster for sure; then the job's own backend runs."""
        own, ours = self._times["own"], self._times["ours"]
        return not faster(ours, own) and not faster(own, ours)

    @property
    def turn_iterations(self) -> int:
        """For how many iterations a side runs at a time."""
        return self._length + SETTLE

    def again(self) -> None:
        """Measure both once more, beginning on the job's own backend, which runs."""
        self._blocks = ["own", "ours"]
        self._misses = 0
        self._turn("own")
        self._last = time.perf_counter()

    def abandon(self) -> bool:
        """At the end of an iteration: the own backend runs on. Whether it does; else `iteration` tries on."""
        if self._blocks and self._counted:
            # A block that has not ended has the times of this rank only, so they are dropped.
            del self._times[self._blocks[0]][-self._counted :]
        self._blocks, self._counted = [], 0
        self._turn("own")
        return self.over

    def iteration(self) -> bool:
        """An iteration ends; whether the comparison has ended with it, the same on all ranks."""
        now = time.perf_counter()
        took_us, self._last = (now - self._last) * 1e6, now
        if self._turning is not None:
            self._turn(self._turning)
        elif self._settling:
            self._settling -= 1
            if not self._settling and not self._length:
                mean_us = max(self._aside.means([took_us])[0], 1.0)
                self._length = min(max(int(BLOCK_S * 1e6 / mean_us), LEAST), MOST)
        else:
            self._times[self._blocks[0]].append(took_us)
            self._counted += 1
            if self._counted == self._length:
                self._end_block()
        # What was exchanged here belongs to no iteration.
        self._last = time.perf_counter()
        return self.over

    def _end_block(self) -> None:
        done = self._blocks.pop(0)
        times = self._times[done]
        times[-self._counted :] = self._aside.means(times[-self._counted :])
        self._counted = 0
        if self._blocks:
            self._turn(self._blocks[0])
            return
        self._rounds += 1
        if self._rounds < MOST_ROUNDS and self.undecided:
            self._blocks = ["own", "ours"]
            self._turn("own")
            return
        self._turn("ours" if faster(self._times["ours"], self._times["own"]) else "own")

    def _turn(self, side: Side) -> None:
        """Let a side run from here on; where ranks are not at the same call, try at the next boundary."""
        if OWN_BACKEND.runs != (side == "own"):
            if not self._aside.aligned(self._engines()):
                self._turning = side
                self._misses += 1
                # What runs now is then what goes on.
                self.over = self._misses >= MAX_MISSES
                return
            OWN_BACKEND.runs = side == "own"
        self._turning = None
        self._settling = SETTLE
        self.over = self.settled = not self._blocks


class LaterTurns:
    """More turns of a comparison in which neither side was faster for sure, while the job goes on in plain order.

    Ours runs at most `OURS_SHARE` of the iterations, and `MOST_LATER` turns. What is done at the end of an iteration
    follows from its number, from whether a plan has been active, and from what ranks have told each other: it is the
    same on all ranks. With the first plan it is over, as plans are set aside to be compared with both.
    """

    def __init__(self, comparison: Comparison, step: int) -> None:
        self.comparison = comparison
        self.over = False
        self._turns = 0
        self._running = self._leaves = False
        self._next = self._after(step)

    def iteration(self, step: int, *, planned: bool) -> bool:
        """An iteration ends.

        Args:
            step: Its number, the same on all ranks.
            planned: Whether a plan is, or has been, active, which is the same on all ranks.

        Returns:
            Whether turns have ended with it: what was measured, or what runs, may be another than before.
        """
        if not self._running:
            self.over = planned
            if not planned and step >= self._next:
                self._running = True
                self.comparison.again()
            return False
        if planned and not self._leaves:
            self._leaves = True
            done = self.comparison.abandon()
        else:
            done = self.comparison.iteration()
        if done:
            self._running = False
            self._turns += 1
            self._next = self._after(step)
            decided = not self.comparison.settled or not self.comparison.undecided
            self.over = self._leaves or decided or self._turns == MOST_LATER
        return done

    def _after(self, step: int) -> int:
        """The iteration at which the next turns begin."""
        return step + ceil(self.comparison.turn_iterations / OURS_SHARE)
