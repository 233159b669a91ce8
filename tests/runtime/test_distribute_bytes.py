# SPDX-License-Identifier: Apache-2.0
"""A step as `stretto.torch.distribute` carries it out moves the bytes that the simulator counts for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.strategy.builders import BUILDERS

Outcomes = dict[str, list[Any]]
OWN = ("mixed", "ordered", "two_level")
SHARDED = ("zero1", "zero2")
ENCODERS = ("float16", "powersgd:1", "topk:0.1", "onebit")


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("distribute_bytes_job.py", tmp_path_factory.mktemp("bytes"), ranks=4)


def same_bytes(outcomes: Outcomes, label: str) -> None:
    for one in outcomes[f"mlp {label}"]:
        planned = {kind: nbytes + one["exact"].get(kind, 0.0) for kind, nbytes in one["planned"].items()}
        planned |= {kind: nbytes for kind, nbytes in one["exact"].items() if kind not in planned}
        assert one["executed"] == planned and planned


@pytest.mark.parametrize("label", [*BUILDERS, *OWN])
def test_dense_gradients_and_parameters_move_exactly_the_bytes_of_the_workload(outcomes: Outcomes, label: str) -> None:
    same_bytes(outcomes, label)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("label", [*(name for name in BUILDERS if name not in SHARDED), *OWN])
def test_so_do_encoded_ones(outcomes: Outcomes, label: str, encoder: str) -> None:
    same_bytes(outcomes, f"{label} {encoder}")


@pytest.mark.parametrize("label", ["all_reduce", "ps", "ps_balanced", "ordered", "two_level"])
def test_so_do_factors_of_whole_weights(outcomes: Outcomes, label: str) -> None:
    same_bytes(outcomes, f"{label} sufficient_factors")


@pytest.mark.parametrize("label", [*BUILDERS, *OWN])
def test_sparse_gradients_move_no_more_than_the_workload_says(outcomes: Outcomes, label: str) -> None:
    for one in outcomes[f"ncf {label}"]:
        for kind, nbytes in one["executed"].items():
            beside = one["exact"].get(kind, 0.0) + one["most"].get(kind, 0.0)
            assert one["dense"].get(kind, 0.0) <= nbytes <= one["planned"].get(kind, 0.0) + beside, kind
