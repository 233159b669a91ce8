# SPDX-License-Identifier: Apache-2.0
"""The range of PyTorch versions, and what is bridged between them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist

from stretto.errors import InvalidInput
from stretto.runtime.torch_backend import torch_versions
from stretto.runtime.torch_backend.backend import StrettoGroup

ROOT = Path(__file__).parents[2]


def test_the_package_asks_for_the_range_that_the_code_accepts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest, below) = torch_versions.OLDEST, (2, torch_versions.NEWEST[1] + 1)
    assert project["optional-dependencies"]["torch"] == [f"torch>={oldest[0]}.{oldest[1]},<{below[0]}.{below[1]}"]


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cpu", "2.11.0+cu130", "2.15.1", "2.15.0a0+gitabc"])
def test_versions_of_the_range_are_taken(version: str) -> None:
    torch_versions.check_version(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.7.1+cpu", "2.16.0", "2.16.0a0+gitabc", "3.0.0"])
def test_other_versions_are_refused_in_one_line(version: str) -> None:
    with pytest.raises(InvalidInput, match=r"torch: is .*, but must be one of 2\.8 to 2\.15") as raised:
        torch_versions.check_version(version)
    assert "\n" not in str(raised.value)


def test_importing_the_backend_refuses_another_version() -> None:
    code = "import torch; torch.__version__ = '2.7.1'; import stretto.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("stretto.errors.InvalidInput: torch: is 2.7.1, but must be")


def test_our_groups_have_their_methods_under_all_names() -> None:
    for newest, oldest in torch_versions._GROUP_METHODS.items():
        assert getattr(StrettoGroup, newest) is getattr(StrettoGroup, oldest)
        assert hasattr(dist.ProcessGroup, torch_versions.group_method(newest))


def test_ranks_keep_their_order_where_they_are_sorted() -> None:
    ranks = [5, 0, 3, 1]
    placed = sorted(torch_versions._RankAtPlace(rank, place) for place, rank in enumerate(reversed(ranks)))
    assert placed == ranks[::-1]
    assert [str(rank) for rank in placed] == ["1", "3", "0", "5"]
    assert all(0 <= rank < 8 and not rank < 0 for rank in placed) and {3: 7}[placed[1]] == 7


def test_a_rank_with_a_place_is_a_plain_number_in_another_process() -> None:
    copy = pickle.loads(pickle.dumps(torch_versions._RankAtPlace(5, 2)))
    assert copy == 5 and type(copy) is int
