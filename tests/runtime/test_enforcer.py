# SPDX-License-Identifier: Apache-2.0
"""Every collective in every way that the rules know, carried out by a plan on four real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("enforcer_job.py", tmp_path_factory.mktemp("enforcer"), ranks=4)


def test_whole_numbers_are_those_of_plain_order_in_every_rewriting(outcomes: Outcomes) -> None:
    for told in outcomes["variants"]:
        assert told["wrong"] == []
        assert told["fell_back"] == ""
        assert told["plans"] >= 10


def test_plans_follow_each_other_in_one_run(outcomes: Outcomes) -> None:
    for told in outcomes["variants"]:
        assert told["seen"] == list(range(1, told["plans"] + 1))


def test_programs_that_a_plan_brings_along_move_what_plain_order_moves(outcomes: Outcomes) -> None:
    for told in outcomes["brought_along"]:
        assert told == {"wrong": [], "seen": [1, 2, 3], "fell_back": ""}


def test_a_program_that_needs_chunks_of_one_size_is_padded(outcomes: Outcomes) -> None:
    assert outcomes["padded"] == [[]] * 4


def test_the_same_plans_run_above_gloo(outcomes: Outcomes) -> None:
    assert outcomes["above_gloo"] == [[]] * 4


def test_an_average_in_several_steps_is_the_average(outcomes: Outcomes) -> None:
    for told in outcomes["averages"]:
        assert len(told) == 6 and all(told)


def test_a_capture_sees_every_call_of_a_group_of_ours_once(outcomes: Outcomes) -> None:
    for told in outcomes["seen"]:
        kinds = [kind for kind, _, _ in told]
        assert kinds[:8] == [
            "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
        ]  # fmt: skip
        assert kinds[8:] == ["send", "all_to_all", "all_reduce"]
        assert told[0][1] == 4 * 1003 and told[4][2] == 2 and told[8][1] == 20
