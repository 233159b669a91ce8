# SPDX-License-Identifier: Apache-2.0
"""Limits, pauses and strangers on the process group `stretto`: clear errors on all ranks or none, and no hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]
VICTIM = 2


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_faults_limits_job.py", tmp_path_factory.mktemp("limits"), ranks=3)


@pytest.mark.parametrize("scenario", ["killed_in_the_middle", "killed_while_joining"])
def test_a_killed_rank_is_named_by_the_others(outcomes: Outcomes, scenario: str) -> None:
    first, second, dead = outcomes[scenario]
    assert dead is None
    for kind, text, _ in (first, second):
        # A rank that fails after another one says who has found it out: "rank 0: rank 2 is gone".
        assert kind == "PeerLost" and re.match(r"(rank [01]: )?rank 2 is gone", text), text


def test_a_paused_rank_is_waited_for(outcomes: Outcomes) -> None:
    assert all(good for good, _ in outcomes["paused"])
    assert all(seconds > 1 for _, seconds in outcomes["paused"][:VICTIM])


def test_a_pause_longer_than_the_timeout_names_the_rank_and_spares_other_groups(outcomes: Outcomes) -> None:
    for kind, text, _, others_go_on in outcomes["paused_too_long"]:
        assert kind == "PeerLost"
        assert "timed out" in text and "rank 2 (it does not answer) in" in text, text
        assert others_go_on


def test_a_rank_that_is_elsewhere_when_the_time_is_up_is_named(outcomes: Outcomes) -> None:
    for kind, text, _ in outcomes["another_backend"][:VICTIM]:
        assert kind == "PeerLost"
        # On a busy machine another one may be late, too.
        late = r"waiting for (rank [01] \(it has not started\), )?rank 2 \(it has not started\) in all_reduce"
        assert re.search(late, text), text


def test_a_rank_that_leaves_early_is_named_at_once(outcomes: Outcomes) -> None:
    for kind, text, _, good in outcomes["left_early"][:VICTIM]:
        assert kind == "PeerLost" and text.startswith("rank 2 has closed its executor")
        assert good


def test_without_descriptors_to_join_all_ranks_go_to_gloo_and_say_why(outcomes: Outcomes) -> None:
    for kind, _, _, backend, why, total in outcomes["no_descriptors_to_join"]:
        assert (kind, backend, total) == ("fine", "gloo", 3.0)
        assert why.startswith("rank 2: descriptors") and "Too many open files" in why


def test_descriptors_that_run_out_later_harm_nobody(outcomes: Outcomes) -> None:
    assert [answers[:3] for answers in outcomes["no_descriptors_left"]] == [[True] * 3] * 3
    assert outcomes["no_descriptors_left"][VICTIM][3]


def test_shared_memory_that_ends_while_it_grows_fails_that_group_alone(outcomes: Outcomes) -> None:
    for kind, text, _, before, after in outcomes["memory_full"]:
        assert kind == "OutOfResources"
        assert "shared memory is full" in text and "No space left on device (on rank 2)" in text
        assert before and after


def test_garbage_on_every_port_changes_nothing(outcomes: Outcomes) -> None:
    for good, while_joining, at_work, backend in outcomes["garbage"]:
        assert good and backend == "executor"
        assert while_joining > 0 and at_work > 0


def test_a_rank_with_another_token_is_kept_out_and_all_ranks_go_to_gloo(outcomes: Outcomes) -> None:
    for kind, _, _, backend, why, total in outcomes["wrong_token"]:
        assert (kind, backend, total) == ("fine", "gloo", 3.0)
        assert "token" in why
