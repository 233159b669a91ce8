# SPDX-License-Identifier: Apache-2.0
"""A higher lower bound: comm-ops that the bound lets take several options in shares are split, option by option.

The bound of `bounds` lets a comm-op take a half of one option and a half of another. A plan takes one. So the options
of an op are divided: one of them, or one of the others. Each part has a bound of its own, and every plan is in one of
the parts: the lowest of their bounds holds for all plans. The part with the lowest bound is divided next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from .bounds import PeriodBound, lower_bound
from .problem import Option, PlanProblem

WHOLE = 1e-6
"""An op with less than this share of other options takes one."""
CLOSE = 1e-4
"""The share of a plan's period below it at which a bound is as good as equal."""

Part = dict[str, tuple[int, ...]]
"""The options that each comm-op may take."""


@dataclass(frozen=True, kw_only=True)
class _Restricted:
    """The problem with fewer options; ops with the same ones go on sharing them."""

    problem: PlanProblem
    known: dict[tuple[int, tuple[int, ...]], tuple[Option, ...]]

    def of(self, part: Part) -> PlanProblem:
        options = {}
        for name, every in self.problem.options.items():
            key = (id(every), part[name])
            if key not in self.known:
                self.known[key] = tuple(every[k] for k in part[name])
            options[name] = self.known[key]
        return replace(self.problem, options=options)


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
    restricted = _Restricted(problem=problem, known={})
    names = [op.name for op in problem.workload.comm_ops]
    parts: list[tuple[float, int, Part, PeriodBound]] = []
    heappush(parts, (first.us, 0, {name: tuple(range(len(problem.options[name]))) for name in names}, first))
    count = 0
    while count < branches and parts[0][0] < plan_us * (1 - CLOSE):
        us, _, part, bound = parts[0]
        name = _mixed(bound, names, problem)
        if name is None:
            break
        heappop(parts)
        for some in _divided(part[name], bound, names.index(name)):
            child = {**part, name: some}
            found = lower_bound(restricted.of(child))
            count += 1
            heappush(parts, (max(found.us, us), count, child, found))
    if not parts[0][0] > first.us * (1 + 1e-9):
        return first
    why = f"options of comm-ops one by one, in {len(parts)} parts; in the lowest: {parts[0][3].why}"
    return replace(first, us=parts[0][0], why=why, arguments={**first.arguments, why: parts[0][0]})


def _mixed(bound: PeriodBound, names: list[str], problem: PlanProblem) -> str | None:
    """The comm-op whose shares of other options weigh most; None if every op takes one option."""
    mix = bound.relaxed.mix if bound.relaxed is not None else None
    if mix is None:
        return None
    weight = [
        (1 - float(shares.max())) * max(option.total_us for option in problem.options[name])
        if float(shares.max()) < 1 - WHOLE else 0.0
        for name, shares in zip(names, mix, strict=True)
    ]  # fmt: skip
    at = int(np.argmax(weight))
    return names[at] if weight[at] > 0 else None


def _divided(some: tuple[int, ...], bound: PeriodBound, at: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The option with the largest share, and the others."""
    assert bound.relaxed is not None and bound.relaxed.mix is not None
    most = some[int(bound.relaxed.mix[at].argmax())]
    return (most,), tuple(k for k in some if k != most)
