# SPDX-License-Identifier: Apache-2.0
"""Reads and writes timelines in their versioned file form: JSON with one list per column, exact to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from ..field_errors import explain
from ..files import open_output, read_text, typed
from ..simulator import Timeline

FORMAT = "stretto-timeline"
VERSION = 1
MAX_SPANS = 1 << 22
MAX_RANKS = 1 << 30
"""Limit of rank numbers, so that every trace format has process numbers left for itself."""
MAX_FILE_BYTES = 512 << 20
_LARGEST = 1e15
T = TypeVar("T")

_INDEX_COLUMNS = ("rank", "stream", "name")
_SPAN_COLUMNS = (*_INDEX_COLUMNS, "start_us", "end_us", "nbytes")
_LINK_COLUMNS = ("link_busy_us", "link_bytes")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The file. Columns stay raw until each becomes an array, so that only one column is held as Python numbers."""

    format: str
    version: int
    total_us: float
    facts: list[tuple[str, str]]
    streams: list[str]
    names: list[str]
    link_names: list[str]
    rank: msgspec.Raw
    stream: msgspec.Raw
    name: msgspec.Raw
    start_us: msgspec.Raw
    end_us: msgspec.Raw
    nbytes: msgspec.Raw
    link_busy_us: msgspec.Raw
    link_bytes: msgspec.Raw
    critical_path: msgspec.Raw


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline; `load_timeline` reads the same one back."""
    if timeline.num_spans > MAX_SPANS:
        raise InvalidInput(f"timeline: {timeline.num_spans} spans is more than a file may hold ({MAX_SPANS})")
    with open_output(path) as file:
        head = {"format": FORMAT, "version": VERSION}
        file.write(msgspec.json.encode(head)[:-1])
        for key in _File.__struct_fields__[len(head) :]:
            value = getattr(timeline, key)
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            file.write(f',\n"{key}":'.encode() + msgspec.json.encode(plain))
        file.write(b"}\n")


def load_timeline(path: str | Path) -> Timeline:
    """Read a file that `save_timeline` wrote; raises `InvalidInput` with the name of the bad field if it is damaged."""
    where = str(path)
    text = read_text(path, max_bytes=MAX_FILE_BYTES).encode()
    head = _decode(text, _Head, where)
    if head.format != FORMAT:
        raise InvalidInput(f"{where}: format: expected {FORMAT!r}, not {head.format!r}")
    if head.version != VERSION:
        raise InvalidInput(f"{where}: version: this Stretto reads version {VERSION}, not {head.version}")
    data = _decode(text, _File, where)
    columns: dict[str, NDArray[Any]] = {}
    for key in (*_SPAN_COLUMNS, *_LINK_COLUMNS, "critical_path"):
        whole = key in (*_INDEX_COLUMNS, "critical_path")
        columns[key] = _column(getattr(data, key), whole, f"{where}: {key}")
    timeline = Timeline(
        total_us=data.total_us,
        streams=tuple(data.streams),
        names=tuple(data.names),
        link_names=tuple(data.link_names),
        facts=tuple(data.facts),
        **columns,
    )
    _check(timeline, where)
    return timeline


class _Head(msgspec.Struct):
    format: str
    version: int


def _decode(text: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(text, type=typed(kind))
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{where}: {explain(error)}") from None
    except RecursionError:
        raise InvalidInput(f"{where}: nested too deeply") from None


def _column(raw: msgspec.Raw, whole: bool, where: str) -> NDArray[Any]:
    if whole:
        wide = _decode(bytes(raw), list[int], where)
        if largest := max(map(abs, wide), default=0) >> 31:
            raise InvalidInput(f"{where}: a number of {31 + largest.bit_length()} bits is out of range")
        return np.array(wide, np.int32)
    return np.array(_decode(bytes(raw), list[float], where), np.float64)


def _check(timeline: Timeline, where: str) -> None:
    spans = timeline.num_spans
    if spans > MAX_SPANS:
        raise InvalidInput(f"{where}: {spans} spans is more than the limit of {MAX_SPANS}")
    expected = dict.fromkeys(_SPAN_COLUMNS, spans) | dict.fromkeys(_LINK_COLUMNS, len(timeline.link_names))
    for key, count in expected.items():
        column = getattr(timeline, key)
        if len(column) != count:
            raise InvalidInput(f"{where}: {key}: has {len(column)} entries, not {count}")
    upper = {
        "rank": MAX_RANKS,
        "stream": len(timeline.streams),
        "name": len(timeline.names),
        "critical_path": spans,
    }
    for key, limit in upper.items():
        column = getattr(timeline, key)
        bad = np.flatnonzero((column < 0) | (column >= limit))
        if len(bad):
            raise InvalidInput(f"{where}: {key}[{bad[0]}]: must be 0..{limit - 1}, not {column[bad[0]]}")
    for key in ("start_us", "end_us", "nbytes", *_LINK_COLUMNS):
        column = getattr(timeline, key)
        bad = np.flatnonzero(~((column >= 0) & (column <= _LARGEST)))
        if len(bad):
            raise InvalidInput(f"{where}: {key}[{bad[0]}]: must be 0..{_LARGEST:g}, not {column[bad[0]]:g}")
    bad = np.flatnonzero(timeline.end_us < timeline.start_us)
    if len(bad):
        raise InvalidInput(f"{where}: end_us[{bad[0]}]: ends before it starts")
    if not 0 <= timeline.total_us <= _LARGEST:
        raise InvalidInput(f"{where}: total_us: must be 0..{_LARGEST:g}, not {timeline.total_us:g}")
