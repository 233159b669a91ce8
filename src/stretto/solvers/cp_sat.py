# SPDX-License-Identifier: Apache-2.0
"""Integer programs by CP-SAT, in a process of its own.

A child (cp_sat_child.py) can be ended when its time is over, and keeps OR-Tools, which is large, out of this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from subprocess import PIPE
from typing import Any

from ..children import Child
from . import cp_sat_child

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
    factors), `hint` (values or null), `gap` and `seed`. It may have `disjoint`, lists of (column, size) whose intervals
    from the column's value on must not overlap, and `workers`, the threads of the solver (1 unless given).
    """
    with Child([sys.executable, cp_sat_child.__file__], stdin=PIPE, stdout=PIPE) as child:
        answer = child.ask(json.dumps({**task, "limit_s": limit_s}).encode(), limit_s=limit_s + START_S)
    if answer is None:
        return "unknown", None, float("-inf")
    if child.returncode:
        raise RuntimeError(f"the process of CP-SAT ended with code {child.returncode}")
    status, values, bound = json.loads(answer)
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
