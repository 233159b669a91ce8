# SPDX-License-Identifier: Apache-2.0
"""Measured times to fit a runtime to: a JSON file that names programs, or a table of the GPU executor's calls."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ..algorithms import algorithm
from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..files import convert, parse_json, read_text
from ..programs import Lowered, Program
from ..programs.formats import load_program
from ..programs.formats.mscclpp_wide import PlanForm, widen_in
from ..programs.fused import PROTOCOLS, Fused, fuse
from ..programs.lower import lower
from ..programs.wide import WideProgram
from ..simulator.runtime_fit import RuntimeRow
from .common import parse_options

MAX_ROWS = 10_000
COLUMNS = ("collective", "algorithm", "ranks", "nbytes", "protocol", "symmetric", "blocks", "microseconds")
TRUTH = {"yes": True, "no": False, "1": True, "0": False, "true": True, "false": False}
JUDGED_EVERY = 3
"""Where a table does not say which rows judge the fit, every third program is judged, at all of its sizes."""

Rows = list[tuple[str, RuntimeRow, bool]]
"""The name of each program, the measurement, and whether it is only judged."""


class _Measured(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    program: str
    nbytes: int
    time_us: float
    zero_copy: bool = False
    wide: str | None = None
    """The form of wide steps, such as ``slices=8``; left out for instruction streams."""
    judge: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    cluster: str
    rows: list[_Measured]


def read_rows(path: Path) -> Rows:
    """Measured times from a file."""
    return _table_rows(path) if path.suffix == ".csv" else _json_rows(path)


def _json_rows(path: Path) -> Rows:
    where = str(path)
    form = convert(parse_json(read_text(path), where=where), _File, where=where)
    if not 1 <= len(form.rows) <= MAX_ROWS:
        raise InvalidInput(f"{where}: rows: must be 1..{MAX_ROWS}, not {len(form.rows)}")
    cluster = Cluster.load(form.cluster)
    streams: dict[tuple[str, str | None], Lowered | WideProgram] = {}
    found = []
    for at, row in enumerate(form.rows):
        key = row.program, row.wide
        how = None if row.wide is None else PlanForm.parse(row.wide)
        if key not in streams:
            streams[key] = _streams(path.parent / row.program, how)
        try:
            one = RuntimeRow(
                lowered=streams[key], cluster=cluster, nbytes=row.nbytes, time_us=row.time_us,
                zero_copy=row.zero_copy, form=how,
            )  # fmt: skip
        except InvalidInput as error:
            raise InvalidInput(f"{where}: rows[{at}].{error}") from None
        found.append((row.program, one, row.judge))
    return found


def _streams(path: Path, form: PlanForm | None) -> Lowered | WideProgram:
    """What ran: the wide steps of a program in some form, or its instruction streams."""
    program = load_program(path)
    if form is not None:
        if not isinstance(program, Program):
            raise InvalidInput(f"{path}: wide steps are made of a program in the text form")
        return widen_in(program, form)
    lowered = program if isinstance(program, Lowered) else lower(program)  # type: ignore[arg-type]
    lowered.verify()
    return lowered


def _table_rows(path: Path) -> Rows:
    """The times of a table, one call of the GPU executor in each line; all ranks shared one GPU.

    Several lines about the same call are one time, their median.
    """
    lines = list(csv.DictReader(StringIO(read_text(path))))
    if not 1 <= len(lines) <= MAX_ROWS:
        raise InvalidInput(f"{path}: must have 1..{MAX_ROWS} lines below its heading, not {len(lines)}")
    missing = [name for name in COLUMNS if name not in lines[0]]
    if missing:
        raise InvalidInput(f"{path}: columns: {missing[0]} is missing; it needs {', '.join(COLUMNS)}")
    programs: dict[tuple[str, ...], int] = {}
    calls: dict[tuple[str, ...], list[float]] = defaultdict(list)
    found: dict[tuple[str, ...], tuple[str, RuntimeRow, bool]] = {}
    for at, line in enumerate(lines):
        try:
            fused, one = _table_row(line)
            number = programs.setdefault(tuple(line[name] for name in COLUMNS[:3] + COLUMNS[4:6]), len(programs))
            judge = _truth(line, "judge") if line.get("judge") else number % JUDGED_EVERY == JUDGED_EVERY - 1
        except InvalidInput as error:
            raise InvalidInput(f"{path}: line {at + 2}: {error}") from None
        memory = "symmetric" if fused.symmetric else "staged"
        label = f"{line['collective']} {fused.name} on {line['ranks']}, {fused.protocol}, {memory}, {one.blocks} blocks"
        call = (*(line[name] for name in COLUMNS[:-1]), str(judge))
        calls[call].append(one.time_us)
        found[call] = label, one, judge
    return [(label, replace(one, time_us=median(calls[call])), judge) for call, (label, one, judge) in found.items()]


def _table_row(line: dict[str, str]) -> tuple[Fused, RuntimeRow]:
    ranks, nbytes, blocks = (_whole(line, name) for name in ("ranks", "nbytes", "blocks"))
    if line["protocol"] not in PROTOCOLS:
        raise unknown("protocol", line["protocol"], PROTOCOLS)
    try:
        took = float(line["microseconds"])
    except ValueError:
        raise InvalidInput(f"microseconds: must be a number, not {line['microseconds']!r}") from None
    fused = _fused(line["algorithm"], line["collective"], ranks, line["protocol"], _truth(line, "symmetric"))
    cluster = Cluster.preset("shared_gpu", nodes=ranks)
    return fused, RuntimeRow(lowered=fused, cluster=cluster, nbytes=nbytes, time_us=took, blocks=blocks)


@lru_cache(maxsize=1024)
def _fused(name: str, kind: str, ranks: int, protocol: str, symmetric: bool) -> Fused:
    """The steps of an algorithm such as ``direct(steps=1)``."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", name)
    if match is None:
        raise InvalidInput(f"algorithm: must be NAME or NAME(KEY=VALUE,...), not {name!r}")
    options: dict[str, Any] = parse_options([pair for pair in (match[2] or "").split(",") if pair])
    return fuse(algorithm(match[1], kind, ranks, **options), protocol=protocol, symmetric=symmetric)


def _whole(line: dict[str, str], name: str) -> int:
    text = line[name] or ""
    if not text.isdecimal() or len(text) > 15 or not int(text):
        raise InvalidInput(f"{name}: must be a whole number > 0, not {text!r}")
    return int(text)


def _truth(line: dict[str, str], name: str) -> bool:
    if line[name] not in TRUTH:
        raise unknown(name, str(line[name]), TRUTH)
    return TRUTH[line[name]]
