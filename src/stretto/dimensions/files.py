# SPDX-License-Identifier: Apache-2.0
"""Schedules in files: versioned JSON, with a digest that says whether two devices have the same one.

.. code-block:: json

    {"stretto": "dimension_schedule", "version": 1, "name": "stretto", "collective": "all_reduce", "nbytes": 1e8,
     "discipline": "johnson", "digest": "5f0c...",
     "dims": [{"kind": "switch", "size": 16, "gb_per_s": 150.0, "step_us": 0.7}, ...],
     "ways": [{"share": 0.02, "reduce_scatter": [0, 1], "all_gather": [1, 0]}, ...],
     "chunks": [0, 0, 1, ...],
     "order": [[[0, 0], [1, 0], ...], ...]}

Chunks name their way by its number; ``order``, where there is one, lists for each dimension [chunk, stage] in turn.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidInput
from ..files import convert, parse_json, plain, read_text, write_file
from .model import MAX_DIMS, Dim
from .schedule import MAX_CHUNKS, DimChunk, DimSchedule

VERSION = 1

Number = Annotated[int, Meta(ge=0, lt=MAX_DIMS)]
Order = Annotated[list[Number], Meta(max_length=MAX_DIMS)]
Turn = tuple[Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)], Annotated[int, Meta(ge=0, lt=2 * MAX_DIMS)]]


class _Dim(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    kind: str
    size: int
    gb_per_s: float
    step_us: float
    in_network: bool = False
    header_bytes: float = 0.0
    packet_bytes: float = 4096.0


class _Way(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    share: float
    reduce_scatter: Order = []
    all_gather: Order = []


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["dimension_schedule"]
    version: int
    name: Annotated[str, Meta(max_length=200)]
    collective: str
    nbytes: float
    discipline: str
    dims: Annotated[list[_Dim], Meta(min_length=1, max_length=MAX_DIMS)]
    ways: Annotated[list[_Way], Meta(min_length=1, max_length=MAX_CHUNKS)]
    chunks: Annotated[list[int], Meta(min_length=1, max_length=MAX_CHUNKS)]
    order: Annotated[list[Annotated[list[Turn], Meta(max_length=2 * MAX_CHUNKS)]], Meta(max_length=MAX_DIMS)] = []
    digest: str


def save(schedule: DimSchedule, path: str | Path) -> None:
    """Write a schedule as versioned JSON, with its digest."""
    data = _plain(schedule)
    data["digest"] = schedule.digest
    write_file(path, msgspec.json.encode(data) + b"\n")


def load(path: str | Path) -> DimSchedule:
    """Read a schedule from its JSON file; `InvalidInput` names the file and the bad field."""
    where = str(path)
    data = convert(parse_json(read_text(path), where=where), _File, where=where)
    if data.version != VERSION:
        raise InvalidInput(f"{where}: version: must be {VERSION}, not {data.version}")
    bad = next((at for at, number in enumerate(data.chunks) if not 0 <= number < len(data.ways)), None)
    if bad is not None:
        raise InvalidInput(f"{where}: chunks[{bad}]: must be 0..{len(data.ways) - 1} (a way), not {data.chunks[bad]}")
    try:
        schedule = DimSchedule(
            name=data.name, collective=data.collective, nbytes=data.nbytes, discipline=data.discipline,
            dims=tuple(Dim(**msgspec.structs.asdict(dim)) for dim in data.dims),
            chunks=tuple(_chunks(data)), order=tuple(tuple(order) for order in data.order),
        )  # fmt: skip
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    if data.digest != schedule.digest:
        raise InvalidInput(f"{where}: digest: {data.digest[:40]} is not that of the content ({schedule.digest})")
    return schedule


def digest(schedule: DimSchedule) -> str:
    """A short hash of everything but the name."""
    data = _plain(schedule)
    del data["name"]
    return hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest()[:16]


def _chunks(data: _File) -> list[DimChunk]:
    ways = [
        DimChunk(share=w.share, reduce_scatter=tuple(w.reduce_scatter), all_gather=tuple(w.all_gather))
        for w in data.ways
    ]
    return [ways[number] for number in data.chunks]


def _plain(schedule: DimSchedule) -> dict[str, Any]:
    ways = {chunk: number for number, chunk in enumerate(dict.fromkeys(schedule.chunks))}
    data = {
        "stretto": "dimension_schedule", "version": VERSION, "name": schedule.name, "collective": schedule.collective,
        "nbytes": float(schedule.nbytes), "discipline": schedule.discipline,
        "dims": [
            _Dim(
                kind=dim.kind, size=dim.size, gb_per_s=float(dim.gb_per_s), step_us=float(dim.step_us),
                in_network=dim.in_network, header_bytes=float(dim.header_bytes), packet_bytes=float(dim.packet_bytes),
            )
            for dim in schedule.dims
        ],
        "ways": [
            _Way(share=float(c.share), reduce_scatter=list(c.reduce_scatter), all_gather=list(c.all_gather))
            for c in ways
        ],
        "chunks": [ways[chunk] for chunk in schedule.chunks],
        "order": schedule.order,
    }  # fmt: skip
    return dict(plain(data, keep_floats=True))
