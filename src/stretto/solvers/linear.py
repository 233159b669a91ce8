# SPDX-License-Identifier: Apache-2.0
"""`LinearProgram`: the one door to HiGHS, for models row by row that grow, and for models that come as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import highs

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearSolution:
    """What the solver found; values and duals have a meaning only where `has_values` says so."""

    status: Literal["optimal", "infeasible", "other"]
    has_values: bool
    values: Floats
    duals: Floats
    """The dual of each row."""
    objective: float
    bound: float
    """A proved bound on the objective of a model with integer columns."""


@dataclass(frozen=True, kw_only=True)
class ProgramArrays:
    """A whole model as arrays: columns, rows, and the matrix as a sparse table of rows, or of columns."""

    cost: Floats
    lower: Floats
    upper: Floats
    row_lower: Floats
    row_upper: Floats
    start: ArrayLike
    index: ArrayLike
    value: ArrayLike
    by_column: bool = False
    integer: Sequence[bool] = ()


class LinearProgram:
    """A model of HiGHS: the cost of columns is minimised, or maximised, under rows ``lower <= sum <= upper``.

    HiGHS is imported when the first model is made. Rows and columns can be added after `solve`; the next
    `solve` goes on from there.
    """

    def __init__(self, *, maximize: bool = False, **options: float | str | bool) -> None:
        self._highspy = highs.highspy()
        self._solver = highs.new_solver(**options)
        self._sense = self._highspy.ObjSense.kMaximize if maximize else self._highspy.ObjSense.kMinimize
        self._solver.changeObjectiveSense(self._sense)
        self._columns = 0

    def column(
        self, *, upper: float = math.inf, cost: float = 0.0, index: ArrayLike = (), value: ArrayLike = ()
    ) -> int:
        """Add a column with values 0..upper.

        Args:
            upper: The largest value.
            cost: Its factor in the objective.
            index: The rows that it takes part in already.
            value: Its factor in each of them.

        Returns:
            The number of the column.
        """
        at = np.asarray(index, np.int32)
        self._solver.addCol(cost, 0.0, upper, len(at), at, np.asarray(value, np.float64))
        self._columns += 1
        return self._columns - 1

    def row(self, index: ArrayLike, value: ArrayLike, *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """Add a row.

        Args:
            index: The columns that take part.
            value: The factor of each.
            lower: The least value of the sum.
            upper: The largest value of the sum.
        """
        at = np.asarray(index, np.int32)
        self._solver.addRow(lower, upper, len(at), at, np.asarray(value, np.float64))

    def load(self, model: ProgramArrays) -> None:
        """Take a whole model at once, in place of what was there."""
        lp = self._highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(model.cost), len(model.row_lower)
        lp.sense_ = self._sense
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = model.cost, model.lower, model.upper
        lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
        if model.integer:
            kinds = (self._highspy.HighsVarType.kContinuous, self._highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[whole] for whole in model.integer]
        form = self._highspy.MatrixFormat
        lp.a_matrix_.format_ = form.kColwise if model.by_column else form.kRowwise
        lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = lp.num_col_, lp.num_row_
        lp.a_matrix_.start_ = np.asarray(model.start, np.int32)
        lp.a_matrix_.index_ = np.asarray(model.index, np.int32)
        lp.a_matrix_.value_ = np.asarray(model.value, np.float64)
        self._solver.passModel(lp)

    def start_from(self, values: Sequence[float]) -> None:
        """Give a value for each column to start from."""
        given = self._highspy.HighsSolution()
        given.col_value = list(values)
        self._solver.setSolution(given)

    def solve(self) -> LinearSolution:
        """Run the solver on what the model is now."""
        highs.run(self._solver)
        states, state = self._highspy.HighsModelStatus, self._solver.getModelStatus()
        impossible = state in (states.kInfeasible, states.kUnboundedOrInfeasible)
        solution, info = self._solver.getSolution(), self._solver.getInfo()
        return LinearSolution(
            status="optimal" if state == states.kOptimal else "infeasible" if impossible else "other",
            has_values=info.primal_solution_status == self._highspy.SolutionStatus.kSolutionStatusFeasible,
            values=np.asarray(solution.col_value, np.float64),
            duals=np.asarray(solution.row_dual, np.float64),
            objective=float(info.objective_function_value),
            bound=float(info.mip_dual_bound),
        )
