# SPDX-License-Identifier: Apache-2.0
"""Costs from measured tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.planner.costs.channels import bindings_for
from stretto.planner.costs.costs import LAUNCH_US, Motion, SimulatedCosts, launch_us
from stretto.planner.costs.measured import LayeredCosts, MeasuredCosts, Measurement, read_measurements
from stretto.units import KB, MB

CSV = """collective,algorithm,channels,nranks,nbytes,time_us
all_reduce, ring, nvlink+rdma, 16, 1000000, 100
all_reduce, ring, nvlink+rdma, 16, 4000000, 250
all_reduce, ring, nvlink+rdma, 16, 2000000, 90
# a remark
all_to_all, ucc, pcie+ethernet, 16, 1000000, 400
all_gather, nccl, , 8, 1000000, 20
"""

NCCL_TESTS = """# nccl-tests version 2.13.11 nccl-headers=22005 nccl-library=22005
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 0 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid  11093 on    node-a device  0 [0x0f] NVIDIA A100
#  Rank  1 Group  0 Pid  11093 on    node-a device  1 [0x15] NVIDIA A100
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     5.10    0.00    0.00      0     5.00    0.00    0.00      0
     1048576        262144     float     sum      -1    31.50   33.29   33.29      0    30.10   34.84   34.84      0
     4194304       1048576     float     sum      -1    91.50   45.84   45.84    N/A    90.10   46.55   46.55    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 39.5
