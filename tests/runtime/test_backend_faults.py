# SPDX-License-Identifier: Apache-2.0
"""Jobs that go wrong on the process group `stretto`: errors that name the rank, and no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_faults_job.py", tmp_path_factory.mktemp("faults"), ranks=3)


@pytest.mark.parametrize("scenario", ["killed", "killed_while_sending"])
def test_survivors_of_a_killed_rank_are_told_its_number(outcomes: Outcomes, scenario: str) -> None:
    first, second, dead = outcomes[scenario]
    assert dead is None
    for kind, text, _ in (first, second):
        assert kind == "PeerLost"
        assert text.startswith("rank") and "2" in text.partition("gone")[0]


@pytest.mark.parametrize("scenario", ["stopped_while_sending", "stopped_in_a_delegated_collective"])
def test_a_rank_that_stops_is_named_when_a_delegated_call_times_out(outcomes: Outcomes, scenario: str) -> None:
    for kind, text, _ in outcomes[scenario][:2]:
        assert kind == "PeerLost", text
        assert text.startswith("timed out waiting for rank 2, which answers nothing"), text


def test_a_rank_whose_message_does_not_come_is_named_and_not_one_that_has_ended_meanwhile(outcomes: Outcomes) -> None:
    kind, text, _ = outcomes["stopped_where_another_is_done"][0]
    assert kind == "PeerLost", text
    assert text.startswith("timed out waiting for rank 2, which answers nothing"), text


def test_a_rank_that_does_not_make_a_delegated_call_is_named(outcomes: Outcomes) -> None:
    for kind, text, _ in outcomes["absent_from_a_delegated_collective"][:2]:
        assert kind == "PeerLost", text
        assert text.startswith("timed out waiting for rank 2, which has not made this call"), text


def test_a_wait_for_a_message_that_times_out_blames_nobody(outcomes: Outcomes) -> None:
    for kind, text, _ in outcomes["wait_that_times_out_for_a_message"][:2]:
        assert kind == "TimeoutError", text


@pytest.mark.parametrize(
    "scenario", ["left_a_collective_because_of_another", "left_a_message_because_of_another"]
)  # fmt: skip
def test_survivors_name_the_rank_that_died_and_not_one_that_left_because_of_it(
    outcomes: Outcomes, scenario: str
) -> None:
    for kind, text, _ in outcomes[scenario][:2]:
        assert kind == "PeerLost"
        assert text.startswith("rank 2 is gone"), text


@pytest.mark.parametrize("scenario", ["killed_before_a_future", "killed_in_ddp"])
def test_who_waits_in_cpp_gets_an_error_that_names_the_rank(outcomes: Outcomes, scenario: str) -> None:
    for kind, text, _ in outcomes[scenario][:2]:
        assert kind == "RuntimeError"
        assert "PeerLost: rank 2 is gone" in text


def test_a_wait_that_times_out_can_be_repeated(outcomes: Outcomes) -> None:
    for kind, _, _, then in outcomes["waits_that_time_out"][1:]:
        assert (kind, then) == ("TimeoutError", "fine")


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("other_sizes", ("all_reduce (sum) of 100 x float32", "all_reduce (sum) of 1000 x float32")),
        ("other_order", ("all_reduce (sum) of 1000 x float32", "broadcast")),
        ("other_reduction", ("all_reduce (sum)", "all_reduce (max)")),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told_who_does_what(
    outcomes: Outcomes, scenario: str, words: tuple[str, str]
) -> None:
    for kind, text, _ in outcomes[scenario]:
        assert kind == "ProgramMismatch"
        assert "rank 1 runs" in text
        assert all(word in text for word in words)


def test_ranks_that_would_choose_by_different_rules_do_not_start(outcomes: Outcomes) -> None:
    for kind, text, _ in outcomes["other_rules"]:
        assert kind == "PlanMismatch"
        assert "rank 2" in text and "ring:4" in text and "STRETTO_CLUSTER" in text


def test_when_one_rank_has_no_executor_all_delegate_and_say_so_once(outcomes: Outcomes) -> None:
    for backend, why, total, said in outcomes["without_executor"]:
        assert backend == "gloo"
        assert why == "rank 1 has no executor: the executor is not available"
        assert total == 3.0
        assert said == 1


def test_where_the_store_leaves_with_rank_0_while_a_group_is_made_rank_0_is_named(outcomes: Outcomes) -> None:
    for kind, text, _ in outcomes["store_leaves"][1:]:
        assert kind == "PeerLost", text
        assert text.startswith("rank 0 is gone") and text.endswith("while the group was made"), text
