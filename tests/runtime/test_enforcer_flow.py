# SPDX-License-Identifier: Apache-2.0
"""Order, agreement and mismatches under a plan, on two real ranks with two networks between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]
A2A, SUM = "all_to_all.0#0 direct", "all_reduce.1#0 ring"


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("enforcer_flow_job.py", tmp_path_factory.mktemp("flow"), ranks=2)


def test_motifs_run_in_the_order_of_the_plan_not_of_the_calls(outcomes: Outcomes) -> None:
    assert outcomes["order"] == [[[A2A, SUM], [SUM, A2A]]] * 2


def test_on_two_channels_ops_overlap_and_on_one_they_do_not(outcomes: Outcomes) -> None:
    assert outcomes["overlap"][0] == [True, False]


def test_an_exchange_of_the_next_iteration_goes_before_a_sum_that_is_held_back(outcomes: Outcomes) -> None:
    for told in outcomes["prefetch"]:
        assert told["same"] and told["active"] == 1
        assert told["order"] == ["exchange#0 direct", "sum#0 ring"] * 3 + ["sum#0 ring"]


def test_an_order_that_the_application_cannot_feed_is_refused(outcomes: Outcomes) -> None:
    for told in outcomes["prefetch"]:
        assert told["refused"].startswith("PlanMismatch: plan by hand: order: 'all_to_all.0' comes before")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("order", "the iteration ends without all_reduce.1"),
        ("missing", "the iteration ends without all_reduce.1"),
        ("middle", "all_reduce of 2012 bytes among ranks 0, 1 comes instead of all_reduce.1"),
        ("waits", "the application waits for all_to_all.0 before it submits all_reduce.1"),
    ],
)
def test_a_surprise_is_named_and_all_ranks_go_on_in_plain_order(outcomes: Outcomes, how: str, why: str) -> None:
    for told in outcomes["mismatches"]:
        assert told[how]["same"], "results are those of plain order"
        assert told[how]["number"] == 0
        assert told[how]["why"].startswith(f"iteration 5: {why}")


@pytest.mark.parametrize("how", ["size", "extra"])
def test_what_is_not_of_the_step_runs_in_plain_order_before_and_after_it_and_the_plan_goes_on(
    outcomes: Outcomes, how: str
) -> None:
    for told in outcomes["mismatches"]:
        assert told[how] == {"same": True, "number": 1, "why": ""}


def test_an_evaluation_that_communicates_does_not_end_the_plan(outcomes: Outcomes) -> None:
    for marked, counted in outcomes["evaluated"]:
        assert marked["same"] and counted["same"]
        assert marked["why"] == counted["why"] == ""
        assert marked["seen"] == [0, *[1] * 7] and marked["iteration"] == 8
        # Counted iterations end where the next one begins: of the last one nobody knows yet.
        assert counted["seen"] == [0, 0, *[1] * 6] and counted["iteration"] == 7


def test_an_evaluation_that_waits_for_what_is_held_back_gets_it(outcomes: Outcomes) -> None:
    for told in outcomes["prefetch"]:
        assert told["evaluated"] == [True, 1, ""]


def test_a_plan_comes_back_with_its_step_three_times_at_most(outcomes: Outcomes) -> None:
    for once, often in outcomes["returns"]:
        assert once["same"] and often["same"]
        assert set(once["seen"][2:6]) == {1} and set(once["seen"][6:8]) == {0} and set(once["seen"][10:]) == {1}
        assert often["seen"][14] == often["seen"][19] == 1
        assert set(often["seen"][21:]) == {0} and often["resting"] == 0
        assert "iteration 20: the iteration ends without all_reduce.1" in often["why"]


def test_an_offer_of_all_ranks_is_taken_up_by_all_whatever_one_of_them_does_meanwhile(outcomes: Outcomes) -> None:
    assert outcomes["offered"] == [{"same": True, "seen": [0, 0, 1, 1, 1, 1, 0, 0, 0, *[1] * 5]}] * 2


def test_a_plan_whose_step_never_comes_back_is_given_up(outcomes: Outcomes) -> None:
    for told in outcomes["leaves"]:
        assert told["resting"] == [0, 1, 0]
        assert told["why"].endswith("the step did not come back")


def test_iterations_are_counted_where_nobody_marks_them(outcomes: Outcomes) -> None:
    for told in outcomes["counted"]:
        assert told["seen"] == [0, 0, 0, 1, 1, 1]
        assert (told["number"], told["iteration"]) == (0, 6)
        assert "comes instead of all_reduce.1" in told["why"]


def test_ranks_that_hear_of_a_plan_at_different_times_change_to_it_at_the_same(outcomes: Outcomes) -> None:
    first, second = outcomes["switching"]
    assert first == second
    assert first["seen"] == [0] * 10 + [1] * 4, "told in iterations 2 and 6, agreed in 9"
    assert first["apart"] == [1] * 8 + [2] * 2, "no change while only one rank has heard of plan 2"
    assert first["waits"]


def test_what_was_submitted_above_gloo_runs_out_when_its_plan_ends(outcomes: Outcomes) -> None:
    assert outcomes["runs_out"] == [{"same": True, "active": 1, "lanes": 0}] * 2


def test_plans_for_something_else_are_refused_with_one_line(outcomes: Outcomes) -> None:
    for said in outcomes["refusals"]:
        kinds = [line.partition(":")[0] for line in said]
        assert kinds == ["PlanMismatch"] * 6 + ["InvalidInput"] + ["PlanMismatch"] * 2
        assert "was made for workload by hand" in said[0]
        assert "is not the step that runs here" in said[1]
        assert "unknown recipe for all_to_all 'magic'; choose from" in said[2]
        assert "is not prepared here" in said[5] and "is not prepared here" in said[8]
        assert "needs the communicators of plan 1" in said[7]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("alone_inside", "cannot end: rank 1 gave up plan 1: iteration 5: all_reduce of 2012 bytes"),
        ("alone_between", "rank 1 calls all_reduce of 28 bytes among ranks 0, 1 before iteration 6, rank 0 does not"),
        ("alone_without", "cannot end: rank 1 gave up plan 1: iteration 5: the iteration ends without all_reduce.1"),
    ],
)
def test_a_rank_that_alone_does_something_else_is_named_with_its_op_on_all_ranks(
    outcomes: Outcomes, scenario: str, words: str
) -> None:
    for said in outcomes[scenario]:
        assert said.startswith("PlanMismatch: ")
        assert words in said


def test_a_rank_that_dies_under_a_plan_is_lost_by_name(outcomes: Outcomes) -> None:
    other, dead = outcomes["killed"]
    assert dead == "died"
    assert other.startswith("PeerLost: rank 1")
