# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of motifs times, and that it does so on real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from probe_world import SimulatedMeter, network

from stretto import Cluster
from stretto.errors import InvalidInput
from stretto.lab import Lab, unavailable
from stretto.planner.costs.costs import Motion, SimulatedCosts
from stretto.planner.costs.measured import LayeredCosts, MeasuredCosts, read_measurements
from stretto.runtime.probe.bench import KINDS, layouts, runs
from stretto.runtime.probe.find import find
from stretto.runtime.probe.probe import conclude

JOB = Path(__file__).parents[1] / "jobs" / "probe_job.py"
LIMIT_S = 400.0
WORLD = network(((0, 2), (1, 3)), uplinks={"rdma": [0.05] * 2, "eth": [0.025] * 2})
CLUSTER = conclude(find(SimulatedMeter(WORLD))).cluster


def test_all_ranks_hosts_and_those_between_hosts_are_timed() -> None:
    assert layouts(CLUSTER) == [((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1),), ((0, 1), (2, 3))]
    uneven = conclude(find(SimulatedMeter(network(((0, 1, 2), (3,)), uplinks={"eth": [0.05] * 2})))).cluster
    assert layouts(uneven) == [((0, 1, 2, 3),)]


def test_every_motif_is_timed_on_every_channel_and_in_pairs_of_channels() -> None:
    todo = runs(CLUSTER, channels=("rdma", "eth"), sizes=(65536, 1 << 20))
    alone = {(case.kind, case.groups, case.network) for (case, *others) in todo if not others}
    assert {kind for kind, *_ in alone} == set(KINDS)
    assert {network for _, groups, network in alone if groups == layouts(CLUSTER)[0]} == {"rdma", "eth"}
    assert {network for _, groups, network in alone if groups == layouts(CLUSTER)[1]} == {None}
    pairs = [(a.kind, a.network, b.kind, b.network) for a, b in (each for each in todo if len(each) == 2)]
    forth, back = ("all_reduce", "rdma", "all_to_all", "eth"), ("all_reduce", "eth", "all_to_all", "rdma")
    assert pairs == [forth, back] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [({"kinds": ["gossip"]}, "unknown collective 'gossip'"), ({"sizes": [0]}, "bytes: must be 4"),
     ({"sizes": []}, "bytes: must be 4")],
)  # fmt: skip
def test_wrong_wishes_are_named(given: dict[str, list[object]], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        runs(CLUSTER, channels=("rdma",), **given)  # type: ignore[arg-type]


def test_a_cluster_without_the_jobs_channels_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing to time: the job's channels are shm, eth; ring:4 has dim0"):
        runs(Cluster.preset("ring", nodes=4), channels=("eth",))


def test_the_table_of_real_ranks_is_what_the_planner_uses(tmp_path: Path) -> None:
    why = unavailable()
    if why is not None:
        pytest.skip(why)
    with Lab(hosts=2, ranks_per_host=2, uplinks={"rdma": "400mbit", "eth": "200mbit"}, order="interleaved") as lab:
        CLUSTER.save(tmp_path / "cluster.yaml")
        done = lab.run([sys.executable, str(JOB), str(tmp_path), "bench"], timeout_s=LIMIT_S)
    assert done.returncodes == (0,) * 4, done.errors
    assert len({output for output in done.outputs}) == 1
    said = json.loads(done.outputs[0])
    rows = read_measurements(tmp_path / "costs.csv")
    assert len(rows) == said["rows"]
    assert said["left_out"] == 0
    assert {row.groups for row in rows} == {1, 2}
    costs = LayeredCosts(MeasuredCosts(CLUSTER, rows), SimulatedCosts(CLUSTER))
    for groups, channels in zip(layouts(CLUSTER), (("shm", "rdma"), ("shm",), ("rdma",), ("eth",)), strict=True):
        motion = Motion(kind="all_reduce", groups=groups, channels=channels)
        name = costs.algorithms(motion, 1e5)[0]
        assert costs.cost(motion, 1e5, name).source.startswith("measured: costs.csv")
    assert {(o.alone.collective, o.alone.channels) for o in costs.overlaps} == {
        (kind, ("shm", name)) for kind in ("all_reduce", "all_to_all") for name in ("rdma", "eth")
    }
