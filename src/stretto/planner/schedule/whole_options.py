# SPDX-License-Identifier: Apache-2.0
"""The lower bound when every comm-op takes one option whole: an integer program over the rows of the relaxation.

The relaxation of `relaxation` lets a comm-op take a half of one option and a half of another. With whole options the
rows are the same, and the least period that fits them is found by HiGHS, in a number of nodes that does not depend on
the machine; where they run out, the bound that is proved by then is as valid, only lower. Unlike the relaxation's own
bound, which is computed anew from prices, this one is the solver's, less its tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_BINARIES = 4000
MAX_NODES = 400
LIMIT_S = 10.0
"""Seconds after which the solver stops: only where a single node takes as long as hundreds usually do."""
GAP = 1e-6
TOLERANCE = 2e-6
"""The share by which rows may be violated in what the solver calls a solution; the bound is lowered by it."""


@dataclass(frozen=True, kw_only=True)
class PeriodRow:
    """``lag * period >= constant_us + the sum over units of what their options add``."""

    lag: float
    constant_us: float
    adds: dict[int, Floats]


@dataclass(frozen=True, kw_only=True)
class WholeOptions:
    """A bound on the period of all plans, and the option of each unit in the best solution that is known."""

    us: float
    chosen: tuple[int, ...] | None


def whole_options(rows: Sequence[PeriodRow], counts: Sequence[int], scale_us: float) -> WholeOptions | None:
    """The least period that fits all rows with one whole option for each unit.

    Args:
        rows: the rows.
        counts: the number of options of each unit.
        scale_us: a time of the order of the period.

    Returns:
        The bound; None for a program that is too large, or of which the solver finds no bound.
    """
    from ...solvers.linear import LinearProgram, ProgramArrays

    if not 0 < sum(counts) <= MAX_BINARIES:
        return None
    first = 1 + np.concatenate([[0], np.cumsum(counts)])
    num_columns = int(first[-1])
    index: list[NDArray[np.int64]] = []
    value: list[Floats] = []
    for at, count in enumerate(counts):
        index.append(np.arange(first[at], first[at] + count))
        value.append(np.ones(count))
    for row in rows:
        some = {unit: np.flatnonzero(adds) for unit, adds in row.adds.items()}
        index.append(np.concatenate([[0], *(first[unit] + at for unit, at in some.items())]).astype(np.int64))
        value.append(np.concatenate([[row.lag], *(-row.adds[unit][at] / scale_us for unit, at in some.items())]))
    ones, constants = np.ones(len(counts)), np.array([row.constant_us / scale_us for row in rows])
    cost, upper = np.zeros(num_columns), np.ones(num_columns)
    cost[0], upper[0] = 1.0, np.inf
    program = LinearProgram(time_limit=LIMIT_S, mip_max_nodes=MAX_NODES, mip_rel_gap=GAP)
    program.load(
        ProgramArrays(
            cost=cost, lower=np.zeros(num_columns), upper=upper, row_lower=np.concatenate([ones, constants]),
            row_upper=np.concatenate([ones, np.full(len(rows), np.inf)]),
            start=np.concatenate([[0], np.cumsum([len(each) for each in index])]), index=np.concatenate(index),
            value=np.concatenate(value), integer=[False, *[True] * (num_columns - 1)],
        )
    )  # fmt: skip
    found = program.solve()
    if not np.isfinite(found.bound):
        return None
    chosen = None
    if found.has_values:
        chosen = tuple(int(found.values[first[at] : first[at + 1]].argmax()) for at in range(len(counts)))
    return WholeOptions(us=max(found.bound, 0.0) * scale_us * (1 - TOLERANCE), chosen=chosen)
