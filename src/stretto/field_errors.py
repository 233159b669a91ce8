# SPDX-License-Identifier: Apache-2.0
"""What msgspec refuses, in words for people: where the field is, what it must be, and what it is."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_MAX_SHOWN = 60
_UNKNOWN = object()


def explain(error: msgspec.DecodeError, kind: Any = None, value: Any = _UNKNOWN) -> str:
    """What is wrong with plain data that msgspec refused.

    >>> refused = msgspec.ValidationError("Expected `int` >= 1, got `str` - at `$.sizes[0]`")
    >>> explain(refused), explain(refused, value={"sizes": ["few"]})
    ('$.sizes[0]: must be a whole number >= 1, not text', "$.sizes[0]: must be a whole number >= 1, not 'few'")

    Args:
        error: What msgspec raised.
        kind: The type that was asked for, to name the choices.
        value: The data that was refused, to show the part of it that is wrong.

    Returns:
        The path of the field (none for the whole data) and a sentence.
    """
    message, _, place = str(error).rpartition(" - at ")
    message, is_key = message or place, place.startswith("`key` in")
    path = place.removeprefix("`key` in ").strip("`") if message != place else ""
    found = _UNKNOWN if is_key or value is _UNKNOWN else _look_up(value, path)
    said = _in_words(message, found) + ("" if kind is None else _choices(message, kind, path))
    return f"{path}: {'a key ' if is_key else ''}{said}" if path else said


def _in_words(message: str, found: Any) -> str:
    """A sentence for the common messages of msgspec; others stay as they are."""
    if field := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", message, re.DOTALL):
        return f"the field {field[2]!r} is missing" if "missing" in field[1] else f"unknown field {field[2]!r}"
    if message.startswith("Invalid enum value "):
        return message.replace("Invalid enum value", "unknown value", 1)
    wrong = re.fullmatch(r"Expected `([\w| ]+)`(.*?)(?:, got `?(\w+)`?)?", message, re.DOTALL)
    if wrong is None or not set(wrong[1].split(" | ")) <= set(_KINDS):
        return message
    wanted = " or ".join(_KINDS[one] for one in wrong[1].split(" | "))
    got = _shown(found) or _KINDS.get(wrong[3] or "", wrong[3] or "")
    return f"must be {wanted}{wrong[2]}{f', not {got}' if got else ''}"


def _shown(found: Any) -> str:
    """A number or a short text as it was given; nothing for what would fill the line."""
    if found is not None and not isinstance(found, str | int | float):
        return ""
    if isinstance(found, int) and abs(found) >= 1 << 128:
        return ""
    text = "null" if found is None else str(found).lower() if isinstance(found, bool) else repr(found)
    return text if len(text) <= _MAX_SHOWN else ""


def _look_up(value: Any, path: str) -> Any:
    """The part of plain data at a path such as ``$.nodes[0].sync``; nothing where the path does not say which."""
    for name, index in re.findall(r"\.(\w+)|\[([^]]*)\]", path):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list | tuple) and index.isdigit() and int(index) < len(value):
            value = value[int(index)]
        else:
            return _UNKNOWN
    return value


def _choices(message: str, kind: Any, path: str) -> str:
    """The valid names at a path (``$.nodes[0].sync``), which msgspec's message leaves out; empty where it has none."""
    found = _plain(inspect.type_info(kind))
    for name in re.findall(r"\.(\w+)|\[[^]]*\]", path):
        found = [inner for one in found for inner in _inside(one, name)]
    known: list[object] = []
    if "unknown field" in message:
        known = [field.encode_name for one in found if isinstance(one, inspect.StructType) for field in one.fields]
    elif "Invalid enum value" in message:
        known = [value for one in found if isinstance(one, inspect.LiteralType) for value in one.values]
    return f"; choose from: {', '.join(map(str, known))}" if known else ""


def _plain(kind: inspect.Type) -> list[inspect.Type]:
    """A type without its metadata, as a list: a union gives each of its members."""
    if isinstance(kind, inspect.Metadata):
        return _plain(kind.type)
    return [inner for one in kind.types for inner in _plain(one)] if isinstance(kind, inspect.UnionType) else [kind]


def _inside(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """The types that the field called `name` may hold; with an empty name, the types of the elements."""
    if isinstance(kind, inspect.StructType):
        return [inner for field in kind.fields if field.encode_name == name for inner in _plain(field.type)]
    if isinstance(kind, inspect.ListType | inspect.VarTupleType) and not name:
        return _plain(kind.item_type)
    return _plain(kind.value_type) if isinstance(kind, inspect.DictType) else []
