# SPDX-License-Identifier: Apache-2.0
"""From a workload and a cluster to a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import stretto
from stretto.cluster import Cluster, Link, Node
from stretto.errors import Infeasible, InvalidInput, PlanMismatch
from stretto.planner import api, candidates
from stretto.planner.algebra.options import problem as make_problem
from stretto.planner.api import SYSTEM, PlanResult, to_plan, to_schedule
from stretto.planner.baselines import BASELINES, STOCK
from stretto.planner.candidates import PlanCandidate
from stretto.planner.plan import PLAIN, Plan
from stretto.planner.schedule.problem import PlanProblem
from stretto.planner.schedule.retime import RetimedPlan, retime
from stretto.planner.schedule.schedule import StepSchedule
from stretto.workload import Dep, Op, Workload

HGX2 = Cluster.preset("hgx2", nodes=1)
STEP = Workload(
    name="small",
    num_ranks=8,
    ops=(
        Op(name="prep", kind="all_to_all", nbytes=2e6),
        Op(name="forward", duration_us=150.0, after=(Dep(op="prep"), Dep(op="gradients", lag=1)), phase="forward"),
        Op(name="exchange", kind="all_to_all", nbytes=4e6, after=(Dep(op="forward"),)),
        Op(name="backward", duration_us=200.0, after=(Dep(op="exchange"),), phase="backward"),
        Op(name="gradients", kind="all_reduce", nbytes=1.6e7, after=(Dep(op="backward"),)),
    ),
)


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return api.plan(STEP, HGX2, steps=300, seed=1)


def test_a_plan_is_compared_with_every_system_and_never_slower(found: PlanResult) -> None:
    made = found.plan
    assert set(made.baselines_us) == set(BASELINES)
    assert list(found.schedules) == [*BASELINES, SYSTEM]
    assert made.iteration_us <= min(made.baselines_us.values()) * (1 + 1e-9)
    assert made.iteration_us == found.schedules[SYSTEM].period_us
    assert made.bound_us <= made.iteration_us * (1 + 1e-9)
    assert made.iteration_us < made.baselines_us["fifo"]
    assert made.retimed_us == pytest.approx(made.iteration_us, rel=0.1)
    made.check(STEP, HGX2)
    assert made.notes == ()


def test_the_seed_and_the_steps_decide(found: PlanResult) -> None:
    again = api.plan(STEP, HGX2, steps=300, seed=1)
    assert again.plan == found.plan
    assert again.plan.hash == found.plan.hash


def test_a_plan_says_what_its_schedule_does(found: PlanResult, tmp_path: Path) -> None:
    made, schedule = found.plan, found.schedules[SYSTEM]
    assert [op.op for op in made.ops] == ["prep", "exchange", "gradients"]
    motifs = [motif for op in made.ops for motif in op.motifs]
    assert made.num_motifs == len(schedule.order) == len(motifs)
    assert sorted({motif.seq for motif in motifs}) == list(range(max(motif.seq for motif in motifs) + 1))
    # Whoever comes first in the order starts first.
    assert [m.start_us for m in sorted(motifs, key=lambda m: (m.seq, m.start_us))] == sorted(m.start_us for m in motifs)
    assert all(motif.source.startswith("simulated: ") for motif in motifs)
    assert all(op.reason for op in made.ops)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


@pytest.mark.parametrize("name", [*BASELINES, SYSTEM])
def test_a_plan_can_be_turned_back_into_its_schedule(found: PlanResult, name: str) -> None:
    schedule = found.schedules[name]
    again = to_schedule(to_plan(name, schedule, found.problem, HGX2), found.problem)
    assert again.choice == schedule.choice
    # Over the whole problem a stock system's order may be faster, as nothing waits for its submission.
    assert again.period_us <= schedule.period_us * (1 + 1e-9)
    if name not in STOCK:
        assert again.period_us == pytest.approx(schedule.period_us)


def test_a_plan_whose_options_are_gone_does_not_fit(found: PlanResult) -> None:
    made = found.plan
    for change in ({"option": "by pigeon"}, {"motifs": (replace(made.ops[0].motifs[0], channels=("air",)),)}):
        other = replace(made, ops=(replace(made.ops[0], **change), *made.ops[1:]))
        with pytest.raises(PlanMismatch, match="plan stretto: prep "):
            to_schedule(other, found.problem)
    with pytest.raises(PlanMismatch, match="was made for workload small"):
        to_schedule(made, replace(found.problem, workload=replace(STEP, num_ranks=9)))


def test_a_plan_that_cannot_be_retimed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **turns: object) -> RetimedPlan:
        raise Infeasible("7 transfers are more than 6")

    monkeypatch.setattr(candidates, "retime", too_large)
    made = api.plan(STEP, HGX2, steps=10, systems=("fifo",)).plan
    assert made.retimed_us == 0.0
    assert made.notes == ("not re-timed link by link: 7 transfers are more than 6",)


def test_a_plan_without_a_steady_state_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        candidates, "retime", lambda *_, **turns: RetimedPlan(period_us=5.0, iterations=32, settled=False)
    )
    made = api.plan(STEP, HGX2, steps=10, systems=()).plan
    assert made.retimed_us == 5.0
    assert made.notes[0] == "re-timed: no steady state in 32 iterations, their mean is given"
    assert made.notes[1].startswith("link by link 5 us, -")
    assert made.baselines_us == {}


def test_where_an_order_cannot_be_fed_the_fastest_that_can_is_taken() -> None:
    """On channels of their own the two do not meet, but the application submits `prep` only after `grad` is done."""
    from stretto.planner.schedule.problem import MotifTask, Option
    from stretto.planner.schedule.schedule import Scheduler

    def option(channel: str) -> tuple[Option, ...]:
        task = MotifTask(motif="m", algorithm="a", channels=(channel,), duration_us=1.0)
        return (Option(name="o", expression="", tasks=(task,)),)

    workload = Workload(
        name="w", num_ranks=2,
        ops=(
            Op(name="f", duration_us=2.0),
            Op(name="prep", kind="all_reduce", nbytes=1.0, after=(Dep(op="f", why="submit"),)),
            Op(name="grad", kind="all_reduce", nbytes=1.0, after=(Dep(op="f", why="submit"),)),
            Op(name="u", duration_us=1.0, after=(Dep(op="grad", why="wait"),)),
        ),
    )  # fmt: skip
    scheduler = Scheduler(PlanProblem(workload=workload, options={"prep": option("x"), "grad": option("y")}))
    order = [(1, 0), (2, 0)]
    fine, ahead = (scheduler.replay([0, 0], order, [shift, 0]) for shift in (0, 1))

    def feedable(**orders: StepSchedule) -> tuple[list[str], tuple[str, ...]]:
        given = [PlanCandidate(name=name, schedule=schedule) for name, schedule in orders.items()]
        kept, notes = candidates.feedable(given, scheduler)
        return [one.name for one in kept], notes

    assert feedable(fine=fine) == (["fine"], ())
    names, notes = feedable(ahead=ahead, fine=fine)
    assert names == ["fine"]
    assert len(notes) == 1
    assert notes[0].startswith("a faster order cannot be fed by the application: order: 'prep' comes before 'grad'")
    with pytest.raises(Infeasible, match="'prep' comes before 'grad'"):
        feedable(ahead=ahead)


def test_without_time_every_comm_op_still_has_its_default_option() -> None:
    shares: list[float] = []
    short = make_problem(STEP, HGX2, until=0.0, progress=shares.append)
    whole = make_problem(STEP, HGX2)
    assert {name: len(some) for name, some in short.options.items()} == dict.fromkeys(whole.options, 1)
    assert all(short.options[name][0].name == some[0].name for name, some in whole.options.items())
    assert short.notes[-1] == "costs: 3 of 3 kinds of comm-ops have their default option only, for want of time"
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    busy = make_problem(STEP, HGX2, until=0.0, least_s=1e9)
    assert {name: len(some) for name, some in busy.options.items()} == {n: len(o) for n, o in whole.options.items()}
    made = api.plan(STEP, HGX2, budget_s=1e-3, systems=("fifo",)).plan
    assert [op.op for op in made.ops] == ["prep", "exchange", "gradients"]


def test_no_baseline_is_faster_link_by_link() -> None:
    """Two pairs of ranks on two hosts with one NIC each: they share it, and each also waits for the other's sends."""
    nodes = [Node(name=f"d{k}", host=k // 2) for k in range(4)]
    nodes += [Node(name=f"nic{k}", kind="nic", host=k) for k in range(2)]
    ends = [(0, 4, 40.0), (1, 4, 40.0), (2, 5, 40.0), (3, 5, 40.0), (4, 5, 10.0)]
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=r) for x, y, r in ends for a, b in ((x, y), (y, x))]
    cluster = Cluster.build("two hosts", nodes=nodes, links=links)
    ops: list[Op] = []
    for k in range(2):
        mine, other = ((k, k + 2),), ((1 - k, k),)
        ops += [
            Op(name=f"f{k}", duration_us=100.0, ranks=mine[0], after=(Dep(op=f"g{k}", lag=1), Dep(op=f"s{k}", lag=1))),
            Op(name=f"g{k}", kind="all_reduce", nbytes=2e6 * (k + 1), groups=mine, after=(Dep(op=f"f{k}"),)),
            Op(name=f"s{k}", kind="send", nbytes=1e6, groups=other, after=(Dep(op=f"g{1 - k}", lag=1),)),
        ]
    found = api.plan(Workload(name="strided", num_ranks=4, ops=tuple(ops)), cluster, steps=200)
    assert found.link_level_us
    for schedule in found.schedules.values():
        again = retime(schedule, found.problem, cluster).period_us
        assert found.plan.retimed_us <= again * (1 + 1e-9)


