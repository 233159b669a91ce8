# SPDX-License-Identifier: Apache-2.0
"""Link by link: the same as the schedule where motifs do not meet, longer where they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import stretto.planner.schedule.retime as module
from stretto.cluster import Cluster, Link, Node
from stretto.errors import Infeasible
from stretto.planner.algebra.options import problem as make_problem
from stretto.planner.costs.costs import Cost, Motion, SimulatedCosts
from stretto.planner.schedule.merge import Transfers, transfers_of
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.retime import RetimedPlan, retime
from stretto.planner.schedule.schedule import Scheduler, StepSchedule
from stretto.workload import Dep, Op, Workload

HGX2 = Cluster.preset("hgx2", nodes=2)
DGX2 = Cluster.preset("dgx2")


class Exact(SimulatedCosts):
    """Every motif at its very size."""

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        return super().cost(motion, nbytes, algorithm, exact=True)


def compute(name: str, us: float, *after: Dep, **rest: Any) -> Op:
    return Op(name=name, duration_us=us, after=after, **rest)


def comm(name: str, kind: str, nbytes: float, *after: Dep, **rest: Any) -> Op:
    return Op(name=name, kind=kind, nbytes=nbytes, after=after, **rest)


def step(ranks: int, *ops: Op) -> Workload:
    return Workload(name="step", num_ranks=ranks, ops=ops)


STEPS = {
    "one of each": step(
        4, comm("prep", "all_to_all", 3e6), compute("f", 300.0, Dep(op="prep"), Dep(op="g", lag=1)),
        compute("b", 200.0), comm("g", "all_reduce", 7e6, Dep(op="b")),
    ),
    "stale gradients": step(
        4, compute("f", 100.0, Dep(op="g", lag=3)), comm("g", "all_reduce", 2e7, Dep(op="f")),
        comm("h", "all_gather", 5e6, Dep(op="g", lag=1)), compute("u", 50.0, Dep(op="h", lag=2)),
    ),
    "two groups": step(
        4, compute("f", 100.0, Dep(op="g", lag=1)), comm("g", "all_reduce", 5e6, Dep(op="f"), groups=((0, 1), (2, 3))),
        comm("h", "reduce_scatter", 5e6, Dep(op="f"), groups=((0, 2), (1, 3))), compute("u", 9.0, Dep(op="h")),
    ),
    "two places": step(
        4, compute("f0", 100.0, Dep(op="g0", lag=1), ranks=(0, 1)),
        comm("send", "send", 2e6, Dep(op="f0"), groups=((0, 2), (1, 3))),
        compute("f1", 150.0, Dep(op="send"), Dep(op="g1", lag=1), ranks=(2, 3)),
        comm("g0", "all_reduce", 5e6, Dep(op="f0"), groups=((0, 1),)),
        comm("g1", "all_reduce", 4e6, Dep(op="f1"), groups=((2, 3),)),
    ),
    "ranks that differ": step(
        4, Op(name="a", durations_us=(50.0, 50.0, 400.0, 400.0), after=(Dep(op="g", lag=1),)),
        Op(name="b", durations_us=(400.0, 400.0, 50.0, 50.0)), comm("g", "all_reduce", 5e6, Dep(op="b")),
    ),
    "nobody waits": step(4, compute("f", 20.0), comm("g", "all_reduce", 5e6, Dep(op="f"))),
}  # fmt: skip


def everything(alone: PlanProblem, cluster: Cluster, costs: SimulatedCosts) -> Mapping[tuple[int, int], Transfers]:
    """All motifs as transfers, whether they can meet others or not."""
    found = {}
    for number, task in module._tasks(alone).items():
        assert task.motion is not None
        moves = transfers_of(task.motion, task.nbytes, task.algorithm, cluster, costs)
        assert moves is not None
        found[number] = moves
    return found


def schedules(problem: PlanProblem) -> list[StepSchedule]:
    scheduler = Scheduler(problem)
    whole = [0] * len(problem.workload.comm_ops)
    return [
        scheduler.schedule(whole, discipline="fifo", serial=True),
        scheduler.schedule(whole, discipline="lifo"),
        scheduler.schedule(scheduler.greedy),
        scheduler.schedule([len(problem.options[op.name]) - 1 for op in problem.workload.comm_ops]),
    ]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("cluster", [DGX2, HGX2], ids=["fifo", "fair"])
def test_what_meets_nobody_takes_as_long_as_planned(
    name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exact costs re-timing changes nothing, and simulating every transfer of some iterations says the same."""
    costs = Exact(cluster)
    problem = make_problem(STEPS[name], cluster, costs)
    for schedule in schedules(problem):
        found = retime(schedule, problem, cluster, costs)
        assert found == RetimedPlan(period_us=found.period_us)
        assert found.period_us == pytest.approx(schedule.period_us)
        with monkeypatch.context() as patched:
            patched.setattr(module, "_meeting", everything)
            whole = retime(schedule, problem, cluster, costs)
        assert whole.settled
        assert whole.meeting == len(schedule.order)
        assert whole.transfers > 0
        assert whole.period_us == pytest.approx(schedule.period_us, rel=1e-6)


