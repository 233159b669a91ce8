# SPDX-License-Identifier: Apache-2.0
"""Collectives in files: the chunks that every rank has, and those that it must get, in versioned YAML or JSON.

.. code-block:: yaml

    stretto: collective
    version: 1
    kind: custom
    ranks: 3                      # a count, or the devices that take part
    num_chunks: 4
    sizes: [2, 1, 1, 1]           # any unit; equal when left out
    start:                        # one row per rank: its input buffer, in order
    - [0, 1]                      # rank 0 has its part of chunks 0 and 1
    - [0, 2..3]                   # runs may be written so
    - [{chunks: 3, part: 1}]      # a part that is not the rank's own number
    end:                          # one row per rank: its output buffer, in order
    - [0..3]                      # all parts of every chunk
    - []
    - [{chunks: 0, parts: [1]}]   # only these parts
    helpers: [3, 4]               # devices outside the group that may forward and add; none when left out
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import yaml
from msgspec import Meta
from numpy.typing import NDArray

from ..errors import InvalidInput
from ..files import convert, naming_lines, parse_text, plain, read_text, write_file, yaml_text
from . import library
from .conditions import ALL_PARTS, MAX_RANKS, Collective, as_ranks

VERSION = 1
MAX_FILE_BYTES = 32 << 20
"""YAML takes many seconds per megabyte to read; the same structure as JSON does not."""
MAX_FILE_ENTRIES = 1 << 24
MAX_FILE_CHUNKS = 1 << 22

Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Chunks = Count | Annotated[str, Meta(max_length=32)]


class _Start(msgspec.Struct, forbid_unknown_fields=True):
    chunks: Chunks
    part: Count


class _End(msgspec.Struct, forbid_unknown_fields=True):
    chunks: Chunks
    parts: list[Count]


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["collective"]
    version: int
    kind: Annotated[str, Meta(min_length=1, max_length=200)] = "custom"
    ranks: int | list[Count]
    num_chunks: Annotated[int, Meta(ge=1, le=MAX_FILE_CHUNKS)]
    chunks_per_shard: Annotated[int, Meta(ge=1, le=MAX_FILE_CHUNKS)] | None = None
    root: Annotated[int, Meta(ge=0, le=MAX_RANKS)] | None = None
    in_place: bool = False
    helpers: list[Count] = []
    place: list[Annotated[int, Meta(ge=-(1 << 40), le=1 << 40)]] | None = None
    sizes: list[float] | None = None
    share: float | list[float] | None = None
    start: list[list[Chunks | _Start]]
    end: list[list[Chunks | _End]]


def load_collective(path: str | Path) -> Collective:
    """Read a collective from a YAML or JSON file of the form above; `InvalidInput` names the file and the bad field."""
    text = read_text(path, max_bytes=MAX_FILE_BYTES)
    data = parse_text(text, where=str(path))
    with naming_lines(text, where=str(path)):
        return read(data)


def save_collective(collective: Collective, path: str | Path) -> None:
    """Write the file form: JSON where the name ends in ``.json``, YAML otherwise."""
    data = plain(_form(collective))
    if Path(path).suffix == ".json":
        text = msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"
    else:
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml_text(yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=None, width=100), path)
    write_file(path, text)


def read(data: Any) -> Collective:
    """A collective from the plain data of its file; errors carry the path of the bad field."""
    if not isinstance(data, dict) or data.get("stretto") != "collective":
        raise InvalidInput("$.stretto: must be 'collective'")
    if data.get("version") != VERSION:
        raise InvalidInput(f"$.version: must be {VERSION}, not {data.get('version')!r}")
    form = convert(data, _File, where="")
    ranks = as_ranks(form.ranks)
    for key in ("start", "end", "place"):
        rows = getattr(form, key)
        if rows is not None and len(rows) != len(ranks):
            raise InvalidInput(f"$.{key}: needs one entry for each of {len(ranks)} ranks, not {len(rows)}")
    _bound(form)
    starts = [list(_starts(row, rank, form.num_chunks)) for rank, row in enumerate(form.start)]
    sets: dict[tuple[int, ...], int] = {}
    ends = [list(_ends(row, rank, form.num_chunks, sets)) for rank, row in enumerate(form.end)]
    _check_parts(starts, ends, list(sets))
    collective = Collective(
        kind=form.kind,
        ranks=ranks,
        num_chunks=form.num_chunks,
        chunks=form.chunks_per_shard or 1,
        in_ptr=_pointers(starts),
        in_chunk=np.array([chunk for row in starts for chunk, _ in row], np.int32),
        in_part=np.array([part for row in starts for _, part in row], np.int32),
        out_ptr=_pointers(ends),
        out_chunk=np.array([chunk for row in ends for chunk, _, _ in row], np.int32),
        out_set=np.array([which for row in ends for _, which, _ in row], np.int32),
        chunk_share=_share(form, starts, ends),
        place=np.array(form.place if form.place is not None else [0] * len(ranks), np.int64),
        part_sets=tuple(sets),
        in_place=form.in_place,
        root=-1 if form.root is None else form.root,
    )
    _check_kind(collective)
    return collective.with_helpers(form.helpers) if form.helpers else collective


def _bound(form: _File) -> None:
    """Refuse runs that stand for too many chunks; they are counted before any list of chunks is made."""
    total = 0
    rows: list[tuple[str, int, Sequence[Chunks | _Start | _End]]] = []
    rows += [("start", rank, row) for rank, row in enumerate(form.start)]
    rows += [("end", rank, row) for rank, row in enumerate(form.end)]
    for key, rank, row in rows:
        for at, entry in enumerate(row):
            chunks = entry.chunks if isinstance(entry, _Start | _End) else entry
            total += len(_run(chunks, f"$.{key}[{rank}][{at}]", form.num_chunks))
            if total > MAX_FILE_ENTRIES:
                raise InvalidInput(f"$.{key}[{rank}]: start and end hold over {MAX_FILE_ENTRIES} chunks")


def _check_parts(
    starts: Sequence[Sequence[tuple[int, int]]],
    ends: Sequence[Sequence[tuple[int, int, str]]],
    sets: Sequence[tuple[int, ...]],
) -> None:
    has = {entry for row in starts for entry in row} if sets else set()
    for row in ends:
        for chunk, which, path in row:
            for part in () if which == ALL_PARTS else sets[which]:
                if (chunk, part) not in has:
                    raise InvalidInput(f"{path}.parts: no rank starts with part {part} of chunk {chunk}")


def _starts(row: Sequence[Chunks | _Start], rank: int, count: int) -> Iterator[tuple[int, int]]:
    for at, entry in enumerate(row):
        chunks, part = (entry.chunks, entry.part) if isinstance(entry, _Start) else (entry, rank)
        if part >= MAX_RANKS:
            raise InvalidInput(f"$.start[{rank}][{at}].part: must be 0..{MAX_RANKS - 1}, not {part}")
        for chunk in _run(chunks, f"$.start[{rank}][{at}]", count):
            yield chunk, part


def _ends(
    row: Sequence[Chunks | _End], rank: int, count: int, sets: dict[tuple[int, ...], int]
) -> Iterator[tuple[int, int, str]]:
    for at, entry in enumerate(row):
        path, which = f"$.end[{rank}][{at}]", ALL_PARTS
        if isinstance(entry, _End):
            if not entry.parts or len(set(entry.parts)) != len(entry.parts):
                raise InvalidInput(f"{path}.parts: must be at least one part, each once")
            which = sets.setdefault(tuple(entry.parts), len(sets))
        for chunk in _run(entry.chunks if isinstance(entry, _End) else entry, path, count):
            yield chunk, which, path


def _run(chunks: int | str, path: str, count: int) -> range:
    """A chunk number, or a run of them written ``first..last``."""
    match = re.fullmatch(r"([0-9]{1,9})\.\.([0-9]{1,9})", chunks) if isinstance(chunks, str) else None
    if isinstance(chunks, str) and match is None:
        raise InvalidInput(f"{path}: must be a chunk or a run such as 0..3, not {chunks!r}")
    first, last = (int(match[1]), int(match[2])) if match else (int(chunks), int(chunks))
    if not 0 <= first <= last < count:
        raise InvalidInput(f"{path}: chunks must be 0..{count - 1} and rise, not {chunks}")
    return range(first, last + 1)


def _share(
    form: _File, starts: Sequence[Sequence[tuple[int, int]]], ends: Sequence[Sequence[tuple[int, int, str]]]
) -> NDArray[np.float64]:
    """Chunk sizes as shares of the largest buffer, which is what `nbytes` counts."""
    if form.share is not None and form.sizes is not None:
        raise InvalidInput("$.share: give share or sizes, not both")
    key = "sizes" if form.share is None else "share"
    given = form.sizes if form.share is None else form.share
    count = form.num_chunks
    values = np.full(count, 1.0 if given is None else given) if not isinstance(given, list) else np.array(given)
    if values.shape != (count,):
        raise InvalidInput(f"$.{key}: needs one number for each of {count} chunks, not {len(values)}")
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(bad):
        raise InvalidInput(f"$.{key}[{bad[0]}]: must be > 0, not {values[bad[0]]:g}")
    if form.share is not None:
        return values.astype(np.float64)
    buffers = [[entry[0] for entry in row] for rows in (starts, ends) for row in rows]
    largest = max(float(values[buffer].sum()) if buffer else 0.0 for buffer in buffers)
    return values / (largest or 1.0)


def _pointers(rows: Sequence[Sequence[Any]]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)


def _check_kind(collective: Collective) -> None:
    """Refuse a file that calls itself by a known name but asks for something else."""
    c = collective
    builders: dict[str, Callable[[], Collective]] = {
        "all_gather": lambda: library.AllGather(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "reduce_scatter": lambda: library.ReduceScatter(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "all_reduce": lambda: library.AllReduce(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "all_to_all": lambda: library.AllToAll(c.ranks, chunks=c.chunks, in_place=c.in_place),
        "broadcast": lambda: library.Broadcast(c.ranks, root=c.root, chunks=c.chunks, in_place=c.in_place),
        "reduce": lambda: library.Reduce(c.ranks, root=c.root, chunks=c.chunks, in_place=c.in_place),
        "gather": lambda: library.Gather(c.ranks, root=c.root, chunks=c.chunks, in_place=c.in_place),
        "scatter": lambda: library.Scatter(c.ranks, root=c.root, chunks=c.chunks, in_place=c.in_place),
    }
    if c.kind in builders:
        whole = c.kind in ("all_gather", "reduce_scatter", "all_to_all")
        most = c.chunks * c.num_ranks * (c.num_ranks if whole else 2)
        if most > 4 * MAX_FILE_ENTRIES or builders[c.kind]() != c:
            raise InvalidInput(f"$.kind: start and end are not those of {c.kind}; call it custom")


def _form(collective: Collective) -> _File:
    c = collective.without_helpers()
    share = c.chunk_share.tolist()
    start: list[list[Chunks | _Start]] = []
    end: list[list[Chunks | _End]] = []
    for rank in range(c.num_ranks):
        low, high = int(c.in_ptr[rank]), int(c.in_ptr[rank + 1])
        entries = zip(c.in_chunk[low:high].tolist(), c.in_part[low:high].tolist(), strict=True)
        start.append([run if part == rank else _Start(run, part) for run, part in _runs(entries)])
        low, high = int(c.out_ptr[rank]), int(c.out_ptr[rank + 1])
        wanted = zip(c.out_chunk[low:high].tolist(), c.out_set[low:high].tolist(), strict=True)
        end.append([run if which == ALL_PARTS else _End(run, list(c.part_sets[which])) for run, which in _runs(wanted)])
    return _File(
        stretto="collective",
        version=VERSION,
        kind=c.kind,
        ranks=c.num_ranks if c.ranks == tuple(range(c.num_ranks)) else list(c.ranks),
        num_chunks=c.num_chunks,
        chunks_per_shard=c.chunks,
        root=None if c.root < 0 else c.root,
        in_place=c.in_place,
        helpers=list(collective.ranks[c.num_ranks :]),
        place=c.place.tolist() if c.place.any() else None,
        share=share[0] if len(set(share)) == 1 else share,
        start=start,
        end=end,
    )


def _runs(entries: Iterator[tuple[int, int]]) -> Iterator[tuple[Chunks, int]]:
    """Join entries (chunk, attribute) with consecutive chunks and equal attributes into runs ``first..last``."""
    first = last = attribute = -2
    for chunk, value in entries:
        if value == attribute and chunk == last + 1:
            last = chunk
            continue
        if first >= 0:
            yield (first if first == last else f"{first}..{last}"), attribute
        first, last, attribute = chunk, chunk, value
    if first >= 0:
        yield (first if first == last else f"{first}..{last}"), attribute
