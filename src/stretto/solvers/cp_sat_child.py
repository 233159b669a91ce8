# SPDX-License-Identifier: Apache-2.0
"""The program that a process of CP-SAT runs: an integer program comes in, its solution goes out, both as JSON.

It is run as a file, so that the process loads OR-Tools and nothing else: it must not import the rest of the package.
"""

from __future__ import annotations

import json
import sys


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
    for sends in task.get("disjoint", ()):
        model.add_no_overlap([model.new_fixed_size_interval_var(x[column], size, "") for column, size in sends])
    model.minimize(cp_model.LinearExpr.weighted_sum(x, task["cost"]))
    for variable, value in zip(x, task["hint"] or [], strict=False):
        model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = task.get("workers", 1)
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
