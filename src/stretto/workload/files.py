# SPDX-License-Identifier: Apache-2.0
"""Workloads in files: one iteration's ops in versioned YAML or JSON.

.. code-block:: yaml

    stretto: workload
    version: 1
    name: toy
    ranks: 8
    samples: 256                  # of one iteration; unit: samples
    groups:                       # sets of groups that several ops use
      pairs: [[0, 1], [2, 3], [4, 5], [6, 7]]
      rows: [0..3, 4..7]          # a run of ranks; 0..6/2 is every second one
    ops:                          # in the order of submission
    - {name: forward, duration_us: 900, after: [{op: update, lag: 1}]}
    - {name: backward, duration_us: 1800, ranks: 0..7, after: [forward]}
    - {name: gradients, kind: all_reduce, nbytes: 50000000, groups: rows, after: [backward]}
    - {name: update, duration_us: 100, after: [gradients]}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from ..errors import InvalidInput, unknown
from ..files import (
    MAX_BYTES,
    convert,
    exists,
    is_folder,
    naming_lines,
    parse_text,
    plain,
    read_text,
    write_file,
    yaml_text,
)
from .dag import COMPUTE, MAX_OPS, MAX_RANKS, Dep, Op, Why, Workload
from .registry import MODELS, family_of, from_spec, is_spec

VERSION = 1
"""Largest YAML file: reading YAML takes many seconds per megabyte, reading the same structure as JSON does not."""
MAX_ENTRIES = 1 << 23
"""Limit on the ranks that all ops of a file name together, because runs such as 0..7 are short to write."""
KINETO = re.compile(r'"traceEvents"\s*:')

Count = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
Run = Annotated[str, Meta(max_length=32)]
Ranks = Run | Annotated[list[Count | Run], Meta(max_length=MAX_RANKS)]


class _Dep(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    op: str
    lag: int = 0
    why: Why = "data"


class _Op(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    kind: str = COMPUTE
    stream: str = COMPUTE
    phase: str = ""
    ranks: Ranks = []
    duration_us: float = 0.0
    durations_us: list[float] = []
    nbytes: float = 0.0
    groups: str = ""
    root: int = 0
    encoding: str = ""
    at_most: bool = False
    rank_nbytes: list[float] = []
    wait_us: float = 0.0
    after: list[str | _Dep] = []


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["workload"]
    version: int
    name: str
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    samples: float = 0.0
    unit: str = "samples"
    notes: list[str] = []
    groups: dict[str, list[Ranks]] = {}
    ops: Annotated[list[_Op], Meta(min_length=1, max_length=MAX_OPS)]


def load(source: str | Path) -> Workload:
    """A workload from ``model:variant[,key=value...]``, or from a file: Stretto's form, a Kineto or a Chakra trace."""
    if isinstance(source, str):
        if is_spec(source):
            return from_spec(source)
        if not exists(source) and "/" not in source and not Path(source).suffix:
            raise InvalidInput(f"{unknown('model', family_of(source), MODELS)} (or give the path of a file)")
    path = Path(source)
    if path.suffix == ".et" or (is_folder(path) and any(path.glob("*.et"))):
        from . import chakra

        return chakra.read(path)
    if is_kineto(path):
        from . import kineto

        return kineto.read(path)
    return loads(read_text(path), where=str(path))


def loads(text: str, *, where: str = "<text>") -> Workload:
    """A workload from the text of Stretto's own file form; `where` names the text in errors."""
    if not text.strip():
        raise InvalidInput(f"{where}: is empty")
    data = parse_text(text, where=where)
    with naming_lines(text, where=where):
        return read(data)


def save(workload: Workload, path: str | Path) -> None:
    """Write the versioned form: JSON where the name ends in ``.json``, YAML otherwise."""
    json = Path(path).suffix == ".json"
    text = dumps(workload, json=json)
    if not json:
        yaml_text(text, path)
    if len(text) > MAX_BYTES:
        raise InvalidInput(f"{path}: {len(text)} bytes is more than the limit of {MAX_BYTES}")
    write_file(path, text)


def dumps(workload: Workload, *, json: bool = False) -> str:
    """The workload in Stretto's own file form, as YAML or JSON text."""
    data = plain(_form(workload))
    try:
        if json:
            return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return str(yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=None, width=100))
    except UnicodeEncodeError:
        raise InvalidInput(f"{workload.name!a}: a name is not valid Unicode text") from None


def read(data: Any) -> Workload:
    """A workload from the plain data of its file; errors carry the path of the bad field."""
    if not isinstance(data, dict) or data.get("stretto") != "workload":
        raise InvalidInput(
            "$.stretto: must be 'workload'; this is neither a workload file nor a profiler trace (no \"traceEvents\")"
        )
    if data.get("version") != VERSION:
        raise InvalidInput(f"$.version: must be {VERSION}, not {data.get('version')!r}")
    form = convert(data, _File, where="")
    room = _Room()
    sets = {
        name: tuple(_expand(group, f"$.groups.{name}[{at}]", room) for at, group in enumerate(groups))
        for name, groups in form.groups.items()
    }
    return Workload(
        name=form.name,
        num_ranks=form.ranks,
        ops=tuple(_op(op, f"$.ops[{at}] ({op.name})", sets, room) for at, op in enumerate(form.ops)),
        samples=form.samples,
        unit=form.unit,
        notes=tuple(form.notes),
    )


def digest(workload: Workload) -> str:
    """A short hash of the ranks and ops, which a plan depends on; name and notes are left out."""
    form = _form(workload)
    groups = dict(sorted(form.groups.items()))
    text = msgspec.json.encode(plain([form.ranks, groups, form.ops], keep_floats=True))
    return hashlib.sha256(text).hexdigest()[:16]


