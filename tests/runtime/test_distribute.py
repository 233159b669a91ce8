# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.distribute`: real ranks train as one process does, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.strategy.builders import BUILDERS

Outcomes = dict[str, list[Any]]
REASSOCIATION = 2e-6
"""Sums in another order, through some steps of Adam, in 32 bits."""
OWN = ("mixed", "ordered", "two_level", "factors", "default")


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("distribute_job.py", tmp_path_factory.mktemp("distribute"), ranks=4)


@pytest.mark.parametrize("label", [*BUILDERS, *OWN])
@pytest.mark.parametrize("model", ["mlp", "conv", "tied", "ncf", "mixed"])
def test_weights_are_those_of_one_process(outcomes: Outcomes, model: str, label: str) -> None:
    for rank in outcomes["gloo"]:
        assert rank[f"{model} {label}"] < REASSOCIATION


def test_the_same_on_our_backend(outcomes: Outcomes) -> None:
    for rank in outcomes["stretto"]:
        assert len(rank) == 18
        assert all(apart < REASSOCIATION for apart in rank.values()), rank
