# SPDX-License-Identifier: Apache-2.0
"""Loaders of data fork inside ranks, while a thread of theirs is in the middle of a call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).parents[1] / "jobs"


def test_processes_that_a_rank_forks_end_and_its_agent_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(JOBS / "fork_job.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(JOBS)}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["30", "1", "True"], done.stderr
