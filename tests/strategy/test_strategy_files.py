# SPDX-License-Identifier: Apache-2.0
"""Strategies and models in files come back as they were, and bad files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import InvalidInput
from stretto.strategy import (
    BUILDERS,
    Strategy,
    build,
    load_model,
    load_strategy,
    save_model,
    save_strategy,
    zoo,
)
from stretto.strategy.files import read_model, read_strategy, strategy_text

MODEL = zoo.model("bert_large_sparse", scale=0.05)
DEVICES = [f"h{host}.gpu{gpu}" for host in range(2) for gpu in range(2)]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_strategy_comes_back_as_it_was(name: str, suffix: str, tmp_path: Path) -> None:
    made = build(name, MODEL, DEVICES)
    save_strategy(made, tmp_path / f"s.{suffix}")
    assert load_strategy(tmp_path / f"s.{suffix}") == made


def test_encoders_uneven_parts_sequences_and_staleness_come_back(tmp_path: Path) -> None:
    text = """
stretto: strategy
version: 1
name: by hand
model: m
model_digest: '0'
devices: [a, b]
notes: [written by hand]
nodes:
- {variable: u, sync: {encoder: 'topk:0.01', sequence: [b, a]}}
- variable: w
  partition: [[3, 1], 1]
  parts:
  - {kind: parameter_server, placement: [b], encoder: float16, staleness: 2}
  - {group: 4}
"""
    made = read_strategy(text)
    assert made.node("w").partition == ((3, 1), 1)
    assert made.node("w").parts[0].staleness == 2
    assert made.node("u").sync.encoding == ("topk", 0.01)
    save_strategy(made, tmp_path / "s.yaml")
    assert load_strategy(tmp_path / "s.yaml") == made


def test_a_model_comes_back_as_it_was(tmp_path: Path) -> None:
    for suffix in ("yaml", "json"):
        save_model(MODEL, tmp_path / f"m.{suffix}")
        assert load_model(tmp_path / f"m.{suffix}") == MODEL


HEAD = "stretto: strategy\nversion: 1\nname: s\nmodel: m\nmodel_digest: d\ndevices: [a]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "nodes:\n- {variable: v, sink: {}}\n", "sink"),
        (HEAD + "nodes:\n- {variable: v, sync: {kind: magic}}\n", "choose from: all_reduce"),
        (HEAD + "nodes:\n- {variable: v, sync: {kind: parameter_server, placement: [z]}}\n", "unknown device 'z'"),
        (HEAD + "nodes:\n- {variable: v, sync: {group: x}}\n", "group"),
        (HEAD.replace("version: 1", "version: 9") + "nodes: []\n", "version"),
        (HEAD.replace("strategy\n", "workload\n", 1) + "nodes: []\n", "stretto"),
        ("nodes: &a [*a]", "aliases"),
        ("[1, 2]", "must be a mapping"),
    ],
)
def test_bad_files_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_strategy(text, where="file")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_models_are_refused() -> None:
    head = "stretto: model\nversion: 1\nname: m\nvariables:\n"
    with pytest.raises(InvalidInput, match="shape: sizes must be > 0"):
        read_model(head + "- {name: w, shape: [0, 4]}\n")
    with pytest.raises(InvalidInput, match="choose from: float16"):
        read_model(head + "- {name: w, shape: [4], dtype: int3}\n")
    with pytest.raises(InvalidInput, match="forward_us"):
        read_model(head + "- {name: w, shape: [4], forward_us: -1}\n")


def test_a_strategy_for_another_model_says_so() -> None:
    made: Strategy = build("all_reduce", MODEL, 2)
    with pytest.raises(InvalidInput, match=r"was made for bert_large_sparse@0\.05, not for vgg16@0\.05"):
        made.check(zoo.model("vgg16", scale=0.05))
    with pytest.raises(InvalidInput, match="shapes differ"):
        made.check(zoo.model("bert_large_sparse", scale=0.06))


def test_the_file_has_one_line_per_variable() -> None:
    text = strategy_text(build("partitioned_ps", MODEL, DEVICES, part_mb=0.001))
    assert len(text.splitlines()) < len(MODEL.variables) + 12
