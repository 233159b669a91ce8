"""The decision at the end of a search: the few best and what would be used otherwise, measured again in turn.

Of twenty noisy times the least is mostly luck, and a machine's speed drifts. So the finalists run in rounds, each of
them once in every round, and are compared by their ratios within rounds. Who is slower than the leader with confidence
drops out. What is there already (the first reference) stays, unless another reference is faster than it, or the leader
faster than every reference, with confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

LEAST_ROUNDS = 4
T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's 97.5 % quantiles: since one looks after every few rounds, each look asks for more than 95 %."""
T_MANY = 1.96
PER_LOOK = 2

Rounds = Callable[[Sequence[int], int], Sequence[Sequence[float]]]
"""Measures these contestants in so many rounds: the times of each; fewer where it did not run to its end."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was measured, and who was chosen."""

    chosen: int
    times_us: tuple[tuple[float, ...], ...]
    """Of every contestant in every round in which it still was one."""

    def median_us(self, at: int) -> float:
        """A contestant's time."""
        return median(self.times_us[at]) if self.times_us[at] else math.inf

    def gain(self, over: int) -> float:
        """How many times as long another contestant takes as the chosen one: the median ratio over common rounds."""
        return ratio(self.times_us[over], self.times_us[self.chosen])


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median ratio over the rounds that two have in common; infinite where the first did not run."""
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
    """Choose among so many contestants, of which some are references, in at most so many rounds.

    >>> speeds = [10.0, 9.9, 7.0]
    >>> def steady(who, rounds):
    ...     return [[speeds[at] * (1 + 0.04 * ((turn + at) % 2)) for turn in range(rounds)] for at in who]
    >>> decide(3, [0], steady, most=8).chosen
    2
    >>> decide(2, [0], steady, most=8).chosen  # one per cent is less than what it varies by
    0
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
    # Whoever dropped a reference out may not lead in the end: each of those left is asked by itself.
    better = [at for at in ran if at not in known and all(surely_faster(times[at], times[one]) for one in known)]
    # The first reference is how things are: another one takes its place only with confidence, too.
    instead = [at for at in known[1:] if surely_faster(times[at], times[known[0]])]
    best = [at for at in better if at in still] or better or instead or known[:1]
    # Who dropped out ran in other rounds, perhaps in better ones: only those in common are fair.
    common = min(len(times[at]) for at in best)
    leader = min(best, key=lambda at: median(times[at][:common]))
    return Decision(chosen=leader, times_us=tuple(tuple(found) for found in times))


__all__ = ["Decision", "decide", "ratio", "surely_faster"]
