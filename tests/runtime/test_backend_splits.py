# SPDX-License-Identifier: Apache-2.0
"""All-to-alls with splits run on the executor: random sizes beside gloo, errors that name both ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("splits")
    return job("backend_splits_job.py", folder, ranks=4)


@pytest.mark.parametrize("scenario", ["generated", "several_under_way", "forms", "mixed"])
def test_pieces_of_any_sizes_arrive_bit_for_bit_as_with_gloo(outcomes: Outcomes, scenario: str) -> None:
    for rank, (gloo, one_host, two_hosts) in enumerate(outcomes[scenario]):
        assert one_host == gloo, f"rank {rank} on one host"
        assert two_hosts == gloo, f"rank {rank} on two hosts"


def test_splits_that_do_not_fit_raise_what_torch_raises(outcomes: Outcomes) -> None:
    for gloo, one_host, two_hosts in outcomes["refused"]:
        assert len(gloo) == 3
        assert gloo == one_host == two_hosts


def test_a_pair_that_counts_on_different_sizes_is_named_on_every_rank(outcomes: Outcomes) -> None:
    for _, *ours in outcomes["wrong_pairs"]:
        for told in ours:
            assert len(told) == 8
            for message in told:
                assert message.startswith("ProgramMismatch: all_to_all_v")
                assert ": rank 0 sends " in message
                assert " bytes to rank 3, which expects " in message
