# SPDX-License-Identifier: Apache-2.0
"""Strategies in words, and what differs between two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.errors import InvalidInput
from stretto.strategy import BUILDERS, build, diff, explain, zoo

MODEL = zoo.model("ncf_sparse", scale=0.02)


def test_a_strategy_does_not_differ_from_itself() -> None:
    for name in BUILDERS:
        made = build(name, MODEL, 4)
        assert diff(made, made) == []


def test_each_changed_decision_is_named() -> None:
    before = build("all_reduce", MODEL, 4)
    node = before.nodes[-1]
    changed = replace(node, sync=replace(node.sync, kind="sharded", group=7))
    found = diff(before, replace(before, nodes=(*before.nodes[:-1], changed)))
    assert [(c.variable, c.part, c.what, c.before, c.after) for c in found] == [
        ("predict.bias", -1, "kind", "all_reduce", "sharded"),
        ("predict.bias", -1, "group", "0", "7"),
    ]


def test_a_cut_is_a_change_of_its_own() -> None:
    whole, cut = build("ps_balanced", MODEL, 4), build("partitioned_ps", MODEL, 4, part_mb=0.01)
    found = diff(whole, cut)
    tables = {c.variable for c in found if c.what == "partition"}
    assert {"factor.users.weight", "tower.items.weight"} <= tables
    assert any(c.after == "4 parameter_server" for c in found if c.what == "parts")


def test_other_models_cannot_be_compared() -> None:
    with pytest.raises(InvalidInput, match=r"is for ncf_sparse@0\.02"):
        diff(build("ps", MODEL, 2), build("ps", zoo.model("vgg16", scale=0.05), 2))


def test_words_say_every_aspect() -> None:
    made = build("parallax", MODEL, 4, encoder="bfloat16", staleness=3, part_mb=0.001)
    said = explain(made, MODEL)
    for words in ("rows to 4 servers", "all-reduce with group 0", "encoded as bfloat16", "up to 3 steps stale",
                  "cut 4 along axis 0", "not exact"):  # fmt: skip
        assert words in said
    assert "reduce-scatter" in explain(build("zero1", MODEL, 4), MODEL)
    with pytest.raises(InvalidInput, match="unknown variable"):
        explain(made, MODEL, variable="nothing")
