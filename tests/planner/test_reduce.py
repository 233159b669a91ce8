# SPDX-License-Identifier: Apache-2.0
"""The smaller step has the iteration time of the whole one, and merges nothing that something may come between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stretto.cluster import Cluster
from stretto.planner import api, baselines
from stretto.planner.algebra.options import problem as make_problem
from stretto.planner.baselines import BASELINES, Systems
from stretto.planner.costs.costs import SimulatedCosts
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.reduce import ReducedStep
from stretto.planner.schedule.schedule import Scheduler, check_order
from stretto.workload import Dep, Op, Workload

GPT = "gpt:175b,ranks=32,tensor=4,pipeline=2,layers=4,micro_batches=3"


def _option(name: str, channel: str, us: float, pieces: int = 1) -> Option:
    tasks = tuple(
        MotifTask(motif=name, algorithm="ring", channels=(channel,), duration_us=us, nbytes=1.0) for _ in range(pieces)
    )
    return Option(name=f"{name}/{pieces} on {channel} {us:g}", expression=name, tasks=tasks)


def _random_step(seed: int) -> PlanProblem:
    """Two stages with chains of collectives between their compute-ops, sends, and gradients at the end."""
    rng = np.random.default_rng(seed)
    ops: list[Op] = []
    options: dict[str, tuple[Option, ...]] = {}
    ranks = ((0, 1), (2, 3))
    first = [0, 0]
    for stage in (0, 1):
        count = int(rng.integers(3, 9))
        for k in range(count):
            name = f"c{stage}.{k}"
            after = [Dep(op=ops[-1].name)] if k and ops[-1].name.startswith(f"t{stage}") else []
            if stage and k == 1:
                after.append(Dep(op="send"))
            after += [Dep(op=f"grad{stage}", lag=1)] if k == 0 else []
            ops.append(Op(name=name, duration_us=float(rng.integers(5, 20)), ranks=ranks[stage], after=tuple(after)))
            for chain in range(int(rng.integers(0, 3))) if k + 1 < count else ():
                before = ops[-1].name
                one = f"t{stage}.{k}.{chain}"
                ops.append(Op(name=one, kind="all_gather", nbytes=1.0, groups=(ranks[stage],), after=(Dep(op=before),)))
                us = float(rng.integers(1, 9))
                options[one] = (_option(one, "nv", us + 1), _option(one, "nv", us), _option(one, "nv", us, 2))
        first[stage] = count
    ops.append(Op(name="send", kind="send", nbytes=1.0, groups=((0, 2), (1, 3)), after=(Dep(op="c0.1"),)))
    options["send"] = (_option("send", "net", 4.0), _option("send", "net", 2.5, 2))
    for stage in (0, 1):
        at = int(rng.integers(first[stage]))
        ops.append(
            Op(
                name=f"grad{stage}",
                kind="all_reduce",
                nbytes=1.0,
                groups=(ranks[stage],),
                after=(Dep(op=f"c{stage}.{at}"),),
            )
        )
        options[f"grad{stage}"] = (_option("grad", "net", 30.0), _option("grad", "net", 9.0, 3))
    return PlanProblem(workload=Workload(name="random", num_ranks=4, ops=tuple(ops)), options=options)


@pytest.mark.parametrize("serial", [False, True])
def test_the_smaller_step_takes_exactly_as_long_as_the_whole_one(serial: bool) -> None:
    merged = 0
    for seed in range(40):
        whole = _random_step(seed)
        step = ReducedStep(whole)
        merged += len(step.merged)
        small, large = Scheduler(step.problem), Scheduler(whole)
        rng = np.random.default_rng(seed)
        for discipline in ("critical_path", "lifo"):
            choice = [int(rng.integers(len(step.problem.options[op.name]))) for op in step.problem.workload.comm_ops]
            found = small.schedule(choice, discipline=discipline, serial=serial)
            again = large.replay(*step.expanded(found), serial=serial)
            assert again.period_us == pytest.approx(found.period_us, rel=1e-9)
            ordered = step.schedule(large, found)
            assert ordered.period_us <= found.period_us * (1 + 1e-9)
            check_order(whole.workload, ordered)
    assert merged > 40


def test_the_bound_of_the_smaller_step_holds_for_every_choice_of_the_whole_one() -> None:
    for seed in range(20):
        whole = _random_step(seed)
        small, large = Scheduler(ReducedStep(whole).problem), Scheduler(whole)
        rng = np.random.default_rng(seed)
        for _ in range(4):
            choice = {op.name: int(rng.integers(len(whole.options[op.name]))) for op in whole.workload.comm_ops}
            assert small.bound().us <= large.schedule(choice).period_us * (1 + 1e-9)


def _chain(*extra: Op, waits: tuple[Dep, ...] = (), long_channel: str = "net") -> PlanProblem:
    """Two compute-ops with a collective between them, and what is added."""
    ops = (
        Op(name="a", duration_us=10.0, ranks=(0, 1)),
        Op(name="t", kind="all_gather", nbytes=1.0, groups=((0, 1),), after=(Dep(op="a"),)),
        Op(name="b", duration_us=10.0, ranks=(0, 1), after=(Dep(op="t"), *waits)),
        Op(name="other", duration_us=1.0, ranks=(2, 3)),
        *extra,
    )
    options: dict[str, tuple[Option, ...]] = {"t": (_option("t", "nv", 2.0),)}
    options |= {op.name: (_option(op.name, long_channel, 50.0),) for op in extra if op.is_comm}
    return PlanProblem(workload=Workload(name="chain", num_ranks=4, ops=ops), options=options)


def test_what_may_come_between_keeps_ops_apart() -> None:
    assert [one.ops for one in ReducedStep(_chain()).merged] == [(0, 1, 2)]
    small = ReducedStep(_chain()).problem.workload
    assert [(op.name, op.duration_us) for op in small.ops] == [("b", 22.0), ("other", 1.0)]
    reader = Op(name="x", kind="send", nbytes=1.0, groups=((0, 2),), after=(Dep(op="t"),))
    assert not ReducedStep(_chain(reader)).merged
    early = Op(name="x", kind="send", nbytes=1.0, groups=((0, 2),), after=(Dep(op="a"),))
    assert not ReducedStep(_chain(early)).merged
    sender = Op(name="x", kind="send", nbytes=1.0, groups=((2, 0), (3, 1)), after=(Dep(op="other"),))
    assert not ReducedStep(_chain(sender, waits=(Dep(op="x"),))).merged
    # A long op on the same channel, or in the same queue, may run between them; on another channel a send may not.
    assert ReducedStep(_chain(sender)).merged
    assert not ReducedStep(_chain(sender, long_channel="nv")).merged
    queued = replace(sender, kind="all_reduce", groups=((0, 1, 2, 3),))
    assert not ReducedStep(_chain(queued)).merged


def test_an_op_on_a_shared_link_or_faster_in_pieces_is_not_fixed() -> None:
    whole = _chain()
    (option,) = whole.options["t"]
    shared = replace(option, tasks=(replace(option.tasks[0], shared=((0, 1.0),)),))
    assert not ReducedStep(replace(whole, options={**whole.options, "t": (shared,)})).merged
    pieces = Option(name="both", expression="t", tasks=(*option.tasks, replace(option.tasks[0], channels=("net",))))
    faster = replace(pieces, tasks=tuple(replace(task, duration_us=1.0) for task in pieces.tasks))
    assert not ReducedStep(replace(whole, options={**whole.options, "t": (option, faster)})).merged


def test_a_transformer_is_planned_by_its_smaller_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.load("dgx_h100:4")
    step = Workload.load(GPT)
    costs = SimulatedCosts(cluster)
    problem = make_problem(step, cluster, costs)
    small = ReducedStep(problem)
    assert len(small.problem.workload.ops) < 0.6 * len(step.ops)
    monkeypatch.setattr(baselines, "REDUCE_FROM", 0)
    found = api.plan(step, cluster, steps=200, costs=costs)
    assert list(found.schedules) == [*BASELINES, api.SYSTEM]
    assert {op.op for op in found.plan.ops} == {op.name for op in step.comm_ops}
    # The smaller step leaves out only waits that fit beside compute.
    assert found.search.curve[-1][2] == pytest.approx(found.plan.iteration_us, rel=2e-3)
    assert found.plan.bound_us <= found.plan.iteration_us * (1 + 1e-9)
    assert api.to_schedule(found.plan, problem).period_us == pytest.approx(found.plan.iteration_us)
    assert found.plan.retimed_us == pytest.approx(found.plan.iteration_us, rel=0.03)
    whole = Systems(problem, reduces=False)
    for name in ("fifo", "p3"):
        assert found.schedules[name].period_us == pytest.approx(found.baselines_us[name], rel=0.01)
        assert found.baselines_us[name] <= whole.schedule(name).period_us * (1 + 1e-9)
    tables = found.for_tables()
    assert tables["fifo"].compute_idle.max() == pytest.approx(found.schedules["fifo"].compute_idle.max(), abs=0.01)
    assert len(tables["fifo"].order) == len(found.schedules["fifo"].order)
    assert found.plain.period_us > 0


def test_a_spent_budget_leaves_the_default_options_and_one_schedule_of_each_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "LEAST_COSTING_S", 0.0)
    monkeypatch.setattr(api, "LEAST_SEARCH_S", 1e-6)
    step, cluster = Workload.load("gpt:125m,ranks=8,layers=2"), Cluster.load("dgx2:1")
    found = api.plan(step, cluster, budget_s=1e-6)
    assert "of a budget of 1e-06 s" in found.plan.notes[-1]
    assert not any("of a budget of" in note for note in api.plan(step, cluster, steps=1, systems=("fifo",)).plan.notes)
    assert all(len(options) == 1 for options in found.problem.options.values())
    assert any("for want of time" in note for note in found.problem.notes)
    assert set(found.baselines_us) == set(BASELINES)
    assert found.plan.retimed_us > 0


def test_systems_without_time_are_left_out_of_a_large_step_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "REDUCE_FROM", 10)
    monkeypatch.setattr(api, "BASELINES_SHARE", 0.0)
    step, cluster = Workload.load(GPT), Cluster.load("dgx_h100:4")
    found = api.plan(step, cluster, budget_s=0.5, systems=("p3", "syndicate", "fifo"))
    assert list(found.baselines_us) == ["syndicate", "fifo"], "these two are always there"
    assert "not compared with p3, for want of time" in found.plan.notes
    assert list(api.plan(step, cluster, steps=20, systems=("p3", "fifo")).baselines_us) == ["p3", "fifo"]