def test_wrong_arguments_are_one_line() -> None:
    with pytest.raises(InvalidInput, match="budget_s: must be finite and > 0, not 0"):
        api.plan(STEP, HGX2, budget_s=0.0)
    with pytest.raises(InvalidInput, match="budget_s: must be finite and > 0, not inf"):
        api.plan(STEP, HGX2, budget_s=float("inf"))
    with pytest.raises(InvalidInput, match="steps: must be > 0, not 0"):
        api.plan(STEP, HGX2, steps=0)
    with pytest.raises(InvalidInput, match="unknown baseline 'gpipe'"):
        api.plan(STEP, HGX2, systems=("gpipe",))
    with pytest.raises(InvalidInput, match="workload small: has no comm-ops, so there is nothing to plan"):
        api.plan(replace(STEP, ops=(Op(name="forward", duration_us=1.0),)), HGX2)
    with pytest.raises(InvalidInput, match="small: 8 ranks do not fit on 4 devices"):
        api.plan(STEP, Cluster.preset("ring", nodes=4))


def test_a_step_of_nothing_but_communication_is_planned() -> None:
    made = api.plan(replace(STEP, ops=STEP.ops[:1]), HGX2, steps=10).plan
    assert made.bound_us <= made.iteration_us
    assert made.baselines_us["tictac"] >= made.iteration_us