def test_a_grid_of_sizes_is_corrected() -> None:
    workload = step(16, compute("f", 10.0, Dep(op="g", lag=1)), comm("g", "all_gather", 2e6, Dep(op="f")))
    problem = make_problem(workload, HGX2)
    schedule = Scheduler(problem).schedule([0])
    task = problem.options["g"][0].tasks[0]
    assert task.motion is not None
    exact = SimulatedCosts(HGX2).cost(task.motion, 2e6, task.algorithm, exact=True).us
    found = retime(schedule, problem, HGX2)
    assert found.period_us == pytest.approx(10 + task.launch_us + exact)
    assert found.period_us < schedule.period_us * 0.995


def trunk(**rest: Any) -> Cluster:
    """Two switches with one link each way between them: devices 0 and 2 on the left, 1 and 3 on the right."""
    nodes = [*(Node(name=f"d{at}", host=at) for at in range(4)), *(Node(name=n, kind="switch") for n in "LR")]
    ends = [(device, 4 + device % 2) for device in range(4)]
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=10.0, **rest) for a, b in [*ends, *((b, a) for a, b in ends)]]
    links += [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=10.0, **rest) for a, b in ((4, 5), (5, 4))]
    return Cluster.build("trunk", nodes=nodes, links=links)


def across(groups: tuple[tuple[int, int], tuple[int, int]], head_us: float = 100.0) -> Workload:
    """Two pairs of ranks that know nothing of each other: each computes, then sends 1 MB (about 100 us)."""
    ops = []
    for at, pair in enumerate(groups):
        ops += [
            compute(f"c{at}", head_us, Dep(op=f"s{at}", lag=1), ranks=pair),
            comm(f"s{at}", "send", 1e6, Dep(op=f"c{at}"), groups=(pair,)),
        ]
    return step(4, *ops)


@pytest.mark.parametrize(("rest", "how"), [({}, "fifo"), ({"flow_gb_per_s": 10.0}, "fair")])
def test_motifs_that_meet_on_a_link_slow_each_other_down(rest: dict[str, float], how: str) -> None:
    cluster = trunk(**rest)
    problem = make_problem(across(((0, 1), (2, 3))), cluster, Exact(cluster))
    schedule = Scheduler(problem).schedule([0, 0], serial=True)
    assert schedule.period_us == pytest.approx(10 + 100 + 100 + 3, rel=0.01)
    found = retime(schedule, problem, cluster)
    assert (found.meeting, found.contention, found.settled) == (2, how, True)
    if how == "fair":
        # Both share the trunk at half its rate, for ever: nothing makes one of them go first.
        assert found.period_us == pytest.approx(schedule.period_us + 100, rel=0.02)
    else:
        # One after the other over the trunk; in the next iteration they no longer want it at the same time.
        assert found.period_us == pytest.approx(schedule.period_us, rel=0.02)
    apart = make_problem(across(((0, 2), (1, 3))), cluster, Exact(cluster))
    assert retime(Scheduler(apart).schedule([0, 0]), apart, cluster).meeting == 0


def test_a_link_that_is_always_wanted_sets_the_pace() -> None:
    """2 x 100 us over the trunk in every iteration, where each pair alone would need 130: the schedule knows that."""
    cluster = trunk()
    problem = make_problem(across(((0, 1), (2, 3)), head_us=20.0), cluster, Exact(cluster))
    scheduler = Scheduler(problem)
    schedule = scheduler.schedule([0, 0])
    assert schedule.period_us == pytest.approx(200.0, rel=0.01)
    assert scheduler.bound().us == pytest.approx(200.0, rel=0.01)
    assert retime(schedule, problem, cluster).period_us == pytest.approx(200.0, rel=0.01)
    alone = make_problem(replace(problem.workload, ops=problem.workload.ops[:2]), cluster, Exact(cluster))
    assert Scheduler(alone).schedule([0]).period_us == pytest.approx(133.0, rel=0.01)


