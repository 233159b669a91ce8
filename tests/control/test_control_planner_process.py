# SPDX-License-Identifier: Apache-2.0
"""The process that plans ends with the controller that asked it, and leaves no folder behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from toy_job import toy_cluster, toy_workload

from stretto.children import Child
from stretto.control.messages import encode_captured
from stretto.control.worker import PlanRequest, Worker

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


def test_nobody_waits_for_the_end_of_a_planner_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, wait = threading.Event(), Child.wait

    def wait_late(self: Child, timeout: float | None = None) -> int:
        assert may_end.wait(300)
        return wait(self, timeout)

    monkeypatch.setattr(Child, "wait", wait_late)
    planning = Worker(PlanRequest(captured=encode_captured(toy_workload(2), toy_cluster(2)), budget_s=600.0))
    folder = Path(planning._folder.name)
    planning.cancel()
    assert folder.exists()
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "stretto-planner-end":
            thread.join(300)
    assert not folder.exists() and planning._process.poll() is not None