"""

HGX2 = Cluster.preset("hgx2", nodes=2)
EVERYONE = (tuple(range(16)),)
FAST = ("nvlink", "rdma")


def motion(kind: str = "all_reduce", channels: tuple[str, ...] = FAST) -> Motion:
    return Motion(kind=kind, groups=EVERYONE, channels=channels)


def saved(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_csv_table_gives_times_between_its_sizes_and_names_the_file(tmp_path: Path) -> None:
    costs = MeasuredCosts(HGX2, read_measurements(saved(tmp_path, CSV)))
    cost = costs.cost(motion(), 3 * MB, "ring")
    # 2 MB was measured faster than 1 MB, which is noise: it counts as 100 us.
    assert cost.us == pytest.approx((100 + 250) / 2)
    assert cost.source == "measured: table.csv (ring on nvlink+rdma)"
    assert costs.cost(motion(), 2 * MB, "ring").us == 100
    assert costs.cost(motion(), 10 * KB, "ring").us == 100
    beyond = costs.cost(motion(), 6 * MB, "ring")
    assert beyond.us == pytest.approx(400)
    assert "extrapolated" in beyond.source


def test_measurements_hold_for_their_ranks_channels_and_algorithm_only(tmp_path: Path) -> None:
    costs = MeasuredCosts(HGX2, read_measurements(saved(tmp_path, CSV)))
    assert costs.algorithms(motion(), MB) == ["ring"]
    assert costs.algorithms(motion("all_to_all", ("pcie", "ethernet")), MB) == ["ucc"]
    assert costs.algorithms(motion("all_to_all"), MB) == []
    with pytest.raises(Infeasible, match=r"all_reduce by tree on nvlink.rdma, 16 ranks: not measured"):
        costs.cost(motion(), MB, "tree")
    # Without channels the row is for those the routes take: inside a host NVLink.
    host = Motion(kind="all_gather", groups=(tuple(range(8)), tuple(range(8, 16))), channels=("nvlink",))
    assert costs.cost(host, MB, "nccl").us == 20
    other = Motion(kind="all_gather", groups=(tuple(range(8)),), channels=("pcie",))
    assert not costs.has(other, "nccl")


def test_what_was_not_measured_is_simulated_and_each_cost_says_which(tmp_path: Path) -> None:
    costs = LayeredCosts(MeasuredCosts(HGX2, read_measurements(saved(tmp_path, CSV))), SimulatedCosts(HGX2))
    assert costs.cost(motion(), MB, "ring").source.startswith("measured: table.csv")
    assert costs.cost(motion(), MB, "halving_doubling").source.startswith("simulated: halving_doubling")
    assert "direct" in costs.algorithms(motion("all_to_all"), MB)


def test_beside_a_measured_algorithm_no_simulated_one_is_offered(tmp_path: Path) -> None:
    costs = LayeredCosts(MeasuredCosts(HGX2, read_measurements(saved(tmp_path, CSV))), SimulatedCosts(HGX2))
    assert costs.algorithms(motion("all_to_all", ("pcie", "ethernet")), MB) == ["ucc"]
    assert costs.algorithms(motion(), MB) == ["ring"]
    assert costs.files == ("table.csv",)
    assert costs.at_least_us(motion(), MB, "ring") == 0
    assert costs.at_least_us(motion("all_to_all"), MB, "direct") > 0


def test_a_measured_time_holds_the_launch_and_a_simulated_one_does_not(tmp_path: Path) -> None:
    costs = LayeredCosts(MeasuredCosts(HGX2, read_measurements(saved(tmp_path, CSV))), SimulatedCosts(HGX2))
    usual = bindings_for(HGX2, EVERYONE)[0]
    assert launch_us(usual, costs.cost(motion(), MB, "ring")) == 0
    assert launch_us(usual, costs.cost(motion("all_to_all"), MB, "direct")) == LAUNCH_US


def test_measurements_of_one_size_do_not_stand_for_groups_of_others(tmp_path: Path) -> None:
    costs = MeasuredCosts(HGX2, read_measurements(saved(tmp_path, CSV)))
    uneven = Motion(kind="all_gather", groups=(tuple(range(8)), tuple(range(8, 12))), channels=("nvlink",))
    assert costs.algorithms(uneven, MB) == []


def test_nccl_tests_output_is_read_by_its_own_header(tmp_path: Path) -> None:
    rows = read_measurements(saved(tmp_path, NCCL_TESTS, "ar.txt"))
    assert [(r.collective, r.algorithm, r.nranks, r.nbytes, r.time_us) for r in rows] == [
        ("all_reduce", "nccl", 2, 1048576, 31.5),
        ("all_reduce", "nccl", 2, 4194304, 91.5),
    ]


def test_nccl_tests_output_without_redop_and_root_in_its_rows_is_read_too(tmp_path: Path) -> None:
    text = NCCL_TESTS.replace("     sum      -1 ", "                 ").replace("all_reduce_perf", "alltoall_perf")
    rows = read_measurements(saved(tmp_path, text, "aa.txt"), algorithm="direct", channels=["nvlink"])
    assert [(r.collective, r.algorithm, r.channels, r.time_us) for r in rows] == [
        ("all_to_all", "direct", ("nvlink",), 31.5),
        ("all_to_all", "direct", ("nvlink",), 91.5),
    ]


def test_what_a_text_leaves_open_can_be_given(tmp_path: Path) -> None:
    bare = "\n".join(line for line in NCCL_TESTS.splitlines() if "Collective" not in line and "Rank" not in line)
    path = saved(tmp_path, bare, "bare.txt")
    with pytest.raises(InvalidInput, match=r"bare.txt: collective: .* --costs bare.txt,collective=all_reduce"):
        read_measurements(path)
    with pytest.raises(InvalidInput, match=r"bare.txt: nranks: names 0 ranks.* --costs bare.txt,nranks=8"):
        read_measurements(path, collective="all_gather")
    rows = read_measurements(path, collective="all_gather", nranks=8)
    assert {(r.collective, r.nranks) for r in rows} == {("all_gather", 8)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a table"),
        ("a,b\n1,2\n", "neither a table"),
        (CSV.splitlines()[0], "holds no measurements"),
        (CSV.replace("100\n", "fast\n"), r"table.csv:2: time_us: must be a number, not 'fast'"),
        (CSV.replace("100\n", "-1\n"), r"table.csv:2: time_us: must be > 0"),
        (CSV.replace("100\n", "nan\n"), r"table.csv:2: time_us: must be > 0"),
        (CSV.replace("100\n", "inf\n"), r"table.csv:2: time_us: must be > 0"),
        (CSV.replace("100\n", "100,7\n"), r"table.csv:2: 7 cells, not 6"),
        (CSV.replace("all_to_all", "all_to_some"), r"table.csv:6: collective: unknown collective 'all_to_some'"),
        (CSV.replace(" 8,", " 1,"), r"table.csv:7: nranks: must be 2..1048576, not '1'"),
        (CSV.replace(" 8,", " 99999999999,"), r"table.csv:7: nranks"),
        (CSV.replace(" ucc,", ","), "table.csv:6: algorithm: must not be empty"),
        (NCCL_TESTS.replace("31.50", "xx"), r"table.csv:13: time: must be a number, not 'xx'"),
        (NCCL_TESTS.replace("     262144     float     sum      -1    31.50   33.29   33.29", ""), r"table.csv:13"),
    ],
)
def test_broken_tables_give_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        read_measurements(saved(tmp_path, text))
    assert "\n" not in str(error.value)


def test_channels_that_the_cluster_lacks_are_refused() -> None:
    row = Measurement(collective="all_reduce", algorithm="ring", nranks=8, nbytes=1.0, time_us=1.0, channels=("xgmi",))
    with pytest.raises(InvalidInput, match="unknown channel in the table 'xgmi'; choose from: nvlink"):
        MeasuredCosts(HGX2, [row])