def test_sends_in_opposite_directions_run_at_once() -> None:
    """A full-duplex pair of links: 100 us each way and 20 of compute before, not 200."""
    cluster = trunk()
    ops = [
        compute("c0", 20.0, Dep(op="back", lag=1), ranks=(0,)), compute("c1", 20.0, Dep(op="forth", lag=1), ranks=(1,)),
        comm("forth", "send", 1e6, Dep(op="c0"), groups=((0, 1),)),
        comm("back", "send", 1e6, Dep(op="c1"), groups=((1, 0),)),
    ]  # fmt: skip
    problem = make_problem(step(4, *ops), cluster, Exact(cluster))
    schedule = Scheduler(problem).schedule([0, 0])
    assert schedule.period_us == pytest.approx(133.0, rel=0.01)
    found = retime(schedule, problem, cluster)
    assert found.meeting == 0
    assert found.period_us == pytest.approx(schedule.period_us)


def out_of_step(longer_us: float) -> tuple[StepSchedule, PlanProblem, Cluster]:
    """Two pairs that share the trunk fairly, one of which computes longer."""
    cluster = trunk(flow_gb_per_s=10.0)
    ops = [
        compute("c0", 100.0, Dep(op="s0", lag=1), ranks=(0, 1)),
        comm("s0", "send", 1e6, Dep(op="c0"), groups=((0, 1),)),
        compute("c1", 100.0 + longer_us, Dep(op="s1", lag=1), ranks=(2, 3)),
        comm("s1", "send", 1e6, Dep(op="c1"), groups=((2, 3),)),
    ]
    problem = make_problem(step(4, *ops), cluster, Exact(cluster))
    return Scheduler(problem).schedule([0, 0]), problem, cluster


def test_iterations_are_added_until_two_are_alike() -> None:
    """The slower pair falls behind in every iteration, until they no longer send at the same time."""
    schedule, problem, cluster = out_of_step(60.0)
    found = retime(schedule, problem, cluster)
    assert found.settled
    assert found.iterations > module.FIRST_ITERATIONS
    assert found.period_us == pytest.approx(273.0)


def test_where_no_two_iterations_are_alike_the_mean_is_given() -> None:
    schedule, problem, cluster = out_of_step(3.0)
    found = retime(schedule, problem, cluster)
    assert not found.settled
    assert found.iterations == module.MAX_ITERATIONS + 1
    assert schedule.period_us < found.period_us < schedule.period_us + 100


def test_work_pulled_ahead_contends_in_the_iteration_before() -> None:
    """The prefetch of the next iteration meets this iteration's gradients; the very last iteration has none."""
    cluster = trunk(flow_gb_per_s=10.0)
    ops = [
        comm("prefetch", "send", 1e6, groups=((0, 1),)),
        compute("f", 300.0, Dep(op="prefetch"), ranks=(0, 1)),
        compute("b", 50.0, Dep(op="g", lag=1), ranks=(2, 3)),
        comm("g", "send", 1e6, Dep(op="b"), groups=((2, 3),)),
        comm("sync", "all_reduce", 8.0, Dep(op="f"), Dep(op="g")),
        compute("u", 10.0, Dep(op="sync")),
    ]
    problem = make_problem(step(4, *ops), cluster, Exact(cluster))
    schedule = Scheduler(problem).schedule([0] * 3)
    assert max(schedule.shift) == 1
    found = retime(schedule, problem, cluster)
    assert found.settled
    assert found.meeting == 2
    assert found.period_us >= schedule.period_us * (1 - 1e-9)


def test_what_is_too_large_is_said_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = trunk()
    problem = make_problem(across(((0, 1), (2, 3))), cluster, Exact(cluster))
    schedule = Scheduler(problem).schedule([0, 0])
    monkeypatch.setattr(module, "MAX_TRANSFERS", 20)
    with pytest.raises(Infeasible, match="6 transfers in each of 4 iterations are more than 20"):
        retime(schedule, problem, cluster)


def test_motifs_with_no_more_than_a_duration_keep_it() -> None:
    workload = step(2, compute("c", 5.0, Dep(op="g", lag=1)), comm("g", "all_reduce", 1e6, Dep(op="c")))
    task = MotifTask(motif="m", algorithm="nccl", channels=("x",), duration_us=7.0)
    problem = PlanProblem(workload=workload, options={"g": (Option(name="o", expression="", tasks=(task,)),)})
    schedule = Scheduler(problem).schedule([0])
    assert retime(schedule, problem, DGX2).period_us == schedule.period_us == 12.0


class Measured(Exact):
    """A model with an algorithm of which nothing but its time is known."""

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        return ["nccl"]

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        return Cost(us=77.0, source="measured")


def test_measured_motifs_keep_their_time_where_no_program_is_known() -> None:
    cluster = trunk()
    problem = make_problem(across(((0, 1), (2, 3))), cluster, Measured(cluster))
    schedule = Scheduler(problem).schedule([0, 0])
    assert retime(schedule, problem, cluster, Measured(cluster)) == RetimedPlan(period_us=schedule.period_us)
