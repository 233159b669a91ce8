# SPDX-License-Identifier: Apache-2.0
"""A child that a rank forks is not that rank: it is refused whatever ranks do together, and disturbs nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]
RIGHT = [2.0, [0, 1], 0.0, 4.0, [0, 1], 1.0, 6.0, [0, 1], 2.0]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_fork_job.py", tmp_path_factory.mktemp("forks"), ranks=2)


@pytest.mark.parametrize("scenario", ["refused", "left", "own_job", "loads"])
def test_ranks_go_on_with_right_results_whatever_their_children_do(outcomes: Outcomes, scenario: str) -> None:
    assert [each["then"] for each in outcomes[scenario]] == [RIGHT, RIGHT]


def test_a_forked_child_is_refused_at_every_door_with_one_line(outcomes: Outcomes) -> None:
    for each in outcomes["refused"]:
        assert each["version"] == 1
        for door, said in each["said"].items():
            assert said.startswith("StrettoError: process "), f"{door}: {said}"
            assert "was forked from" in said and "\n" not in said


def test_a_forked_child_ends_as_a_program_does(outcomes: Outcomes) -> None:
    assert [each["ends"] for each in outcomes["left"]] == [[0, 0], [0, 0]]


def test_forked_children_can_make_a_job_of_their_own(outcomes: Outcomes) -> None:
    for each in outcomes["own_job"]:
        assert each["said"] == {"join": "fine: 20.0 [0, 1] executor"}


def test_workers_of_a_data_loader_load_and_are_told_what_they_must_not_call(outcomes: Outcomes) -> None:
    for each in outcomes["loads"]:
        assert each["fine"] == 496.0
        assert "was forked from rank" in each["calling"]


def test_a_dead_rank_is_noticed_although_its_child_lives_on(outcomes: Outcomes) -> None:
    survivor, victim = outcomes["killed_with_children"]
    assert victim is None
    assert survivor["said"].startswith("rank 1 is gone")
