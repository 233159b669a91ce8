# SPDX-License-Identifier: Apache-2.0
"""A search on a real Ray cluster: a head and two nodes in namespaces of their own, one of which is lost."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stretto.lab import Lab

# Importing Ray here would do so before a local one is set up to listen on this machine alone.
pytestmark = [
    pytest.mark.real_lab,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is an extra: stretto[ray]"),
]
JOB = Path(__file__).parents[1] / "jobs" / "ray_nodes_job.py"
LIMIT_S = 480.0


def test_a_node_that_is_lost_in_mid_search_costs_its_candidates_only() -> None:
    lost: list[int] = []
    found: list[dict[str, Any]] = []
    said: list[str] = []

    def heard(rank: int, stream: str, line: str) -> None:
        said.append(f"{rank} {line}")
        word, _, rest = line.partition(" ")
        if rank == 0 and word == "lose":
            lost.append(int(rest))
            user = ["--user", "--preserve-credentials"] if lab.rootless else []
            there = ["nsenter", f"--target={lab.host_pids[lost[0]]}", *user, "--net"]
            subprocess.run([*there, "ip", "link", "set", "eth", "down"], check=True, timeout=30)
        elif rank == 0 and word in ("found", "late"):
            found.extend([json.loads(rest)] if rest else [])
            for each in range(3):
                job.signal(each, signal.SIGTERM)

    # The paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Lab(hosts=3, ranks_per_host=1, uplinks={"eth": "1gbit"}) as lab:
            job = lab.start([sys.executable, str(JOB), folder, secrets.token_hex(16)], on_line=heard)
            job.wait(LIMIT_S, keep_going=True)
        logs = "\n".join(path.read_text()[-2000:] for path in Path(folder).glob("ray*.log"))
    if "0 late" in said:
        pytest.skip("Ray itself gave up its start three times, or its nodes did not come together: too busy a machine")
    assert found, "\n".join(said[-20:]) + logs
    assert lost and lost[0] in (1, 2)
    assert list(found[0]["reasons"]) == ["stuck"]
    assert found[0]["reasons"]["stuck"].startswith("its Ray task failed: ")
    assert set(found[0]["times"]) == {"ring", "direct", "bruck"}
    assert found[0]["alive"] == 2
