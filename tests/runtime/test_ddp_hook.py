# SPDX-License-Identifier: Apache-2.0
"""The DDP communication hook under a backend that the user keeps: the same training, through the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stretto.torch
from stretto import InvalidInput
from stretto.runtime.enforcer.ddp_hook import uses_nccl

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("backend_ddp_job.py", tmp_path_factory.mktemp("ddp"), ranks=4)


@pytest.mark.parametrize(("scenario", "tolerance"), [
    ("fractions", 1e-5), ("views", 1e-5), ("static", 1e-5), ("bfloat16", 2e-2),
])  # fmt: skip
def test_training_is_that_of_plain_ddp(outcomes: Outcomes, scenario: str, tolerance: float) -> None:
    for plain, hooked in outcomes[scenario]:
        for want, got in zip(plain, hooked, strict=True):
            largest = max(map(abs, want))
            assert largest > 0
            assert got == pytest.approx(want, rel=0, abs=tolerance * largest)


def test_whole_numbers_are_bit_exact_through_the_rebuild_of_buckets(outcomes: Outcomes) -> None:
    assert all(plain == hooked for plain, hooked in outcomes["exact"])
    assert outcomes["buckets"] == [outcomes["buckets"][0]] * 4 and outcomes["buckets"][0] > 1


def test_ranks_that_run_out_of_batches_still_take_part(outcomes: Outcomes) -> None:
    assert all(plain == hooked for plain, hooked in outcomes["joined"])


def test_the_executor_ran_it_and_the_backend_is_untouched(outcomes: Outcomes) -> None:
    for backends, calls in outcomes["ran"]:
        assert backends == ["executor"] and calls > 40
    assert outcomes["afterwards"] == [["gloo", 4.0]] * 4


def test_a_hook_for_some_ranks(outcomes: Outcomes) -> None:
    assert all(got == want for got, want in outcomes["some"])


def test_members_that_are_in_different_numbers_of_groups_make_a_hook(outcomes: Outcomes) -> None:
    assert [others for others, _, _ in outcomes["numbered"]] == [0, 1, 2, 3]
    assert all(got == want for _, got, want in outcomes["numbered"])


@pytest.mark.parametrize(("carrier", "kind"), [("auto", "ExecutorCarrier"), ("gloo", "GlooCarrier")])
def test_gradients_follow_a_plan(outcomes: Outcomes, carrier: str, kind: str) -> None:
    for plans in outcomes[f"planned on {carrier}"]:
        assert plans == [[True, 1, "", kind]] * 2


@pytest.mark.parametrize(
    ("backends", "called", "uses"),
    [
        ({"cuda": "nccl"}, False, True),
        ({"cpu": "gloo", "cuda": "nccl"}, True, True),
        ({"cpu": "gloo", "cuda": "nccl"}, False, False),
        ({"cpu": "gloo", "cuda": "gloo"}, True, False),
        ({"cpu": "gloo"}, True, False),
    ],
)
def test_a_job_uses_nccl_where_it_has_nothing_else_or_has_called_it(
    backends: dict[str, str], called: bool, uses: bool
) -> None:
    class Backend:
        def __init__(self, name: str) -> None:
            self.name = lambda: name

        def _is_initialized(self) -> bool:
            return called

    class Group:
        _device_types = tuple(torch.device(kind) for kind in backends)

        def _get_backend(self, device: torch.device) -> Backend:
            return Backend(backends[device.type])

    assert uses_nccl(Group()) is uses


def test_a_lost_rank_is_named_in_backward(outcomes: Outcomes) -> None:
    for rank, answer in enumerate(outcomes["lost"]):
        if rank == 2:
            assert answer is None
            continue
        kind, text, _ = answer
        assert kind == "RuntimeError" and "PeerLost: rank 2 is gone" in text


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"DdpHook: call .*init_process_group first"):
        stretto.torch.DdpHook()
    with pytest.raises(InvalidInput, match=r"carrier 'pigeon'.*auto, executor, gloo, nccl"):
        stretto.torch.DdpHook(carrier="pigeon")
