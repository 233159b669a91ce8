# SPDX-License-Identifier: Apache-2.0
"""The process that plans ends with the controller that asked it, and leaves no folder behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

JOBS = Path(__file__).parents[1] / "jobs"

CONTROLLER = """if True:
    import os, signal
    from toy_job import toy_cluster, toy_workload
    from stretto.control import worker
    from stretto.control.messages import encode_captured
    captured = encode_captured(toy_workload(2), toy_cluster(2))
    planning = worker.Worker(worker.PlanRequest(captured=captured, budget_s=600.0))
    # Where the planner is does not matter: it has not begun yet.
    print(planning._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_planner_of_a_controller_that_is_killed_ends_and_clears_its_folder_away(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTROLLER],
        env=os.environ | {"PYTHONPATH": str(JOBS), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, text=True, timeout=300, check=False,
    )  # fmt: skip
    planner = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 300
    while (planner.exists() or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not planner.exists()
    assert list(tmp_path.iterdir()) == []
