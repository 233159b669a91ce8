"""Binary feasibility by CP-SAT, in a process of its own.

OR-Tools and highspy each bring a HiGHS library under the same name, so one process can load only one of them. This
file is also the program that the child runs; it must not import the rest of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

Row = tuple[list[int], list[int], int, bool]
"""``sum(first) - sum(second) <= bound``, or with True equal to it."""

START_S = 20.0
"""Leave for the child to load the solver on a busy machine."""


def available() -> bool:
    """Whether OR-Tools is installed."""
    return find_spec("ortools") is not None


def decide(count: int, rows: Sequence[Row], *, limit_s: float, seed: int) -> tuple[str, list[bool] | None]:
    """``feasible`` with the values of `count` binary variables, ``infeasible``, or ``unknown``."""
    task = json.dumps({"count": count, "rows": rows, "limit_s": limit_s, "seed": seed})
    try:
        done = subprocess.run(
            [sys.executable, __file__],
            input=task,
            capture_output=True,
            text=True,
            check=True,
            timeout=limit_s + START_S,
        )
    except subprocess.TimeoutExpired:
        return "unknown", None
    status, ones = json.loads(done.stdout)
    if ones is None:
        return status, None
    chosen = set(ones)
    return status, [v in chosen for v in range(count)]


def _child() -> None:
    from ortools.sat.python import cp_model

    task = json.load(sys.stdin)
    model = cp_model.CpModel()
    x = [model.new_bool_var("") for _ in range(task["count"])]
    for positive, negative, bound, equal in task["rows"]:
        left = [x[v] for v in positive]
        if bound == 1 and not negative:
            (model.add_exactly_one if equal else model.add_at_most_one)(left)
        elif bound == 0 and len(left) == 1 and not equal:
            model.add_bool_or([*(x[v] for v in negative), left[0].negated()])
        else:
            total = sum(left) - sum(x[v] for v in negative)
            model.add(total == bound if equal else total <= bound)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = task["seed"] % (1 << 31)
    solver.parameters.max_time_in_seconds = task["limit_s"]
    status = solver.solve(model)
    names = {cp_model.OPTIMAL: "feasible", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}
    answer = names.get(status, "unknown")
    ones = [v for v, var in enumerate(x) if solver.value(var)] if answer == "feasible" else None
    json.dump([answer, ones], sys.stdout)


if __name__ == "__main__":
    _child()
