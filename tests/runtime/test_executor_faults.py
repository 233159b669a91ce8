# SPDX-License-Identifier: Apache-2.0
"""When something goes wrong the executor says what, and who: real processes killed, stopped, starved, lied to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from executor_ranks import launch

JOB = Path(__file__).parents[1] / "jobs" / "executor_faults_job.py"
VICTIM = 2


def said(folder: Path, scenario: str) -> list[Any]:
    return launch(JOB, folder, 4, scenario)[scenario]


def others(ranks: list[Any]) -> list[Any]:
    return [answer for rank, answer in enumerate(ranks) if rank != VICTIM]


@pytest.mark.parametrize("scenario", ["killed", "killed_over_network"])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, scenario: str) -> None:
    ranks = said(tmp_path, scenario)
    assert ranks[VICTIM] == {"died": True}
    for during, afterwards in others(ranks):
        for answer in (during, afterwards):
            assert answer["error"] == "PeerLost"
            assert "rank 2 is gone" in answer["text"]


def test_a_paused_rank_is_waited_for(tmp_path: Path) -> None:
    assert [answer["error"] for answer in said(tmp_path, "paused")] == [None] * 4


def test_a_barrier_names_the_rank_that_left_the_job(tmp_path: Path) -> None:
    for answer in others(said(tmp_path, "ended_before_a_barrier")):
        assert answer["error"] == "PeerLost" and "rank 2 has closed its executor" in answer["text"]


def test_a_rank_that_has_died_is_named_and_not_the_one_that_left_afterwards(tmp_path: Path) -> None:
    ranks = said(tmp_path, "left_after_a_death")
    for answer in (ranks[1], ranks[3]):
        assert answer["error"] == "PeerLost"
        assert answer["text"].startswith("rank 2 is gone"), answer["text"]


@pytest.mark.parametrize("scenario", ["missing", "missing_at_a_barrier"])
def test_a_rank_that_never_starts_is_named_when_the_time_is_up(tmp_path: Path, scenario: str) -> None:
    for answer in others(said(tmp_path, scenario)):
        assert answer["error"] == "PeerLost"
        assert "timed out" in answer["text"]
        assert "rank 2 (it has not started)" in answer["text"]


def test_a_rank_that_is_gone_is_named_when_others_wait_for_one_that_has_not_started(tmp_path: Path) -> None:
    ranks = said(tmp_path, "dead_and_not_waited_for")
    for answer in (ranks[1], ranks[3]):
        assert answer["error"] == "PeerLost"
        assert "rank 2 (it is gone)" in answer["text"], answer["text"]


@pytest.mark.parametrize("scenario", ["differing", "differing_over_network"])
def test_ranks_that_disagree_are_told_apart(tmp_path: Path, scenario: str) -> None:
    for answers in said(tmp_path, scenario):
        good = answers.pop("good")
        assert good["error"] is None  # another communicator is not touched
        for answer in answers.values():
            assert answer["error"] == "ProgramMismatch"
            assert "rank 2 runs" in answer["text"] and " but rank " in answer["text"]
        assert "1000 x" in answers["size"]["text"] and "1001 x" in answers["size"]["text"]
        assert "int32" in answers["type"]["text"] and "float32" in answers["type"]["text"]
        assert "(max)" in answers["operation"]["text"] and "(sum)" in answers["operation"]["text"]
        assert "all_gather" in answers["collective"]["text"]
        assert "another program" in answers["algorithm"]["text"]
        assert "all_gather" in answers["order"]["text"] and "all_reduce" in answers["order"]["text"]


def test_descriptors_and_shared_memory_run_out_with_a_clear_error(tmp_path: Path) -> None:
    starved = said(tmp_path, "no_descriptors")
    assert starved[VICTIM]["error"] == "OutOfResources" and "Too many open files" in starved[VICTIM]["text"]
    assert all(answer["error"] == "PeerLost" for answer in others(starved))
    assert any("rank 2" in answer["text"] for answer in others(starved))  # others may see those leave who saw it first
    full = said(tmp_path, "memory_full")
    for staging, _ in full:
        assert staging["error"] == "OutOfResources" and "segment_bytes leaves" in staging["text"]
    without = full[VICTIM][1]
    assert without["error"] == "OutOfResources" and "shared memory: could not reserve" in without["text"]


def test_garbage_on_the_ports_changes_nothing(tmp_path: Path) -> None:
    for answer in said(tmp_path, "garbage"):
        assert answer["good"] == [True] * 5
        assert answer["heard"] > 0


def test_a_rank_without_the_token_does_not_get_in(tmp_path: Path) -> None:
    answers = said(tmp_path, "wrong_token")
    assert all(answer["error"] == "PeerLost" for answer in answers)
    assert any("token" in answer["text"] for answer in answers)
