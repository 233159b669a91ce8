# SPDX-License-Identifier: Apache-2.0
"""HiGHS answers whatever number of threads the rest of the process has used it with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import stretto

SOURCES = Path(stretto.__file__).parent

OTHER_CODE = """
import numpy as np
from stretto.solvers.highs import highspy
theirs = highspy().Highs()
theirs.silent()
theirs.setOptionValue("threads", 2)
for _ in range(2):
    theirs.addVar(0.0, 1.0)
theirs.addRow(0.0, 1.0, 2, np.array([0, 1], np.int32), np.ones(2))
theirs.run()
"""

OURS = """
from stretto.resharding.balance import balance
shares, us = balance({frozenset({0}): 100.0, frozenset({0, 1}): 300.0}, {0: 1.0, 1: 1.0})
assert round(us) == 200, us
import stretto as st
from stretto.synthesis.exact import solve
assert solve(st.AllGather(4), st.Cluster.load("ring:4"), nbytes=4e6, alpha="blocking").optimal
"""


def test_other_code_may_have_used_more_threads() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_CODE + OURS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_solvers_are_made_and_run_in_one_place() -> None:
    raw = [
        path.relative_to(SOURCES).as_posix()
        for path in sorted(SOURCES.rglob("*.py"))
        if "highspy.Highs()" in path.read_text() or "highspy().Highs()" in path.read_text()
    ]
    assert raw == ["solvers/highs.py"]
