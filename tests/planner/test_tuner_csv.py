# SPDX-License-Identifier: Apache-2.0
"""What is written for NCCL's tuner, judged by an independent reading of its rules."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput, PlanMismatch
from stretto.planner import api
from stretto.planner.algebra.motif import motif_of
from stretto.planner.algebra.options import problem as make_problem
from stretto.planner.algebra.rules import apply
from stretto.planner.costs.channels import bindings_for
from stretto.planner.costs.costs import Motion, simulated_costs
from stretto.planner.plan import MotifPlan, OpPlan, Plan
from stretto.planner.tuner_csv import (
    MAX_BYTES,
    MAX_LINE,
    TunerLine,
    most_channels,
    read_tuner_csv,
    told,
    tuner_lines,
    write_tuner_csv,
)
from stretto.planner.tuner_gain import with_tuner_alone
from stretto.workload import Dep, Op, Workload

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


NOTHING: frozenset[tuple[str, str]] = frozenset()


def plugin(
    path: Path, collective: str, nbytes: int, nodes: int, ranks: int, impossible: frozenset[tuple[str, str]] = NOTHING
) -> tuple[str, str, int] | None:
    """As NCCL's example plugin does: the first line that fits and that NCCL can run; without one, one channel."""
    for text in path.read_text().split("\n"):
        assert len(text) <= 255
        if not text or text.startswith("#"):
            continue
        name, low, high, algorithm, protocol, channels, n, r = text.split(",")
        fits = int(low) <= nbytes <= int(high) and int(n) in (-1, nodes) and int(r) in (-1, ranks)
        if name == collective and fits and (algorithm, protocol) not in impossible:
            return algorithm, protocol, int(channels)
    return None


def tuned(path: Path, collective: str, nbytes: int, nodes: int, ranks: int) -> tuple[str, str] | None:
    """Algorithm and protocol of a call."""
    found = plugin(path, collective, nbytes, nodes, ranks)
    return found[:2] if found is not None else None


def test_every_size_that_was_planned_gets_its_algorithm(tmp_path: Path) -> None:
    sizes = {"a": 1_000.0, "b": 1e6, "c": 4e6, "d": 1e8}
    algorithms = {"a": "double_binary_tree:1", "b": "double_binary_tree", "c": "ring", "d": "ring"}
    plan, workload = case(*((n, "all_reduce", sizes[n], algorithms[n], ()) for n in sizes))
    path = tmp_path / "t.csv"
    assert write_tuner_csv(plan, workload, CLUSTER, path, plugin="example") == []
    assert [tuned(path, "allreduce", int(sizes[n]), 2, 16) for n in sizes] == [
        ("tree", "ll"), ("tree", "ll128"), ("ring", "ll128"), ("ring", "simple"),
    ]  # fmt: skip
    # The border between 1 MB and 4 MB is their geometric mean, to the byte; the ends reach to the ends.
    assert tuned(path, "allreduce", 2_000_000, 2, 16) == ("tree", "ll128")
    assert tuned(path, "allreduce", 2_000_001, 2, 16) == ("ring", "ll128")
    assert tuned(path, "allreduce", 0, 2, 16) == ("tree", "ll")
    assert tuned(path, "allreduce", MAX_BYTES, 2, 16) == ("ring", "simple")
    # The plan says nothing of other groups and collectives; NCCL would give them one channel.
    assert tuned(path, "allreduce", 1000, 1, 8) == tuned(path, "allgather", 1000, 2, 16) == ("ring", "ll")


IMPOSSIBLE = [(a, p) for a in ("tree", "ring") for p in ("ll", "ll128", "simple") if (a, p) != ("ring", "simple")]


