# SPDX-License-Identifier: Apache-2.0
"""Training on the process group `stretto`: unchanged scripts, the results of gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_models_job.py", tmp_path_factory.mktemp("models"), ranks=4)


@pytest.mark.parametrize(
    "scenario", ["ddp", "ddp_with_unused_and_buffers", "ddp_with_power_sgd", "fsdp", "hsdp", "dlrm", "pipeline"]
)
def test_training_gives_the_losses_of_gloo(outcomes: Outcomes, scenario: str) -> None:
    for gloo, ours in outcomes[scenario]:
        # Sums of the same numbers in another order differ in the last bits of a float32.
        assert ours == pytest.approx(gloo, rel=2e-5, abs=1e-7)


def test_ddp_with_sparse_tables_gives_the_weights_of_gloo(outcomes: Outcomes) -> None:
    for gloo, ours in outcomes["ddp_with_sparse_tables"]:
        assert ours == pytest.approx(gloo, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("scenario", ["dtensor", "checkpoints", "nested_futures"])
def test_what_only_moves_whole_numbers_or_bytes_is_exact(outcomes: Outcomes, scenario: str) -> None:
    for gloo, ours in outcomes[scenario]:
        assert ours == gloo


def test_losses_go_down(outcomes: Outcomes) -> None:
    for scenario in ("ddp", "fsdp", "hsdp", "dlrm"):
        for _, ours in outcomes[scenario]:
            assert ours[-1] < ours[0]
