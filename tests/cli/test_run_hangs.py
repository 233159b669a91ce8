# SPDX-License-Identifier: Apache-2.0
"""``stretto run`` names ranks that come late, are stopped, differ from others, or die: real processes on gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "jobs" / "hang_job.py"
RANKS = 2
LIMIT_S = 900.0
"""Less than the job's own limit: what was said is shown."""


def line_of(name: str) -> str:
    """The place of a call in the script, as it is told."""
    lines = SCRIPT.read_text().splitlines()
    return f"hang_job.py:{next(at for at, line in enumerate(lines, start=1) if line.endswith(f'# {name}'))}"


def test_hangs_are_named_with_call_and_place(tmp_path: Path) -> None:
    def signals(number: int) -> Callable[[], None]:
        return lambda: os.kill(int((tmp_path / "pid1").read_text()), number)

    # What is waited for, and what then makes the job go on to the next. A busy machine may tell of other waits between.
    awaited: list[tuple[str, Callable[[], None]]] = [
        ("rank 1 has not come: rank 1 made 3 calls", (tmp_path / "late").touch),
        ("rank 1 is stopped", signals(signal.SIGCONT)),
        ("ranks call different things", signals(signal.SIGKILL)),
        # The other one may have been ended by it before anybody looked.
        ("rank 1 is gone|ranks 0, 1 are gone", lambda: None),
    ]
    starts = " & ".join(f"RANK={rank} {sys.executable} {SCRIPT} {tmp_path}" for rank in range(RANKS))
    environment = os.environ | {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stretto", "run", "--", "bash", "-c", f"{starts} & wait $(jobs -p)"]
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    limit = threading.Timer(LIMIT_S, with_group, (job.pid, signal.SIGKILL))
    limit.start()
    told: list[str] = []
    said: list[str] = []
    try:
        assert job.stderr is not None
        for line in job.stderr:
            said.append(line)
            words, then = awaited[len(told)]
            if "hang: " in line and "went on" not in line and re.search(words, line):
                told.append(line)
                then()
            if len(told) == len(awaited):
                break
    finally:
        limit.cancel()
        with_group(job.pid, signal.SIGCONT)
        with_group(job.pid, signal.SIGTERM)
        job.wait(120)
    assert len(told) == len(awaited), said
    late, stopped, differs, _ = told
    assert "rank 0 waits in call 4 of group 0, all_reduce of 4000 bytes" in late
    assert line_of("after late") in late
    assert line_of("after stopped") in stopped
    assert "call 6 of group 0 is" in differs
    assert "rank 1: broadcast of 4000 bytes from root 0 at" in differs
    assert line_of("differs here") in differs
    assert line_of("differs there") in differs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_hang_is_named_once_a_signal_has_come(tmp_path: Path, number: int) -> None:
    """The job ends slowly, one rank well before the other."""
    ranks = [f"RANK={rank} {sys.executable} {SCRIPT} {tmp_path} & rank{rank}=$!" for rank in range(RANKS)]
    ends = "trap 'kill -9 $rank1; sleep 6; kill -9 $rank0; touch ended; exit 3' INT TERM"
    environment = os.environ | {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    script = "; ".join([f"cd {tmp_path}", *ranks, ends, "wait; wait; wait"])
    job = subprocess.Popen(
        [sys.executable, "-m", "stretto", "run", "--", "bash", "-c", script],
        env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    limit = threading.Timer(LIMIT_S, with_group, (job.pid, signal.SIGKILL))
    limit.start()
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((tmp_path / f"pid{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        time.sleep(2.0)
        job.send_signal(number)
        _, said = job.communicate()
    finally:
        limit.cancel()
        with_group(job.pid, signal.SIGKILL)
    assert job.returncode == 3 and (tmp_path / "ended").exists(), said
    assert "gone" not in said, said


def with_group(group: int, number: int) -> None:
    """Send a signal to all processes of the job that are left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
