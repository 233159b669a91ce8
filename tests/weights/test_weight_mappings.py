# SPDX-License-Identifier: Apache-2.0
"""Mapping files: what they say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto import InvalidInput
from stretto.weights import WeightMapping

HEAD = {"version": 1, "kind": "weight_mapping"}
QKV = {"to": "l.{n}.qkv", "from": ["l.{n}.q", "l.{n}.k", "l.{n}.v"], "concat": 0, "sizes": [2, 1, 1]}


def test_names_are_resolved_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "mapping.yaml"
    path.write_text(
        "version: 1\nkind: weight_mapping\nignore: ['*.inv_freq']\nrules:\n"
        "- {to: 'l.{n}.experts', from: 'model.{n}.e.{e}.w', stack: true}\n"
        "- {to: 'l.{n}.w', from: 'model.{n}.w', scale: 'l.{n}.w_scale'}\n"
    )
    mapping = WeightMapping.load(path)
    made = mapping.resolve({"l.11.experts": (3, 4, 5), "l.2.w": (8, 8), "l.2.w_scale": (1, 1), "norm": (4,)})
    assert {one.to: one.sources for one in made} == {
        "l.11.experts": ("model.11.e.0.w", "model.11.e.1.w", "model.11.e.2.w"),
        "l.2.w": ("model.2.w",), "norm": ("norm",),
    }  # fmt: skip
    assert mapping.wanted(["a.inv_freq", "b"]) == ["b"]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{**QKV, "sizes": [2, 1]}], "sizes: must be one size or ratio"),
        ([{**QKV, "concat": None}], "concat: several sources need a dimension"),
        ([{"to": "a", "from": "b", "stack": True}], "stack: needs sources with"),
        ([{"to": "a", "from": "b.{e}"}], "stack: needs sources with"),
        ([{"to": "a", "from": "b", "rows": 0}], "rows: must be >= 1"),
        ([{"to": "a.{e}", "from": "b"}], "stands in sources alone"),
        ([{"to": "a", "from": "b", "tranpose": True}], "tranpose"),
        ([{"to": "a"}], "from"),
    ],
)
def test_wrong_rules_are_named(rules: list[Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        WeightMapping.parse({**HEAD, "rules": rules})


@pytest.mark.parametrize(
    ("rules", "targets", "said"),
    [
        ([QKV, {"to": "l.1.qkv", "from": "x"}], {"l.1.qkv": (8, 8)}, "two rules make it"),
        ([{"to": "l.{n}", "from": "x.{m}"}], {"l.1": (8,)}, "does not stand in the server's name"),
        ([{"to": "a", "from": "b", "transpose": True}], {"a": (8,)}, "cannot make"),
        ([{"to": "a", "from": "b", "scale": "c"}], {"a": (8, 8)}, "the server has no such tensor"),
        ([{"to": "a", "from": "b.{e}", "stack": True}], {"a": ()}, "a stack has"),
    ],
)
def test_targets_that_do_not_fit_are_named(rules: list[Any], targets: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        WeightMapping.parse({**HEAD, "rules": rules}).resolve(targets)
    with pytest.raises(InvalidInput, match="no rule makes it"):
        WeightMapping(same=False).resolve({"a": (1,)})
