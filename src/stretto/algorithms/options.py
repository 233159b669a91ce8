# SPDX-License-Identifier: Apache-2.0
"""Options of an algorithm as a person or a command line gives them, checked against the builder's signature."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInput


def checked(build: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the types that the builder's annotations ask for; lists may be given as text or as one number.

    >>> from .hierarchical import hierarchical
    >>> checked(hierarchical, {"dims": "8x2", "inside": "ring,direct"})
    {'dims': (8, 2), 'inside': ('ring', 'direct')}
    """
    parameters = inspect.signature(build).parameters
    return {name: _read(name, str(parameters[name].annotation), value) for name, value in options.items()}


def _read(name: str, wanted: str, value: Any) -> Any:
    if value is None or "str" in wanted:
        return tuple(value.split(",")) if "Sequence" in wanted and isinstance(value, str) and "," in value else value
    rules: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("tuple[int, int]", "pairs of ranks such as [(0, 1)]", lambda v: [(_whole(a), _whole(b)) for a, b in v]),
        ("float", "rows of numbers", lambda v: [[float(x) for x in row] for row in v]),
        ("Sequence", "whole numbers such as 4,2", _list),
        ("int", "a whole number", _whole),
    ]
    words, rule = next((words, rule) for mark, words, rule in rules if mark in wanted)
    try:
        return rule(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name}: must be {words}, not {value!r}") from None


def _whole(value: Any) -> int:
    if isinstance(value, (bool, str)):
        raise TypeError
    return operator.index(value)


def _list(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(int(part) for part in re.split("[,x]", value))
    if isinstance(value, int):
        return (_whole(value),)
    return tuple(_list(item) if hasattr(item, "__len__") else _whole(item) for item in value)
