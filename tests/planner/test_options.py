# SPDX-License-Identifier: Apache-2.0
"""The options of comm-ops: rewrites, bindings and algorithms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto import Cluster
from stretto.errors import InvalidInput
from stretto.planner.algebra.lowering import check
from stretto.planner.algebra.motif import Expr, Motif, motif_of, seq
from stretto.planner.algebra.notation_read import parse
from stretto.planner.algebra.options import STOCK_ALGORITHMS, options, problem
from stretto.planner.algebra.rewrites import rewrites
from stretto.planner.algebra.rules import rule, unregister
from stretto.planner.costs.costs import CPU_LAUNCH_US, LAUNCH_US, SimulatedCosts, simulated_costs
from stretto.planner.costs.measured import LayeredCosts, MeasuredCosts, Measurement
from stretto.planner.schedule.problem import MotifTask, Option
from stretto.planner.schedule.schedule import Scheduler
from stretto.workload import Dep, Op, Workload

HGX2 = Cluster.preset("hgx2", nodes=2)
COSTS = SimulatedCosts(HGX2)
HOSTS = (tuple(range(8)), tuple(range(8, 16)))
RAILS = tuple((r, 8 + r) for r in range(8))


def step(*ops: Op, ranks: int = 16) -> Workload:
    return Workload(name="step", num_ranks=ranks, ops=(Op(name="compute", duration_us=100.0), *ops))


Groups = tuple[tuple[int, ...], ...]


def made(kind: str, nbytes: float = 32e6, groups: Groups = (), root: int = 0) -> tuple[Option, ...]:
    op = Op(name="op", kind=kind, nbytes=nbytes, groups=groups, root=root, after=(Dep(op="compute"),))
    return options(op, step(op), HGX2, COSTS)


def test_a_message_stays_whole_on_the_network_of_the_jobs_backend() -> None:
    (option,) = made("send", groups=((0, 9),))
    assert len(option.tasks) == 1
    assert option.tasks[0].channels == made("all_gather", groups=((0, 9),))[0].tasks[0].channels


@pytest.mark.parametrize(
    ("kind", "groups", "root"),
    [
        ("all_reduce", (), 0),
        ("all_reduce", HOSTS, 0),
        ("all_reduce", RAILS, 0),
        ("all_to_all", (), 0),
        ("all_gather", (), 0),
        ("reduce_scatter", ((0, 1, 2, 8, 9, 10),), 0),
        ("broadcast", (), 3),
        ("reduce", HOSTS, 1),
        ("gather", (), 0),
        ("send", ((0, 9),), 0),
    ],
)
def test_every_option_is_a_rewrite_that_is_proved_to_be_the_comm_op(kind: str, groups: Groups, root: int) -> None:
    found = made(kind, 4800.0, groups, root)
    original = motif_of(kind, (groups or (tuple(range(16)),))[0], 4800.0, root)
    for text in {option.expression for option in found}:
        check(parse(text), original)


def test_the_first_option_is_the_whole_collective_in_one_motif_on_the_usual_channels() -> None:
    for kind in ("all_reduce", "all_to_all", "all_gather"):
        found = made(kind)
        assert found[0].rules == ()
        assert len(found[0].tasks) == 1
        assert found[0].tasks[0].channels == ("nvlink", "rdma")


def test_the_default_is_also_there_in_segments_of_the_same_kind() -> None:
    found = made("all_reduce")
    first = found[0].tasks[0]
    counts = {
        len(option.tasks)
        for option in found
        if len(option.rules) == 1 and option.rules[0].startswith("segment")
        and {(task.algorithm, task.channels) for task in option.tasks} == {(first.algorithm, first.channels)}
    }  # fmt: skip
    assert counts == {2, 4, 8, 16}


def test_phases_of_a_hierarchical_all_reduce_hold_one_fabric_at_a_time() -> None:
    found = {option.name: option for option in made("all_reduce") if option.rules == ("hierarchical:local=8",)}
    held = {tuple(task.channels for task in option.tasks) for option in found.values()}
    assert (("nvlink",), ("rdma",), ("nvlink",)) in held
    assert (("nvlink",), ("pcie", "ethernet"), ("nvlink",)) in held
    for option in found.values():
        assert [task.after for task in option.tasks] == [(), (0,), (1,)]


def test_segments_of_a_hierarchical_all_reduce_are_pipelines_of_their_own() -> None:
    option = next(o for o in made("all_reduce") if o.rules == ("segment:parts=2", "hierarchical:local=8"))
    assert [task.after for task in option.tasks] == [(), (0,), (1,), (), (3,), (4,)]
    assert "2 segments" in option.name


def test_an_all_to_all_is_splined_and_segmented() -> None:
    found = made("all_to_all")
    rules = {option.rules for option in found}
    assert ("spline:parts=4",) in rules
    assert ("segment:parts=2", "spline:parts=2") in rules
    windows = next(option for option in found if option.rules == ("spline:parts=4",))
    assert len(windows.tasks) == 4
    assert all(not task.after for task in windows.tasks)
    assert sum(task.nbytes for task in windows.tasks) == pytest.approx(32e6)


def test_an_all_to_all_whose_pieces_may_differ_goes_straight_from_rank_to_rank() -> None:
    equal = Op(name="op", kind="all_to_all", nbytes=32e6, after=(Dep(op="compute"),))
    free = options(equal, step(equal), HGX2, COSTS)
    differing = replace(equal, at_most=True, rank_nbytes=(32e6,) * 16)
    bound = options(differing, step(differing), HGX2, COSTS)
    assert any(leaf.relays for option in free for leaf in parse(option.expression).leaves)
    assert not any(leaf.relays for option in bound for leaf in parse(option.expression).leaves)
    assert {task.algorithm for option in bound for task in option.tasks} == {"direct"}
    assert {"segment", "spline"} <= {step.partition(":")[0] for option in bound for step in option.rules}
    both = problem(step(equal, replace(differing, name="other")), HGX2, COSTS)
    assert both.options["op"] != both.options["other"]


def test_segments_are_spread_over_disjoint_channels() -> None:
    found = [option for option in made("all_to_all") if len({task.channels for task in option.tasks}) > 1]
    both = [option for option in found if option.rules == ("segment:parts=8",)]
    assert both
    for option in both:
        first, second = {task.channels for task in option.tasks}
        assert not set(first) & set(second)
    assert min(option.total_us for option in both) < made("all_to_all")[0].total_us


def test_every_task_pays_for_its_launch_and_says_where_its_cost_came_from() -> None:
    for option in made("all_to_all"):
        for task in option.tasks:
            host_driven = not set(task.channels) <= {"nvlink", "rdma"}
            assert task.launch_us == (CPU_LAUNCH_US if host_driven else LAUNCH_US)
            assert task.duration_us > task.launch_us
            assert task.source.startswith(f"simulated: {task.algorithm} on ")


def test_no_option_is_beaten_in_every_task_on_fewer_channels() -> None:
    found = made("all_gather")
    names = [option.name for option in found]
    assert len(set(names)) == len(names)
    whole = [option for option in found if not option.rules]
    for a in whole:
        for b in whole:
            if a is not b:
                assert not (
                    set(a.tasks[0].channels) <= set(b.tasks[0].channels)
                    and a.tasks[0].duration_us <= b.tasks[0].duration_us
                )


def test_groups_inside_hosts_never_hold_the_network() -> None:
    tasks = [task for option in made("all_reduce", groups=HOSTS) for task in option.tasks]
    assert {channel for task in tasks for channel in task.channels} == {"nvlink", "pcie"}


def test_a_problem_holds_the_options_of_every_comm_op_and_shares_equal_ones() -> None:
    work = step(
        Op(name="a", kind="all_reduce", nbytes=1e6), Op(name="b", kind="all_reduce", nbytes=1e6),
        Op(name="c", kind="all_gather", nbytes=1e6, groups=HOSTS),
    )  # fmt: skip
    found = problem(work, HGX2, COSTS)
    assert found.options["a"] is found.options["b"]
    assert found.costs == "simulated on hgx2:2"
    assert simulated_costs(HGX2) is simulated_costs(Cluster.preset("hgx2", nodes=2))
    assert any("incast" in note for note in found.notes)
    with pytest.raises(InvalidInput, match="17 ranks do not fit on 16 devices"):
        problem(step(Op(name="a", kind="all_reduce", nbytes=1e6), ranks=17), HGX2, COSTS)


def test_a_cluster_of_one_channel_has_options_too() -> None:
    work = step(Op(name="a", kind="all_reduce", nbytes=1e6), ranks=16)
    found = problem(work, Cluster.preset("dgx2")).options["a"]
    assert {task.channels for option in found for task in option.tasks} == {("nvlink",)}
    assert {len(option.tasks) for option in found} >= {1, 2, 4, 8, 16}


UNEVEN = [
    ("all_reduce", ((0, 1), (2, 3, 4, 5)), 0),
    ("all_reduce", (tuple(range(8)), (8, 9)), 0),
    ("all_reduce", ((0, 1, 2, 8, 9, 10), (3, 4, 11, 12)), 0),
    ("all_reduce", ((0, 1, 2, 8, 9), (3, 11)), 0),
    ("all_gather", ((0, 8), (1, 2, 9, 10), (3, 4, 5)), 0),
    ("all_to_all", ((0, 1), (2, 3, 4, 5)), 0),
    ("broadcast", ((0, 1, 8), (2, 3, 4, 10, 11)), 1),
    ("reduce", ((0, 1, 2), (3, 4, 5, 6)), 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "groups", "root"), UNEVEN)
@pytest.mark.parametrize("turned", [False, True])
def test_groups_of_different_sizes_keep_all_their_ranks(kind: str, groups: Groups, root: int, turned: bool) -> None:
    groups = groups[::-1] if turned else groups
    op = Op(name="op", kind=kind, nbytes=4800.0, groups=groups, root=root)
    ranks = sorted(rank for group in groups for rank in group)
    for rewrite in rewrites(op, groups, HGX2):
        assert len(rewrite.exprs) == len({len(group) for group in groups})
        for expr in rewrite.exprs:
            whole = next(g for g in groups if set(g) == {rank for leaf in expr.leaves for rank in leaf.ranks})
            check(expr, motif_of(kind, whole, 4800.0, root))
        if not rewrite.steps or (rewrite.steps[0].startswith("segment") and len(rewrite.steps) == 1):
            assert all(sorted(rank for g in stage.groups for rank in g) == ranks for stage in rewrite.stages)
        assert {rank for stage in rewrite.stages for g in stage.groups for rank in g} == set(ranks)
    found = made(kind, 4800.0, groups, root)
    assert found[0].tasks[0].motion is not None
    assert sorted(map(len, found[0].tasks[0].motion.groups)) == sorted(map(len, groups))
    assert {len(option.tasks) for option in found} >= {1, 2, 4, 8, 16}
    parse(found[-1].expression)


def test_the_cost_of_uneven_groups_is_that_of_the_slower_one() -> None:
    small, large = (0, 1), (2, 3, 4, 5)
    both = [made("all_reduce", groups=groups)[0].total_us for groups in ((small, large), (large, small))]
    alone = [made("all_reduce", groups=(group,))[0].total_us for group in (small, large)]
    assert both[0] == both[1] == pytest.approx(max(alone))


def test_a_pattern_that_one_of_the_groups_cannot_take_is_left_out() -> None:
    steps = {option.rules for option in made("all_reduce", groups=(tuple(range(8)), (8, 9)))}
    assert ("ring",) in steps
    assert not any(step.startswith("tree") for rules in steps for step in rules)


def task(channel: str, us: float, *after: int) -> MotifTask:
    return MotifTask(motif="m", algorithm="a", channels=(channel,), duration_us=us, after=after)


def test_the_time_alone_is_that_of_a_pipeline_not_of_the_order_tasks_are_written_in() -> None:
    # Two segments of x -> y -> x: written one after the other, the second could only start when the first is done.
    tasks = tuple(task(c, us, *after) for s in (0, 3) for c, us, after in (
        ("x", 1.0, ()), ("y", 2.0, (s,)), ("x", 1.0, (s + 1,)),
    ))  # fmt: skip
    assert Option(name="o", expression="", tasks=tasks).total_us == 6.0
    assert Option(name="o", expression="", tasks=(task("x", 3.0), task("x", 4.0))).total_us == 7.0
    assert Option(name="o", expression="", tasks=(task("x", 3.0), task("y", 4.0))).total_us == 4.0
    # The longest way first: b before a, though a is written first.
    late = (task("x", 4.0), task("x", 1.0), task("y", 5.0, 1))
    assert Option(name="o", expression="", tasks=late).total_us == 6.0


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_the_time_alone_is_what_the_scheduler_finds(kind: str) -> None:
    op = Op(name="g", kind=kind, nbytes=1e9)
    work = Workload(
        name="t", num_ranks=16,
        ops=(Op(name="b", duration_us=0.001, after=(Dep(op="g", lag=1),)), replace(op, after=(Dep(op="b"),))),
    )  # fmt: skip
    made_of = problem(work, HGX2, COSTS)
    scheduler = Scheduler(made_of)
    for at, option in enumerate(made_of.options["g"]):
        found = scheduler.evaluate([at], discipline="critical_path")
        assert option.total_us <= found * (1 + 1e-9)
        assert option.total_us >= 0.95 * found - 0.01


def test_the_default_is_an_algorithm_that_nccl_has() -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather"):
        for nbytes, groups in ((2e3, ()), (3e7, RAILS)):
            default = made(kind, nbytes, groups)[0]
            assert len(default.tasks) == 1
            assert default.tasks[0].algorithm in STOCK_ALGORITHMS.get(kind, ("direct",))
    # On NVLink alone sending straight to everybody is faster than a ring: an option, not the default.
    found = made("all_gather", 1e5, HOSTS)
    assert found[0].tasks[0].algorithm == "ring"
    assert min(option.total_us for option in found) < found[0].total_us


def test_a_broadcast_across_hosts_uses_every_nic() -> None:
    # One NIC of 12.5 GB/s would take 80 ms.
    for kind in ("broadcast", "reduce"):
        assert made(kind, 1e9)[0].total_us < 11_500
    assert any(option.rules == ("scatter",) for option in made("broadcast", 1e9, HOSTS))


def test_a_rule_of_ones_own_is_searched() -> None:
    @rule("relayed", kinds=["BC"], choices=lambda motif, hosts: [{"relay": rank} for rank in motif.ranks[1:]])
    def relayed(motif: Motif, *, relay: int) -> Expr:
        """Send to one rank first, which then sends to the rest."""
        rest = tuple(rank for rank in motif.ranks if rank != motif.root)
        return seq([replace(motif, ranks=(motif.root, relay)), replace(motif, ranks=rest, root=relay)])

    try:
        op = Op(name="op", kind="broadcast", nbytes=4800.0, groups=HOSTS[:1])
        steps = [rewrite.steps for rewrite in rewrites(op, HOSTS[:1], HGX2)]
        assert [step for step in steps if len(step) == 1 and step[0].startswith("relayed")] == [
            ("relayed:relay=1",), ("relayed:relay=2",),
        ]  # fmt: skip
        assert ("segment:parts=4", "relayed:relay=1") in steps
    finally:
        unregister("relayed")


def test_measurements_are_counted_and_pay_no_launch_twice() -> None:
    rows = [
        Measurement(collective="all_reduce", algorithm="nccl", nranks=16, nbytes=size, time_us=size / 1e4, file="t.csv")
        for size in (1e5, 1e8)
    ]
    costs = LayeredCosts(MeasuredCosts(HGX2, rows), COSTS)
    work = step(Op(name="a", kind="all_reduce", nbytes=1e6))
    found = problem(work, HGX2, costs)
    default = found.options["a"][0].tasks[0]
    assert (default.algorithm, default.launch_us) == ("nccl", 0.0)
    assert default.duration_us == pytest.approx(100.0)
    on_those = [task for option in found.options["a"] for task in option.tasks if task.motion is not None
                and task.motion.kind == "all_reduce" and task.channels == ("nvlink", "rdma")]  # fmt: skip
    assert {task.algorithm for task in on_those} == {"nccl"}
    motifs = {(t.motion, t.nbytes, t.algorithm): t.source for o in found.options["a"] for t in o.tasks}
    known = sum(source.startswith("measured") for source in motifs.values())
    assert found.costs == f"measured and simulated on hgx2:2; {known} of {len(motifs)} motifs measured (t.csv)"
    assert not any(note.startswith("warning") for note in found.notes)


def test_measurements_that_fit_nothing_are_warned_about() -> None:
    row = Measurement(collective="all_reduce", algorithm="ring", nranks=7, nbytes=1.0, time_us=1.0, file="t.csv")
    costs = LayeredCosts(MeasuredCosts(HGX2, [row]), COSTS)
    found = problem(step(Op(name="a", kind="all_reduce", nbytes=1e6)), HGX2, costs)
    assert found.costs.startswith("simulated on hgx2:2; 0 of ")
    assert found.notes[-1] == (
        "warning: no measurement of t.csv fits any motif of this step, which needs all_reduce over 16 ranks"
    )


def test_the_algorithm_of_a_motif_is_the_best_of_all_though_few_are_simulated() -> None:
    costs = SimulatedCosts(HGX2)
    work = step(*(Op(name=k, kind=k, nbytes=3e6) for k in ("all_reduce", "all_to_all", "broadcast")))
    found = problem(work, HGX2, costs)
    whole = [o.tasks[0] for some in found.options.values() for o in some if not o.rules]
    tasks = {(t.motion, t.nbytes): t for t in sorted(whole, key=lambda task: -task.duration_us)}
    for (motion, nbytes), chosen in tasks.items():
        assert motion is not None
        best = min(COSTS.cost(motion, nbytes, name).us for name in COSTS.algorithms(motion, nbytes))
        if chosen is not found.options[motion.kind][0].tasks[0]:
            assert chosen.duration_us - chosen.launch_us == pytest.approx(best)


def test_more_sizes_hardly_need_more_simulations() -> None:
    def simulations(count: int) -> int:
        costs = SimulatedCosts(HGX2)
        problem(step(*(Op(name=f"g{at}", kind="all_reduce", nbytes=2e6 + at) for at in range(count))), HGX2, costs)
        return costs.simulations

    assert simulations(6) <= 1.2 * simulations(1)


def test_patterns_inside_patterns_compute_the_same_as_the_whole() -> None:
    op = Op(name="g", kind="all_reduce", nbytes=16384.0)
    ranks = tuple(range(32))
    whole = motif_of("all_reduce", ranks, 16384.0, 0)
    nested = [
        rewrite
        for rewrite in rewrites(op, (ranks,), Cluster.preset("hgx2", nodes=4))
        if sum(not step.startswith("segment") for step in rewrite.steps) > 1
    ]
    assert {rewrite.steps for rewrite in nested} >= {("hierarchical:local=8", "ring"), ("tree:n=8", "tree:n=2")}
    for rewrite in nested:
        check(rewrite.exprs[0], whole)
