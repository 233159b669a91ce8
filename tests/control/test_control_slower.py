# SPDX-License-Identifier: Apache-2.0
"""A plan that is slower than plain order, on real ranks: it is measured, and the application's own order comes back."""

from __future__ import annotations

import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from warm import Started

JOBS = Path(__file__).parents[1] / "jobs"
LIMIT_S = 1200.0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("s")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Started(JOBS / "slower_job.py", [str(folder)], env=environment, log=folder / "log")
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.end()
    assert code == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "report").read_text())


def test_all_ranks_go_from_plain_order_to_the_plan_and_back_at_the_same_iterations(report: Any) -> None:
    first, second = (rank["ran"] for rank in report["ranks"])
    assert first == second
    assert [number for number, _ in groupby(first)] == [0, 1, 2]
    assert all(rank["wrong"] == 0 and rank["fell_back"] == "" for rank in report["ranks"])


def test_it_was_measured_and_the_controller_says_why(report: Any) -> None:
    assert any("an iteration takes" in about and "in plain order" in about for about in report["seen"])
    assert (report["plan"], report["name"], report["phase"]) == (2, "plain", "active")
    assert any("own order, as the plan before was slower" in about for about in report["seen"])
    assert "plan 2 by plain" in report["said"]


def test_it_does_not_go_round_in_circles(report: Any) -> None:
    # A machine that is busy with something else may bring a question about other costs, which changes nothing.
    assert [what for what in report["asked"] if what != "again"] == ["first", "plain"]
    assert len(report["ranks"][0]["ran"]) - report["ranks"][0]["ran"].index(2) > 100
