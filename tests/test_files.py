"""Plain data from files: what is wrong with a field, and what would have been right."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from stretto.errors import InvalidInput
from stretto.files import convert


class _Inner(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["ring", "tree"] = "ring"
    size: int = 0


class _Outer(msgspec.Struct, forbid_unknown_fields=True):
    stretto: Literal["thing"]
    many: Annotated[list[_Inner | int], Meta(max_length=4)] = []
    named: dict[str, _Inner] = {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"stretto": "plan"}, "f: $.stretto: Invalid enum value 'plan'; choose from: thing"),
        ({"stretto": "thing", "x": 1}, "f: Object contains unknown field `x`; choose from: stretto, many, named"),
        (
            {"stretto": "thing", "many": [3, {"colour": 1}]},
            "f: $.many[1]: Object contains unknown field `colour`; choose from: kind, size",
        ),
        (
            {"stretto": "thing", "named": {"a": {"kind": "star"}}},
            "f: $.named[...].kind: Invalid enum value 'star'; choose from: ring, tree",
        ),
        ({"stretto": "thing", "many": [{"size": "x"}]}, "f: $.many[0].size: Expected `int`, got `str`"),
        (None, "f: Expected `object`, got `null`"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_the_choices(value: object, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        convert(value, _Outer, where="f")
    assert str(refused.value) == said