@pytest.mark.parametrize("seed", range(20))
def test_every_call_has_channels_whatever_nccl_can_run(seed: int, tmp_path: Path) -> None:
    """The plugin takes -1 and a call without a line for one channel: neither may happen, at any size, in any group."""
    draw = random.Random(seed)
    kinds = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "broadcast": "chain"}
    ops = []
    for at in range(draw.randint(1, 6)):
        kind = draw.choice(list(kinds))
        tree = kind == "all_reduce" and draw.random() < 0.5
        groups = draw.choice([(), (LEFT, RIGHT), ((0, 8), (1, 9))])
        ops.append((f"o{at}", kind, float(round(10 ** draw.uniform(0, 10))),
                    "double_binary_tree" if tree else kinds[kind], groups))  # fmt: skip
    plan, workload = case(*ops)
    path = tmp_path / "t.csv"
    write_tuner_csv(plan, workload, CLUSTER, path, plugin="example")
    ends = [end for line in read_tuner_csv(path) for end in (line.min_bytes, line.max_bytes)]
    sizes = {min(max(end + by, 0), MAX_BYTES) for end in ends for by in (-1, 0, 1)}
    sizes |= {round(10 ** draw.uniform(0, 18)) for _ in range(20)}
    impossible = frozenset(draw.sample(IMPOSSIBLE, draw.randint(0, len(IMPOSSIBLE))))
    for collective in ("allreduce", "allgather", "reducescatter", "broadcast", "reduce"):
        for nodes, ranks in ((1, 8), (2, 16), (2, 2), (7, 56)):
            channels = []
            for size in sorted(sizes):
                found = plugin(path, collective, size, nodes, ranks, impossible)
                assert found is not None
                channels.append(found[2])
            assert min(channels) >= 2
            assert channels == sorted(channels)
    seen: dict[tuple[object, ...], str] = {}
    for name, kind, planned_size, algorithm, groups in ops:
        shape = (len({r // 8 for r in (groups or (EVERYONE,))[0]}), len((groups or (EVERYONE,))[0]))
        wanted = seen.setdefault((kind, planned_size, shape), "tree" if "tree" in algorithm else "ring")
        line = tuned(path, kind.replace("_", ""), int(planned_size), *shape)
        assert line is not None and line[0] == wanted, name


def test_channels_follow_the_links_and_the_size(tmp_path: Path) -> None:
    for preset, inside, across in (("hgx2", 8, 2), ("dgx_a100", 15, 2), ("dgx_h100", 23, 3)):
        cluster = Cluster.preset(preset, nodes=2)
        for group, expected in ((range(8), inside), ((0, 8), across)):
            usual = bindings_for(cluster, [tuple(group)])[0].channels
            rate = max(
                sum(link.gb_per_s for link in cluster.links() if link.src == rank and link.channel in usual)
                for rank in group
            )
            assert most_channels(cluster, group, usual) == min(max(math.ceil(rate / 20), 2), 32) == expected, preset
    plan, workload = case(("a", "all_reduce", 1e6, "ring", (LEFT, RIGHT)))
    path = tmp_path / "t.csv"
    write_tuner_csv(plan, workload, CLUSTER, path, plugin="example")
    found = [plugin(path, "allreduce", size, 1, 8) for size in (1, 65_536, 65_537, 131_073, 10**6, 10**9)]
    assert [line[2] for line in found if line is not None] == [2, 2, 4, 8, 8, 8]


def test_sizes_that_are_near_to_one_another_share_a_line() -> None:
    plan, workload = case(*((f"o{at}", "all_gather", 3e6 * 2.0**at, "ring", ()) for at in range(4)))
    lines, _ = tuner_lines(plan, workload, CLUSTER, plugin="example")
    mine = [(line.min_bytes, line.max_bytes, line.protocol) for line in lines if line.ranks == 16]
    assert mine[3:5] == [(262_145, 4 << 20, "ll128"), ((4 << 20) + 1, MAX_BYTES, "simple")]
    for before, after in pairwise(mine[:5]):
        assert before[1] + 1 == after[0]


def test_nccl_alone_gains_nothing_where_the_tuner_says_what_nccl_does_anyway() -> None:
    workload = Workload.load("dlrm:A2,ranks=16")
    found = api.plan(workload, CLUSTER, steps=30)
    lines, _ = tuner_lines(found.plan, workload, CLUSTER, plugin="example")
    alone = with_tuner_alone(lines, found.problem, CLUSTER)
    assert alone.period_us == pytest.approx(found.schedules["fifo"].period_us)
    assert found.plan.iteration_us < alone.period_us


def test_a_tuner_that_says_the_slower_algorithm_is_told_to_lose() -> None:
    """The time with the table is that of a step whose all-reduce takes what the table asks for."""
    workload = Workload(
        name="step", num_ranks=16,
        ops=(
            Op(name="forward", kind="compute", duration_us=100.0),
            Op(name="sum", kind="all_reduce", nbytes=1e8, after=(Dep(op="forward"),)),
        ),
    )  # fmt: skip
    step = make_problem(workload, CLUSTER)
    costs = simulated_costs(CLUSTER)
    motion = Motion(kind="all_reduce", groups=(EVERYONE,), channels=("nvlink", "rdma"))
    times = {}
    for name, algorithm in (("ring", "ring"), ("tree", "nccl_tree:64")):
        line = TunerLine(collective="allreduce", min_bytes=0, max_bytes=MAX_BYTES, algorithm=name, protocol="simple")
        times[name] = with_tuner_alone([line], step, CLUSTER).period_us
        assert times[name] - costs.cost(motion, 1e8, algorithm).us < 200
    # Between two hosts a tree moves half of what a ring does.
    assert times["ring"] > times["tree"] == pytest.approx(with_tuner_alone([], step, CLUSTER).period_us)


def test_groups_of_other_shapes_have_lines_of_their_own(tmp_path: Path) -> None:
    plan, workload = case(
        ("inside", "all_reduce", 1e6, "ring", (LEFT, RIGHT)),
        ("across", "all_reduce", 1e6, "double_binary_tree", ((0, 8), (1, 9))),
        ("mixed", "all_gather", 1e6, "ring", ((0, 1), (2, 10))),
    )
    path = tmp_path / "t.csv"
    assert write_tuner_csv(plan, workload, CLUSTER, path, plugin="example") == []
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
    left_out = write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv", plugin="example")
    assert left_out == [
        "a2a: NCCL's tuner does not know all_to_all",
        "trees: NCCL has no binary_tree here",
        "gathers: NCCL has no direct here",
        "alone: measured as NCCL runs it by itself, which cannot be told; a ring is",
    ]
    text = (tmp_path / "t.csv").read_text()
    assert all(f"# left out: {why}" in text for why in left_out)
    assert {line.collective for line in read_tuner_csv(tmp_path / "t.csv") if line.ranks == 16} == {"reducescatter"}


def test_pieces_and_the_halves_of_a_ring_are_told_as_the_whole(tmp_path: Path) -> None:
    whole = motif_of("all_reduce", EVERYONE, 1e6)
    cut, ring = str(apply(whole, "segment", parts=4)), str(apply(whole, "ring"))
    fast = ("nvlink", "rdma")
    plan, workload = case(
        ("cut", "all_reduce", 1e6, "ring,ring,ring,ring", ()), ("halves", "all_reduce", 1e8, "ring,ring", ()),
        cut=(cut, fast), halves=(ring, fast),
    )  # fmt: skip
    lines, left_out = tuner_lines(plan, workload, CLUSTER, plugin="example")
    assert {line.algorithm for line in lines if line.ranks == 16} == {"ring"}
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
    lines, left_out = tuner_lines(plan, workload, CLUSTER, plugin="example")
    found = [told(lines, "allreduce", size, 2, 16) for size in (20_000, 10**7, 10**9)]
    assert [line.algorithm for line in found if line is not None] == ["tree", "tree", "tree"]
    costs = simulated_costs(CLUSTER)
    motion = Motion(kind="all_reduce", groups=(EVERYONE,), channels=fast)
    ring, tree = (costs.cost(motion, 1e9, name).us for name in ("ring", "nccl_tree:64"))
    assert tree < ring
    assert left_out[0].startswith("small: NCCL has no recursive_doubling here; it gets tree, the cheapest there is (")
    assert left_out[1].startswith("links: NCCL has no ring here; it gets tree")
    assert left_out[2].startswith("hosts: NCCL has no ring,ring,ring here; it gets tree")
    assert f"ring {ring:.0f} us" in left_out[2]


def test_ops_of_one_size_cannot_have_two_algorithms(tmp_path: Path) -> None:
    plan, workload = case(("one", "all_reduce", 1e6, "ring", ()), ("two", "all_reduce", 1e6, "double_binary_tree", ()))
    left_out = write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv", plugin="example")
    assert left_out == ["two: NCCL cannot tell it from one, which has ring, not tree"]
    assert tuned(tmp_path / "t.csv", "allreduce", 1_000_000, 2, 16) == ("ring", "ll128")


def test_names_cannot_smuggle_lines_in(tmp_path: Path) -> None:
    evil = "x\nallreduce,0,99,tree,ll,-1,-1,-1\u2028\r" + "y" * 400 + "ü"
    plan, workload = case((evil, "all_to_all", 1e6, "direct", ()), ("ok", "all_reduce", 1e6, "ring", ()))
    write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv", plugin="example")
    text = (tmp_path / "t.csv").read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= MAX_LINE
    assert tuned(tmp_path / "t.csv", "allreduce", 50, 2, 16) == ("ring", "ll")
    assert all(line.algorithm == "ring" for line in read_tuner_csv(tmp_path / "t.csv"))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    plan, workload = case(("a", "all_reduce", 1e3, "ring", ()), ("b", "reduce", 1e8, "chain:64", (LEFT,)))
    write_tuner_csv(plan, workload, CLUSTER, tmp_path / "t.csv", plugin="example")
    assert read_tuner_csv(tmp_path / "t.csv") == tuner_lines(plan, workload, CLUSTER, plugin="example")[0]
    extra = tmp_path / "extra.csv"
    extra.write_text("# comment\n\nallreduce, 0, 10, ring, ll, 4, -1, -1, 2, 1\n")
    assert read_tuner_csv(extra) == [
        TunerLine(collective="allreduce", min_bytes=0, max_bytes=10, algorithm="ring", protocol="ll", channels=4)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allreduce,0,1,ring,ll,-1,-1", "must be 8 to 10 fields"),
        ("allreduce,0,1,ring,ll,-1,-1,-1," + "9" * 300, "at most 255 characters"),
        ("alltoall,0,1,ring,ll,-1,-1,-1", "collective_type: must be one of allreduce"),
        ("allreduce,0,1,star,ll,-1,-1,-1", "algorithm: must be one of tree, ring"),
        ("allreduce,0,1,ring,fast,-1,-1,-1", "protocol: must be one of ll, ll128, simple, any"),
        ("allreduce,0,x,ring,ll,-1,-1,-1", "max_bytes: must be a number, not 'x'"),
        ("allreduce,0,1,ring,ll,\u0664,-1,-1", "channels: must be a number"),
        ("allreduce,0,1,ring,ll,-7,-1,-1", "channels: must be 1..1024, or -1 for any, not -7"),
        ("allreduce,0,1,ring,ll,0,-1,-1", "channels: must be 1..1024, or -1 for any, not 0"),
        ("allreduce,0,1,ring,ll,4,0,-1", "nNodes: must be 1..1048576, or -1 for any, not 0"),
        ("allreduce,0,1,ring,ll,4,-1,-10000000000000000000", "nRanks: must be 1..1048576, or -1 for any"),
        ("allreduce,0,1,ring,ll,4,4294967296,-1", "nNodes: must be 1..1048576"),
        ("allreduce,0,1,ring,ll,4,4,2", "nRanks: 2 ranks cannot be on 4 nodes"),
        ("allreduce,0,1,ring,ll,4,-1,-1,-3", "numPipeOps: must be 0..1048576, or -1 for any, not -3"),
        ("allreduce,0,1,ring,ll,4,-1,-1,1,x", "regBuff: must be a number, not 'x'"),
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
        tuner_lines(plan, other, CLUSTER, plugin="example")
    with pytest.raises(PlanMismatch):
        tuner_lines(plan, workload, Cluster.preset("hgx2", nodes=3), plugin="example")
