# SPDX-License-Identifier: Apache-2.0
"""A higher lower bound: comm-ops that the bound lets take several options in shares are divided.

The bound of `bounds` lets a comm-op take a half of one option and a half of another. A plan takes one. Of comm-ops that
are alike, as layers are, a plan has a whole number on each set of channels: plans with at most so many, and plans with
more. Where these numbers are whole, the options of one op are divided: one of them, or one of the others. Each part has
a bound of its own, and every plan is in one of the parts: the lowest of their bounds holds for all plans. The part with
the lowest bound is divided next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import floor

import numpy as np

from .bounds import PeriodBound, lower_bound
from .problem import Option, PlanProblem
from .relaxation import OptionCount, resource_loads

WHOLE = 1e-6
"""An op with less than this share of other options takes one."""
WHOLE_COUNT = 1e-3
"""A number of ops that is as near to a whole one is whole."""
CLOSE = 1e-4
"""The share of a plan's period below it at which a bound is as good as equal."""

Group = tuple[int, frozenset[str]]
"""Comm-ops alike (the number of their class), on a set of channels."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The options that each comm-op may take, and for some groups the least and the largest number of ops."""

    options: dict[str, tuple[int, ...]]
    counts: dict[Group, tuple[int, int]]


class _Classes:
    """Comm-ops that are alike, and the channels of each option."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.names = [op.name for op in problem.workload.comm_ops]
        self.members: dict[int, list[int]] = {}
        for at, table in enumerate(resource_loads(problem, False).of_op):
            self.members.setdefault(table, []).append(at)
        self.channels = {
            table: [frozenset(c for task in option.tasks for c in task.channels) for option in self._options(table)]
            for table in self.members
        }
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Option, ...]] = {}

    def _options(self, table: int) -> tuple[Option, ...]:
        return self.problem.options[self.names[self.members[table][0]]]

    def _positions(self, part: _Part, group: Group) -> dict[int, np.ndarray]:
        table, channels = group
        on = [mine == channels for mine in self.channels[table]]
        return {
            at: np.flatnonzero([on[option] for option in part.options[self.names[at]]]) for at in self.members[table]
        }

    def bound(self, part: _Part) -> PeriodBound:
        """The bound of a part; ops with the same options go on sharing them."""
        options = {}
        for name, every in self.problem.options.items():
            key = (id(every), part.options[name])
            if key not in self._known:
                self._known[key] = tuple(every[k] for k in part.options[name])
            options[name] = self._known[key]
        counts = [
            OptionCount(options=self._positions(part, group), least=least, most=most)
            for group, (least, most) in part.counts.items()
        ]
        return lower_bound(replace(self.problem, options=options), counts=counts)

    def divided(self, part: _Part, bound: PeriodBound) -> list[_Part]:
        """The parts into which a part is divided; none if every op takes one option."""
        mix = bound.relaxed.mix if bound.relaxed is not None else None
        if mix is None:
            return []
        worst, group, number = WHOLE_COUNT, None, 0.0
        for table, members in self.members.items():
            for channels in dict.fromkeys(self.channels[table]) if len(members) > 1 else ():
                positions = self._positions(part, (table, channels))
                share = sum(float(mix[at][some].sum()) for at, some in positions.items())
                if abs(share - round(share)) > worst:
                    worst, group, number = abs(share - round(share)), (table, channels), share
        if group is not None:
            least, most = part.counts.get(group, (0, len(self.members[group[0]])))
            below, above = (least, floor(number)), (floor(number) + 1, most)
            return [replace(part, counts={**part.counts, group: some}) for some in (below, above) if some[0] <= some[1]]
        name = _mixed(mix, self.names, self.problem)
        if name is None:
            return []
        some = part.options[name]
        most_taken = some[int(mix[self.names.index(name)].argmax())]
        others = tuple(k for k in some if k != most_taken)
        return [replace(part, options={**part.options, name: taken}) for taken in ((most_taken,), others)]


def branched(problem: PlanProblem, first: PeriodBound, plan_us: float, *, branches: int) -> PeriodBound:
    """The bound after options were divided; never lower than before.

    Args:
        problem: the problem.
        first: its bound.
        plan_us: the period of a plan; nothing is divided once the bound is as good as equal to it.
        branches: the most bounds that are computed, >= 0.

    Returns:
        The bound.
    """
    if not branches or first.us >= plan_us * (1 - CLOSE):
        return first
    classes = _Classes(problem)
    whole = _Part(options={name: tuple(range(len(problem.options[name]))) for name in classes.names}, counts={})
    parts: list[tuple[float, int, _Part, PeriodBound]] = [(first.us, 0, whole, first)]
    count = 0
    while count < branches and parts[0][0] < plan_us * (1 - CLOSE):
        us, _, part, bound = parts[0]
        children = classes.divided(part, bound)
        if not children:
            break
        heappop(parts)
        for child in children:
            found = classes.bound(child)
            count += 1
            heappush(parts, (max(found.us, us), count, child, found))
    if not parts[0][0] > first.us * (1 + 1e-9):
        return first
    why = f"options of comm-ops one by one, in {len(parts)} parts; in the lowest: {parts[0][3].why}"
    return replace(first, us=parts[0][0], why=why, arguments={**first.arguments, why: parts[0][0]})


def _mixed(mix: list[np.ndarray], names: list[str], problem: PlanProblem) -> str | None:
    """The comm-op whose shares of other options weigh most; None if every op takes one option."""
    weight = [
        (1 - float(shares.max())) * max(option.total_us for option in problem.options[name])
        if float(shares.max()) < 1 - WHOLE else 0.0
        for name, shares in zip(names, mix, strict=True)
    ]  # fmt: skip
    at = int(np.argmax(weight))
    return names[at] if weight[at] > 0 else None
