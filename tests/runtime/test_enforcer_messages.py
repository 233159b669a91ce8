# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks beside the sums of a plan: nobody waits for anybody in a circle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("enforcer_messages_job.py", tmp_path_factory.mktemp("messages"), ranks=3)


@pytest.mark.parametrize("carrier", ["executor", "gloo"])
def test_random_pipelines_run_through_under_random_plans(outcomes: Outcomes, carrier: str) -> None:
    for found in zip(*outcomes[carrier], strict=True):
        for one in found:
            if one["plan"]:
                assert one == {"plan": True, "wrong": [[]] * 4, "number": 1, "fell_back": "", "turns given up": False}
    assert sum(one["plan"] for one in outcomes[carrier][0]) >= 4, "most of them have another order than their own"
