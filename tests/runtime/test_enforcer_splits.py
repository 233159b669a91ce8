# SPDX-License-Identifier: Apache-2.0
"""All-to-alls with splits under plans: sizes that change are no mismatch, whatever the plan does with the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("splits")
    return job("enforcer_splits_job.py", folder, ranks=4)


@pytest.mark.parametrize(("scenario", "plans"), [("under_plans", 12), ("above_gloo", 6)])
def test_exchanges_of_changing_sizes_are_cut_and_moved_as_planned(
    outcomes: Outcomes, scenario: str, plans: int
) -> None:
    for rank, found in enumerate(outcomes[scenario]):
        assert found["wrong"] == [], f"rank {rank}"
        assert found["seen"] == list(range(1, plans + 1)), "every plan became active, and stayed"
        assert found["fell_back"] == ""
    ways = outcomes[scenario][0]["ways"]
    assert "segment:parts=16" in ways
    assert "spline:parts=2" in ways
    assert not any("hierarchical" in way for way in ways), "who relays would have to know the sizes of others"


def test_exchanges_keep_the_order_of_the_plan(outcomes: Outcomes) -> None:
    assert outcomes["reordered"] == [{"right": [True] * 12, "fell_back": "", "number": 1}] * 4


def test_splits_that_were_not_recorded_are_carried_out_or_go_in_plain_order(outcomes: Outcomes) -> None:
    for found in outcomes["recorded_without"]:
        for carrier in ("executor", "gloo"):
            assert found[f"segment:parts=4 {carrier}"] == {"right": [True] * 10, "fell_back": ""}
        assert found["hierarchical:local=2 auto"]["right"] == [True] * 10


def test_calls_of_some_ranks_that_the_others_do_not_see_leave_the_plan_as_it_is(outcomes: Outcomes) -> None:
    assert outcomes["some_ranks_more"] == [{"right": True, "fell_back": "", "number": 1}] * 4


def test_a_pair_whose_sum_has_another_size_or_that_calls_once_more_leaves_the_plan_as_it_is(outcomes: Outcomes) -> None:
    assert outcomes["sub_groups_differ"] == [{"right": True, "fell_back": "", "number": 1}] * 4


def test_ranks_without_a_part_in_the_step_change_plans_with_the_others(outcomes: Outcomes) -> None:
    assert outcomes["idle_ranks"] == [{"right": True, "iteration": 12, "number": 2}] * 4


def test_a_capture_keeps_the_size_of_every_rank(outcomes: Outcomes) -> None:
    wanted = [
        ["all_to_all", 128.0, True, [80.0, 80.0, 96.0, 128.0]],
        ["all_to_all", 64.0, True, [64.0] * 4],
        ["all_to_all", 32.0, False, []],
        ["all_to_all", 72.0, True, [24.0, 40.0, 56.0, 72.0]],
    ]
    assert outcomes["recorded"] == [wanted] * 4


@pytest.mark.parametrize("carrier", ["executor", "gloo"])
def test_ranks_that_count_on_different_sizes_are_named_to_all_ranks_and_none_is_called_lost(
    outcomes: Outcomes, carrier: str
) -> None:
    said = [found["said"] for found in outcomes[f"wrong_pair {carrier}"]]
    for one in said:
        assert "rank 0 sends 20 bytes to rank 1, which expects 28" in one
    assert [one.partition(":")[0] for one in said] == ["ProgramMismatch"] * 2 + ["PlanMismatch"] * 2


@pytest.mark.parametrize("carrier", ["executor", "gloo"])
def test_a_report_lists_ops_that_came_with_more_bytes_than_planned(outcomes: Outcomes, carrier: str) -> None:
    grown = [{"op": "all_to_all.0", "planned_nbytes": 64.0, "nbytes": 320}]
    assert [found["outgrown"] for found in outcomes[f"wrong_pair {carrier}"]] == [grown] * 4
