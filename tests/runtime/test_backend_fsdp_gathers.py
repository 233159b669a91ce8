# SPDX-License-Identifier: Apache-2.0
"""FSDP2's all-gathers on CPUs that are waited for where their parameters are used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch import nn
from warm import Started

import stretto.torch
from stretto.errors import InvalidInput

JOB = Path(__file__).parents[1] / "jobs" / "fsdp_gathers_job.py"
LIMIT_S = 600.0


def test_losses_are_those_of_plain_fsdp_and_nobody_waits_at_the_call(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Started(JOB, [str(tmp_path)], env=environment, log=tmp_path / "log")
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.end()
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for each in told["each"]:
            usual, early = each["False"], each["True"]
            assert usual["losses"] == early["losses"]
            assert len(usual["gathers"]) == len(early["gathers"]) > 0
            assert all(usual["gathers"]) and not any(early["gathers"])
            # An unchanged script with STRETTO_EARLY_GATHERS=on: early while it is followed, and only then.
            assert each["run"]["losses"] == usual["losses"]
            assert each["run"]["gathers"] == early["gathers"]
            assert each["run"]["asked"] and not any(each["run"]["asked"])
        assert told["number"] > 0, "a plan was active"
        assert told["planned"] == pytest.approx(told["each"][0]["True"]["losses"], rel=1e-5)


def test_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(InvalidInput, match="fully_shard was applied to none"):
        stretto.torch.early_gathers(nn.Linear(2, 2))
