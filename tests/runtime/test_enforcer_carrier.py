# SPDX-License-Identifier: Apache-2.0
"""A carrier that somebody else has written runs a plan as ours do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.errors import InvalidInput
from stretto.runtime.enforcer.carriers import imported

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("enforcer_carrier_job.py", tmp_path_factory.mktemp("carrier"), ranks=2)


def test_a_carrier_written_from_the_documentation_runs_a_plan(outcomes: Outcomes) -> None:
    for own, executor, gloo in zip(outcomes["own"], outcomes["executor"], outcomes["gloo"], strict=True):
        assert (own["number"], own["fell_back"]) == (1, "")
        assert own["found"] == executor["found"] == gloo["found"]
        moved = [["all_reduce.0", 0], ["all_reduce.0", 1], ["all_reduce.1", 0]]
        assert own["motifs"] == moved, "the maximum is not for it, and keeps its place in the order"
        assert executor["motifs"] == [*moved, ["all_reduce.2", 0]]


def test_what_it_cannot_carry_out_it_refuses_when_the_plan_is_prepared(outcomes: Outcomes) -> None:
    assert all("only all-reduces go through the store" in said for said in outcomes["no"])


@pytest.mark.parametrize("name", ["no_such_module:Carrier", "stretto.torch:NoSuchCarrier", ":Carrier"])
def test_a_name_that_python_cannot_import_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"carrier '.*': .*; it must be MODULE:CLASS"):
        imported(name)
