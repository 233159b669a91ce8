# SPDX-License-Identifier: Apache-2.0
"""One node of a Chakra trace as plain data, and its attributes read by type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput
from .dag import COMPUTE

MAX_NUMBER = 1 << 59


@dataclass(kw_only=True)
class ChakraNode:
    """A node of one rank's file; `group` is the ranks of its collective, or the sender and the receiver."""

    id: int
    name: str
    type: int
    data: list[int]
    control: list[int]
    duration_us: float
    attr: dict[str, Any]
    where: str
    kind: str = COMPUTE
    group: tuple[int, ...] = ()
    nbytes: int = 0
    tag: int = 0


def required_number(attr: Mapping[str, Any], key: str, where: str) -> int:
    """The attribute `key` as a whole number >= 0.

    Args:
        attr: the attributes of a node or of a file.
        key: name of the attribute.
        where: the place in the file, for errors.

    Returns:
        The number.

    Raises:
        InvalidInput: the attribute is missing, of another type, or out of range.
    """
    value = attr.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
        raise InvalidInput(f"{where}.{key}: must be a whole number >= 0, not {value!r}")
    return value


def optional_number(attr: Mapping[str, Any], key: str, where: str, default: int = 0) -> int:
    """The attribute `key` as a whole number >= 0, or `default` if it is missing.

    Args:
        attr: the attributes of a node or of a file.
        key: name of the attribute.
        where: the place in the file, for errors.
        default: the result for a missing attribute.

    Returns:
        The number.

    Raises:
        InvalidInput: the attribute is of another type or out of range.
    """
    return required_number(attr, key, where) if key in attr else default


def number_or(attr: Mapping[str, Any], key: str, where: str, default: float = 0.0) -> float:
    """The attribute `key` as a number, or `default` if it is missing.

    Args:
        attr: the attributes of a node or of a file.
        key: name of the attribute.
        where: the place in the file, for errors.
        default: the result for a missing attribute.

    Returns:
        The number.

    Raises:
        InvalidInput: the attribute is not a number.
    """
    value = attr.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{where}.{key}: must be a number, not {value!r}")
    return float(value)


def text(attr: Mapping[str, Any], key: str, where: str, default: str = "") -> str:
    """The attribute `key` as text, or `default` if it is missing.

    Args:
        attr: the attributes of a node or of a file.
        key: name of the attribute.
        where: the place in the file, for errors.
        default: the result for a missing attribute.

    Returns:
        The text.

    Raises:
        InvalidInput: the attribute is not text.
    """
    value = attr.get(key, default)
    if not isinstance(value, str):
        raise InvalidInput(f"{where}.{key}: must be text, not {value!r}")
    return value
