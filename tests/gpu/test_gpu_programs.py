# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPU memory, run as programs: run with ``make test-gpu``, on a machine that has a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]
RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_every_collective_dtype_and_reduction_is_right(launch: Launch, ranks: int) -> None:
    # Every type and operation is a kernel to compile: all of them once, then the first types.
    for told in launch(ranks, "every_kind", "10" if ranks == 2 else "3"):
        assert told["wrong"] == [] and told["gpu"] > 150 and told["held"] > 0


@RANKS
def test_random_collectives_in_groups_and_on_streams_are_right(launch: Launch, ranks: int) -> None:
    for told in launch(ranks, "random", "300", "1", "20", "3"):
        assert told["wrong"] == []
        assert {backend for op, backend, count in told["ran"]} == {"gpu"} if ranks == 4 else True


@RANKS
def test_what_programs_cannot_do_goes_to_nccl_and_says_why(launch: Launch, ranks: int) -> None:
    for told in launch(ranks, "delegated"):
        assert told["splits"] and ["all_to_all", "an all-to-all with splits"] in told["why"]


@RANKS
def test_works_futures_and_streams_are_as_under_nccl(launch: Launch, ranks: int) -> None:
    for told in launch(ranks, "streams"):
        flags = {
            key: told[key]
            for key in ("busy", "host_went_on", "right", "future", "many", "coalesced", "kept", "eighths")
        }
        assert all(flags.values()), flags
        assert told["spans"] == ["all_reduce direct"] and told["durations_us"][0] > 0
        assert "program direct on GPU memory" in told["choice"]


@RANKS
def test_symmetric_memory_is_used_in_place_and_different_places_are_a_mismatch(launch: Launch, ranks: int) -> None:
    for told in launch(ranks, "symmetric"):
        assert told["right"] == [True] * 12
        assert told["said"].startswith("ProgramMismatch: ") and "in memory 0+0 to 0+0" in told["said"], told


@RANKS
def test_graphs_capture_and_replay_collectives(launch: Launch, ranks: int) -> None:
    for told in launch(ranks, "graphs"):
        assert told["right"] == [True] * 6


@RANKS
def test_models_have_the_same_bits_on_all_ranks_and_in_every_run(
    launch: Launch, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = launch(ranks, "training"), launch(ranks, "training")
    monkeypatch.setenv("STRETTO_GPU", "off")
    nccl = launch(ranks, "training")
    for told, second, plain in zip(first, again, nccl, strict=True):
        ran = {tuple(one) for one in told["backends"]}
        assert told["dtensor"] and {("all_reduce", "gpu"), ("all_gather", "gpu"), ("reduce_scatter", "gpu")} <= ran
        for how in ("ddp", "fsdp"):
            assert told[how] == second[how], "run to run"
            assert told[how]["weights"] == first[0][how]["weights"], "rank to rank"
            assert told[how]["losses"] == pytest.approx(plain[how]["losses"], rel=1e-4)


@pytest.mark.parametrize(("how", "kind"), [("exit", "PeerLost"), ("stop", "PeerLost"), ("mismatch", "ProgramMismatch")])
def test_a_rank_that_goes_wrong_ends_the_others_and_leaves_their_gpu_usable(
    launch: Launch, how: str, kind: str
) -> None:
    lost = () if how == "mismatch" else (1,)
    for told in launch(2, "fault", how, lost=lost):
        assert told["said"].startswith(f"{kind}: ") and "rank 1" in told["said"], told
        assert told["gpu_works"] and told["took_s"] < 30
