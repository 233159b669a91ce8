# SPDX-License-Identifier: Apache-2.0
"""The plug-ins for vLLM and verl: trainers and servers that are jobs of their own, on real processes.

Where the packages are installed, their own base classes and factories are used; else stand-ins of ours.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Outcomes = dict[str, list[Any]]
PACKAGES = {"vllm": "vllm.distributed.weight_transfer", "verl": "verl.checkpoint_engine.base"}


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("plugins_job.py", tmp_path_factory.mktemp("plugins"), ranks=4)


def test_a_vllm_worker_gets_its_own_parts_while_it_serves_the_version_before(outcomes: Outcomes) -> None:
    assert outcomes["vllm"][:2] == [2, 2]
    for before, found in outcomes["vllm"][2:]:
        (untouched, direct), *kept = before
        # Trying the loader leaves the model as it was; all but the parameter that the loader turns come straight.
        assert untouched
        assert len(direct) == 14 and "turned.weight" not in direct
        assert {"layers.1.qkv.weight", "layers.1.qkv.bias", "layers.0.gate_up.weight", "lm_head.weight"} < set(direct)
        assert kept == [True, True]
        assert found == [[True, True, ["turned.weight"]]] * 2


def test_verl_gets_all_tensors_in_buckets_and_keeps_a_group_that_is_as_it_was(outcomes: Outcomes) -> None:
    found = outcomes["verl"]
    assert found[2] == [[True, True, True], 2]
    assert found[3] == [[True, True], 1]
    assert [groups for _, groups in found[:2]] == [2, 2]


def test_real_weights_arrive_exactly_in_all_three_ways(outcomes: Outcomes) -> None:
    for systems, fits, slowed in outcomes["run"]:
        names = ["stretto", "send_recv", "gather_broadcast", "stretto"]
        assert systems == [[name, True, 1] for name in names]
        assert fits and slowed


def test_a_rank_comes_that_the_others_did_not_start_with_and_one_leaves(outcomes: Outcomes) -> None:
    sent, first, late, none = (seen for seen, _ in outcomes["elastic"])
    assert sent == [[1, None], [2, None], [3, None]]
    # 0 + 1 + ... + 5 = 15, and one more per element and step.
    assert first == [[1, 15.0], [2, 21.0]]
    assert late == [[2, 21.0], [3, 33.0]]
    assert none == []


def test_checksums_find_a_byte_that_has_changed_and_the_old_version_stays(outcomes: Outcomes) -> None:
    said = [why for _, why in outcomes["elastic"]]
    assert said[1] == said[3] == ""
    # The trainer has no tensors to read, and so the version that it begins with.
    assert said[0] == said[2] == "3 rank 7: 'b' has not arrived as sent, in ((0, 3),)"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_real_package_was_used(outcomes: Outcomes, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: a stand-in of its interface was used")
    assert all(real[package] for real in outcomes["real"])


def test_vllm_finds_the_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["stretto"].partition(":")
    assert callable(getattr(import_module(module), name))
