# SPDX-License-Identifier: Apache-2.0
"""The training examples: the same losses with gloo and with stretto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_examples_job.py", tmp_path_factory.mktemp("examples"), ranks=2, reporting=1)


def losses(printed: str) -> list[float]:
    (line,) = (line for line in printed.splitlines() if line.startswith("loss "))
    return [float(word) for word in line.split()[1:]]


@pytest.mark.parametrize("example", ["ddp", "fsdp", "hybrid"])
def test_an_example_trains_alike_with_both_backends(outcomes: Outcomes, example: str) -> None:
    (printed,) = outcomes[example]
    gloo, ours = losses(printed["gloo"]), losses(printed["stretto"])
    assert ours == pytest.approx(gloo, abs=2e-6)
    assert len(ours) == 4 and ours[-1] < ours[0]
    assert "iteration " in printed["stretto"]


def test_an_example_tells_which_programs_ran(outcomes: Outcomes) -> None:
    (printed,) = outcomes["hybrid"]
    lines = printed["stretto"].splitlines()
    for op in ("all_to_all", "all_reduce"):
        assert any(line.startswith(op) and "program direct on the executor" in line for line in lines)
    assert "program" not in printed["gloo"]
