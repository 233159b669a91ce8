# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose stages are device meshes train as one process does; pipelines that cannot run are clear errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("mesh_pipeline_job.py", tmp_path_factory.mktemp("mesh_pipeline"), ranks=4)


@pytest.mark.parametrize("name", ["columns to rows", "three stages", "interleaved ranks", "blocking"])
def test_losses_and_gradients_are_those_of_one_process(outcomes: Outcomes, name: str) -> None:
    assert outcomes[name] == [""] * 4


def test_the_example_trains(outcomes: Outcomes) -> None:
    losses = [float(line.rsplit(" ", 1)[1]) for line in outcomes["example"][3].splitlines()]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rank in two stages", "stages[1].mesh: rank 1 is in stage 0 already"),
        ("three stages on two meshes", "schedule: 1f1b has 3 stages in 3 rows; must be 2, one for each mesh"),
        ("placements of two axes", "stages[1].inputs: must be one placement for each of the mesh's 1 axes"),
        ("one rank differs", "has another pipeline"),
        ("a wrong batch", "inputs: must be a sequence of 2"),
    ],
)
def test_a_pipeline_that_cannot_run_is_an_error_on_every_rank(outcomes: Outcomes, name: str, message: str) -> None:
    assert all(message in said[name] for said in outcomes["refusals"])
