# SPDX-License-Identifier: Apache-2.0
"""A small sparse mixed-integer model, and two free solvers for it: HiGHS, and CP-SAT with the extra ``solvers``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import Infeasible, InvalidInput, unknown
from . import cp_sat
from .linear import LinearProgram, ProgramArrays

SOLVERS = ("highs", "cpsat")
CPSAT_STEPS = 1 << 20
"""CP-SAT knows integers only: continuous columns and their rows are counted in steps of 1/CPSAT_STEPS of the largest
upper bound."""


@dataclass(kw_only=True)
class Milp:
    """A model: minimise the cost of columns with bounds, some of them integer, under rows ``lower <= sum <= upper``."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: dict[tuple[float, float, tuple[tuple[int, float], ...]], None] = field(default_factory=dict)

    def column(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = math.inf, integer: bool = False) -> int:
        """Add a column.

        Args:
            cost: The cost per unit.
            lower: The least value.
            upper: The largest value; CP-SAT needs a finite one.
            integer: Whether the value must be whole.

        Returns:
            The number of the column.
        """
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """Add a row, unless an equal row is there already: symmetric problems repeat themselves.

        Args:
            terms: The factor of each column that takes part.
            lower: The least value of the sum.
            upper: The largest value of the sum.
        """
        self.rows[lower, upper, tuple(sorted(terms.items()))] = None

    @property
    def counts(self) -> str:
        """The size of the model, in words."""
        entries = sum(len(terms) for _, _, terms in self.rows)
        return f"{sum(self.integer)} binaries, {len(self.cost)} columns, {len(self.rows)} rows, {entries} entries"


@dataclass(frozen=True, kw_only=True)
class MilpSolution:
    """The result of a solver: the values of the columns (None where it found none), a proved bound on the cost, and
    whether the two meet."""

    values: NDArray[np.float64] | None
    bound: float
    optimal: bool


def solve(
    model: Milp,
    *,
    solver: str = "highs",
    limit_s: float,
    seed: int = 0,
    gap: float = 1e-4,
    start: Sequence[float] | None = None,
) -> MilpSolution:
    """Find the best solution inside the time limit.

    Args:
        model: The model.
        solver: "highs", or "cpsat" with the extra ``solvers``.
        limit_s: The seconds that the solver may take, > 0.
        seed: The seed of the solver.
        gap: The relative distance to the bound at which a solution counts as optimal.
        start: A value for each column to start from.

    Returns:
        The values found, if any, and a bound.

    Raises:
        Infeasible: The model provably has no solution.
        InvalidInput: The solver is unknown or not installed, or a column has no upper bound for cpsat.
    """
    if solver == "highs":
        return _highs(model, limit_s, seed, gap, start)
    if solver == "cpsat":
        return _cpsat(model, limit_s, seed, gap, start)
    raise unknown("solver", solver, SOLVERS)


def _highs(model: Milp, limit_s: float, seed: int, gap: float, start: Sequence[float] | None) -> MilpSolution:
    program = LinearProgram(random_seed=seed % (1 << 31), time_limit=max(limit_s, 0.05), mip_rel_gap=gap)
    program.load(
        ProgramArrays(
            cost=np.array(model.cost),
            lower=np.array(model.lower),
            upper=np.array(model.upper),
            integer=model.integer,
            row_lower=np.array([lower for lower, _, _ in model.rows]),
            row_upper=np.array([upper for _, upper, _ in model.rows]),
            start=np.cumsum([0, *(len(terms) for _, _, terms in model.rows)]),
            index=[at for _, _, terms in model.rows for at, _ in terms],
            value=[value for _, _, terms in model.rows for _, value in terms],
        )
    )
    if start is not None:
        program.start_from(start)
    found = program.solve()
    if found.status == "infeasible":
        raise Infeasible("the model has no solution")
    return MilpSolution(
        values=found.values if found.has_values else None,
        bound=found.bound if any(model.integer) else found.objective,
        optimal=found.status == "optimal",
    )


def _cpsat(model: Milp, limit_s: float, seed: int, gap: float, start: Sequence[float] | None) -> MilpSolution:
    if not cp_sat.available():
        raise InvalidInput("solver: cpsat needs OR-Tools; install stretto[solvers]")
    largest = max((u for u, whole in zip(model.upper, model.integer, strict=True) if not whole), default=1.0)
    if not math.isfinite(largest):
        raise InvalidInput("solver: cpsat needs an upper bound on every column")
    step = max(largest, 1e-9) / CPSAT_STEPS
    unit = [1.0 if whole else step for whole in model.integer]
    rows: list[tuple[int | None, int | None, list[int], list[int]]] = []
    for lower, upper, terms in model.rows:
        # A row of binaries is exact. A row with times is rounded to steps: programs are simulated afterwards anyway.
        per = 1.0 if all(model.integer[at] and value == round(value) for at, value in terms) else step
        rows.append(
            (
                math.floor(lower / per) if math.isfinite(lower) else None,
                math.ceil(upper / per) if math.isfinite(upper) else None,
                [at for at, _ in terms],
                [round(value * unit[at] / per) for at, value in terms],
            )
        )
    costs = [abs(c) * u for c, u in zip(model.cost, unit, strict=True) if c]
    factor = min(1000.0 / min(costs, default=1.0), (1 << 40) / max(costs, default=1.0))
    task = {
        "lower": [math.floor(lo / u) for lo, u in zip(model.lower, unit, strict=True)],
        "upper": [math.ceil(up / u) for up, u in zip(model.upper, unit, strict=True)],
        "cost": [round(c * u * factor) for c, u in zip(model.cost, unit, strict=True)],
        "rows": rows,
        "hint": None if start is None else [math.ceil(v / u - 1e-9) for v, u in zip(start, unit, strict=True)],
        "gap": gap,
        "seed": seed,
    }
    status, values, bound = cp_sat.minimize(task, limit_s=max(limit_s, 0.05))
    if status == "infeasible":
        raise Infeasible("the model has no solution")
    found = None if values is None else np.array(values) * np.array(unit)
    return MilpSolution(values=found, bound=bound / factor, optimal=status == "optimal")
