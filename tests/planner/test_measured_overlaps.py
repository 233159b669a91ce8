# SPDX-License-Identifier: Apache-2.0
"""Measured tables that know how many groups ran at once, and what ran beside."""

from __future__ import annotations

from pathlib import Path

import pytest
from judges.microbenchmarks import measured_slowdown, overlapped_pair

from stretto import Cluster
from stretto.errors import InvalidInput
from stretto.planner.costs.costs import Motion, SimulatedCosts
from stretto.planner.costs.measured import (
    LayeredCosts,
    MeasuredCosts,
    Measurement,
    OverlapPartner,
    overlaps,
    read_measurements,
    write_measurements,
)  # fmt: skip
from stretto.units import MB

HGX2 = Cluster.preset("hgx2", nodes=2)
ACROSS = tuple((a, a + 8) for a in range(8))
FAST, SLOW = ("nvlink", "rdma"), ("pcie", "ethernet")
EXCHANGE = OverlapPartner(collective="all_to_all", algorithm="direct", channels=SLOW, nbytes=1e6)


def row(time_us: float, *, groups: int = 1, beside: OverlapPartner | None = None) -> Measurement:
    return Measurement(
        collective="all_reduce", algorithm="ring", nranks=16, nbytes=1e6, time_us=time_us, channels=FAST,
        groups=groups, beside=beside,
    )  # fmt: skip


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = (row(100.0), row(150.0, beside=EXCHANGE), row(300.0, groups=4))
    path = tmp_path / "costs.csv"
    write_measurements(path, rows)
    read = read_measurements(path)
    assert [(r.time_us, r.groups, r.beside) for r in read] == [(r.time_us, r.groups, r.beside) for r in rows]
    assert {r.channels for r in read} == {FAST}


def test_groups_that_meet_have_the_cost_that_was_measured_for_as_many() -> None:
    alone = Measurement(
        collective="all_reduce", algorithm="ring", nranks=2, nbytes=1e6, time_us=50.0, channels=("rdma",)
    )
    many = Measurement(
        collective="all_reduce", algorithm="ring", nranks=2, nbytes=1e6, time_us=350.0, channels=("rdma",), groups=8
    )
    costs = MeasuredCosts(HGX2, [alone, many])

    def us(groups: tuple[tuple[int, ...], ...]) -> float | None:
        motion = Motion(kind="all_reduce", groups=groups, channels=("rdma",))
        return costs.cost(motion, 1e6, "ring").us if costs.has(motion, "ring") else None

    assert us(ACROSS) == 350.0
    assert us(ACROSS[:1]) == 50.0
    assert us(ACROSS[:4]) is None


def test_what_ran_beside_something_is_no_cost_but_an_overlap() -> None:
    costs = MeasuredCosts(HGX2, [row(150.0, beside=EXCHANGE), row(100.0), row(120.0)])
    motion = Motion(kind="all_reduce", groups=(tuple(range(16)),), channels=FAST)
    assert costs.cost(motion, 1e6, "ring").us == 100.0
    (pair,) = costs.overlaps
    assert pair.slowdown == pytest.approx(1.5)
    assert overlaps([row(150.0, beside=EXCHANGE)]) == ()


def test_a_measured_overlap_slows_the_overlapped_pair_of_figure_18() -> None:
    simulated = SimulatedCosts(HGX2)
    layered = LayeredCosts(MeasuredCosts(HGX2, [row(150.0, beside=EXCHANGE), row(100.0)]), simulated)
    assert measured_slowdown(layered, FAST, SLOW) == pytest.approx(1.5)
    assert measured_slowdown(layered, SLOW, FAST) == pytest.approx(1.5)
    assert measured_slowdown(layered, FAST, ("pcie", "rdma")) == 1.0
    assert measured_slowdown(simulated, FAST, SLOW) == 1.0
    ours = "all-reduce on nvlink+rdma, all-to-all on pcie+ethernet"
    plain, slowed = (overlapped_pair(costs, sizes=(2 * MB,)).times_us[ours][0] for costs in (simulated, layered))
    assert slowed > plain


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("0,", "groups: must be 1"),
        ("x,", "groups: must be 1"),
        ("1,all_to_all/direct/eth", "beside: must be COLLECTIVE/ALGORITHM/CHANNELS/BYTES"),
        ("1,gossip/direct/eth/5", "beside: unknown collective 'gossip'"),
        ("1,all_to_all/direct/eth/-5", "beside: must be > 0"),
    ],
)
def test_wrong_cells_are_named(tmp_path: Path, cells: str, message: str) -> None:
    path = tmp_path / "costs.csv"
    header = "collective,algorithm,channels,nranks,nbytes,time_us,groups,beside"
    path.write_text(f"{header}\nall_reduce,ring,rdma,16,1000,10,{cells}\n")
    with pytest.raises(InvalidInput, match=message):
        read_measurements(path)


def test_a_table_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        write_measurements(tmp_path / "no" / "costs.csv", [row(1.0)])
