# SPDX-License-Identifier: Apache-2.0
"""Communicators of destroyed groups are used again, where all their ranks can say that they have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.errors import PlanMismatch
from stretto.runtime.torch_backend.meeting import Card, agree, card

Outcomes = dict[str, list[Any]]
TIMES = 3


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_reuse_job.py", tmp_path_factory.mktemp("reuse"), ranks=3)


def test_the_same_ranks_need_one_communicator_however_often(outcomes: Outcomes) -> None:
    assert outcomes["same_ranks"] == [*[[[3.0, "executor", 2]] * TIMES] * 2, [[3.0, "executor", 1]] * TIMES]


def test_more_ranks_take_over_what_a_part_of_them_had(outcomes: Outcomes) -> None:
    assert outcomes["more_ranks"] == [[[6.0, "executor", 2]] * TIMES] * 3


def test_ranks_that_cannot_ask_a_former_one_take_another(outcomes: Outcomes) -> None:
    assert outcomes["other_ranks"][1:] == [[[5.0, "executor", 3]] * TIMES] * 2


def test_nothing_of_a_job_that_was_left_stays_behind(outcomes: Outcomes) -> None:
    for jobs in outcomes["whole_jobs"]:
        assert [groups for groups, _ in jobs] == [0] * TIMES
        opened = [descriptors for _, descriptors in jobs]
        assert min(opened) > 1100
        assert opened[1] == opened[-1]


def cards(*taken: int) -> list[Card]:
    return [card(rank, executor="", rules="", taken=t, generation=rank) for rank, t in enumerate(taken)]


def test_the_least_number_that_is_free_everywhere_is_agreed() -> None:
    assert agree(cards(0, 0)) == (0, 2)
    assert agree(cards(0b1011, 0b1, 0b10001)) == (2, 3)
    assert agree(cards(2**300 - 1)) == (300, 1)


def test_a_card_that_cannot_be_read_is_named() -> None:
    odd = Card(rank=3, host="", pid=1, space="", executor="", rules="", token="", taken="-x", generation=0)
    with pytest.raises(PlanMismatch, match="rank 3"):
        agree([odd])
