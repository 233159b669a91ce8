# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.reshard`: DTensors between meshes of real processes, bit for bit as PyTorch cuts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]
MOVED = [
    "disjoint", "overlapping", "same mesh", "other shape", "uneven", "empty tiles", "copies", "one to all",
    "nested cuts", "nothing to move", "booleans", "complex", "no elements", "no dimensions", "larger", "sum",
    "sum on one mesh", "sum of cut parts", "average", "maximum", "asynchronous", "without_tensor", "planned_once",
    "many_calls",
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("reshard_job.py", tmp_path_factory.mktemp("reshard"), ranks=6)


@pytest.mark.parametrize("case", MOVED)
def test_every_rank_has_what_pytorch_would_have_cut(outcomes: Outcomes, case: str) -> None:
    for rank, by_layout in enumerate(outcomes[case]):
        for layout, checks in by_layout.items():
            assert checks and all(checks), (rank, layout, checks)


def test_some_cases_also_run_by_messages_and_between_hosts(outcomes: Outcomes) -> None:
    layouts = [set(outcomes[case][0]) for case in MOVED]
    assert sum("messages" in names for names in layouts) == 7
    assert sum("hosts" in names for names in layouts) == 6


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("permuted", "mesh [1, 0, 2, 3, 4, 5] is permuted: ranks must rise along every axis"),
        ("dimension", "S(2) of a tensor with 2 dimensions"),
        ("count", "placements must be one for each of the mesh's 1 axes"),
        ("partial", "choose Shard or Replicate"),
        ("plain", "tensor: must be a DTensor"),
        ("mesh", "mesh must be a DeviceMesh, not list"),
        ("undescribed", "dtype, src_mesh, src_placements: must be given"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(outcomes: Outcomes, what: str, words: str) -> None:
    for by_layout in outcomes["wrong"]:
        kind, text = by_layout["gloo"][what]
        assert kind == "InvalidInput"
        assert words in text and "\n" not in text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bad", ("S(7) of a tensor with 2 dimensions",)),
        ("placements", ("as S(1)", "as R")),
        ("shape", ("(9, 8) float32", "(8, 8) float32")),
    ],
)
def test_one_rank_that_differs_is_told_to_all_and_the_next_call_works(
    outcomes: Outcomes, what: str, words: tuple[str, ...]
) -> None:
    for by_layout in outcomes["one_is_wrong"]:
        kind, text = by_layout["gloo"][what]
        assert kind == "InvalidInput"
        assert all(word in text for word in words)
        assert by_layout["gloo"]["then"] == ["fine", ""]


def test_ranks_that_mean_different_meshes_do_not_wait_for_each_other(outcomes: Outcomes) -> None:
    for by_layout in outcomes["meshes_differ"][:4]:
        kind, text = by_layout["gloo"]
        assert kind == "InvalidInput"
        assert "they wait for each other" in text
