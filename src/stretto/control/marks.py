# SPDX-License-Identifier: Apache-2.0
"""Where iterations end in a script that does not say so: at the steps of an optimizer, or the calls of a model.

Mostly each of them ends one. Where a recording shows that iterations differ (several critic steps to one of the
generator's, backward passes by hand), the calls between such moments are looked at: what repeats with a period is the
iteration.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import lcm

MOST = 16
"""The longest period that is looked for, in moments."""
LOOK = 2 * MOST + 8
"""How many moments are looked at."""
USER = "the script"
"""The key of a moment at which the script itself says that an iteration ends; then no other counts."""


class Marks:
    """Decides at which moments iterations end; the same on all ranks, as all come to the same moments."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._marker: int | None = None
        self._others: dict[int, int] = {}
        self._period = 0
        """In moments, where it is known that an iteration has several."""
        self._per = 1
        self._at = 0
        self._missing = 0

    def number(self, key: Hashable) -> int:
        """The number of a moment's optimizer or model: in the order of appearance, so the same on all ranks."""
        return self._numbers.setdefault(key, len(self._numbers))

    def end(self, key: Hashable) -> bool:
        """Whether an iteration ends at a moment."""
        number = self.number(key)
        if key == USER or USER in self._numbers:
            return key == USER
        if self._period:
            self._missing = 0 if self._marker in (None, number) else self._missing + 1
            if self._missing > 2 * self._period:
                # What marked is gone, and with it what was learnt.
                self._period = 0
                self._others.clear()
        if self._period:
            self._at = (self._at + (self._marker in (None, number))) % self._per
            return self._marker in (None, number) and self._at == 0
        return self._usual(number)

    def _usual(self, number: int) -> bool:
        """The first that was seen marks, until another was seen twice in between: then that one is gone."""
        self._others[number] = self._others.get(number, 0) + 1
        if self._marker in (None, number) or self._others[number] > 1:
            self._marker = number
            self._others.clear()
        return self._marker == number

    def learn(self, numbers: Sequence[int], period: int) -> None:
        """Iterations end where what these moments belong to comes once in a period, or else every so many moments."""
        if period == 1:
            # As usual, then.
            self._marker = numbers[0]
            return
        once = [number for number in dict.fromkeys(numbers) if numbers[:period].count(number) == 1]
        if self._marker not in once:
            self._marker = once[0] if once else None
        self._period, self._at, self._missing = period, 0, 0
        self._per = 1 if once else period


def period_of(seen: Sequence[Hashable]) -> int:
    """After how many elements a sequence repeats itself, at least twice; 0 where it does not.

    >>> period_of("aabaabaab"), period_of("aaaa"), period_of("abcdabc")
    (3, 1, 0)
    """
    for period in range(1, min(MOST, len(seen) // 2) + 1):
        if all(a == b for a, b in zip(seen, seen[period:], strict=False)):
            return period
    return 0


def common(periods: Sequence[int]) -> int:
    """The period of all ranks together; 0 where there is none.

    >>> common([3, 1, 3]), common([3, 0]), common([16, 15])
    (3, 0, 0)
    """
    found = lcm(*periods)
    return found if found <= MOST else 0
