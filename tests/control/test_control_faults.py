# SPDX-License-Identifier: Apache-2.0
"""Real ranks, a real controller, real signals: training goes on whatever happens to control."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from warm import Started

JOBS = Path(__file__).parents[1] / "jobs"
LIMIT_S = 700.0
RANKS = 2


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("f")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Started(JOBS / "faults_job.py", [str(folder), str(RANKS)], env=environment, log=folder / "log")
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.end()
    assert code == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "report").read_text())


def test_the_controller_was_killed_in_every_state_and_the_last_one_got_its_plan_through(report: Any) -> None:
    assert [code for _, code in report["killed"]] == [-signal.SIGKILL] * 9
    assert all(rank["ran"][-1] > 0 for rank in report["first"])
    assert all(rank["lost"] == "" for rank in report["first"])


def test_all_ranks_ran_the_same_plan_in_every_iteration_and_numbers_never_went_back(report: Any) -> None:
    for job in ("first", "third"):
        runs = [rank["ran"] for rank in report[job]]
        assert all(run == runs[0] for run in runs)
        assert all(before <= after for before, after in pairwise(runs[0]))


def test_messages_really_were_lost_repeated_and_late(report: Any) -> None:
    for rank in report["first"]:
        assert {"lost", "unanswered", "twice", "late"} <= rank["noise"].keys()


def test_when_a_rank_dies_the_others_end_and_the_next_start_gets_a_plan_with_a_higher_number(report: Any) -> None:
    survivor, dead = report["second"]
    assert dead is None
    assert survivor["lost"]
    assert min(set(report["third"][0]["plans"]) - {0}) > max(survivor["plans"])


def test_a_plan_for_another_model_is_refused_and_training_goes_on_in_plain_order(report: Any) -> None:
    for rank in report["fourth"]:
        number, yes, why = rank["vote"]
        assert number > 0
        assert not yes
        assert "was made for workload" in why
        assert rank["plans"] == [0]
        assert rank["iterations"] > 300
