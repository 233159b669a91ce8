# SPDX-License-Identifier: Apache-2.0
"""When a plan is thought over, and that it does not go round in circles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_job import toy_cluster, toy_plan, toy_workload

from stretto.control.feedback import MOST_WINDOWS, WINDOW_ITERATIONS, WINDOWS, PlanWatch, Question
from stretto.control.refine import RefinedCosts, ratios, refined
from stretto.control.worker import PlanRequest, answer, plan_of
from stretto.lab.layout import LabLayout
from stretto.planner.costs.costs import Motion, simulated_costs
from stretto.runtime.enforcer.report import EnforcerReport, MotifReport

WORKLOAD, CLUSTER = toy_workload(2), toy_cluster(2)
PLAN = toy_plan("p", WORKLOAD, CLUSTER, duration_us=100.0)
FINE = EnforcerReport(
    number=1, hash=PLAN.hash, committed=1, iteration_us=1000.0, plain_us=1200.0, waits_us=400.0, held_us=10.0,
    motifs=(MotifReport(op="gradients", motif=0, duration_us=105.0, wait_us=0.0),),
)  # fmt: skip


def watch() -> PlanWatch:
    return PlanWatch(plan=PLAN, number=1, size=2)


def slow(report: EnforcerReport, times: float) -> EnforcerReport:
    return replace(report, motifs=tuple(replace(m, duration_us=times * m.duration_us) for m in report.motifs))


def windows_until(watch: PlanWatch, report: EnforcerReport, most: int = 400) -> tuple[int, Question | None]:
    """How many windows like this it takes until something is asked."""
    start = watch._taken if watch._taken >= 0 else 0
    for number in range(most):
        at = start + number * WINDOW_ITERATIONS
        watch.hear(0, replace(report, iteration=at))
        question = watch.hear(1, replace(report, iteration=at))
        if question is not None:
            return number, question
    return most, None


def test_a_plan_that_keeps_its_promise_is_left_alone() -> None:
    assert windows_until(watch(), FINE) == (400, None)


def test_every_motif_costs_what_threads_take_to_wake_up() -> None:
    motion = Motion(kind="all_reduce", groups=((0, 1),), channels=("dim0",))
    plain = simulated_costs(CLUSTER)
    name = plain.algorithms(motion, 1e6)[0]
    before_us, after_us = (
        RefinedCosts(plain, {"dim0": 2.0}, motif_us).cost(motion, 1e6, name).us for motif_us in (0.0, 500.0)
    )
    assert after_us == before_us + 500.0


def test_hundreds_of_small_messages_cost_more_than_a_small_sum() -> None:
    # On the links alone 64 pieces are a thousandth faster than the 24 transfers of halving-doubling.
    lab = LabLayout.of(hosts=2, ranks_per_host=2, uplinks={"rdma": "50mbit"}).cluster()
    motion = Motion(kind="all_reduce", groups=((0, 1, 2, 3),), channels=("rdma",))
    plain = simulated_costs(lab)
    names = plain.algorithms(motion, 4e4)
    assert min(names, key=lambda name: plain.cost(motion, 4e4, name).us) == "nccl_tree:64"
    costs = RefinedCosts(plain, {}, 300.0)
    dear = {name: costs.cost(motion, 4e4, name).us - plain.cost(motion, 4e4, name).us for name in names}
    assert [dear[name] for name in ("direct", "ring", "halving_doubling")] == pytest.approx([300.0] * 3)
    transfers = {name: plain.program(motion, 4e4, name).num_transfers for name in ("nccl_tree", "nccl_tree:64")}
    assert dear["nccl_tree:64"] / dear["nccl_tree"] == pytest.approx(transfers["nccl_tree:64"] / transfers["nccl_tree"])
    assert min(names, key=lambda name: costs.cost(motion, 4e4, name).us) == "halving_doubling"
    assert all(costs.at_least_us(motion, 4e4, name) <= costs.cost(motion, 4e4, name).us for name in names)


def test_what_any_motif_costs_says_nothing_of_a_link() -> None:
    # 100 us were promised, of which 30 are any motif's: the rest takes four times as long.
    assert ratios(PLAN, [slow(FINE, 310 / 105)], 30.0) == pytest.approx({"net": 4.0})
    assert ratios(PLAN, [FINE], 40.0) == {}


def test_after_a_link_was_cut_plain_order_would_be_slower_too() -> None:
    cut = replace(slow(FINE, 4.0), iteration_us=3000.0)
    _, question = windows_until(watch(), cut)
    assert question is not None and question.why == "drift"
    learnt = PlanWatch(plan=PLAN, number=1, size=2, plain_times=2.5)
    assert windows_until(learnt, replace(FINE, iteration_us=2900.0)) == (400, None)
    _, question = windows_until(learnt, replace(FINE, iteration_us=3100.0))
    assert question is not None and question.why == "slower"


def test_an_order_that_holds_motifs_back_for_five_percent_asks_after_three_windows_in_a_row() -> None:
    number, question = windows_until(watch(), replace(FINE, held_us=60.0))
    assert question is not None
    assert (number, question.why) == (WINDOWS, "held")
    one = watch()
    for at in range(0, 400 * WINDOW_ITERATIONS, WINDOW_ITERATIONS):
        report = replace(FINE, iteration=at, held_us=60.0 if at // WINDOW_ITERATIONS % 3 else 0.0)
        assert one.hear(0, report) is None
        assert one.hear(1, report) is None


def test_every_answer_that_brought_nothing_doubles_the_patience() -> None:
    one = watch()
    taken = []
    for _ in range(8):
        number, question = windows_until(one, replace(FINE, held_us=60.0))
        assert question is not None
        one.asked_in_vain(question.factors)
        taken.append(number)
    assert taken == [WINDOWS * 2**k for k in range(6)] + [MOST_WINDOWS] * 2


def test_a_cut_link_is_noticed_and_what_was_learnt_is_not_asked_again() -> None:
    one = watch()
    number, question = windows_until(one, slow(FINE, 3.0))
    assert question is not None
    assert (number, question.why) == (WINDOWS, "drift")
    assert round(question.factors["net"], 3) == 3.15
    one.asked_in_vain(question.factors)
    assert windows_until(one, slow(FINE, 3.0)) == (400, None)
    _, again = windows_until(one, FINE)
    assert again is not None
    assert round(again.factors["net"], 3) == 1.05


def test_a_small_difference_is_no_drift() -> None:
    assert windows_until(watch(), slow(FINE, 1.15)) == (400, None)


def test_a_plan_that_is_slower_than_plain_order_is_given_up() -> None:
    _, question = windows_until(watch(), replace(FINE, iteration_us=1300.0))
    assert question is not None
    assert question.why == "slower"


def test_reports_of_another_plan_and_missing_ranks_do_not_count() -> None:
    bad = replace(FINE, held_us=500.0)
    one = watch()
    assert all(one.hear(0, replace(bad, iteration=20 * at)) is None for at in range(50))
    assert all(one.hear(rank, replace(bad, number=2, iteration=20 * at)) is None for at in range(50) for rank in (0, 1))


def test_the_rank_that_came_last_says_how_long_a_motif_takes() -> None:
    assert ratios(PLAN, [slow(FINE, 4.0), FINE]) == {"net": 1.05}
    assert refined({"net": 2.0}, {"net": 1.05, "other": 100.0}) == {"net": 2.1, "other": 64.0}


def test_a_slow_link_may_recover_but_none_becomes_faster_than_it_was_probed() -> None:
    assert refined({"slow": 4.0, "net": 1.0}, {"slow": 0.5, "net": 0.66}) == {"slow": 2.0, "net": 1.0}


def test_what_was_learnt_of_channels_holds_for_all_that_runs_on_them() -> None:
    channel = CLUSTER.channels[0]
    inner = simulated_costs(CLUSTER)
    costs = RefinedCosts(inner, {channel: 2.0})
    motion = Motion(kind="all_reduce", groups=((0, 1),), channels=(channel,))
    for algorithm in costs.algorithms(motion, 1e6):
        assert costs.cost(motion, 1e6, algorithm).us == 2 * inner.cost(motion, 1e6, algorithm).us
        assert costs.at_least_us(motion, 1e6, algorithm) == 2 * inner.at_least_us(motion, 1e6, algorithm)
    assert costs.factor(["unseen"]) == 1.0
    assert RefinedCosts(inner, {"a+b": 3.0, "b": 2.0}).factor(["b", "c"]) == 3.0


def test_the_worker_plans_and_says_what_the_current_plan_takes_now() -> None:
    from stretto.control.messages import encode_captured, encode_plan

    captured = encode_captured(WORKLOAD, CLUSTER)
    first = answer(PlanRequest(captured=captured, budget_s=0.2))
    plan = plan_of(first)
    plan.check(WORKLOAD, CLUSTER)
    assert 0 < first.iteration_us <= first.plain_us
    channel = CLUSTER.channels[0]
    again = answer(
        PlanRequest(captured=captured, budget_s=0.2, factors={channel: 10.0}, current=(encode_plan(plan), plan.hash))
    )
    assert again.current_us > first.iteration_us
    assert plan_of(answer(PlanRequest(captured=captured, budget_s=0.2, plain=True))).name == "plain"
