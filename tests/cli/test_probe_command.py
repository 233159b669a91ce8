# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto import Cluster
from stretto.lab import Lab, unavailable
from stretto.planner.costs.costs import Motion
from stretto.planner.costs.measured import MeasuredCosts, read_measurements

Run = Callable[..., str]
LIMIT_S = 480.0
JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def be(**changes: str) -> None:
        for key, value in {**JOB, **changes}.items():
            monkeypatch.setenv(key, value)

    return be


@pytest.mark.parametrize("command", [("probe",), ("bench", "--cluster", "dgx2")])
def test_without_a_job_one_line_says_how_to_make_one(
    bad: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for key in JOB:
        monkeypatch.delenv(key, raising=False)
    said = bad(*command, "-o", "x.yaml" if command == ("probe",) else "x.csv")
    asked = f"stretto {command[0]} ...'"
    starts = (f"'torchrun --nproc-per-node 4 -m {asked}", f"'stretto lab run -- {asked}")
    assert f"RANK is not set: every rank runs this command, as in {' or '.join(starts)}" in said


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"WORLD_SIZE": "1"}, (), "WORLD_SIZE: a job of one rank has no network to measure; start at least two ranks"),
        ({"RANK": "2"}, (), "RANK: must be 0..1, not 2"),
        ({"RANK": "first"}, (), "RANK: must be a number up to 4095, not 'first'"),
        ({"MASTER_PORT": "123456"}, (), "MASTER_PORT: must be a number up to 65535"),
        ({}, ("--timeout", "0"), "--timeout: must be more than 0"),
        ({}, ("--preset", "dgx2:1"), "--preset: dgx2:1 has 16 devices, the job 2 ranks"),
        ({}, ("--preset", "nothing"), "unknown preset 'nothing'"),
        ({}, ("--library", "mpi"), "unknown --library 'mpi'; choose from: nccl, gloo"),
        ({}, ("--costs", "c.csv"), "--costs: goes with --library"),
        ({}, ("--library", "gloo", "--preset", "ring:2"), "--library: goes with neither --channel nor --preset"),
        ({}, ("-o", "no/such/folder/x.yaml"), "there is no directory no/such/folder"),
    ],
)
def test_wrong_probes_are_named(
    bad: Run, as_rank: Callable[..., None], changes: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    as_rank(**changes)
    assert message in bad("probe", "-o", "x.yaml", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "dgx2:1"), "--cluster: dgx2:1 has 16 devices, the job 2 ranks"),
        (("--cluster", "ring:2", "--collectives", "gossip"), "gossip"),
        (("--cluster", "ring:2", "--bytes", "many"), "many"),
        (("--cluster", "ring:2", "--budget", "-1"), "--budget: must be more than 0"),
        ((), "Missing option '--cluster'"),
    ],
)
def test_wrong_benchmarks_are_named(
    bad: Run, as_rank: Callable[..., None], arguments: tuple[str, ...], message: str
) -> None:
    as_rank()
    assert message in bad("bench", "-o", "x.csv", *arguments)


def test_a_job_is_probed_by_the_collectives_of_its_backend(tmp_path: Path) -> None:
    why = unavailable()
    if why is not None:
        pytest.skip(why)
    cluster, costs = tmp_path / "cluster.yaml", tmp_path / "costs.csv"
    command = [sys.executable, "-m", "stretto", "probe", "--library", "gloo", "-o", str(cluster), "--costs", str(costs)]
    with Lab(hosts=2, ranks_per_host=2, uplinks={"eth": "400mbit"}) as lab:
        done = lab.run(command, timeout_s=LIMIT_S)
    assert done.returncodes == (0,) * 4, done.errors
    assert done.outputs[0].startswith("4 ranks on 2 hosts")
    known = Cluster.load(cluster)
    assert known.channels == ("local", "network")
    rows = read_measurements(costs)
    # The planner finds every one of them, as what motifs on these channels cost.
    measured = MeasuredCosts(known, rows)
    for groups, channels in ((((0, 1, 2, 3),), ("local", "network")), (((0, 2), (1, 3)), ("network",))):
        motion = Motion(kind="all_reduce", groups=groups, channels=channels)
        assert measured.algorithms(motion, 1e6) == ["gloo"]


def test_a_job_is_probed_and_timed_by_command(tmp_path: Path) -> None:
    why = unavailable()
    if why is not None:
        pytest.skip(why)
    stretto = [sys.executable, "-m", "stretto"]
    cluster, costs = tmp_path / "cluster.yaml", tmp_path / "costs.csv"
    with Lab(hosts=2, ranks_per_host=1, uplinks={"eth": "200mbit"}) as lab:
        done = lab.run([*stretto, "probe", "-o", str(cluster)], timeout_s=LIMIT_S)
        assert done.returncodes == (0, 0), done.errors
        lines = done.outputs[0].splitlines()
        assert "2 devices on 2 hosts" in lines[0]
        assert lines[-2] == f"wrote {cluster}"
        assert lines[-1].startswith(f"next: stretto plan -w WORKLOAD -c {cluster}")
        assert done.outputs[1] == ""
        assert Cluster.load(cluster).channels == ("eth",)
        wish = ["--cluster", str(cluster), "--collectives", "all_reduce", "--bytes", "64K"]
        done = lab.run([*stretto, "bench", "-o", str(costs), *wish], timeout_s=LIMIT_S)
        assert done.returncodes == (0, 0), done.errors
        assert f"wrote {costs}" in done.outputs[0]
    assert {(row.collective, row.nranks, row.channels) for row in read_measurements(costs)} == {
        ("all_reduce", 2, ("eth",))
    }
