# SPDX-License-Identifier: Apache-2.0
"""OR-Tools and HiGHS bring libraries of one name; a process may hold both, whichever comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stretto.solvers import cp_sat

ORTOOLS = """
from ortools.sat.python import cp_model
model = cp_model.CpModel()
x = model.new_int_var(0, 5, "x")
model.maximize(x)
solver = cp_model.CpSolver()
assert solver.solve(model) == cp_model.OPTIMAL and solver.value(x) == 5
from ortools.linear_solver import pywraplp
own = pywraplp.Solver.CreateSolver("HIGHS")
if own is not None:
    y = own.NumVar(0, 7, "y")
    own.Maximize(y)
    assert own.Solve() == 0 and y.solution_value() == 7.0
"""
STRETTO = """
from stretto.solvers.milp import Milp, solve
model = Milp()
first = model.column(cost=-1.0, upper=3.0, integer=True)
model.row({first: 2.0}, upper=5.0)
assert solve(model, limit_s=60.0).values.tolist() == [2.0]
import highspy
assert highspy.Highs().getNumCol() == 0
"""


@pytest.mark.skipif(not cp_sat.available(), reason="OR-Tools is not installed")
@pytest.mark.parametrize("order", [(ORTOOLS, STRETTO, ORTOOLS), (STRETTO, ORTOOLS, STRETTO)], ids=["first", "second"])
def test_a_process_may_hold_both_solvers(order: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "".join(order)], capture_output=True, text=True, timeout=300, check=False,
        env={"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_where_no_copy_can_be_made_the_plain_import_is_used(tmp_path: Path) -> None:
    code = "from stretto.solvers.highs import highspy; print(highspy().Highs().getNumCol())"
    done = subprocess.run(
        [sys.executable, "-c", f"import tempfile; tempfile.tempdir = {str(tmp_path / 'none')!r}; {code}"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()[-1]) == (0, "0"), done.stderr
