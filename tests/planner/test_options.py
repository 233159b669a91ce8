"""The options of comm-ops: rewrites, bindings and algorithms."""

from __future__ import annotations

import pytest

from stretto import Cluster
from stretto.errors import InvalidInput
from stretto.planner.costs import CPU_LAUNCH_US, LAUNCH_US, SimulatedCosts, simulated_costs
from stretto.planner.lowering import check
from stretto.planner.motif import motif_of
from stretto.planner.notation_read import parse
from stretto.planner.options import options, problem
from stretto.planner.problem import Option
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
