# SPDX-License-Identifier: Apache-2.0
"""``stretto run`` on a job with unequal all-to-alls: it trains under a plan, to the end, to the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stretto.lab import Lab

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_job_with_unequal_exchanges_trains_under_a_plan_as_it_does_without(stretto: Launch, tmp_path: Path) -> None:
    # Links so slow that a plan, which uses both, has something to promise on any machine.
    network = tmp_path / "cluster.yaml"
    Lab(hosts=2, ranks_per_host=1, uplinks={"rdma": "2mbit", "eth": "1mbit"}).cluster().save(network)
    environment = {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "STRETTO_CHANNELS": "rdma=lo;eth=lo",
        "STRETTO_CLUSTER": str(network),
    }  # fmt: skip
    script = Path(__file__).parents[1] / "jobs" / "run_splits_job.py"
    done = stretto("run", "--budget", "0.3", "--", sys.executable, str(script), str(tmp_path), env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["planned"] > 0, f"no plan in {found['steps']} steps: {done.stderr[-2000:]}"
        assert found["same"], f"the losses of rank {rank} differ"