def is_kineto(path: Path) -> bool:
    """Whether a path is a profiler trace, which may be larger than Stretto's own files, compressed, or one file per
    rank.
    """
    if path.suffix == ".gz" or is_folder(path):
        return True
    try:
        if not path.is_file():
            return False
        if path.stat().st_size > MAX_BYTES:
            return path.suffix == ".json"
    except OSError:
        return False
    text = read_text(path)
    return text.lstrip("\ufeff \t\r\n").startswith("{") and KINETO.search(text) is not None


def _op(op: _Op, where: str, sets: dict[str, tuple[tuple[int, ...], ...]], room: _Room) -> Op:
    if op.groups and op.groups not in sets:
        raise InvalidInput(f"{where}.groups: {unknown('set of groups', op.groups, sets)}")
    room.take(sum(len(group) for group in sets.get(op.groups, ())), f"{where}.groups")
    return Op(
        name=op.name,
        kind=op.kind,
        after=tuple(Dep(op=d) if isinstance(d, str) else Dep(op=d.op, lag=d.lag, why=d.why) for d in op.after),
        stream=op.stream,
        phase=op.phase,
        ranks=_expand(op.ranks, f"{where}.ranks", room),
        duration_us=op.duration_us,
        durations_us=tuple(op.durations_us),
        nbytes=op.nbytes,
        groups=sets[op.groups] if op.groups else (),
        root=op.root,
        encoding=op.encoding,
        at_most=op.at_most,
        rank_nbytes=tuple(op.rank_nbytes),
        wait_us=op.wait_us,
    )


class _Room:
    """Counts the ranks that runs stand for before they are expanded; equal runs are expanded once."""

    def __init__(self) -> None:
        self.left = MAX_ENTRIES
        self.seen: dict[range, tuple[int, ...]] = {}

    def take(self, count: int, where: str) -> None:
        self.left -= count
        if self.left < 0:
            raise InvalidInput(f"{where}: all ops together name over {MAX_ENTRIES} ranks")


def _expand(ranks: str | Sequence[int | str], where: str, room: _Room) -> tuple[int, ...]:
    if isinstance(ranks, str):
        run = _run(ranks, where)
        room.take(len(run), where)
        if run not in room.seen:
            room.seen[run] = tuple(run)
        return room.seen[run]
    result: list[int] = []
    for item in ranks:
        if isinstance(item, str):
            run = _run(item, where)
            room.take(len(run), where)
            result.extend(run)
        else:
            room.take(1, where)
            result.append(item)
    return tuple(result)


def _run(text: str, where: str) -> range:
    """The ranks of ``first..last`` or ``first..last/step``."""
    match = re.fullmatch(r"([0-9]{1,7})\.\.([0-9]{1,7})(?:/([0-9]{1,7}))?", text)
    if match is None:
        raise InvalidInput(f"{where}: must be ranks or a run such as 0..7 or 0..56/8, not {text!r}")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if not step or not first <= last <= MAX_RANKS:
        raise InvalidInput(f"{where}: {text} must rise, to {MAX_RANKS} at most, in steps >= 1")
    return range(first, last + 1, step)


def _form(workload: Workload) -> _File:
    names: dict[tuple[tuple[int, ...], ...], str] = {}
    for op in workload.comm_ops:
        if op.groups:
            names.setdefault(op.groups, f"g{len(names)}")
    packed = _remember(_pack)
    return _File(
        stretto="workload",
        version=VERSION,
        name=workload.name,
        ranks=workload.num_ranks,
        samples=_plain(workload.samples),
        unit=workload.unit,
        notes=list(workload.notes),
        groups={name: [packed(group) for group in groups] for groups, name in names.items()},
        ops=[
            _Op(
                name=op.name,
                kind=op.kind,
                stream=op.stream,
                phase=op.phase,
                ranks=packed(op.ranks),
                duration_us=_plain(op.duration_us),
                durations_us=[_plain(value) for value in op.durations_us],
                nbytes=_plain(op.nbytes),
                groups=names[op.groups] if op.groups else "",
                root=op.root,
                encoding=op.encoding,
                at_most=op.at_most,
                rank_nbytes=[_plain(value) for value in op.rank_nbytes],
                wait_us=_plain(op.wait_us),
                after=[
                    dep.op if not dep.lag and dep.why == "data" else _Dep(op=dep.op, lag=dep.lag, why=dep.why)
                    for dep in op.after
                ],
            )
            for op in workload.ops
        ],
    )


def _remember(function: Callable[[tuple[int, ...]], Ranks]) -> Callable[[tuple[int, ...]], Ranks]:
    known: dict[tuple[int, ...], Ranks] = {}

    def call(ranks: tuple[int, ...]) -> Ranks:
        if ranks not in known:
            known[ranks] = function(ranks)
        return known[ranks]

    return call


def _pack(ranks: tuple[int, ...]) -> Ranks:
    """Ranks as text: a rising run of three or more becomes one word.

    >>> _pack((0, 1, 2, 3)), _pack((0, 8, 16, 5)), _pack((4, 2))
    ('0..3', ['0..16/8', 5], [4, 2])
    """
    result: list[int | str] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        end = at + 1
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at < 3:
            result.append(ranks[at])
            at += 1
            continue
        result.append(f"{ranks[at]}..{ranks[end - 1]}" + (f"/{step}" if step > 1 else ""))
        at = end
    return result[0] if len(result) == 1 and isinstance(result[0], str) else result


def _plain(value: float) -> float:
    """A whole number as int, any other number as float; both forms read back as the same number."""
    return int(value) if value and float(value).is_integer() else float(value)
