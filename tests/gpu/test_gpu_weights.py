# SPDX-License-Identifier: Apache-2.0
"""Weights and reshardings of CUDA tensors between ranks on one GPU or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

JOB = "weights_job.py"
Launch = Callable[..., list[Any]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_generated_state_dicts_and_tensors_arrive_bit_for_bit(launch: Launch, ranks: int) -> None:
    names = ["generated", "resharded", "overlapped", "churned", "deltas", "mapped"]
    for told in launch(ranks, "cuda", str(ranks), "2", *names, job=JOB):
        assert [told[name]["wrong"] for name in names] == [[]] * 6
        assert told["generated"]["routes"] in (["pull"], ["gpu"])  # On one GPU, and on several.


def test_the_same_through_pinned_memory(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_GPU", "off")
    for told in launch(4, "cuda", "4", "3", "generated", "overlapped", "churned", job=JOB):
        assert told["generated"]["wrong"] == told["overlapped"]["wrong"] == told["churned"]["wrong"] == []
        assert told["generated"]["routes"] == ["pinned"]


def test_a_trainer_that_dies_leaves_servers_on_the_version_before(launch: Launch) -> None:
    for told in launch(4, "cuda", "4", "1", "dies", lost=[0], job=JOB):
        assert told["dies"]["kept"] and told["dies"]["said"].startswith("PeerLost")
