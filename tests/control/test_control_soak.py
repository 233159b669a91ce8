# SPDX-License-Identifier: Apache-2.0
"""Descriptors, threads and shared memory of a job whose plan changes again and again do not grow.

`soak_job.py` does the same for 10,000 iterations by hand, and tells of memory as well.
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from warm import Started

JOBS = Path(__file__).parents[1] / "jobs"
ITERATIONS, EVERY, LEAST_PLANS = 300, 10, 12
LIMIT_S = 900.0


@pytest.fixture(scope="module", params=["executor", "gloo"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("s")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Started(
        JOBS / "soak_job.py",
        [str(folder), request.param, str(ITERATIONS), str(EVERY)],
        env=environment,
        log=folder / "log",
    )
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.end()
    assert code == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "report").read_text())


def test_losses_are_right_and_ranks_run_one_plan_in_every_iteration(report: Any) -> None:
    assert report["wrong"] == []
    assert report["iterations"] >= ITERATIONS


def test_no_plan_leaves_a_descriptor_a_thread_or_shared_memory_behind(report: Any) -> None:
    rows = report["rows"]
    places: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        places.setdefault(row["hash"], []).append(at)
    # Plans use different numbers of channels, so a plan is compared with the same plan many plans later.
    pairs = [(at[0], later) for at in places.values() for later in at if later - at[0] >= LEAST_PLANS // 2]
    assert pairs
    for name, key in product(("controller", "rank 0", "rank 1"), ("descriptors", "threads", "shared_files")):
        # What every plan left behind would be as many as plans between, whichever plan runs again. The median, since on
        # a busy machine the plan before may run out, and the next be prepared, in all samples of a short plan.
        grown = [(rows[later][name][key] - rows[first][name][key]) / (later - first) for first, later in pairs]
        assert median(grown) < 0.75, (name, key, [row[name][key] for row in rows])