def test_progress_is_told() -> None:
    heard: list[tuple[str, float]] = []
    api.plan(STEP, HGX2, steps=300, progress=lambda message, share: heard.append((message, share)))
    said = " ".join(message for message, _ in heard)
    assert "costing options" in said
    assert "bytescheduler+" in said
    assert "re-timing" in said
    assert all(0 <= share <= 1 for _, share in heard)


def test_what_plan_returns_is_useful_by_itself(found: PlanResult, tmp_path: Path) -> None:
    assert stretto.plan is api.plan
    assert stretto.Plan is Plan
    assert found.iteration_us <= min(found.baselines_us.values()) * (1 + 1e-9)
    assert 0 < found.bound_us <= found.iteration_us * (1 + 1e-9)
    assert set(found.schedules) == {SYSTEM, *found.baselines_us}
    for system, us in {SYSTEM: found.iteration_us, **found.baselines_us}.items():
        assert found.schedules[system].period_us == us
        assert found.timeline(system).total_us > 0
    with pytest.raises(InvalidInput, match="unknown system 'gpipe'"):
        found.timeline("gpipe")
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found.plan


def test_code_for_a_bare_plan_goes_on_working(found: PlanResult) -> None:
    assert (found.hash, found.ops, found.gap) == (found.plan.hash, found.plan.ops, found.plan.gap)
    with pytest.raises(AttributeError, match="no_such"):
        _ = found.no_such


def test_a_plan_that_promises_too_little_is_plain_order(found: PlanResult) -> None:
    gain = 1 - found.plan.iteration_us / found.plain.period_us
    assert 0 < gain < 0.9, "there is something to gain on this step"
    kept = api.plan(STEP, HGX2, steps=300, seed=1, least_gain=gain + 0.05)
    assert kept.plan.name == PLAIN and "plain order" in kept.plan.notes[-1]
    assert kept.plan.iteration_us == kept.plain.period_us
    assert all(len(op.motifs) == 1 for op in kept.plan.ops), "whole ops"
    assert api.plan(STEP, HGX2, steps=300, seed=1, least_gain=gain / 2).plan.name == SYSTEM


def test_no_plan_promises_less_than_plain_order(found: PlanResult) -> None:
    assert found.plan.iteration_us <= found.plain.period_us * (1 + 1e-9)


@pytest.mark.parametrize("least_gain", [-0.1, 1.0, float("nan")])
def test_the_least_gain_is_a_part(least_gain: float) -> None:
    with pytest.raises(InvalidInput, match="least_gain: must be at least 0 and below 1"):
        api.plan(STEP, HGX2, steps=10, least_gain=least_gain)
