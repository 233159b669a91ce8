# SPDX-License-Identifier: Apache-2.0
"""The process group `stretto` beside gloo: every collective, on four real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("collectives")


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], folder: Path) -> Outcomes:
    return job("backend_collectives_job.py", folder, ranks=4)


@pytest.mark.parametrize(
    "scenario",
    [
        "all_reduces", "sizes", "odd_tensors", "lists_and_splits", "coalesced", "overlapped", "subgroups",
        "point_to_point", "functionals",
    ],
)  # fmt: skip
def test_whole_numbers_are_bit_for_bit_what_gloo_gives(outcomes: Outcomes, scenario: str) -> None:
    for rank, (gloo, one_host, two_hosts) in enumerate(outcomes[scenario]):
        assert one_host == gloo, f"rank {rank} on one host"
        assert two_hosts == gloo, f"rank {rank} on two hosts"


def test_what_gloo_refuses_is_refused(outcomes: Outcomes) -> None:
    gloo, ours, _ = outcomes["all_reduces"][0]
    refused = {key for key, outcome in ours.items() if outcome == "RuntimeError"}
    assert "torch.float32 BAND" in refused
    assert "torch.int32 BAND" not in refused
    assert len(gloo) == len(ours) == 8 * 7


def test_fractions_are_the_same_on_all_ranks_and_in_every_run(outcomes: Outcomes) -> None:
    for layout in (1, 2):
        assert len({run for rank in outcomes["floats"] for run in rank[layout]}) == 1


def test_averages_are_taken_though_gloo_has_none(outcomes: Outcomes) -> None:
    assert outcomes["averages"] == [[None, True, True]] * 4


def test_a_recording_shows_every_call_with_its_program_and_bytes(outcomes: Outcomes) -> None:
    for rank, (_, told, _) in enumerate(outcomes["told"]):
        assert told["names"] == ["all_reduce direct", "all_gather direct"]
        assert told["nbytes"] == [20_000, 1600]
        assert told["rank"] == [rank, rank]
        assert told["ordered"]
        assert told["trace"] > 100


def test_the_latest_choice_and_all_choices_can_be_asked_for(outcomes: Outcomes) -> None:
    for _, told, _ in outcomes["told"]:
        assert told["last"] == ["all_gather", 1600, "float32", "direct", "executor", "all ranks on one host"]
        assert told["calls"] == 2
        assert told["text"].startswith("all_reduce sum of 20000 bytes float32 in group 0: program direct on the exec")


def test_ranks_on_two_hosts_choose_the_same_program_by_simulation(outcomes: Outcomes) -> None:
    (last,) = {tuple(told["last"]) for _, _, told in outcomes["told"]}
    assert last[3] != "direct"
    assert "4 ranks on 2 hosts" in last[5]


def test_each_reason_to_delegate_is_logged_once(outcomes: Outcomes, folder: Path) -> None:
    lines = [line for line in (folder / "log-0").read_text().splitlines() if ":stretto.torch:" in line]
    assert len(lines) == len(set(lines))
    assert any("all_reduce goes to gloo: no band of torch.float32" in line for line in lines)
    assert not any("all_to_all goes" in line for line in lines), "neither empty ones nor those with splits"
    assert any("send goes to gloo" in line for line in lines)
