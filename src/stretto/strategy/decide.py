# SPDX-License-Identifier: Apache-2.0
"""The decision at the end of a search: the best few strategies and the references are measured again in rounds.

Of twenty noisy times the least is mostly luck, and a machine's speed drifts. So the finalists run in rounds, each of
them once in every round, and are compared by their ratios within rounds. A contestant that is slower than the leader
with confidence drops out. The first reference, which is what is used now, is kept, unless another reference is faster
than it, or the leader faster than every reference, with confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

LEAST_ROUNDS = 4
T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's 97.5 % quantiles: the results are tested after every few rounds, so each test asks for more than 95 %."""
T_MANY = 1.96
PER_LOOK = 2

Rounds = Callable[[Sequence[int], int], Sequence[Sequence[float]]]
"""``rounds(contestants, count)`` measures them in `count` rounds and returns the times of each; a contestant that did
not run to its end has fewer."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The measured times, and the chosen contestant."""

    chosen: int
    times_us: tuple[tuple[float, ...], ...]
    """The times of every contestant, one for each round in which it took part."""

    def median_us(self, at: int) -> float:
        """The median time of a contestant; infinite if it did not run."""
        return median(self.times_us[at]) if self.times_us[at] else math.inf

    def gain(self, over: int) -> float:
        """The ratio of another contestant's time to the chosen one's: the median over common rounds."""
        return ratio(self.times_us[over], self.times_us[self.chosen])


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median ratio over the rounds that two have in common; infinite if there are none."""
    pairs = list(zip(slow, fast, strict=False))
    return median(a / b for a, b in pairs) if pairs else math.inf


def surely_faster(fast: Sequence[float], slow: Sequence[float]) -> bool:
    """Whether the first is faster than the second, by a paired t-test on the logarithms of their ratios.

    >>> surely_faster([10, 11, 10, 12], [12, 13, 12, 14]), surely_faster([10, 14, 10, 12], [12, 11, 12, 13])
    (True, False)
    """
    logs = [math.log(b / a) for a, b in zip(fast, slow, strict=False)]
    if len(logs) < 2:
        return False
    quantile = T_975[len(logs) - 2] if len(logs) - 2 < len(T_975) else T_MANY
    return fmean(logs) > quantile * stdev(logs) / math.sqrt(len(logs))


def decide(count: int, references: Sequence[int], rounds: Rounds, *, most: int) -> Decision:
    """Choose one of several contestants by measuring them in rounds.

    >>> speeds = [10.0, 9.9, 7.0]
    >>> def steady(who, rounds):
    ...     return [[speeds[at] * (1 + 0.04 * ((turn + at) % 2)) for turn in range(rounds)] for at in who]
    >>> decide(3, [0], steady, most=8).chosen
    2
    >>> decide(2, [0], steady, most=8).chosen  # one per cent is less than what it varies by
    0

    Args:
        count: number of contestants.
        references: the contestants that are references; the first is what is used now.
        rounds: measures some contestants in a number of rounds, see `Rounds`.
        most: largest number of rounds.

    Returns:
        The decision.
    """
    times: list[list[float]] = [[] for _ in range(count)]
    still = list(range(count))
    done = 0
    while done < most and len(still) > 1:
        now = min(LEAST_ROUNDS if not done else PER_LOOK, most - done)
        for at, found in zip(list(still), rounds(still, now), strict=True):
            times[at] += found
            if len(found) < now:
                still.remove(at)
                times[at].clear()
        done += now
        if still:
            leader = min(still, key=lambda at: median(times[at]))
            still = [at for at in still if at == leader or not surely_faster(times[leader], times[at])]
    ran = [at for at in range(count) if times[at]]
    if not ran:
        return Decision(chosen=references[0] if references else 0, times_us=tuple(() for _ in times))
    known = [at for at in references if times[at]]
    # The contestant that beat a reference may not be the final leader, so each remaining one is tested by itself.
    better = [at for at in ran if at not in known and all(surely_faster(times[at], times[one]) for one in known)]
    # The first reference is used now: another reference replaces it only with confidence, too.
    instead = [at for at in known[1:] if surely_faster(times[at], times[known[0]])]
    best = [at for at in better if at in still] or better or instead or known[:1]
    # A contestant that dropped out ran in fewer rounds, so only the common rounds are compared.
    common = min(len(times[at]) for at in best)
    leader = min(best, key=lambda at: median(times[at][:common]))
    return Decision(chosen=leader, times_us=tuple(tuple(found) for found in times))


__all__ = ["Decision", "decide", "ratio", "surely_faster"]
