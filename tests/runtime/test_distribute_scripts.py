# SPDX-License-Identifier: Apache-2.0
"""What scripts do to a model beside plain steps is right under every strategy, or refused; never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]
EXACT = 1e-9
BUILDERS = ("all_reduce", "ps_balanced", "partitioned_ps", "zero2")


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("distribute_scripts_job.py", tmp_path_factory.mktemp("scripts"), ranks=2)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    "script", ["shared", "checkpointed", "moved", "second order", "thrown away", "momentum", "hooked"]
)
def test_weights_are_those_of_one_process(outcomes: Outcomes, script: str, builder: str) -> None:
    assert all(apart < EXACT for apart in outcomes[f"{script} {builder}"])


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("overlapping", "its memory overlaps with that of"), ("replaced", "was changed between backward and step"),
        ("dropped", "was changed between backward and step"),
    ],
)  # fmt: skip
def test_what_needs_all_gradients_everywhere_is_right_or_refused(
    outcomes: Outcomes, script: str, says: str, builder: str
) -> None:
    for one in outcomes[f"{script} {builder}"]:
        assert one < EXACT if builder == "all_reduce" else says in one


@pytest.mark.parametrize("builder", BUILDERS)
def test_hooks_that_would_not_be_seen_are_refused(outcomes: Outcomes, builder: str) -> None:
    assert all("a hook on its gradient" in said for said in outcomes[f"hooked late {builder}"])


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_layer_unfrozen_later_is_refused(outcomes: Outcomes, builder: str) -> None:
    assert all(
        "was frozen when stretto.torch.distribute was called" in said for said in outcomes[f"unfrozen {builder}"]
    )


def test_optimizers_that_look_beyond_a_part_are_refused_where_ranks_have_parts(outcomes: Outcomes) -> None:
    assert outcomes["foreign all_reduce"] == outcomes["adafactor all_reduce"] == ["", ""]
    assert outcomes["adafactor ps_balanced"] == ["", ""]
    assert all("updates each variable by itself" in said for said in outcomes["foreign ps_balanced"])
    for builder in ("partitioned_ps", "zero2"):
        for name in ("foreign", "adafactor"):
            assert all("updates each element by itself" in said for said in outcomes[f"{name} {builder}"])


def test_factors_that_are_not_the_gradient_are_noticed_in_any_step(outcomes: Outcomes) -> None:
    assert all(apart < EXACT for apart in outcomes["plain factors"])
    for script in ("penalised", "thrown away", "shared"):
        assert all("sufficient_factors does not fit" in said for said in outcomes[f"{script} factors"])


def test_buffers_of_any_type_begin_as_rank_0_has_them(outcomes: Outcomes) -> None:
    assert outcomes["buffers"] == [[2.0, 4.0, 0.0, 0.0, 3.0, 2.0]] * 2


def test_parameters_that_cannot_be_trained_are_named(outcomes: Outcomes) -> None:
    assert all("weight: dtype must be one of" in said for said in outcomes["complex"])
    assert all("weight: has no shape yet" in said for said in outcomes["lazy"])


def test_a_model_is_distributed_once_at_a_time(outcomes: Outcomes) -> None:
    for first, second in outcomes["again"]:
        assert "is distributed already" in first and not second


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("options", "optimizer: rank 1 has another optimizer"), ("groups", "optimizer: rank 1 has another optimizer"),
        ("state", "optimizer: rank 1 has another optimizer"), ("shapes", "model: rank 1 has another model"),
        ("layout", "model: rank 1 has another model"), ("file", "strategy-1.yaml: No such file"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_refused_on_all_of_them(outcomes: Outcomes, what: str, says: str) -> None:
    assert all(says in found[what] for found in outcomes["unlike"])


def test_a_strategy_that_was_sent_to_other_ranks_is_the_same(outcomes: Outcomes) -> None:
    assert all(apart < EXACT for apart in outcomes["pickled"])


def test_some_ranks_train_again_after_closing_whatever_other_groups_each_is_in(
    job: Callable[..., Any], tmp_path: Path
) -> None:
    got = job("distribute_again_job.py", tmp_path, ranks=3)
    assert len(got["apart"]) == 3 and all(apart < EXACT for one in got["apart"] for apart in one)
