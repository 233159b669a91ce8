"""What is written for NCCL's tuner, judged by an independent reading of its rules."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput, PlanMismatch
from stretto.planner.channels import bindings_for
from stretto.planner.costs import Motion, simulated_costs
from stretto.planner.motif import motif_of
from stretto.planner.plan import MotifPlan, OpPlan, Plan
from stretto.planner.rules import apply
from stretto.planner.tuner_csv import MAX_BYTES, MAX_LINE, Line, read_tuner_csv, tuner_lines, write_tuner_csv
from stretto.workload import Op, Workload

CLUSTER = Cluster.preset("hgx2", nodes=2)
EVERYONE = tuple(range(16))
LEFT, RIGHT = tuple(range(8)), tuple(range(8, 16))


Groups = tuple[tuple[int, ...], ...]


def case(*ops: tuple[str, str, float, str, Groups], **rewritten: tuple[str, tuple[str, ...]]) -> tuple[Plan, Workload]:
    """Ops as (name, kind, bytes, algorithm, groups); some with another expression and channels, by name."""
    workload = Workload(
        name="step",
        num_ranks=16,
        ops=tuple(Op(name=name, kind=kind, nbytes=size, groups=groups) for name, kind, size, _, groups in ops),
    )
    plans = []
    for name, kind, size, algorithm, groups in ops:
        whole = str(motif_of(kind, (groups or (EVERYONE,))[0], size))
        usual = bindings_for(CLUSTER, groups or (EVERYONE,))[0].channels
        expression, channels = rewritten.get(name, (whole, usual))
        names = algorithm.split(",")
        motifs = tuple(MotifPlan(motif="m", algorithm=a, channels=channels, seq=at) for at, a in enumerate(names))
        plans.append(
            OpPlan(op=name, kind=kind, nbytes=size, option=f"{algorithm} here", expression=expression, motifs=motifs)
        )
    plan = Plan(
        name="p", workload="step", workload_digest=workload.digest, cluster="hgx2:2", cluster_digest=CLUSTER.digest,
        ops=tuple(plans), iteration_us=1.0,
    )  # fmt: skip
    return plan, workload


def tuned(path: Path, collective: str, nbytes: int, nodes: int, ranks: int) -> tuple[str, str] | None:
    """As the plugin does: line by line, the first that fits."""
    for text in path.read_text().split("\n"):
        assert len(text) <= 255
        if not text or text.startswith("#"):
            continue
        name, low, high, algorithm, protocol, channels, n, r = text.split(",")
        assert channels == "-1"
        fits = int(low) <= nbytes <= int(high) and int(n) in (-1, nodes) and int(r) in (-1, ranks)
        if name == collective and fits:
            return algorithm, protocol
    return None


def test_every_size_that_was_planned_gets_its_algorithm(tmp_path: Path) -> None:
    sizes = {"a": 1_000.0, "b": 1e6, "c": 4e6, "d": 1e8}
    algorithms = {"a": "double_binary_tree:1", "b": "double_binary_tree", "c": "ring", "d": "ring"}
    plan, workload = case(*((n, "all_reduce", sizes[n], algorithms[n], ()) for n in sizes))
    path = tmp_path / "t.csv"
    assert write_tuner_csv(plan, workload, CLUSTER, path) == []
    assert [tuned(path, "allreduce", int(sizes[n]), 2, 16) for n in sizes] == [
        ("tree", "ll"), ("tree", "ll128"), ("ring", "ll128"), ("ring", "simple"),
    ]  # fmt: skip
    # The border between 1 MB and 4 MB is their geometric mean, to the byte.
    assert tuned(path, "allreduce", 2_000_000, 2, 16) == ("tree", "ll128")
    assert tuned(path, "allreduce", 2_000_001, 2, 16) == ("ring", "ll128")
    # From half of a planned size to twice that: what lies beyond is NCCL's own choice.
    assert [tuned(path, "allreduce", size, 2, 16) for size in (499, 500, 2000, 2001)] == [
        None, ("tree", "ll"), ("tree", "ll"), None,
    ]  # fmt: skip
    assert [tuned(path, "allreduce", size, 2, 16) for size in (8_000_000, 8_000_001, 49_999_999)] == [
        ("ring", "ll128"), None, None,
    ]  # fmt: skip
    assert tuned(path, "allreduce", 200_000_000, 2, 16) == ("ring", "simple")
    assert tuned(path, "allreduce", MAX_BYTES, 2, 16) is None
    assert tuned(path, "allreduce", 1000, 1, 8) is None
    assert tuned(path, "allgather", 1000, 2, 16) is None


def test_sizes_that_are_near_to_one_another_share_a_line() -> None:
    plan, workload = case(*((f"o{at}", "all_gather", 3e6 * 2.0**at, "ring", ()) for at in range(4)))
    lines, _ = tuner_lines(plan, workload, CLUSTER)
    assert [(line.min_bytes, line.max_bytes, line.protocol) for line in lines] == [
        (1_500_000, 4_242_640, "ll128"), (4_242_641, 48_000_000, "simple"),
    ]  # fmt: skip
    plan, workload = case(*((f"o{at}", "all_gather", 10.0 ** (at + 2), "ring", ()) for at in range(8)))
    lines, _ = tuner_lines(plan, workload, CLUSTER)
    assert len(lines) == 8
    assert all(b.min_bytes > a.max_bytes + 1 for a, b in pairwise(lines))


def test_groups_of_other_shapes_have_lines_of_their_own(tmp_path: Path) -> None:
    plan, workload = case(
        ("inside", "all_reduce", 1e6, "ring", (LEFT, RIGHT)),
        ("across", "all_reduce", 1e6, "double_binary_tree", ((0, 8), (1, 9))),
        ("mixed", "all_gather", 1e6, "ring", ((0, 1), (2, 10))),
    )
    path = tmp_path / "t.csv"
    assert write_tuner_csv(plan, workload, CLUSTER, path) == []
    assert tuned(path, "allreduce", 1_000_000, 1, 8) == ("ring", "ll128")
    assert tuned(path, "allreduce", 1_000_000, 2, 2) == ("tree", "ll128")
    assert tuned(path, "allgather", 900_000, 1, 2) == tuned(path, "allgather", 900_000, 2, 2) == ("ring", "ll128")


def test_what_nccl_cannot_be_told_is_said(tmp_path: Path) -> None:
    plan, workload = case(
        ("a2a", "all_to_all", 1e6, "direct", ()),
        ("trees", "broadcast", 1e6, "binary_tree", ()),
        ("gathers", "all_gather", 1e6, "direct", ()),
        ("first", "reduce_scatter", 1e6, "ring", ()),
        ("alone", "all_reduce", 1e6, "nccl", ()),
    )
    left_out = write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv")
    assert left_out == [
        "a2a: NCCL's tuner does not know all_to_all",
        "trees: NCCL has no binary_tree here",
        "gathers: NCCL has no direct here",
        "alone: measured as NCCL runs it by itself, so nothing is set",
    ]
    text = (tmp_path / "t.csv").read_text()
    assert all(f"# left out: {why}" in text for why in left_out)
    assert [line.collective for line in read_tuner_csv(tmp_path / "t.csv")] == ["reducescatter"]


def test_pieces_and_the_halves_of_a_ring_are_told_as_the_whole(tmp_path: Path) -> None:
    whole = motif_of("all_reduce", EVERYONE, 1e6)
    cut, ring = str(apply(whole, "segment", parts=4)), str(apply(whole, "ring"))
    fast = ("nvlink", "rdma")
    plan, workload = case(
        ("cut", "all_reduce", 1e6, "ring,ring,ring,ring", ()), ("halves", "all_reduce", 1e8, "ring,ring", ()),
        cut=(cut, fast), halves=(ring, fast),
    )  # fmt: skip
    lines, left_out = tuner_lines(plan, workload, CLUSTER)
    assert [line.algorithm for line in lines] == ["ring", "ring"]
    assert left_out == ["cut: its 4 pieces; NCCL runs it whole", "halves: its 2 pieces; NCCL runs it whole"]


def test_what_nccl_does_not_have_gets_the_cheaper_of_ring_and_tree() -> None:
    hosts = str(apply(motif_of("all_reduce", EVERYONE, 1e9), "hierarchical", local=8))
    fast = ("nvlink", "rdma")
    plan, workload = case(
        ("small", "all_reduce", 2e4, "recursive_doubling", ()),
        ("links", "all_reduce", 1e7, "ring", ()),
        ("hosts", "all_reduce", 1e9, "ring,ring,ring", ()),
        links=(str(motif_of("all_reduce", EVERYONE, 1e7)), ("pcie", "ethernet")), hosts=(hosts, fast),
    )  # fmt: skip
    lines, left_out = tuner_lines(plan, workload, CLUSTER)
    assert [line.algorithm for line in lines] == ["tree", "ring", "ring"]
    costs = simulated_costs(CLUSTER)
    motion = Motion(kind="all_reduce", groups=(EVERYONE,), channels=fast)
    ring, tree = (costs.cost(motion, 1e9, name).us for name in ("ring", "double_binary_tree"))
    assert ring < tree
    assert left_out[0].startswith("small: NCCL has no recursive_doubling here; it gets tree, the cheapest there is (")
    assert left_out[1].startswith("links: NCCL has no ring here; it gets ring")
    assert left_out[2].startswith("hosts: NCCL has no ring,ring,ring here; it gets ring")
    assert f"ring {ring:.0f} us" in left_out[2]


def test_ops_of_one_size_cannot_have_two_algorithms(tmp_path: Path) -> None:
    plan, workload = case(
        ("one", "all_reduce", 1e6, "ring", ()), ("two", "all_reduce", 1e6, "double_binary_tree", ())
    )
    left_out = write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv")
    assert left_out == ["two: NCCL cannot tell it from one, which has ring, not tree"]
    assert tuned(tmp_path / "t.csv", "allreduce", 1_000_000, 2, 16) == ("ring", "ll128")


def test_names_cannot_smuggle_lines_in(tmp_path: Path) -> None:
    evil = "x\nallreduce,0,99,tree,ll,-1,-1,-1\u2028\r" + "y" * 400 + "ü"
    plan, workload = case((evil, "all_to_all", 1e6, "direct", ()), ("ok", "all_reduce", 1e6, "ring", ()))
    write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= MAX_LINE
    assert tuned(tmp_path / "t.csv", "allreduce", 50, -2, -2) is None
    assert len(read_tuner_csv(tmp_path / "t.csv")) == 1


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    plan, workload = case(("a", "all_reduce", 1e3, "ring", ()), ("b", "reduce", 1e8, "chain:64", (LEFT,)))
    write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv")
    assert read_tuner_csv(tmp_path / "t.csv") == tuner_lines(plan, workload, CLUSTER)[0]
    extra = tmp_path / "extra.csv"
    extra.write_text("# comment\n\nallreduce, 0, 10, ring, ll, 4, -1, -1, 2, 1\n")
    assert read_tuner_csv(extra) == [
        Line(collective="allreduce", min_bytes=0, max_bytes=10, algorithm="ring", protocol="ll", channels=4)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allreduce,0,1,ring,ll,-1,-1", "must be 8 to 10 fields"),
        ("allreduce,0,1,ring,ll,-1,-1,-1," + "9" * 300, "at most 255 characters"),
        ("alltoall,0,1,ring,ll,-1,-1,-1", "collective_type: must be one of allreduce"),
        ("allreduce,0,1,star,ll,-1,-1,-1", "algorithm: must be one of tree, ring"),
        ("allreduce,0,1,ring,fast,-1,-1,-1", "protocol: must be one of ll, ll128, simple"),
        ("allreduce,0,x,ring,ll,-1,-1,-1", "must be numbers"),
        ("allreduce,0,1,ring,ll,-7,-1,-1", "channels: must be 1..1024, or -1 for any, not -7"),
        ("allreduce,0,1,ring,ll,-1,0,-1", "nNodes: must be 1..1048576, or -1 for any, not 0"),
        ("allreduce,0,1,ring,ll,-1,-1,-9999999999", "nRanks: must be 1..1048576, or -1 for any"),
        ("allreduce,9,1,ring,ll,-1,-1,-1", "min_bytes: must be 0..max_bytes, not 9"),
        (f"allreduce,0,{1 << 64},ring,ll,-1,-1,-1", "min_bytes: must be 0..max_bytes"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"# one\n{line}\n")
    with pytest.raises(InvalidInput, match=message) as caught:
        read_tuner_csv(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_only_the_plans_own_workload_and_cluster_will_do(tmp_path: Path) -> None:
    plan, workload = case(("a", "all_reduce", 1e3, "ring", ()))
    other: Any = case(("a", "all_reduce", 2e3, "ring", ()))[1]
    with pytest.raises(PlanMismatch):
        tuner_lines(plan, other, CLUSTER)
    with pytest.raises(PlanMismatch):
        tuner_lines(plan, workload, Cluster.preset("hgx2", nodes=3))
