# SPDX-License-Identifier: Apache-2.0
"""What Inductor's overlap scheduler is told of collectives: the costs of the cluster, on captured graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto import Cluster, simulate
from stretto.algorithms import algorithm
from stretto.runtime.torch_backend.inductor import siblings

JOB = Path(__file__).parents[1] / "jobs" / "inductor_job.py"
NBYTES = 4 << 20
TABLE = """collective,algorithm,channels,nranks,nbytes,time_us
all_reduce,nccl_ring,,8,1048576,500
all_reduce,nccl_ring,,8,4194304,1500
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the job reports."""
    table = tmp_path_factory.mktemp("inductor") / "measured.csv"
    table.write_text(TABLE)
    done = subprocess.run(
        [sys.executable, str(JOB), str(table)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_collectives_cost_what_the_simulator_says(told: Any) -> None:
    found = told["found"]
    assert set(found) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    assert all(ms > 0 for ms in found.values())
    # One way round a two-way ring: both ways at once are at most twice as fast. The launch is in the estimate.
    ring = simulate(algorithm("ring", "all_reduce", 8), Cluster.load("ring:8"), nbytes=NBYTES).total_us / 1000
    assert ring / 2 <= found["all_reduce"] <= ring + 0.05
    assert found["reduce_scatter"] < found["all_reduce"]


def test_latency_alone_is_asked_for_with_no_bytes(told: Any) -> None:
    assert all(0 < told["latency"][kind] < told["found"][kind] for kind in told["found"])


def test_measured_costs_come_first(told: Any) -> None:
    assert told["measured"]["all_reduce"] == pytest.approx(1.5)
    assert told["measured"]["all_to_all"] == told["found"]["all_to_all"]


def test_other_nodes_are_left_to_inductor(told: Any) -> None:
    assert told["others"] and set(told["others"]) == {None}


def test_inductor_uses_it_until_it_is_removed(told: Any) -> None:
    assert told["used"] and told["put_back"]
    assert told["keys"] == [True, False], "its caches know other costs by another key"


def test_scheduler_runs_on_the_captured_graph(told: Any) -> None:
    order = told["order"]
    assert order.count("wait_tensor") == 5
    assert order.index("all_reduce") < order.index("wait_tensor")


@pytest.mark.parametrize(
    ("group", "size", "groups"),
    [
        ((0, 1, 2, 3), 4, ((0, 1, 2, 3),)),
        ((2, 3), 6, ((0, 1), (2, 3), (4, 5))),
        ((1, 5), 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ((1, 2), 8, ((1, 2),)),
        ((0, 3, 4), 8, ((0, 3, 4),)),
    ],
)
def test_groups_of_a_mesh_run_at_once(group: tuple[int, ...], size: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert siblings(group, size) == groups
