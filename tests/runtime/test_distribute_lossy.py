# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.distribute` with encoders and staleness, and in trial mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("distribute_lossy_job.py", tmp_path_factory.mktemp("lossy"), ranks=4)


@pytest.mark.parametrize("builder", ["all_reduce", "ps_balanced"])
@pytest.mark.parametrize("encoder", ["float16", "bfloat16", "powersgd:2", "topk:0.1", "onebit"])
def test_lossy_encoders_still_learn(outcomes: Outcomes, encoder: str, builder: str) -> None:
    whole = outcomes["none all_reduce"]
    for got, want in zip(outcomes[f"{encoder} {builder}"], whole, strict=True):
        assert want < 0.2 and got < 2 * want


@pytest.mark.parametrize("builder", ["all_reduce", "ps_balanced"])
def test_sufficient_factors_lose_nothing(outcomes: Outcomes, builder: str) -> None:
    assert outcomes[f"sufficient_factors {builder}"] == pytest.approx(outcomes["none all_reduce"], rel=1e-4)


def test_staleness_0_is_synchronous(outcomes: Outcomes) -> None:
    synchronous = [share for share, _ in outcomes["stale 0"]]
    assert synchronous == pytest.approx(outcomes["none all_reduce"], rel=1e-4)


@pytest.mark.parametrize("staleness", [1, 3])
def test_nobody_is_further_ahead_than_allowed(outcomes: Outcomes, staleness: int) -> None:
    shares, ahead = zip(*outcomes[f"stale {staleness}"], strict=True)
    assert max(ahead) == staleness
    assert all(share < 0.25 for share in shares)


def test_asynchronous_ranks_do_not_wait(outcomes: Outcomes) -> None:
    shares, ahead = zip(*outcomes["stale -1"], strict=True)
    assert max(ahead) >= 12
    assert all(share < 0.3 for share in shares)


def test_a_trial_leaves_its_time_and_ends(outcomes: Outcomes) -> None:
    codes, result = outcomes["trial"][0]
    assert codes == [86] * 4
    assert result["ranks"] == 2 and result["iterations"] == 5 and result["strategy"] == "all_reduce"
    assert result["iteration_us"] > 0 and result["median_us"] > 0


def test_a_description_has_what_only_a_run_tells(outcomes: Outcomes) -> None:
    described = outcomes["described"][0]
    assert [name for name, *_ in described][:2] == ["users.weight", "items.weight"]
    assert all(timed for *_, timed in described)
    assert all(rows > 0 for name, rows, *_ in described if name in ("users.weight", "items.weight"))
    assert [factors for name, _, factors, _ in described if name == "mlp.0.weight"] == [4]
