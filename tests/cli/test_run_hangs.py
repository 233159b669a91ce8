# SPDX-License-Identifier: Apache-2.0
"""``stretto run`` names ranks that come late, are stopped, differ from others, or die: real processes on gloo."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "jobs" / "hang_job.py"
RANKS = 2


def line_of(name: str) -> str:
    """The place of a call in the script, as it is told."""
    lines = SCRIPT.read_text().splitlines()
    return f"hang_job.py:{next(at for at, line in enumerate(lines, start=1) if line.endswith(f'# {name}'))}"


def test_hangs_are_named_with_call_and_place(tmp_path: Path) -> None:
    starts = " & ".join(f"RANK={rank} {sys.executable} {SCRIPT} {tmp_path}" for rank in range(RANKS))
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "stretto", "run", "--", "bash", "-c", f"{starts} & wait $(jobs -p)"]
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    told: list[str] = []
    try:
        assert job.stderr is not None
        for line in job.stderr:
            if "hang: " not in line or "went on" in line or line in told:
                continue
            told.append(line)
            if len(told) == 1:
                (tmp_path / "late").touch()
            elif len(told) == 2:
                os.kill(int((tmp_path / "pid1").read_text()), signal.SIGCONT)
            elif len(told) == 3:
                os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
            elif len(told) == 4:
                break
    finally:
        with_group(job.pid, signal.SIGCONT)
        with_group(job.pid, signal.SIGTERM)
        job.wait(120)
    late, stopped, differs, gone = told
    assert "rank 0 waits in call 4 of group 0, all_reduce of 4000 bytes" in late
    assert line_of("after late") in late
    assert "rank 1 has not come: rank 1 made 3 calls" in late
    assert "rank 1 is stopped" in stopped
    assert line_of("after stopped") in stopped
    assert "ranks call different things: call 6 of group 0 is" in differs
    assert "rank 1: broadcast of 4000 bytes from root 0 at" in differs
    assert line_of("differs here") in differs
    assert line_of("differs there") in differs
    # The other one may have been ended by it before anybody looked.
    assert re.search("rank 1 is gone|ranks 0, 1 are gone", gone)


def free_port() -> int:
    """A port that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_group(group: int, number: int) -> None:
    """Send a signal to all processes of the job that are left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
