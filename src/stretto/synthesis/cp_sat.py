"""Integer programs by CP-SAT, in a process of its own.

A child can be ended when its time is over, and keeps OR-Tools, which is large, out of this process. This file is also
the program that the child runs; it must not import the rest of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

Row = tuple[list[int], list[int], int, bool]
"""(first, second, bound, equal): ``sum(first) - sum(second) <= bound``, or with `equal` equal to it."""

START_S = 20.0
"""The extra time that the child gets to load the solver on a busy machine."""


def available() -> bool:
    """Whether OR-Tools is installed."""
    return find_spec("ortools") is not None


def minimize(task: dict[str, Any], *, limit_s: float) -> tuple[str, list[int] | None, float]:
    """Solve an integer program; return its status, the values and a bound on the cost.

    The status is ``optimal``, ``feasible``, ``infeasible`` or ``unknown``; the last two have no values.

    The task has integer `lower`, `upper`, `cost` per column, `rows` of (lower or null, upper or null, columns,
    factors), `hint` (values or null), `gap` and `seed`.
    """
    try:
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps({**task, "limit_s": limit_s}),
            capture_output=True,
            text=True,
            check=True,
            timeout=limit_s + START_S,
        )
    except subprocess.TimeoutExpired:
        return "unknown", None, float("-inf")
    status, values, bound = json.loads(done.stdout)
    return status, values, bound


def decide(count: int, rows: Sequence[Row], *, limit_s: float, seed: int) -> tuple[str, list[bool] | None]:
    """Decide whether binary variables can satisfy all rows.

    Args:
        count: How many binary variables there are.
        rows: The rows.
        limit_s: The seconds that the solver may take, > 0.
        seed: The seed of the solver.

    Returns:
        ``feasible`` with the values of the variables, or ``infeasible`` or ``unknown`` with None.
    """
    limits = [
        (bound if equal else None, bound, [*first, *second], [1] * len(first) + [-1] * len(second))
        for first, second, bound, equal in rows
    ]
    task = {"lower": [0] * count, "upper": [1] * count, "cost": [0] * count, "rows": limits, "hint": None, "gap": 0.0}
    status, values, _ = minimize({**task, "seed": seed}, limit_s=limit_s)
    return "feasible" if status == "optimal" else status, None if values is None else [v == 1 for v in values]


def _child() -> None:
    from ortools.sat.python import cp_model

    task = json.load(sys.stdin)
    model = cp_model.CpModel()
    x = [model.new_int_var(lo, up, "") for lo, up in zip(task["lower"], task["upper"], strict=True)]
    for lower, upper, columns, factors in task["rows"]:
        total = cp_model.LinearExpr.weighted_sum([x[c] for c in columns], factors)
        if lower is not None:
            model.add(total >= lower)
        if upper is not None:
            model.add(total <= upper)
    model.minimize(cp_model.LinearExpr.weighted_sum(x, task["cost"]))
    for variable, value in zip(x, task["hint"] or [], strict=False):
        model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = task["seed"] % (1 << 31)
    solver.parameters.max_time_in_seconds = task["limit_s"]
    solver.parameters.relative_gap_limit = task["gap"]
    status = solver.solve(model)
    names = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}
    answer = names.get(status, "unknown")
    values = [solver.value(variable) for variable in x] if answer in ("optimal", "feasible") else None
    json.dump([answer, values, solver.best_objective_bound], sys.stdout)


if __name__ == "__main__":
    _child()
