# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose controller, agent or rank is killed, stopped or broken while a plan is active.

One trial of each kind by default; STRETTO_KILL_TRIALS=50 runs a campaign of 50 of each, with other seeds for another
STRETTO_KILL_SEED.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from warm import Started

JOBS = Path(__file__).parents[1] / "jobs"
TRIALS = int(os.environ.get("STRETTO_KILL_TRIALS", "1"))
SEED = int(os.environ.get("STRETTO_KILL_SEED", "0"))
VICTIMS = ("controller-kill", "controller-stop", "agent", "rank-kill", "rank-stop")
TRIAL_LIMIT_S = 420.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("k")
    log = folder / "log"
    arguments = [str(folder), f"--victims={','.join(VICTIMS)}", f"--trials={TRIALS}", f"--seed={SEED}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Started(JOBS / "kills_job.py", arguments, env=environment, log=log)
    try:
        code = process.wait(TRIAL_LIMIT_S * TRIALS * len(VICTIMS))
    finally:
        process.end()
    # 1: a trial was wrong, which the test of its victim says.
    assert code in (0, 1) and (folder / "outcomes").exists(), log.read_text()[-4000:]
    return [json.loads(line) for line in (folder / "outcomes").read_text().splitlines()]


@pytest.mark.parametrize("victim", VICTIMS)
def test_losses_are_right_ranks_run_one_plan_and_exit_codes_are_the_jobs(
    victim: str, outcomes: list[dict[str, Any]]
) -> None:
    trials = [outcome for outcome in outcomes if outcome["victim"] == victim]
    assert len(trials) == TRIALS
    assert [outcome for outcome in trials if outcome["wrong"]] == []
    # Plain order, and at least one plan.
    assert all(outcome["plans"] >= 2 for outcome in trials)
